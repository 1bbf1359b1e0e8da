"""The training batches of a recipe on the device, the same for any number of processes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import numpy as np
import torch

from vitkit.data.augment import cutmix
from vitkit.data.decode import BadImage
from vitkit.data.loader import BadFileLog, BadFiles, Batch, train_batches
from vitkit.data.order import BalancedOrder, Order
from vitkit.data.sources.source import Source
from vitkit.data.views import View, mixup, normalise
from vitkit.errors import Error
from vitkit.models.card import Preprocessing
from vitkit.recipes.recipe import Recipe
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import one_hot

PlacedBatch = tuple[list[int], Batch]  # places in the global batch, and the batch on its device


def training_view(recipe: Recipe) -> View:
    """The transform of each training image; a task that learns from several views makes this the first."""
    augment = (recipe.randaugment[0], recipe.randaugment[1]) if recipe.randaugment else None
    view = View(
        size=recipe.image_size, crop=recipe.crop, area=recipe.crop_area, resize=recipe.resize or None,
        interpolation=recipe.interpolation, flip=recipe.flip, three_augment=recipe.three_augment,
        color_jitter=recipe.color_jitter, randaugment=augment, erasing=recipe.erasing,
    )  # fmt: skip
    return recipe.task.first_view(view)


def training_order(recipe: Recipe, source: Source) -> Order:
    """The order of the training images by the recipe's sampling."""
    if recipe.sampling == "shuffled":
        return Order(len(source), recipe.batch, recipe.seed)
    if source.multilabel:
        raise Error(
            f"{source.name} has several labels per image, but sampling=balanced needs one; use "
            "sampling=shuffled",
            code="data.labels",
        )
    return BalancedOrder(len(source), recipe.batch, recipe.seed, labels=np.asarray(source.labels))


def mixes(recipe: Recipe) -> bool:
    """Whether images are mixed with others of their batch."""
    return bool(recipe.mixup or recipe.cutmix)


def mixing_text(recipe: Recipe) -> str:
    """The names of the recipe's ways to mix images."""
    names = {"Mixup": recipe.mixup, "CutMix": recipe.cutmix}
    return " or ".join(name for name, alpha in names.items() if alpha)


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
    """The micro-batches of each step from `start` on.

    stop: the end of the steps, beyond which nothing is prefetched; None: endless.
    waited: called with the seconds that each step has waited for its batch.
    prepare: a transform of (step, batch) on the CPU.

    Every process has the same number of micro-batches, if need be without images: a forward pass under FSDP
    is collective.
    """
    mine = runtime.local_places(recipe.batch)
    places = list(mine)
    if mixes(recipe) and len(places) < recipe.batch:
        places.insert(0, (mine.start - 1) % recipe.batch)  # mixed with the first one
    view = training_view(recipe)
    stream = train_batches(
        source, view, order, start=start, stop=stop, places=places, workers=workers, bad=bad,
        more=recipe.task.more_views(view), target_view=recipe.task.target_view(view, source),
    )  # fmt: skip
    if prepare:
        stream = map(prepare, count(start), stream)
    placed: Iterator[PlacedBatch] = ((batch["place"].tolist(), runtime.to_device(batch)) for batch in stream)
    if runtime.device != "cpu":
        placed = prefetched(placed)  # copies to the device while it computes
    for step in count(start):
        start_time = time.monotonic()
        if (following := next(placed, None)) is None:
            return
        places, batch = following
        waited(time.monotonic() - start_time)
        if mixes(recipe):  # on the whole batch, so that the micro-batch size changes nothing
            images = normalise(batch["image"], preprocessing.mean, preprocessing.std)
            labels = one_hot(batch["label"], len(source.classes))
            whole = batch | {"image": images, "label": labels}
            batch = mix_batch(whole, places, recipe, order.rng(step, -1), mine)
            places = [place for place in places if place in mine]
        yield micro_batches(batch, places, mine, recipe.micro_batch)


