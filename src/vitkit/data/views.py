"""Published views of images: crops, flips and RandAugment to train with, resizes to evaluate with, Mixup.

Pure functions: the same generator state draws the same crop, flip and operations in any process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.decode import Box, decode, decode_box, jpeg_size
from vitkit.data.randaugment import augment
from vitkit.errors import Error

# B batch, C classes; H, W pixels of an image, h, w pixels of its view

CROPS = {
    "inception": "5 to 100 % of the area, anywhere, to the size",
    "random": "shorter side to `resize`, then a random crop",
    "squash-random": "to a square of `resize`, then a random crop",
    "centre": "shorter side to `resize`, then the central crop",
    "squash": "the whole image to the size, aspect not kept",
}
RESIZED = {"random", "squash-random", "centre"}
METHODS = ("bilinear", "bicubic")
AREA = (0.05, 1.0)
ASPECT = (0.75, 1.33)  # the default of TensorFlow's operation, which says 1.33 for 4/3
ATTEMPTS = 100
LONGEST = 16  # times the shorter side: beyond it an image is not resized as a whole
AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
CACHED = 2**20  # bytes of an image that are turned on their side without many cache misses


@dataclass(frozen=True, kw_only=True)
class View:
    """What is taken from an image, in this order: crop, flip with probability 1/2, RandAugment."""

    size: tuple[int, int]
    crop: str
    resize: int | None = None  # None: 256 / 224 of the longer side of `size`
    flip: bool = False
    interpolation: str = "bilinear"
    randaugment: tuple[int, int] | None = None  # layers, magnitude

    def __post_init__(self) -> None:
        if len(self.size) != 2 or not all(isinstance(side, Integral) and side > 0 for side in self.size):
            raise Error(
                f"size {self.size} is not (height, width), two whole numbers above 0", code="request.value"
            )
        if self.crop not in CROPS:
            raise Error(f"no crop {self.crop!r}; known: {', '.join(CROPS)}", code="request.unknown")
        if self.resize is not None and self.crop not in RESIZED:
            raise Error(
                f"crop {self.crop!r} has no use for resize={self.resize}; leave it out",
                code="request.conflict",
            )
        if self.resize is not None and self.resize < max(self.size):
            raise Error(
                f"resize={self.resize} is too small for {self.size}; give {max(self.size)} or more",
                code="request.value",
            )
        _check_method(self.interpolation)
        pair = self.randaugment
        if pair is not None and (len(pair) != 2 or not all(isinstance(n, Integral) and n >= 0 for n in pair)):
            raise Error(
                f"randaugment {pair} is not (layers, magnitude), whole numbers of 0 or more",
                code="request.value",
            )

    @property
    def resized(self) -> int:
        """The side to which the crops in RESIZED bring an image first."""
        return self.resize or round(max(self.size) * 256 / 224)


class Window(NamedTuple):
    """A box of an image, the size to which it is resized, and where in that a view begins."""

    box: tuple[int, int, int, int]  # top, left, height, width
    size: tuple[int, int]
    start: tuple[int, int] = (0, 0)


def apply(content: bytes | np.ndarray, view: View, rng: np.random.Generator) -> Tensor:
    """An image file, or its pixels (H, W, 3), to uint8 (3, h, w), in memory of its own."""
    return torch.from_numpy(np.array(transform(content, view, rng).transpose(2, 0, 1), order="C"))


def transform(content: bytes | np.ndarray, view: View, rng: np.random.Generator) -> np.ndarray:
    """An image file, or its pixels (H, W, 3), to uint8 (h, w, 3); it may be a part of the image itself.

    A JPEG is decoded no larger than the view needs. Its crop is drawn on the full size all the same, so that
    a generator draws one crop from a file, however that is decoded.
    """
    if isinstance(content, bytes) and (size := jpeg_size(content)):
        window = _window(*size, view, rng)
        pixels, box = decode_box(content, window.box, window.size)
    else:
        pixels = decode(content) if isinstance(content, bytes) else content
        _check_image(pixels)
        height, width, _ = pixels.shape
        window = _window(height, width, view, rng)
        box = window.box
    (top, left), (h, w) = window.start, view.size
    chosen = resize(pixels, window.size, view.interpolation, box)[top : top + h, left : left + w]
    if view.flip and rng.random() < 0.5:
        chosen = chosen[:, ::-1]
    if view.randaugment is not None:
        chosen = augment(chosen, *view.randaugment, rng)
    return chosen


def resize(
    image: np.ndarray, size: tuple[int, int], method: str = "bilinear", box: Box | None = None
) -> np.ndarray:
    """uint8 (H, W, 3), or a box of it, to uint8 (h, w, 3), antialiased; equal to Pillow's within one level.

    Where bicubic overshoots black or white, the two may clip in another order and differ by more. The result
    lies in memory in any order; it may be the image itself, where that has the size.
    """
    _check_image(image)
    _check_method(method)
    if box is not None:
        top, left, height, width = box
        y, x = math.floor(top), math.floor(left)
        image = image[y : math.ceil(top + height), x : math.ceil(left + width)]
        if (height, width) != image.shape[:2]:  # Pillow can begin and end inside a pixel, torch cannot
            edges = (left - x, top - y, left - x + width, top - y + height)
            picture = Image.fromarray(image).resize(size[::-1], Image.Resampling[method.upper()], edges)
            return np.asarray(picture)
    if image.shape[:2] == tuple(size):
        return image
    if AVX or image.size > CACHED:
        return _interpolate(np.array(image, order="C"), *size, method)
    # without AVX, torch is quick along columns only: rows become columns and are turned back
    across = np.array(image.transpose(1, 2, 0), order="C").reshape(image.shape[1], -1, 3)
    across = _interpolate(across, size[1], image.shape[0], method).reshape(size[1], 3, -1)  # (w, 3, H)
    down = np.array(across.transpose(2, 1, 0), order="C").reshape(-1, size[1], 3)
    return _interpolate(down, *size, method).reshape(size[0], 3, -1).transpose(0, 2, 1)  # (h, w, 3)


def _interpolate(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    # the batch dimension comes first: its stride tells interpolate that channels are last, 3 times as fast
    batch = torch.from_numpy(image.reshape(1, *image.shape).transpose(0, 3, 1, 2))
    batch = F.interpolate(batch, size=(height, width), mode=method, antialias=True)
    return batch.numpy()[0].transpose(1, 2, 0)


def inception_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """(top, left, height, width) as sample_distorted_bounding_box draws it when the whole image is the box.

    The aspect is uniform in ASPECT; the height, not the area, is uniform where AREA and the image allow it.
    """
    for _ in range(ATTEMPTS):
        shape = _shape_of_aspect(height, width, rng.uniform(*ASPECT), rng)
        if shape is not None:
            h, w = shape
            # as there, the last offset is never drawn
            top = int(rng.integers(height - h)) if h < height else 0
            left = int(rng.integers(width - w)) if w < width else 0
            return top, left, h, w
    return 0, 0, height, width


def normalise(batch: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, 3, h, w) to float32: (x / 255 - mean) / std; for 0.5 and 0.5 exactly (x - 127.5) / 127.5."""
    if batch.dtype != torch.uint8:
        raise Error(f"a batch of {batch.dtype}; normalise takes uint8, once", code="request.value")
    if not len(mean) == len(std) == batch.shape[1]:
        raise Error(
            f"mean {mean} and std {std} do not fit {batch.shape[1]} channels; give one number for each",
            code="request.value",
        )
    shift, scale = (levels(values, batch.device) for values in (mean, std))
    return torch.sub(batch, shift).div_(scale)


