"""Target: the boxes, instance masks or class mask of an image, as its annotations give them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

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


def renumbered(read: Callable[[int], Target], numbers: np.ndarray, index: int) -> Target:
    """A target with other class numbers: `numbers` has the new number of each class."""
    target = read(index)
    mask = target.mask
    if mask is not None:
        table = np.full(256, IGNORE, np.uint8)
        table[: len(numbers)] = numbers
        mask = table[mask]
    return replace(target, labels=numbers[target.labels], mask=mask)
