"""Where requests are taken in: how many at a time, by which model, and until when they are answered."""

import asyncio
import time
from asyncio import wrap_future
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from vitkit.data.decode import BadImage
from vitkit.service.batcher import Batcher, Job
from vitkit.service.cost import Images
from vitkit.service.decoder import Decoder, Task
from vitkit.service.fair import Share
from vitkit.service.metrics import Metrics
from vitkit.service.refusal import busy
from vitkit.service.served import Served
from vitkit.service.settings import Settings

SMALL = 64 * 1024  # bytes that the event loop reads or writes itself


class Desk:
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
