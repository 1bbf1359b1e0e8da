"""Data by its place: a folder, a file, an address or the name of a public data set; also as shards."""

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.names import hidden
from vitkit.data.sources.index import INDEX, open_index
from vitkit.data.sources.remote import Cache, open_remote
from vitkit.data.sources.shard_folders import index_shards
from vitkit.data.sources.shards import Advance, write_shards
from vitkit.data.sources.source import (
    Source,
    check_place,
    digits,
    open_archive,
    open_arrays,
    open_folder,
    open_manifest,
    open_parquet,
    open_shards,
)
from vitkit.datasets import image_files, matlab, pixel_files
from vitkit.datasets.vtab import open_place as open_task
from vitkit.errors import Error

DEPTH = 3  # folders that hold nothing but one folder, as unpacked archives have them
OURS = {"validation": "val"}


@dataclass(frozen=True)
class Layout:
    """A published data set; any one of the groups of `marks` is enough to know it. A folder ends in "/"."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    read: Callable[[Path], dict[str, Source]]


def pets(root: Path) -> dict[str, Source]:
    return image_files.from_files("pets", *image_files.pet_rows(root), root=root)


def flowers102(root: Path) -> dict[str, Source]:
    return image_files.from_files("flowers102", matlab.flower_rows(root), root=root)


def dtd(root: Path) -> dict[str, Source]:
    return image_files.from_files("dtd", image_files.dtd_rows(root), root=root)


def food101(root: Path) -> dict[str, Source]:
    return image_files.from_files("food101", *image_files.food_rows(root), root=root)


def cars(root: Path) -> dict[str, Source]:
    return image_files.from_files("cars", *matlab.car_rows(root), root=root)


LAYOUTS = (
    Layout("Oxford-IIIT Pets",
           (("images/", "annotations/trainval.txt"), ("images/", "annotations/trimaps/")), pets),
    Layout("Flowers-102",
           (("jpg/", "imagelabels.mat"), ("jpg/", "setid.mat"), ("jpg/image_00001.jpg",)), flowers102),
    Layout("CIFAR-10",
           (("data_batch_1.bin",), ("cifar-10-batches-bin/data_batch_1.bin",),
            ("data_batch_1", "batches.meta"), ("cifar-10-batches-py/data_batch_1",)), pixel_files.cifar10),
    Layout("CIFAR-100",
           (("train.bin", "test.bin"), ("cifar-100-binary/train.bin",),
            ("train", "test", "meta"), ("cifar-100-python/train",)), pixel_files.cifar100),
    Layout("Food-101", (("images/", "meta/train.txt"), ("images/", "meta/classes.txt")), food101),
    Layout("Stanford Cars",
           (("cars_train/", "devkit/cars_train_annos.mat"), ("cars_train/", "cars_test/")), cars),
    Layout("DTD", (("images/", "labels/train1.txt"),), dtd),
)  # fmt: skip


def open_published(folder: Path) -> dict[str, Source] | None:
    """The official splits of a public data set; None where the folder holds none that is known."""
    for root in nested(folder):
        if layout := recognise(partial(exists, root)):
            splits = layout.read(root)
            return {OURS.get(split, split): replace(part, name=folder.name) for split, part in splits.items()}
    return None


def refuse_published(path: Path, names: Iterable[str]) -> None:
    """Refuse an archive of such a folder: its lists and labels are read once it is unpacked."""
    files = set(names)
    folders: set[str] = set()
    for folder in {name.rpartition("/")[0] for name in files}:
        parts = folder.split("/")
        folders |= {"/".join(parts[:depth]) + "/" for depth in range(1, len(parts) + 1)}

    def known(prefix: str) -> Layout | None:
        return recognise(lambda mark: prefix + mark in (folders if mark.endswith("/") else files))

    for prefix in ("", *(folder for folder in folders if folder.count("/") == 1)):
        if layout := known(prefix):
            unpack = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
            raise Error(
                f"{path}: {layout.name} as published, whose labels are not the names of folders; unpack it "
                f"('{unpack} {path}') and give the folder",
                code="data.layout",
            )


def recognise(has: Callable[[str], bool]) -> Layout | None:
    return next((one for one in LAYOUTS if any(all(map(has, group)) for group in one.marks)), None)


def exists(root: Path, mark: str) -> bool:
    return (root / mark).is_dir() if mark.endswith("/") else (root / mark).is_file()


def nested(folder: Path) -> Iterable[Path]:
    """A folder and, as long as it holds one folder only, the one inside."""
    for _ in range(DEPTH):
        yield folder
        inner = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not hidden(entry.name) and entry.is_dir():
                    inner.append(entry.name)
                if len(inner) > 1:
                    break
        if len(inner) != 1:
            return
        folder = folder / inner[0]


def open_data(place: str | Path, *, cache: Cache | None = None) -> dict[str, Source]:
    """All splits of a data set by name; one without splits is under "all".

    place: an image folder, a public data set as published, a folder or http(s) address of shards, a .csv or
    .parquet manifest, .parquet files of images, a .zip or .tar of a folder, an .npz, "digits" or
    vtab:TASK:ROOT. cache: for what is fetched.
    """
    check_place(str(place))
    if str(place) == "digits":
        return {"all": digits()}
    if str(place).startswith("vtab:"):
        return open_task(str(place))
    if re.match(r"https?://", str(place)):
        return open_shards(str(place), *open_remote(str(place), cache or Cache()))
    path = Path(place)
    if path.is_dir():
        published = None if (path / INDEX).is_file() else open_published(path)
        return published or open_folder(path)
    archive = partial(open_archive, check=refuse_published)
    openers: dict[str, Callable[[Path], dict[str, Source]]] = {
        ".csv": open_manifest, ".parquet": open_parquet, ".npz": open_arrays,
        ".zip": archive, ".tar": archive,
    }  # fmt: skip
    opener = openers.get(path.suffix.lower())
    if opener is None:
        raise Error(
            f"{path}: not a kind of data that is read; known: .csv, .parquet, .zip, .tar, .npz",
            code="data.layout",
        )
    return opener(path)


def shard(
    data: str,
    out: Path,
    *,
    seed: int = 0,
    images: int | None = None,
    workers: int = 4,
    advance: Advance = lambda count: None,
) -> dict[str, Any]:
    """Shards of a data set in a folder or, for a folder of tar shards itself, their index; what was done."""
    began = time.monotonic()
    if data and Path(data).is_dir() and Path(data).resolve() == out.resolve():
        left_out = index_shards(out, advance=advance)
    else:
        left_out = write_shards(
            open_data(data), out, seed=seed, images=images, workers=workers, advance=advance
        )
    splits = open_index(out / INDEX)[1]
    shards = [one for index in splits.values() for one in index.shards]
    return {
        "splits": {split: len(index) for split, index in splits.items()},
        "images": sum(map(len, splits.values())),
        "shards": len(shards),
        "bytes": sum(one.bytes for one in shards),
        "seconds": time.monotonic() - began,
        "left_out": left_out,
    }
