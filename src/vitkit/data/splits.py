"""Parts of a data set: a stratified split by content, nested subsets, classes that must agree."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.sources import Source


def fingerprint(source: Source, index: int) -> bytes:
    """A digest of an image's bytes or pixels; of its name where it cannot be read."""
    try:
        content = source.fetch(index)
        content = content if isinstance(content, bytes) else np.ascontiguousarray(content).tobytes()
    except BadImage:
        content = source.keys[index].encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=16).digest()


def fingerprints(source: Source, advance: Callable[[], None] = lambda: None) -> list[bytes]:
    def one(index: int) -> bytes:
        advance()
        return fingerprint(source, index)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(len(source))))


def split(source: Source, fraction: float, *, marks: list[bytes] | None = None) -> tuple[Source, Source]:
    """(rest, part): of each class the `fraction` with the smallest digests goes to the part.

    Which images those are depends on their content alone, not on their names or order, and copies of one
    image stay together.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"a split takes a fraction between 0 and 1, not {fraction}")
    marks = fingerprints(source) if marks is None else marks
    chosen: set[bytes] = set()
    for members in by_class(source):
        digests = sorted({marks[i] for i in members})
        count = min(max(1, round(fraction * len(digests))), len(digests) - 1) if len(digests) > 1 else 0
        chosen |= set(digests[:count])
    inside = np.array([mark in chosen for mark in marks], dtype=bool)
    return source.take(np.flatnonzero(~inside)), source.take(np.flatnonzero(inside))


def by_class(source: Source) -> Iterable[np.ndarray]:
    """The numbers of the images of each class; with several labels, an image counts for its first."""
    first = source.labels.argmax(1) if source.multilabel else source.labels
    return [np.flatnonzero(first == label) for label in range(len(source.classes))]


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
        raise ValueError("a subset takes one of count, fraction and per_class")
    order = np.random.default_rng(seed).permutation(len(source))
    if per_class is not None:
        if per_class < 1:
            raise ValueError(f"per_class must be at least 1, not {per_class}")
        rank = np.argsort(order)
        parts = [members[np.argsort(rank[members])][:per_class] for members in by_class(source)]
        return source.take(np.sort(np.concatenate(parts)))
    size = count if count is not None else round(float(fraction or 0) * len(source))
    if not 1 <= size <= len(source):
        raise ValueError(f"a subset of {size} of {len(source)} images cannot be taken")
    return source.take(np.sort(order[:size]))


def complete(splits: Mapping[str, Source], *, val: float = 0.1, test: float = 0.1) -> dict[str, Source]:
    """train, val and test: those that are there, the others split off from train by content."""
    found = dict(splits)
    train = found.pop("train", None) or found.pop("all", None)
    if train is None:
        raise ValueError(f"the data has no train split, only {', '.join(splits)}")
    if "test" not in found and "val" not in found:
        train, found["test"] = split(train, test)
    elif "test" not in found:
        found["test"] = found.pop("val")  # the only held-out part is what the result is told on
    if "val" not in found:
        train, found["val"] = split(train, val)
    same = {name: same_classes(part, train.classes, name) for name, part in found.items()}
    return {"train": train} | same


def same_classes(source: Source, classes: tuple[str, ...], name: str = "") -> Source:
    """The source with its labels in terms of `classes`; a class not among them is an error by name."""
    strange = [label for label in source.classes if label not in set(classes)]
    if strange:
        raise ValueError(
            f"{name or source.name}: classes {', '.join(map(repr, strange[:5]))} are unknown to the model; "
            f"known: {', '.join(map(repr, classes[:10]))}{' ...' if len(classes) > 10 else ''}"
        )
    if source.classes == tuple(classes):
        return source
    place = {label: i for i, label in enumerate(classes)}
    numbers = np.array([place[label] for label in source.classes], dtype=np.int64)
    if source.multilabel:
        labels = np.zeros((len(source), len(classes)), dtype=source.labels.dtype)
        labels[:, numbers] = source.labels
    else:
        labels = numbers[source.labels]
    return replace(source, classes=tuple(classes), labels=labels)
