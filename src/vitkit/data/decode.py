"""Bytes nobody vouches for to upright RGB pixels: the one decoder of training, prediction and the server.

Whatever the file, the result is uint8 RGB or a BadImage with a reason. Transparency is laid on white, 16-bit
gray keeps its high byte, floats in [0, 1] become 0..255, an animation is its first frame, EXIF orientation is
applied; colour profiles and all other metadata are ignored.
"""

import os
import re
import stat
import struct
from collections.abc import Callable, Sequence
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    PngImagePlugin,
    WebPImagePlugin,
)
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vitkit.data.names import not_read, readable_formats
from vitkit.errors import Error

try:
    simplejpeg: Any = import_module("simplejpeg")
except ImportError:
    simplejpeg = None
FORMATS = readable_formats()
BACKGROUND = (255, 255, 255)  # what shows through transparent pixels
MAX_BYTES = 200 * 10**6
MAX_PIXELS = 50_000_000
MAX_MARKERS = 500  # a progressive JPEG of some ten scans has 50; each scan is a pass over all pixels
MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # with a body; FF 00, FF D0..D7 are inside scans
# Pillow's own classes and not Image.open, which only warns about sizes up to twice its limit
OPENERS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile, "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile, "BMP": BmpImagePlugin.BmpImageFile, "TIFF": TiffImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}  # fmt: skip
SIGNATURES = (
    (rb"\xff\xd8\xff", "JPEG"), (rb"\x89PNG\r\n\x1a\n", "PNG"), (rb"RIFF....WEBP", "WEBP"),
    (rb"GIF8[79]a", "GIF"), (rb"BM", "BMP"), (rb"II[*+]\0|MM\0[*+]", "TIFF"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "EPS"), (rb"8BPS", "PSD"), (rb"%PDF", "PDF"), (rb"SIMPLE  =", "FITS"),
    (rb"....ftyp(avi|mif1.{4,40}avi)", "AVIF"), (rb"....ftyp(hei|hev|mif1|msf1)", "HEIC"),
    (rb"PK\x03\x04", "zip"),
    (rb"\0\0\0\x0cjP  ", "JPEG 2000"), (rb"\x1f\x8b", "gzip"), (rb"\s*(<\?xml[^>]*>\s*)?<svg", "SVG"),
)  # fmt: skip
TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # by EXIF orientation
    1: lambda p: p, 2: lambda p: p[:, ::-1], 3: lambda p: p[::-1, ::-1], 4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1), 6: lambda p: p[::-1].swapaxes(0, 1),
    7: lambda p: p[::-1, ::-1].swapaxes(0, 1), 8: lambda p: p[:, ::-1].swapaxes(0, 1),
}  # fmt: skip
Box = tuple[float, float, float, float]  # top, left, height, width
Size = tuple[int, int]  # height, width


class BadImage(Error):
    """A file that is not used: a short stable reason, and a message of one line."""

    code = "image.unreadable"

    def __init__(self, reason: str, message: str) -> None:
        large = reason in ("too-large", "too-many-pixels")
        super().__init__(" ".join(message.split())[:200], code="image.too-large" if large else "")
        self.reason = reason

    def __reduce__(self) -> tuple[type["BadImage"], tuple[str, str]]:
        return BadImage, (self.reason, str(self))


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an ordinary file; a directory, pipe or device is refused without waiting for it."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadImage("unreadable", f"cannot be opened: {getattr(error, 'strerror', error)}") from None
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise BadImage("not-a-file", "not an ordinary file")
        if status.st_size > MAX_BYTES:
            raise BadImage("too-large", f"{status.st_size} bytes; at most {MAX_BYTES} are read")
        with open(opened, "rb", closefd=False) as file:
            return file.read(status.st_size)
    except OSError as error:
        raise BadImage("unreadable", f"cannot be read: {error.strerror}") from None
    finally:
        os.close(opened)


