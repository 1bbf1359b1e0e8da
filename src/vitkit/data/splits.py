"""Parts of a data set: a stratified split by content, nested subsets, classes that must agree."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from vitkit.data.content import REMEMBERED, SIZE, content_hash
from vitkit.data.decode import BadImage
from vitkit.data.names import folded
from vitkit.data.sources.source import Lazy, Source
from vitkit.data.sources.sparse_labels import joined
from vitkit.errors import Error

PART = 256  # images that a thread looks at in a row
HELD = 2_000_000  # images up to which their marks stay in memory, 32 bytes each
Placed = Mapping[bytes | str, str]  # the split of an image, by its mark or by its name


def fingerprint(source: Source, index: int) -> bytes:
    """A digest of an image's bytes or pixels; of its name where it cannot be read."""
    try:
        return source.digest(index) if source.digest else content_hash(source.fetch(index))
    except BadImage:
        return content_hash(source.keys[index].encode("utf-8", "surrogateescape"))


def fingerprints(source: Source, advance: Callable[[], None] = lambda: None) -> np.ndarray:
    """The marks of all images, (N,) of 32 bytes each; what was read of files is remembered."""
    if source.hashes is not None:
        return source.hashes
    marks = np.zeros(len(source), dtype=f"S{SIZE}")

    def fill(part: range) -> None:
        for index in part:
            marks[index] = fingerprint(source, index)
            advance()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, (range(len(source))[at : at + PART] for at in range(0, len(source), PART))))
    REMEMBERED.save()
    return marks


def split(
    source: Source,
    fraction: float,
    *,
    marks: Sequence[bytes] | np.ndarray | None = None,
    name: str = "test",
    placed: Placed | None = None,
) -> tuple[Source, Source]:
    """(rest, part): of each class the `fraction` with the smallest digests goes to the part.

    Which images those are depends on their content alone, not on their names or order, and copies of one
    image stay together. placed: the splits of images that were divided before; those of `name` are in the
    part again, the others are not, and the part is filled up with new images.
    """
    if not 0 < fraction < 1:
        raise Error(f"a split takes a fraction between 0 and 1, not {fraction}", code="request.value")
    marks = fingerprints(source) if marks is None else np.array(marks, dtype=f"S{SIZE}")
    source = replace(source, hashes=marks) if len(source) <= HELD else source
    old, new = divided(source, marks, name, placed or {})
    chosen = [marks[old]]
    for members in by_class(source):
        digests = np.unique(marks[members])  # in order
        count = min(max(1, round(fraction * len(digests))), len(digests) - 1) if len(digests) > 1 else 0
        count -= len(np.unique(marks[members[old[members]]]))
        chosen.append(np.unique(marks[members[new[members]]])[: max(0, count)])
    inside = np.isin(marks, np.concatenate(chosen))
    return source.take(np.flatnonzero(~inside)), source.take(np.flatnonzero(inside))


