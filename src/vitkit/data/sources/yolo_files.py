"""YOLO annotations: one .txt file of boxes or polygons for each image, and data.yaml."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitkit.data.findings import some
from vitkit.data.names import SPLITS, SUFFIXES
from vitkit.data.sources.annotation_tree import Note, Tree, path_parts, split_in, split_names
from vitkit.data.sources.box_tables import ObjectRows, box_source, polygon_area
from vitkit.data.sources.class_lists import find_list
from vitkit.data.sources.small_yaml import read_yaml
from vitkit.data.sources.source import Source
from vitkit.errors import Error

CONFIGS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
OTHER_TEXTS = {"classes", "readme", "notes", "train", "val", "valid", "test", "license"}
BEYOND = 0.01  # by which a share may be below 0 or above 1; further out it is no share
MOST_CLASSES = 100_000
DARKNET = {"obj_train_data": "train", "obj_valid_data": "val", "obj_test_data": "test"}
LINE = re.compile(r"\s*\d+(\s+-?[\d.]+(e-?\d+)?){4,}\s*", re.IGNORECASE)


def config_of(tree_names: Iterable[str]) -> str:
    """The data.yaml in the root; "" if there is none."""
    names = sorted(name for name in tree_names if name.count("/") == 0)
    return next((name for name in names if name.lower() in CONFIGS), "")


def label_files(names: Iterable[str]) -> list[str]:
    """The files that may hold boxes."""
    texts = [(name, name.rpartition("/")[2][:-4].lower()) for name in names if name.lower().endswith(".txt")]
    return [name for name, stem in texts if stem not in OTHER_TEXTS and not stem.startswith("readme")]


def is_label(text: str) -> bool:
    """Whether the first line of a file is a box."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and bool(LINE.fullmatch(lines[0].replace(",", " ")))


@dataclass(frozen=True)
class Setup:
    """Where the images of each split are, and the classes."""

    classes: list[str]
    splits: dict[str, list[str]]  # images by split
    absent: tuple[str, ...] = ()  # splits that data.yaml names and that are not there


def open_yolo(tree: Tree) -> dict[str, Source]:
    """The splits of a data set with .txt files."""
    config = config_of(tree.names)
    setup = from_yaml(tree, config) if config else from_folders(tree)
    listed = [images for images in setup.splits.values() if images]
    if not listed:
        raise Error(
            f"{tree.place}: no images; expected images/[train/]x.jpg beside labels/[train/]x.txt",
            code="data.empty",
        )
    known = set(label_files(tree.names))
    used: set[str] = set()
    sources = {}
    for split, images in setup.splits.items():
        files = [label_of(image, known) for image in images]
        used |= set(files)
        rows = ObjectRows()
        for file in files:
            for n, line in enumerate(tree.text(file).splitlines() if file else (), 1):
                if line.strip():
                    add_line(rows, line, len(setup.classes), f"{file}, line {n}", tree.place)
            rows.end_image()
        unpaired = tuple(image for image, file in zip(images, files, strict=True) if not file)
        notes = [Note("no-file", unpaired)] if unpaired else []
        sources[split] = box_source(tree, images, setup.classes, rows, relative=True, notes=notes)
    if not used - {""}:
        raise Error(
            f"{tree.place}: no image has a .txt file: {some(listed[0])}; images/1.jpg needs labels/1.txt, or "
            "a 1.txt beside it",
            code="data.layout",
        )
    stray = tuple(sorted(name for name in known - used if "/" in name))
    first = next(iter(sources.values())).targets
    assert first is not None
    reader: Any = first.read
    more = {"stray-annotations": stray, "absent-split": setup.absent}
    reader.notes += tuple(Note(kind, names) for kind, names in more.items() if names)
    return sources


def from_yaml(tree: Tree, config: str) -> Setup:
    """The splits and classes of a data.yaml."""
    where = f"{tree.place}, {config}"
    values = read_yaml(tree.text(config, 2**20), where, ("path", "nc", "names", "kpt_shape", *SPLITS))
    if values.get("kpt_shape"):
        raise Error(
            f"{where}: kpt_shape, so lines have keypoints after their boxes, which look like polygons; "
            "delete the keypoints and this key, or export boxes",
            code="data.labels",
        )
    classes = class_names(values, where)
    splits: dict[str, list[str]] = {}
    absent = []
    for key, split in SPLITS.items():
        if not (entries := values.get(key)):
            continue
        if split in splits:
            raise Error(f"{where}: two keys name the {split} split; keep one", code="data.layout")
        images: list[str] = []
        for entry in entries if isinstance(entries, list) else [entries]:
            images += images_at(tree, str(entry), str(values.get("path") or ""), where)
        if not images and split == "train":
            raise Error(
                f"{where}: {key} is {entries!r}, where no images are; write the folder of images, such as "
                "images/train, as seen from data.yaml",
                code="data.layout",
            )
        if images:
            splits[split] = sorted(set(images))
        else:
            absent.append(key)
    if not splits:
        raise Error(f"{where}: no train, val or test; name their folders", code="data.layout")
    return Setup(classes, splits, tuple(absent))


