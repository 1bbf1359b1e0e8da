"""`vitkit predict`: labels of images as text, CSV or JSON, or images sorted into folders."""

import csv as csv_module
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vitkit.commands.answer_files import AnswerFiles, answer_files
from vitkit.commands.shared import Emit
from vitkit.data.decode import read
from vitkit.data.names import folded
from vitkit.errors import Error, similar_path
from vitkit.inference.predict import (
    BATCH,
    Classifier,
    Prediction,
    find_images,
    load_model,
    predict_many,
    with_merging,
)
from vitkit.inference.rejection import rejection_threshold
from vitkit.inference.zero_shot import zero_shot
from vitkit.io.files import naming
from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.models.vit import dropped
from vitkit.options import parse_view
from vitkit.report.terminal import UNKNOWN, UNSURE, console, csv_cell, print_table, printable, say, warn
from vitkit.tasks.task import Task, task_of
from vitkit.weights.locate import is_exported

if TYPE_CHECKING:
    from vitkit.inference.engines import Engine

LONGEST = 150  # bytes of a folder name, well below the limits of file systems
NOT_IN_NAMES = set('/\\<>:"|?*')  # invalid in file names on some file system


class Sorter:
    """Copies images to DIR/<label>/, DIR/unknown/ or DIR/unsure/; labels are made safe as folder names."""

    def __init__(self, folder: Path, labels: Iterable[str]):
        if folder.exists() and not folder.is_dir():
            raise Error(
                f"--sort-into {folder}: this is a file; expected a folder, existing or new",
                code="file.not-writable",
            )
        self.folder, self.names = folder, folder_names(labels)
        self.copied: Counter[str] = Counter()
        self.existing: Counter[str] = Counter()

    def add(self, image: str, label: str | None) -> Path:
        """Copy an image to its label's folder (None: unsure) unless it is already there; returns its path."""
        name = UNSURE if label is None else self.names[label]
        folder = self.folder / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise Error(
                f"{folder}: a file or a link, not a folder; remove it, or sort into another folder",
                code="file.not-writable",
            )
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path, new = copy_new(image, folder)
        (self.copied if new else self.existing)[name] += 1
        return path

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the summary table: one for each folder with images of this command."""
        names = sorted(self.copied.keys() | self.existing.keys(), key=lambda name: (name == UNSURE, name))
        columns = {"copied": self.copied} | ({"already there": self.existing} if self.existing else {})
        return [
            {"folder": str(self.folder / name)} | {title: counts[name] for title, counts in columns.items()}
            for name in names
        ]


def folder_names(labels: Iterable[str]) -> dict[str, str]:
    """A folder name for each label, unique even on case-insensitive file systems and never that of unsure."""
    names: dict[str, str] = {}
    used = {UNSURE}
    for number, label in enumerate(labels):
        name = folder_name(label)
        if folded(name) in used:
            name = f"{name} (class {number})"
        while folded(name) in used:
            name += "_"
        used.add(folded(name))
        names[label] = name
    return names


def folder_name(label: str) -> str:
    """A label as a safe folder name: no path separators, not hidden, not too long."""
    safe = "".join("_" if c in NOT_IN_NAMES or not c.isprintable() else c for c in label)
    short = safe.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")
    return short.strip(" .") or "_"


def copy_new(image: str, folder: Path) -> tuple[Path, bool]:
    """Copy an image into a folder without overwriting others; returns its path and whether it is new."""
    source, content = Path(image), read(image)
    for number in count(1):
        path = folder / (source.name if number == 1 else f"{source.stem}-{number}{source.suffix}")
        if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
            return path, False
        if not os.path.lexists(path) and write_new(path, content, source):
            return path, True
    raise AssertionError("unreachable: count() never ends")


def write_new(path: Path, content: bytes, like: Path) -> bool:
    """Write a file atomically with the times and mode of another; False if the path exists by now."""
    with naming(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
        try:
            with open(handle, "wb") as file:
                file.write(content)
            shutil.copystat(like, name)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # reserves the name
            os.replace(name, path)
            return True
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)


FEW = 64  # for up to this many images, choosing another engine does not pay off
UNLIMITED = 1 << 30  # columns of a file or pipe: one line per image


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
    reject: str | None = None,
    tta: str = "none",
    merge_tokens: int = 0,
    labels: tuple[str, ...] = (),
    template: tuple[str, ...] = (),
    files: Mapping[str, Path | None] = MappingProxyType({}),
) -> bool:
    """Print predictions one by one, or JSON at the end; returns whether every image could be read."""
    model = open_model(
        place, device, view, labels, template, engine=engine, calibrate=calibrate, merge_tokens=merge_tokens
    )
    if note := dropped(model.config):
        warn(note)
    reject_below = rejection_threshold(model, reject)
    check_unsure(task := task_of(model), unsure_below)
    sorter = sorter_for(model, sort_into) if sort_into else None
    names = find_images(images, outside=sort_into)
    written = answer_files(model, names, reject_below, **files)
    compute = engine_for(model, engine, len(names), calibrate)
    printer = Printer(len(names), csv=csv, task=task) if not emit else None
    rows, unread = [], 0
    for p in predict_many(model, names, top=top, engine=compute, reject_below=reject_below, tta=tta):
        unread += warn_skipped(p) if p.error else 0
        written.add(p)
        best = p.answer.best if p.answer else None
        unsure = best is not None and best[1] < (unsure_below or 0)
        row = p.to_json() | ({"unsure": unsure} if unsure_below is not None and best else {})
        if sorter and best:
            row["copied_to"] = str(sorter.add(p.image, None if unsure else best[0]))
        if printer:
            printer.show(p, unsure)
        else:
            rows.append(row)
    finish(rows, emit, written, quiet=bool(emit) or csv)
    if sorter:
        summarise(sorter, unread, quiet=bool(emit) or csv)
    return not unread


def finish(rows: list[dict[str, Any]], emit: Emit, written: AnswerFiles, *, quiet: bool) -> None:
    """Print the JSON, and which files were written; these to standard error if the output is for programs."""
    if emit:
        emit(rows)
    for line in written.finish():
        (warn if quiet else say)(line)


def check_unsure(task: Task, unsure_below: float | None) -> None:
    if unsure_below is not None and task.targets:
        raise Error(
            f"--unsure-below needs a classifier, not a model for {task.name}; omit it",
            code="request.conflict",
        )


def warn_skipped(prediction: Prediction) -> int:
    """Warn about an image without an answer; returns how many they are: one."""
    hint = similar_path(prediction.image)  # empty if the file exists
    warn(f"skipped: {printable(prediction.image)}: {prediction.error}{hint and f';{hint}'}")
    return 1


class Printer:
    """Prints each prediction to standard output as soon as it is computed."""

    def __init__(self, images: int, *, csv: bool, task: Task):
        screen = console()
        self.width = screen.width if screen.is_terminal else UNLIMITED
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
    """A CSV cell: text escaped against spreadsheet formulas, numbers unchanged."""
    return csv_cell(value) if isinstance(value, str) else value


def open_model(
    place: str,
    device: str,
    view: str,
    labels: tuple[str, ...] = (),
    template: tuple[str, ...] = (),
    *,
    engine: str,
    calibrate: tuple[str, ...],
    merge_tokens: int = 0,
) -> Classifier:
    """Load a model, or open an exported file, which runs on the CPU with its own runtime.

    labels, template: the classifier for these labels, of a model with a text tower.
    """
    if template and not labels:
        raise Error("--template needs --labels", code="request.conflict")
    if not is_exported(place):
        model = load_model(place, device, view, text=bool(labels))
        model = zero_shot(model, labels, template) if labels else model
        task_of(model).check_head(model)
        return with_merging(model, merge_tokens)
    if labels:
        raise Error(
            f"--labels: {place} is an exported file, without a text tower; use the original model",
            code="model.unsupported",
        )
    if device not in ("auto", "cpu"):
        raise Error(f"--device {device}: {place} runs on the CPU; omit --device", code="request.conflict")
    if engine != "auto" or calibrate:
        flag = "--calibrate" if calibrate else f"--engine {engine}"
        raise Error(
            f"{flag}: {place} is an exported file with its own runtime; omit {flag}",
            code="request.conflict",
        )
    from vitkit.inference.exported import open_exported

    exported = open_exported(place)
    task_of(exported).check_head(exported)
    preprocessing = with_view(exported.preprocessing, exported.config.image_size, *parse_view(view))
    return with_merging(replace(exported, preprocessing=preprocessing), merge_tokens)  # refuses any


def sorter_for(model: Classifier, folder: Path) -> Sorter:
    if model.task != "classify":
        kinds = {
            "multilabel": "several labels",
            "detect": "boxes",
            "segment": "a mask",
            "instances": "objects",
        }
        labels = kinds.get(model.task, "no label")
        raise Error(
            f"--sort-into {folder} needs one label per image, but this model predicts {labels}; use "
            "--json or --csv",
            code="request.conflict",
        )
    names = model.labels or tuple(map(str, range(model.config.classes)))
    return Sorter(folder, dict.fromkeys((*names, UNKNOWN)))


def summarise(sorter: Sorter, unread: int, *, quiet: bool) -> None:
    """Print how many images were copied; to standard error if standard output is JSON or CSV."""
    copied, existing = sorter.copied.total(), sorter.existing.total()
    text = f"{copied} image{'s' * (copied != 1)} copied into {sorter.folder}"
    text += f", {existing} already there" if existing else ""
    text += f", {unread} unreadable" if unread else ""
    if quiet:
        return warn(text)
    say(text)
    print_table(sorter.rows())


def engine_for(
    model: Classifier, name: str, work: int, calibrate: tuple[str, ...], batch: int = BATCH
) -> "Engine | None":
    """The inference engine; None for the model itself, which is used at once for a few images."""
    if name == "torch" or (name == "auto" and work <= FEW) or not isinstance(model, Model):
        return None
    from vitkit.inference.agreement import sample_images, warn_unread
    from vitkit.inference.engines import choose_engine

    samples = sample_images(model, 128, places=calibrate, unread=warn_unread) if calibrate else None
    engine = choose_engine(model, name, batch=batch, work=work, calibrate=samples, log=warn)
    warn(f"engine: {engine.name}{f' ({engine.note})' if engine.note else ''}")
    return engine
