"""The 19 tasks of VTAB-1k: groups, classes, label rules and splits, in the published order."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import Source
from vitkit.data.sources.tables import open_parquet
from vitkit.data.splits import fingerprints
from vitkit.datasets import image_files, matlab, pixel_files, tfrecord
from vitkit.errors import Error

GROUPS = {"Natural": 7, "Specialized": 4, "Structured": 8}  # number of tasks
Read = Callable[[Path], dict[str, Source]]


@dataclass(frozen=True)
class Slice:
    """A published split after the sum of these percentages, each rounded down to whole images."""

    split: str
    after: tuple[int, ...] = ()  # percent

    def start(self, images: int) -> int:
        return sum(images * share // 100 for share in self.after)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task; `images` are the sizes of the published splits, by which missing files are detected."""

    name: str
    group: str
    classes: int
    folder: str  # below the root; some tasks share their files
    read: Read
    val: Slice  # its first 200 images; train is always the first 800 of train
    test: Slice  # all of it
    images: Mapping[str, int]
    order: str = "tfds"  # or content, if the published order is unknown
    hub: bool = False  # whether Hugging Face .parquet files can be used, as their label is that of the task
    flip: bool = True
    crop: bool = True
    differs: str = ""  # how the images in the files differ from those of the protocol


def splits(train: int, validation: int = 0, test: int = 0) -> dict[str, int]:
    sizes = {"train": train, "validation": validation, "test": test}
    return {name: images for name, images in sizes.items() if images}


AFTER = {share: Slice("train", (share,)) for share in (60, 80, 90)}
VALIDATION, TEST = Slice("validation"), Slice("test")
FIFTH = Slice("train", (60, 20))  # the last fifth, rounded as in the protocol
CLEVR: dict[str, Any] = {
    "group": "Structured", "folder": "clevr", "val": AFTER[90], "test": VALIDATION, "crop": False,
    "images": splits(70_000, 15_000),
}  # fmt: skip
DSPRITES: dict[str, Any] = {
    "group": "Structured", "folder": "dsprites", "classes": 16, "val": AFTER[80], "flip": False,
    "test": Slice("train", (80, 10)), "images": splits(737_280),
}  # fmt: skip
NORB: dict[str, Any] = {
    "group": "Structured", "folder": "smallnorb", "val": TEST, "test": Slice("test", (50,)),
    "images": splits(24_300, test=24_300),
}  # fmt: skip
NATURAL = (
    Task(name="caltech101", group="Natural", classes=102, folder="caltech101", read=image_files.caltech101,
         val=AFTER[90], test=TEST, images=splits(3_060, test=6_084), order="content", hub=True,
         differs="other images of each class are used for training"),
    Task(name="cifar100", group="Natural", classes=100, folder="cifar100", read=pixel_files.cifar100,
         val=AFTER[90], test=TEST, images=splits(50_000, test=10_000), hub=True),
    Task(name="dtd", group="Natural", classes=47, folder="dtd", read=image_files.dtd,
         val=VALIDATION, test=TEST, images=splits(1_880, 1_880, 1_880), hub=True),
    Task(name="flowers102", group="Natural", classes=102, folder="flowers102", read=matlab.flowers102,
         val=VALIDATION, test=TEST, images=splits(1_020, 1_020, 6_149), hub=True),
    Task(name="pets", group="Natural", classes=37, folder="pets", read=image_files.pets,
         val=AFTER[80], test=TEST, images=splits(3_680, test=3_669), hub=True),
    Task(name="sun397", group="Natural", classes=397, folder="sun397", read=image_files.sun397,
         val=VALIDATION, test=TEST, images=splits(76_128, 10_875, 21_750), hub=True,
         differs="not reduced to 120,000 pixels"),
    Task(name="svhn", group="Natural", classes=10, folder="svhn", read=matlab.svhn,
         val=AFTER[90], test=TEST, images=splits(73_257, test=26_032), hub=True),
)  # fmt: skip
SPECIALIZED = (
    Task(name="camelyon", group="Specialized", classes=2, folder="camelyon", read=pixel_files.camelyon,
         val=VALIDATION, test=TEST, images=splits(262_144, 32_768, 32_768), hub=True),
    Task(name="eurosat", group="Specialized", classes=10, folder="eurosat", read=image_files.eurosat,
         val=AFTER[60], test=FIFTH, images=splits(27_000), hub=True),
    Task(name="resisc45", group="Specialized", classes=45, folder="resisc45", read=image_files.resisc45,
         val=AFTER[60], test=FIFTH, images=splits(31_500), hub=True),
    Task(name="retinopathy", group="Specialized", classes=5, folder="retinopathy",
         read=image_files.retinopathy, val=VALIDATION, test=TEST, images=splits(35_126, 10_906, 42_670),
         differs="images as in the files, not preprocessed as btgraham-300"),
)  # fmt: skip
STRUCTURED = (
    Task(name="clevr-count", classes=8, read=partial(image_files.clevr, rule=image_files.count), **CLEVR),
    Task(name="clevr-distance", classes=6, read=partial(image_files.clevr, rule=image_files.nearest),
         **CLEVR),
    Task(name="dmlab", group="Structured", classes=6, folder="dmlab", read=tfrecord.dmlab,
         val=VALIDATION, test=TEST, images=splits(65_550, 22_628, 22_735), crop=False),
    Task(name="dsprites-location", read=partial(pixel_files.dsprites, rule="location"), crop=False,
         **DSPRITES),
    Task(name="dsprites-orientation", read=partial(pixel_files.dsprites, rule="orientation"), **DSPRITES),
    Task(name="kitti-distance", group="Structured", classes=4, folder="kitti", read=image_files.kitti,
         val=VALIDATION, test=TEST, images=splits(6_347, 423, 711), crop=False),
    Task(name="snorb-azimuth", classes=18, flip=False, read=partial(pixel_files.smallnorb, rule="azimuth"),
         **NORB),
    Task(name="snorb-elevation", classes=9, read=partial(pixel_files.smallnorb, rule="elevation"), **NORB),
)  # fmt: skip
TASKS = {task.name: task for task in (*NATURAL, *SPECIALIZED, *STRUCTURED)}


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise Error(f"no task {name!r} in VTAB-1k; known: {', '.join(TASKS)}", code="request.unknown")
    return TASKS[name]


