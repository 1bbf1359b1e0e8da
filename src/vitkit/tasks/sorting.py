"""Copies of images in a folder for each label: nothing is overwritten, nothing is written elsewhere."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from vitkit.data.decode import read
from vitkit.data.names import folded
from vitkit.errors import Error
from vitkit.io.atomic import naming
from vitkit.report.terminal import UNSURE

LONGEST = 150  # bytes of a folder's name, well below what file systems take
NOT_IN_NAMES = set('/\\<>:"|?*')  # no part of a name here, or on the disks that photographs travel on


class Sorter:
    """DIR/<label>/ for every label and DIR/unsure/; a label that is no name for a folder gets a safe one."""

    def __init__(self, folder: Path, labels: Iterable[str]):
        if folder.exists() and not folder.is_dir():
            raise Error(
                f"--sort-into {folder}: a file; give a folder, or the name of a new one",
                code="file.not-writable",
            )
        self.folder, self.names = folder, folder_names(labels)
        self.copied: Counter[str] = Counter()
        self.there: Counter[str] = Counter()

    def add(self, image: str, label: str | None) -> Path:
        """Copy an image to its label's folder (None: unsure), unless it is there already; where it is now."""
        name = UNSURE if label is None else self.names[label]
        place = self.folder / name
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise Error(
                f"{place}: a file or a link, not a folder; remove it, or sort into another folder",
                code="file.not-writable",
            )
        with naming(place):
            place.mkdir(parents=True, exist_ok=True)
        path, new = copy_new(image, place)
        (self.copied if new else self.there)[name] += 1
        return path

    def rows(self) -> list[dict[str, Any]]:
        """A row for each folder with images of this time, as a table shows them."""
        names = sorted(self.copied.keys() | self.there.keys(), key=lambda name: (name == UNSURE, name))
        columns = {"copied": self.copied} | ({"already there": self.there} if self.there else {})
        return [
            {"folder": str(self.folder / name)} | {title: counts[name] for title, counts in columns.items()}
            for name in names
        ]


def folder_names(labels: Iterable[str]) -> dict[str, str]:
    """A name for the folder of each label: no two alike, even where case is ignored, and none is unsure's."""
    names: dict[str, str] = {}
    taken = {UNSURE}
    for number, label in enumerate(labels):
        name = folder_name(label)
        if folded(name) in taken:
            name = f"{name} (class {number})"
        while folded(name) in taken:
            name += "_"
        taken.add(folded(name))
        names[label] = name
    return names


def folder_name(label: str) -> str:
    """A label as the name of one folder, which leads nowhere and is not hidden."""
    safe = "".join("_" if c in NOT_IN_NAMES or not c.isprintable() else c for c in label)
    short = safe.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")
    return short.strip(" .") or "_"


def copy_new(image: str, folder: Path) -> tuple[Path, bool]:
    """The image's copy in a folder, and whether it is new; another image of that name stays as it is."""
    source, content = Path(image), read(image)
    for number in count(1):
        path = folder / (source.name if number == 1 else f"{source.stem}-{number}{source.suffix}")
        if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
            return path, False
        if not os.path.lexists(path) and write_new(path, content, source):
            return path, True
    raise AssertionError("there is always another number")


def write_new(path: Path, content: bytes, like: Path) -> bool:
    """Write a whole file with the times and rights of another; False where the name was taken meanwhile."""
    with naming(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
        try:
            with open(handle, "wb") as file:
                file.write(content)
            shutil.copystat(like, name)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # from here on the name is ours
            os.replace(name, path)
            return True
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
