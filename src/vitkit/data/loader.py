"""Records to batches: decoded, transformed and stacked by worker processes, in a fixed order."""

# B images in a batch; K labels of an image at most, the others of its row being -1; h, w pixels of a view

import atexit
import ctypes
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, islice
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitkit.data.batch_cache import BatchCache, batch_cache_for
from vitkit.data.decode import BadImage
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.views import View, transform
from vitkit.errors import Error

PR_SET_PDEATHSIG = 1
PARENT_POLL = 1.0  # seconds between two looks whether the parent lives


def end_with_parent(parent: int, by_main_thread: bool) -> None:
    """In a worker, first of all: it ends when the process `parent` does, also if that is gone already.

    Linux tells a process that the thread which forked it has ended. Where that was the main thread, this is
    the end of the process; of another one it is not, and a thread of the worker looks after its parent.
    """
    if by_main_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before it could be asked for
        os.kill(os.getpid(), signal.SIGKILL)


def watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL)
    os.kill(os.getpid(), signal.SIGKILL)


def check_sockets() -> None:
    """Workers hand over tensors through sockets in the folder for temporary files: one is opened for a try.

    A name of more than 107 bytes is none for a socket, and a worker that cannot open one would be waited
    for in vain.
    """
    folder = tempfile.gettempdir()
    try:
        multiprocessing.connection.Listener(family="AF_UNIX").close()
    except OSError as error:
        raise Error(
            f"worker processes cannot open a socket in the folder for temporary files, {folder!r} "
            f"({len(os.fsencode(folder))} bytes): {error}. Set TMPDIR to a folder with a short name, such as "
            "TMPDIR=/tmp",
            code="file.not-writable",
        ) from None


AHEAD = 2  # batches that each worker makes ahead
PATIENCE = 540.0  # seconds to wait for one batch: a cold file system is slow, a worker that hangs never comes
GLANCE = 2.0  # seconds between two looks whether all workers live
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # which the main process answers for its workers
Batch = dict[str, Tensor]  # image (B, 3, h, w) uint8, label (B,) or (B, K), index (B,), place (B,)
Place = tuple[int, int]  # (step, place) of a training order, (0, number) in evaluation
Made = tuple[Batch, list[tuple[int, BadImage]]]  # a batch, and what was wrong with its other images


class TooManyBad(Error):
    """More files of a data set are unusable than was allowed."""

    code = "data.too-many-bad"


class Notes(Protocol):
    """Whoever is told of files that could not be used."""

    def add(self, source: Source, index: int, error: BadImage) -> None: ...


@dataclass
class BadFiles:
    """The files that could not be used, each named once, and how many of them are too many."""

    allowed: float = 0.05  # share of the data set
    report: Callable[[str, str], None] = lambda key, reason: None
    found: dict[str, str] = field(default_factory=dict)

    def add(self, source: Source, index: int, error: BadImage) -> None:
        key = source.keys[index]
        if key in self.found:
            return
        self.found[key] = error.reason
        self.report(key, str(error))
        if len(self.found) > self.allowed * len(source):
            listed = ", ".join(f"{k!r} ({r})" for k, r in islice(self.found.items(), 5))
            raise TooManyBad(
                f"{source.name}: {len(self.found)} of {len(source)} images are unusable, more than the "
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
    bad: Notes | None = None,
) -> Iterator[Batch]:
    """Batches of the steps from `start` to before `stop`, or without end.

    `places` is this process's part of each global batch. A file that cannot be used leaves its batch one
    image smaller, down to none; no other sample takes its place.
    """
    if order.length != len(source):
        raise Error(
            f"an order over {order.length} samples does not fit a source of {len(source)}",
            code="request.value",
        )
    mine = range(order.batch) if places is None else places
    steps = count(start) if stop is None else range(start, stop)
    groups = ([(step, place) for place in mine] for step in steps)
    return stream(Samples(source, view, order), groups, workers, bad or BadFiles())


def evaluation_batches(
    source: Source,
    view: View,
    batch: int,
    *,
    places: slice = slice(None),
    workers: int = 0,
    bad: Notes | None = None,
) -> Iterator[Batch]:
    """Every usable image exactly once, in order; `places` picks this process's share of them."""
    indices = range(len(source))[places]
    groups = ([(0, i) for i in indices[at : at + batch]] for at in range(0, len(indices), batch))
    made = stream(Samples(source, view), groups, workers, bad or BadFiles(allowed=1.0))
    return (batch for batch in made if len(batch["image"]))


