"""Admission control: how many requests at a time, batched together, and until when they are answered."""

import asyncio
import threading
import time
from asyncio import wrap_future
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from vitkit.data.decode import BadImage
from vitkit.server.decoder import Decoder, Share, Task
from vitkit.server.guard import busy
from vitkit.server.inputs import Images
from vitkit.server.monitoring import Metrics
from vitkit.server.served_model import Served, explain
from vitkit.server.settings import Settings

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


SMALL = 64 * 1024  # bytes that the event loop reads or writes itself


class AdmissionControl:
    """The state of a service. All but the decoder and the batcher belongs to the thread of the event loop."""

    def __init__(self, settings: Settings, served: Served) -> None:
        self.settings, self.served, self.metrics = settings, served, Metrics()
        self.decoder = Decoder(settings.workers, settings.max_pixels, self.metrics)
        self.batcher = Batcher(settings.max_batch, settings.max_wait_ms / 1000, self.metrics)
        self.waiting, self.held, self.looking = 0, 0, 0  # images, bytes, requests for attention
        self.stopping = False
        self.parser = ThreadPoolExecutor(1, "parse")
        self.parser.submit(int)  # its thread is there from the start
        self.batcher.start()

    @property
    def ready(self) -> bool:
        return not self.stopping and self.batcher.is_alive()

    def check_room(self, kind: str) -> None:
        """Before a body is read: whether it would be of any use."""
        if self.waiting >= self.settings.queue:
            raise busy("too many images are waiting; try again")
        if kind == "attention" and self.looking >= self.settings.attention_queue:
            raise busy("too many requests for attention are waiting; try again")

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Inside, bytes of a body are counted as they come, until the request is answered."""
        mine = 0

        def hold(count: int) -> None:
            nonlocal mine
            if self.held + count > self.settings.held_bytes:
                raise busy("too many bytes are waiting; try again")
            mine += count
            self.count_bytes(count)

        try:
            yield hold
        finally:
            self.count_bytes(-mine)

    def count_bytes(self, count: int) -> None:
        self.held += count
        self.metrics.held.set(self.held)

    @contextmanager
    def room(self, kind: str, images: int) -> Iterator[None]:
        """Inside, so many images have a place; 503 where there is none."""
        self.check_room(kind)
        if self.waiting and self.waiting + images > self.settings.queue:
            raise busy("too many images are waiting; try again")
        self.count(kind, images)
        try:
            yield
        finally:
            self.count(kind, -images)

    def count(self, kind: str, images: int) -> None:
        self.waiting += images
        self.looking += images if kind == "attention" else 0
        self.metrics.waiting.set(self.waiting)

    async def ask(
        self, request: Request, kind: str, served: Served, images: Images, target: int | None = None
    ) -> list[Any]:
        """For each image what the model says, or a BadImage; all of the same model."""
        until = time.monotonic() + self.settings.timeout
        with self.room(kind, len(images)):
            share: Share[Task] = Share()
            tasks = [
                asyncio.create_task(self.one(kind, served, content, share, until, target))
                for _, content in images
            ]
            try:
                found = await unless_gone(request, tasks, self.settings.timeout)
            except TimeoutError:
                raise busy(f"not done within {self.settings.timeout:g} s; try again") from None
        for answer in found:
            self.metrics.images.labels("unreadable" if isinstance(answer, BadImage) else "answered").inc()
        return found

    async def one(
        self, kind: str, served: Served, content: bytes, share: Share[Task], until: float, target: int | None
    ) -> Any:
        try:
            pixels = await wrap_future(self.decoder.submit(content, served.view, share))
        except BadImage as error:
            return error
        return await wrap_future(self.batcher.submit(Job(kind, served, pixels, until, target)))

    async def aside(self, size: int, function: Callable[..., Any], *values: Any) -> Any:
        """A function of something of so many bytes, in another thread where the event loop would stop."""
        if size <= SMALL:
            return function(*values)
        return await asyncio.get_running_loop().run_in_executor(self.parser, function, *values)

    def close(self) -> None:
        self.parser.shutdown(wait=False, cancel_futures=True)
        self.batcher.stop()
        self.decoder.close()


async def unless_gone(request: Request, tasks: "list[asyncio.Task[Any]]", seconds: float) -> list[Any]:
    """The results of the tasks, which are given up when the client goes away or the time is over."""
    work, gone = asyncio.gather(*tasks), asyncio.create_task(disconnected(request))
    try:
        either: set[asyncio.Future[Any]] = {work, gone}
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if gone.done():
            raise ClientDisconnect
        raise TimeoutError
    finally:
        for task in (*tasks, gone):  # one that failed ends the others
            task.cancel()
        await asyncio.gather(work, *tasks, gone, return_exceptions=True)  # so that no exception is missed


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
