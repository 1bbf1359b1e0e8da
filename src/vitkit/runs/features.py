"""Frozen features on any number of processes, cached by content, and their few-shot accuracy."""

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
from vitkit.metrics.frozen_features import L2, LinearHead, choose_shots, fewshot_grid, ridge_head
from vitkit.metrics.intervals import wilson, with_interval
from vitkit.models.adapt import set_head
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe
from vitkit.report.terminal import Live
from vitkit.runs.build import Opener, open_splits
from vitkit.runs.kept_weights import kept_model
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Task

VIEWS = {
    "model": "the model's own preprocessing",
    "official": "squashed to 256 / 224 of the model's size, then the central crop",
}
VERSION = 1  # of the cache files
LIMIT = 10 * 10**9  # bytes of the cache folder; a ViT-L/16 has 5.3 GB of features for ImageNet
LONG = timedelta(days=1)  # for reading every image of a large data set


@dataclass(frozen=True)
class Features:
    """The inputs of the head for the images of a source, without the unusable ones."""

    x: Tensor  # (M, D) float32
    index: Tensor  # (M,) indices in the source, ascending


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Computes features with a model that is whole on each device, and caches them."""

    model: Model
    runtime: Runtime = Runtime()
    view: str = "model"
    batch: int = 64
    workers: int = 0
    cache: Path | None = None
    limit: int | None = None  # bytes of the cache, which evicts the least recently used; None: no limit
    log: Callable[[str], None] = lambda text: None
    quiet: bool = True

    def __post_init__(self) -> None:
        if self.view not in VIEWS:
            raise Error(f"no view {self.view!r}; known: {', '.join(VIEWS)}", code="request.value")
        assert not self.runtime.is_sharded  # a forward pass of a sharded model is collective
        if self.batch < 1:
            raise Error(f"batch must be at least 1, not {self.batch}", code="request.value")

    def features(self, source: Source) -> Features:
        """The features of a source, cached or computed; each process computes a share of the images."""
        if self.cache is None:
            return self.compute(source)
        path, cached = self.runtime.on_main_first(lambda: self.look_up(source), timeout=LONG)
        if cached is not None:
            return cached
        computed = self.compute(source)
        self.runtime.on_main_first(lambda: self.store(path, computed))
        return computed

    def compute(self, source: Source) -> Features:
        """The features of every usable image of a source."""
        self.model.eval()
        runtime, view = self.runtime, self.uncropped_view
        bad = BadFiles(1.0, lambda key, why: self.log(f"skipped: {key}: {why}"))
        mine = slice(runtime.rank, None, runtime.world)
        batches = evaluation_batches(source, view, self.batch, places=mine, workers=self.workers, bad=bad)
        share = len(range(len(source))[mine])
        rows, numbers = [], []
        with Live("features", share, quiet=self.quiet or not runtime.is_main) as live:
            for batch in batches:
                rows.append(self.head_inputs(batch["image"]))
                numbers.append(batch["index"])
                live.more(len(batch["index"]))
        own = (torch.cat(rows), torch.cat(numbers)) if rows else None
        parts = [part for part in runtime.all_gather_object(own) if part is not None]
        if not parts:
            raise Error(f"{source.name}: no image is usable", code="data.empty")
        index, order = torch.cat([numbers for _, numbers in parts]).sort()
        return Features(torch.cat([x for x, _ in parts])[order], index)

    def head_inputs(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, h, w) of the wide view to features (B, D) on the CPU."""
        return features(self.model, centre(images, self.model.config.image_size))

    @cached_property
    def uncropped_view(self) -> View:
        """The transform before the central crop, which is a no-op for view="model"."""
        size = self.model.config.image_size
        if self.view == "model":
            return evaluation_view(self.model.preprocessing, size)
        height, width = (round(side * 256 / 224) for side in size)
        return View(size=(height, width), crop="squash")

    @cached_property
    def config_hash(self) -> bytes:
        """SHA-256 of everything that decides the features, except the images."""
        model = self.model
        about = {"version": VERSION, "kind": type(model).__name__, "config": asdict(model.config),
                 "preprocessing": asdict(model.preprocessing),
                 "view": asdict(self.uncropped_view)}  # fmt: skip
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for name, tensor in sorted(model.state_dict().items()):
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def look_up(self, source: Source) -> tuple[Path, Features | None]:
        """The cache file for a source, and its features if the file is there and intact."""
        assert self.cache is not None
        key = hashlib.sha256(self.config_hash + fingerprints(source).tobytes()).hexdigest()
        path = self.cache / f"{key}.safetensors"
        if not path.exists():
            return path, None
        try:
            touch(path)
            cached = read(path, len(source))
        except (ValueError, OSError, safetensors.SafetensorError) as error:
            self.log(f"{path}: {error}; the features are computed again")
            return path, None
        unusable = len(source) - len(cached.index)
        if unusable:
            self.log(f"{source.name}: {unusable} images were unusable when these features were computed")
        return path, cached

    def store(self, path: Path, features: Features) -> None:
        """Write the cache file atomically; a failure is logged and ends nothing."""
        about = {"vitkit": f"features {path.stem} {content_hash(features)}"}
        arrays = {"x": features.x.contiguous(), "index": features.index}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda beside: safetensors.torch.save_file(arrays, beside, about))
        except (OSError, safetensors.SafetensorError) as error:
            self.log(f"the features are not cached: {error}")
            return
        if self.limit is not None:
            trim(path.parent, self.limit, using=path)


