"""Images with a description of what is in them, of which a rule makes a label: CLEVR and KITTI."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.sources import Source
from vitkit.data.vtab.lists import Row, from_files, lines, need
from vitkit.errors import Error

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
