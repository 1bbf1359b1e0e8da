"""The transforms of training images together with their masks or boxes: scale jitter, crop, flips, colours.

All are pure functions of the image, its target and the state of a random generator.
"""

# H, W pixels of an image, h, w those of its view; N objects of an image, M of the image that has the most

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.data.augment import photometric
from vitkit.data.decode import BadImage
from vitkit.data.geometry import Geometry, draw_crop
from vitkit.data.targets import IGNORE, Target, tight_box
from vitkit.data.views import METHODS, fitted, padded
from vitkit.errors import Error

DRAWS = 10  # of a crop, until it is useful
SCALE = (0.5, 2.0)  # of the size that fits the view
VISIBLE = 0.2  # share of an object's area that a crop must contain
MOST_COMMON = 0.75  # largest share of one class in the labelled pixels of a crop
SMALLEST = 1.0  # pixels of the side of a box
NO_OBJECT = -1
Arrays = dict[str, np.ndarray]


class TargetView(Protocol):
    """A picklable transform of an image and its target to arrays of fixed shapes."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images that it returns."""

    def empty(self) -> Arrays:
        """The arrays of an image without annotations, which have the shapes and types of all others."""

    def __call__(
        self, pixels: np.ndarray, target: Target, rng: np.random.Generator
    ) -> tuple[np.ndarray, Arrays]:
        """Pixels uint8 (H, W, 3) and their target to uint8 (h, w, 3) and arrays by their names in a batch."""


@dataclass(frozen=True, kw_only=True)
class JitterView:
    """What the views of masks and of boxes share; scale (1, 1) without flips and colours is crop "fit".

    The image is resized by a random factor of the size that fits, cropped where it is larger than the view,
    flipped, changed in its colours, and padded at the right and bottom.
    """

    size: tuple[int, int]
    scale: tuple[float, float] = SCALE
    flip: bool = True
    vertical_flip: bool = False
    photometric: float = 1.0  # strength; 0: off
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if len(self.size) != 2 or not all(isinstance(side, Integral) and side > 0 for side in self.size):
            raise Error(
                f"size {self.size} must be (height, width), two positive integers", code="request.value"
            )
        if self.interpolation not in METHODS:
            raise Error(
                f"no interpolation {self.interpolation!r}; known: {', '.join(METHODS)}",
                code="request.unknown",
            )
        if not (len(self.scale) == 2 and 0 < self.scale[0] <= self.scale[1] and self.photometric >= 0):
            raise Error(
                f"scale {self.scale} and photometric {self.photometric}: expected (smallest, largest) factor "
                "above 0, and a strength of 0 or more",
                code="request.value",
            )

    def empty(self) -> Arrays:
        raise NotImplementedError

    def arrays(self, target: Target, geometry: Geometry) -> Arrays:
        """The target's part of the view."""
        raise NotImplementedError

    def useful(self, target: Target, geometry: Geometry) -> bool:
        """Whether a crop may be used; otherwise it is drawn again, up to DRAWS times in total."""
        return True

    def draw(self, target: Target, rng: np.random.Generator) -> Geometry:
        resized = fitted(target.size, self.size, rng.uniform(*self.scale))
        for _ in range(DRAWS):
            geometry = draw_crop(target.size, resized, self.size, rng)
            if geometry.box[2:] == target.size or self.useful(target, geometry):
                break
        mirrored, upside_down = rng.random(2) < 0.5
        return geometry.flipped(self.flip and bool(mirrored), self.vertical_flip and bool(upside_down))

    def __call__(
        self, pixels: np.ndarray, target: Target, rng: np.random.Generator
    ) -> tuple[np.ndarray, Arrays]:
        check_sizes(pixels, target)
        geometry = self.draw(target, rng)
        image = photometric(geometry.image(pixels, self.interpolation), self.photometric, rng)
        return padded(image, self.size), self.arrays(target, geometry)


@dataclass(frozen=True, kw_only=True)
class MaskView(JitterView):
    """An image with its class mask: "mask" uint8 (h, w), IGNORE beside the image."""

    most_common: float = MOST_COMMON  # a crop in which a class has at least this share is drawn again

    def empty(self) -> Arrays:
        return {"mask": np.full(self.size, IGNORE, np.uint8)}

    def arrays(self, target: Target, geometry: Geometry) -> Arrays:
        return {"mask": padded(geometry.labels(mask_of(target)), self.size, IGNORE)}

    def useful(self, target: Target, geometry: Geometry) -> bool:
        if self.most_common >= 1:
            return True
        counts = Image.fromarray(geometry.labels(mask_of(target))).histogram()  # faster than bincount
        del counts[IGNORE]
        return max(counts) < self.most_common * sum(counts)


