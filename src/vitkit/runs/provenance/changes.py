"""How two states of a data set differ, in words: classes, images, splits, order, sizes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

SHOWN = 3  # examples of each kind of change
CLASSES = 6  # classes whose changed images are counted one by one
SHARE = 0.5  # of the file names of a class; two classes that share more of them are one, renamed


class Image(NamedTuple):
    """An image of a data set, by its name, its split and its class (or classes, joined)."""

    key: str
    split: str
    label: str
    mark: str = ""  # of its content, where that is known

    @property
    def file(self) -> str:
        return self.key.rpartition("/")[2]


@dataclass(frozen=True)
class Listing:
    """A data set as far as it is remembered; of very many images only their numbers are."""

    classes: Sequence[str]
    counts: Mapping[str, Mapping[str, int]]  # split -> class -> images
    keys: Mapping[str, tuple[Sequence[str], Sequence[str]]] | None = None  # split -> names, labels
    sizes: Mapping[str, Sequence[int]] | None = None  # split -> bytes of some files
    marks: Mapping[str, Sequence[str]] | None = None  # split -> of the contents of all images

    def images(self) -> "Counter[Image]":
        rows = (self.keys or {}).items()
        return Counter(
            Image(key, split, label, mark)
            for split, (keys, labels) in rows
            for key, label, mark in zip(
                keys, labels, self.marks[split] if self.marks else [""] * len(keys), strict=True
            )
        )


def differences(old: Listing, new: Listing) -> list[str]:
    """What is different, a phrase for each kind of it; by contents where both are known by them."""
    if old.marks is None or new.marks is None:
        old, new = replace(old, marks=None), replace(new, marks=None)
    renamed = renamed_classes(old, new)
    told = [f"class renamed: {a!r} -> {b!r}" for a, b in list(renamed.items())[:SHOWN]]
    told += [f"{len(renamed) - SHOWN} more classes renamed"] if len(renamed) > SHOWN else []
    removed = [name for name in old.classes if name not in {*new.classes, *renamed}]
    added = [name for name in new.classes if name not in {*old.classes, *renamed.values()}]
    for what, names in (("removed", removed), ("added", added)):
        if names:
            told.append(f"{counted(len(names), 'class', 'classes')} {what}: {examples(names)}")
    if old.keys is not None and new.keys is not None:
        told += changed_images(old.images(), new.images(), renamed)
    else:
        told += changed_counts(old, new, renamed)
    if not told and old.keys is not None and new.keys is not None:
        same = all(list(old.keys[split][0]) == list(keys) for split, (keys, _) in new.keys.items())
        told += changed_sizes(old, new) if same else ["the same images in another order"]
    return told or ["names, labels or contents of images, in the same numbers"]


def renamed_classes(old: Listing, new: Listing) -> dict[str, str]:
    """Classes that went and came with the same images: by file names or, without them, by their numbers."""
    gone = [name for name in old.classes if name not in set(new.classes)]
    come = [name for name in new.classes if name not in set(old.classes)]
    before, after = contents(old, gone), contents(new, come)
    where = defaultdict(list)
    for name in come:
        for one in after[name]:
            where[one].append(name)
    found: dict[str, str] = {}
    for name in gone:
        shared = Counter(other for one in before[name] for other in where[one])
        if shared:
            other, times = shared.most_common(1)[0]
            if times > SHARE * max(len(before[name]), len(after[other])) and other not in found.values():
                found[name] = other
    return found


def contents(listing: Listing, names: Iterable[str]) -> dict[str, set[Any]]:
    """What a class can be recognised by under another name."""
    found: dict[str, set[Any]] = {name: set() for name in names}
    if listing.keys is None:
        for name in found if listing.counts else ():
            found[name] = {tuple(sorted((split, row.get(name, 0)) for split, row in listing.counts.items()))}
        seen = Counter(one for own in found.values() for one in own)
        return {name: {one for one in own if seen[one] == 1} for name, own in found.items()}
    for image in listing.images():
        for part in image.label.split(";"):
            if part in found:
                found[part].add(image.mark or image.file)
    return found


def changed_images(old: "Counter[Image]", new: "Counter[Image]", renamed: Mapping[str, str]) -> Iterator[str]:
    """Images that moved, changed, went or came; one whose class has another name is none of them."""
    gone, come = old - new, new - old
    if renamed:
        gone = Counter(
            image._replace(label=";".join(renamed.get(part, part) for part in image.label.split(";")))
            for image in gone.elements()
        )
        paired = Counter(map(same_but_class, gone)) & Counter(map(same_but_class, come))
        gone, come = (Counter({i: n for i, n in side.items() if same_but_class(i) not in paired})
                      for side in (gone, come))  # fmt: skip
    moves: dict[str, list[Image]] = {}
    by_content = all(image.mark for side in (gone, come) for image in side)
    for name in ("mark", "key") if by_content else ("key", "file"):
        for a, b in pairs(gone, come, name):
            del gone[a], come[b]
            way = [f"from class {a.label!r} to {b.label!r}"] if a.label != b.label else []
            way += [f"from {a.split} to {b.split}"] if a.split != b.split else []
            other = "changed" if a.mark != b.mark else "renamed" if a.mark else "moved to another folder"
            moves.setdefault(f"moved {' and '.join(way)}" if way else other, []).append(b)
    for path, moved in sorted(moves.items(), key=lambda one: -len(one[1])):
        listed = examples([image.key for image in moved])
        moves_class = path.startswith("moved ")
        yield f"{counted(len(moved), 'image')} {path}: {listed if moves_class else by_class(moved)}"
    for what, side in (("removed", gone), ("added", come)):
        if side:
            yield f"{counted(side.total(), 'image')} {what}: {by_class([*side.elements()])}"


def same_but_class(image: Image) -> tuple[str, str, str]:
    """What an image has in common with itself where its class has another name."""
    return image.split, image.label, image.mark or image.file


def by_class(images: Sequence[Image]) -> str:
    """The number of images of each class, and the name of one."""
    numbers = Counter(image.label for image in images).most_common()
    listed = ", ".join(f"{label} {number:,}" for label, number in numbers[:CLASSES])
    more = f" and {len(numbers) - CLASSES} more classes" if len(numbers) > CLASSES else ""
    return f"{listed}{more} (as {min(image.key for image in images)!r})"


def pairs(gone: "Counter[Image]", come: "Counter[Image]", name: str) -> list[tuple[Image, Image]]:
    """Those that went and came under the same key or file name, where only one of each has it."""
    sides = []
    for side in (gone, come):
        seen = Counter(getattr(image, name) for image in side.elements())
        sides.append({getattr(i, name): i for i in side if seen[getattr(i, name)] == 1})
    return [(image, sides[1][name]) for name, image in sides[0].items() if name in sides[1]]


def changed_counts(old: Listing, new: Listing, renamed: Mapping[str, str]) -> Iterator[str]:
    for split in dict.fromkeys((*old.counts, *new.counts)):
        before = {renamed.get(name, name): n for name, n in old.counts.get(split, {}).items()}
        after = new.counts.get(split, {})
        changed = [n for n in dict.fromkeys((*before, *after)) if before.get(n, 0) != after.get(n, 0)]
        if changed:
            some = ", ".join(f"{n!r} {before.get(n, 0)} -> {after.get(n, 0)}" for n in changed[:SHOWN])
            more = " ..." if len(changed) > SHOWN else ""
            yield f"{split}: {sum(before.values())} images -> {sum(after.values())} ({some}{more})"


def changed_sizes(old: Listing, new: Listing) -> list[str]:
    told = []
    for split, sizes in (old.sizes or {}).items():
        after = (new.sizes or {}).get(split, ())
        other = [i for i, (a, b) in enumerate(zip(sizes, after, strict=False)) if a != b]
        if other and new.keys is not None:
            keys = new.keys[split][0]
            some = [keys[i] for i in sampled(len(keys), len(sizes))[other[:SHOWN]]]
            told.append(f"{split}: {len(other)} of {len(sizes)} files looked at have another size: "
                        f"{examples(some, len(other))}")  # fmt: skip
    return told


def sampled(images: int, count: int) -> np.ndarray:
    """The numbers of some images, at even distances."""
    return np.linspace(0, images - 1, min(images, count)).astype(np.int64)


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def examples(names: Sequence[str], total: int = 0) -> str:
    more = " ..." if max(len(names), total) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
