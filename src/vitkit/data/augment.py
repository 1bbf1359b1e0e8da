"""Augmentations beside RandAugment: colours, 3-Augment, DINO's distortions, random erasing, CutMix.

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
HSV_PART = 2**14  # pixels
PHOTOMETRIC = (32 / 255, 0.5, 0.5, 0.1)  # largest change of brightness, contrast, saturation and hue
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


def photometric(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """The photometric distortion of segmentation and detection; strength 1 is as usual, 0 is the image.

    Brightness, contrast, saturation and hue (the last two in HSV) each change with probability 1/2; contrast
    changes first or last.
    """
    if not strength:
        return image
    chances = rng.random(5) < 0.5
    changes = rng.uniform(-1, 1, 4) * [strength * most for most in PHOTOMETRIC]
    brightness, contrast, saturation, hue = np.where(chances[:4], changes, 0.0).tolist()
    levels, last = np.arange(256) + 255 * brightness, bool(chances[4])
    if not last:
        levels = levels.clip(0, 255) * max(0.0, 1 + contrast)
    if brightness or (contrast and not last):
        image = np.take(to_levels(levels), image)
    if saturation or hue:
        image = change_hsv(image, max(0.0, 1 + saturation), hue)
    if contrast and last:
        image = np.take(to_levels(np.arange(256) * max(0.0, 1 + contrast)), image)
    return image


def to_levels(values: np.ndarray) -> np.ndarray:
    return np.rint(values).clip(0, 255).astype(np.uint8)


def change_hsv(image: np.ndarray, saturation: float, hue: float) -> np.ndarray:
    """Multiply the saturations of an image (h, w, 3) by a factor, and turn its hues by a share of the circle.

    As in HSV, but in float32, so that nothing is rounded in between; in parts that fit into the CPU cache.
    """
    flat = image.reshape(-1, 3)
    result = np.empty_like(flat)
    for start in range(0, len(flat), HSV_PART):
        part, changed = flat[start : start + HSV_PART], result[start : start + HSV_PART]
        planes = np.empty((3, len(part)), np.float32)
        for channel in range(3):  # a transpose would take several times as long
            planes[channel] = part[:, channel]
        planes = changed_hsv(planes, np.float32(saturation), hue)
        for channel in range(3):
            changed[:, channel] = planes[channel]
    return result.reshape(image.shape)


def changed_hsv(planes: np.ndarray, saturation: np.float32, hue: float) -> np.ndarray:
    """`change_hsv` of the levels of red, green and blue, (3, N) float32, rounded, in place."""
    red, green, blue = planes
    value = planes.max(0)
    chroma = value - planes.min(0)
    safe = np.maximum(chroma, 1)  # gray has no hue: its chroma is 0 whatever the hue
    if not hue:
        factor = np.minimum(saturation, value / safe)
        planes -= value
        planes *= factor
        planes += value
        return np.rint(planes, out=planes)
    is_red, is_green = value == red, value == green  # masks multiplied, since `where` is slow on noise
    angle = ((blue - red) / safe + 2) * is_green + ((red - green) / safe + 4) * ~is_green
    angle = (green - blue) / safe * is_red + angle * ~is_red  # in sixths of the circle
    chroma = np.minimum(chroma * saturation, value)
    for number, offset in enumerate((3, 1, -1)):  # red, green, blue
        turned = angle + np.float32(6 * hue + offset)
        turned -= 6 * np.rint(turned * np.float32(1 / 6))
        np.abs(turned, out=turned)
        np.clip(2 - turned, 0, 1, out=turned)
        turned *= chroma
        np.subtract(value, turned, out=planes[number])
    return np.rint(planes, out=planes)


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
