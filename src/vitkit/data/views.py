"""Published views of images: crops, flips and RandAugment to train with, resizes to evaluate with, Mixup.

Pure functions: the same generator state draws the same crop, flip and operations in any process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.randaugment import augment

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
PUBLISHED_RESIZE = {224: 256, 384: 448}  # big_vision's evaluation; other sizes in the first proportion

AREA = (0.05, 1.0)
ASPECT = (0.75, 1.33)  # the default of TensorFlow's operation, which says 1.33 for 4/3
ATTEMPTS = 100
LONGEST = 16  # times the shorter side: beyond it an image is not resized as a whole


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
            raise ValueError(f"size {self.size} is not (height, width), two whole numbers above 0")
        if self.crop not in CROPS:
            raise ValueError(f"no crop {self.crop!r}; known: {', '.join(CROPS)}")
        if self.resize is not None and self.crop not in RESIZED:
            raise ValueError(f"crop {self.crop!r} has no use for resize={self.resize}; leave it out")
        if self.resize is not None and self.resize < max(self.size):
            raise ValueError(
                f"resize={self.resize} is too small for {self.size}; give {max(self.size)} or more"
            )
        _check_method(self.interpolation)
        pair = self.randaugment
        if pair is not None and (len(pair) != 2 or not all(isinstance(n, Integral) and n >= 0 for n in pair)):
            raise ValueError(f"randaugment {pair} is not (layers, magnitude), whole numbers of 0 or more")

    @property
    def resized(self) -> int:
        """The side to which the crops in RESIZED bring an image first."""
        return self.resize or round(max(self.size) * 256 / 224)


def train_view(size: int | tuple[int, int], *, randaugment: tuple[int, int] | None = None) -> View:
    """Inception crop and flip: all pre-training, and the released fine-tuning."""
    return View(size=_pair(size), crop="inception", flip=True, randaugment=randaugment)


def evaluation_view(size: int | tuple[int, int], how: str) -> View:
    """`squash` as the released fine-tuning code evaluates, `centre` as big_vision does."""
    if how not in ("squash", "centre"):
        raise ValueError(f"no evaluation view {how!r}; known: squash, centre")
    size = _pair(size)
    resize = PUBLISHED_RESIZE.get(max(size)) if how == "centre" else None
    return View(size=size, crop=how, resize=resize)


def min_shorter(view: View) -> int | None:
    """The shorter side that a reduced JPEG decode must keep for this view; None: decode in full.

    A crop after a resize needs what the resize needs. An inception crop is drawn in pixels of the image: on a
    reduced one the same generator draws another box, and 5 % of the area would be enlarged from too few.
    """
    if view.crop in RESIZED:
        return view.resized
    return max(view.size) if view.crop == "squash" else None


def apply(image: np.ndarray, view: View, rng: np.random.Generator) -> Tensor:
    """uint8 (H, W, 3) to uint8 (3, h, w), in memory of its own."""
    _check_image(image)
    pixels = _crop(image, view, rng).permute(1, 2, 0).numpy()  # (h, w, 3)
    if view.flip and rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    if view.randaugment is not None:
        pixels = augment(pixels, *view.randaugment, rng)
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))


def resize(image: np.ndarray, size: tuple[int, int], method: str = "bilinear") -> Tensor:
    """uint8 (H, W, 3) to uint8 (3, h, w), antialiased; equal to Pillow's within one level.

    Where bicubic overshoots black or white, the two may clip in another order and differ by more. The result
    lies in memory as (h, w, 3); an image that has the size already may be shared.
    """
    _check_image(image)
    _check_method(method)
    if not image.flags.writeable:
        image = image.copy()  # torch warns of arrays that it could not write to
    # the batch dimension comes first: its stride tells interpolate that channels are last, 3 times as fast
    batch = torch.from_numpy(np.ascontiguousarray(image))[None].permute(0, 3, 1, 2)
    if batch.shape[2:] != tuple(size):
        batch = F.interpolate(batch, size=tuple(size), mode=method, antialias=True)
    return batch[0]


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
        raise ValueError(f"a batch of {batch.dtype}; normalise takes uint8, once")
    if not len(mean) == len(std) == batch.shape[1]:
        raise ValueError(
            f"mean {mean} and std {std} do not fit {batch.shape[1]} channels; give one number for each"
        )
    shift, scale = (
        torch.tensor([255 * value for value in values], dtype=torch.float32, device=batch.device)[
            :, None, None
        ]
        for values in (mean, std)
    )
    return torch.sub(batch, shift).div_(scale)


def mixup(images: Tensor, targets: Tensor, alpha: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each example mixed with the one before it; one share for all, 1/2 or more, from Beta(alpha, alpha)."""
    if alpha < 0:
        raise ValueError(f"Mixup alpha {alpha} is below 0; 0 switches it off")
    if not (images.is_floating_point() and targets.is_floating_point()):
        kinds = f"{images.dtype} images and {targets.dtype} targets"
        raise ValueError(f"Mixup of {kinds}; normalise the images first, and give targets as floats (B, C)")
    if len(images) != len(targets):
        raise ValueError(
            f"Mixup of {len(images)} images with {len(targets)} targets; give one target for each image"
        )
    if alpha == 0:
        return images, targets
    share = float(rng.beta(alpha, alpha))
    share = max(share, 1 - share)
    return images.roll(1, 0).lerp(images, share), targets.roll(1, 0).lerp(targets, share)


def _crop(image: np.ndarray, view: View, rng: np.random.Generator) -> Tensor:
    height, width = image.shape[:2]
    if view.crop == "squash":
        return resize(image, view.size, view.interpolation)
    if view.crop == "inception":
        top, left, h, w = inception_box(height, width, rng)
        return resize(image[top : top + h, left : left + w], view.size, view.interpolation)
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
        return resize(image[rows, columns], view.size, view.interpolation)
    whole = resize(image, new, view.interpolation)
    return whole[:, top : top + view.size[0], left : left + view.size[1]]


def _source(start: int, length: int, resized: int, original: int) -> slice:
    """The pixels of an original side that cover a part of the resized side."""
    return slice(start * original // resized, math.ceil((start + length) * original / resized))


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


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ValueError(f"an image of {image.dtype} {image.shape}; give uint8 (height, width, 3), as RGB")


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"no interpolation {method!r}; known: {', '.join(METHODS)}")
