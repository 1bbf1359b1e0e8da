"""Data sets of image files, labelled by folders, lists, tables or scenes: Caltech101, DTD, Pets, CLEVR."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import file_hash
from vitkit.data.decode import read
from vitkit.data.sources.source import Source, call_item
from vitkit.data.sources.tables import csv_rows
from vitkit.data.splits import by_class, fingerprints
from vitkit.errors import Error

PER_CLASS = 30  # training images per class of Caltech101
SUN = {"train": "sun397_tfds_tr.txt", "validation": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
FOLD = {"train": "train1.txt", "validation": "val1.txt", "test": "test1.txt"}  # the first of ten folds
Row = tuple[str, Path, str]  # key, file, class


def need(root: Path, *places: str) -> Path:
    """The first of these relative paths that exists."""
    for place in places:
        if (root / place).exists():
            return root / place
    raise Error(
        f"{root}: has no {' or '.join(places)}; docs/research/vtab.md and docs/guides/data.md list the "
        "expected files",
        code="file.not-found",
    )


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-empty lines of a text file with their line numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Error(
            f"{path}: expected a list of names, but it is not UTF-8 text", code="data.layout"
        ) from None
    return ((i, line.strip()) for i, line in enumerate(text.splitlines(), start=1) if line.strip())


def from_files(
    name: str, rows: Mapping[str, list[Row]], classes: Iterable[str] = (), root: Path | None = None
) -> dict[str, Source]:
    """The sources of each split; all have the same classes, as given or sorted by name.

    With a root, keys are file paths relative to it instead of the split and the row's key.
    """
    names = tuple(classes) or tuple(sorted({label for part in rows.values() for _, _, label in part}))
    number = {label: i for i, label in enumerate(names)}

    def source(split: str, part: list[Row]) -> Source:
        paths = [path for _, path, _ in part]
        labels = np.array([number[label] for _, _, label in part], dtype=np.int64)
        keys = [path.relative_to(root).as_posix() if root else f"{split}/{key}" for key, path, _ in part]
        fetch, digest = partial(call_item, read, paths), partial(call_item, file_hash, paths)
        return Source(name, names, keys, labels, fetch, digest=digest)

    empty = [split for split, part in rows.items() if not part]
    if empty:
        raise Error(f"{name}: no images for {', '.join(empty)}", code="data.empty")
    return {split: source(split, part) for split, part in rows.items()}


def by_folder(root: Path, suffix: str = ".jpg") -> Iterator[tuple[str, Path]]:
    """(class, file) for the files in class folders."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != "."):
        yield from ((folder.name, file) for file in sorted(folder.iterdir()) if file.suffix.lower() == suffix)


def caltech101(root: Path) -> dict[str, Source]:
    """The usual 30 training images for each of 102 classes, chosen by content, and the others for test."""
    inner = need(root, "101_ObjectCategories", "caltech-101/101_ObjectCategories", ".")
    rows = [(f"{label}/{file.name}", file, label.lower()) for label, file in by_folder(inner)]
    (everything,) = from_files("caltech101", {"all": rows}).values()
    hashes = fingerprints(everything)
    train = np.zeros(len(rows), dtype=bool)
    for members in by_class(everything):
        if len(members) <= PER_CLASS:
            label = everything.classes[everything.labels[members[0]]]
            raise Error(
                f"{inner}: only {len(members)} images of {label!r}; {PER_CLASS} are needed for train alone",
                code="data.empty",
            )
        train[members[np.argsort(hashes[members], kind="stable")[:PER_CLASS]]] = True
    parts = {"train": np.flatnonzero(train), "test": np.flatnonzero(~train)}
    return from_files("caltech101", {split: [rows[i] for i in part] for split, part in parts.items()})


def dtd(root: Path) -> dict[str, Source]:
    inner = need(root, "dtd", ".") if not (root / "labels").is_dir() else root
    return from_files("dtd", dtd_rows(inner))


def dtd_rows(root: Path) -> dict[str, list[Row]]:
    """Textures; the class is the folder of a file in the lists of the first fold."""
    rows = {}
    for split, file in FOLD.items():
        names = [name for _, name in lines(need(root, f"labels/{file}"))]
        rows[split] = [(name, root / "images" / name, name.rpartition("/")[0]) for name in names]
    return rows


