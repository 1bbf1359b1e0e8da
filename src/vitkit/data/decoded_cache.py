"""Images decoded once: a file of pixels that training reads instead of JPEGs, made by worker processes.

The file holds the pixels of all images, one after the other, then a row for each image with their checksum,
then a seal: the SHA-256 of the rows and of the pixels' length. It is named by what the source holds and what
decodes it. In each run the pixels of an image are compared with their checksum when they are first read.
"""

import errno
import hashlib
import mmap
import os
import shutil
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
from vitkit.data.loader import BadFiles, Made, Place, Samples, stream
from vitkit.data.sources.source import Source
from vitkit.data.splits import fingerprints
from vitkit.data.views import View
from vitkit.errors import Error
from vitkit.io.files import locked, replaced

VERSION = 2  # 1 had no checksums, and a name that the middle of a large file did not change
ROW: Any = np.dtype(  # height 0: no pixels are kept; crc: the CRC-32 of the pixels
    [("start", "<u8"), ("height", "<u4"), ("width", "<u4"), ("crc", "<u4")]
)
SEAL, PART = 32, 32  # bytes; images that a thread or a worker has in hand
OFTEN = 60.0  # seconds between two words on how far it is
LONG = timedelta(days=1)  # that the others wait while one process decodes
Tell = Callable[[str], None]
Once = Callable[..., Path]


def decoded(
    source: Source, folder: Path, workers: int, log: Tell = lambda text: None, once: Once | None = None
) -> Source:
    """The same source with pixels out of a file in the folder, which is made where it is not there.

    An image that cannot be decoded has none there: it is fetched, and fails, as before. A source of pixels
    is returned as it is. once: how one of several processes makes the file for all.
    """
    if not is_encoded(source):
        return source
    make = partial(kept, source, folder, workers, log)
    path = once(make, timeout=LONG) if once else make()
    found = opened(path, len(source)) or opened(make(), len(source))  # on a disk of this machine alone
    if found is None:
        why = f"{path}: gone or damaged as soon as it was made; give another folder"
        raise Error(why, code="file.unreadable")
    mapped, rows = found
    checked = mmap.mmap(-1, max(1, len(source)))  # 1 for an image whose pixels are right; workers share it

    def fetch(number: int) -> bytes | np.ndarray:
        start, height, width, crc = rows[number].item()
        if not height:
            return source.fetch(number)
        size, before = 3 * height * width, start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, start - before, before + size)  # one read, not one for each page
        pixels = np.frombuffer(mapped, np.uint8, size, start)
        if not checked[number]:
            if zlib.crc32(pixels.data) != crc:
                return repaired(source, number, path, start, crc)
            checked[number] = 1
        return pixels.reshape(height, width, 3)

    return replace(
        source, fetch=fetch, digest=source.digest or (lambda number: content_hash(source.fetch(number)))
    )


def repaired(source: Source, number: int, path: Path, start: int, crc: int) -> np.ndarray:
    """The pixels of an image, decoded again and written to where the damaged ones are."""
    pixels = decode(cast(bytes, source.fetch(number)))
    if zlib.crc32(pixels.data) == crc:
        with suppress(OSError), path.open("r+b") as file:
            os.pwrite(file.fileno(), pixels.data, start)
    text = f"{path}: damaged pixels of {source.keys[number]!r}; the image was decoded again\n"
    os.write(2, text.encode(errors="backslashreplace"))  # this may be a worker, which has no other way
    return pixels


def is_encoded(source: Source) -> bool:
    """Whether there are image files to decode, by the first that can be read."""
    for number in range(len(source)):
        with suppress(BadImage):
            return isinstance(source.fetch(number), bytes)
    return False


def kept(source: Source, folder: Path, workers: int, log: Tell) -> Path:
    """The file of the source's pixels; one process at a time makes it, and others find it done."""
    folder.mkdir(parents=True, exist_ok=True)
    marks = fingerprints(source)
    path = folder / f"{name_of(source, marks, VERSION)}.pixels"
    if opened(path, len(source)) is None:
        older = folder / f"{name_of(source, marks.astype('S16'), 1)}.pixels"
        if older.exists():
            log(f"{older}: made by an older vitkit, without checksums; it is not used, and can be removed")
        with locked(folder):
            for left in folder.glob(".*.pixels.partial"):  # by processes that died: no other is here
                left.unlink()
            if opened(path, len(source)) is None:
                fill(source, path, workers, log)
    return path


def name_of(source: Source, marks: np.ndarray, version: int) -> str:
    """A digest of all that decides the pixels: names, contents, their order, and the decoder."""
    by_what = f"{version} {PIL.__version__} {getattr(decoder.simplejpeg, '__version__', None)}"
    digest = hashlib.blake2b(by_what.encode(), digest_size=16)
    for key in source.keys:
        digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    digest.update(marks.tobytes())
    return digest.hexdigest()


