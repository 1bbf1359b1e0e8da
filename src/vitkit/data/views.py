"""The image transforms of training and evaluation: crops, flips and augmentations, resizes, Mixup.

All are pure functions: the same generator state gives the same crop, flip and operations in any process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.augment import Distortion, color_jitter, distort, erase, partners, three_augment
from vitkit.data.decode import Box, decode, decode_box, jpeg_size
from vitkit.data.order import Order
from vitkit.data.randaugment import augment
from vitkit.errors import Error

# B batch, C classes; H, W pixels of an image, h, w pixels of its view

CROPS = {
    "inception": "a random 5 to 100 % of the area, resized",
    "resized": "a random part of the area, as RandomResizedCrop draws it, resized",
    "random": "resize the shorter side to `resize`, then crop randomly",
    "squash-random": "resize to a square of `resize`, then crop randomly",
    "centre": "resize the shorter side to `resize`, then crop the centre",
    "squash": "resize the whole image, without keeping its aspect ratio",
    "fit": "resize the whole image to fit, keeping its aspect ratio, and pad the right or bottom",
}
RESIZED = {"random", "squash-random", "centre"}
METHODS = ("bilinear", "bicubic")
AREA = 0.05  # smallest share of the area of random crops
ASPECT = (0.75, 1.33)  # the default of TensorFlow's operation, which has 1.33 for 4/3
ATTEMPTS = 100
RESIZED_ASPECT = 4 / 3  # of crop "resized": its aspect ratio is between this and the inverse, log-uniform
RESIZED_ATTEMPTS = 10
LONGEST = 16  # aspect ratio above which an image is cropped before it is resized
AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
PADDING = 128  # level of the pixels beside an image that does not fill its view
CACHED = 2**20  # bytes of an image that fit into the CPU cache for a transpose


@dataclass(frozen=True, kw_only=True)
class View:
    """The transform of an image: crop, flip with probability 1/2, then augmentations in this order."""

    size: tuple[int, int]
    crop: str
    resize: int | None = None  # None: 256 / 224 of the longer side of `size`
    flip: bool = False
    interpolation: str = "bilinear"
    area: float = AREA  # smallest share of the area of the crops "inception" and "resized"
    largest: float = 1.0  # largest share of the area of the crop "resized"
    three_augment: bool = False
    color_jitter: float = 0.0  # strength
    distortion: Distortion | None = None  # colours, grayscale, blur and solarization, each by chance
    randaugment: tuple[int, int] | None = None  # layers, magnitude
    erasing: float = 0.0  # probability of random erasing

    def __post_init__(self) -> None:
        if len(self.size) != 2 or not all(isinstance(side, Integral) and side > 0 for side in self.size):
            raise Error(
                f"size {self.size} must be (height, width), two positive integers", code="request.value"
            )
        if self.crop not in CROPS:
            raise Error(f"no crop {self.crop!r}; known: {', '.join(CROPS)}", code="request.unknown")
        if self.resize is not None and self.crop not in RESIZED:
            raise Error(
                f"crop {self.crop!r} does not use resize={self.resize}; omit it",
                code="request.conflict",
            )
        if self.resize is not None and self.resize < max(self.size):
            raise Error(
                f"resize={self.resize} is too small for {self.size}; use {max(self.size)} or more",
                code="request.value",
            )
        _check_method(self.interpolation)
        if not (0 < self.area <= self.largest <= 1 and 0 <= self.erasing <= 1 and self.color_jitter >= 0):
            raise Error(
                f"area {self.area}, erasing {self.erasing} and color_jitter {self.color_jitter}: expected a "
                "share above 0, a probability, and a strength of 0 or more",
                code="request.value",
            )
        pair = self.randaugment
        if pair is not None and (len(pair) != 2 or not all(isinstance(n, Integral) and n >= 0 for n in pair)):
            raise Error(
                f"randaugment {pair} must be (layers, magnitude), two integers of 0 or more",
                code="request.value",
            )

    @property
    def resized(self) -> int:
        """The side to which the crops in RESIZED first resize an image."""
        return self.resize or round(max(self.size) * 256 / 224)


MoreViews = tuple[tuple[str, tuple[View, ...]], ...]  # name in a batch -> further views, all of one size


def views_of(
    pixels: np.ndarray, more: MoreViews, order: Order | None, step: int, place: int
) -> dict[str, list[np.ndarray]]:
    """The further views of an image; each is a pure function of (seed, step, place) and its number."""
    numbers, result = count(1), dict[str, list[np.ndarray]]()
    for name, views in more:
        rngs = [order.rng(step, place, next(numbers)) if order else np.random.default_rng(0) for _ in views]
        result[name] = [transform(pixels, view, rng) for view, rng in zip(views, rngs, strict=True)]
    return result


def fill_views(stacks: Mapping[str, Tensor], row: int, views: Mapping[str, list[np.ndarray]]) -> None:
    """Write the views (h, w, 3) of one image into row `row` of each stack (B, V, 3, h, w)."""
    for name, images in views.items():
        target = stacks[name].numpy()[row]
        for i, image in enumerate(images):
            target[i] = image.transpose(2, 0, 1)


class Window(NamedTuple):
    """A box of an image, the size to which it is resized, and the start of the view in the result."""

    box: tuple[int, int, int, int]  # top, left, height, width
    size: tuple[int, int]
    start: tuple[int, int] = (0, 0)


def apply(content: bytes | np.ndarray, view: View, rng: np.random.Generator) -> Tensor:
    """An image file, or its pixels (H, W, 3), to uint8 (3, h, w), in new memory."""
    return torch.from_numpy(np.array(transform(content, view, rng).transpose(2, 0, 1), order="C"))


def sized(content: bytes | np.ndarray) -> tuple[bytes | np.ndarray, tuple[int, int]]:
    """An image for `transform`, and its own height and width; all files but JPEGs are decoded for that."""
    if isinstance(content, bytes) and (size := jpeg_size(content)):
        return content, size
    pixels = decode(content) if isinstance(content, bytes) else content
    _check_image(pixels)
    return pixels, (pixels.shape[0], pixels.shape[1])


def transform(content: bytes | np.ndarray, view: View, rng: np.random.Generator) -> np.ndarray:
    """An image file, or its pixels (H, W, 3), to uint8 (h, w, 3), possibly a view of the input.

    A JPEG is decoded no larger than the view needs. Its crop is always drawn for the full size, so that it
    does not depend on how the file is decoded.
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
    crop = resize(pixels, window.size, view.interpolation, box)[top : top + h, left : left + w]
    if view.flip and rng.random() < 0.5:
        crop = crop[:, ::-1]
    crop = padded(crop, view.size)  # only the crop "fit" leaves room
    if view.three_augment:
        crop = three_augment(crop, rng)
    if view.color_jitter:
        crop = color_jitter(crop, view.color_jitter, rng)
    if view.distortion:
        crop = distort(crop, view.distortion, rng)
    if view.randaugment is not None:
        crop = augment(crop, *view.randaugment, rng)
    if view.erasing and rng.random() < view.erasing:
        crop = erase(crop, rng)
    return crop