def pets(root: Path) -> dict[str, Source]:
    return from_files("pets", *pet_rows(root))


def pet_rows(root: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """37 breeds; lists of name, class number from 1, species, and number within the species."""
    images = need(root, "images")
    rows: dict[str, list[Row]] = {}
    names: dict[int, str] = {}
    for split, file in {"train": "trainval.txt", "test": "test.txt"}.items():
        path, rows[split] = need(root, f"annotations/{file}"), []
        for number, line in lines(path):
            cells = line.split()
            if line.startswith("#"):
                continue
            if len(cells) != 4 or not cells[1].isdigit() or not int(cells[1]):
                raise Error(
                    f"{path}, line {number}: expected name, class, species, number, not {line!r}",
                    code="data.layout",
                )
            label = names.setdefault(int(cells[1]), cells[0].rpartition("_")[0])
            rows[split].append((f"{cells[0]}.jpg", images / f"{cells[0]}.jpg", label))
    return rows, [names[i] for i in sorted(names)]


def food_rows(root: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """101 dishes; lists of class/number without the file suffix."""
    rows: dict[str, list[Row]] = {}
    for split in ("train", "test"):
        path, rows[split] = need(root, f"meta/{split}.txt"), []
        for number, name in lines(path):
            label, slash, _ = name.partition("/")
            if not slash:
                raise Error(f"{path}, line {number}: expected class/image, not {name!r}", code="data.layout")
            rows[split].append((f"{name}.jpg", root / "images" / f"{name}.jpg", label))
    return rows, sorted({label for part in rows.values() for _, _, label in part})


def sun397(root: Path) -> dict[str, Source]:
    """Scenes; names in the three lists start with a slash, and their folder is the class."""
    images, rows = need(root, "SUN397"), {}
    for split, file in SUN.items():
        names = [f"/{name.lstrip('/')}" for _, name in lines(need(root, file))]
        rows[split] = [(name, images / name[1:], name.rpartition("/")[0]) for name in names]
    return from_files("sun397", rows)


def eurosat(root: Path) -> dict[str, Source]:
    """Satellite images of 64 pixels in class folders; the published keys include the class."""
    inner = need(root, "2750", "EuroSAT_RGB", "EuroSAT/2750", ".")
    rows = [(f"{label}_{file.name}", file, label) for label, file in by_folder(inner)]
    return from_files("eurosat", {"train": rows})


def resisc45(root: Path) -> dict[str, Source]:
    """Aerial images of 256 pixels in class folders."""
    inner = need(root, "NWPU-RESISC45", ".")
    rows = [(f"{label}_{file.name}", file, label) for label, file in by_folder(inner)]
    return from_files("resisc45", {"train": rows})


def retinopathy(root: Path) -> dict[str, Source]:
    """Retina images with a level from 0 to 4; Kaggle's public test images are the validation split."""
    rows: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    usage = {"Public": "validation", "Private": "test"}
    for file, folder in {"trainLabels.csv": "train", "retinopathy_solution.csv": "test"}.items():
        path, images = need(root, file), need(root, folder)
        columns = ("image", "level") + (("Usage",) if folder == "test" else ())
        for where, row in csv_rows(path, columns):
            split = usage.get(row["Usage"]) if folder == "test" else "train"
            if split is None or row["level"] not in tuple("01234"):
                raise Error(
                    f"{where}: expected a level from 0 to 4 and a usage of Public or Private",
                    code="data.labels",
                )
            rows[split].append((row["image"], images / f"{row['image']}.jpeg", row["level"]))
    return from_files("retinopathy", rows, "01234")


NEAREST = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # depths in CLEVR's pixel_coords
VEHICLES = ("Car", "Van", "Truck")
METRES = (-100.0, 8.0, 20.0, 999.0)
NO_VEHICLE = 1000.0
VIDEO_SEED, HELD_OUT = 123, 10  # percent of KITTI's videos for each of validation and test
Rule = tuple[Callable[[list[dict[str, Any]]], int], int]  # objects to label, and the number of classes


def interval(value: float, bounds: tuple[float, ...]) -> int:
    """The index of the last bound below a value, compared as float32 like in the protocol."""
    return int(np.searchsorted(np.array(bounds, np.float32), np.float32(value), side="left")) - 1


count: Rule = (lambda objects: len(objects) - 3, 8)  # a scene has 3 to 10 objects
nearest: Rule = (lambda objects: interval(min(o["pixel_coords"][2] for o in objects), NEAREST), 6)


@lru_cache(maxsize=4)
def scenes_of(path: Path, changed: int, rule: Rule) -> list[tuple[str, int]]:
    """(image, label) pairs of a scenes file; cached, since the file has hundreds of megabytes."""
    try:
        scenes = json.loads(path.read_bytes())["scenes"]
        return [(scene["image_filename"], rule[0](scene["objects"])) for scene in scenes]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Error(
            f"{path}: not a CLEVR scenes file, or truncated ({type(error).__name__}: {error})",
            code="data.corrupt",
        ) from None


def clevr(root: Path, rule: Rule) -> dict[str, Source]:
    """Rendered solids; the label is their number or the distance of the nearest."""
    inner = need(root, "CLEVR_v1.0") if (root / "CLEVR_v1.0").is_dir() else root
    rows: dict[str, list[Row]] = {}
    for split, word in {"train": "train", "validation": "val"}.items():
        path, images = need(inner, f"scenes/CLEVR_{word}_scenes.json"), need(inner, f"images/{word}")
        scenes = scenes_of(path, path.stat().st_mtime_ns, rule)
        invalid = next((name for name, label in scenes if not 0 <= label < rule[1]), None)
        if invalid:
            raise Error(
                f"{path}: the scene of {invalid!r} has a label outside 0..{rule[1] - 1}", code="data.labels"
            )
        rows[split] = [(name, images / name, str(label)) for name, label in scenes]
    return from_files("clevr", rows, map(str, range(rule[1])))


def kitti(root: Path) -> dict[str, Source]:
    """Street scenes; the distance of the nearest car, van or truck in four classes, the last being none."""
    images, labels = need(root, "training/image_2"), need(root, "training/label_2")
    rows: dict[str, list[Row]] = {}
    for split, numbers in by_video(root).items():
        names = [f"{number:06d}" for number in sorted(numbers)]
        depths = [nearest_vehicle(need(labels, f"{name}.txt")) for name in names]
        rows[split] = [
            (f"{name}.png", images / f"{name}.png", str(interval(depth, METRES)))
            for name, depth in zip(names, depths, strict=True)
        ]
    return from_files("kitti", rows, map(str, range(len(METRES))))


def nearest_vehicle(path: Path) -> float:
    """The smallest distance in metres of the vehicles in a label file."""
    depths = [NO_VEHICLE]
    for number, line in lines(path):
        cells = line.split(" ")
        try:
            depth = float(cells[13]) if len(cells) == 15 else None
        except ValueError:
            depth = None
        if depth is None:
            raise Error(
                f"{path}, line {number}: expected the 15 fields of an object, not {line!r}",
                code="data.layout",
            )
        depths += [depth] * (cells[0] in VEHICLES)
    return min(depths)


def by_video(root: Path) -> dict[str, list[int]]:
    """The numbers of the images of each split; no video is in two splits.

    Two lists of KITTI's development kit map labelled images to videos. A tenth of the videos is drawn for
    test, then a tenth for validation, exactly as TensorFlow Datasets does.
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
            f"{mapping}: train_rand.txt must contain line numbers of train_mapping.txt", code="data.layout"
        ) from None
    rng = np.random.RandomState(VIDEO_SEED)  # numpy guarantees its stream
    count = max(1, HELD_OUT * len(images) // 100)
    if len(images) < 3:
        raise Error(
            f"{mapping}: {len(images)} videos are too few for train, validation and test", code="data.empty"
        )
    test = set(rng.choice(sorted(images), count, replace=False).tolist())
    validation = set(rng.choice(sorted(set(images) - test), count, replace=False).tolist())
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for video, numbers in images.items():
        split = "test" if video in test else "validation" if video in validation else "train"
        splits[split] += numbers
    return splits
