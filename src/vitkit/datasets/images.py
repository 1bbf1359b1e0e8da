"""The images of any number of places as one sequence: files, globs, folders, archives, shards, addresses."""

import glob
import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import read
from vitkit.data.sources.source import Lazy, Source, from_rows
from vitkit.datasets.opening import check_place as check_data
from vitkit.datasets.opening import find_opener, is_data_file, open_all
from vitkit.errors import Error

MEMBERS = (
    ".zip",
    ".tar",
    ".npz",
)  # files that contain images; a table lists or contains them by its own names


@dataclass(frozen=True)
class Member:
    """The images of one split of one place."""

    source: Source
    split: str = ""  # empty: the data has no splits
    lead: str = ""  # what precedes a key in the name of an image

    def name(self, index: int) -> str:
        return self.lead + self.source.keys[index]

    def label(self, index: int) -> str | list[str] | None:
        """The class of an image, its classes for multi-label data, or None."""
        labels, classes = self.source.labels, self.source.classes
        if self.source.multilabel:
            return [classes[number] for number in labels.of(index).tolist()]
        return classes[labels[index]] if labels[index] >= 0 else None


@dataclass(frozen=True)
class Images:
    """Images of several places, one after the other; names are unique unless one table repeats them."""

    members: tuple[Member, ...]

    @cached_property
    def starts(self) -> list[int]:
        """The index of the first image of each member, and the number of all."""
        return np.cumsum([0, *(len(member.source) for member in self.members)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[Member, int]:
        number = bisect_right(self.starts, index) - 1
        return self.members[number], index - self.starts[number]

    def name(self, index: int) -> str:
        member, inner = self.locate(index)
        return member.name(inner)

    def fetch(self, index: int) -> bytes | np.ndarray:
        member, inner = self.locate(index)
        return member.source.fetch(inner)

    def labels(self, indices: Iterable[int]) -> list[Any]:
        return [member.label(inner) for member, inner in map(self.locate, indices)]

    def splits(self, indices: Iterable[int]) -> list[str | None]:
        return [self.locate(index)[0].split or None for index in indices]

    @property
    def has_labels(self) -> bool:
        return any(member.source.classes for member in self.members)

    @property
    def has_splits(self) -> bool:
        return any(member.split for member in self.members)

    @property
    def multilabel(self) -> bool:
        return any(member.source.multilabel for member in self.members)

    def source(self) -> Source:
        """All images for a data loader, which needs no labels."""
        keys = Lazy(len(self), self.name)
        return Source("images", (), keys, np.broadcast_to(np.int64(-1), len(self)), self.fetch)

    def digest(self) -> str:
        """SHA-256 of the names and, where an index has them, of the contents."""
        digest = hashlib.sha256()
        for member in self.members:
            digest.update(f"{member.split} {member.source.identity}\0".encode())
            for index in range(len(member.source)):
                digest.update(member.name(index).encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()


def open_images(places: Sequence[str]) -> Images:
    """All images of files, globs, folders, archives, tables, shards and addresses, each name once."""
    members = [member for place in places for member in members_of(place)]
    if len(places) > 1:
        seen: set[str] = set()
        members = [without(member, seen) for member in members]
    images = Images(tuple(member for member in members if len(member.source)))
    if not len(images):
        raise Error(f"no images found at {', '.join(map(repr, places))}", code="data.empty")
    return images


def check_place(place: str) -> None:
    """Reject a place without images, before anything is opened: a path or glob that matches nothing."""
    if glob.has_magic(place) and not os.path.lexists(place) and find_opener(place) is None:
        if not matches(place):
            raise Error(f"no files match {place!r}", code="data.not-found")
    elif not os.path.lexists(place):
        check_data(place)


def members_of(place: str) -> list[Member]:
    """The images of one place, by split."""
    if not (os.path.isdir(place) or is_data_file(place)):
        names = [place] if os.path.lexists(place) or not glob.has_magic(place) else matches(place)
        return [Member(from_rows("files", [(name, "") for name in names], read))]
    splits = open_all(place)
    return [
        Member(source, "" if split == "all" else split, lead_of(place, source.keys))
        for split, source in splits.items()
    ]


def matches(pattern: str) -> list[str]:
    return sorted(name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))


def lead_of(place: str, keys: Sequence[str]) -> str:
    """What turns a key into the name of an image: photos/ + cat/1.jpg, photos.zip! + cat/1.jpg."""
    place = re.sub(r"//[^/@]*@", "//", place)  # no password of an address
    suffix = os.path.splitext(place)[1].lower()
    if os.path.isdir(place) or suffix not in (*MEMBERS, ".csv", ".parquet"):
        return f"{place.rstrip('/')}/"
    if suffix in MEMBERS:
        return f"{place}!"
    folder = str(Path(place).parent) if "://" not in place else place.rpartition("/")[0]
    absolute = len(keys) > 0 and os.path.isabs(keys[0])
    return "" if absolute or folder == "." else f"{folder.rstrip('/')}/"


def without(member: Member, seen: set[str]) -> Member:
    """The images of a member whose names are not among those seen before."""
    fresh = []
    for index in range(len(member.source)):
        name = member.name(index)
        if name not in seen:
            seen.add(name)
            fresh.append(index)
    if len(fresh) == len(member.source):
        return member
    return Member(member.source.take(np.array(fresh, np.int64)), member.split, member.lead)