def fitted(image_size: tuple[int, int], view_size: tuple[int, int], scale: float = 1.0) -> tuple[int, int]:
    """The size (h, w) of an image that is resized to fit into a view, keeping its aspect ratio.

    This is the part of a view with crop "fit" that the image covers, from its top left corner. scale: a
    factor on both sides, which above 1 makes the result larger than the view.
    """
    (height, width), (h, w) = image_size, view_size
    ratio = scale * min(h / height, w / width)
    return max(1, math.floor(height * ratio + 0.5)), max(1, math.floor(width * ratio + 0.5))


def padded(image: np.ndarray, size: tuple[int, int], fill: int = PADDING) -> np.ndarray:
    """An array (H, W, ...) with `fill` at the right and bottom up to a size; itself if it has that size."""
    height, width = image.shape[:2]
    if (height, width) == tuple(size):
        return image
    result = np.full((*size, *image.shape[2:]), fill, image.dtype)
    result[:height, :width] = image
    return result


def resize(
    image: np.ndarray, size: tuple[int, int], method: str = "bilinear", box: Box | None = None
) -> np.ndarray:
    """uint8 (H, W, 3), or a box of it, to uint8 (h, w, 3), antialiased; within one level of Pillow's result.

    Where bicubic overshoots black or white, the two may clip at different stages and differ by more. The
    result may have any memory layout, and may be the image itself if it has the right size.
    """
    _check_image(image)
    _check_method(method)
    if box is not None:
        top, left, height, width = box
        y, x = math.floor(top), math.floor(left)
        image = image[y : math.ceil(top + height), x : math.ceil(left + width)]
        if (height, width) != image.shape[:2]:  # Pillow accepts fractional boxes, torch does not
            edges = (left - x, top - y, left - x + width, top - y + height)
            picture = Image.fromarray(image).resize(size[::-1], Image.Resampling[method.upper()], edges)
            return np.asarray(picture)
    if image.shape[:2] == tuple(size):
        return image
    if AVX or image.size > CACHED:
        return _interpolate(np.array(image, order="C"), *size, method)
    # without AVX, torch is fast along columns only, so rows are transposed to columns and back
    across = np.array(image.transpose(1, 2, 0), order="C").reshape(image.shape[1], -1, 3)
    across = _interpolate(across, size[1], image.shape[0], method).reshape(size[1], 3, -1)  # (w, 3, H)
    down = np.array(across.transpose(2, 1, 0), order="C").reshape(-1, size[1], 3)
    return _interpolate(down, *size, method).reshape(size[0], 3, -1).transpose(0, 2, 1)  # (h, w, 3)


