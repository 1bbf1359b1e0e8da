"""A disk cache of decoded images, from which training reads pixels instead of JPEGs.

The file has the pixels of all images, one after the other, then a row for each image with a checksum, then
the SHA-256 of the rows and of the length of the pixels. Its name is a digest of the source's content and of
the decoder. In each run, the pixels of an image are checked when they are first read.
"""

import errno
import hashlib
import mmap
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL
import torch

from vitkit.data import decode as decoder
from vitkit.data.content import content_hash
from vitkit.data.decode import BadImage, decode, pixels_by_header
from vitkit.data.loader import BadFiles, Place, Result, Samples, stream
from vitkit.data.sources.source import Source
from vitkit.data.splits import fingerprints
from vitkit.data.views import View
from vitkit.errors import Error
from vitkit.io.files import locked, replaced
from vitkit.io.system import UPDATE, pwrite

VERSION = 2  # 1 had no checksums, and its name did not depend on the middle of large files
ROW: Any = np.dtype(  # height 0: no pixels are stored; crc: the CRC-32 of the pixels
    [("start", "<u8"), ("height", "<u4"), ("width", "<u4"), ("crc", "<u4")]
)
CHECKSUM, PART = 32, 32  # bytes; images that a thread or worker processes at a time
LOG_INTERVAL = 60.0  # seconds between progress messages
MAX_WAIT = timedelta(days=1)  # of the other processes while one decodes
Log = Callable[[str], None]
Once = Callable[..., Path]


def decoded(
    source: Source, folder: Path, workers: int, log: Log = lambda text: None, once: Once | None = None
) -> Source:
    """The same source with pixels from a cache file in the folder, which is written if it does not exist.

    An image that cannot be decoded is not in the file: it is fetched from the source, and fails there. A
    source of pixels is returned unchanged. once: runs a function in one of several processes for all.
    """
    if not is_encoded(source):
        return source
    make = partial(ensure_file, source, folder, workers, log)
    path = once(make, timeout=MAX_WAIT) if once else make()
    # the second attempt is for a process on another machine, whose disk does not have the file
    opened = open_file(path, len(source)) or open_file(make(), len(source))
    if opened is None:
        raise Error(
            f"{path}: missing or damaged right after it was written; use another folder",
            code="file.unreadable",
        )
    return replace(
        source, fetch=DecodedPixels(source, path, *opened), digest=source.digest or partial(hash_of, source)
    )


def hash_of(source: Source, number: int) -> bytes:
    return content_hash(source.fetch(number))


class DecodedPixels:
    """The images of a cache file."""

    def __init__(self, source: Source, path: Path, mapped: mmap.mmap, rows: np.ndarray):
        self.source, self.path, self.mapped, self.rows = source, path, mapped, rows
        self.checked = mmap.mmap(-1, max(1, len(source)))  # 1: its CRC was checked; shared by forked workers

    def __reduce__(self) -> tuple[Any, ...]:
        return open_pixels, (self.source, self.path)

    def __call__(self, number: int) -> bytes | np.ndarray:
        start, height, width, crc = self.rows[number].item()
        if not height:
            return self.source.fetch(number)
        size = 3 * height * width
        if sys.platform != "win32":  # one read instead of one per page
            before = start % mmap.PAGESIZE
            self.mapped.madvise(mmap.MADV_WILLNEED, start - before, before + size)
        pixels = np.frombuffer(self.mapped, np.uint8, size, start)
        if not self.checked[number]:
            if zlib.crc32(pixels.data) != crc:
                return repair(self.source, number, self.path, start, crc)
            self.checked[number] = 1
        return pixels.reshape(height, width, 3)


def open_pixels(source: Source, path: Path) -> DecodedPixels:
    """The images of a cache file, in a worker process."""
    opened = open_file(path, len(source))
    if opened is None:
        raise Error(f"{path}: missing or damaged; use another folder", code="file.unreadable")
    return DecodedPixels(source, path, *opened)


def repair(source: Source, number: int, path: Path, start: int, crc: int) -> np.ndarray:
    """Decode an image again and overwrite its damaged pixels in the file."""
    pixels = decode(cast(bytes, source.fetch(number)))
    if zlib.crc32(pixels.data) == crc:
        with suppress(OSError), path.open("r+b") as file:
            pwrite(file.fileno(), pixels.data, start)
    text = f"{path}: damaged pixels of {source.keys[number]!r}; the image was decoded again\n"
    os.write(2, text.encode(errors="backslashreplace"))  # a worker process has no logger
    return pixels


def is_encoded(source: Source) -> bool:
    """Whether the source yields encoded images, judging by the first readable one."""
    for number in range(len(source)):
        with suppress(BadImage):
            return isinstance(source.fetch(number), bytes)
    return False


