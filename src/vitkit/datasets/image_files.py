"""Images as files, with classes by folder, list, table or scene: Caltech101, DTD, Pets, CLEVR and others."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import file_hash
from vitkit.data.decode import read
from vitkit.data.sources.source import Source
from vitkit.data.sources.tables import csv_rows
from vitkit.data.splits import by_class, fingerprints
from vitkit.errors import Error

PER_CLASS = 30  # training images of each class of Caltech101
SUN = {"train": "sun397_tfds_tr.txt", "validation": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
FOLD = {"train": "train1.txt", "validation": "val1.txt", "test": "test1.txt"}  # the first of ten
Row = tuple[str, Path, str]  # key, file, class


def need(root: Path, *places: str) -> Path:
    """The first of these places that exists."""
    for place in places:
        if (root / place).exists():
            return root / place
    raise Error(
        f"{root}: has no {' or '.join(places)}; docs/vtab.md and docs/data.md list what goes there",
        code="file.not-found",
    )


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a list that are not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Error(f"{path}: not a list of names, since it is not text", code="data.layout") from None
    return ((i, line.strip()) for i, line in enumerate(text.splitlines(), start=1) if line.strip())


def from_files(
    name: str, rows: Mapping[str, list[Row]], classes: Iterable[str] = (), root: Path | None = None
) -> dict[str, Source]:
    """Sources of files by split; all splits have all classes, in the order given or that of their names.

    With a root, keys are the files' places below it instead of the split and the row's key.
    """
    known = tuple(classes) or tuple(sorted({label for part in rows.values() for _, _, label in part}))
    number = {label: i for i, label in enumerate(known)}

    def source(split: str, part: list[Row]) -> Source:
        paths = [path for _, path, _ in part]
        labels = np.array([number[label] for _, _, label in part], dtype=np.int64)
        keys = [path.relative_to(root).as_posix() if root else f"{split}/{key}" for key, path, _ in part]
        fetch, digest = (lambda i: read(paths[i])), (lambda i: file_hash(paths[i]))
        return Source(name, known, keys, labels, fetch, digest=digest)

    empty = [split for split, part in rows.items() if not part]
    if empty:
        raise Error(f"{name}: no images for {', '.join(empty)}", code="data.empty")
    return {split: source(split, part) for split, part in rows.items()}


def by_folder(root: Path, suffix: str = ".jpg") -> Iterator[tuple[str, Path]]:
    """(class, file) for the files in the folders of a folder."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != "."):
        yield from ((folder.name, file) for file in sorted(folder.iterdir()) if file.suffix.lower() == suffix)


def caltech101(root: Path) -> dict[str, Source]:
    """30 images of each of 102 classes to train on, as is usual, the others to test; chosen by content."""
    inner = need(root, "101_ObjectCategories", "caltech-101/101_ObjectCategories", ".")
    rows = [(f"{label}/{file.name}", file, label.lower()) for label, file in by_folder(inner)]
    (everything,) = from_files("caltech101", {"all": rows}).values()
    marks = fingerprints(everything)
    chosen = np.zeros(len(rows), dtype=bool)
    for members in by_class(everything):
        if len(members) <= PER_CLASS:
            few = everything.classes[everything.labels[members[0]]]
            raise Error(
                f"{inner}: only {len(members)} images of {few!r}; {PER_CLASS} are needed for train alone",
                code="data.empty",
            )
        chosen[members[np.argsort(marks[members], kind="stable")[:PER_CLASS]]] = True
    parts = {"train": np.flatnonzero(chosen), "test": np.flatnonzero(~chosen)}
    return from_files("caltech101", {split: [rows[i] for i in part] for split, part in parts.items()})


def dtd(root: Path) -> dict[str, Source]:
    inner = need(root, "dtd", ".") if not (root / "labels").is_dir() else root
    return from_files("dtd", dtd_rows(inner))


def dtd_rows(root: Path) -> dict[str, list[Row]]:
    """Textures; a file's folder in the lists of the first fold is its class."""
    found = {}
    for split, listed in FOLD.items():
        names = [name for _, name in lines(need(root, f"labels/{listed}"))]
        found[split] = [(name, root / "images" / name, name.rpartition("/")[0]) for name in names]
    return found


def pets(root: Path) -> dict[str, Source]:
    return from_files("pets", *pet_rows(root))


