"""A pool of decoding processes that may crash, behind a queue that is fair to every request."""

import logging
import multiprocessing
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from vitkit.data.decode import BadImage
from vitkit.data.loader import check_sockets
from vitkit.data.views import View
from vitkit.inference.predict import Prepared
from vitkit.io.system import KILLED
from vitkit.server import decode_worker
from vitkit.server.guard import RequestError, busy
from vitkit.server.monitoring import Metrics

Item = TypeVar("Item")


@dataclass(eq=False)
class Share(Generic[Item]):
    """One request's share of the queue: items waiting, items running, and seconds spent."""

    waiting: deque[Item] = field(default_factory=deque)
    running: int = 0
    spent: float = 0.0


class FairQueue(Generic[Item]):
    """The next item comes from the request with the fewest running; ties go to the least recently served."""

    def __init__(self) -> None:
        self.shares: deque[Share[Item]] = deque()  # those with items waiting, the least recently served first
        self.lock = Lock()

    def put(self, share: Share[Item], item: Item) -> None:
        with self.lock:
            share.waiting.append(item)
            if share not in self.shares:
                self.shares.append(share)

    def take(self) -> tuple[Share[Item], Item] | None:
        """The next item and its share, or None if nothing is waiting."""
        with self.lock:
            if not self.shares:
                return None
            share = self.choose()
            self.shares.remove(share)
            item = share.waiting.popleft()
            share.running += 1
            if share.waiting:
                self.shares.append(share)
            return share, item

    def choose(self) -> Share[Item]:
        return min(self.shares, key=lambda share: share.running)

    def done(self, share: Share[Item], seconds: float) -> None:
        with self.lock:
            share.running -= 1
            share.spent += seconds

    def clear(self) -> list[Item]:
        """Remove and return everything that is waiting."""
        with self.lock:
            items = [item for share in self.shares for item in share.waiting]
            self.shares.clear()
            return items


log = logging.getLogger("vitkit.server")
SECONDS = 10.0  # timeout for one image
REQUEST_SECONDS = 20.0  # decoding time for all images of one request together
TRIES = 10  # attempts to start a worker
CRASHES, DEATHS = 2, 5  # workers that an image may crash, and that may die with it for any reason
UNKNOWN = 255  # the exit code of a worker whose parent died with it
# a fork server imports torch once, so that a worker is quickly replaced; Windows has none
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
context: Any = multiprocessing.get_context(METHOD)


def start_forkserver() -> None:
    """Start the process that workers are forked from, which takes a while to import torch."""
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing.forkserver import ensure_running

    check_sockets()
    context.set_forkserver_preload(["__main__", "vitkit.server.decode_worker"])
    ensure_running()


class Worker:
    """One decoding process and the pipe to it."""

    def __init__(self, max_pixels: int) -> None:
        self.pipe, remote = context.Pipe()
        self.process = context.Process(target=decode_worker.main, args=(remote, max_pixels), daemon=True)
        self.process.start()
        remote.close()

    def request(self, content: bytes, max_bytes: int, timeout: float) -> bytes:
        """The reply, of at most `max_bytes`; EOFError if the worker died, TimeoutError if it is too slow."""
        self.pipe.send_bytes(content)
        if not self.pipe.poll(timeout):
            raise TimeoutError
        return self.pipe.recv_bytes(max_bytes)

    def crashed(self) -> bool:
        """Whether a dead worker crashed by itself, rather than by a SIGKILL or with its parent."""
        self.process.join(1)
        return self.process.exitcode not in (-KILLED, UNKNOWN)

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(5)


@dataclass(frozen=True, eq=False)
class Task:
    """An image waiting to be decoded."""

    content: bytes
    view: View
    future: "Future[Prepared]" = field(default_factory=Future)


