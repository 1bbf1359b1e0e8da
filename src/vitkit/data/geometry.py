"""Geometry: one crop, resize and flip, applied alike to the pixels, masks and boxes of an image."""

# H, W pixels of an image, h, w those of its view; N objects

from dataclasses import dataclass, replace

import numpy as np

from vitkit.data.views import resize


@dataclass(frozen=True)
class Geometry:
    """A box of the image in whole pixels, the size to which it is resized, and its flips afterwards.

    Only the pixels of the box are resized, so that a view of a large image costs what is seen of it.
    """

    box: tuple[int, int, int, int]  # top, left, height, width
    size: tuple[int, int]
    mirrored: bool = False
    upside_down: bool = False

    @property
    def rows(self) -> np.ndarray:
        """The row of the image in whose pixel the centre of each row of the result lies."""
        rows = nearest(self.box[0], self.box[2], self.size[0])
        return rows[::-1] if self.upside_down else rows

    @property
    def columns(self) -> np.ndarray:
        columns = nearest(self.box[1], self.box[3], self.size[1])
        return columns[::-1] if self.mirrored else columns

    def image(self, pixels: np.ndarray, method: str) -> np.ndarray:
        """Pixels (H, W, 3) resized with antialiasing."""
        result = resize(pixels, self.size, method, self.box)
        return result[:: -1 if self.upside_down else 1, :: -1 if self.mirrored else 1]

    def labels(self, mask: np.ndarray) -> np.ndarray:
        """Numbers (H, W) resized by the nearest pixel."""
        return mask.take(self.rows, 0).take(self.columns, 1)

    def labels_in(self, mask: np.ndarray, box: np.ndarray) -> tuple[tuple[slice, slice], np.ndarray]:
        """Where a box (4,) is in the result, and the numbers (H, W) in this part of the result."""
        x0, y0, x1, y1 = box
        rows, columns = self.rows, self.columns
        down, across = between(rows, y0, y1), between(columns, x0, x1)
        return (down, across), mask[rows[down, None], columns[across]]

    def boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes (N, 4) in pixels of the result, not clipped; the scales are those of the rounded sizes."""
        top, left, height, width = self.box
        x0, y0, x1, y1 = boxes.astype(np.float64).T
        across, down = self.size[1] / width, self.size[0] / height
        x0, x1 = (x0 - left) * across, (x1 - left) * across
        y0, y1 = (y0 - top) * down, (y1 - top) * down
        if self.mirrored:
            x0, x1 = self.size[1] - x1, self.size[1] - x0
        if self.upside_down:
            y0, y1 = self.size[0] - y1, self.size[0] - y0
        return np.stack([x0, y0, x1, y1], -1)

    def clipped(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes (N, 4) of the result, clipped to it."""
        return boxes.clip(0, [self.size[1], self.size[0]] * 2)

    def flipped(self, mirrored: bool, upside_down: bool) -> "Geometry":
        return replace(self, mirrored=mirrored, upside_down=upside_down)


def nearest(start: int, length: int, resized: int) -> np.ndarray:
    """The original pixel at the centre of each pixel of a resized side, in whole numbers."""
    return start + (2 * np.arange(resized) + 1) * length // (2 * resized)


def between(pixels: np.ndarray, start: float, stop: float) -> slice:
    """The part of ascending or descending pixels of an image that a box touches."""
    inside = np.flatnonzero((pixels > start - 1) & (pixels < stop))
    return slice(inside[0], inside[-1] + 1) if len(inside) else slice(0, 0)


def draw_crop(
    image_size: tuple[int, int],
    resized: tuple[int, int],
    view_size: tuple[int, int],
    rng: np.random.Generator,
) -> Geometry:
    """A random crop of the resized image of the view's size; along a side that is not longer, all of it.

    It begins and ends between whole pixels of the image, so that its scales may differ from that of the whole
    image by half a pixel.
    """
    sides = [crop_side(*side, rng) for side in zip(image_size, resized, view_size, strict=True)]
    (top, height, h), (left, width, w) = sides
    return Geometry((top, left, height, width), (h, w))


def crop_side(original: int, resized: int, length: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """The first pixel of a crop of a side, the pixels that it has, and those that it is resized to."""
    if resized <= length:
        return 0, original, resized
    pixels = max(1, min(original, (2 * length * original + resized) // (2 * resized)))
    return int(rng.integers(original - pixels + 1)), pixels, length
