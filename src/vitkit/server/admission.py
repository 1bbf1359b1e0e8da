"""Admission control: a bounded queue, dynamic batching and request timeouts."""

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
from vitkit.server.served_model import Served, attention_maps
from vitkit.server.settings import Settings

KINDS = ("predict", "embed", "attention")


@dataclass(frozen=True, eq=False)
class Job:
    """One decoded image for the model."""

    kind: str  # one of KINDS
    served: Served
    pixels: Tensor  # uint8 (3, h, w)
    deadline: float  # by time.monotonic
    target: int | None = None  # the class of the class map
    future: "Future[Any]" = field(default_factory=Future)

    def batches_with(self, other: "Job") -> bool:
        return self.kind == other.kind and self.served is other.served


@dataclass(frozen=True, eq=False)
class Output:
    """The model's outputs for an image, and the height and width of the image itself."""

    values: Tensor
    size: tuple[int, int]

    def numel(self) -> int:
        return self.values.numel()


class Batcher(threading.Thread):
    """Runs the model on batches of jobs of one kind, after a short wait in which a batch can fill up."""

    def __init__(self, max_batch: int, max_wait: float, metrics: Metrics) -> None:
        super().__init__(name="model", daemon=True)
        self.max_batch, self.max_wait, self.metrics = max_batch, max_wait, metrics
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopped = False

    def submit(self, job: Job) -> "Future[Any]":
        with self.changed:
            self.waiting.append(job)
            self.changed.notify()
        return job.future

    def stop(self) -> None:
        """End the thread once the waiting jobs are done."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self) -> None:
        while jobs := self.next_batch():
            active = [job for job in jobs if is_active(job)]
            if active:
                self.run_batch(active)

    def next_batch(self) -> list[Job]:
        """Wait for the next batch; empty after stop()."""
        with self.changed:
            while not self.waiting:
                if self.stopped:
                    return []
                self.changed.wait()
            first = self.waiting[0]
            size = 1 if first.kind == "attention" else self.max_batch
            deadline = time.monotonic() + self.max_wait
            while self.count(first) < size and (left := deadline - time.monotonic()) > 0 and not self.stopped:
                self.changed.wait(left)
            return self.pop_batch(first, size)

    def count(self, first: Job) -> int:
        return sum(job.batches_with(first) for job in self.waiting)

    def pop_batch(self, first: Job, size: int) -> list[Job]:
        """Remove up to `size` jobs that batch with the first from the queue; the others keep their order."""
        batch: list[Job] = []
        rest: deque[Job] = deque()
        for job in self.waiting:
            (batch if len(batch) < size and job.batches_with(first) else rest).append(job)
        self.waiting = rest
        return batch

    def run_batch(self, jobs: list[Job]) -> None:
        """Resolve every job with a result or the error: a job that is never resolved blocks its request."""
        start, kind = time.monotonic(), jobs[0].kind
        try:
            results = compute(jobs)
        except Exception as error:
            for job in jobs:
                job.future.set_exception(error)
            return
        self.metrics.model_seconds.labels(kind).observe(time.monotonic() - start)
        self.metrics.batch.observe(len(jobs))
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)


def is_active(job: Job) -> bool:
    """Whether a job still needs its result: it is neither cancelled nor past its deadline."""
    if not job.future.set_running_or_notify_cancel():
        return False
    if job.deadline < time.monotonic():
        job.future.set_exception(TimeoutError())
        return False
    return True


def compute(jobs: list[Job]) -> list[Any]:
    """Logits or features of each job, or for one attention job its maps and logits."""
    served, images = jobs[0].served, torch.stack([job.pixels for job in jobs])
    if jobs[0].kind == "embed":
        return list(served.features(images))
    logits = served.engine(images) if served.model.config.classes else None
    if jobs[0].kind == "predict":
        assert logits is not None  # requests to a model without a head are refused earlier
        return list(logits)
    (job,) = jobs
    target = job.target if job.target is not None or logits is None else int(logits[0].argmax())
    return [(attention_maps(served.model, job.pixels, target), logits)]  # type: ignore[arg-type]


SMALL = 64 * 1024  # bytes that are cheap enough to parse or serialise in the event loop


class AdmissionControl:
    """The state of a service. Only the event loop uses it, except for the decoder and the batcher."""

    def __init__(self, settings: Settings, served: Served) -> None:
        self.settings, self.served, self.metrics = settings, served, Metrics()
        self.decoder = Decoder(settings.workers, settings.max_pixels, self.metrics)
        self.batcher = Batcher(settings.max_batch, settings.max_wait_ms / 1000, self.metrics)
        self.waiting_images, self.waiting_attention, self.body_bytes = 0, 0, 0
        self.stopping = False
        self.parser = ThreadPoolExecutor(1, "parse")
        self.parser.submit(int)  # starts its thread now
        self.batcher.start()

    @property
    def ready(self) -> bool:
        return not self.stopping and self.batcher.is_alive()

    def check_capacity(self, kind: str) -> None:
        """Refuse a request with 503 if the queue is full, before its body is read."""
        if self.waiting_images >= self.settings.queue:
            raise busy("too many images are waiting; try again")
        if kind == "attention" and self.waiting_attention >= self.settings.attention_queue:
            raise busy("too many attention requests are waiting; try again")

    @contextmanager
    def track_bytes(self) -> Iterator[Callable[[int], None]]:
        """A function that counts the bytes of a body as they arrive; they are released with the request."""
        own = 0

        def add(count: int) -> None:
            nonlocal own
            if self.body_bytes + count > self.settings.total_body_bytes:
                raise busy("too many request bodies are in memory; try again")
            own += count
            self.count_bytes(count)

        try:
            yield add
        finally:
            self.count_bytes(-own)

    def count_bytes(self, count: int) -> None:
        self.body_bytes += count
        self.metrics.body_bytes.set(self.body_bytes)

    @contextmanager
    def reserve(self, kind: str, images: int) -> Iterator[None]:
        """Places in the queue for so many images; 503 if it is full."""
        self.check_capacity(kind)
        if self.waiting_images and self.waiting_images + images > self.settings.queue:
            raise busy("too many images are waiting; try again")
        self.count_images(kind, images)
        try:
            yield
        finally:
            self.count_images(kind, -images)

    def count_images(self, kind: str, images: int) -> None:
        self.waiting_images += images
        self.waiting_attention += images if kind == "attention" else 0
        self.metrics.waiting.set(self.waiting_images)

    async def infer(
        self, request: Request, kind: str, served: Served, images: Images, target: int | None = None
    ) -> list[Any]:
        """The model's output, or a BadImage, for each image of a request; all by the same model."""
        deadline = time.monotonic() + self.settings.timeout
        with self.reserve(kind, len(images)):
            share: Share[Task] = Share()
            tasks = [
                asyncio.create_task(self.infer_one(kind, served, content, share, deadline, target))
                for _, content in images
            ]
            try:
                results = await unless_disconnected(request, tasks, self.settings.timeout)
            except TimeoutError:
                raise busy(f"not finished within {self.settings.timeout:g} s; try again") from None
        for result in results:
            self.metrics.images.labels("unreadable" if isinstance(result, BadImage) else "answered").inc()
        return results

    async def infer_one(
        self, kind: str, served: Served, content: bytes, share: Share[Task], deadline: float,
        target: int | None,
    ) -> Any:  # fmt: skip
        try:
            image = await wrap_future(self.decoder.submit(content, served.view, share))
        except BadImage as error:
            return error
        values = await wrap_future(self.batcher.submit(Job(kind, served, image.pixels, deadline, target)))
        return Output(values, image.size) if kind == "predict" else values

    async def offload(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that handles `size` bytes, in another thread if it would block the event loop."""
        if size <= SMALL:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self.parser, function, *args)

    def close(self) -> None:
        self.parser.shutdown(wait=False, cancel_futures=True)
        self.batcher.stop()
        self.decoder.close()


async def unless_disconnected(
    request: Request, tasks: "list[asyncio.Task[Any]]", timeout: float
) -> list[Any]:
    """The results of the tasks, which are cancelled on a timeout or when the client disconnects."""
    work, disconnect = asyncio.gather(*tasks), asyncio.create_task(wait_for_disconnect(request))
    try:
        either: set[asyncio.Future[Any]] = {work, disconnect}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if disconnect.done():
            raise ClientDisconnect
        raise TimeoutError
    finally:
        for task in (*tasks, disconnect):  # if one fails, cancel the others
            task.cancel()
        await asyncio.gather(work, *tasks, disconnect, return_exceptions=True)  # retrieve every exception


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
