"""Records to batches: decoded, viewed and stacked by threads, in an order that no thread can change."""

# B images in a batch; h, w pixels of a view

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, decode
from vitkit.data.order import Order
from vitkit.data.sources import Source
from vitkit.data.views import View, apply, min_shorter

AHEAD = 3  # batches in the making beside the one in use

Batch = dict[str, Tensor]  # image (B, 3, h, w) uint8, label (B,) or (B, classes), index (B,)
Sample = tuple[Tensor, np.ndarray, int]
Place = tuple[int, np.random.Generator]  # the number of a sample, and its random choices


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

    def steps() -> Iterator[list[Place]]:
        step = start
        while True:
            yield [(order.sample(step, place), order.rng(step, place)) for place in mine]
            step += 1

    return stream(source, view, steps(), workers, bad or BadFiles())


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
    nothing = np.random.Generator(np.random.Philox(0))  # evaluation views make no random choice
    groups = ([(i, nothing) for i in indices[at : at + batch]] for at in range(0, len(indices), batch))
    return stream(source, view, groups, workers, bad or BadFiles(allowed=1.0))


def stream(
    source: Source, view: View, groups: Iterator[list[Place]], workers: int, bad: BadFiles
) -> Iterator[Batch]:
    """Groups of places to batches: at once when there are no workers, else some batches ahead."""
    if workers < 1:
        for group in groups:
            yield stack([sample(source, view, *place) for place in group], source, bad)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="vitkit-data")
    making: deque[list[Future]] = deque()
    try:
        while True:
            for group in islice(groups, AHEAD + 1 - len(making)):
                making.append([pool.submit(sample, source, view, *place) for place in group])
            if not making:
                return
            yield stack([future.result() for future in making.popleft()], source, bad)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def sample(source: Source, view: View, index: int, rng: np.random.Generator) -> Sample | tuple[int, BadImage]:
    """One image through its view, or what is wrong with it."""
    try:
        content = source.fetch(index)
        image = decode(content, shorter=min_shorter(view)) if isinstance(content, bytes) else content
        return apply(image, view, rng), source.labels[index], index
    except BadImage as error:
        return index, error


def stack(samples: list[Sample | tuple[int, BadImage]], source: Source, bad: BadFiles) -> Batch:
    good: list[Sample] = []
    for found in samples:
        if len(found) == 2:
            bad.add(source, *found)
        else:
            good.append(found)
    if not good:
        raise TooManyBad(f"{source.name}: a whole batch of {len(samples)} images is unusable")
    labels = np.stack([label for _, label, _ in good])
    return {
        "image": torch.stack([image for image, _, _ in good]),
        "label": torch.from_numpy(labels),
        "index": torch.tensor([index for _, _, index in good]),
    }
