"""Frozen features on any number of processes, cached by content; few-shot accuracy of them."""

# M usable images of a source, D features

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from vitkit.data.loader import BadFiles, evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.data.splits import fingerprints
from vitkit.data.views import View
from vitkit.errors import Error
from vitkit.inference.predict import evaluation_view, features
from vitkit.io.cache import touch, trim
from vitkit.io.files import replace_file
from vitkit.metrics.frozen_features import L2, choose_shots, fewshot_grid
from vitkit.metrics.intervals import wilson, with_interval
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe
from vitkit.report.terminal import Live
from vitkit.runs.build import Opener, open_splits
from vitkit.runs.evaluation import kept_model
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Task

VIEWS = {
    "model": "as the model's own preprocessing asks",
    "official": "squashed to 256 / 224 of the model's size, then the central crop",
}
VERSION = 1  # of what a cache file means
LIMIT = 10 * 10**9  # bytes of all features in the user's cache folder; ImageNet's by a ViT-L/16 are 5.3
LONG = timedelta(days=1)  # that looking at every image of a large data set may take


@dataclass(frozen=True)
class Features:
    """What the head sees of the images of a source; those that could not be used are missing."""

    x: Tensor  # (M, D) float32
    index: Tensor  # (M,) their numbers in the source, in order


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A model whose features are asked for, whole on each device, and how they are made and kept."""

    model: Model
    runtime: Runtime = Runtime()
    view: str = "model"
    batch: int = 64
    workers: int = 0
    cache: Path | None = None
    limit: int | None = None  # bytes of the cache, beyond which the least recently used go; None: all stay
    log: Callable[[str], None] = lambda text: None
    quiet: bool = True

    def __post_init__(self) -> None:
        if self.view not in VIEWS:
            raise Error(f"no view {self.view!r}; known: {', '.join(VIEWS)}", code="request.value")
        assert (
            not self.runtime.is_sharded
        )  # only a forward pass of all processes together could use the model
        if self.batch < 1:
            raise Error(f"batch must be at least 1, not {self.batch}", code="request.value")

    def features(self, source: Source) -> Features:
        """Out of the cache where they are there; else by the model, each process a share of the images."""
        if self.cache is None:
            return self.compute(source)
        path, found = self.runtime.on_main_first(lambda: self.look_up(source), timeout=LONG)
        if found is None:
            found = self.compute(source)
            self.runtime.on_main_first(lambda: self.keep(path, found))
        return found

    def compute(self, source: Source) -> Features:
        """Every usable image of a source through the model."""
        self.model.eval()
        runtime, view = self.runtime, self.wide_view
        bad = BadFiles(1.0, lambda key, why: self.log(f"skipped: {key}: {why}"))
        mine = slice(runtime.rank, None, runtime.world)
        batches = evaluation_batches(source, view, self.batch, places=mine, workers=self.workers, bad=bad)
        share = len(range(len(source))[mine])
        rows, numbers = [], []
        with Live("features", share, quiet=self.quiet or not runtime.is_main) as live:
            for batch in batches:
                rows.append(self.seen(batch["image"]))
                numbers.append(batch["index"])
                live.more(len(batch["index"]))
        own = (torch.cat(rows), torch.cat(numbers)) if rows else None
        parts = [part for part in runtime.all_gather_object(own) if part is not None]
        if not parts:
            raise Error(f"{source.name}: there is no image that can be used", code="data.empty")
        index, order = torch.cat([numbers for _, numbers in parts]).sort()
        return Features(torch.cat([x for x, _ in parts])[order], index)

    def seen(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, h, w) of the wide view to what the head sees, (B, D) on the CPU."""
        return features(self.model, centre(images, self.model.config.image_size))

    @cached_property
    def wide_view(self) -> View:
        """What is taken from an image before the central crop; mostly all that there is to do."""
        size = self.model.config.image_size
        if self.view == "model":
            return evaluation_view(self.model.preprocessing, size)
        height, width = (round(side * 256 / 224) for side in size)
        return View(size=(height, width), crop="squash")

    @cached_property
    def how(self) -> bytes:
        """SHA-256 of everything but the images that the features depend on."""
        model = self.model
        about = {"version": VERSION, "kind": type(model).__name__, "config": asdict(model.config),
                 "preprocessing": asdict(model.preprocessing), "view": asdict(self.wide_view)}  # fmt: skip
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for name, tensor in sorted(model.state_dict().items()):
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def look_up(self, source: Source) -> tuple[Path, Features | None]:
        """Where the features of a source are kept, and they themselves if they are there and whole."""
        assert self.cache is not None
        key = hashlib.sha256(self.how + fingerprints(source).tobytes()).hexdigest()
        path = self.cache / f"{key}.safetensors"
        if not path.exists():
            return path, None
        try:
            touch(path)
            found = read(path, len(source))
        except (ValueError, OSError, safetensors.SafetensorError) as error:
            self.log(f"{path}: {error}; the features are computed again")
            return path, None
        lost = len(source) - len(found.index)
        if lost:
            self.log(f"{source.name}: {lost} images could not be used when these features were computed")
        return path, found

    def keep(self, path: Path, found: Features) -> None:
        """A cache file, whole or not at all; that it cannot be written is told and no failure."""
        about = {"vitkit": f"features {path.stem} {content(found)}"}
        arrays = {"x": found.x.contiguous(), "index": found.index}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda beside: safetensors.torch.save_file(arrays, beside, about))
        except (OSError, safetensors.SafetensorError) as error:
            self.log(f"the features are not kept: {error}")
            return
        if self.limit is not None:
            trim(path.parent, self.limit, using=path)


