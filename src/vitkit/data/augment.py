"""Augmentations beside RandAugment: colour jitter, 3-Augment, DINO's distortions, random erasing, CutMix.

All are pure functions of an image and a random generator.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

ERASED = (0.02, 1 / 3)  # share of the area that random erasing replaces
ERASED_ASPECT = 0.3  # its aspect ratio is between this and the inverse
ATTEMPTS = 10
BLUR = (0.1, 2.0)  # radius in pixels
SOLARIZE = 128
ENHANCEMENTS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def color_jitter(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Change brightness, contrast and saturation by up to `strength` in either direction, in random order."""
    picture = Image.fromarray(image)
    for i in rng.permutation(len(ENHANCEMENTS)):
        factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
        picture = ENHANCEMENTS[i](picture).enhance(factor)
    return np.asarray(picture)


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """The distortions of DINO and MoCo v3, in this order; each is applied with its probability."""

    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation, hue
    jitter_probability: float = 0.8
    grayscale: float = 0.2
    blur: float = 0.5
    solarize: float = 0.0


def distort(image: np.ndarray, distortion: Distortion, rng: np.random.Generator) -> np.ndarray:
    """Random colours, grayscale, Gaussian blur and solarization of an image (h, w, 3)."""
    picture = Image.fromarray(image)
    if rng.random() < distortion.jitter_probability:
        *strengths, hue = distortion.jitter
        for i in rng.permutation(len(ENHANCEMENTS) + 1):
            if i == len(ENHANCEMENTS):
                picture = turn_hue(picture, rng.uniform(-hue, hue))
            else:
                factor = rng.uniform(max(0.0, 1 - strengths[i]), 1 + strengths[i])
                picture = ENHANCEMENTS[i](picture).enhance(factor)
    if rng.random() < distortion.grayscale:
        picture = picture.convert("L").convert("RGB")
    if rng.random() < distortion.blur:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR)))
    if rng.random() < distortion.solarize:
        picture = ImageOps.solarize(picture, SOLARIZE)
    return np.asarray(picture)


def turn_hue(picture: Image.Image, share: float) -> Image.Image:
    """Turn all hues by a share of the colour circle, -0.5 to 0.5, in HSV."""
    hsv = np.array(picture.convert("HSV"))
    hsv[..., 0] += np.uint8(int(share * 255) % 256)  # wraps around
    return Image.fromarray(hsv, "HSV").convert("RGB")


def three_augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """3-Augment (DeiT III): one of grayscale, solarization and Gaussian blur."""
    picture = Image.fromarray(image)
    choice = rng.integers(3)
    if choice == 0:
        picture = picture.convert("L").convert("RGB")
    elif choice == 1:
        picture = ImageOps.solarize(picture, SOLARIZE)
    else:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR)))
    return np.asarray(picture)


def erase(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random erasing (Zhong et al.): a rectangle of the image is replaced by noise."""
    height, width, _ = image.shape
    for _ in range(ATTEMPTS):
        area = rng.uniform(*ERASED) * height * width
        aspect = math.exp(rng.uniform(math.log(ERASED_ASPECT), -math.log(ERASED_ASPECT)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            result = np.array(image)
            result[top : top + h, left : left + w] = rng.integers(0, 256, (h, w, 3), np.uint8)
            return result
    return image


def partners(tensor: Tensor, partner: Tensor | None) -> Tensor:
    """The rows that each row of a batch is mixed with: the row before it, or `partner`; in new memory."""
    return tensor.roll(1, 0) if partner is None else tensor[partner]


def cutmix(
    images: Tensor, targets: Tensor, alpha: float, rng: np.random.Generator, partner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """CutMix (Yun et al.): a rectangle of each image is that of the one before it, or of its `partner`.

    The batch has one rectangle. Its area is 1 - Beta(alpha, alpha) of the image before it is clipped at the
    borders; targets are weighted by the true area. images (B, 3, h, w), targets (B, C), partner (B,) rows.
    """
    height, width = images.shape[2:]
    side = math.sqrt(1 - float(rng.beta(alpha, alpha)))
    y, x = int(rng.integers(height)), int(rng.integers(width))
    h, w = int(height * side), int(width * side)
    rows = slice(max(0, y - h // 2), min(height, y + h // 2))
    columns = slice(max(0, x - w // 2), min(width, x + w // 2))
    mixed, part = images.clone(), images[:, :, rows, columns]
    mixed[:, :, rows, columns] = partners(part, partner)
    own = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    return mixed, partners(targets, partner).lerp_(targets, own)
