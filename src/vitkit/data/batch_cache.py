"""A disk cache of finished batches, shared by processes that need the same ones: the runs of a study.

A batch is a pure function of source, view, order and positions, so a cached batch equals a fresh one. The
cache only saves time: an unreadable entry is computed again, and one that cannot be written is skipped.
"""

import hashlib
import math
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.sources.sparse_labels import blocks
from vitkit.data.views import View
from vitkit.io.files import staged

CHECKSUM = 4  # bytes of a CRC-32
RESERVED = 0.5  # the share of the initially free disk space that stays free
RESERVED_FILE = "stays-free"  # stores the reserved bytes, beside the cache folders
_folder: Path | None = None


def keep_batches(folder: Path | None) -> None:
    """Cache the batches of this process and of those that it forks in a folder; None turns it off."""
    global _folder
    _folder = folder


def batch_cache_for(source: Source, view: View, order: Order | None) -> "BatchCache | None":
    """The cache of the batches of this source, view and order, if batches are cached."""
    if _folder is None:
        return None
    key = hashlib.sha256(repr((source.name, source.classes, view, order)).encode())
    key.update("\n".join(source.keys).encode(errors="surrogateescape"))
    for part in blocks(source.labels):
        key.update(part)
    return BatchCache(_folder / key.hexdigest()[:32], view.size)


class BatchCache:
    """The images of batches, (B, 3, h, w), in one file per batch with a checksum, written atomically."""

    def __init__(self, folder: Path, size: tuple[int, int]):
        self.folder, self.shape = folder, (3, *size)

    def get(self, places: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray] | None:
        """Images, and their indices in the source, (B,)."""
        try:
            content = np.fromfile(self.path(places), dtype=np.uint8)
        except OSError:
            return None
        count, pixels = len(places), len(places) * math.prod(self.shape)
        size = pixels + 8 * count
        if content.size != size + CHECKSUM:
            return None
        if zlib.crc32(content[:size].data) != int(content[size:].view("<u4")[0]):
            return None
        return content[:pixels].reshape(count, *self.shape), content[pixels:size].view(np.int64)

    def put(self, places: Sequence[tuple[int, int]], images: np.ndarray, indices: np.ndarray) -> None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free - images.nbytes < reserved_space(self.folder.parent, free):
                return
            with staged(self.path(places), durable=False) as partial, partial.open("wb") as file:
                images.tofile(file)
                indices.tofile(file)
                checksum = zlib.crc32(indices.tobytes(), zlib.crc32(np.ascontiguousarray(images).data))
                file.write(checksum.to_bytes(CHECKSUM, "little"))

    def path(self, places: Sequence[tuple[int, int]]) -> Path:
        """The file of a batch, named by all its positions, since runs may divide a batch differently."""
        return self.folder / hashlib.sha256(np.array(places, dtype=np.int64).data).hexdigest()[:32]


def reserved_space(folder: Path, free: int) -> int:
    """The bytes of disk space that all processes leave free; the first process writes it to a file.

    free: measured before this call. If the file does not exist, nothing was cached when it was measured, so
    it does not matter which of several concurrent first processes writes last.
    """
    path = folder / RESERVED_FILE
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        with staged(path, durable=False) as partial:
            partial.write_text(str(int(RESERVED * free)), encoding="utf-8")
        return int(RESERVED * free)