def pet_rows(root: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """37 breeds; lists of name, class from 1, species and number within the species."""
    images = need(root, "images")
    found: dict[str, list[Row]] = {}
    names: dict[int, str] = {}
    for split, listed in {"train": "trainval.txt", "test": "test.txt"}.items():
        path, found[split] = need(root, f"annotations/{listed}"), []
        for number, line in lines(path):
            cells = line.split()
            if line.startswith("#"):
                continue
            if len(cells) != 4 or not cells[1].isdigit() or not int(cells[1]):
                raise Error(
                    f"{path}, line {number}: not name, class, species, number: {line!r}", code="data.layout"
                )
            label = names.setdefault(int(cells[1]), cells[0].rpartition("_")[0])
            found[split].append((f"{cells[0]}.jpg", images / f"{cells[0]}.jpg", label))
    return found, [names[i] for i in sorted(names)]


def food_rows(root: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """101 dishes; lists of class/number without the ending of the file."""
    found: dict[str, list[Row]] = {}
    for split in ("train", "test"):
        path, found[split] = need(root, f"meta/{split}.txt"), []
        for number, name in lines(path):
            label, slash, _ = name.partition("/")
            if not slash:
                raise Error(f"{path}, line {number}: not class/image: {name!r}", code="data.layout")
            found[split].append((f"{name}.jpg", root / "images" / f"{name}.jpg", label))
    return found, sorted({label for part in found.values() for _, _, label in part})


def sun397(root: Path) -> dict[str, Source]:
    """Scenes; names in the three lists begin with a slash, and their folders are the class."""
    images, found = need(root, "SUN397"), {}
    for split, listed in SUN.items():
        names = [f"/{name.lstrip('/')}" for _, name in lines(need(root, listed))]
        found[split] = [(name, images / name[1:], name.rpartition("/")[0]) for name in names]
    return from_files("sun397", found)


def eurosat(root: Path) -> dict[str, Source]:
    """Satellite images of 64 pixels, in folders by class and with the class in their names too."""
    inner = need(root, "2750", "EuroSAT_RGB", "EuroSAT/2750", ".")
    rows = [(f"{label}_{file.name}", file, label) for label, file in by_folder(inner)]
    return from_files("eurosat", {"train": rows})


def resisc45(root: Path) -> dict[str, Source]:
    """Aerial images of 256 pixels in folders by class."""
    inner = need(root, "NWPU-RESISC45", ".")
    rows = [(f"{label}_{file.name}", file, label) for label, file in by_folder(inner)]
    return from_files("resisc45", {"train": rows})


def retinopathy(root: Path) -> dict[str, Source]:
    """Eyes with a level from 0 to 4; of Kaggle's test images, the public ones are to validate on."""
    found: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    usage = {"Public": "validation", "Private": "test"}
    for listed, folder in {"trainLabels.csv": "train", "retinopathy_solution.csv": "test"}.items():
        path, images = need(root, listed), need(root, folder)
        wanted = ("image", "level") + (("Usage",) if folder == "test" else ())
        for where, row in csv_rows(path, wanted):
            split = usage.get(row["Usage"]) if folder == "test" else "train"
            if split is None or row["level"] not in tuple("01234"):
                raise Error(f"{where}: not a level from 0 to 4, or its usage", code="data.labels")
            found[split].append((row["image"], images / f"{row['image']}.jpeg", row["level"]))
    return from_files("retinopathy", found, "01234")


NEAREST = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # depths in CLEVR's pixel_coords
VEHICLES = ("Car", "Van", "Truck")
METRES = (-100.0, 8.0, 20.0, 999.0)
NO_VEHICLE = 1000.0
VIDEO_SEED, HELD_OUT = 123, 10  # KITTI's held-out videos, in percent for each of validation and test
Rule = tuple[Callable[[list[dict[str, Any]]], int], int]  # objects to label, and the number of classes


def interval(value: float, bounds: tuple[float, ...]) -> int:
    """The number of the last bound below a value, both as float32, in which the protocol compares."""
    return int(np.searchsorted(np.array(bounds, np.float32), np.float32(value), side="left")) - 1


count: Rule = (lambda objects: len(objects) - 3, 8)  # a scene has 3 to 10 objects
nearest: Rule = (lambda objects: interval(min(o["pixel_coords"][2] for o in objects), NEAREST), 6)


@lru_cache(maxsize=4)
def scenes_of(path: Path, changed: int, rule: Rule) -> list[tuple[str, int]]:
    """(image, label) of a file of scenes; only these are kept of its hundred megabytes."""
    try:
        found = json.loads(path.read_bytes())["scenes"]
        return [(scene["image_filename"], rule[0](scene["objects"])) for scene in found]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Error(
            f"{path}: not a file of CLEVR's scenes, or cut off ({type(error).__name__}: {error})",
            code="data.corrupt",
        ) from None


def clevr(root: Path, rule: Rule) -> dict[str, Source]:
    """Rendered solids: how many there are, or how far the nearest is."""
    inner = need(root, "CLEVR_v1.0") if (root / "CLEVR_v1.0").is_dir() else root
    found: dict[str, list[Row]] = {}
    for split, word in {"train": "train", "validation": "val"}.items():
        path, images = need(inner, f"scenes/CLEVR_{word}_scenes.json"), need(inner, f"images/{word}")
        scenes = scenes_of(path, path.stat().st_mtime_ns, rule)
        strange = next((name for name, label in scenes if not 0 <= label < rule[1]), None)
        if strange:
            raise Error(
                f"{path}: the scene of {strange!r} has a label out of 0..{rule[1] - 1}", code="data.labels"
            )
        found[split] = [(name, images / name, str(label)) for name, label in scenes]
    return from_files("clevr", found, map(str, range(rule[1])))


def kitti(root: Path) -> dict[str, Source]:
    """Streets: how far the nearest car, van or truck is, of four classes; the last is that there is none."""
    images, labels = need(root, "training/image_2"), need(root, "training/label_2")
    found: dict[str, list[Row]] = {}
    for split, numbers in by_video(root).items():
        names = [f"{number:06d}" for number in sorted(numbers)]
        depths = [nearest_vehicle(need(labels, f"{name}.txt")) for name in names]
        found[split] = [
            (f"{name}.png", images / f"{name}.png", str(interval(depth, METRES)))
            for name, depth in zip(names, depths, strict=True)
        ]
    return from_files("kitti", found, map(str, range(len(METRES))))


def nearest_vehicle(path: Path) -> float:
    """The least z, in metres in front of the camera, of the vehicles that a label file names."""
    depths = [NO_VEHICLE]
    for number, line in lines(path):
        cells = line.split(" ")
        try:
            depth = float(cells[13]) if len(cells) == 15 else None
        except ValueError:
            depth = None
        if depth is None:
            raise Error(
                f"{path}, line {number}: not the 15 fields of an object: {line!r}", code="data.layout"
            )
        depths += [depth] * (cells[0] in VEHICLES)
    return min(depths)


def by_video(root: Path) -> dict[str, list[int]]:
    """The numbers of the images of each split; no video is in two of them.

    The labelled images of KITTI come from videos, by two lists of its development kit. A tenth of the videos
    is drawn for test, then a tenth for validation, as TensorFlow Datasets draws them.
    """
    mapping = need(root, "mapping", "devkit_object/mapping", "devkit/mapping")
    videos = dict(enumerate((line.split(" ") for _, line in lines(need(mapping, "train_mapping.txt"))), 1))
    text = "".join(line for _, line in lines(need(mapping, "train_rand.txt")))
    images: dict[str, list[int]] = {}
    try:
        for image, line in enumerate(map(int, text.split(","))):
            images.setdefault(videos[line][1], []).append(image)
    except (ValueError, LookupError):
        raise Error(
            f"{mapping}: train_rand.txt must number lines of train_mapping.txt", code="data.layout"
        ) from None
    draw = np.random.RandomState(VIDEO_SEED)  # whose stream numpy keeps as it is
    held = max(1, HELD_OUT * len(images) // 100)
    if len(images) < 3:
        raise Error(
            f"{mapping}: {len(images)} videos are too few for train, validation and test", code="data.empty"
        )
    test = set(draw.choice(sorted(images), held, replace=False).tolist())
    validation = set(draw.choice(sorted(set(images) - test), held, replace=False).tolist())
    found: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for video, numbers in images.items():
        split = "test" if video in test else "validation" if video in validation else "train"
        found[split] += numbers
    return found
