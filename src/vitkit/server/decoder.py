"""Decoding in separate processes that may crash, behind a queue that is fair to every request."""

import logging
import multiprocessing
import signal
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.forkserver import ensure_running
from queue import SimpleQueue
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage
from vitkit.data.loader import check_sockets
from vitkit.data.views import View
from vitkit.server import decode_worker
from vitkit.server.guard import Refusal, busy
from vitkit.server.monitoring import Metrics

Item = TypeVar("Item")


@dataclass(eq=False)
class Share(Generic[Item]):
    """What one request has waiting, how much of it is being done, and the seconds that it has taken."""

    waiting: deque[Item] = field(default_factory=deque)
    running: int = 0
    spent: float = 0.0


class FairQueue(Generic[Item]):
    """The next item is of the request with the fewest in work; among equals, the one served longest ago."""

    def __init__(self) -> None:
        self.shares: deque[Share[Item]] = deque()  # with something waiting; last served, last
        self.lock = Lock()

    def put(self, share: Share[Item], item: Item) -> None:
        with self.lock:
            share.waiting.append(item)
            if share not in self.shares:
                self.shares.append(share)

    def take(self) -> tuple[Share[Item], Item] | None:
        """None when nothing waits."""
        with self.lock:
            if not self.shares:
                return None
            share = self.chosen()
            self.shares.remove(share)
            item = share.waiting.popleft()
            share.running += 1
            if share.waiting:
                self.shares.append(share)
            return share, item

    def chosen(self) -> Share[Item]:
        return min(self.shares, key=lambda share: share.running)

    def done(self, share: Share[Item], seconds: float) -> None:
        with self.lock:
            share.running -= 1
            share.spent += seconds

    def clear(self) -> list[Item]:
        """Everything that waits, which is then gone."""
        with self.lock:
            items = [item for share in self.shares for item in share.waiting]
            self.shares.clear()
            return items


log = logging.getLogger("vitkit.server")
SECONDS = 10.0  # that one image may take
REQUEST_SECONDS = 20.0  # of decoders, that all images of one request may take together
TRIES = 10  # to start a helper
CRASHES, DEATHS = 2, 5  # helpers that an image may cost: by its own doing, and in all
UNKNOWN = 255  # the exit code of a helper whose parent died with it
context = multiprocessing.get_context("forkserver")  # a helper is quickly replaced: torch is imported once


def prepare() -> None:
    """Begin to import what helpers need, which takes a while, in the process that they are forked from."""
    check_sockets()
    context.set_forkserver_preload(["__main__", "vitkit.server.decode_worker"])
    ensure_running()


class Helper:
    """One decoding process and the pipe to it."""

    def __init__(self, max_pixels: int) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=decode_worker.main, args=(theirs, max_pixels), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: bytes, most: int, seconds: float) -> bytes:
        """Its answer of at most so many bytes; EOFError when it died, TimeoutError when it takes too long."""
        self.pipe.send_bytes(question)
        if not self.pipe.poll(seconds):
            raise TimeoutError
        return self.pipe.recv_bytes(most)

    def crashed(self) -> bool:
        """Of one that is gone: whether it died by itself, not by somebody's SIGKILL or with its parent."""
        self.process.join(1)
        return self.process.exitcode not in (-signal.SIGKILL, UNKNOWN)

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(5)


@dataclass(frozen=True, eq=False)
class Task:
    """An image that waits for a decoder."""

    content: bytes
    view: View
    future: "Future[Tensor]" = field(default_factory=Future)