def read(path: Path, images: int) -> Features:
    """The features in a cache file; an error if it is damaged or none of ours."""
    with safetensors.safe_open(path, "pt") as file:
        about = (file.metadata() or {}).get("vitkit", "").split()
        if len(about) != 3 or about[:2] != ["features", path.stem] or set(file.keys()) != {"x", "index"}:
            raise Error("not a file of these features", code="file.unreadable")
        found = Features(file.get_tensor("x"), file.get_tensor("index"))
    if content(found) != about[2]:
        raise Error("damaged", code="file.unreadable")
    fits = found.x.ndim == 2 and found.x.dtype == torch.float32 and found.index.dtype == torch.int64
    if not fits or found.index.shape != found.x.shape[:1] or not 0 < len(found.index) <= images:
        raise Error("not a file of these features", code="file.unreadable")
    return found


def content(found: Features) -> str:
    """SHA-256 of the numbers themselves."""
    digest = hashlib.sha256(f"{tuple(found.x.shape)}".encode())
    for tensor in (found.x, found.index):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def centre(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The central crop of (B, 3, H, W)."""
    top, left = ((side - part) // 2 for side, part in zip(images.shape[2:], size, strict=True))
    return images[:, :, top : top + size[0], left : left + size[1]]


SHOTS = (1, 5, 10, 25)
SEEDS = 3


def open_frozen(place: str, opened: Opener = open_splits) -> tuple[Source, Source]:
    """Train, and what is tested on: the test split, else val, else a part of train chosen by content."""
    splits = opened(Recipe(name="few-shot", data=place, val=0.0), None)
    train, test = splits["train"], splits["test"]
    if train.multilabel:
        raise Error(
            f"{place}: several labels for each image; few-shot accuracy is of one label each",
            code="data.labels",
        )
    strange = np.setdiff1d(test.labels, train.labels)
    if len(strange):
        names = ", ".join(repr(train.classes[label]) for label in strange[:5])
        raise Error(
            f"{place}: classes {names} are in the test images but not in the training images",
            code="data.classes",
        )
    return train, test


def possible_shots(train: Source) -> tuple[int, ...]:
    """Those of the usual numbers of shots that every class has images for."""
    fewest = np.unique(train.labels, return_counts=True)[1].min()
    return tuple(shots for shots in SHOTS if shots <= fewest)


@dataclass(frozen=True)
class Learning:
    """Training images with features, and which of them each seed chooses."""

    source: Source
    features: Features  # of all of its images, or of the chosen ones
    chosen: tuple[np.ndarray, ...]  # for each seed (classes, shots) numbers in the source

    def rows(self, seed: int, shots: int) -> torch.Tensor:
        """Where the features of a seed's choice lie."""
        numbers = torch.from_numpy(self.chosen[seed][:, :shots].flatten())
        return torch.searchsorted(self.features.index, numbers)

    @property
    def labels(self) -> torch.Tensor:
        return labels_of(self.source, self.features)


def labels_of(source: Source, features: Features) -> torch.Tensor:
    return torch.from_numpy(source.labels[features.index.numpy()].astype(np.int64))


def choose(train: Source, shots: int, seeds: int, usable: np.ndarray | None = None) -> list[np.ndarray]:
    return [
        choose_shots(train.labels, shots, seed=seed, usable=usable, names=train.classes)
        for seed in range(seeds)
    ]


def learn_from(extractor: Extractor, train: Source, shots: int, seeds: int) -> Learning:
    """Features of the images that some seed chooses, and of no others.

    An image that turns out to be unusable is passed over: the next one of its class takes its place.
    """
    usable = np.ones(len(train), dtype=bool)
    while True:
        chosen = choose(train, shots, seeds, usable)
        numbers = np.unique(np.concatenate(chosen))
        found = extractor.features(train.take(numbers))
        if len(found.index) == len(numbers):
            return Learning(train, Features(found.x, torch.from_numpy(numbers)), tuple(chosen))
        usable[np.delete(numbers, found.index.numpy())] = False


def learn_from_all(extractor: Extractor, train: Source, shots: int, seeds: int) -> Learning:
    """The same with features of every training image, where something else needs them too."""
    found = extractor.features(train)
    usable = np.zeros(len(train), dtype=bool)
    usable[found.index.numpy()] = True
    return Learning(train, found, tuple(choose(train, shots, seeds, usable)))


def accuracies(
    learning: Learning, shots: int, test: Source, seen: Features, grid: tuple[float, ...]
) -> np.ndarray:
    """(seeds, penalties): the share of the test images that is right."""
    labels, truth = learning.labels, labels_of(test, seen)
    table = []
    for seed in range(len(learning.chosen)):
        rows = learning.rows(seed, shots)
        table.append(fewshot_grid(learning.features.x[rows], labels[rows], seen.x, truth, grid))
    return np.array(table)


def spread(values: list[float], images: int) -> dict[str, Any]:
    """Mean and standard deviation over draws, and the interval that so many test images leave."""
    found = mean(values)
    std = stdev(values) if len(values) > 1 else None
    return {"mean": found, "std": std, "interval": list(wilson(found, images))}


@dataclass
class FewShot:
    """An evaluator: few-shot accuracy on one data set, again and again as a model learns."""

    place: str
    shots: int = 5
    seeds: int = SEEDS
    opened: Opener = open_splits
    named: bool = field(default=False, init=False)  # whether it was said which images cannot be used

    def __post_init__(self) -> None:
        self.train, self.test = open_frozen(self.place, self.opened)
        choose(self.train, self.shots, 1)  # an error now, and not when the training has begun

    def __call__(
        self,
        task: Task,
        module: nn.Module,
        runtime: Runtime,
        batch: int,
        workers: int,
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        """Mean and spread over seeds for the journal; nothing where the features cannot be learned from."""
        model = kept_model(task, module).to(runtime.device) if runtime.is_sharded else task.extract(module)
        extractor = Extractor(
            model=model, runtime=replace(runtime, parallel="ddp"), batch=batch, workers=workers,
            log=(lambda text: None) if self.named else log,
        )  # fmt: skip
        self.named = True
        learning = learn_from(extractor, self.train, self.shots, self.seeds)
        seen = extractor.features(self.test)
        if runtime.device.startswith("cuda"):  # where many draws are judged at once
            seen = Features(seen.x.to(runtime.device), seen.index)
        try:
            right = runtime.on_main_first(
                lambda: accuracies(learning, self.shots, self.test, seen, (L2,))[:, 0].tolist()
            )
        except ValueError as error:
            log(f"few-shot accuracy on {self.place}: {error}")
            return {}
        images = len(seen.index)
        told = spread(right, images)
        right_words = with_interval(told["mean"], images)
        log(f"{right_words} of {images} images of {self.place} right after {self.shots} shots")
        facts = {"mean": told["mean"], "std": told["std"], "shots": self.shots, "images": images}
        return {f"fewshot_{name}": value for name, value in facts.items()}