def levels(values: Sequence[float], device: torch.device) -> Tensor:
    """Shares of 1 as shares of 255, a number for each channel, (channels, 1, 1)."""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return kept_levels(tuple(values), device)
    return make_levels(values, device)


def make_levels(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor([255 * value for value in values], dtype=torch.float32, device=device)[:, None, None]


kept_levels = cache(make_levels)  # a copy to a GPU waits for it, and cannot be part of a recorded step


def mixup(
    images: Tensor, targets: Tensor, alpha: float, rng: np.random.Generator, partner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each example mixed with the one before it, or its partner by number; one share for all of them.

    The share is drawn from Beta(alpha, alpha), and the example's own is 1/2 or more.
    """
    if alpha < 0:
        raise Error(f"Mixup alpha {alpha} is below 0; 0 switches it off", code="request.value")
    if not (images.is_floating_point() and targets.is_floating_point()):
        kinds = f"{images.dtype} images and {targets.dtype} targets"
        raise Error(
            f"Mixup of {kinds}; normalise the images first, and give targets as floats (B, C)",
            code="request.value",
        )
    if len(images) != len(targets):
        raise Error(
            f"Mixup of {len(images)} images with {len(targets)} targets; give one target for each image",
            code="request.value",
        )
    if alpha == 0:
        return images, targets
    share = float(rng.beta(alpha, alpha))
    share = max(share, 1 - share)
    if partner is None:
        partner = torch.arange(len(images), device=images.device).roll(1)
    return images[partner].lerp(images, share), targets[partner].lerp(targets, share)


def _window(height: int, width: int, view: View, rng: np.random.Generator) -> Window:
    whole = (0, 0, height, width)
    if view.crop == "squash":
        return Window(whole, view.size)
    if view.crop == "inception":
        return Window(inception_box(height, width, rng), view.size)
    if view.crop == "squash-random":
        new = (view.resized, view.resized)
    else:
        ratio = view.resized / min(height, width)
        new = (round(height * ratio), round(width * ratio))
    spare = (new[0] - view.size[0], new[1] - view.size[1])
    if view.crop == "centre":
        top, left = spare[0] // 2, spare[1] // 2
    else:
        top, left = (int(rng.integers(side + 1)) for side in spare)
    if max(new) > LONGEST * min(new):
        # 1 x 5000 pixels would become a gigabyte to take 224 columns from: crop first, in whole pixels
        rows = _source(top, view.size[0], new[0], height)
        columns = _source(left, view.size[1], new[1], width)
        return Window((rows[0], columns[0], rows[1], columns[1]), view.size)
    return Window(whole, new, (top, left))


def _source(start: int, length: int, resized: int, original: int) -> tuple[int, int]:
    """The first of the pixels of an original side that cover a part of the resized side, and their number."""
    first = start * original // resized
    return first, math.ceil((start + length) * original / resized) - first


def _shape_of_aspect(
    height: int, width: int, aspect: float, rng: np.random.Generator
) -> tuple[int, int] | None:
    """A height and its width within the image and AREA, or None where whole pixels do not allow it."""
    least, most = (share * height * width for share in AREA)
    tallest = min(round(math.sqrt(most / aspect)), height, int((width + 0.5) / aspect))
    if round(tallest * aspect) > width:
        tallest -= 1
    shortest = min(round(math.sqrt(least / aspect)), tallest)
    h = int(rng.integers(shortest, tallest + 1))
    if h * round(h * aspect) < least:  # rounding may have missed by a row, either way
        h += 1
    if h * round(h * aspect) > most:
        h -= 1
    w = round(h * aspect)
    fits = 0 < h <= height and 0 < w <= width and least <= h * w <= most
    return (h, w) if fits else None


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise Error(
            f"an image of {image.dtype} {image.shape}; give uint8 (height, width, 3), as RGB",
            code="request.value",
        )


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise Error(f"no interpolation {method!r}; known: {', '.join(METHODS)}", code="request.unknown")