def read(path: Path, images: int) -> Features:
    """The features in a cache file; raises if it is damaged or not a cache file."""
    with safetensors.safe_open(path, "pt") as file:
        about = (file.metadata() or {}).get("vitkit", "").split()
        if len(about) != 3 or about[:2] != ["features", path.stem] or set(file.keys()) != {"x", "index"}:
            raise Error("not a cache file of these features", code="file.unreadable")
        cached = Features(file.get_tensor("x"), file.get_tensor("index"))
    if content_hash(cached) != about[2]:
        raise Error("damaged", code="file.unreadable")
    valid = cached.x.ndim == 2 and cached.x.dtype == torch.float32 and cached.index.dtype == torch.int64
    if not valid or cached.index.shape != cached.x.shape[:1] or not 0 < len(cached.index) <= images:
        raise Error("not a cache file of these features", code="file.unreadable")
    return cached


def content_hash(features: Features) -> str:
    """SHA-256 of the values."""
    digest = hashlib.sha256(f"{tuple(features.x.shape)}".encode())
    for tensor in (features.x, features.index):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def centre(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The central crop of (B, 3, H, W)."""
    top, left = ((side - part) // 2 for side, part in zip(images.shape[2:], size, strict=True))
    return images[:, :, top : top + size[0], left : left + size[1]]


HEAD_IMAGES = 20_000  # at most, to which a head is fitted before training


def fit_head(
    model: Model, source: Source, runtime: Runtime, *, batch: int, workers: int, seed: int
) -> LinearHead:
    """Set the model's head to a ridge classifier of its frozen features; collective."""
    head = ridge_classifier(model, source, runtime, batch=batch, workers=workers, seed=seed)
    set_head(model, head.weight, head.bias)
    return head


def ridge_classifier(
    model: Model, source: Source, runtime: Runtime, *, batch: int, workers: int, seed: int
) -> LinearHead:
    """A ridge classifier of the model's frozen features; collective."""
    if source.multilabel:
        raise Error(
            f"{source.name} has several labels per image, but head_init=least-squares needs one; use "
            "head_init=zero",
            code="data.labels",
        )
    if len(source) > HEAD_IMAGES:
        chosen = np.random.default_rng(seed).choice(len(source), HEAD_IMAGES, replace=False)
        source = source.take(np.sort(chosen))
    model = model.to(runtime.device)
    extractor = Extractor(model=model, runtime=replace(runtime, parallel="ddp"), batch=batch, workers=workers)
    features = extractor.features(source)
    head: LinearHead = ridge_head(features.x, labels_of(source, features), model.config.classes)
    return runtime.broadcast(head)


SHOTS = (1, 5, 10, 25)
SEEDS = 3


def open_frozen(place: str, opener: Opener = open_splits) -> tuple[Source, Source]:
    """The training images, and the test images: the test split, else val, else a part of train."""
    splits = opener(Recipe(name="few-shot", data=place, val=0.0), None)
    train, test = splits["train"], splits["test"]
    if train.multilabel:
        raise Error(
            f"{place}: several labels for each image; few-shot accuracy needs one label each",
            code="data.labels",
        )
    unseen = np.setdiff1d(test.labels, train.labels)
    if len(unseen):
        names = ", ".join(repr(train.classes[label]) for label in unseen[:5])
        raise Error(
            f"{place}: classes {names} are in the test images but not in the training images",
            code="data.classes",
        )
    return train, test


def possible_shots(train: Source) -> tuple[int, ...]:
    """The usual numbers of shots for which every class has enough images."""
    fewest = np.unique(train.labels, return_counts=True)[1].min()
    return tuple(shots for shots in SHOTS if shots <= fewest)


@dataclass(frozen=True)
class FewShotTraining:
    """Training images with their features, and the images that each seed chooses."""

    source: Source
    features: Features  # of all of its images, or of the chosen ones
    chosen: tuple[np.ndarray, ...]  # for each seed (classes, shots) indices in the source

    def rows(self, seed: int, shots: int) -> torch.Tensor:
        """The rows of the features that a seed chooses."""
        indices = torch.from_numpy(self.chosen[seed][:, :shots].flatten())
        return torch.searchsorted(self.features.index, indices)

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


def few_shot_features(extractor: Extractor, train: Source, shots: int, seeds: int) -> FewShotTraining:
    """The features of only those images that a seed chooses.

    An unusable image is replaced by the next one of its class.
    """
    usable = np.ones(len(train), dtype=bool)
    while True:
        chosen = choose(train, shots, seeds, usable)
        indices = np.unique(np.concatenate(chosen))
        features = extractor.features(train.take(indices))
        if len(features.index) == len(indices):
            return FewShotTraining(train, Features(features.x, torch.from_numpy(indices)), tuple(chosen))
        usable[np.delete(indices, features.index.numpy())] = False


def all_features(extractor: Extractor, train: Source, shots: int, seeds: int) -> FewShotTraining:
    """The same with the features of every training image, for callers that need them anyway."""
    features = extractor.features(train)
    usable = np.zeros(len(train), dtype=bool)
    usable[features.index.numpy()] = True
    return FewShotTraining(train, features, tuple(choose(train, shots, seeds, usable)))


def accuracies(
    learning: FewShotTraining, shots: int, test: Source, test_features: Features, grid: tuple[float, ...]
) -> np.ndarray:
    """(seeds, penalties): the accuracy on the test images."""
    labels, truth = learning.labels, labels_of(test, test_features)
    table = []
    for seed in range(len(learning.chosen)):
        rows = learning.rows(seed, shots)
        table.append(fewshot_grid(learning.features.x[rows], labels[rows], test_features.x, truth, grid))
    return np.array(table)


def mean_and_interval(values: list[float], images: int) -> dict[str, Any]:
    """Mean and standard deviation over draws, and the confidence interval for so many test images."""
    average = mean(values)
    std = stdev(values) if len(values) > 1 else None
    return {"mean": average, "std": std, "interval": list(wilson(average, images))}


@dataclass
class FewShot:
    """Few-shot accuracy on one data set, evaluated repeatedly during training."""

    place: str
    shots: int = 5
    seeds: int = SEEDS
    opener: Opener = open_splits
    reported: bool = field(default=False, init=False)  # whether the unusable images were logged

    def __post_init__(self) -> None:
        self.train, self.test = open_frozen(self.place, self.opener)
        choose(self.train, self.shots, 1)  # raises now if a class has too few images

    def __call__(
        self,
        task: Task,
        module: nn.Module,
        runtime: Runtime,
        batch: int,
        workers: int,
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        """Mean and standard deviation over seeds; empty where the features cannot be learned from."""
        model = kept_model(task, module).to(runtime.device) if runtime.is_sharded else task.extract(module)
        extractor = Extractor(
            model=model, runtime=replace(runtime, parallel="ddp"), batch=batch, workers=workers,
            log=(lambda text: None) if self.reported else log,
        )  # fmt: skip
        self.reported = True
        learning = few_shot_features(extractor, self.train, self.shots, self.seeds)
        test = extractor.features(self.test)
        if runtime.device.startswith("cuda"):  # evaluates many draws at once
            test = Features(test.x.to(runtime.device), test.index)
        try:
            scores = runtime.on_main_first(
                lambda: accuracies(learning, self.shots, self.test, test, (L2,))[:, 0].tolist()
            )
        except ValueError as error:
            log(f"few-shot accuracy on {self.place}: {error}")
            return {}
        images = len(test.index)
        average = mean_and_interval(scores, images)
        log(f"{with_interval(average['mean'], images)} of {images} images of {self.place} correct after "
            f"{self.shots} shots")  # fmt: skip
        facts = {"mean": average["mean"], "std": average["std"], "shots": self.shots, "images": images}
        return {f"fewshot_{name}": value for name, value in facts.items()}
