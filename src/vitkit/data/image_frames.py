"""The size of an image file and its EXIF orientation, and annotations turned with the picture."""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np

from vitkit.data.decode import (
    MAX_PIXELS,
    OPENERS,
    TURNS,
    BadImage,
    _bad_image,
    _check_size,
    _jpeg_header,
    _kind,
    _orientation,
    decode,
    readable_formats,
)
from vitkit.errors import Error

FLIPS = {2: "x", 3: "xy", 4: "y", 5: "", 6: "y", 7: "xy", 8: "x"}  # before the axes change places, from 5 on


class Frame(NamedTuple):
    """Sizes are (height, width): of the upright image, as decoded, and as stored in the file."""

    size: tuple[int, int]
    stored: tuple[int, int]
    orientation: int  # of EXIF, 1 to 8


class Frames:
    """The frames of the images of a source, each read once in every process."""

    def __init__(self, read: Callable[[str], bytes], keys: Sequence[str]):
        self.read, self.keys = read, keys
        self.known: dict[int, Frame] = {}

    def __call__(self, index: int) -> Frame:
        if (frame := self.known.get(index)) is None:
            frame = self.known[index] = read_frame(self.read(self.keys[index]))
        return frame

    def __reduce__(self) -> tuple[type["Frames"], tuple[Callable[[str], bytes], Sequence[str]]]:
        return Frames, (self.read, self.keys)


def read_frame(data: bytes) -> Frame:
    """The frame of an encoded image; only its header is parsed where that suffices. Raises BadImage."""
    kind = _kind(data, readable_formats())
    try:
        if kind == "JPEG":
            (_, _, height, width, *_), orientation, _ = _jpeg_header(data)
        elif kind in ("TIFF", "HEIC"):  # their decoders turn the picture themselves
            height, width = decode(data).shape[:2]
            orientation = 1
        else:
            image = OPENERS[kind](BytesIO(data))
            width, height = image.size
            orientation = _orientation(image.info.get("exif", b"") or late_exif(data, kind))
    except BadImage:
        raise
    except Exception as error:  # Pillow raises almost any type
        raise _bad_image(kind, error) from error
    _check_size(width, height, MAX_PIXELS)
    upright = (width, height) if orientation > 4 else (height, width)
    return Frame(upright, (height, width), orientation)


def late_exif(data: bytes, kind: str) -> bytes:
    """The EXIF block of a PNG, which may follow the pixels."""
    start = data.rfind(b"eXIf") if kind == "PNG" else -1
    return data[start + 4 : start + 4 + int.from_bytes(data[start - 4 : start])] if start > 8 else b""


def needs_turn(annotated: tuple[int, int], frame: Frame, where: str) -> bool:
    """Whether annotations of a frame of this size belong to the stored picture, not to the upright one.

    annotated: height and width that the annotations name. If neither picture has that size, an error.
    """
    if annotated == frame.size:
        return False
    if annotated == frame.stored:
        return True
    height, width = frame.size
    turned = f" ({frame.stored[1]} x {frame.stored[0]} as stored)" if frame.size != frame.stored else ""
    raise Error(
        f"{where}: annotated as {annotated[1]} x {annotated[0]} pixels, but the image has {width} x {height}"
        f"{turned}; annotate the image in its present size, or restore the size it was annotated in",
        code="data.labels",
    )


def turn_boxes(boxes: np.ndarray, frame: Frame) -> np.ndarray:
    """Boxes (N, 4) of the stored picture as boxes of the upright one."""
    if frame.orientation == 1:
        return boxes
    height, width = frame.stored
    x0, y0, x1, y1 = boxes.T
    if "x" in FLIPS[frame.orientation]:
        x0, x1 = width - x1, width - x0
    if "y" in FLIPS[frame.orientation]:
        y0, y1 = height - y1, height - y0
    columns = (y0, x0, y1, x1) if frame.orientation > 4 else (x0, y0, x1, y1)
    return np.stack(columns, axis=1)


def turn_mask(mask: np.ndarray, frame: Frame) -> np.ndarray:
    """A mask (H, W) of the stored picture as a mask of the upright one."""
    return np.ascontiguousarray(TURNS[frame.orientation](mask))
