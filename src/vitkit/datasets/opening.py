"""Data by its place: a folder, a file, an address or the name of a public data set; also as shards."""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.index import INDEX, open_index
from vitkit.data.remote import Cache, open_remote
from vitkit.data.shards import Advance, write_shards
from vitkit.data.shards_found import index_shards
from vitkit.data.sources import (
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
from vitkit.datasets.published import open_published, refuse_published
from vitkit.datasets.vtab import open_place as open_task
from vitkit.errors import Error


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
