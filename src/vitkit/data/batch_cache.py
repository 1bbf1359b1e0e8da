"""Batches kept as they were made, for processes that ask for the same ones again: the runs of a study.

A batch is a pure function of source, view, order and places, so whoever finds it on the shelf has it as if
made. Nothing but time depends on it: what cannot be read is made again, what cannot be written is left out.
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
LEFT = 0.5  # of what was free before the first batch stays free
STAYS = "stays-free"  # a file beside the shelves: that many bytes
_folder: Path | None = None


def keep_batches(folder: Path | None) -> None:
    """From here on, this process and those that it forks keep their batches there; None: no longer."""
    global _folder
    _folder = folder


def batch_cache_for(source: Source, view: View, order: Order | None) -> "BatchCache | None":
    """The place of the batches that these make, if any are kept."""
    if _folder is None:
        return None
    told = hashlib.sha256(repr((source.name, source.classes, view, order)).encode())
    told.update("\n".join(source.keys).encode(errors="surrogateescape"))
    for part in blocks(source.labels):
        told.update(part)
    return BatchCache(_folder / told.hexdigest()[:32], view.size)


class BatchCache:
    """The images of batches, (B, 3, h, w), each a file of its own with a checksum, whole or not at all."""

    def __init__(self, folder: Path, size: tuple[int, int]):
        self.folder, self.shape = folder, (3, *size)

    def get(self, places: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray] | None:
        """Images, and their numbers in the source, (B,)."""
        try:
            held = np.fromfile(self.path(places), dtype=np.uint8)
        except OSError:
            return None
        count, pixels = len(places), len(places) * math.prod(self.shape)
        size = pixels + 8 * count
        if held.size != size + CHECKSUM or zlib.crc32(held[:size].data) != int(held[size:].view("<u4")[0]):
            return None
        return held[:pixels].reshape(count, *self.shape), held[pixels:size].view(np.int64)

    def put(self, places: Sequence[tuple[int, int]], images: np.ndarray, indices: np.ndarray) -> None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free - images.nbytes < stays(self.folder.parent, free):
                return
            with staged(self.path(places), durable=False) as beside, beside.open("wb") as file:
                images.tofile(file)
                indices.tofile(file)
                checksum = zlib.crc32(indices.tobytes(), zlib.crc32(np.ascontiguousarray(images).data))
                file.write(checksum.to_bytes(CHECKSUM, "little"))

    def path(self, places: Sequence[tuple[int, int]]) -> Path:
        """Named by the places, all of them: two runs may share a batch out otherwise."""
        return self.folder / hashlib.sha256(np.array(places, dtype=np.int64).data).hexdigest()[:32]


def stays(folder: Path, free: int) -> int:
    """How many bytes all processes leave free, now and later; told by the first of them to those that follow.

    free: measured before the look into the folder. So if nothing is told yet, nothing was kept when it was
    measured, and of several that come first at once it does not matter who tells last.
    """
    told = folder / STAYS
    try:
        return int(told.read_text())
    except (OSError, ValueError):
        with staged(told, durable=False) as beside:
            beside.write_text(str(int(LEFT * free)))
        return int(LEFT * free)