@dataclass(frozen=True, kw_only=True)
class BoxView(JitterView):
    """An image with its objects: "boxes" float32 (M, 4) and "classes" int64 (M,), padded with -1. No crowds.

    Boxes are clipped to the view; an object is left out if less than `visible` of its area is in the crop. If
    the annotations have masks of objects, the box of an object that the crop cuts is the box around the rest
    of its mask.
    """

    most: int  # objects of the image that has the most
    segments: bool = False  # also "segments" int16 (h, w): the row of each pixel's object, -1 for none
    visible: float = VISIBLE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.most < 2**15 or not 0 <= self.visible <= 1:
            raise Error(
                f"most={self.most} and visible={self.visible}: expected 0 to {2**15 - 1} objects, and a "
                "share of the area",
                code="request.value",
            )

    def empty(self) -> Arrays:
        arrays: Arrays = {
            "boxes": np.full((self.most, 4), NO_OBJECT, np.float32),
            "classes": np.full(self.most, NO_OBJECT, np.int64),
        }
        if self.segments:
            arrays["segments"] = np.full(self.size, NO_OBJECT, np.int16)
        return arrays

    def arrays(self, target: Target, geometry: Geometry) -> Arrays:
        arrays = self.empty()
        rows, boxes = visible_objects(target, geometry, self.visible)
        if self.segments:
            segments, shown = segments_of(target, geometry, rows)
            rows, boxes = rows[shown], boxes[shown]
            arrays["segments"] = padded(segments, self.size, NO_OBJECT)
        if len(rows) > self.most:
            raise Error(
                f"an image has {len(rows)} objects, the view was made for {self.most}", code="request.value"
            )
        arrays["boxes"][: len(rows)] = boxes
        arrays["classes"][: len(rows)] = target.labels[rows]
        return arrays


def visible_objects(target: Target, geometry: Geometry, least: float) -> tuple[np.ndarray, np.ndarray]:
    """The objects of which the view shows enough: their rows (N',) in the target, and their boxes (N', 4)."""
    whole = geometry.boxes(target.boxes)
    boxes = geometry.clipped(whole)
    shares = area(boxes) / np.maximum(area(whole), np.finfo(np.float64).tiny)
    cut = (boxes != whole).any(1) & (area(boxes) > 0)
    if target.instances is not None:
        for row in np.flatnonzero(cut & ~target.crowd):
            boxes[row], shares[row] = visible_part(target.instances[row], geometry)
    large = (boxes[:, 2:] - boxes[:, :2] >= SMALLEST).all(1)
    rows = np.flatnonzero(~target.crowd & large & (shares >= least))
    return rows, boxes[rows].astype(np.float32)


def visible_part(mask: np.ndarray, geometry: Geometry) -> tuple[np.ndarray, float]:
    """The box (4,) in the view around what it shows of a mask (H, W), and the share of its pixels."""
    top, left, height, width = geometry.box
    inside = mask[top : top + height, left : left + width]
    box = tight_box(inside)
    if box is None:
        return np.zeros(4), 0.0
    whole = geometry.boxes(box[None] + (left, top, left, top))
    return geometry.clipped(whole)[0], float(inside.sum() / mask.sum())  # rounding may leave the view


def segments_of(target: Target, geometry: Geometry, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The object of each pixel, int16 (h, w), smaller ones on top; and which of `rows` have any pixel.

    Objects are numbered without those that have no pixel. Only their boxes are looked at.
    """
    segments = np.full(geometry.size, NO_OBJECT, np.int16)
    if not len(rows):
        return segments, rows
    if target.instances is None:
        raise BadImage("no-instances", "its annotations have no masks of objects")
    for number in np.argsort(-target.areas[rows], kind="stable"):
        row = rows[number]
        place, part = geometry.labels_in(target.instances[row], target.boxes[row])
        np.copyto(segments[place], number, where=part)
    shown = np.zeros(len(rows) + 1, bool)  # the last is that of -1
    shown[segments] = True
    numbers = np.append(np.cumsum(shown[:-1]) - 1, NO_OBJECT).astype(np.int16)
    return numbers[segments], np.flatnonzero(shown[:-1])


def area(boxes: np.ndarray) -> np.ndarray:
    """The areas (N,) of boxes (N, 4)."""
    return np.maximum(0, boxes[:, 2:] - boxes[:, :2]).prod(1)


def mask_of(target: Target) -> np.ndarray:
    if target.mask is None:
        raise BadImage("no-mask", "its annotations have no class mask")
    return target.mask


def check_sizes(pixels: np.ndarray, target: Target) -> None:
    if pixels.shape[:2] != tuple(target.size):
        height, width = pixels.shape[:2]
        raise BadImage(
            "other-size",
            f"{height} x {width} pixels, but its annotations are for {target.size[0]} x {target.size[1]}",
        )


def empty_stacks(view: TargetView | None, count: int) -> dict[str, Tensor]:
    """Uninitialised tensors for the arrays of so many images; none without a view."""
    arrays = view.empty() if view else {}
    return {name: torch.from_numpy(np.empty((count, *a.shape), a.dtype)) for name, a in arrays.items()}


def fill_target(stacks: Mapping[str, Tensor], row: int, image: np.ndarray, arrays: Arrays) -> np.ndarray:
    """Write the arrays of one image into row `row` of each stack, and return the image."""
    for name, array in arrays.items():
        stacks[name].numpy()[row] = array
    return image
