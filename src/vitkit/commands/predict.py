"""vitkit predict: images to labels on a terminal, in a table, as JSON, or sorted into folders."""

import csv as csv_module
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.commands.shared import Emit
from vitkit.data.decode import read
from vitkit.data.names import folded
from vitkit.errors import Error
from vitkit.inference.predict import Classifier, Prediction, find_images, load_model, predict_many
from vitkit.io.files import naming
from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.models.vit import dropped
from vitkit.options import parse_view
from vitkit.report.terminal import UNSURE, console, csv_cell, print_table, printable, say, warn
from vitkit.tasks.task import Task, task_of
from vitkit.weights.locate import is_exported

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


FEW = 64  # images that are predicted sooner than another engine is looked for
ALWAYS = 1 << 30  # columns: a line for each image where no terminal wraps it


def predict(
    place: str,
    images: tuple[str, ...],
    top: int,
    device: str,
    *,
    csv: bool,
    emit: Emit,
    engine: str = "auto",
    calibrate: tuple[str, ...] = (),
    view: str = "model",
    unsure_below: float | None = None,
    sort_into: Path | None = None,
) -> bool:
    """Whether every image could be read; each is printed when it is done, JSON at the end."""
    model = open_model(place, device, view, engine=engine, calibrate=calibrate)
    if note := dropped(model.config):
        warn(note)
    task = task_of(model)
    task.check_head(model)
    sorter = sorter_for(model, sort_into) if sort_into else None
    names = find_images(images, outside=sort_into)
    compute = engine_for(model, engine, len(names), calibrate)
    written = Printer(len(names), csv=csv, task=task) if not emit else None
    rows, unread = [], 0
    for p in predict_many(model, names, top=top, engine=compute):
        if p.error:
            unread += 1
            warn(f"not read: {printable(p.image)}: {p.error}")
        best = p.answer.best if p.answer else None
        unsure = unsure_below is not None and best is not None and best[1] < unsure_below
        row = p.to_json() | ({"unsure": unsure} if unsure_below is not None and best else {})
        if sorter and best:
            row["copied_to"] = str(sorter.add(p.image, None if unsure else best[0]))
        if written:
            written.show(p, unsure)
        else:
            rows.append(row)
    if emit:
        emit(rows)
    if sorter:
        summarise(sorter, unread, quiet=bool(emit) or csv)
    return not unread


class Printer:
    """Predictions on standard output, each as soon as it is there."""

    def __init__(self, images: int, *, csv: bool, task: Task):
        screen = console()
        self.width = screen.width if screen.is_terminal else ALWAYS
        self.alone = images == 1 and screen.is_terminal
        self.table = csv_module.writer(sys.stdout) if csv else None
        self.columns = task.columns
        if self.table:
            self.table.writerow(("image", *self.columns))

    def show(self, p: Prediction, unsure: bool) -> None:
        if self.table:
            rows = p.answer.cells() if p.answer else [("",) * len(self.columns)]
            if unsure and p.answer and p.answer.best:
                rows = [(UNSURE, p.answer.best[1])]
            self.table.writerows((csv_cell(p.image), *map(cell, row)) for row in rows)
        elif p.answer:
            print(p.answer.text(p.image, unsure=unsure, width=self.width, alone=self.alone))
        sys.stdout.flush()


def cell(value: Any) -> Any:
    """A value of a table: a text that no spreadsheet takes for a formula, or a number as it is."""
    return csv_cell(value) if isinstance(value, str) else value


def open_model(place: str, device: str, view: str, *, engine: str, calibrate: tuple[str, ...]) -> Classifier:
    """The model at a place; a file of another runtime computes by itself, on the CPU."""
    if not is_exported(place):
        return load_model(place, device, view)
    if device not in ("auto", "cpu"):
        raise Error(
            f"--device {device}: {place} runs on the CPU; leave --device out", code="request.conflict"
        )
    if engine != "auto" or calibrate:
        flag = "--calibrate" if calibrate else f"--engine {engine}"
        raise Error(
            f"{flag}: {place} is an exported file and computes by itself; leave {flag} out",
            code="request.conflict",
        )
    from vitkit.inference.exported import open_exported

    model = open_exported(place)
    shown = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return replace(model, preprocessing=shown)


def sorter_for(model: Classifier, folder: Path) -> Sorter:
    if model.task != "classify":
        given = "several labels" if model.task == "multilabel" else "no label"
        raise Error(
            f"--sort-into {folder}: this model gives an image {given}, so no one folder is its own; "
            "use --json or --csv",
            code="request.conflict",
        )
    labels = model.labels or tuple(str(number) for number in range(model.config.classes))
    return Sorter(folder, labels)


def summarise(sorter: Sorter, unread: int, *, quiet: bool) -> None:
    """How many images went where; on standard error where standard output is for a program."""
    copied, there = sorter.copied.total(), sorter.there.total()
    text = f"{copied} image{'s' * (copied != 1)} copied into {sorter.folder}"
    text += f", {there} already there" if there else ""
    text += f", {unread} unreadable" if unread else ""
    if quiet:
        return warn(text)
    say(text)
    print_table(sorter.rows())


def engine_for(
    model: Classifier, how: str, work: int, calibrate: tuple[str, ...]
) -> Callable[[Tensor], Tensor] | None:
    """What computes the answers; None is the model itself, which a few images get at once."""
    if how == "torch" or (how == "auto" and work <= FEW) or not isinstance(model, Model):
        return None
    from vitkit.inference.agreement import sample_images, warn_unread
    from vitkit.inference.engines import choose_engine

    learned = sample_images(model, 128, places=calibrate, unread=warn_unread) if calibrate else None
    engine = choose_engine(model, how, work=work, calibrate=learned, log=warn)
    warn(f"engine: {engine.name}{f' ({engine.note})' if engine.note else ''}")
    return engine
