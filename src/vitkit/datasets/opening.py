"""Open data from any place: a file, folder, address or the name of a data set; and convert it to shards."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.names import DATA_SUFFIXES, hidden
from vitkit.data.sources.archives import MEMBER_CHECKS
from vitkit.data.sources.index import INDEX, open_index
from vitkit.data.sources.openers import Cache, Opener, find_openers
from vitkit.data.sources.shard_folders import index_shards
from vitkit.data.sources.shards import Advance, write_shards
from vitkit.data.sources.source import Source
from vitkit.datasets import image_files, matlab, pixel_files
from vitkit.errors import Error, did_you_mean, similar_path
from vitkit.options import part_of

DEPTH = 3  # nested folders to look into, since unpacking often leaves a folder within a folder
PACKAGES = ("vitkit.data.sources", "vitkit.datasets")  # whose modules may define an OPENER
IMBALANCE = 100  # how many times as many images the largest class has as the smallest, if not given
SPLIT_NAMES = {"validation": "val"}  # published name to ours


@dataclass(frozen=True)
class Layout:
    """A published data set, recognised if all paths of any group exist; the path of a folder ends in "/"."""

    name: str
    paths: tuple[tuple[str, ...], ...]
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
    """The official splits of a public data set; None if the folder is not a known one."""
    if (match := find_layout(folder)) is None:
        return None
    root, layout = match
    splits = layout.read(root)
    return {SPLIT_NAMES.get(split, split): replace(part, name=folder.name) for split, part in splits.items()}


def find_layout(folder: Path) -> tuple[Path, Layout] | None:
    """The published layout of a folder, and the folder within it where the layout starts."""
    for root in nested(folder):
        if layout := recognise(partial(exists, root)):
            return root, layout
    return None


def refuse_published(path: Path, names: Iterable[str]) -> None:
    """Reject an archive of a published data set, whose labels can be read only after unpacking."""
    files = set(names)
    folders: set[str] = set()
    for folder in {name.rpartition("/")[0] for name in files}:
        parts = folder.split("/")
        folders |= {"/".join(parts[:depth]) + "/" for depth in range(1, len(parts) + 1)}

    def layout_below(prefix: str) -> Layout | None:
        return recognise(lambda name: prefix + name in (folders if name.endswith("/") else files))

    for prefix in ("", *(folder for folder in folders if folder.count("/") == 1)):
        if layout := layout_below(prefix):
            unpack = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
            raise Error(
                f"{path}: the published {layout.name} does not store its labels as folder names; unpack it "
                f"('{unpack} {path}') and use the folder",
                code="data.layout",
            )


def recognise(has: Callable[[str], bool]) -> Layout | None:
    """The first layout that is present, where `has` tells whether a path exists."""
    return next((layout for layout in LAYOUTS if any(all(map(has, group)) for group in layout.paths)), None)


def exists(root: Path, name: str) -> bool:
    return (root / name).is_dir() if name.endswith("/") else (root / name).is_file()


def nested(folder: Path) -> Iterable[Path]:
    """A folder and, as long as there is exactly one folder in it, that inner folder."""
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


def find_opener(place: str) -> Opener | None:
    """The first registered opener that matches a place."""
    return next((opener for opener in find_openers(*PACKAGES) if opener.matches(place)), None)


def expected_data() -> str:
    """What can be opened, for error messages."""
    return ", ".join(opener.description for opener in reversed(find_openers(*PACKAGES)))


def check_place(place: str) -> None:
    """Reject a place without data, before anything is opened."""
    if not place.strip():
        raise Error(f"the data is {place!r}, an empty name; expected {expected_data()}", code="request.value")
    if os.path.exists(place) or find_opener(place) is not None:
        return
    if not Path(place).exists():  # raises where a folder on the way is not readable
        hint = similar_path(place) or did_you_mean(place, ["digits", "shapes"])
        raise Error(f"no data at {place!r};{hint} expected {expected_data()}", code="data.not-found")


def data_and_part(text: str) -> tuple[str, dict[str, Any]]:
    """'DATA:PART' as the data and the recipe fields of the part, as in photos/:25/class,noise=0.2.

    The parts are those of --subset, imbalanced, and noise=SHARE. Text that ends in none is the data itself.
    """
    place, _, part = text.rpartition(":")
    fields: dict[str, Any] = {}
    try:
        for item in part.split(",") if place else ():
            name, _, share = item.partition("=")
            subset = f"imbalanced={IMBALANCE}" if item == "imbalanced" else item
            fields |= {"label_noise": float(share)} if name == "noise" else {"subset": subset}
        part_of(fields.get("subset", ""))
    except ValueError:
        return text, {}
    return (place, fields) if fields else (text, {})


def is_data_file(place: str) -> bool:
    """Whether a place that is not a folder is a data set, not an image."""
    if os.path.isdir(place):
        return False
    return Path(place).suffix.lower() in DATA_SUFFIXES or find_opener(place) is not None


def open_data(place: str | Path, *, cache: Cache | None = None) -> dict[str, Source]:
    """All splits of a data set by name; one without splits is under "all".

    place: an image folder, a public data set as published, a folder or http(s) address of shards, a .csv or
    .parquet manifest, .parquet files of images, a .zip or .tar of a folder, an .npz, "digits" or
    vtab:TASK:ROOT. cache: for downloads.
    """
    return opener_of(str(place)).open(str(place), cache)


def open_all(place: str | Path, *, cache: Cache | None = None) -> dict[str, Source]:
    """The same with the images that have no label, whose class number is -1."""
    opener = opener_of(str(place))
    return (opener.open_all or opener.open)(str(place), cache)


def opener_of(place: str) -> Opener:
    """The opener of a place; an error if nothing can open it."""
    check_place(place)
    opener = find_opener(place)
    if opener is None:
        raise Error(f"{place}: unknown kind of data; expected {expected_data()}", code="data.layout")
    return opener


MEMBER_CHECKS.append(refuse_published)
OPENER = Opener(
    description="a published data set",
    matches=lambda place: os.path.isdir(place) and find_layout(Path(place)) is not None,
    open=lambda place, cache: open_published(Path(place)) or {},
    order=80,  # after a folder of shards, before any other folder
)


def shard(
    data: str,
    out: Path,
    *,
    seed: int = 0,
    images: int | None = None,
    workers: int = 4,
    advance: Advance = lambda count: None,
) -> dict[str, Any]:
    """Write a data set as shards or, if `out` is the data itself, the index of its tar shards."""
    start_time = time.monotonic()
    if data and Path(data).is_dir() and Path(data).resolve() == out.resolve():
        left_out = index_shards(out, advance=advance)
    else:
        splits_here = open_data(data)
        if any(part.targets for part in splits_here.values()):
            raise Error(
                f"{data}: shards hold labels, not masks or boxes; use the folder, or a .zip of it, itself",
                code="data.layout",
            )
        left_out = write_shards(splits_here, out, seed=seed, images=images, workers=workers, advance=advance)
    splits = open_index(out / INDEX)[1]
    shards = [item for index in splits.values() for item in index.shards]
    return {
        "splits": {split: len(index) for split, index in splits.items()},
        "images": sum(map(len, splits.values())),
        "shards": len(shards),
        "bytes": sum(item.bytes for item in shards),
        "seconds": time.monotonic() - start_time,
        "left_out": left_out,
    }
