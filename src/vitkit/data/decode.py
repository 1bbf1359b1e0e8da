"""Decode untrusted image files to upright RGB pixels, for training, prediction and the server alike.

The result is uint8 RGB or a BadImage with a reason. Transparency is composited on white, 16-bit gray keeps
its high byte, floats in [0, 1] are scaled to 0..255, of an animation the first frame is used, and the EXIF
orientation is applied; colour profiles and all other metadata are ignored.
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
from vitkit.io.system import READ

try:
    simplejpeg: Any = import_module("simplejpeg")
except ImportError:
    simplejpeg = None
FORMATS = readable_formats()
BACKGROUND = (255, 255, 255)  # behind transparent pixels
MAX_BYTES = 200 * 10**6
MAX_PIXELS = 50_000_000
MAX_MARKERS = 500  # a progressive JPEG with ten scans has about 50; each scan is a pass over all pixels
MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # markers with a body; FF 00, FF D0..D7 are in scans
# Pillow's classes instead of Image.open, which only warns about sizes up to twice its limit
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
    """An unusable image: a short stable reason, and a one-line message."""

    code = "image.unreadable"

    def __init__(self, reason: str, message: str) -> None:
        large = reason in ("too-large", "too-many-pixels")
        super().__init__(" ".join(message.split())[:200], code="image.too-large" if large else "")
        self.reason = reason

    def __reduce__(self) -> tuple[type["BadImage"], tuple[str, str]]:
        return BadImage, (self.reason, str(self))


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file; a directory, pipe or device is rejected without blocking."""
    try:
        descriptor = os.open(path, READ)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadImage("unreadable", f"cannot be opened: {getattr(error, 'strerror', error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadImage("not-a-file", "not a regular file")
        if status.st_size > MAX_BYTES:
            raise BadImage("too-large", f"{status.st_size} bytes; the limit is {MAX_BYTES}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)
    except OSError as error:
        raise BadImage("unreadable", f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def decode(
    data: bytes, *, shorter: int = 0, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS
) -> np.ndarray:
    """The pixels of an image file, (H, W, 3) uint8 RGB; raises BadImage.

    With `shorter`, a JPEG may be decoded at 1/2, 1/4 or 1/8 size, if its shorter side stays at least that.
    Damage inside the compressed pixels of a JPEG is detected only if simplejpeg is installed.
    """
    _kind(data, formats)
    least = (shorter, shorter) if shorter else None
    return np.ascontiguousarray(decode_box(data, None, least, max_pixels)[0])


def from_pillow(image: Image.Image, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels of an open Pillow image, as `decode` returns those of its file: upright, RGB, on white."""
    _check_size(*image.size, max_pixels)
    try:
        pixels = _rgb(image)
        if isinstance(image, TiffImageFile):  # Pillow applies its orientation on load
            return pixels
        return np.ascontiguousarray(TURNS[_orientation(image.info.get("exif", b""))](pixels))
    except BadImage:
        raise
    except Exception as error:
        raise _bad_image(image.format or "image", error) from error


def jpeg_size(data: bytes) -> Size | None:
    """The size of the upright image, from the header of a JPEG; None for other formats."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    (_, _, height, width, *_), orientation, _ = _jpeg_header(data)
    _check_size(width, height, MAX_PIXELS)
    return (width, height) if orientation > 4 else (height, width)


def jpeg_scans(data: bytes, most: int) -> int:
    """The number of scans of a JPEG, counted up to `most` + 1, each a pass over all pixels; otherwise 0."""
    try:
        offset = _jpeg_header(data)[2] if data.startswith(b"\xff\xd8\xff") else len(data)
    except BadImage:
        return 0
    if (scans := data.count(b"\xff\xda", offset)) <= most:
        return scans
    scans = 0  # count again up to the end of the image, after which phones append videos
    while scans <= most and (marker := MARKER.search(data, offset)) and marker[0] != b"\xff\xd9":
        scans += marker[0] == b"\xff\xda"
        offset = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return scans


def pixels_by_header(data: bytes) -> int:
    """Width times height of an image; 0 if the header does not say."""
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
    """Pixels of the upright image that contain a box (None: all), and the position of the box in them.

    A JPEG is decoded at 1/2, 1/4 or 1/8 size if the box keeps `least` pixels; it may then start or end inside
    a pixel. Rows below the box may be missing, so that damage in them goes unnoticed.
    """
    kind = _kind(data, FORMATS)
    try:
        if kind == "JPEG":
            return _jpeg(data, box, least, max_pixels)
        pixels = _other(data, kind, max_pixels)
        return pixels, box or (0, 0, *pixels.shape[:2])
    except BadImage:
        raise
    except Exception as error:  # Pillow raises almost any type
        raise _bad_image(kind, error) from error


def _bad_image(kind: str, error: Exception) -> BadImage:
    """The BadImage for an exception of a decoder."""
    truncated = isinstance(error, EOFError) or "truncat" in str(error).lower()
    return BadImage("truncated" if truncated else "damaged", f"{kind}: {str(error) or type(error).__name__}")


def _kind(data: bytes, formats: Sequence[str]) -> str:
    """The format, from the first bytes alone; file names are not trusted."""
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
        raise BadImage("too-many-pixels", f"{width} x {height} pixels; the limit is {max_pixels}")


def _jpeg(data: bytes, box: Box | None, least: Size | None, max_pixels: int) -> tuple[np.ndarray, Box]:
    frame, turn, scan = _jpeg_header(data)
    process, bits, height, width, components, _ = frame
    _check_size(width, height, max_pixels)
    if data.rfind(b"\xff\xd9", scan) < 0:
        raise BadImage("truncated", "JPEG: truncated before its end")
    if process > 0xC1 and data.count(b"\xff\xda", scan) > MAX_MARKERS // 5:
        _check_scans(data, scan)
    top, left, h, w = box or (0, 0, *((width, height) if turn > 4 else (height, width)))
    scale = next((s for s in (8, 4, 2) if least and h >= s * least[0] and w >= s * least[1]), 1)
    upside_down, mirrored = turn in (3, 4, 6, 7), turn in (2, 3, 7, 8)  # as stored
    last = height if upside_down else left + w if turn > 4 else top + h
    data, rows = _without_rows_below(last, data, frame, scan)
    reduced = -(-width // scale), -(-rows // scale)
    simple = process <= 0xC2 and bits == 8 and components in (1, 3)  # baseline, extended or progressive
    pixels = _fast_jpeg(data, *reduced, scale, rows < height) if simplejpeg and simple else None
    if pixels is None:
        image = JpegImageFile(BytesIO(data))
        _check_size(*image.size, max_pixels)  # Pillow may use another frame header than we did
        image.draft(None, (width // scale, rows // scale))
        pixels = _rgb(image)
    if pixels.shape[1::-1] != reduced:
        raise BadImage("damaged", f"JPEG: {reduced} pixels by its header, {pixels.shape[1::-1]} in its frame")
    # the last pixel of a reduced side may cover fewer pixels than the others; if flipped, it is the first
    y, x = (-height % scale * upside_down, -width % scale * mirrored)[:: -1 if turn > 4 else 1]
    return TURNS[turn](pixels), ((top + y) / scale, (left + x) / scale, h / scale, w / scale)


def _without_rows_below(row: float, data: bytes, frame: tuple[int, ...], scan: int) -> tuple[bytes, int]:
    """A JPEG with a smaller height in its header, so that it ends soon after a row; and that height."""
    process, _, height, _, components, offset = frame
    rows = int(row) // 16 * 16 + 16  # whole blocks, and at least one more row, for chroma upsampling
    if rows >= height or process > 0xC1 or data[scan + 4] != components or b"\xff\xdd" in data[:scan]:
        return data, height  # with several scans or restart markers, the first warning may hide another
    return data[: offset + 5] + rows.to_bytes(2) + data[offset + 7 :], rows


def _fast_jpeg(data: bytes, width: int, height: int, scale: int, shortened: bool) -> np.ndarray | None:
    """Decode with simplejpeg, bit-identical to Pillow but faster; None if Pillow has to decode the file."""
    pixels, least = np.empty((height, width, 3), np.uint8), {"min_width": width, "min_height": height}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", **least, min_factor=min(scale, 2), buffer=pixels)
    except ValueError as error:  # libjpeg's first warning; the pixels are written nevertheless
        warning = str(error)
        if shortened and warning.endswith("extraneous bytes before marker 0xd9"):
            return pixels  # these bytes are the rows that were left out
        truncated = warning.startswith("Premature end")
        # stray bytes between whole segments are common and harmless
        if truncated or (warning.startswith("Corrupt JPEG data") and "extraneous" not in warning):
            raise BadImage("truncated" if truncated else "damaged", f"JPEG: {warning}") from None
        return None


def _jpeg_header(data: bytes) -> tuple[tuple[int, ...], int, int]:
    """(process, bits, height, width, components, offset) of the frame, orientation, offset of the scans."""
    frame: tuple[int, ...] = ()
    orientation, offset = 0, 2
    for _ in range(MAX_MARKERS):
        start, offset = offset, data.find(b"\xff", offset)
        if offset < 0 or offset + 10 > len(data):
            raise BadImage("truncated", "JPEG: truncated in its header")
        marker = data[offset + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # padding and markers without a body
            offset += 1 if marker == 0xFF else 2
            continue
        if marker == 0xDA and frame:
            return frame, orientation or 1, offset
        if marker in (0xD9, 0xDA) or offset - start > 4096:  # junk between markers
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = (marker, *struct.unpack_from(">BHHB", data, offset + 4), offset)
        body, offset = offset + 4, offset + 2 + int.from_bytes(data[offset + 2 : offset + 4])
        if marker == 0xE1 and not orientation and data.startswith(b"Exif\0\0", body):
            orientation = _orientation(data[body:offset])
    raise BadImage("damaged", "JPEG: malformed header")


def _check_scans(data: bytes, offset: int) -> None:
    """Reject a small file whose thousands of empty scans would keep the decoder busy for hours."""
    for _ in range(MAX_MARKERS):
        marker = MARKER.search(data, offset)
        if not marker or marker[0] == b"\xff\xd9":
            return
        offset = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    raise BadImage("damaged", f"JPEG: more than {MAX_MARKERS} markers")


def _orientation(exif: bytes) -> int:
    """Tag 274 of an EXIF block; 1 if it is missing or invalid."""
    (value,) = _tiff_tags(exif.removeprefix(b"Exif\0\0"), 274)
    return value if value in TURNS else 1


def _tiff_tags(data: bytes, *tags: int) -> tuple[int, ...]:
    """Integer tags of the first directory of a TIFF or EXIF block; 0 for missing ones."""
    values = dict.fromkeys(tags, 0)
    order, big = {b"II": "<", b"MM": ">"}.get(data[:2], ""), data[2:4] in (b"+\0", b"\0+")
    if not order or len(data) < 10 or not (big or data[2:4] in (b"*\0", b"\0*")):
        return tuple(values.values())
    head, counted, entry = ("Q", "Q", "HHQ") if big else ("I", "H", "HHI")
    step, width = (20, 8) if big else (12, 2)
    start = struct.unpack_from(order + head, data.ljust(16, b"\0"), 8 if big else 4)[0]
    start = min(start, len(data) - width)
    (entries,) = struct.unpack_from(order + counted, data.ljust(start + width, b"\0"), start)
    for offset in range(start + width, min(start + width + step * entries, len(data) - step + 1), step):
        tag, kind, count = struct.unpack_from(order + entry, data, offset)
        if tag in values and kind in (3, 4, 16) and count == 1 and not values[tag]:
            (values[tag],) = struct.unpack_from(
                order + {3: "H", 4: "I", 16: "Q"}[kind], data, offset + step - (8 if big else 4)
            )
    return tuple(values.values())


def _other(data: bytes, kind: str, max_pixels: int) -> np.ndarray:
    """The pixels of a format other than JPEG."""
    if kind == "WEBP":
        _check_size(*_webp_size(data[:30]), max_pixels)  # before Pillow allocates the whole canvas
    if kind in ("AVIF", "HEIC"):
        _check_size(*largest_extent(data), max_pixels)
    if kind == "HEIC":
        return _heic(data, max_pixels)
    image = OPENERS[kind](BytesIO(data))
    _check_size(*image.size, max_pixels)
    if isinstance(image, TiffImageFile):
        tags = image.tag_v2
        _check_size(tags.get(322, 1), tags.get(323, 1), max_pixels)  # Pillow allocates whole tiles
        if (image.tile[-1][1] or ())[2:] != (tags[256], tags[257]):  # Pillow would leave the rest black
            raise BadImage("truncated", "TIFF: the last of its strips or tiles are missing")
        return _rgb(image)  # Pillow applies the orientation of a TIFF on load
    key = image.info.get("transparency")
    if kind == "PNG" and image.mode == "L" and isinstance(key, int) and data[24] < 8:
        image.info["transparency"] = key * 255 // (2 ** data[24] - 1)  # Pillow scales only the pixels
    pixels = _rgb(image)  # before the EXIF block, which may follow the pixels
    return TURNS[_orientation(image.info.get("exif", b""))](pixels)


def largest_extent(data: bytes) -> tuple[int, int]:
    """Width and height of the largest image that an AVIF or HEIC file declares, including tiles and masks."""
    sizes, offset = [], 0
    while offset + 8 <= len(data):  # boxes of length, name and content
        length, name = int.from_bytes(data[offset : offset + 4]), data[offset + 4 : offset + 8]
        if length == 1:  # a 64-bit length follows
            length = int.from_bytes(data[offset + 8 : offset + 16])
        elif length == 0:  # up to the end of the file
            length = len(data) - offset
        if length < 8:
            break
        if name in (b"meta", b"moov"):
            extents = re.finditer(b"ispe....(.{8})", data[offset : offset + length], re.DOTALL)
            sizes += [struct.unpack(">II", extent[1]) for extent in extents]
        offset += length
    if not sizes:
        raise BadImage("damaged", "no image size in its header")
    return max(sizes, key=lambda size: size[0] * size[1])


def _heic(data: bytes, max_pixels: int) -> np.ndarray:
    """The primary image; libheif rotates it, so its EXIF orientation must not be applied again."""
    try:
        heif = import_module("pillow_heif")
    except ImportError:  # installed, but without its own dependencies
        raise BadImage("unsupported-format", not_read("HEIC", ())) from None
    heif.options.DECODE_THREADS = 1  # several images are decoded in parallel
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
    """Gray of more than 8 bits, which Pillow's convert turns white (integers) or black (floats)."""
    values, tags = np.asarray(image), image.tag_v2 if isinstance(image, TiffImageFile) else {}
    kind, twelve = "float" if image.mode == "F" else "int", tags.get(258) == (12,)
    top, least, most = 1 if kind == "float" else 4095 if twelve else 65535, values.min(), values.max()
    if not (least >= 0 and most <= top):  # also true for NaN
        raise BadImage(f"{kind}-out-of-range", f"values from {least} to {most}, not in 0..{top}")
    gray = np.rint(values * 255) if kind == "float" else values >> (4 if twelve else 8)
    gray = (255 - gray if tags.get(262) == 0 else gray).astype(np.uint8)  # 0: white is zero
    if "transparency" in image.info:
        gray[values == image.info["transparency"]] = BACKGROUND[0]
    return gray