def decode(
    data: bytes, *, shorter: int = 0, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS
) -> np.ndarray:
    """The pixels of an image file, (H, W, 3) uint8 RGB, or BadImage.

    With `shorter`, a JPEG may come at 1/2, 1/4 or 1/8 size, as long as its shorter side is not below that.
    Damage inside the compressed pixels of a JPEG is noticed only where simplejpeg is installed.
    """
    _kind(data, formats)
    least = (shorter, shorter) if shorter else None
    return np.ascontiguousarray(decode_box(data, None, least, max_pixels)[0])


def from_pillow(image: Image.Image, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels of an open Pillow image, as `decode` gives those of its file: upright, RGB, on white."""
    _check_size(*image.size, max_pixels)
    try:
        pixels = _rgb(image)
        if isinstance(image, TiffImageFile):  # is turned as it is loaded
            return pixels
        return np.ascontiguousarray(TURNS[_orientation(image.info.get("exif", b""))](pixels))
    except BadImage:
        raise
    except Exception as error:
        raise _refusal(image.format or "image", error) from error


def jpeg_size(data: bytes) -> Size | None:
    """The size of the upright image in a JPEG, by its header; None for what is no JPEG."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    (_, _, height, width, *_), orientation, _ = _jpeg_header(data)
    _check_size(width, height, MAX_PIXELS)
    return (width, height) if orientation > 4 else (height, width)


def jpeg_scans(data: bytes, most: int) -> int:
    """How many scans a JPEG has, counted up to `most` + 1; each is a pass over all its pixels. Else 0."""
    try:
        at = _jpeg_header(data)[2] if data.startswith(b"\xff\xd8\xff") else len(data)
    except BadImage:
        return 0
    if (scans := data.count(b"\xff\xda", at)) <= most:
        return scans
    scans = 0  # some of those may follow the end of the image, where phones keep films
    while scans <= most and (found := MARKER.search(data, at)) and found[0] != b"\xff\xd9":
        scans += found[0] == b"\xff\xda"
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return scans


def pixels_by_header(data: bytes) -> int:
    """Width times height of an image; 0 where the header does not say."""
    try:
        kind = _kind(data, FORMATS)
        if kind == "PNG":
            width, height = struct.unpack_from(">II", data, 16)
        elif kind == "WEBP":
            width, height = _webp_size(data[:30])
        elif kind == "GIF":
            width, height = struct.unpack_from("<HH", data, 6)
        elif kind == "BMP":
            width, height = map(abs, struct.unpack_from("<ii", data, 18))
        elif kind == "TIFF":
            width, height = _tiff_tags(data, 256, 257)
        elif kind in ("AVIF", "HEIC"):
            width, height = largest_extent(data)
        else:
            height, width = jpeg_size(data) or (0, 0)
    except (BadImage, struct.error):
        return 0
    return width * height


def decode_box(
    data: bytes, box: Box | None, least: Size | None, max_pixels: int = MAX_PIXELS
) -> tuple[np.ndarray, Box]:
    """Pixels of the upright image in which a box (None: all) is to be found, and where.

    A JPEG comes at 1/2, 1/4 or 1/8 size where that leaves the box `least` pixels; it may then begin or end
    inside one. Rows below the box may be missing, and damage in them is then not noticed.
    """
    kind = _kind(data, FORMATS)
    try:
        if kind == "JPEG":
            return _jpeg(data, box, least, max_pixels)
        pixels = _other(data, kind, max_pixels)
        return pixels, box or (0, 0, *pixels.shape[:2])
    except BadImage:
        raise
    except Exception as error:  # Pillow raises nearly every kind there is
        raise _refusal(kind, error) from error


def _refusal(kind: str, error: Exception) -> BadImage:
    """What is raised for an error of a decoder's."""
    cut = isinstance(error, EOFError) or "truncat" in str(error).lower()
    return BadImage("truncated" if cut else "damaged", f"{kind}: {str(error) or type(error).__name__}")


def _kind(data: bytes, formats: Sequence[str]) -> str:
    """The format, by the first bytes alone: a file's name says nothing."""
    if not data:
        raise BadImage("empty", "the file is empty")
    kind = next((kind for start, kind in SIGNATURES if re.match(start, data[:512], re.DOTALL)), None)
    if kind is None:
        raise BadImage("not-an-image", "not an image: its first bytes are those of no known format")
    if kind not in formats or kind not in FORMATS:
        raise BadImage("unsupported-format", not_read(kind, formats))
    return kind


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise BadImage("zero-size", f"{width} x {height} pixels")
    if width * height > max_pixels:
        raise BadImage("too-many-pixels", f"{width} x {height} pixels; at most {max_pixels} are read")


def _jpeg(data: bytes, box: Box | None, least: Size | None, max_pixels: int) -> tuple[np.ndarray, Box]:
    frame, turn, scan = _jpeg_header(data)
    process, bits, height, width, components, _ = frame
    _check_size(width, height, max_pixels)
    if data.rfind(b"\xff\xd9", scan) < 0:
        raise BadImage("truncated", "JPEG: cut off before its end")
    if process > 0xC1 and data.count(b"\xff\xda", scan) > MAX_MARKERS // 5:
        _check_scans(data, scan)
    top, left, h, w = box or (0, 0, *((width, height) if turn > 4 else (height, width)))
    scale = next((s for s in (8, 4, 2) if least and h >= s * least[0] and w >= s * least[1]), 1)
    upside_down, mirrored = turn in (3, 4, 6, 7), turn in (2, 3, 7, 8)  # as stored
    last = height if upside_down else left + w if turn > 4 else top + h
    data, rows = _without_rows_below(last, data, frame, scan)
    reduced = -(-width // scale), -(-rows // scale)
    plain = process <= 0xC2 and bits == 8 and components in (1, 3)  # C0 baseline, C1 extended, C2 progressive
    pixels = _fast_jpeg(data, *reduced, scale, rows < height) if simplejpeg and plain else None
    if pixels is None:
        image = JpegImageFile(BytesIO(data))
        _check_size(*image.size, max_pixels)  # Pillow may have found another frame than we did
        image.draft(None, (width // scale, rows // scale))
        pixels = _rgb(image)
    if pixels.shape[1::-1] != reduced:
        raise BadImage("damaged", f"JPEG: {reduced} pixels by its header, {pixels.shape[1::-1]} in its frame")
    # the last pixel of a reduced side may stand for less than the others; in a flipped image it is the first
    y, x = (-height % scale * upside_down, -width % scale * mirrored)[:: -1 if turn > 4 else 1]
    return TURNS[turn](pixels), ((top + y) / scale, (left + x) / scale, h / scale, w / scale)


def _without_rows_below(row: float, data: bytes, frame: tuple[int, ...], scan: int) -> tuple[bytes, int]:
    """A JPEG whose header lets it end soon after a row, and that height; the same pixels until there."""
    process, _, height, _, components, at = frame
    rows = int(row) // 16 * 16 + 16  # whole blocks, and at least one row more, for colours between rows
    if rows >= height or process > 0xC1 or data[scan + 4] != components or b"\xff\xdd" in data[:scan]:
        return data, height  # with more scans, or restart markers, the first warning may hide another
    return data[: at + 5] + rows.to_bytes(2) + data[at + 7 :], rows


def _fast_jpeg(data: bytes, width: int, height: int, scale: int, cut: bool) -> np.ndarray | None:
    """Pillow's pixels to the bit, sooner; None where Pillow should have its say."""
    pixels, least = np.empty((height, width, 3), np.uint8), {"min_width": width, "min_height": height}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **least, min_factor=min(scale, 2), buffer=pixels)
    except ValueError as error:  # which carries libjpeg's first warning; the pixels are written all the same
        said = str(error)
        if cut and said.endswith("extraneous bytes before marker 0xd9"):
            return pixels  # those are the rows left out
        short = said.startswith("Premature end")
        # stray bytes between whole segments are common and harmless
        if short or (said.startswith("Corrupt JPEG data") and "extraneous" not in said):
            raise BadImage("truncated" if short else "damaged", f"JPEG: {said}") from None
        return None


def _jpeg_header(data: bytes) -> tuple[tuple[int, ...], int, int]:
    """(process, bits, height, width, components, place) of the frame, orientation, where the scans begin."""
    frame: tuple[int, ...] = ()
    orientation, at = 0, 2
    for _ in range(MAX_MARKERS):
        start, at = at, data.find(b"\xff", at)
        if at < 0 or at + 10 > len(data):
            raise BadImage("truncated", "JPEG: cut off in its header")
        marker = data[at + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # padding and markers without a body
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xDA and frame:
            return frame, orientation or 1, at
        if marker in (0xD9, 0xDA) or at - start > 4096:  # junk between markers
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = (marker, *struct.unpack_from(">BHHB", data, at + 4), at)
        body, at = at + 4, at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if marker == 0xE1 and not orientation and data.startswith(b"Exif\0\0", body):
            orientation = _orientation(data[body:at])
    raise BadImage("damaged", "JPEG: its header is not in order")


def _check_scans(data: bytes, at: int) -> None:
    """Refuse a small file whose thousands of empty scans would keep the decoder busy for hours."""
    for _ in range(MAX_MARKERS):
        found = MARKER.search(data, at)
        if not found or found[0] == b"\xff\xd9":
            return
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    raise BadImage("damaged", f"JPEG: more than {MAX_MARKERS} markers")


def _orientation(exif: bytes) -> int:
    """Tag 274 of an EXIF block, or 1 where the block has none or is garbage."""
    (value,) = _tiff_tags(exif.removeprefix(b"Exif\0\0"), 274)
    return value if value in TURNS else 1


def _tiff_tags(data: bytes, *wanted: int) -> tuple[int, ...]:
    """Whole numbers of the first directory of a TIFF or of EXIF, 0 for those that it lacks."""
    found = dict.fromkeys(wanted, 0)
    order, big = {b"II": "<", b"MM": ">"}.get(data[:2], ""), data[2:4] in (b"+\0", b"\0+")
    if not order or len(data) < 10 or not (big or data[2:4] in (b"*\0", b"\0*")):
        return tuple(found.values())
    head, counted, entry = ("Q", "Q", "HHQ") if big else ("I", "H", "HHI")
    step, width = (20, 8) if big else (12, 2)
    start = struct.unpack_from(order + head, data.ljust(16, b"\0"), 8 if big else 4)[0]
    start = min(start, len(data) - width)
    (entries,) = struct.unpack_from(order + counted, data.ljust(start + width, b"\0"), start)
    for at in range(start + width, min(start + width + step * entries, len(data) - step + 1), step):
        tag, kind, count = struct.unpack_from(order + entry, data, at)
        if tag in found and kind in (3, 4, 16) and count == 1 and not found[tag]:
            (found[tag],) = struct.unpack_from(
                order + {3: "H", 4: "I", 16: "Q"}[kind], data, at + step - (8 if big else 4)
            )
    return tuple(found.values())


def _other(data: bytes, kind: str, max_pixels: int) -> np.ndarray:
    if kind == "WEBP":
        _check_size(*_webp_size(data[:30]), max_pixels)  # Pillow opens it on a whole canvas
    if kind in ("AVIF", "HEIC"):
        _check_size(*largest_extent(data), max_pixels)
    if kind == "HEIC":
        return _heic(data, max_pixels)
    image = OPENERS[kind](BytesIO(data))
    _check_size(*image.size, max_pixels)
    if isinstance(image, TiffImageFile):
        tags = image.tag_v2
        _check_size(tags.get(322, 1), tags.get(323, 1), max_pixels)  # a tile is made in full
        if (image.tile[-1][1] or ())[2:] != (tags[256], tags[257]):  # which Pillow would leave black
            raise BadImage("truncated", "TIFF: the last of its strips or tiles are missing")
        return _rgb(image)  # a TIFF is turned as it is loaded
    key = image.info.get("transparency")
    if kind == "PNG" and image.mode == "L" and isinstance(key, int) and data[24] < 8:
        image.info["transparency"] = key * 255 // (2 ** data[24] - 1)  # Pillow stretches the pixels only
    pixels = _rgb(image)  # the EXIF block may follow them
    return TURNS[_orientation(image.info.get("exif", b""))](pixels)


def largest_extent(data: bytes) -> tuple[int, int]:
    """Width and height of the largest picture that an AVIF or HEIC file declares, its tiles and masks too."""
    sizes, at = [], 0
    while at + 8 <= len(data):  # boxes: a length, a name, a content
        length, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        length = int.from_bytes(data[at + 8 : at + 16]) if length == 1 else length or len(data) - at
        if length < 8:
            break
        if name in (b"meta", b"moov"):
            found = re.finditer(b"ispe....(.{8})", data[at : at + length], re.DOTALL)
            sizes += [struct.unpack(">II", one[1]) for one in found]
        at += length
    if not sizes:
        raise BadImage("damaged", "no size of a picture in its header")
    return max(sizes, key=lambda size: size[0] * size[1])


def _heic(data: bytes, max_pixels: int) -> np.ndarray:
    """The primary picture, which libheif turns upright itself; the EXIF orientation beside it is a copy."""
    try:
        heif = import_module("pillow_heif")
    except ImportError:  # installed, but not with all that it needs
        raise BadImage("unsupported-format", not_read("HEIC", ())) from None
    heif.options.DECODE_THREADS = 1  # images are decoded side by side
    heif.options.THUMBNAILS = heif.options.DEPTH_IMAGES = heif.options.AUX_IMAGES = False
    picture: Any = heif.open_heif(data)
    width, height = picture.size
    _check_size(width, height, max_pixels)
    return _rgb(picture.to_pillow())


def _webp_size(head: bytes) -> tuple[int, int]:
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    lossless = head[12:16] == b"VP8L"
    (both,) = struct.unpack_from("<I", head, 21 if lossless else 26)
    return (both & 0x3FFF) + lossless, (both >> (14 if lossless else 16) & 0x3FFF) + lossless


def _rgb(image: Image.Image) -> np.ndarray:
    image.load()
    if image.mode == "F" or image.mode.startswith("I"):
        return np.repeat(_gray(image)[..., None], 3, axis=2)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        flat = Image.new("RGB", image.size, BACKGROUND)
        flat.paste(layer, mask=layer)
        return np.array(flat)
    return np.array(image.convert("RGB"))


def _gray(image: Image.Image) -> np.ndarray:
    """Gray of more than 8 bits, of which Pillow's convert makes white (integers) or black (floats)."""
    values, tags = np.asarray(image), image.tag_v2 if isinstance(image, TiffImageFile) else {}
    kind, twelve = "float" if image.mode == "F" else "int", tags.get(258) == (12,)
    top, least, most = 1 if kind == "float" else 4095 if twelve else 65535, values.min(), values.max()
    if not (least >= 0 and most <= top):  # NaN compares with nothing
        raise BadImage(f"{kind}-out-of-range", f"values from {least} to {most}, not in 0..{top}")
    gray = np.rint(values * 255) if kind == "float" else values >> (4 if twelve else 8)
    gray = (255 - gray if tags.get(262) == 0 else gray).astype(np.uint8)  # 0: white is zero
    if "transparency" in image.info:
        gray[values == image.info["transparency"]] = BACKGROUND[0]
    return gray