SIZES = (800, 200)
HUB = {"all": "train", "val": "validation"}  # our split names to those of the protocol


@dataclass(frozen=True)
class Opened:
    """The train, val and test splits of a task, the order they were cut from, and whether all files exist."""

    splits: dict[str, Source]
    order: str  # tfds or content
    complete: bool


def open_place(place: str) -> dict[str, Source]:
    """train, val and test of vtab:TASK:ROOT, with the files in the task's folder below ROOT."""
    name, _, root = place.removeprefix("vtab:").partition(":")
    if not root:
        raise Error(f"{place!r}: expected vtab:TASK:ROOT, such as vtab:dtd:data/vtab", code="request.value")
    return read_task(name, root).splits


def read_task(name: str, root: str | Path, sizes: tuple[int, int] = SIZES) -> Opened:
    task = find_task(name)
    folder = Path(root) / task.folder
    if not folder.is_dir():
        raise Error(
            f"no folder {folder} with the files of {name}; docs/research/vtab.md lists what goes there",
            code="data.not-found",
        )
    hub = task.hub and is_hub(folder)
    raw = from_hub(folder) if hub else task.read(folder)
    order = "content" if hub else task.order
    for split, source in raw.items():
        if len(source.classes) != task.classes:
            raise Error(
                f"{folder}: {len(source.classes)} classes in {split}, but {name} has {task.classes}",
                code="data.classes",
            )
    counts = {split: len(source) for split, source in raw.items()}
    complete = all(counts.get(split) == images for split, images in task.images.items())
    return Opened(portions(raw, task, order, sizes), order, complete)


def is_hub(folder: Path) -> bool:
    """Whether a folder or one directly below contains .parquet files."""
    return any(True for pattern in ("*.parquet", "*/*.parquet") for _ in folder.glob(pattern))


def from_hub(folder: Path) -> dict[str, Source]:
    return {HUB.get(split, split): source for split, source in open_parquet(folder).items()}


def portions(
    raw: Mapping[str, Source], task: Task, order: str, sizes: tuple[int, int] = SIZES
) -> dict[str, Source]:
    """train[:800], the task's 200 val images and its test split; they must not overlap."""
    slices = {"train": (Slice("train"), sizes[0]), "val": (task.val, sizes[1]), "test": (task.test, None)}
    ordered: dict[str, Source] = {}
    sources, ranges = {}, []
    for name, (part, count) in slices.items():
        if part.split not in raw:
            raise Error(
                f"{task.name}: the files have no split {part.split!r}, only {', '.join(raw)}",
                code="data.empty",
            )
        if part.split not in ordered:
            source = raw[part.split]
            ordered[part.split] = source.take(in_order(part.split, source, order))
        source = ordered[part.split]
        start = part.start(len(source))
        stop = len(source) if count is None else start + count
        ranges.append((part.split, start, stop))
        if stop > len(source) or start >= stop or overlaps(ranges):
            needs = f"{sizes[0]} images for train, {sizes[1]} for val and others for test"
            raise Error(
                f"{task.name}: {len(source)} in {part.split!r} are too few for {needs}", code="data.empty"
            )
        sources[name] = replace(source.take(np.arange(start, stop)), name=task.name)
    return sources


def overlaps(ranges: Sequence[tuple[str, int, int]]) -> bool:
    """Whether the last range overlaps one before it."""
    split, start, stop = ranges[-1]
    return any(split == s and start < b and a < stop for s, a, b in ranges[:-1])


def in_order(split: str, source: Source, order: str) -> np.ndarray:
    """The indices of a split's images in an order that does not depend on folder listings."""
    if order == "content":
        return np.argsort(fingerprints(source), kind="stable")
    return published_order(split, (key.removeprefix(f"{split}/") for key in source.keys))


def published_order(split: str, keys: Iterable[str]) -> np.ndarray:
    """TensorFlow Datasets' order: by the MD5 of the split's name followed by an image's key."""
    salted = hashlib.md5(split.encode(), usedforsecurity=False)
    hashes = []
    for key in keys:
        digest = salted.copy()
        digest.update(key.encode("utf-8", "surrogateescape"))
        hashes.append(digest.digest())
    if len(set(hashes)) < len(hashes):
        raise Error(f"two images of {split!r} have the same key", code="data.layout")
    return np.array(sorted(range(len(hashes)), key=hashes.__getitem__), dtype=np.int64)


OPENER = Opener(
    description="vtab:TASK:ROOT",
    matches=lambda place: place.startswith("vtab:"),
    open=lambda place, cache: open_place(place),
    order=10,
)
