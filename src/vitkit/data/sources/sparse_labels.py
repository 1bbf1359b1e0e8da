"""Multi-label targets in sparse form: the class numbers of all images, and the end offset of each image."""

# N images, C classes, B images of a batch, K labels of an image at most

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from vitkit.errors import Error

DENSE = 2**33  # the limit of a dense table in bytes
ROWS = 2**26  # numbers of a dense table that are computed at a time


class SparseLabels:
    """The labels of N images, any number of C classes each; multi-hot rows are computed on access.

    ends      (N,) int64: the end of each image's labels in `numbers`; they start where the previous end
    numbers   int32: the class numbers of all images, image by image, sorted within an image
    """

    ndim = 2
    dtype = np.dtype(np.float32)  # of dense rows

    def __init__(self, ends: np.ndarray, numbers: np.ndarray, classes: int):
        self.ends, self.numbers, self.classes = ends, numbers, classes

    @classmethod
    def from_lists(cls, lists: Iterable[Iterable[int]], classes: int) -> "SparseLabels":
        rows = [sorted(set(row)) for row in lists]
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        numbers = np.fromiter((n for row in rows for n in row), np.int32, int(ends[-1]) if len(ends) else 0)
        return cls(ends, numbers, classes)

    @classmethod
    def from_dense(cls, table: np.ndarray) -> "SparseLabels":
        """From a multi-hot table (N, C), in chunks, since a memory-mapped one may be larger than memory."""
        lengths, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        step = max(1, ROWS // max(1, table.shape[1]))
        for start in range(0, len(table), step):
            chunk = table[start : start + step]
            rows, columns = np.nonzero(chunk)
            lengths.append(np.bincount(rows, minlength=len(chunk)))
            numbers.append(columns.astype(np.int32))
        return cls(np.cumsum(np.concatenate(lengths)), np.concatenate(numbers), table.shape[1])

    @classmethod
    def join(cls, first: "SparseLabels", second: "SparseLabels") -> "SparseLabels":
        ends = np.concatenate([first.ends, second.ends + len(first.numbers)])
        return cls(ends, np.concatenate([first.numbers, second.numbers]), first.classes)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.ends), self.classes

    @cached_property
    def most(self) -> int:
        """K: the largest number of labels of an image, at least 1."""
        return int(np.diff(self.ends, prepend=0).max(initial=1))

    def __getitem__(self, key: Any) -> Any:
        """A multi-hot row (C,) for an int; SparseLabels for a slice or an array."""
        if isinstance(key, int | np.integer):
            row = np.zeros(self.classes, self.dtype)
            row[self.of(int(key))] = 1
            return row
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        key = np.asarray(key)
        return self.take(np.flatnonzero(key) if key.dtype == bool else key)

    def of(self, index: int) -> np.ndarray:
        """The class numbers of one image."""
        index = range(len(self))[index]
        return self.numbers[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    def take(self, indices: np.ndarray) -> "SparseLabels":
        """The labels of the images with these indices, in this order."""
        rows = np.asarray(indices, dtype=np.int64)
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        lengths = self.ends[rows] - starts
        ends = np.cumsum(lengths)
        positions = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
        return SparseLabels(ends, self.numbers[positions], self.classes)

    def dense(self) -> np.ndarray:
        """A multi-hot table (N, C); meant for the images of a batch, not for a whole data set."""
        if len(self) * self.classes * self.dtype.itemsize > DENSE:
            size = len(self) * self.classes * self.dtype.itemsize / 1e9
            raise Error(
                f"{len(self)} images of {self.classes} classes need {size:.4g} GB as a dense table; select "
                "the rows of a batch first",
                code="data.too-large",
            )
        table = np.zeros(self.shape, self.dtype)
        table[self.pairs()] = 1
        return table

    def padded(self, width: int) -> np.ndarray:
        """(N, width) int64: the class numbers of each image, padded with -1; the labels of a batch."""
        table = np.full((len(self), width), -1, np.int64)
        lengths = np.diff(self.ends, prepend=0)
        columns = np.arange(len(self.numbers)) - np.repeat(self.ends - lengths, lengths)
        table[np.repeat(np.arange(len(self)), lengths), columns] = self.numbers
        return table

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The image and the class of every label."""
        return np.repeat(np.arange(len(self)), np.diff(self.ends, prepend=0)), self.numbers

    def counts(self) -> np.ndarray:
        """(C,): the number of images of each class."""
        return np.bincount(self.numbers, minlength=self.classes)

    def first(self) -> np.ndarray:
        """(N,): the lowest class number of each image; 0 for an image without labels."""
        starts = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)[: len(self)]
        lowest, labelled = np.zeros(len(self), np.int64), self.ends > starts
        lowest[labelled] = self.numbers[starts[labelled]]
        return lowest

    def renumbered(self, new_numbers: np.ndarray, classes: int) -> "SparseLabels":
        """The same labels with class i renumbered to new_numbers[i], out of `classes`."""
        rows, _ = self.pairs()
        numbers = new_numbers[self.numbers].astype(np.int32)
        return SparseLabels(self.ends, numbers[np.lexsort((numbers, rows))], classes)

    def distinct(self) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The distinct label sets, and the set of each image; like np.unique(dense rows, return_inverse)."""
        ids: dict[tuple[int, ...], int] = {}
        inverse, start = np.empty(len(self), np.int64), 0
        for i, end in enumerate(self.ends.tolist()):
            inverse[i] = ids.setdefault(tuple(self.numbers[start:end].tolist()), len(ids))
            start = end
        label_sets = sorted(ids, key=lambda labels: [-number for number in labels])  # as dense rows sort
        order = np.empty(len(label_sets), np.int64)
        order[[ids[labels] for labels in label_sets]] = np.arange(len(label_sets))
        return label_sets, order[inverse]

    def blocks(self) -> Iterator[bytes]:
        """The bytes to hash, in chunks; dense rows if they are few, as in earlier versions of vitkit."""
        if len(self) * self.classes * self.dtype.itemsize > DENSE:
            yield from (np.ascontiguousarray(part).tobytes() for part in (self.ends, self.numbers))
            return
        step = max(1, ROWS // max(1, self.classes))
        for start in range(0, len(self), step):
            yield self[start : start + step].dense().tobytes()

    def tolist(self) -> list[list[float]]:
        return self.dense().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.dense().astype(dtype or self.dtype, copy=False)


Labels = np.ndarray | SparseLabels  # (N,) class numbers, or several per image


def blocks(labels: Labels) -> Iterable[bytes | memoryview]:
    """The bytes of labels, for a hash."""
    return labels.blocks() if isinstance(labels, SparseLabels) else [np.ascontiguousarray(labels).data]


def joined(first: Labels, second: Labels) -> Labels:
    """The concatenation of two sets of labels over the same classes."""
    if isinstance(first, SparseLabels) and isinstance(second, SparseLabels):
        return SparseLabels.join(first, second)
    return np.concatenate([first, second])
