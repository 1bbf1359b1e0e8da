"""Class masks in PNG files: the numbers of palette, gray and 16-bit pixels, or the classes of colours."""

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from vitkit.data.decode import MAX_PIXELS
from vitkit.data.targets import IGNORE
from vitkit.errors import Error

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class ClassMasks:
    """How pixels of masks become class numbers."""

    numbers: np.ndarray  # (65536,) int16: the class number of each value, IGNORE, or -1 if it is not allowed
    colours: tuple[tuple[int, int, int], ...]  # of values 0, 1, ...; empty if masks may not be in colour
    names: tuple[str, ...]

    def read(self, data: bytes, where: str) -> np.ndarray:
        """The class numbers (H, W) uint8 of a mask file."""
        pixels = mask_pixels(data, where)
        values = self.from_colours(pixels, where) if pixels.ndim == 3 else pixels
        mask = self.numbers[values]
        if (mask < 0).any():
            wrong, counts = np.unique(values[mask < 0], return_counts=True)
            listed = ", ".join(f"{v} in {n} pixels" for v, n in zip(wrong[:5], counts[:5], strict=True))
            raise Error(
                f"{where}: class numbers that the {len(self.names)} classes do not have: {listed}"
                f"{' and others' * (len(wrong) > 5)}; expected 0 to {len(self.names) - 1}, and {IGNORE} for "
                "what is ignored: correct the mask, or the list of classes",
                code="data.labels",
            )
        return mask.astype(np.uint8)

    def from_colours(self, pixels: np.ndarray, where: str) -> np.ndarray:
        """Colours (H, W, 3) as values (H, W) by the colour table."""
        if not self.colours:
            raise Error(
                f"{where}: a mask in colour, and no list of classes gives colours; add them to the lines of "
                "classes.txt (index name R G B), or save class numbers",
                code="data.labels",
            )
        table = pack(np.array(self.colours, np.int64))
        order = np.argsort(table)
        packed = pack(pixels.astype(np.int64))
        position = np.searchsorted(table[order], packed).clip(max=len(table) - 1)
        values = order[position]
        unknown = table[values] != packed
        if unknown.any():
            first = int(packed[unknown][0])
            colour = first >> 16, first >> 8 & 255, first & 255
            raise Error(
                f"{where}: {int(unknown.sum())} pixels have a colour that no class has, such as {colour}; "
                "add it to the list of classes, or save the mask without smoothing",
                code="data.labels",
            )
        return values


def pack(colours: np.ndarray) -> np.ndarray:
    """Colours (..., 3) as one number each."""
    return colours[..., 0] << 16 | colours[..., 1] << 8 | colours[..., 2]


def mask_pixels(data: bytes, where: str) -> np.ndarray:
    """Values (H, W) or colours (H, W, 3) of a PNG as stored: indices of a palette, unscaled grays."""
    if not data.startswith(PNG):
        raise Error(
            f"{where}: not a PNG file inside; masks must be PNG, since other formats change class numbers: "
            "export them again",
            code="data.labels",
        )
    try:
        image = PngImageFile(BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise Error(
                f"{where}: {image.width} x {image.height} pixels; the limit is {MAX_PIXELS}",
                code="image.too-large",
            )
        image.load()
        pixels: Any = np.asarray(image.convert("RGB") if image.mode == "RGBA" else image)
    except Error:
        raise
    except Exception as error:  # Pillow raises almost any type
        raise Error(f"{where}: damaged PNG ({error}); export the mask again", code="data.corrupt") from None
    return stored_values(image, pixels, data, where)


def stored_values(image: Image.Image, pixels: np.ndarray, data: bytes, where: str) -> np.ndarray:
    """The values of a decoded PNG without Pillow's scaling of grays with 2 or 4 bits."""
    bits = data[24]
    if image.mode == "L" and bits < 8:
        return pixels // (255 // (2**bits - 1))
    if image.mode in ("1", "L", "P"):
        return pixels.astype(np.uint8)
    if image.mode.startswith("I") and pixels.min() >= 0 and pixels.max() < 2**16:
        return pixels.astype(np.uint16)
    if image.mode in ("RGB", "RGBA"):
        return pixels[..., :3]
    raise Error(
        f"{where}: a mask of the kind {image.mode}; save class numbers as PNG with 8 bits, one channel",
        code="data.labels",
    )


def values_text(tree: Any, name: str) -> str:
    """The values of a mask for a message."""
    pixels = mask_pixels(tree.bytes_of(name), name)
    if pixels.ndim == 3:
        return "colours"
    values = np.unique(pixels)
    return ", ".join(map(str, values[:12].tolist())) + " and others" * (len(values) > 12)
