"""Prometheus metrics, and a log of short lines written by a thread of its own."""

import logging
import os
import re
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TextIO

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


LONGEST = 1000  # characters of a message
LONGEST_TRACE = 8000  # characters of a traceback
MOST_LINES = 1000  # that wait to be written
PER_SECOND = 100  # lines: a client that is refused a thousand times a second must not fill a disk
EVERY = 10.0  # seconds from the first dropped line to the line that counts them
DRAIN = 1.0  # seconds for the last lines when the service stops
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Writer(threading.Thread):
    """Writes lines to a file descriptor; what comes too fast, or finds the queue full, is dropped."""

    def __init__(self, file: int) -> None:
        super().__init__(name="log", daemon=True)
        self.file = file
        self.lines: deque[str] = deque()
        self.changed = threading.Condition()
        self.dropped, self.first_drop = 0, 0.0
        self.second, self.count = 0, 0
        self.start()

    def put(self, line: str, important: bool = False) -> None:
        """Never waits for whoever reads the file. What is important may come as fast as it likes."""
        with self.changed:
            if len(self.lines) >= MOST_LINES or (not important and self.is_fast()):
                self.first_drop = self.first_drop if self.dropped else time.monotonic()
                self.dropped += 1
            else:
                self.lines.append(line)
            self.changed.notify_all()

    def is_fast(self) -> bool:
        now = int(time.monotonic())
        self.second, self.count = now, 1 + (self.count if now == self.second else 0)
        return self.count > PER_SECOND

    def run(self) -> None:
        while True:
            line = self.next_line()
            with suppress(OSError):  # nobody reads any more
                self.write(line.encode("utf-8", "backslashreplace") + b"\n")
            with self.changed:
                self.lines.popleft()
                self.changed.notify_all()

    def next_line(self) -> str:
        """The oldest line, which stays in the queue until it is written."""
        with self.changed:
            while True:
                left = self.first_drop + EVERY - time.monotonic()
                if self.dropped and left <= 0:
                    self.report()
                if self.lines:
                    return self.lines[0]
                self.changed.wait(left if self.dropped else None)

    def report(self) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self.lines.append(f"{stamp} WARNING {self.dropped} log lines were dropped")
        self.dropped = 0

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.file, data) :]

    def drain(self, seconds: float = DRAIN) -> None:
        """Wait until everything is written, but not for long."""
        with self.changed:
            if self.dropped:
                self.report()
                self.changed.notify_all()
            self.changed.wait_for(lambda: not self.lines, seconds)


class Handler(logging.Handler):
    """Log records as lines for a writer."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.writer = writer
        self.setFormatter(Line(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # logging's own way would write to standard error, and might block
            line = f"a log record that cannot be formatted: {type(error).__name__}"
        self.writer.put(line, record.levelno >= logging.ERROR)


class Line(logging.Formatter):
    """Clipped and escaped; only a traceback has more than one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(escaped(line) for line in text[-LONGEST_TRACE:].splitlines())


class Seldom:
    """One line in `EVERY` seconds about something that may happen thousands of times, with a count."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self.log, self.what = log, what
        self.count, self.last = 0, -EVERY

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        self.count += 1
        if now - self.last >= EVERY:
            self.log.warning("%s (since the last such line: %d %s)", text, self.count, self.what)
            self.count, self.last = 0, now


def escaped(text: str, most: int = LONGEST) -> str:
    """The beginning of a text, with control characters as \\xNN."""
    clipped = text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], clipped)


def descriptor(stream: TextIO, default: int) -> int:
    """Where a stream writes to. Written past its buffer, whose lock a blocked thread would keep for ever."""
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return default


def start_log() -> Writer:
    """Our lines on standard error, and none of uvicorn's: any stranger could fill a disk with those."""
    writer = Writer(descriptor(sys.stderr, 2))
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, Handler):
            root.removeHandler(handler)
    root.addHandler(Handler(writer))
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    return writer


def announce(text: str) -> None:
    """A line on standard output, whether or not somebody reads it."""
    Writer(descriptor(sys.stdout, 1)).put(text)