def ensure_file(source: Source, folder: Path, workers: int, log: Log) -> Path:
    """The cache file of a source, written by one process at a time if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    hashes = fingerprints(source)
    path = folder / f"{name_of(source, hashes, VERSION)}.pixels"
    if open_file(path, len(source)) is None:
        older = folder / f"{name_of(source, hashes.astype('S16'), 1)}.pixels"
        if older.exists():
            log(f"{older}: written by an older vitkit without checksums; it is not used and can be removed")
        with locked(folder):
            for partial_file in folder.glob(".*.pixels.partial"):  # of dead processes, as we have the lock
                partial_file.unlink()
            if open_file(path, len(source)) is None:
                fill(source, path, workers, log)
    return path


def name_of(source: Source, hashes: np.ndarray, version: int) -> str:
    """A digest of all that determines the pixels: names, contents, their order, and the decoder."""
    versions = f"{version} {PIL.__version__} {getattr(decoder.simplejpeg, '__version__', None)}"
    digest = hashlib.blake2b(versions.encode(), digest_size=16)
    for key in source.keys:
        digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    digest.update(hashes.tobytes())
    return digest.hexdigest()


def open_file(path: Path, count: int) -> tuple[mmap.mmap, np.ndarray] | None:
    """The mapped file and its rows; None if it is missing, truncated or damaged."""
    with suppress(OSError, ValueError), path.open("rb") as file:  # ValueError: too short, or empty
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = len(mapped) - CHECKSUM - count * ROW.itemsize
        rows = np.frombuffer(mapped, ROW, count, length)
        if mapped[-CHECKSUM:] == checksum(rows, length):
            return mapped, rows
    return None


def checksum(rows: np.ndarray, length: int) -> bytes:
    return hashlib.sha256(rows.tobytes() + length.to_bytes(8)).digest()


def fill(source: Source, path: Path, workers: int, log: Log) -> None:
    """Decode all images into a file, which appears under its name only when it is complete."""
    sizes, rows = sizes_of(source, workers), np.zeros(len(source), ROW)
    rows["start"], length = np.cumsum(sizes) - sizes, int(sizes.sum())
    needed, free = length + rows.nbytes + CHECKSUM, shutil.disk_usage(path.parent).free
    if needed > free:
        raise Error(
            f"{path.parent}: decoded images need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free; "
            "set --decoded to a folder on a larger disk, or omit it",
            code="disk.full",
        )
    log(f"decoding {len(source)} images, {length / 1e9:.3g} GB, into {path}")
    due = time.monotonic() + LOG_INTERVAL
    with replaced(path) as file:
        filling = Filling(
            source=source, file=Target(Path(file.name), file.fileno()), starts=rows["start"], sizes=sizes
        )
        groups = ([(0, number) for number in part] for part in parts(len(source)))
        for batch in stream(filling, groups, workers, BadFiles(1.0)):
            if "errno" in batch:
                raise OSError(code := int(batch["errno"]), os.strerror(code), str(path))
            numbers = batch["index"].numpy()
            rows["height"][numbers], rows["width"][numbers], rows["crc"][numbers] = batch["row"].numpy().T
            if time.monotonic() > due:
                due = time.monotonic() + LOG_INTERVAL
                log(f"decoded {numbers[-1] + 1} of {len(source)} images")
        file.seek(length)
        file.write(rows.tobytes() + checksum(rows, length))


def parts(count: int) -> Iterator[range]:
    return (range(count)[start : start + PART] for start in range(0, count, PART))


def sizes_of(source: Source, workers: int) -> np.ndarray:
    """The size of the pixels of each image in bytes, (N,)."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        sizes = pool.map(lambda part: [size_of(source, number) for number in part], parts(len(source)))
        return np.array([size for group in sizes for size in group], np.int64)


def size_of(source: Source, number: int) -> int:
    """The size of an image's pixels in bytes, from its header; 0 if the header does not say."""
    try:
        content = cast(bytes, source.fetch(number))
        if decoder._kind(content, decoder.FORMATS) == "HEIC":  # rotation and cropping change its size
            return decode(content).nbytes
        pixels = pixels_by_header(content)
    except Exception:  # decoders raise almost any type, and decoding will report it
        return 0
    return 3 * pixels if pixels <= decoder.MAX_PIXELS else 0


@dataclass(frozen=True)
class Target:
    """The file to fill, which a worker that was not forked opens again."""

    path: Path
    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return open_target, (self.path,)


def open_target(path: Path) -> Target:
    return Target(path, os.open(path, UPDATE))  # until the worker ends


@dataclass(frozen=True, kw_only=True)
class Filling(Samples):
    """A dataset whose items are groups of images, decoded and written into the file by a worker."""

    view: View = View(size=(1, 1), crop="squash")  # not used: all pixels are stored
    file: Target
    starts: np.ndarray
    sizes: np.ndarray

    def __getitems__(self, places: list[Place]) -> Result:
        """The row of each image, zeros if no pixels are stored; or the errno of a failed write."""
        numbers = [number for _, number in places]
        rows = torch.zeros((len(numbers), 3), dtype=torch.int64)
        for row, number in enumerate(numbers):
            with suppress(BadImage):
                pixels = decode(cast(bytes, self.source.fetch(number)))
                if pixels.nbytes == self.sizes[number]:  # as its header says
                    if failed := write(self.file.number, pixels, int(self.starts[number])):
                        return {"errno": torch.tensor(failed)}, []
                    rows[row] = torch.tensor([*pixels.shape[:2], zlib.crc32(pixels.data)])
        return {"index": torch.tensor(numbers), "row": rows}, []


def write(file: int, pixels: np.ndarray, start: int) -> int:
    """Write pixels; returns 0 or an errno, since an exception would leave the worker with a traceback."""
    try:
        return 0 if pwrite(file, pixels.data, start) == pixels.nbytes else errno.ENOSPC
    except OSError as error:
        return error.errno or errno.EIO
