"""The files of a data set with masks or boxes, in a folder or an archive: names, splits, images, texts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.data.content import Files
from vitkit.data.decode import BadImage
from vitkit.data.names import SPLITS, SUFFIXES, check_aliases
from vitkit.data.sources.archives import Positioned
from vitkit.data.sources.source import Source, call_item, walk
from vitkit.data.targets import Targets
from vitkit.errors import Error

MOST_TEXT = 2**30  # bytes of one annotation file
SPLIT = re.compile(rf"({'|'.join(sorted(SPLITS, key=len, reverse=True))})(20\d\d)?", re.IGNORECASE)


class Note(NamedTuple):
    """What `vitkit doctor` reports of the annotations of a split: a kind of finding, and names."""

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Tree:
    """Files by their names relative to a root, which is left out of them."""

    place: str
    names: Sequence[str]
    read: Callable[[str], bytes]  # the content of an image; raises BadImage
    size: Callable[[str], int]
    digest: Callable[[str], bytes] | None = None
    read_all: Callable[[str], bytes] | None = None  # the same without the size limit of images

    @cached_property
    def files(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def images(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.lower().endswith(SUFFIXES))

    def bytes_of(self, name: str, most: int = MOST_TEXT) -> bytes:
        """The content of an annotation file."""
        if self.size(name) > most:
            raise Error(
                f"{self.place}, {name}: {self.size(name):,} bytes; an annotation file of this kind may have "
                f"{most:,}: split it, or write shorter numbers",
                code="data.too-large",
            )
        try:
            return (self.read_all or self.read)(name)
        except BadImage as error:
            raise Error(
                f"{self.place}, {name}: {error}; make it readable, or unpack the archive", code="data.corrupt"
            ) from None

    def text(self, name: str, most: int = 16 * 2**20) -> str:
        """The content of a text file: UTF-8, with or without a byte order mark."""
        try:
            return self.bytes_of(name, most).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Error(
                f"{self.place}, {name}: not UTF-8 text at byte {error.start}; save it as UTF-8",
                code="data.labels",
            ) from None

    def source(self, keys: Sequence[str], classes: Sequence[str], targets: Targets) -> Source:
        """The images with these names, with their annotations."""
        digest = partial(call_item, self.digest, keys) if self.digest else None
        name = Path(self.place).name or self.place
        return Source(
            name, tuple(classes), list(keys), np.zeros(len(keys), np.int64),
            partial(call_item, self.read, keys), digest=digest,
            size=partial(call_item, self.size, keys), targets=targets,
        )  # fmt: skip


def read_whole(folder: Path, name: str) -> bytes:
    """The bytes of a regular file below a folder."""
    with Positioned(folder / name) as file:
        return file.read_at(0, file.size)


def below(call: Callable[[str], Any], prefix: str, name: str) -> Any:
    """Call a function with the name that a file has above the root."""
    return call(prefix + name)


def tree_of_folder(folder: Path) -> Tree:
    """All files below a folder; folders that contain nothing but one folder are left out of their names."""
    files = Files(folder)
    names = sorted(walk(folder))
    return rooted(Tree(str(folder), names, files.read, files.size, files.digest, partial(read_whole, folder)))


def rooted(tree: Tree) -> Tree:
    """The same files without the folders that contain everything and are no part of a layout."""
    prefix = common_root(tree.names)
    if not prefix:
        return tree
    digest = partial(below, tree.digest, prefix) if tree.digest else None
    whole = partial(below, tree.read_all, prefix) if tree.read_all else None
    return Tree(
        tree.place, [name.removeprefix(prefix) for name in tree.names], partial(below, tree.read, prefix),
        partial(below, tree.size, prefix), digest, whole,
    )  # fmt: skip


def common_root(names: Sequence[str]) -> str:
    """The folders above everything, such as "camvid/"; not one that is named like a split or like images."""
    prefix = ""
    while names:
        tops = {name.removeprefix(prefix).partition("/")[0] for name in names}
        top = next(iter(tops))
        inside = all(name.removeprefix(prefix).count("/") for name in names)
        if len(tops) > 1 or not inside or SPLIT.fullmatch(top) or top.lower() in ("images", "jpegimages"):
            break
        prefix += f"{top}/"
    return prefix


def split_in(name: str) -> str:
    """The split that a folder of this path names; "all" if none does."""
    for part in name.split("/")[:-1]:
        if match := SPLIT.fullmatch(part):
            return SPLITS[match[1].lower()]
    return "all"


def split_names(place: str, names: Iterable[str]) -> None:
    """Reject data with two names for one split, such as val and valid."""
    parts = {part for name in names for part in name.split("/")[:-1]}
    check_aliases(place, {match[1] for part in parts if (match := SPLIT.fullmatch(part))})


def basenames(names: Iterable[str]) -> dict[str, list[str]]:
    """The paths of the files of each name."""
    paths: dict[str, list[str]] = {}
    for name in names:
        paths.setdefault(name.rpartition("/")[2], []).append(name)
    return paths


def path_parts(text: str) -> list[str]:
    """The parts of a path as written in an annotation file, without drives, dots and steps upwards."""
    parts = text.strip().replace("\\", "/").split("/")
    return [part for part in parts if part not in ("", ".", "..") and not re.fullmatch("[A-Za-z]:", part)]


def locate(written: str, paths: Mapping[str, Sequence[str]], near: str, split: str) -> str:
    """The image that a path in an annotation file means, "" if none: only listed files can be the answer.

    Among files of that name, those of the split, then those in the folder `near`, then the one that shares
    most of the written path; what remains unclear is an error.
    """
    parts = path_parts(written)
    candidates = list(paths.get(parts[-1], ())) if parts else []
    if split != "all":
        candidates = [name for name in candidates if split_in(name) in (split, "all")]
    for narrower in (
        [name for name in candidates if split_in(name) == split],
        [name for name in candidates if near and name.startswith(near)],
    ):
        candidates = narrower or candidates
    if len(candidates) > 1:
        shared = [common_tail(parts, name.split("/")) for name in candidates]
        candidates = [name for name, n in zip(candidates, shared, strict=True) if n == max(shared)]
    if len(candidates) > 1:
        raise Error(
            f"{written!r} may be {candidates[0]} or {candidates[1]}; write the folder into the file name, or "
            "rename one of them",
            code="data.labels",
        )
    return candidates[0] if candidates else ""


def common_tail(a: Sequence[str], b: Sequence[str]) -> int:
    """How many parts at the end of two paths are equal."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