class Decoder:
    """A pool of workers, each with a thread that waits for it; images they cannot decode raise BadImage.

    All images of a request are submitted with the same share, so that requests take turns.
    """

    def __init__(self, workers: int, max_pixels: int, metrics: Metrics) -> None:
        self.max_pixels, self.metrics = max_pixels, metrics
        self.idle: SimpleQueue[Worker] = SimpleQueue()
        self.workers: set[Worker] = set()
        self.queue: FairQueue[Task] = FairQueue()
        self.closing = False
        self.lock = Lock()
        self.threads = ThreadPoolExecutor(workers, "decode")
        for _ in range(workers):
            self.idle.put(self.start_worker())

    def submit(self, content: bytes, view: View, share: Share[Task] | None = None) -> "Future[Prepared]":
        """A future of the decoded image for this view."""
        task = Task(content, view)
        self.queue.put(share or Share(), task)
        self.threads.submit(self.work)
        return task.future

    def work(self) -> None:
        """Decode the next image of the request whose turn it is."""
        item = self.queue.take()
        if item is None:  # the decoder was closed
            return
        share, task = item
        start = time.monotonic()
        try:
            if not task.future.set_running_or_notify_cancel():
                return
            task.future.set_result(self.decode(task.content, task.view, REQUEST_SECONDS - share.spent))
        except BaseException as error:
            task.future.set_exception(error)
        finally:
            self.queue.done(share, time.monotonic() - start)

    def decode(self, content: bytes, view: View, seconds: float = SECONDS) -> Prepared:
        """Decode one image; `seconds` is what is left of its request's decoding time."""
        start = time.monotonic()
        request = decode_worker.encode_request(content, view, self.max_pixels)
        head = 1 + decode_worker.SIZE.size
        size = head + 3 * view.size[0] * view.size[1]
        reply = self.reply_of_worker(request, max(size, 4096), seconds)
        self.metrics.decode_seconds.observe(time.monotonic() - start)
        if reply[:1] == decode_worker.FAILED:
            reason, _, text = reply[1:].decode("utf-8", "replace").partition("\n")
            raise BadImage(reason, text)
        if len(reply) != size:
            raise BadImage("damaged", "it could not be decoded")
        height, width = decode_worker.SIZE.unpack_from(reply, 1)
        pixels = torch.from_numpy(np.frombuffer(reply, np.uint8, offset=head).copy())
        return Prepared(pixels.reshape(3, *view.size), (height, width))

    def reply_of_worker(self, request: bytes, max_bytes: int, seconds: float) -> bytes:
        """Send a request to an idle worker, and to another if it dies: the image may not be the cause."""
        if seconds <= 0:
            raise decoding_timeout()
        worker, crashes = self.idle.get(), 0
        try:
            for _ in range(DEATHS):
                try:
                    return worker.request(request, max_bytes, min(seconds, SECONDS))
                except TimeoutError:
                    worker = self.replaced(worker)
                    if seconds < SECONDS:
                        raise decoding_timeout() from None
                    raise BadImage("too-slow", f"it takes more than {SECONDS:.0f} s to decode") from None
                except (EOFError, OSError):
                    crashes += worker.crashed()
                    worker = self.replaced(worker)
                    if crashes == CRASHES:
                        break
            raise BadImage("damaged", "it could not be decoded")
        finally:
            self.idle.put(worker)

    def start_worker(self) -> Worker:
        """Start a worker, with retries: a fork server that has just died is restarted on the next attempt."""
        for left in reversed(range(TRIES)):
            try:
                worker = Worker(self.max_pixels)
                break
            except (EOFError, OSError):
                if not left:
                    raise
                time.sleep(0.1)
        with self.lock:
            self.workers.add(worker)
        return worker

    def replaced(self, worker: Worker) -> Worker:
        """Kill a worker and start a new one in its place."""
        with self.lock:
            self.workers.discard(worker)
        worker.kill()
        if self.closing:
            raise BadImage("stopped", "the service is stopping")
        self.metrics.decoder_restarts.inc()
        try:
            return self.start_worker()
        except (EOFError, OSError) as error:  # the system has no process for us at the moment
            log.error("cannot start a decoding process: %s", error)
            raise busy("images cannot be decoded at the moment; try again") from None

    def close(self) -> None:
        """Kill the workers and cancel waiting tasks at once; their requests have already failed."""
        self.closing = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for task in self.queue.clear():
            task.future.cancel()
        for worker in list(self.workers):
            worker.process.kill()
        self.threads.shutdown()


def decoding_timeout() -> RequestError:
    return RequestError(
        422,
        f"the images of this request take more than {REQUEST_SECONDS:.0f} s to decode; send fewer",
        code="server.too-large",
    )
