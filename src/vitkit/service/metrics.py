"""What the service counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters, gauges and histograms of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        count = {"registry": self.registry}
        self.requests = Counter("vitkit_requests", "Requests answered", ["path", "status"], **count)
        self.seconds = Histogram(
            "vitkit_request_seconds",
            "From a request's head to its answer",
            ["path"],
            buckets=SECONDS,
            **count,
        )
        self.images = Counter("vitkit_images", "Images by what became of them", ["outcome"], **count)
        self.batch = Histogram("vitkit_batch_images", "Images computed together", buckets=SIZES, **count)
        self.model_seconds = Histogram(
            "vitkit_model_seconds", "Time of a batch in the model", ["kind"], buckets=SECONDS, **count
        )
        self.decode_seconds = Histogram(
            "vitkit_decode_seconds", "Time of an image in a decoder", buckets=SECONDS, **count
        )
        self.waiting = Gauge("vitkit_waiting_images", "Images accepted and not answered yet", **count)
        self.in_flight = Gauge("vitkit_in_flight_requests", "Requests being answered", **count)
        self.held = Gauge("vitkit_held_bytes", "Bodies in memory", **count)
        self.reloads = Counter("vitkit_reloads", "New model files", ["outcome"], **count)
        self.decoder_restarts = Counter(
            "vitkit_decoder_restarts", "Decoders that died or took too long", **count
        )
        for counter, outcomes in (
            (self.images, ("answered", "unreadable")),
            (self.reloads, ("loaded", "refused")),
        ):
            for outcome in outcomes:
                counter.labels(outcome)  # 0 from the start, so that an alarm sees the first one
