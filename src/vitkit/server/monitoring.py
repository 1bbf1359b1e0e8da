"""Prometheus metrics, and a rate-limited log that a separate thread writes."""

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
    """The Prometheus metrics of one service, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        count = {"registry": self.registry}
        self.requests = Counter("vitkit_requests", "Requests answered", ["path", "status"], **count)
        self.seconds = Histogram(
            "vitkit_request_seconds",
            "Time from a request's head to its response",
            ["path"],
            buckets=SECONDS,
            **count,
        )
        self.images = Counter("vitkit_images", "Images by outcome", ["outcome"], **count)
        self.batch = Histogram("vitkit_batch_images", "Images per batch", buckets=SIZES, **count)
        self.model_seconds = Histogram(
            "vitkit_model_seconds", "Model time per batch", ["kind"], buckets=SECONDS, **count
        )
        self.decode_seconds = Histogram(
            "vitkit_decode_seconds", "Decoding time per image", buckets=SECONDS, **count
        )
        self.waiting = Gauge("vitkit_waiting_images", "Images accepted but not answered yet", **count)
        self.in_flight = Gauge("vitkit_in_flight_requests", "Requests being answered", **count)
        self.body_bytes = Gauge("vitkit_held_bytes", "Request bodies in memory", **count)
        self.reloads = Counter("vitkit_reloads", "Model reloads", ["outcome"], **count)
        self.decoder_restarts = Counter(
            "vitkit_decoder_restarts", "Decoding processes that died or timed out", **count
        )
        for counter, outcomes in (
            (self.images, ("answered", "unreadable")),
            (self.reloads, ("loaded", "refused")),
        ):
            for outcome in outcomes:
                counter.labels(outcome)  # exported as 0 from the start, so that alerts see the first increase


MAX_MESSAGE = 1000  # characters
MAX_TRACEBACK = 8000  # characters
MAX_LINES = 1000  # waiting to be written
PER_SECOND = 100  # lines: a client that is refused a thousand times per second must not fill the disk
REPORT_INTERVAL = 10.0  # seconds between two reports of a count
DRAIN = 1.0  # seconds to write the last lines when the service stops
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Writer(threading.Thread):
    """Writes lines to a file descriptor; drops lines above the rate limit or when the queue is full."""

    def __init__(self, file: int) -> None:
        super().__init__(name="log", daemon=True)
        self.file = file
        self.lines: deque[str] = deque()
        self.changed = threading.Condition()
        self.dropped, self.first_drop = 0, 0.0
        self.second, self.count = 0, 0
        self.start()

    def put(self, line: str, important: bool = False) -> None:
        """Queue a line without blocking, even if nobody reads the file. `important` skips the rate limit."""
        with self.changed:
            if len(self.lines) >= MAX_LINES or (not important and self.exceeds_rate()):
                self.first_drop = self.first_drop if self.dropped else time.monotonic()
                self.dropped += 1
            else:
                self.lines.append(line)
            self.changed.notify_all()

    def exceeds_rate(self) -> bool:
        now = int(time.monotonic())
        self.second, self.count = now, 1 + (self.count if now == self.second else 0)
        return self.count > PER_SECOND

    def run(self) -> None:
        while True:
            line = self.next_line()
            with suppress(OSError):  # the reader is gone
                self.write(line.encode("utf-8", "backslashreplace") + b"\n")
            with self.changed:
                self.lines.popleft()
                self.changed.notify_all()

    def next_line(self) -> str:
        """Wait for the oldest line, which stays in the queue until it is written."""
        with self.changed:
            while True:
                left = self.first_drop + REPORT_INTERVAL - time.monotonic()
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
        """Wait, for a limited time, until everything is written."""
        with self.changed:
            if self.dropped:
                self.report()
                self.changed.notify_all()
            self.changed.wait_for(lambda: not self.lines, seconds)


class Handler(logging.Handler):
    """Formats log records as lines for a Writer."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.writer = writer
        self.setFormatter(Line(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # logging's own handling writes to stderr and may block
            line = f"a log record that cannot be formatted: {type(error).__name__}"
        self.writer.put(line, record.levelno >= logging.ERROR)


class Line(logging.Formatter):
    """Clips and escapes messages; only tracebacks have more than one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(escaped(line) for line in text[-MAX_TRACEBACK:].splitlines())


class RateLimitedLog:
    """At most one warning per `REPORT_INTERVAL` about a frequent event, with the number of events."""

    def __init__(self, log: logging.Logger, events: str) -> None:
        self.log, self.events = log, events
        self.count, self.last = 0, -REPORT_INTERVAL

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        self.count += 1
        if now - self.last >= REPORT_INTERVAL:
            self.log.warning("%s (since the last such line: %d %s)", text, self.count, self.events)
            self.count, self.last = 0, now


def escaped(text: str, limit: int = MAX_MESSAGE) -> str:
    """The text clipped to `limit` characters, with control characters as \\xNN."""
    clipped = text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], clipped)


def descriptor(stream: TextIO, default: int) -> int:
    """The file descriptor of a stream, to bypass its buffer: a blocked write would hold the buffer's lock."""
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return default


def start_log() -> Writer:
    """Log to stderr, without uvicorn's own lines, with which any client could fill the disk."""
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
    """Print a line to stdout without blocking if nobody reads it."""
    Writer(descriptor(sys.stdout, 1)).put(text)
