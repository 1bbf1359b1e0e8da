"""The 19 tasks of VTAB-1k as a table: groups, classes, splits, label rules, and what BiT leaves out.

Splits are named as TensorFlow Datasets names them: train, validation, test.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.sources import Source
from vitkit.data.vtab import arrays, lists, matlab, scenes, tfrecord
from vitkit.errors import Error

GROUPS = {"Natural": 7, "Specialized": 4, "Structured": 8}  # and how many tasks are in each

Read = Callable[[Path], dict[str, Source]]


@dataclass(frozen=True)
class Slice:
    """A published split from some place on: the sum of these shares of it, each in whole images."""

    split: str
    after: tuple[int, ...] = ()  # percent

    def start(self, images: int) -> int:
        return sum(images * share // 100 for share in self.after)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task; `images` are the sizes of the published splits: with others, files are missing."""

    name: str
    group: str
    classes: int
    folder: str  # below the root; some tasks share their files
    read: Read
    val: Slice  # the first 200 images of it; train is always the first 800 of train
    test: Slice  # all of it
    images: Mapping[str, int]
    order: str = "tfds"  # or content: where the published order cannot be known
    hub: bool = False  # may also be a folder of Hugging Face's .parquet files, whose label is the task's
    flip: bool = True
    crop: bool = True
    differs: str = ""  # what the protocol's images are and those of the files are not


def splits(train: int, validation: int = 0, test: int = 0) -> dict[str, int]:
    found = {"train": train, "validation": validation, "test": test}
    return {name: images for name, images in found.items() if images}


AFTER = {share: Slice("train", (share,)) for share in (60, 80, 90)}
VALIDATION, TEST = Slice("validation"), Slice("test")
FIFTH = Slice("train", (60, 20))  # the last of five, counted as the protocol counts

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
    Task(name="caltech101", group="Natural", classes=102, folder="caltech101", read=lists.caltech101,
         val=AFTER[90], test=TEST, images=splits(3_060, test=6_084), order="content", hub=True,
         differs="other images of each class are to train on"),
    Task(name="cifar100", group="Natural", classes=100, folder="cifar100", read=arrays.cifar100,
         val=AFTER[90], test=TEST, images=splits(50_000, test=10_000), hub=True),
    Task(name="dtd", group="Natural", classes=47, folder="dtd", read=lists.dtd,
         val=VALIDATION, test=TEST, images=splits(1_880, 1_880, 1_880), hub=True),
    Task(name="flowers102", group="Natural", classes=102, folder="flowers102", read=matlab.flowers102,
         val=VALIDATION, test=TEST, images=splits(1_020, 1_020, 6_149), hub=True),
    Task(name="pets", group="Natural", classes=37, folder="pets", read=lists.pets,
         val=AFTER[80], test=TEST, images=splits(3_680, test=3_669), hub=True),
    Task(name="sun397", group="Natural", classes=397, folder="sun397", read=lists.sun397,
         val=VALIDATION, test=TEST, images=splits(76_128, 10_875, 21_750), hub=True,
         differs="not reduced to 120,000 pixels"),
    Task(name="svhn", group="Natural", classes=10, folder="svhn", read=matlab.svhn,
         val=AFTER[90], test=TEST, images=splits(73_257, test=26_032), hub=True),
)  # fmt: skip
SPECIALIZED = (
    Task(name="camelyon", group="Specialized", classes=2, folder="camelyon", read=arrays.camelyon,
         val=VALIDATION, test=TEST, images=splits(262_144, 32_768, 32_768), hub=True),
    Task(name="eurosat", group="Specialized", classes=10, folder="eurosat", read=lists.eurosat,
         val=AFTER[60], test=FIFTH, images=splits(27_000), hub=True),
    Task(name="resisc45", group="Specialized", classes=45, folder="resisc45", read=lists.resisc45,
         val=AFTER[60], test=FIFTH, images=splits(31_500), hub=True),
    Task(name="retinopathy", group="Specialized", classes=5, folder="retinopathy", read=lists.retinopathy,
         val=VALIDATION, test=TEST, images=splits(35_126, 10_906, 42_670),
         differs="as in the files, not prepared as btgraham-300"),
)  # fmt: skip
STRUCTURED = (
    Task(name="clevr-count", classes=8, read=partial(scenes.clevr, rule=scenes.count), **CLEVR),
    Task(name="clevr-distance", classes=6, read=partial(scenes.clevr, rule=scenes.nearest), **CLEVR),
    Task(name="dmlab", group="Structured", classes=6, folder="dmlab", read=tfrecord.dmlab,
         val=VALIDATION, test=TEST, images=splits(65_550, 22_628, 22_735), crop=False),
    Task(name="dsprites-location", read=partial(arrays.dsprites, rule="location"), crop=False, **DSPRITES),
    Task(name="dsprites-orientation", read=partial(arrays.dsprites, rule="orientation"), **DSPRITES),
    Task(name="kitti-distance", group="Structured", classes=4, folder="kitti", read=scenes.kitti,
         val=VALIDATION, test=TEST, images=splits(6_347, 423, 711), crop=False),
    Task(name="snorb-azimuth", classes=18, flip=False, read=partial(arrays.smallnorb, rule="azimuth"),
         **NORB),
    Task(name="snorb-elevation", classes=9, read=partial(arrays.smallnorb, rule="elevation"), **NORB),
)  # fmt: skip

TASKS = {task.name: task for task in (*NATURAL, *SPECIALIZED, *STRUCTURED)}


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise Error(f"no task {name!r} in VTAB-1k; its tasks are {', '.join(TASKS)}", code="request.unknown")
    return TASKS[name]
