"""Splits of a data set: stratified by content, nested subsets, and class lists that must agree."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from vitkit.data.content import HASH_CACHE, SIZE, content_hash
from vitkit.data.decode import BadImage
from vitkit.data.names import folded
from vitkit.data.sources.source import Lazy, Source
from vitkit.data.sources.sparse_labels import joined
from vitkit.data.targets import joined_targets, renumbered, target_digest
from vitkit.errors import Error

TARGET = 16  # bytes of the digest of an image's annotations
PART = 256  # images that a thread hashes in a row
MANY = 2**18  # images whose hashes are in memory at the same time, if a source can give those of any images
Placed = Mapping[bytes | str, str]  # the split of an image, by its content hash or by its name


def fingerprint(source: Source, index: int) -> bytes:
    """The content hash of an image, or of its name if it cannot be read."""
    try:
        return source.digest(index) if source.digest else content_hash(source.fetch(index))
    except BadImage:
        return content_hash(source.keys[index].encode("utf-8", "surrogateescape"))


def fingerprints(source: Source, advance: Callable[[], None] = lambda: None) -> np.ndarray:
    """The content hashes of all images, (N,) of 32 bytes each; those of files are cached on disk."""
    if source.hashes is not None:
        return source.hashes
    if source.digests:
        return source.digests(np.arange(len(source)))
    hashes = np.zeros(len(source), dtype=f"S{SIZE}")

    def fill(part: range) -> None:
        for index in part:
            hashes[index] = fingerprint(source, index)
            advance()

    parts = (range(len(source))[start : start + PART] for start in range(0, len(source), PART))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, parts))
    HASH_CACHE.save()
    return hashes


def target_fingerprints(source: Source) -> np.ndarray | None:
    """The digests of the masks or boxes of all images, (N,) of 16 bytes each; None without any."""
    if source.targets is None or source.target_hashes is not None:
        return source.target_hashes
    hashes = np.zeros(len(source), dtype=f"V{TARGET}")
    for index in range(len(source)):
        try:
            hashes[index] = target_digest(source.targets, index)
        except (BadImage, Error):  # reported where the image is used
            continue
    HASH_CACHE.save()
    return hashes


def split(
    source: Source, fraction: float, *, name: str = "test", placed: Placed | None = None
) -> tuple[Source, Source]:
    """(rest, part): of each class, the `fraction` with the smallest content hashes goes to the part.

    The split depends only on the content of the images, not on their names or order, and copies of one image
    stay together. placed: the splits of images that were split before; those in `name` go to the part again,
    those in other splits do not, and new images fill up the part.
    """
    if not 0 < fraction < 1:
        raise Error(f"the fraction of a split must be between 0 and 1, not {fraction}", code="request.value")
    if not source.digests:
        source = replace(source, hashes=fingerprints(source))
    old, new = earlier_split(source, name, placed or {})
    chosen = [hashes_of(source, np.flatnonzero(old))]
    for members in by_class(source):
        hashes = hashes_of(source, members)
        images = len(distinct(hashes))
        count = min(max(1, round(fraction * images)), images - 1) if images > 1 else 0
        count -= len(distinct(hashes[old[members]]))
        chosen.append(distinct(hashes[new[members]])[: max(0, count)])
    together = distinct(np.concatenate(chosen))
    inside = np.concatenate([is_among(hashes, together) for hashes in hashes_in_parts(source)])
    return source.take(np.flatnonzero(~inside)), source.take(np.flatnonzero(inside))


def distinct(hashes: np.ndarray) -> np.ndarray:
    """The distinct hashes, sorted; np.unique takes several times as long for strings."""
    ordered = np.sort(hashes)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def is_among(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which hashes are among the others; all 32 bytes are compared only where the first 8 are equal."""
    first, first_others = (np.ascontiguousarray(each).view("u8")[:: SIZE // 8] for each in (hashes, others))
    among = np.isin(first, first_others)
    among[among] = np.isin(hashes[among], others)
    return among


def hashes_of(source: Source, indices: np.ndarray) -> np.ndarray:
    """The content hashes of the images with these indices."""
    if source.hashes is None and source.digests:
        return source.digests(indices)
    return fingerprints(source)[indices]


def hashes_in_parts(source: Source) -> Iterator[np.ndarray]:
    """The content hashes of all images, of many at a time."""
    for start in range(0, max(1, len(source)), MANY):
        yield hashes_of(source, np.arange(start, min(start + MANY, len(source))))


def earlier_split(source: Source, name: str, placed: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Two masks (N,): the images that were in the split `name` before, and those that were in none."""
    if not placed:
        return np.zeros(len(source), bool), np.ones(len(source), bool)
    by_name = any(isinstance(key, str) for key in placed)
    splits: list[str | None] = []
    for hashes in hashes_in_parts(source):
        raw = hashes.astype(f"S{SIZE}").tobytes()
        splits += [placed.get(raw[start : start + SIZE]) for start in range(0, len(raw), SIZE)]
    if by_name:
        splits = [split or placed.get(key) for split, key in zip(splits, source.keys, strict=True)]
    return np.array([split == name for split in splits]), np.array([split is None for split in splits])


def by_class(source: Source) -> Iterable[np.ndarray]:
    """The indices of the images of each class; a multi-label image counts for its first class."""
    first = source.labels.first() if source.multilabel else source.labels
    order = np.argsort(first, kind="stable")  # one sort instead of a search per class, of up to 21,000
    bounds = np.searchsorted(first, np.arange(len(source.classes) + 1), sorter=order)
    return [order[start:stop] for start, stop in pairwise(bounds)]


def subset(
    source: Source,
    *,
    count: int | None = None,
    fraction: float | None = None,
    per_class: int | None = None,
    imbalance: float | None = None,
    seed: int = 0,
) -> Source:
    """A random subset: `count` images, a fraction of them, `per_class` images of each class, or a long tail.

    imbalance: how many times as many images the first class has as the last one; the numbers of images
    decrease exponentially. Subsets are nested: for the same seed, a larger subset contains a smaller one.
    """
    if sum(option is not None for option in (count, fraction, per_class, imbalance)) != 1:
        raise Error(
            "a subset takes exactly one of count, fraction, per_class and imbalance", code="request.conflict"
        )
    order = np.random.default_rng(seed).permutation(len(source))
    if per_class is not None or imbalance is not None:
        if per_class is not None and per_class < 1:
            raise Error(f"per_class must be at least 1, not {per_class}", code="request.value")
        rank, classes = np.argsort(order), list(by_class(source))
        sizes = [per_class] * len(classes) if imbalance is None else long_tail(classes, imbalance)
        parts = [ids[np.argsort(rank[ids])][:size] for ids, size in zip(classes, sizes, strict=True)]
        return source.take(np.sort(np.concatenate(parts)))
    size = count if count is not None else round(float(fraction or 0) * len(source))
    if not 1 <= size <= len(source):
        raise Error(
            f"a subset of {size} of {len(source)} images; expected 1 to {len(source)}", code="request.value"
        )
    return source.take(np.sort(order[:size]))


def long_tail(classes: Sequence[np.ndarray], ratio: float) -> list[int]:
    """How many images of each class to keep: exponentially fewer, down to 1 / ratio (as in CIFAR-LT)."""
    most, last = max(map(len, classes)), max(1, len(classes) - 1)
    return [max(1, round(most * ratio ** (-number / last))) for number in range(len(classes))]


def with_noise(source: Source, share: float, seed: int = 0) -> Source:
    """The source with a share of its labels replaced by another class, drawn at random."""
    if source.multilabel:
        raise Error(
            f"{source.name} has several labels per image; label_noise needs one label per image",
            code="request.conflict",
        )
    count, classes = len(source), len(source.classes)
    random = np.random.default_rng([seed, count])
    wrong = random.permutation(count)[: round(share * count) if classes > 1 else 0]
    labels = np.array(source.labels)
    labels[wrong] = (labels[wrong] + random.integers(1, max(2, classes), len(wrong))) % classes
    identity = hashlib.sha256(source.identity.encode() + labels.tobytes()).hexdigest()
    return replace(source, labels=labels, identity=identity if source.identity else "")


def complete(
    splits: Mapping[str, Source],
    *,
    val: float = 0.1,
    test: float = 0.1,
    placed: Placed | None = None,
    val_images: tuple[int, ...] = (),
) -> dict[str, Source]:
    """train, val and test; those that are missing are split off train by content. val=0: no val.

    placed: the splits of an earlier run; its images keep theirs, and only new ones are split.
    val_images: the fewest and the most images of a new val. If its share of the images is fewer, or fewer
    than the classes, there is no val.
    """
    others = dict(splits)
    train = others.pop("train", None) or others.pop("all", None)
    if train is None:
        raise Error(f"the data has no train split, only {', '.join(splits)}", code="data.empty")
    if "test" not in others and "val" not in others:
        train, others["test"] = split(train, test, placed=placed)
    elif "test" not in others:
        others["test"] = others.pop("val")  # the only held-out split is for the final result
    if val_images and len(train):
        fewest, most = val_images
        enough = val * len(train) >= max(fewest, len(train.classes))
        val = min(val, most / len(train)) if enough else 0.0
    if "val" not in others and val:
        train, others["val"] = split(train, val, name="val", placed=placed)
    return {"train": train} | {name: same_classes(part, train.classes, name) for name, part in others.items()}


def join(first: Source, second: Source) -> Source:
    """The concatenation of two sources with the same classes."""
    size, second = len(first), same_classes(second, first.classes)

    def either(of_first: Callable[[int], Any], of_second: Callable[[int], Any]) -> Callable[[int], Any]:
        return partial(call_either, of_first, of_second, size)

    return replace(
        first,
        keys=Lazy(size + len(second), either(first.keys.__getitem__, second.keys.__getitem__)),
        labels=joined(first.labels, second.labels),
        fetch=either(first.fetch, second.fetch),
        skipped=first.skipped + second.skipped,
        digest=either(partial(fingerprint, first), partial(fingerprint, second)),
        digests=None,
        size=either(first.size or unknown, second.size or unknown) if first.size or second.size else None,
        identity="+".join([first.identity, second.identity]) if first.identity and second.identity else "",
        hashes=both(first.hashes, second.hashes),
        targets=joined_targets(first.targets, second.targets, size),
        target_hashes=both(first.target_hashes, second.target_hashes),
    )


def both(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """The hashes of two sources, if those of both are known."""
    return None if first is None or second is None else np.concatenate([first, second])


def call_either(first: Callable[[int], Any], second: Callable[[int], Any], size: int, index: int) -> Any:
    """The function of the first `size` indices, or that of those after them."""
    return first(index) if index < size else second(index - size)


def unknown(index: int) -> int:
    return -1


def same_classes(source: Source, classes: tuple[str, ...], name: str = "") -> Source:
    """The source with its labels renumbered to `classes`; a class that is not among them is an error."""
    unknown = [label for label in source.classes if label not in set(classes)]
    if unknown:
        alike = {folded(label): label for label in classes}
        twins = [(label, alike[folded(label)]) for label in unknown if folded(label) in alike]
        hint = f"; {twins[0][0]!a} is not {twins[0][1]!a}" if twins else ""  # ascii(), as they may look alike
        raise Error(
            f"{name or source.name}: classes {', '.join(map(repr, unknown[:5]))} are unknown to the model; "
            f"known: {', '.join(map(repr, classes[:10]))}{' ...' if len(classes) > 10 else ''}{hint}",
            code="data.classes",
        )
    if source.classes == tuple(classes):
        return source
    number = {label: i for i, label in enumerate(classes)}
    numbers = np.array([number[label] for label in source.classes], dtype=np.int64)
    if source.targets:  # their images have no label of their own
        return replace(source, classes=tuple(classes), targets=renumbered(source.targets, numbers))
    multilabel = source.multilabel
    labels = source.labels.renumbered(numbers, len(classes)) if multilabel else numbers[source.labels]
    return replace(source, classes=tuple(classes), labels=labels)
