"""The splits of a VTAB-1k task: 800 to train on, 200 to choose by, all of test; in the published order."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitkit.data.sources import Source, open_parquet
from vitkit.data.splits import fingerprints
from vitkit.data.vtab.tasks import Slice, Task, find_task
from vitkit.errors import Error

SIZES = (800, 200)
HUB = {"all": "train", "val": "validation"}  # our words for a split of Parquet files, and the protocol's


@dataclass(frozen=True)
class Opened:
    """A task's train, val and test, which order the first 800 are the first of, and whether no file lacks."""

    splits: dict[str, Source]
    order: str  # tfds or content
    complete: bool


def open_place(place: str) -> dict[str, Source]:
    """train, val and test of vtab:TASK:ROOT, whose files lie in the task's folder below ROOT."""
    name, _, root = place.removeprefix("vtab:").partition(":")
    if not root:
        raise Error(f"{place!r}: give vtab:TASK:ROOT, as in vtab:dtd:data/vtab", code="request.value")
    return read_task(name, root).splits


def read_task(name: str, root: str | Path, sizes: tuple[int, int] = SIZES) -> Opened:
    task = find_task(name)
    folder = Path(root) / task.folder
    if not folder.is_dir():
        raise Error(
            f"no folder {folder} with the files of {name}; docs/vtab.md lists what goes there",
            code="data.not-found",
        )
    hub = task.hub and is_hub(folder)
    raw = from_hub(folder) if hub else task.read(folder)
    order = "content" if hub else task.order
    for split, source in raw.items():
        if len(source.classes) != task.classes:
            told = f"{len(source.classes)} classes in {split}"
            raise Error(f"{folder}: {told}, where {name} has {task.classes}", code="data.classes")
    made = portions(raw, task, order, sizes)
    found = {split: len(source) for split, source in raw.items()}
    return Opened(made, order, all(found.get(split) == images for split, images in task.images.items()))


def is_hub(folder: Path) -> bool:
    """Whether a folder holds .parquet files, there or one below."""
    return any(True for pattern in ("*.parquet", "*/*.parquet") for _ in folder.glob(pattern))


def from_hub(folder: Path) -> dict[str, Source]:
    return {HUB.get(split, split): source for split, source in open_parquet(folder).items()}


def portions(
    raw: Mapping[str, Source], task: Task, order: str, sizes: tuple[int, int] = SIZES
) -> dict[str, Source]:
    """train[:800], 200 from where the task's rule says, and its test split; none may share an image."""
    wanted = {"train": (Slice("train"), sizes[0]), "val": (task.val, sizes[1]), "test": (task.test, None)}
    ordered: dict[str, Source] = {}
    made, taken = {}, []
    for name, (place, count) in wanted.items():
        if place.split not in raw:
            raise Error(
                f"{task.name}: the files hold no split {place.split!r}, only {', '.join(raw)}",
                code="data.empty",
            )
        if place.split not in ordered:
            source = raw[place.split]
            ordered[place.split] = source.take(in_order(place.split, source, order))
        source = ordered[place.split]
        start = place.start(len(source))
        stop = len(source) if count is None else start + count
        taken.append((place.split, start, stop))
        if stop > len(source) or start >= stop or shared(taken):
            needs = f"{sizes[0]} images to train, {sizes[1]} for val and others for test"
            raise Error(
                f"{task.name}: {len(source)} in {place.split!r} are too few for {needs}", code="data.empty"
            )
        made[name] = replace(source.take(np.arange(start, stop)), name=task.name)
    return made


def shared(parts: Sequence[tuple[str, int, int]]) -> bool:
    """Whether the last part overlaps one before it."""
    split, start, stop = parts[-1]
    return any(split == s and start < b and a < stop for s, a, b in parts[:-1])


def in_order(split: str, source: Source, order: str) -> np.ndarray:
    """The numbers of a split's images in an order that depends on no folder listing."""
    if order == "content":
        return np.argsort(fingerprints(source), kind="stable")
    return published_order(split, (key.removeprefix(f"{split}/") for key in source.keys))


def published_order(split: str, keys: Iterable[str]) -> np.ndarray:
    """TensorFlow Datasets' order: by the MD5 of the split's name followed by an image's key."""
    salted = hashlib.md5(split.encode(), usedforsecurity=False)
    marks = []
    for key in keys:
        digest = salted.copy()
        digest.update(key.encode("utf-8", "surrogateescape"))
        marks.append(digest.digest())
    if len(set(marks)) < len(marks):
        raise Error(f"two images of {split!r} have the same key", code="data.layout")
    return np.array(sorted(range(len(marks)), key=marks.__getitem__), dtype=np.int64)
