"""The image types that the Python API accepts: a path, encoded bytes, a PIL image or an array of pixels."""

import os
from pathlib import Path
from typing import TypeGuard

import numpy as np
from PIL import Image

from vitkit.data.decode import BadImage, from_pillow, read
from vitkit.errors import Error, WrongType

Picture = str | os.PathLike[str] | bytes | np.ndarray | Image.Image


def is_picture(value: object) -> TypeGuard[Picture]:
    """Whether a value is a single picture rather than a collection of them."""
    return isinstance(value, str | os.PathLike | bytes | np.ndarray | Image.Image)


def content_of(picture: Picture) -> bytes | np.ndarray:
    """Encoded bytes, or uint8 RGB pixels (H, W, 3)."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, Image.Image):
        return from_pillow(picture)
    if isinstance(picture, np.ndarray):
        return check_pixels(picture)
    if not isinstance(picture, str | os.PathLike):
        raise WrongType(
            f"a picture must be a path, bytes, a PIL image or a numpy array, not {type(picture).__name__}",
            code="request.value",
        )
    if os.path.isdir(picture):
        raise Error(
            f"{os.fspath(picture)} is a folder; pass its images, "
            f"for example sorted(Path({os.fspath(picture)!r}).glob('*.jpg'))",
            code="request.value",
        )
    try:
        return read(Path(picture))
    except BadImage as error:
        raise BadImage(error.reason, f"{os.fspath(picture)}: {error}") from None


def name_of(picture: Picture) -> str:
    """The name of a picture in error messages: its path, or nothing."""
    return os.fspath(picture) if isinstance(picture, str | os.PathLike) else ""


def check_pixels(pixels: np.ndarray) -> np.ndarray:
    """RGB pixels (H, W, 3) from an RGB or grayscale (H, W) array."""
    if pixels.dtype == np.uint8 and pixels.ndim == 2 and pixels.size:
        return pixels[..., None].repeat(3, -1)
    if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size:
        return pixels
    raise Error(
        f"an array of {pixels.dtype} with shape {pixels.shape}; expected uint8, RGB (height, width, 3) or "
        f"gray (height, width){advice(pixels)}",
        code="request.value",
    )


def advice(pixels: np.ndarray) -> str:
    """How to fix an array of the wrong shape or dtype."""
    if pixels.ndim == 4:
        return "; pass several pictures as a list: list(array)"
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        return "; move the channels last: array.transpose(1, 2, 0)"
    if pixels.ndim == 3 and pixels.shape[2] == 4:
        return "; drop the alpha channel: array[..., :3]"
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        return "; drop the last axis: array[..., 0]"
    if np.issubdtype(pixels.dtype, np.floating):
        return "; convert values from 0 to 1 with (array * 255).round().astype(np.uint8)"
    if np.issubdtype(pixels.dtype, np.integer) and pixels.size:
        return "; convert values from 0 to 255 with array.astype(np.uint8)"
    return ""
