"""Several labels an image, held sparse: the class numbers of all images, and where those of each end."""

# N images, C classes, B images of a batch, K labels of an image at most

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from vitkit.errors import Error

DENSE = 2**33  # bytes of a dense table, at most
ROWS = 2**26  # numbers of a dense table that are made at a time


class SparseLabels:
    """The labels of N images, each any number of C classes; a dense row of 0 and 1 is made when asked for.

    ends      (N,) int64: where the numbers of each image end; they begin where those of the one before end
    numbers   int32: the class numbers of all images, one image after the other, each image's in order
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
        """Of a table (N, C), which may be larger than memory where it is mapped."""
        lengths, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        step = max(1, ROWS // max(1, table.shape[1]))
        for at in range(0, len(table), step):
            rows, found = np.nonzero(table[at : at + step])
            lengths.append(np.bincount(rows, minlength=len(table[at : at + step])))
            numbers.append(found.astype(np.int32))
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
        """K: the labels of the image that has most of them, at least 1."""
        return int(np.diff(self.ends, prepend=0).max(initial=1))

    def __getitem__(self, key: Any) -> Any:
        """A dense row (C,) for a number; the labels of those images, sparse, for a slice or an array."""
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
        """Those of the images with these numbers, in this order."""
        rows = np.asarray(indices, dtype=np.int64)
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        lengths = self.ends[rows] - starts
        ends = np.cumsum(lengths)
        places = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
        return SparseLabels(ends, self.numbers[places], self.classes)

    def dense(self) -> np.ndarray:
        """(N, C) of 0 and 1: for the images of a batch, not for a data set."""
        if len(self) * self.classes * self.dtype.itemsize > DENSE:
            size = len(self) * self.classes * self.dtype.itemsize / 1e9
            raise Error(
                f"{len(self)} images of {self.classes} classes take {size:.4g} GB as a dense table; take the "
                "rows of a batch first",
                code="data.too-large",
            )
        table = np.zeros(self.shape, self.dtype)
        table[self.pairs()] = 1
        return table

    def padded(self, width: int) -> np.ndarray:
        """(N, width) int64: the class numbers of each image, then -1; what a batch holds until its loss."""
        table = np.full((len(self), width), -1, np.int64)
        lengths = np.diff(self.ends, prepend=0)
        places = np.arange(len(self.numbers)) - np.repeat(self.ends - lengths, lengths)
        table[np.repeat(np.arange(len(self)), lengths), places] = self.numbers
        return table

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(image, class) of every label."""
        return np.repeat(np.arange(len(self)), np.diff(self.ends, prepend=0)), self.numbers

    def counts(self) -> np.ndarray:
        """(C,): the images of each class."""
        return np.bincount(self.numbers, minlength=self.classes)

    def first(self) -> np.ndarray:
        """(N,): the lowest class number of each image; 0 where it has none."""
        starts = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)[: len(self)]
        found, some = np.zeros(len(self), np.int64), self.ends > starts
        found[some] = self.numbers[starts[some]]
        return found

    def renumbered(self, places: np.ndarray, classes: int) -> "SparseLabels":
        """With class i called places[i], of so many."""
        rows, _ = self.pairs()
        numbers = places[self.numbers].astype(np.int32)
        return SparseLabels(self.ends, numbers[np.lexsort((numbers, rows))], classes)

    def distinct(self) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The sets of classes that images have, and which of them each has: np.unique of the dense rows."""
        place: dict[tuple[int, ...], int] = {}
        which, start = np.empty(len(self), np.int64), 0
        for i, end in enumerate(self.ends.tolist()):
            which[i] = place.setdefault(tuple(self.numbers[start:end].tolist()), len(place))
            start = end
        kinds = sorted(place, key=lambda kind: [-number for number in kind])  # the order of dense rows
        order = np.empty(len(kinds), np.int64)
        order[[place[kind] for kind in kinds]] = np.arange(len(kinds))
        return kinds, order[which]

    def blocks(self) -> Iterator[bytes]:
        """What tells labels apart, by parts; as dense rows, which earlier versions held, if they are few."""
        if len(self) * self.classes * self.dtype.itemsize > DENSE:
            yield from (np.ascontiguousarray(part).tobytes() for part in (self.ends, self.numbers))
            return
        step = max(1, ROWS // max(1, self.classes))
        for at in range(0, len(self), step):
            yield self[at : at + step].dense().tobytes()

    def tolist(self) -> list[list[float]]:
        return self.dense().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.dense().astype(dtype or self.dtype, copy=False)


Labels = np.ndarray | SparseLabels  # (N,) of class numbers, or several for each image


def blocks(labels: Labels) -> Iterable[bytes | memoryview]:
    """What tells labels apart, for a hash."""
    return labels.blocks() if isinstance(labels, SparseLabels) else [np.ascontiguousarray(labels).data]


def joined(first: Labels, second: Labels) -> Labels:
    """Labels of some images and then of others, over the same classes."""
    if isinstance(first, SparseLabels) and isinstance(second, SparseLabels):
        return SparseLabels.join(first, second)
    return np.concatenate([first, second])
