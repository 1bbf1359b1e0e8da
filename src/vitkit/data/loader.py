"""The data loader: worker processes decode, transform and stack images into batches, in a fixed order."""

# B images in a batch; K labels of an image at most, padded with -1; h, w pixels of a view

import atexit
import ctypes
import multiprocessing.connection
import multiprocessing.process
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, islice
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitkit.data.batch_cache import BatchCache, batch_cache_for
from vitkit.data.decode import BadImage, decode
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.target_views import TargetView, empty_stacks, fill_target
from vitkit.data.targets import read_target
from vitkit.data.views import MoreViews, View, fill_views, sized, transform, views_of
from vitkit.errors import Error
from vitkit.io.system import STOP_SIGNALS, at_fork, end_process, start_method

if sys.platform != "win32":
    from multiprocessing.context import ForkContext, ForkProcess

PR_SET_PDEATHSIG = 1
PARENT_POLL = 1.0  # seconds between checks that the parent process is alive


def end_with_parent(parent: int, by_main_thread: bool) -> None:
    """End this worker process when its parent ends, or now if the parent has ended already.

    Linux signals a process when the thread that forked it ends. For the main thread this is the end of the
    parent process; for any other thread it is not, so a thread of the worker watches the parent instead.
    """
    if by_main_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was requested
        end_process()


def watch(parent: int) -> None:
    if sys.platform == "win32":  # where a process keeps the number of a parent that is gone
        process = multiprocessing.parent_process()
        assert process is not None
        process.join()
    else:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL)
    end_process()


def check_sockets() -> None:
    """Open and close a socket in the temporary folder, through which workers pass tensors.

    Socket paths are limited to 107 bytes, and a worker that cannot open its socket hangs without an error.
    """
    if sys.platform == "win32":  # passes them by pipes
        return
    folder = tempfile.gettempdir()
    try:
        multiprocessing.connection.Listener(family="AF_UNIX").close()
    except OSError as error:
        raise Error(
            f"worker processes cannot open a socket in the temporary folder {folder!r} "
            f"({len(os.fsencode(folder))} bytes): {error}. Set TMPDIR to a folder with a short path, such as "
            "TMPDIR=/tmp",
            code="file.not-writable",
        ) from None


AHEAD = 2  # prefetched batches per worker
TIMEOUT = 540.0  # seconds to wait for one batch; generous, since a cold file system is slow
POLL = 2.0  # seconds between checks that all workers are alive
SIGNALS = STOP_SIGNALS  # handled by the main process, ignored by workers
# image (B, 3, h, w) uint8, label (B,) or (B, K), index (B,), place (B,); further views (B, V, 3, h, w) uint8
Batch = dict[str, Tensor]
Place = tuple[int, int]  # (step, place) of a training order, (0, index) in evaluation
Result = tuple[Batch, list[tuple[int, BadImage]]]  # a batch, and the errors of the images that are missing


class TooManyBad(Error):
    """More files of a data set are unusable than allowed."""

    code = "data.too-many-bad"


class BadFileLog(Protocol):
    """Receives the images that could not be used."""

    def add(self, source: Source, index: int, error: BadImage) -> None: ...


@dataclass
class BadFiles:
    """The unusable files, each reported once, and the limit on their number."""

    allowed: float = 0.05  # share of the data set
    report: Callable[[str, str], None] = lambda key, reason: None
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, source: Source, index: int, error: BadImage) -> None:
        key = source.keys[index]
        if key in self.reasons:
            return
        self.reasons[key] = error.reason
        self.report(key, str(error))
        if len(self.reasons) > self.allowed * len(source):
            listed = ", ".join(f"{k!r} ({r})" for k, r in islice(self.reasons.items(), 5))
            raise TooManyBad(
                f"{source.name}: {len(self.reasons)} of {len(source)} images are unusable, more than the "
                f"{self.allowed:.0%} allowed; the first: {listed}. The last: {error}. Repair "
                "them (vitkit doctor lists all), or allow more with --max-bad of finetune and pretrain"
            )


def train_batches(
    source: Source,
    view: View,
    order: Order,
    *,
    start: int = 0,
    stop: int | None = None,
    places: Sequence[int] | None = None,
    workers: int = 0,
    bad: BadFileLog | None = None,
    more: MoreViews = (),
    target_view: TargetView | None = None,
) -> Iterator[Batch]:
    """Batches of the steps from `start` up to `stop`, or without end.

    more: further views of each image. target_view: makes images with masks or boxes, instead of `view`.

    `places` is this process's part of each global batch. An unusable file makes its batch one image smaller,
    down to an empty batch; no other sample replaces it.
    """
    if order.length != len(source):
        raise Error(
            f"an order over {order.length} samples does not fit a source of {len(source)}",
            code="request.value",
        )
    places = range(order.batch) if places is None else places
    steps = count(start) if stop is None else range(start, stop)
    groups = ([(step, place) for place in places] for step in steps)
    return stream(Samples(source, view, order, more, target_view), groups, workers, bad or BadFiles())