def divided(source: Source, marks: np.ndarray, name: str, placed: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Which images were in the split `name` before, and which in none: two (N,) of true and false."""
    if not placed:
        return np.zeros(len(source), bool), np.ones(len(source), bool)
    names = any(isinstance(one, str) for one in placed)
    raw = marks.astype(f"S{SIZE}").tobytes()
    where = [placed.get(raw[at : at + SIZE]) for at in range(0, len(raw), SIZE)]
    if names:
        where = [split or placed.get(key) for split, key in zip(where, source.keys, strict=True)]
    return np.array([split == name for split in where]), np.array([split is None for split in where])


def by_class(source: Source) -> Iterable[np.ndarray]:
    """The numbers of the images of each class; with several labels, an image counts for its first."""
    first = source.labels.first() if source.multilabel else source.labels
    order = np.argsort(first, kind="stable")  # not a search for each class, of which there may be 21,000
    bounds = np.searchsorted(first[order], np.arange(len(source.classes) + 1))
    return [order[start:stop] for start, stop in pairwise(bounds)]


def subset(
    source: Source,
    *,
    count: int | None = None,
    fraction: float | None = None,
    per_class: int | None = None,
    seed: int = 0,
) -> Source:
    """A random part of a source: so many images, a share of them, or so many of each class.

    Parts are nested: with one seed, a smaller part lies within a larger one.
    """
    if sum(given is not None for given in (count, fraction, per_class)) != 1:
        raise Error("a subset takes one of count, fraction and per_class", code="request.conflict")
    order = np.random.default_rng(seed).permutation(len(source))
    if per_class is not None:
        if per_class < 1:
            raise Error(f"per_class must be at least 1, not {per_class}", code="request.value")
        rank = np.argsort(order)
        parts = [members[np.argsort(rank[members])][:per_class] for members in by_class(source)]
        return source.take(np.sort(np.concatenate(parts)))
    size = count if count is not None else round(float(fraction or 0) * len(source))
    if not 1 <= size <= len(source):
        raise Error(
            f"a subset of {size} of {len(source)} images; give 1 to {len(source)}", code="request.value"
        )
    return source.take(np.sort(order[:size]))


def complete(
    splits: Mapping[str, Source], *, val: float = 0.1, test: float = 0.1, placed: Placed | None = None
) -> dict[str, Source]:
    """train, val and test: those that are there, the others split off train by content; val=0: no val.

    placed: how a run has divided these images; they stay where they are, and new ones are divided too.
    """
    found = dict(splits)
    train = found.pop("train", None) or found.pop("all", None)
    if train is None:
        raise Error(f"the data has no train split, only {', '.join(splits)}", code="data.empty")
    if "test" not in found and "val" not in found:
        train, found["test"] = split(train, test, placed=placed)
    elif "test" not in found:
        found["test"] = found.pop("val")  # the only held-out part is what the result is told on
    if "val" not in found and val:
        train, found["val"] = split(train, val, name="val", placed=placed)
    same = {name: same_classes(part, train.classes, name) for name, part in found.items()}
    return {"train": train} | same


def join(first: Source, second: Source) -> Source:
    """The images of two sources with the same classes, one after the other."""
    size = len(first)

    def either(call: Callable[[Source], Callable[[int], Any]]) -> Callable[[int], Any]:
        return lambda i: call(first)(i) if i < size else call(second)(i - size)

    return replace(
        first,
        keys=Lazy(size + len(second), either(lambda source: source.keys.__getitem__)),
        labels=joined(first.labels, same_classes(second, first.classes).labels),
        fetch=either(lambda source: source.fetch),
        skipped=first.skipped + second.skipped,
        digest=either(lambda source: partial(fingerprint, source)),
        size=either(lambda source: source.size or (lambda i: -1)) if first.size or second.size else None,
        identity="+".join([first.identity, second.identity]) if first.identity and second.identity else "",
        hashes=None
        if first.hashes is None or second.hashes is None
        else np.concatenate([first.hashes, second.hashes]),
    )


def same_classes(source: Source, classes: tuple[str, ...], name: str = "") -> Source:
    """The source with its labels in terms of `classes`; a class not among them is an error by name."""
    strange = [label for label in source.classes if label not in set(classes)]
    if strange:
        alike = {folded(label): label for label in classes}
        twins = [(label, alike[folded(label)]) for label in strange if folded(label) in alike]
        hint = f"; {twins[0][0]!a} is not {twins[0][1]!a}" if twins else ""  # they may look the same
        raise Error(
            f"{name or source.name}: classes {', '.join(map(repr, strange[:5]))} are unknown to the model; "
            f"known: {', '.join(map(repr, classes[:10]))}{' ...' if len(classes) > 10 else ''}{hint}",
            code="data.classes",
        )
    if source.classes == tuple(classes):
        return source
    place = {label: i for i, label in enumerate(classes)}
    numbers = np.array([place[label] for label in source.classes], dtype=np.int64)
    several = source.multilabel
    labels = source.labels.renumbered(numbers, len(classes)) if several else numbers[source.labels]
    return replace(source, classes=tuple(classes), labels=labels)