@dataclass(frozen=True)
class Samples(Dataset):
    """What makes the batch of a group of places, here or in a worker process; without an order, by number."""

    source: Source
    view: View
    order: Order | None = None

    @cached_property
    def shelf(self) -> BatchCache | None:
        """Where batches of these are kept, if any are."""
        return batch_cache_for(self.source, self.view, self.order)

    def kept(self, places: list[Place]) -> Batch | None:
        """The batch, if it has been made before and kept."""
        if self.shelf is None or (found := self.shelf.get(places)) is None:
            return None
        images, indices = found
        return self.batch(torch.from_numpy(images), indices, [place for _, place in places])

    def __getitems__(self, places: list[Place]) -> Made:
        """The batch, and what is wrong with those of its images that are not in it; a whole one is kept."""
        if (kept := self.kept(places)) is not None:
            return kept, []
        batch, wrong = self.made(places)
        if self.shelf and not wrong:
            self.shelf.put(places, batch["image"].numpy(), batch["index"].numpy())
        return batch, wrong

    def made(self, places: list[Place]) -> Made:
        """The usable samples as one batch, and what is wrong with the others."""
        images = torch.empty((len(places), 3, *self.view.size), dtype=torch.uint8)
        rows = images.numpy()  # whose parts are quicker to take than a tensor's
        order = self.order
        indices = order.samples(places).tolist() if order else [number for _, number in places]
        rngs = order.rngs(places) if order else (np.random.default_rng(0) for _ in places)
        good: list[int] = []
        where: list[int] = []
        wrong: list[tuple[int, BadImage]] = []
        for (_, place), index, rng in zip(places, indices, rngs, strict=True):
            try:
                rows[len(good)] = transform(self.source.fetch(index), self.view, rng).transpose(2, 0, 1)
                good.append(index)
                where.append(place)
            except BadImage as error:
                wrong.append((index, error))
        return self.batch(images[: len(good)], np.array(good, dtype=np.int64), where), wrong

    def batch(self, images: Tensor, indices: np.ndarray, places: list[int]) -> Batch:
        labels = self.source.labels[indices]
        if self.source.multilabel:
            labels = labels.padded(self.source.labels.most)
        labels = torch.from_numpy(labels)
        numbers = {"index": torch.from_numpy(indices), "place": torch.tensor(places, dtype=torch.int64)}
        return {"image": images, "label": labels, **numbers}


def stream(samples: Samples, groups: Iterator[list[Place]], workers: int, bad: Notes) -> Iterator[Batch]:
    """Groups of places to batches, in order: at once without workers, else made ahead by processes.

    As long as batches are kept, they are read here: quicker than to hear of them from a process.
    """
    for group in groups:
        if (kept := samples.kept(group)) is None:
            groups = chain([group], groups)
            break
        yield kept
    else:
        return  # there is nothing left for which processes would be started
    made = made_ahead(samples, groups, workers) if workers else map(samples.__getitems__, groups)
    for batch, wrong in made:
        for index, error in wrong:
            bad.add(samples.source, index, error)
        yield batch


def made_ahead(samples: Samples, groups: Iterator[list[Place]], workers: int) -> Iterator[Made]:
    """The batches of worker processes; one that dies or hangs is an error that names what it had in hand."""
    check_sockets()
    begun: deque[list[Place]] = deque()

    def noted() -> Iterator[list[Place]]:
        for group in groups:
            begun.append(group)
            yield group

    loader = DataLoader(
        samples,
        batch_sampler=noted(),
        num_workers=workers,
        prefetch_factor=AHEAD,
        collate_fn=packed,  # type: ignore[arg-type]  # a batch is whole as it comes
        worker_init_fn=stay,
        generator=torch.Generator(),  # else it would draw from the one that dropout draws from
        multiprocessing_context=Workers(),
        timeout=GLANCE,
    )
    before, others = signal.getsignal(signal.SIGCHLD), set(STARTED)
    batches = iter(loader)
    mine = set(STARTED) - others
    if threading.current_thread() is threading.main_thread():
        # torch's would raise wherever we are, in a save too
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    while True:
        try:
            found = patiently(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            if "in DataLoader worker process" in str(error):  # an error of ours, brought over whole
                raise
            for worker in mine:  # which one may wait for in vain
                worker.kill()
            raise ChildProcessError(loss(samples, list(begun)[:workers], str(error))) from None
        begun.popleft()
        yield unpacked(found)


def packed(made: Made) -> Any:
    """For the way to another process: each tensor in shared memory takes it a millisecond, so only one is."""
    batch, wrong = made
    return {k: t if k == "image" else t.numpy() for k, t in batch.items()}, wrong


def unpacked(made: Any) -> Made:
    batch, wrong = made
    return {k: t if k == "image" else torch.from_numpy(t) for k, t in batch.items()}, wrong


def patiently(batches: Iterator[Any]) -> Any:
    """The next batch, whatever the number of looks it takes."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out") or time.monotonic() > end:
                raise


def loss(samples: Samples, begun: list[list[Place]], what: str) -> str:
    """What to say of a worker that is gone."""
    order = samples.order
    numbers = [order.sample(*place) if order else place[1] for group in begun for place in group]
    keys = [samples.source.keys[number] for number in numbers]
    why = f"gave nothing for {PATIENCE:g} seconds" if "timed out" in what else f"has died ({what})"
    return (
        f"{samples.source.name}: a data worker {why}; in hand were {len(keys)} images, the first "
        f"{', '.join(map(repr, keys[:3]))}. Give fewer --workers or more memory (also /dev/shm), or find the "
        "file with vitkit doctor"
    )


class Worker(ForkProcess):
    """A data worker, forked: sources hold open files and functions, which cannot be sent."""

    def start(self) -> None:
        self.by_main_thread = threading.current_thread() is threading.main_thread()
        super().start()
        STARTED.add(self)

    def run(self) -> None:
        end_with_parent(self._parent_pid, self.by_main_thread)  # type: ignore[attr-defined]
        super().run()


class Workers(ForkContext):
    Process = Worker


STARTED: WeakSet[Worker] = WeakSet()
os.register_at_fork(after_in_child=STARTED.clear)


@atexit.register
def end_workers() -> None:
    """Before Python ends its children by a signal that these do not answer, and waits for them for ever."""
    for worker in [worker for worker in STARTED if worker.is_alive()]:
        worker.kill()


def stay(worker: int) -> None:
    """A signal to the whole group is the main process's to answer; it ends its workers itself."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
