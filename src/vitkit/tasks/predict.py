"""vitkit predict: images to labels on a terminal, in a table or as JSON, and sorted into folders."""

import csv as csv_module
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.errors import Error
from vitkit.experiment.opened import load_model
from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.models.vit import dropped
from vitkit.objectives.task import Task, task_of
from vitkit.options import parse_view
from vitkit.report.terminal import UNSURE, console, csv_cell, print_table, printable, say, warn
from vitkit.serving.predict import Classifier, Prediction, find_images, predict_many
from vitkit.tasks.sorting import Sorter
from vitkit.tasks.use import Emit
from vitkit.weights.locate import is_exported

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
    from vitkit.serving.exported import open_exported

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
    from vitkit.serving.engines import choose_engine
    from vitkit.serving.samples import sample_images, warn_unread

    learned = sample_images(model, 128, places=calibrate, unread=warn_unread) if calibrate else None
    engine = choose_engine(model, how, work=work, calibrate=learned, tell=warn)
    warn(f"engine: {engine.name}{f' ({engine.note})' if engine.note else ''}")
    return engine
