"""Target: the boxes, instance masks or class mask of an image, as its annotations give them."""

# N objects of an image; H, W its pixels

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from vitkit.errors import Error

IGNORE = 255  # of a class mask: pixels that neither train nor count


def no_boxes() -> np.ndarray:
    return np.zeros((0, 4), np.float32)


@dataclass(frozen=True)
class Target:
    """What is annotated in one image, in pixels of the image as the decoder returns it (EXIF applied).

    Boxes are (x0, y0, x1, y1), continuous, with (0, 0) at the top left corner of the first pixel and
    exclusive right and bottom edges.
    """

    size: tuple[int, int]  # height and width of the image
    boxes: np.ndarray = field(default_factory=no_boxes)  # (N, 4) float32
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (N,) class numbers
    crowd: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # (N,) ignored: crowd or difficult
    areas: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.float32)
    )  # (N,) pixels, for COCO's sizes
    instances: np.ndarray | None = None  # (N, H, W) bool, if the annotations have masks of objects
    mask: np.ndarray | None = None  # (H, W) uint8 class numbers and IGNORE, for semantic segmentation


@dataclass(frozen=True)
class Targets:
    """The annotations of all images of a source, read on demand."""

    read: Callable[[int], Target]  # of the image with this index; picklable, as all that a source holds
    kinds: frozenset[str]  # what it has: "mask", "boxes", "instances"
    most: int = 0  # objects in the image that has the most
    digest: Callable[[int], bytes] | None = None  # of an image's annotations, if cheaper than reading them


def kind_names(kinds: Iterable[str]) -> str:
    """The kinds of annotations in words; no kind means labels of whole images."""
    names = {"mask": "masks", "instances": "masks of objects", "": "labels of whole images"}
    return " and ".join(sorted(names.get(kind, kind) for kind in kinds))


def read_target(targets: Targets | None, index: int) -> Target:
    """The annotations of an image of a source that must have some."""
    if targets is None:
        raise Error("the data has no masks or boxes, which this task learns from", code="data.layout")
    return targets.read(index)


def target_digest(targets: Targets, index: int) -> bytes:
    """16 bytes that change with the masks, boxes, classes or crowds of an image."""
    if targets.digest:
        return targets.digest(index)
    target = targets.read(index)
    parts = (target.boxes, target.labels, target.crowd, target.areas, target.instances, target.mask)
    return digest_of(part for part in parts if part is not None)


def digest_of(arrays: Iterable[np.ndarray]) -> bytes:
    """16 bytes for the shapes, types and values of arrays."""
    hasher = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hasher.update(f"{array.dtype.str} {array.shape} ".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.digest()


def renumbered(targets: Targets, numbers: np.ndarray) -> Targets:
    """The same annotations with other class numbers: `numbers` (C,) has the new one of each class."""
    return replace(targets, read=partial(read_renumbered, targets.read, numbers))


def read_renumbered(read: Callable[[int], Target], numbers: np.ndarray, index: int) -> Target:
    target = read(index)
    mask = target.mask
    if mask is not None:
        table = np.arange(256, dtype=np.uint8)  # IGNORE stays
        table[: len(numbers)] = numbers
        mask = table[mask]
    return replace(target, labels=numbers[target.labels], mask=mask)


def joined_targets(first: Targets | None, second: Targets | None, size: int) -> Targets | None:
    """The annotations of `size` images, then those of others: the kinds that both have; None if none."""
    if first is None or second is None or not (kinds := first.kinds & second.kinds):
        return None
    read = partial(read_joined, first.read, second.read, size)
    digest = partial(read_joined, partial(target_digest, first), partial(target_digest, second), size)
    return Targets(read, kinds, max(first.most, second.most), digest)


def read_joined(first: Callable[[int], Any], second: Callable[[int], Any], size: int, index: int) -> Any:
    return first(index) if index < size else second(index - size)


def tight_box(mask: np.ndarray) -> np.ndarray | None:
    """The box (4,) around the True pixels of a mask (H, W); None without any."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], np.float32)