def evaluation_batches(
    source: Source,
    view: View,
    batch: int,
    *,
    places: slice = slice(None),
    workers: int = 0,
    bad: BadFileLog | None = None,
) -> Iterator[Batch]:
    """Every usable image exactly once, in order; `places` selects this process's share."""
    mine = range(len(source))[places]
    workers = min(workers, -(-len(mine) // batch))  # a worker prepares whole batches
    return range_batches(source, view, batch, [mine], workers=workers, bad=bad or BadFiles(allowed=1.0))


def range_batches(
    source: Source, view: View, batch: int, ranges: Iterable[range], *, workers: int, bad: BadFileLog,
    sizes: bool = False,
) -> Iterator[Batch]:  # fmt: skip
    """The usable images of several ranges of indices, in order; no batch spans two ranges.

    A range is taken only when its images are to be prepared. sizes: also the "size" of each image.
    """
    groups = (
        [(0, i) for i in part[start : start + batch]]
        for part in ranges
        for start in range(0, len(part), batch)
    )
    samples = Samples(source, view, with_sizes=sizes)
    return (batch for batch in stream(samples, groups, workers, bad) if len(batch["image"]))


@dataclass(frozen=True)
class Samples(Dataset):
    """The dataset of the data loader: a group of positions to a batch; without an order, by index."""

    source: Source
    view: View
    order: Order | None = None
    more: MoreViews = ()
    target_view: TargetView | None = None
    with_sizes: bool = False  # "size" of each image itself, int64 (B, 2)

    @cached_property
    def cache(self) -> BatchCache | None:
        """The disk cache of these batches, if batches are cached; with several views or targets, none are."""
        several = self.more or self.target_view or self.with_sizes
        return None if several else batch_cache_for(self.source, self.view, self.order)

    def cached(self, places: list[Place]) -> Batch | None:
        """The batch from the cache, if it is there."""
        if self.cache is None or (entry := self.cache.get(places)) is None:
            return None
        return self.batch(torch.from_numpy(entry[0]), entry[1], [place for _, place in places])

    def __getitems__(self, places: list[Place]) -> Result:
        """The batch, and the errors of the images that are missing; complete batches are cached."""
        if cached := self.cached(places):
            return cached, []
        batch, errors = self.load(places)
        if self.cache and not errors:
            self.cache.put(places, batch["image"].numpy(), batch["index"].numpy())
        return batch, errors

    def load(self, places: list[Place]) -> Result:
        """Decode and transform: a batch of the usable samples, and the errors of the others."""
        images = torch.empty((len(places), 3, *(self.target_view or self.view).size), dtype=torch.uint8)
        rows = images.numpy()  # indexing an array is faster than indexing a tensor
        order = self.order
        indices = order.samples(places).tolist() if order else [number for _, number in places]
        rngs = order.rngs(places) if order else (np.random.default_rng(0) for _ in places)
        more = {
            name: torch.empty((len(places), len(views), 3, *views[0].size), dtype=torch.uint8)
            for name, views in self.more
        }
        targets = empty_stacks(self.target_view, len(places))
        usable, positions = list[int](), list[int]()
        sizes, errors = list[tuple[int, int]](), list[tuple[int, BadImage]]()
        for (step, place), index, rng in zip(places, indices, rngs, strict=True):
            try:
                content = self.source.fetch(index)
                content, own_size = sized(content) if self.with_sizes else (content, (0, 0))
                if self.more or self.target_view:  # decoded once for all views
                    content = decode(content) if isinstance(content, bytes) else content
                    fill_views(more, len(usable), views_of(content, self.more, order, step, place))
                if self.target_view and isinstance(content, np.ndarray):
                    target = read_target(self.source.targets, index)
                    image = fill_target(targets, len(usable), *self.target_view(content, target, rng))
                else:
                    image = transform(content, self.view, rng)
                rows[len(usable)] = image.transpose(2, 0, 1)
                sizes.append(own_size)
                usable.append(index)
                positions.append(place)
            except BadImage as error:
                errors.append((index, error))
        batch = self.batch(images[: len(usable)], np.array(usable, dtype=np.int64), positions)
        own = {"size": torch.tensor(sizes).reshape(-1, 2)} if self.with_sizes else {}
        return batch | own | {k: stack[: len(usable)] for k, stack in (more | targets).items()}, errors

    def batch(self, images: Tensor, indices: np.ndarray, places: list[int]) -> Batch:
        labels = self.source.labels[indices]
        if self.source.multilabel:
            labels = labels.padded(self.source.labels.most)
        labels = torch.from_numpy(labels)
        numbers = {"index": torch.from_numpy(indices), "place": torch.tensor(places, dtype=torch.int64)}
        return {"image": images, "label": labels, **numbers}


def stream(samples: Samples, groups: Iterator[list[Place]], workers: int, bad: BadFileLog) -> Iterator[Batch]:
    """Groups of positions to batches, in order; with workers, batches are prefetched.

    Cached batches are read in this process, which is faster than receiving them from a worker.
    """
    for group in groups:
        if (cached := samples.cached(group)) is None:
            groups = chain([group], groups)
            break
        yield cached
    else:
        return  # everything was cached, so no worker is started
    results = prefetch(samples, groups, workers) if workers else map(samples.__getitems__, groups)
    for batch, errors in results:
        for index, error in errors:
            bad.add(samples.source, index, error)
        yield batch


def prefetch(samples: Samples, groups: Iterator[list[Place]], workers: int) -> Iterator[Result]:
    """Batches from worker processes; if one dies or hangs, the error names the images being processed."""
    check_sockets()
    pending: deque[list[Place]] = deque()

    def record_pending() -> Iterator[list[Place]]:
        for group in groups:
            pending.append(group)
            yield group

    loader = DataLoader(
        samples,
        batch_sampler=record_pending(),
        num_workers=workers,
        prefetch_factor=AHEAD,
        collate_fn=pack,  # type: ignore[arg-type]  # samples arrive as a finished batch
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # its own, since dropout draws from the default generator
        multiprocessing_context=worker_context(),
        timeout=POLL,
    )
    others = set(STARTED)
    batches = started(loader, samples.source)
    own_workers = set(STARTED) - others
    while True:
        try:
            result = next_batch(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            if "in DataLoader worker process" in str(error):  # an error raised by our code in a worker
                raise
            for worker in own_workers:  # joining a hung worker would never return
                worker.kill()
            raise ChildProcessError(worker_error(samples, list(pending)[:workers], str(error))) from None
        pending.popleft()
        yield unpack(result)


def started(loader: DataLoader, source: Source) -> Iterator[Any]:
    """Start the workers of a loader; a source that cannot be sent to them is an error for its author."""
    try:
        with own_child_handler():
            return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in f"{type(error).__name__} {error}".lower():
            raise
        raise Error(
            f"{source.name}: it cannot be sent to worker processes ({error}); use --workers 0",
            code="request.conflict",
        ) from None


@contextmanager
def own_child_handler() -> Iterator[None]:
    """Undo torch's handler of SIGCHLD, which would raise at any point, even while a checkpoint is saved."""
    if sys.platform == "win32":
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def pack(result: Result) -> Any:
    """Convert all but large tensors to arrays, since each tensor in shared memory costs a millisecond."""
    batch, errors = result
    return {
        k: t if t.dtype == torch.uint8 or t.nbytes > 2**20 else t.numpy() for k, t in batch.items()
    }, errors


def unpack(result: Any) -> Result:
    batch, errors = result
    return {k: t if isinstance(t, Tensor) else torch.from_numpy(t) for k, t in batch.items()}, errors


def next_batch(batches: Iterator[Any]) -> Any:
    """The next batch; retries the loader's short timeout until the overall timeout has passed."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out") or time.monotonic() > deadline:
                raise


def worker_error(samples: Samples, pending: list[list[Place]], what: str) -> str:
    """The error message for a dead or hung worker."""
    order = samples.order
    numbers = [order.sample(*place) if order else place[1] for group in pending for place in group]
    keys = [samples.source.keys[number] for number in numbers]
    event = f"did not respond for {TIMEOUT:g} seconds" if "timed out" in what else f"died ({what})"
    return (
        f"{samples.source.name}: a data worker {event} while it processed {len(keys)} images, the first "
        f"{', '.join(map(repr, keys[:3]))}. Use fewer --workers or more memory (also /dev/shm), or find the "
        "file with vitkit doctor"
    )


class Worker(multiprocessing.process.BaseProcess):
    """A data worker, which ends with its parent."""

    by_main_thread: bool

    def start(self) -> None:
        self.by_main_thread = threading.current_thread() is threading.main_thread()
        super().start()
        STARTED.add(self)

    def run(self) -> None:
        end_with_parent(self._parent_pid, self.by_main_thread)  # type: ignore[attr-defined]
        super().run()


class SpawnedWorker(Worker, SpawnProcess):
    """A worker that gets its source pickled, and imports torch again: a few seconds."""


class SpawnedWorkers(SpawnContext):
    Process = SpawnedWorker


if sys.platform != "win32":

    class ForkedWorker(Worker, ForkProcess):
        """A worker that has the source of its parent."""

    class ForkedWorkers(ForkContext):
        Process = ForkedWorker


def worker_context() -> BaseContext:
    if sys.platform != "win32" and start_method() == "fork":
        return ForkedWorkers()
    return SpawnedWorkers()


STARTED: WeakSet[Worker] = WeakSet()
at_fork(STARTED.clear)


@atexit.register
def end_workers() -> None:
    """Kill the workers at exit; Python would send SIGTERM, which they ignore, and wait forever."""
    for worker in [worker for worker in STARTED if worker.is_alive()]:
        worker.kill()


def ignore_signals(worker: int) -> None:
    """Leave signals to the process group to the main process, which ends its workers itself."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