def opened(path: Path, count: int) -> tuple[mmap.mmap, np.ndarray] | None:
    """The mapped file and its rows; None where it is not there, cut or damaged."""
    with suppress(OSError, ValueError), path.open("rb") as file:  # ValueError: too short, or empty
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = len(mapped) - SEAL - count * ROW.itemsize
        rows = np.frombuffer(mapped, ROW, count, length)
        if mapped[-SEAL:] == seal(rows, length):
            return mapped, rows
    return None


def seal(rows: np.ndarray, length: int) -> bytes:
    return hashlib.sha256(rows.tobytes() + length.to_bytes(8)).digest()


def fill(source: Source, path: Path, workers: int, log: Tell) -> None:
    """Decode all images into a file that has its name only when it is whole and on the disk."""
    sizes, rows = sizes_of(source, workers), np.zeros(len(source), ROW)
    rows["start"], length = np.cumsum(sizes) - sizes, int(sizes.sum())
    needed, free = length + rows.nbytes + SEAL, shutil.disk_usage(path.parent).free
    if needed > free:
        why = f"the decoded images need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
        remedy = "give --decoded a folder on a larger disk, or leave it out"
        raise Error(f"{path.parent}: {why}; {remedy}", code="disk.full")
    log(f"decoding {len(source)} images, {length / 1e9:.3g} GB, into {path}")
    due = time.monotonic() + OFTEN
    with replaced(path) as file:
        filling = Filling(source=source, file=file.fileno(), starts=rows["start"], sizes=sizes)
        groups = ([(0, number) for number in part] for part in parts(len(source)))
        for made in stream(filling, groups, workers, BadFiles(1.0)):
            if "errno" in made:
                raise OSError(code := int(made["errno"]), os.strerror(code), str(path))
            numbers = made["index"].numpy()
            rows["height"][numbers], rows["width"][numbers], rows["crc"][numbers] = made["row"].numpy().T
            if time.monotonic() > due:
                due = time.monotonic() + OFTEN
                log(f"decoded {numbers[-1] + 1} of {len(source)} images")
        file.seek(length)
        file.write(rows.tobytes() + seal(rows, length))


def parts(count: int) -> Iterator[range]:
    return (range(count)[at : at + PART] for at in range(0, count, PART))


def sizes_of(source: Source, workers: int) -> np.ndarray:
    """The bytes that the pixels of each image will take, (N,)."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        found = pool.map(lambda part: [size_of(source, number) for number in part], parts(len(source)))
        return np.array([size for sizes in found for size in sizes], np.int64)


def size_of(source: Source, number: int) -> int:
    """The bytes of an image's pixels, by its header; 0 where that promises none."""
    try:
        content = cast(bytes, source.fetch(number))
        if decoder._kind(content, decoder.FORMATS) == "HEIC":  # its size follows from more than a header
            return decode(content).nbytes
        pixels = pixels_by_header(content)
    except Exception:  # decoders raise nearly every kind there is, and will again
        return 0
    return 3 * pixels if pixels <= decoder.MAX_PIXELS else 0


@dataclass(frozen=True, kw_only=True)
class Filling(Samples):
    """Groups of images that are decoded and written to their places in a file, here or in a worker."""

    view: View = View(size=(1, 1), crop="squash")  # none is taken: all pixels are kept
    file: int
    starts: np.ndarray
    sizes: np.ndarray

    def __getitems__(self, places: list[Place]) -> Made:
        """The row of each image, zeros where no pixels are kept; or why they could not be written."""
        numbers = [number for _, number in places]
        rows = torch.zeros((len(numbers), 3), dtype=torch.int64)
        for row, number in enumerate(numbers):
            with suppress(BadImage):
                pixels = decode(cast(bytes, self.source.fetch(number)))
                if pixels.nbytes == self.sizes[number]:  # as its header promised
                    if failed := write(self.file, pixels, int(self.starts[number])):
                        return {"errno": torch.tensor(failed)}, []
                    rows[row] = torch.tensor([*pixels.shape[:2], zlib.crc32(pixels.data)])
        return {"index": torch.tensor(numbers), "row": rows}, []


def write(file: int, pixels: np.ndarray, start: int) -> int:
    """0, or the number of what went wrong: as an error it would come out of a worker with a traceback."""
    try:
        return 0 if os.pwrite(file, pixels.data, start) == pixels.nbytes else errno.ENOSPC
    except OSError as error:
        return error.errno or errno.EIO
