"""Records to batches: decoded, viewed and stacked by worker processes, in an order that none can change."""

# B images in a batch; h, w pixels of a view

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitkit.data.decode import BadImage, decode
from vitkit.data.order import Order
from vitkit.data.sources import Source
from vitkit.data.views import View, apply, min_shorter

AHEAD = 2  # batches that each worker makes ahead

Batch = dict[str, Tensor]  # image (B, 3, h, w) uint8, label (B,) or (B, classes), index (B,)
Place = tuple[int, int]  # (step, place) of a training order, (0, number) in evaluation
Made = tuple[Batch | None, list[tuple[int, BadImage]]]  # a batch, and what was wrong with its other images


class TooManyBad(ValueError):
    """More files of a data set are unusable than was allowed."""


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
                f"{self.allowed:.0%} allowed; the first: {listed}. Mend them, or raise --max-bad"
            )


def train_batches(
    source: Source,
    view: View,
    order: Order,
    *,
    start: int = 0,
    places: range | None = None,
    workers: int = 0,
    bad: BadFiles | None = None,
) -> Iterator[Batch]:
    """Batches from step `start` on, without end; `places` is this process's part of each global batch.

    A file that cannot be used leaves its batch one image smaller; no other sample takes its place.
    """
    if order.length != len(source):
        raise ValueError(f"an order over {order.length} samples does not fit a source of {len(source)}")
    mine = range(order.batch) if places is None else places
    groups = ([(step, place) for place in mine] for step in count(start))
    return stream(Samples(source, view, order), groups, workers, bad or BadFiles())


def evaluation_batches(
    source: Source,
    view: View,
    batch: int,
    *,
    places: slice = slice(None),
    workers: int = 0,
    bad: BadFiles | None = None,
) -> Iterator[Batch]:
    """Every image exactly once, in order; `places` picks this process's share of them."""
    indices = range(len(source))[places]
    groups = ([(0, i) for i in indices[at : at + batch]] for at in range(0, len(indices), batch))
    return stream(Samples(source, view), groups, workers, bad or BadFiles(allowed=1.0))


@dataclass(frozen=True)
class Samples(Dataset):
    """What makes the sample of a place, here or in a worker process; without an order, by its number."""

    source: Source
    view: View
    order: Order | None = None

    def __getitem__(self, place: Place) -> tuple[Tensor, np.ndarray, int] | tuple[int, BadImage]:
        index = self.order.sample(*place) if self.order else place[1]
        rng = self.order.rng(*place) if self.order else np.random.default_rng(0)
        try:
            content = self.source.fetch(index)
            if isinstance(content, bytes):
                content = decode(content, shorter=min_shorter(self.view))
            return apply(content, self.view, rng), self.source.labels[index], index
        except BadImage as error:
            return index, error


def stack(samples: list) -> Made:
    """The usable samples as one batch, and the others."""
    good = [found for found in samples if len(found) == 3]
    wrong = [found for found in samples if len(found) == 2]
    if not good:
        return None, wrong
    images, labels, indices = zip(*good, strict=True)
    batch = {
        "image": torch.stack(images),
        "label": torch.from_numpy(np.stack(labels)),
        "index": torch.tensor(indices),
    }
    return batch, wrong


def stream(samples: Samples, groups: Iterator[list[Place]], workers: int, bad: BadFiles) -> Iterator[Batch]:
    """Groups of places to batches, in order: at once without workers, else made ahead by processes."""
    made: Iterable[Made] = (
        DataLoader(
            samples,
            batch_sampler=groups,
            num_workers=workers,
            prefetch_factor=AHEAD,
            collate_fn=stack,
            worker_init_fn=stay,
            generator=torch.Generator(),  # else it would draw from the one that dropout draws from
            multiprocessing_context="fork",  # sources hold open files and functions, which cannot be sent
        )
        if workers
        else (stack([samples[place] for place in group]) for group in groups)
    )
    for batch, wrong in made:
        for index, error in wrong:
            bad.add(samples.source, index, error)
        if batch is None:
            raise TooManyBad(f"{samples.source.name}: a whole batch of {len(wrong)} images is unusable")
        yield batch


def stay(worker: int) -> None:
    """A signal to the whole group is the main process's to answer; it ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