def _interpolate(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    # with the batch dimension first, interpolate sees a channels-last layout, which is 3 times as fast
    batch = torch.from_numpy(image.reshape(1, *image.shape).transpose(0, 3, 1, 2))
    batch = F.interpolate(batch, size=(height, width), mode=method, antialias=True)
    return batch.numpy()[0].transpose(1, 2, 0)


def inception_box(
    height: int, width: int, rng: np.random.Generator, area: float = AREA
) -> tuple[int, int, int, int]:
    """(top, left, height, width) as TensorFlow's sample_distorted_bounding_box draws it for a whole image.

    The aspect ratio is uniform in ASPECT; the height, not the area, is uniform within `area` and the image.
    """
    for _ in range(ATTEMPTS):
        shape = _shape_of_aspect(height, width, rng.uniform(*ASPECT), rng, area)
        if shape is not None:
            h, w = shape
            # as in TensorFlow, the last offset is never drawn
            top = int(rng.integers(height - h)) if h < height else 0
            left = int(rng.integers(width - w)) if w < width else 0
            return top, left, h, w
    return 0, 0, height, width


def resized_box(
    height: int, width: int, rng: np.random.Generator, area: float, largest: float = 1.0
) -> tuple[int, int, int, int]:
    """(top, left, height, width) as torchvision's and timm's RandomResizedCrop draws it.

    The share of the area is uniform from `area` to `largest`, the aspect ratio log-uniform; if nothing fits,
    the central crop with the nearest aspect ratio.
    """
    limit = math.log(RESIZED_ASPECT)
    for _ in range(RESIZED_ATTEMPTS):
        target, aspect = rng.uniform(area, largest) * height * width, math.exp(rng.uniform(-limit, limit))
        h, w = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
        if 0 < h <= height and 0 < w <= width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    h, w = min(height, round(width * RESIZED_ASPECT)), min(width, round(height * RESIZED_ASPECT))
    return (height - h) // 2, (width - w) // 2, h, w


def normalise(batch: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, 3, h, w) to float32: (x / 255 - mean) / std; for 0.5 and 0.5 exactly (x - 127.5) / 127.5."""
    if batch.dtype != torch.uint8:
        raise Error(f"a batch of {batch.dtype}; normalise expects uint8", code="request.value")
    if not len(mean) == len(std) == batch.shape[1]:
        raise Error(
            f"mean {mean} and std {std} do not fit {batch.shape[1]} channels; expected one number for each",
            code="request.value",
        )
    shift, scale = (levels(values, batch.device) for values in (mean, std))
    return torch.sub(batch, shift).div_(scale)


def levels(values: Sequence[float], device: torch.device) -> Tensor:
    """Per-channel values in [0, 1] scaled to [0, 255], (channels, 1, 1)."""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return cached_levels(tuple(values), device)
    return make_levels(values, device)


def make_levels(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor([255 * value for value in values], dtype=torch.float32, device=device)[:, None, None]


cached_levels = cache(make_levels)  # a copy to the GPU synchronises, and cannot be captured in a CUDA graph


def mixup(
    images: Tensor, targets: Tensor, alpha: float, rng: np.random.Generator, partner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mixup of each example with the one before it, or with `partner`, with one weight for the batch.

    The weight is drawn from Beta(alpha, alpha), and the example's own weight is at least 1/2.
    """
    if alpha < 0:
        raise Error(f"Mixup alpha {alpha} is below 0; 0 turns it off", code="request.value")
    if not (images.is_floating_point() and targets.is_floating_point()):
        dtypes = f"{images.dtype} images and {targets.dtype} targets"
        raise Error(
            f"Mixup of {dtypes}; normalise the images first, and use float targets (B, C)",
            code="request.value",
        )
    if len(images) != len(targets):
        raise Error(
            f"Mixup of {len(images)} images with {len(targets)} targets; expected one target per image",
            code="request.value",
        )
    if alpha == 0:
        return images, targets
    weight = float(rng.beta(alpha, alpha))
    weight = max(weight, 1 - weight)
    return partners(images, partner).lerp_(images, weight), partners(targets, partner).lerp_(targets, weight)


def _window(height: int, width: int, view: View, rng: np.random.Generator) -> Window:
    whole = (0, 0, height, width)
    if view.crop == "squash":
        return Window(whole, view.size)
    if view.crop == "fit":
        return Window(whole, fitted((height, width), view.size))
    if view.crop == "inception":
        return Window(inception_box(height, width, rng, view.area), view.size)
    if view.crop == "resized":
        return Window(resized_box(height, width, rng, view.area, view.largest), view.size)
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
        # 1 x 5000 pixels would become a gigabyte for a crop of 224 columns: crop first, in whole pixels
        rows = _source(top, view.size[0], new[0], height)
        columns = _source(left, view.size[1], new[1], width)
        return Window((rows[0], columns[0], rows[1], columns[1]), view.size)
    return Window(whole, new, (top, left))


def _source(start: int, length: int, resized: int, original: int) -> tuple[int, int]:
    """The original pixels that cover a part of the resized side: the first one, and their number."""
    first = start * original // resized
    return first, math.ceil((start + length) * original / resized) - first


def _shape_of_aspect(
    height: int, width: int, aspect: float, rng: np.random.Generator, area: float
) -> tuple[int, int] | None:
    """A height and width of at least `area` within the image; None if no whole pixels satisfy both."""
    least, most = area * height * width, 1.0 * height * width
    tallest = min(round(math.sqrt(most / aspect)), height, int((width + 0.5) / aspect))
    if round(tallest * aspect) > width:
        tallest -= 1
    shortest = min(round(math.sqrt(least / aspect)), tallest)
    h = int(rng.integers(shortest, tallest + 1))
    if h * round(h * aspect) < least:  # rounding may be off by one row in either direction
        h += 1
    if h * round(h * aspect) > most:
        h -= 1
    w = round(h * aspect)
    fits = 0 < h <= height and 0 < w <= width and least <= h * w <= most
    return (h, w) if fits else None


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise Error(
            f"an image of {image.dtype} {image.shape}; expected uint8 RGB (height, width, 3)",
            code="request.value",
        )


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise Error(f"no interpolation {method!r}; known: {', '.join(METHODS)}", code="request.unknown")