class Decoder:
    """A few helpers, each with a thread that waits for it; what they cannot do is a BadImage.

    All images of a request are submitted with one share, and requests take turns.
    """

    def __init__(self, workers: int, max_pixels: int, metrics: Metrics) -> None:
        self.max_pixels, self.metrics = max_pixels, metrics
        self.idle: SimpleQueue[Helper] = SimpleQueue()
        self.helpers: set[Helper] = set()
        self.queue: FairQueue[Task] = FairQueue()
        self.closing = False
        self.lock = Lock()
        self.threads = ThreadPoolExecutor(workers, "decode")
        for _ in range(workers):
            self.idle.put(self.fresh())

    def submit(self, content: bytes, view: View, share: Share[Task] | None = None) -> "Future[Tensor]":
        """The image as the view wants it, uint8 (3, h, w), some time."""
        task = Task(content, view)
        self.queue.put(share or Share(), task)
        self.threads.submit(self.work)
        return task.future

    def work(self) -> None:
        """One task, of whichever request has its turn."""
        taken = self.queue.take()
        if taken is None:  # closed meanwhile
            return
        share, task = taken
        begun = time.monotonic()
        try:
            if not task.future.set_running_or_notify_cancel():
                return
            task.future.set_result(self.decode(task.content, task.view, REQUEST_SECONDS - share.spent))
        except BaseException as error:
            task.future.set_exception(error)
        finally:
            self.queue.done(share, time.monotonic() - begun)

    def decode(self, content: bytes, view: View, seconds: float = SECONDS) -> Tensor:
        """`seconds`: what is left of the request's time."""
        begun = time.monotonic()
        question = decode_worker.question(content, view, self.max_pixels)
        size = 3 * view.size[0] * view.size[1]
        reply = self.reply(question, max(size, 4096) + 1, seconds)
        self.metrics.decode_seconds.observe(time.monotonic() - begun)
        if reply[:1] == decode_worker.REFUSED:
            reason, _, text = reply[1:].decode("utf-8", "replace").partition("\n")
            raise BadImage(reason, text)
        if len(reply) != size + 1:
            raise BadImage("damaged", "it could not be decoded")
        return torch.from_numpy(np.frombuffer(reply, np.uint8, offset=1).copy()).reshape(3, *view.size)

    def reply(self, question: bytes, most: int, seconds: float) -> bytes:
        """What a helper says; if it dies another one is asked, since it may not have been the image."""
        if seconds <= 0:
            raise out_of_time()
        helper, crashes = self.idle.get(), 0
        try:
            for _ in range(DEATHS):
                try:
                    return helper.ask(question, most, min(seconds, SECONDS))
                except TimeoutError:
                    helper = self.replaced(helper)
                    if seconds < SECONDS:
                        raise out_of_time() from None
                    raise BadImage("too-slow", f"it takes more than {SECONDS:.0f} s to decode") from None
                except (EOFError, OSError):
                    crashes += helper.crashed()
                    helper = self.replaced(helper)
                    if crashes == CRASHES:
                        break
            raise BadImage("damaged", "it could not be decoded")
        finally:
            self.idle.put(helper)

    def fresh(self) -> Helper:
        """A new one. What helpers are forked from may have died a moment ago; asked again, it is started."""
        for left in reversed(range(TRIES)):
            try:
                helper = Helper(self.max_pixels)
                break
            except (EOFError, OSError):
                if not left:
                    raise
                time.sleep(0.1)
        with self.lock:
            self.helpers.add(helper)
        return helper

    def replaced(self, helper: Helper) -> Helper:
        with self.lock:
            self.helpers.discard(helper)
        helper.end()
        if self.closing:
            raise BadImage("stopped", "the service stops")
        self.metrics.decoder_restarts.inc()
        try:
            return self.fresh()
        except (EOFError, OSError) as error:  # the system lets us have no process, for now
            log.error("no decoder can be started: %s", error)
            raise busy("no image can be decoded at the moment; try again") from None

    def close(self) -> None:
        """At once: whoever still waits for an image has been told that it will not come."""
        self.closing = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for task in self.queue.clear():
            task.future.cancel()
        for helper in list(self.helpers):
            helper.process.kill()
        self.threads.shutdown()


def out_of_time() -> Refusal:
    return Refusal(
        422,
        f"the images of this request take more than {REQUEST_SECONDS:.0f} s to decode; send fewer",
        code="server.too-large",
    )
