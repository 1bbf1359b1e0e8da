"""Folders of image files, one folder per class, or of .parquet files."""

import os
import shlex
from pathlib import Path

from vitkit.data.content import Files
from vitkit.data.names import SUFFIXES
from vitkit.data.sources.index import INDEX
from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import Source, open_tree, open_unsorted, walk
from vitkit.data.sources.tables import open_parquet
from vitkit.errors import Error


def open_folder(path: Path, *, labelled: bool = True) -> dict[str, Source]:
    """The images in class folders or, where there are none, the .parquet files.

    labelled: False accepts images in any folders, without labels.
    """
    folders: list[str] = []
    names = sorted(walk(path, folders))
    suffixes = {os.path.splitext(name)[1].lower() for name in names}
    if suffixes.isdisjoint(SUFFIXES):
        if ".parquet" in suffixes:
            return open_parquet(path, labelled=labelled)
        if ".tar" in suffixes:
            command = shlex.join(["vitkit", "shard", str(path), str(path)])
            raise Error(
                f"{path}: tar shards without {INDEX}; this command writes it: {command}",
                code="data.layout",
            )
    files = Files(path)
    read = open_tree if labelled else open_unsorted
    return read(path.name or str(path), names, files.read, files.digest, size=files.size, folders=folders)


OPENER = Opener(
    description="a folder",
    matches=os.path.isdir,
    open=lambda place, cache: open_folder(Path(place)),
    open_all=lambda place, cache: open_folder(Path(place), labelled=False),
    order=90,  # the fallback for folders that no other source recognises
)