def class_names(values: Mapping[str, Any], where: str) -> list[str]:
    """The classes of data.yaml, by a list or by numbers."""
    names, count = values.get("names"), values.get("nc")
    if isinstance(names, dict):
        try:
            numbers = {int(key): str(name) for key, name in names.items()}
        except ValueError:
            numbers = {}
        if not numbers or sorted(numbers) != list(range(len(numbers))):
            raise Error(
                f"{where}: the numbers of names must be 0, 1, 2, ..., not {some([str(k) for k in names])}",
                code="data.classes",
            )
        names = [numbers[n] for n in range(len(numbers))]
    if not isinstance(names, list) or not names or len(names) > MOST_CLASSES:
        raise Error(f"{where}: names is missing; list the classes: names: [cat, dog]", code="data.classes")
    names = [str(name) for name in names]
    if len(set(names)) < len(names) or not all(names):
        raise Error(f"{where}: a name is empty or used twice in names", code="data.classes")
    if count is not None and str(count) != str(len(names)):
        raise Error(f"{where}: nc is {count}, but there are {len(names)} names", code="data.classes")
    return names


def images_at(tree: Tree, entry: str, root: str, where: str) -> list[str]:
    """The images of a folder, or of a list of them in a .txt file, that data.yaml names.

    Only files of this data set are used. Leading parts that lead elsewhere, such as ../ or the folder of
    another machine, are dropped until the rest is a path in it.
    """
    parts = path_parts(f"{root}/{entry}") if entry not in (".", "./") else []
    for start in range(len(parts) + 1):
        path = "/".join(parts[start:])
        if path in tree.files and path.lower().endswith(".txt"):
            return listed_images(tree, path)
        inside = [name for name in tree.images if name.startswith(f"{path}/")] if path else []
        if inside:
            return inside
    return list(tree.images) if not parts else []


def listed_images(tree: Tree, file: str) -> list[str]:
    """The images that a .txt file lists, one path per line."""
    images: list[str] = []
    missing: list[str] = []
    for line in tree.text(file).splitlines():
        if not line.strip():
            continue
        parts = path_parts(line)
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        image = next((tail for tail in tails if tail in tree.files and tail.lower().endswith(SUFFIXES)), None)
        (missing if image is None else images).append(line.strip() if image is None else image)
    if missing:
        raise Error(
            f"{tree.place}, {file}: {len(missing)} images are not there: {some(missing)}; copy them into the "
            "data set, or delete their lines",
            code="data.labels",
        )
    return images


def from_folders(tree: Tree) -> Setup:
    """The splits by folders, and the classes of classes.txt or obj.names."""
    listed = find_list(tree, ("obj.names", "classes.txt", "class_names.txt"))
    if listed is None:
        raise Error(
            f"{tree.place}: .txt files of boxes without a list of classes; write {tree.place}/data.yaml with "
            "'names: [cat, dog]' and 'train: images/train', or classes.txt with one name per line",
            code="data.classes",
        )
    split_names(tree.place, tree.images)
    splits: dict[str, list[str]] = {}
    for image in tree.images:
        darknet = next((DARKNET[part] for part in image.split("/") if part in DARKNET), "")
        splits.setdefault(darknet or split_in(image), []).append(image)
    names = [*listed.names]
    if listed.void:  # a list of objects has no pixels to ignore
        names = [
            line.strip() for line in tree.text(listed_file(tree, listed.file)).splitlines() if line.strip()
        ]
    return Setup(names, splits)


def listed_file(tree: Tree, where: str) -> str:
    return where.removeprefix(f"{tree.place}, ")


def label_of(image: str, known: set[str]) -> str:
    """The .txt file of an image: in labels/ instead of the last images/, or beside it; "" without one."""
    stem = image.rpartition(".")[0]
    before, folder, after = f"/{stem}".rpartition("/images/")
    swapped = f"{before}/labels/{after}".lstrip("/") if folder else stem
    return next((name for name in (f"{swapped}.txt", f"{stem}.txt") if name in known), "")


def add_line(rows: ObjectRows, line: str, classes: int, mark: str, place: str) -> None:
    """Add the object of one line: class cx cy w h, or class x1 y1 ... xn yn, as shares of the image."""
    where = f"{place}, {mark}"
    if "," in line:
        raise Error(f"{where}: commas in {line[:60]!r}; separate the numbers by spaces", code="data.labels")
    words = line.split()
    try:
        values = np.array([float(word) for word in words])
    except ValueError:
        values = np.array([np.nan])
    if not np.isfinite(values).all():
        raise Error(f"{where}: {line[:60]!r} is not a line of finite numbers", code="data.labels")
    if len(values) == 6:
        raise Error(
            f"{where}: 6 numbers; a box has 5, and the sixth of a prediction is a score: delete the column, "
            "and check whether these are predictions",
            code="data.labels",
        )
    if len(values) < 5 or len(values) % 2 == 0:
        raise Error(
            f"{where}: {len(values)} numbers; expected 5 (class, centre, width and height) or a class and 3 "
            "or more points",
            code="data.labels",
        )
    label = values[0]
    if label != int(label) or not 0 <= label < classes:
        hint = "; the numbers begin with 0, not with 1" if label == classes else ""
        raise Error(
            f"{where}: the class {words[0][:20]}, but there are {classes} classes, 0 to {classes - 1}{hint}: "
            "correct it, or the list of classes",
            code="data.labels",
        )
    shares = values[1:]
    if shares.min() < -BEYOND or shares.max() > 1 + BEYOND:
        worst = float(shares[np.abs(shares - 0.5).argmax()])
        raise Error(
            f"{where}: {worst:g} is no share of the image, from 0 to 1; divide pixels by width and height",
            code="data.labels",
        )
    if len(shares) == 4:
        x, y, w, h = shares.tolist()
        rows.add(mark, (x - w / 2, y - h / 2, x + w / 2, y + h / 2), int(label))
        return
    points = shares.reshape(-1, 2)
    box = (*points.min(0).tolist(), *points.max(0).tolist())
    rows.polygons[rows.add(mark, box, int(label), area=polygon_area(points))] = [points]
