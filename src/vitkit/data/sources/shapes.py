"""Drawn shapes: a built-in data set for segmentation and detection, drawn when it is read."""

# H, W pixels; N objects of an image

import colorsys
from functools import lru_cache, partial

import numpy as np

from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import Lazy, Source
from vitkit.data.targets import Target, Targets, tight_box

NAME = "shapes"
SIDE = 96  # pixels
CLASSES = ("background", "circle", "square", "triangle")
SPLITS = {"train": 400, "val": 60, "test": 100}
MOST = 4  # objects of an image
RADIUS = (8, 20)  # of the circle around an object, in pixels
APART = 0.7  # smallest distance of two objects, as a share of the sum of their radii
TRIES = 20
HUE = 0.2  # largest difference from the hue of a class; a sixth would leave no overlap
KEPT = sum(SPLITS.values())  # drawn images that a process keeps: 35 MB for all of them


def shape_mask(kind: int, centre: np.ndarray, radius: float, angle: float) -> np.ndarray:
    """The pixels (H, W) of a shape within the circle of this radius; angle: by which it is turned."""
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    x, y = x - centre[0], y - centre[1]
    if kind == 0:
        return np.hypot(x, y) <= radius
    sides = 4 if kind == 1 else 3
    normals = angle + 2 * np.pi * np.arange(sides) / sides
    reach = radius * np.cos(np.pi / sides)  # from the centre to a side
    inside = [np.cos(normal) * x + np.sin(normal) * y <= reach for normal in normals]
    return np.logical_and.reduce(inside)


def places(rng: np.random.Generator) -> list[tuple[np.ndarray, float]]:
    """Centres and radii of one to four objects that overlap a little at most."""
    chosen: list[tuple[np.ndarray, float]] = []
    wanted = int(rng.integers(1, MOST + 1))
    for _ in range(TRIES):
        radius = rng.uniform(*RADIUS)
        centre = rng.uniform(radius / 2, SIDE - radius / 2, 2)
        if all(np.hypot(*(centre - other)) > APART * (radius + size) for other, size in chosen):
            chosen.append((centre, radius))
        if len(chosen) == wanted:
            break
    return chosen


def colour_of(kind: int, rng: np.random.Generator) -> np.ndarray:
    """A bright colour: circles are rather red, squares green and triangles blue, with an overlap."""
    hue = kind / 3 + rng.uniform(-HUE, HUE)
    return 255 * np.array(colorsys.hsv_to_rgb(hue % 1, rng.uniform(0.5, 1), rng.uniform(0.6, 1)))


@lru_cache(maxsize=KEPT)
def draw(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image `number`: pixels (H, W, 3), masks (N, H, W), and the classes (N,) of its objects; read only."""
    rng = np.random.default_rng([number, SIDE])
    slope = rng.uniform(-0.6, 0.6, 2)
    y, x = np.mgrid[:SIDE, :SIDE] - SIDE / 2
    light = rng.uniform(60, 190) + y * slope[0] + x * slope[1]
    pixels = light[..., None] + rng.uniform(-15, 15, 3)  # nearly gray
    masks: list[np.ndarray] = []
    classes = []
    for centre, radius in places(rng):
        kind = int(rng.integers(3))
        mask = shape_mask(kind, centre, radius, rng.uniform(0, 2 * np.pi))
        pixels[mask] = colour_of(kind, rng)
        masks = [other & ~mask for other in masks]  # the later object is in front
        masks.append(mask)
        classes.append(kind + 1)
    pixels += rng.normal(0, 10, pixels.shape)
    visible = [i for i, mask in enumerate(masks) if mask.any()]
    stack = np.stack([masks[i] for i in visible])
    drawn = pixels.clip(0, 255).astype(np.uint8), stack, np.array([classes[i] for i in visible])
    for array in drawn:
        array.flags.writeable = False  # the next reader gets the same arrays
    return drawn


def fetch(first: int, index: int) -> np.ndarray:
    return draw(first + index)[0].copy()


def read(first: int, index: int) -> Target:
    """The masks, boxes and classes of an image's objects."""
    _, masks, classes = draw(first + index)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for pixels, number in zip(masks, classes, strict=True):
        mask[pixels] = number
    boxes = np.array([tight_box(pixels) for pixels in masks], np.float32)
    return Target(
        size=(SIDE, SIDE), boxes=boxes, labels=classes, crowd=np.zeros(len(classes), bool),
        areas=masks.sum((1, 2)).astype(np.float32), instances=masks, mask=mask,
    )  # fmt: skip


def name_of(split: str, index: int) -> str:
    return f"{split}-{index:03d}"


def shapes() -> dict[str, Source]:
    """The splits: circles, squares and triangles with their masks and boxes."""
    kinds, first, splits = frozenset({"mask", "boxes", "instances"}), 0, {}
    for split, count in SPLITS.items():
        splits[split] = Source(
            NAME, CLASSES, Lazy(count, partial(name_of, split)), np.zeros(count, np.int64),
            partial(fetch, first), targets=Targets(partial(read, first), kinds, MOST),
        )  # fmt: skip
        first += count
    return splits


OPENER = Opener(
    description="shapes (drawn circles, squares and triangles with masks and boxes)",
    matches=lambda place: place == NAME,
    open=lambda place, cache: shapes(),
    order=0,
)
