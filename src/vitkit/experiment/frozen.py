"""Few-shot accuracy of a model on a data set: images chosen, their features, solved; also as a run goes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.data.sources import Source
from vitkit.errors import Error
from vitkit.evaluation.fewshot import L2, choose_shots, fewshot_grid
from vitkit.experiment.features import Extractor, Features
from vitkit.experiment.kept import kept_model
from vitkit.experiment.start import Opener, open_splits
from vitkit.objectives.task import Task
from vitkit.proportions import wilson, with_interval
from vitkit.recipes.recipe import Recipe
from vitkit.training.runtime import Runtime

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
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """Mean and spread over seeds for the journal; nothing where the features cannot be learned from."""
        model = kept_model(task, module).to(runtime.device) if runtime.cut else task.extract(module)
        extractor = Extractor(
            model=model, runtime=replace(runtime, spread="ddp"), batch=batch, workers=workers,
            tell=(lambda text: None) if self.named else tell,
        )  # fmt: skip
        self.named = True
        learning = learn_from(extractor, self.train, self.shots, self.seeds)
        seen = extractor.features(self.test)
        if runtime.device.startswith("cuda"):  # where many draws are judged at once
            seen = Features(seen.x.to(runtime.device), seen.index)
        try:
            right = runtime.first(
                lambda: accuracies(learning, self.shots, self.test, seen, (L2,))[:, 0].tolist()
            )
        except ValueError as error:
            tell(f"few-shot accuracy on {self.place}: {error}")
            return {}
        images = len(seen.index)
        told = spread(right, images)
        right_words = with_interval(told["mean"], images)
        tell(f"{right_words} of {images} images of {self.place} right after {self.shots} shots")
        facts = {"mean": told["mean"], "std": told["std"], "shots": self.shots, "images": images}
        return {f"fewshot_{name}": value for name, value in facts.items()}
