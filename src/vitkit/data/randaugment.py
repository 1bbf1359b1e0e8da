"""RandAugment with the operations and strengths of the published AugReg runs.

The argument of an operation is linear in its level, as in the TensorFlow AutoAugment code, also above the
highest level of 10: the published runs used 15 and 20. Three quirks of that code affect the results and are
reproduced:

- Every selected operation is applied. The code draws a probability in [0.2, 0.8] for each but ignores it;
  `chance=(0.2, 0.8)` does what was probably intended.
- Posterize keeps int(level / 10 * 4) bits, by shifting 8 - bits to the right and back: a higher level is a
  weaker change, none at all from 20 on. TensorFlow shifts a byte by at most 7, so level 0 leaves one bit and
  not a black image.
- Solarize inverts values of at least int(level / 10 * 256), compared as bytes, for which 256 is 0: levels 10
  and 20 invert everything, and 15 means 128.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from vitkit.errors import Error

HIGHEST = 10  # the level of the arguments below
DEGREES = 30.0
BITS = 4
THRESHOLD = 256
ADDITION = 110
SHEAR = 0.3
PIXELS = 100.0  # of a translation, for images of 224 pixels
CUTOUT = 40  # half the side of the square
GREY = 128
Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]


def augment(
    image: np.ndarray,
    layers: int,
    magnitude: float,
    rng: np.random.Generator,
    *,
    chance: tuple[float, float] = (1.0, 1.0),
) -> np.ndarray:
    """Apply `layers` random operations of the 16, each with a probability drawn from `chance`."""
    if layers < 0 or magnitude < 0:
        raise Error(
            f"RandAugment ({layers}, {magnitude}): layers and magnitude must be 0 or more",
            code="request.value",
        )
    if not 0 <= chance[0] <= chance[1] <= 1:
        raise Error(f"chance {chance} must be a range (low, high) within 0 to 1", code="request.value")
    names = list(OPERATIONS)
    picture = Image.fromarray(image)
    for _ in range(layers):
        operation = OPERATIONS[names[rng.integers(len(names))]]
        if rng.random() < rng.uniform(*chance):
            picture = operation(picture, magnitude, rng)
    return np.array(picture)


def operate(name: str, image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Apply one operation by name."""
    if name not in OPERATIONS:
        raise Error(f"no operation {name!r}; known: {', '.join(OPERATIONS)}", code="request.unknown")
    return np.array(OPERATIONS[name](Image.fromarray(image), level, rng))


def factor(level: float) -> float:
    """The weight of the image in a blend with its degenerate: gray, black, mean or smoothed."""
    return level / HIGHEST * 1.8 + 0.1


def either_sign(value: float, rng: np.random.Generator) -> float:
    return value if rng.random() < 0.5 else -value


def autocontrast(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.equalize(image)


def invert(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.invert(image)


def posterize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    bits = int(level / HIGHEST * BITS)
    return ImageOps.posterize(image, min(max(bits, 1), 8))


def solarize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(image, int(level / HIGHEST * THRESHOLD) % 256)


def solarize_add(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Lighten values below 128."""
    addition = int(level / HIGHEST * ADDITION)
    return image.point([min(value + addition, 255) if value < 128 else value for value in range(256)] * 3)


def color(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Color(image).enhance(factor(level))


def contrast(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(factor(level))


def brightness(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor(level))


def sharpness(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(factor(level))


def affine(image: Image.Image, x: tuple[float, float, float], y: tuple[float, float, float]) -> Image.Image:
    """Map output pixel (i, j) to input pixel (x . (i, j, 1), y . (i, j, 1)), nearest neighbour, gray outside.

    Pillow expects the map of pixel centres, which are offset by half a pixel on both axes.
    """
    (a, b, c), (d, e, f) = x, y
    centred = (a, b, c + (1 - a - b) / 2, d, e, f + (1 - d - e) / 2)
    return image.transform(
        image.size, Image.Transform.AFFINE, centred, Image.Resampling.NEAREST, fillcolor=(GREY, GREY, GREY)
    )


def rotate(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    angle = math.radians(either_sign(level / HIGHEST * DEGREES, rng))
    cos, sin = math.cos(angle), math.sin(angle)
    i, j = (image.width - 1) / 2, (image.height - 1) / 2  # rotate around the centre
    return affine(image, (cos, -sin, i - cos * i + sin * j), (sin, cos, j - sin * i - cos * j))


def shear_x(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return affine(image, (1, either_sign(level / HIGHEST * SHEAR, rng), 0), (0, 1, 0))


def shear_y(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return affine(image, (1, 0, 0), (either_sign(level / HIGHEST * SHEAR, rng), 1, 0))


def translate_x(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return affine(image, (1, 0, either_sign(level / HIGHEST * PIXELS, rng)), (0, 1, 0))


def translate_y(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return affine(image, (1, 0, 0), (0, 1, either_sign(level / HIGHEST * PIXELS, rng)))


def cutout(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """A gray square around a random pixel, clipped at the border."""
    half = int(level / HIGHEST * CUTOUT)
    j, i = rng.integers(image.height), rng.integers(image.width)
    pixels = np.array(image)
    pixels[max(j - half, 0) : j + half, max(i - half, 0) : i + half] = GREY
    return Image.fromarray(pixels)


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": autocontrast,
    "Equalize": equalize,
    "Invert": invert,
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "Color": color,
    "Contrast": contrast,
    "Brightness": brightness,
    "Sharpness": sharpness,
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
    "Cutout": cutout,
    "SolarizeAdd": solarize_add,
}
