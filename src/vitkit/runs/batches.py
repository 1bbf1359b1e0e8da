"""The training batches of a recipe, on the device: the same on any number of processes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import numpy as np
import torch

from vitkit.data.decode import BadImage
from vitkit.data.loader import BadFileLog, BadFiles, Batch, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.views import View, mixup, normalise
from vitkit.models.card import Preprocessing
from vitkit.recipes.recipe import Recipe
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import one_hot


def training_view(recipe: Recipe) -> View:
    augment = (recipe.randaugment[0], recipe.randaugment[1]) if recipe.randaugment else None
    return View(
        size=recipe.image_size, crop=recipe.crop, flip=recipe.flip, randaugment=augment,
        resize=recipe.resize or None,
    )  # fmt: skip


def training_batches(
    recipe: Recipe,
    source: Source,
    order: Order,
    preprocessing: Preprocessing,
    runtime: Runtime,
    *,
    start: int,
    stop: int | None = None,
    workers: int,
    bad: BadFileLog,
    waited: Callable[[float], None],
    prepare: Callable[[int, Batch], Batch] | None = None,
) -> Iterator[list[Batch]]:
    """Micro-batches of each step from `start` on; `waited` is told how long each was waited for.

    stop: the last step is the one before it, and no batch is made ahead for others; None: without end.
    prepare: what (step, batch) goes through before it is on the device.

    Every process has equally many of them, some perhaps without an image: with fsdp each is a call together.
    """
    mine = runtime.local_places(recipe.batch)
    places = list(mine)
    if recipe.mixup and len(places) < recipe.batch:
        places.insert(0, (mine.start - 1) % recipe.batch)  # the partner of the first one
    view = training_view(recipe)
    stream = train_batches(
        source, view, order, start=start, stop=stop, places=places, workers=workers, bad=bad
    )
    if prepare:
        stream = map(prepare, count(start), stream)
    placed: Iterator[Batch] = map(runtime.to_device, stream)
    if runtime.device != "cpu":
        placed = prefetched(placed)  # the way to the device is gone while it computes
    for step in count(start):
        begun = time.monotonic()
        if (batch := next(placed, None)) is None:
            return
        waited(time.monotonic() - begun)
        if recipe.mixup:  # before the batch is cut in pieces, so that the pieces do not matter
            images = normalise(batch["image"], preprocessing.mean, preprocessing.std)
            labels = one_hot(batch["label"], len(source.classes))
            whole = batch | {"image": images, "label": labels}
            batch = mixup_batch(whole, recipe.mixup, order.rng(step, -1), mine, recipe.batch)
        yield micro_batches(batch, mine, recipe.micro_batch)


def prefetched(batches: Iterator[Batch], most: int = 2) -> Iterator[Batch]:
    """The same batches, fetched by a thread while those before them are used."""
    ready: Queue[Batch | BaseException | None] = Queue(most)
    done = Event()

    def work() -> None:
        end: BaseException | None = None
        try:
            for batch in batches:
                ready.put(batch)
                if done.is_set():
                    return
        except BaseException as error:
            end = error
        ready.put(end)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        done.set()
        while not ready.empty():  # where the thread waits for room, it is to go on and see that it is done
            ready.get()
        thread.join()


def mixup_batch(batch: Batch, alpha: float, rng: np.random.Generator, mine: range, total: int) -> Batch:
    """Each image mixed with that of the place before it in the global batch, or not if that was unusable."""
    places = batch["place"].tolist()
    row = {place: i for i, place in enumerate(places)}
    partner = torch.tensor([row.get((place - 1) % total, row[place]) for place in places], dtype=torch.int64)
    images, labels = mixup(batch["image"], batch["label"], alpha, rng, partner.to(batch["image"].device))
    kept = [i for i, place in enumerate(places) if place in mine]
    return {name: t[kept] for name, t in (batch | {"image": images, "label": labels}).items()}


def micro_batches(batch: Batch, mine: range, size: int) -> list[Batch]:
    """A batch in pieces of at most `size` places (0: whole), whether or not their images are usable."""
    if not size or size >= len(mine):
        return [batch]
    row = {place: i for i, place in enumerate(batch["place"].tolist())}
    pieces = [
        [row[place] for place in mine[at : at + size] if place in row] for at in range(0, len(mine), size)
    ]
    return [{name: t[rows] for name, t in batch.items()} for rows in pieces]


def name_batch(order: Order, step: int, source: Source, out: Path, runtime: Runtime) -> str:
    """The images of a step for whoever must look at them, all of them in a file of the run folder."""
    keys = [source.keys[order.sample(step, place)] for place in range(order.batch)]
    path = out / f"batch-{step}.txt"
    if runtime.is_main:
        path.write_text("\n".join(keys) + "\n", errors="surrogateescape")
    return (
        f"its batch: {', '.join(map(repr, keys[:3]))} ... (all {len(keys)} in {path}). Nothing of this "
        "step was saved; look at those images, or use a lower learning rate in another --out"
    )


@dataclass
class UnusableImages:
    """Files that some process could not use, told to all: each is named once, and all count alike."""

    source: Source
    bad: BadFiles
    runtime: Runtime
    noted: list[tuple[int, BadImage]] = field(default_factory=list)  # only grows: a thread may be adding
    told: int = 0

    def add(self, source: Source, index: int, error: BadImage) -> None:
        if source.keys[index] not in self.bad.reasons:
            self.noted.append((index, error))

    @property
    def news(self) -> list[tuple[int, BadImage]]:
        return self.noted[self.told :]

    def tell(self) -> None:
        """What is new in any process; all must ask at the same time. Too many of them are an error of all."""
        mine = self.news
        self.told += len(mine)
        found = {index: error for news in self.runtime.all_gather_object(mine) for index, error in news}
        for index, error in sorted(found.items(), key=lambda one: one[0]):
            self.bad.add(self.source, index, error)