def prefetched(batches: Iterator[PlacedBatch], most: int = 2) -> Iterator[PlacedBatch]:
    """The same batches, up to `most` of them prefetched by a thread."""
    queue: Queue[PlacedBatch | BaseException | None] = Queue(most)
    closed = Event()

    def prefetch() -> None:
        end: BaseException | None = None
        try:
            for batch in batches:
                queue.put(batch)
                if closed.is_set():
                    return
        except BaseException as error:
            end = error
        queue.put(end)

    thread = Thread(target=prefetch, daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        while not queue.empty():  # unblocks a thread that waits in `put`
            queue.get()
        thread.join()


def mix_batch(
    batch: Batch, places: list[int], recipe: Recipe, rng: np.random.Generator, mine: range
) -> Batch:
    """Mix each image with the one before it in the global batch; not where that one is unusable.

    places: the place of each image in the global batch, on the CPU. With both Mixup and CutMix, each batch
    has one of them, with probability 1/2.
    """
    total, both = recipe.batch, bool(recipe.mixup and recipe.cutmix)
    mix, alpha = (cutmix, recipe.cutmix) if recipe.cutmix else (mixup, recipe.mixup)
    if both and rng.random() < 0.5:
        mix, alpha = mixup, recipe.mixup
    partner = None
    if places != list(range(total)):  # some images are unusable, or on other processes
        row = {place: i for i, place in enumerate(places)}
        rows = [row.get((place - 1) % total, row[place]) for place in places]
        partner = torch.tensor(rows, dtype=torch.int64).to(batch["image"].device)
    images, labels = mix(batch["image"], batch["label"], alpha, rng, partner)
    rows = [i for i, place in enumerate(places) if place in mine]
    return selected(batch | {"image": images, "label": labels}, rows)


def micro_batches(batch: Batch, places: list[int], mine: range, size: int) -> list[Batch]:
    """Split a batch into micro-batches of at most `size` places (0: one), counting unusable images too."""
    if not size or size >= len(mine):
        return [batch]
    row = {place: i for i, place in enumerate(places)}
    pieces = [
        [row[place] for place in mine[start : start + size] if place in row]
        for start in range(0, len(mine), size)
    ]
    return [selected(batch, rows) for rows in pieces]


def selected(batch: Batch, rows: list[int]) -> Batch:
    """Some rows of a batch, in ascending order; all of them without a copy."""
    if len(rows) == len(batch["image"]):
        return batch
    return {name: tensor[rows] for name, tensor in batch.items()}


def name_batch(order: Order, step: int, source: Source, out: Path, runtime: Runtime) -> str:
    """The batch of a step for an error message; a file of the run folder lists all of its images."""
    keys = [source.keys[order.sample(step, place)] for place in range(order.batch)]
    path = out / f"batch-{step}.txt"
    if runtime.is_main:
        path.write_text("\n".join(keys) + "\n", errors="surrogateescape", encoding="utf-8")
    return (
        f"its batch: {', '.join(map(repr, keys[:3]))} ... (all {len(keys)} in {path}). Nothing of this "
        "step was saved; check those images, or use a lower learning rate in another --out"
    )


@dataclass
class UnusableImages:
    """The unusable files of all processes: each is reported once, and every process has the same count."""

    source: Source
    bad: BadFiles
    runtime: Runtime
    local: list[tuple[int, BadImage]] = field(default_factory=list)  # only grows: a thread may be adding
    synchronized: int = 0  # of `local`, that all processes know of

    def add(self, source: Source, index: int, error: BadImage) -> None:
        if source.keys[index] not in self.bad.reasons:
            self.local.append((index, error))

    @property
    def unreported(self) -> list[tuple[int, BadImage]]:
        return self.local[self.synchronized :]

    def synchronize(self) -> None:
        """Gather the new files of all processes; collective. Raises in every process if they are too many."""
        new = self.unreported
        self.synchronized += len(new)
        gathered = self.runtime.all_gather_object(new)
        errors = {index: error for files in gathered for index, error in files}
        for index, error in sorted(errors.items(), key=lambda item: item[0]):
            self.bad.add(self.source, index, error)
