"""A description of how two states of a data set differ: classes, images, splits, order, sizes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

SHOWN = 3  # examples of each kind of change
CLASSES = 6  # classes whose changed images are counted one by one
ANNOTATED = "with other masks or boxes"
SHARE = 0.5  # of the file names: a class that shares more of them with another one was renamed


class Image(NamedTuple):
    """An image of a data set, by its name, its split and its class (or classes, joined)."""

    key: str
    split: str
    label: str
    hash: str = ""  # of its content, where that is known
    targets: str = ""  # a digest of its masks or boxes, where that is known

    @property
    def file(self) -> str:
        return self.key.rpartition("/")[2]


@dataclass(frozen=True)
class Listing:
    """A data set as it was recorded; of very large ones only the counts."""

    classes: Sequence[str]
    counts: Mapping[str, Mapping[str, int]]  # split -> class -> images
    keys: Mapping[str, tuple[Sequence[str], Sequence[str]]] | None = None  # split -> names, labels
    sizes: Mapping[str, Sequence[int]] | None = None  # split -> bytes of some files
    hashes: Mapping[str, Sequence[str]] | None = None  # split -> content hash of each image
    targets: Mapping[str, Sequence[str]] | None = None  # split -> digest of its masks or boxes

    def images(self) -> "Counter[Image]":
        rows = (self.keys or {}).items()
        return Counter(
            Image(key, split, *row)
            for split, (keys, labels) in rows
            for key, *row in zip(
                keys, labels, column(self.hashes, split, keys), column(self.targets, split, keys), strict=True
            )
        )  # fmt: skip


def column(known: Mapping[str, Sequence[str]] | None, split: str, keys: Sequence[str]) -> Sequence[str]:
    """The hashes of the images of a split; empty texts if they are not known."""
    return known[split] if known else [""] * len(keys)


def differences(old: Listing, new: Listing) -> list[str]:
    """A phrase for each kind of change; compares contents where both states have hashes."""
    if old.hashes is None or new.hashes is None:
        old, new = replace(old, hashes=None), replace(new, hashes=None)
    if old.targets is None or new.targets is None:
        old, new = replace(old, targets=None), replace(new, targets=None)
    renamed = renamed_classes(old, new)
    changes = [f"class renamed: {a!r} -> {b!r}" for a, b in list(renamed.items())[:SHOWN]]
    changes += [f"{len(renamed) - SHOWN} more classes renamed"] if len(renamed) > SHOWN else []
    removed = [name for name in old.classes if name not in {*new.classes, *renamed}]
    added = [name for name in new.classes if name not in {*old.classes, *renamed.values()}]
    for action, names in (("removed", removed), ("added", added)):
        if names:
            changes.append(f"{counted(len(names), 'class', 'classes')} {action}: {examples(names)}")
    if old.keys is not None and new.keys is not None:
        changes += changed_images(old.images(), new.images(), renamed)
    else:
        changes += changed_counts(old, new, renamed)
    if not changes and old.keys is not None and new.keys is not None:
        same = all(list(old.keys[split][0]) == list(keys) for split, (keys, _) in new.keys.items())
        changes += changed_sizes(old, new) if same else ["the same images in another order"]
    return changes or ["names, labels or contents of images, in the same numbers"]


def renamed_classes(old: Listing, new: Listing) -> dict[str, str]:
    """Old to new names of classes with the same images, by file names or, without them, by counts."""
    removed = [name for name in old.classes if name not in set(new.classes)]
    added = [name for name in new.classes if name not in set(old.classes)]
    before, after = contents(old, removed), contents(new, added)
    classes_with = defaultdict(list)
    for name in added:
        for item in after[name]:
            classes_with[item].append(name)
    renamed: dict[str, str] = {}
    for name in removed:
        shared = Counter(other for item in before[name] for other in classes_with[item])
        if shared:
            other, times = shared.most_common(1)[0]
            if times > SHARE * max(len(before[name]), len(after[other])) and other not in renamed.values():
                renamed[name] = other
    return renamed


def contents(listing: Listing, names: Iterable[str]) -> dict[str, set[Any]]:
    """For each class what identifies it under another name: its images or, without them, its counts."""
    items: dict[str, set[Any]] = {name: set() for name in names}
    if listing.keys is None:
        for name in items if listing.counts else ():
            items[name] = {tuple(sorted((split, row.get(name, 0)) for split, row in listing.counts.items()))}
        times = Counter(item for own in items.values() for item in own)
        return {name: {item for item in own if times[item] == 1} for name, own in items.items()}
    for image in listing.images():
        for label in image.label.split(";"):
            if label in items:
                items[label].add(image.hash or image.file)
    return items


def changed_images(old: "Counter[Image]", new: "Counter[Image]", renamed: Mapping[str, str]) -> Iterator[str]:
    """Images that were moved, changed, removed or added; those of renamed classes count as unchanged."""
    removed, added = old - new, new - old
    if renamed:
        removed = Counter(
            image._replace(label=";".join(renamed.get(part, part) for part in image.label.split(";")))
            for image in removed.elements()
        )
        paired = Counter(map(same_but_class, removed)) & Counter(map(same_but_class, added))
        removed, added = (Counter({i: n for i, n in side.items() if same_but_class(i) not in paired})
                          for side in (removed, added))  # fmt: skip
    moves: dict[str, list[Image]] = {}
    by_content = all(image.hash for side in (removed, added) for image in side)
    for name in ("hash", "key") if by_content else ("key", "file"):
        for a, b in pairs(removed, added, name):
            del removed[a], added[b]
            way = [f"from class {a.label!r} to {b.label!r}"] if a.label != b.label else []
            way += [f"from {a.split} to {b.split}"] if a.split != b.split else []
            other = "changed" if a.hash != b.hash else "renamed" if a.hash else "moved to another folder"
            if a.targets != b.targets and a.hash == b.hash:
                other = ANNOTATED
            moves.setdefault(f"moved {' and '.join(way)}" if way else other, []).append(b)
    for path, moved in sorted(moves.items(), key=lambda item: -len(item[1])):
        listed = examples([image.key for image in moved])
        named = path.startswith("moved ") or path == ANNOTATED
        yield f"{counted(len(moved), 'image')} {path}: {listed if named else by_class(moved)}"
    for action, side in (("removed", removed), ("added", added)):
        if side:
            yield f"{counted(side.total(), 'image')} {action}: {by_class([*side.elements()])}"


def same_but_class(image: Image) -> tuple[str, str, str]:
    """What identifies an image whose class was renamed."""
    return image.split, image.label, image.hash or image.file


def by_class(images: Sequence[Image]) -> str:
    """The number of images of each class, and the name of one image."""
    numbers = Counter(image.label for image in images).most_common()
    listed = ", ".join(f"{label} {number:,}" for label, number in numbers[:CLASSES])
    more = f" and {len(numbers) - CLASSES} more classes" if len(numbers) > CLASSES else ""
    return f"{listed}{more} (as {min(image.key for image in images)!r})"


def pairs(removed: "Counter[Image]", added: "Counter[Image]", name: str) -> list[tuple[Image, Image]]:
    """Removed and added images with the same value of a field, where it is unique on both sides."""
    sides = []
    for side in (removed, added):
        times = Counter(getattr(image, name) for image in side.elements())
        sides.append({getattr(i, name): i for i in side if times[getattr(i, name)] == 1})
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
    changes = []
    for split, sizes in (old.sizes or {}).items():
        after = (new.sizes or {}).get(split, ())
        other = [i for i, (a, b) in enumerate(zip(sizes, after, strict=False)) if a != b]
        if other and new.keys is not None:
            keys = new.keys[split][0]
            some = [keys[i] for i in sampled(len(keys), len(sizes))[other[:SHOWN]]]
            changes.append(f"{split}: {len(other)} of {len(sizes)} sampled files have another size: "
                           f"{examples(some, len(other))}")  # fmt: skip
    return changes


def sampled(images: int, count: int) -> np.ndarray:
    """The indices of `count` images at regular intervals."""
    return np.linspace(0, images - 1, min(images, count)).astype(np.int64)


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def examples(names: Sequence[str], total: int = 0) -> str:
    more = " ..." if max(len(names), total) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
