"""Reassessed labels (ReaL): several may be right for an image, and an image without any does not count."""

# N images

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import Error
from vitkit.evaluation.certainty import interval

Labels = list[list[int]]  # of each image the class numbers that are right, in the order of the file names


@dataclass(frozen=True)
class Real:
    """The share of images of which the class that was said is among the reassessed ones."""

    accuracy: float | None  # None where no image has a label
    interval: tuple[float, float] | None
    images: int  # counted
    left_out: int  # of both sides of the fraction, since they have no label

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_labels(text: str, name: str) -> Labels:
    """real.json as it is published: a list of lists of class numbers."""
    try:
        labels = json.loads(text)
    except ValueError as error:
        raise Error(f"{name}: not JSON: {error}", code="file.unreadable") from None
    sound = isinstance(labels, list) and all(
        isinstance(row, list) and all(type(number) is int for number in row) for row in labels
    )
    if not sound:
        raise Error(
            f"{name}: reassessed labels are a list of lists of class numbers, one for an image",
            code="data.labels",
        )
    return labels


def by_file_name(keys: Sequence[str]) -> list[int]:
    """The place of each image among all, ordered by file name whatever folders they lie in."""
    names = [key.replace("\\", "/").rpartition("/")[2] for key in keys]
    order = sorted(range(len(names)), key=names.__getitem__)
    for before, after in pairwise(order):
        if names[before] == names[after]:
            raise Error(
                f"{keys[before]!r} and {keys[after]!r} have one file name, and reassessed labels go by it",
                code="evaluation.unsupported",
            )
    places = [0] * len(names)
    for place, index in enumerate(order):
        places[index] = place
    return places


def check_labels(labels: Labels, images: int, classes: int, name: str) -> None:
    """Refuse those of other images or of other classes."""
    if len(labels) != images:
        raise Error(
            f"{name} has labels for {len(labels)} images, but the data has {images}: "
            "both must be of the same images, all of them",
            code="data.labels",
        )
    for place, row in enumerate(labels):
        if row and not 0 <= min(row) <= max(row) < classes:
            raise Error(
                f"{name}: image {place} has labels {row}, of {classes} classes from 0", code="data.labels"
            )


def real_accuracy(said: Tensor, index: Tensor, keys: Sequence[str], labels: Labels) -> Real:
    """said (N,): the class number told of each image; index (N,): which of `keys` the image is."""
    places = by_file_name(keys)
    right, left_out = [], 0
    for number, image in zip(said.tolist(), index.tolist(), strict=True):
        if allowed := labels[places[image]]:
            right.append(number in allowed)
        else:
            left_out += 1
    found = torch.tensor(right)
    if not right:
        return Real(None, None, 0, left_out)
    return Real(float(found.double().mean()), interval(found), len(right), left_out)
