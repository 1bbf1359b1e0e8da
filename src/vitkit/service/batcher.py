"""Images of many requests through the model together: one thread, and no batch of two models."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitkit.service.attention import explain
from vitkit.service.metrics import Metrics
from vitkit.service.served import Served

KINDS = ("predict", "embed", "attention")


@dataclass(frozen=True, eq=False)
class Job:
    """One image, by which model it is to be answered, what is asked of it, and until when."""

    kind: str
    served: Served
    pixels: Tensor  # uint8 (3, h, w)
    until: float  # by time.monotonic
    target: int | None = None  # whose class map
    future: "Future[Any]" = field(default_factory=Future)

    def goes_with(self, other: "Job") -> bool:
        return self.kind == other.kind and self.served is other.served


class Batcher(threading.Thread):
    """Takes what waits, as much of one kind as a batch may hold, after a moment in which more may come."""

    def __init__(self, most: int, patience: float, metrics: Metrics) -> None:
        super().__init__(name="model", daemon=True)
        self.most, self.patience, self.metrics = most, patience, metrics
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopped = False

    def submit(self, job: Job) -> "Future[Any]":
        with self.changed:
            self.waiting.append(job)
            self.changed.notify()
        return job.future

    def stop(self) -> None:
        """After what waits has been answered."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self) -> None:
        while jobs := self.take():
            ready = [job for job in jobs if still_wanted(job)]
            if ready:
                self.work(ready)

    def take(self) -> list[Job]:
        """The next batch; nothing when it is over."""
        with self.changed:
            while not self.waiting:
                if self.stopped:
                    return []
                self.changed.wait()
            first = self.waiting[0]
            most = 1 if first.kind == "attention" else self.most
            until = time.monotonic() + self.patience
            while self.count(first) < most and (left := until - time.monotonic()) > 0 and not self.stopped:
                self.changed.wait(left)
            return self.taken(first, most)

    def count(self, first: Job) -> int:
        return sum(job.goes_with(first) for job in self.waiting)

    def taken(self, first: Job, most: int) -> list[Job]:
        """Up to `most` jobs that go with the first one, out of the queue; the others keep their order."""
        batch: list[Job] = []
        rest: deque[Job] = deque()
        for job in self.waiting:
            (batch if len(batch) < most and job.goes_with(first) else rest).append(job)
        self.waiting = rest
        return batch

    def work(self, jobs: list[Job]) -> None:
        """Every job gets its answer or the error, whatever it is; one without would wait for ever."""
        begun, kind = time.monotonic(), jobs[0].kind
        try:
            found = computed(jobs)
        except Exception as error:
            for job in jobs:
                job.future.set_exception(error)
            return
        self.metrics.model_seconds.labels(kind).observe(time.monotonic() - begun)
        self.metrics.batch.observe(len(jobs))
        for job, answer in zip(jobs, found, strict=True):
            job.future.set_result(answer)


def still_wanted(job: Job) -> bool:
    """Not when whoever asked has gone or has waited for too long."""
    if not job.future.set_running_or_notify_cancel():
        return False
    if job.until < time.monotonic():
        job.future.set_exception(TimeoutError())
        return False
    return True


def computed(jobs: list[Job]) -> list[Any]:
    """Logits or features, a row for each; of attention the maps of one, and its logits."""
    served, images = jobs[0].served, torch.stack([job.pixels for job in jobs])
    if jobs[0].kind == "embed":
        return list(served.features(images))
    values = served.engine(images) if served.model.config.classes else None
    if jobs[0].kind == "predict":
        assert values is not None  # a model without a head is refused before
        return list(values)
    (job,) = jobs
    target = job.target if job.target is not None or values is None else int(values[0].argmax())
    return [(explain(served.model, job.pixels, target), values)]  # type: ignore[arg-type]
