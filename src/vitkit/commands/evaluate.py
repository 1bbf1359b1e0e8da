"""The evaluate verb: which images are counted, how many of them are right, and what is printed of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.commands.shared import Emit, loaded, note_if_slow
from vitkit.data.loader import BadFiles
from vitkit.data.sources.source import Source
from vitkit.data.splits import same_classes
from vitkit.errors import Error
from vitkit.inference.predict import describe_view
from vitkit.metrics.classification import (
    Accuracy,
    accepted_classes,
    check_labels,
    interval,
    map_classes,
    objectnet_table,
    official_order,
    read_labels,
    read_table,
    real_accuracy,
)
from vitkit.metrics.intervals import percent, span, with_interval
from vitkit.models.variants import Model
from vitkit.models.vit import dropped
from vitkit.report.terminal import print_table, printable, say, warn
from vitkit.runs.build import open_for
from vitkit.runs.evaluation import evaluate as evaluate_model
from vitkit.runs.provenance.membership import USES, Chosen, by_use, choose_images, run_folder, use_words
from vitkit.runtime.runtime import Runtime, choose_runtime, data_workers
from vitkit.tasks.task import Task, task_of
from vitkit.weights.card import imagenet_synsets

UNNAMED = "the model"  # one that is loaded already, in messages; there is no file of this name
Say = Callable[[str], None]
PREDICTED = 10  # classes that are in no image but were predicted, which are listed


@dataclass(frozen=True)
class Evaluation:
    """What was measured, as --json prints it, and what a reader of the numbers should know."""

    facts: dict[str, Any]
    task: Task
    notes: tuple[str, ...]
    main: bool  # whether this process speaks for all


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of evaluate, by the names of its flags."""

    split: str | None = None
    batch: int = 32
    classes: str = ""  # a table of the data's classes in the model's
    real: str = ""  # reassessed labels
    view: str = "model"
    workers: int | None = None
    device: str = "auto"


def evaluate(place: str, data: str, options: EvaluateOptions, *, emit: Emit = None) -> None:
    """The verb: measure and print."""
    done = measure(place, data, options, say=warn, quiet=bool(emit))
    if done.main:
        emit(done.facts) if emit else print_evaluation(done.facts, done.task)


def measure(
    model: Model | str, data: str, options: EvaluateOptions, *, say: Say, quiet: bool = True
) -> Evaluation:
    """Metrics of a model, or of the one at a place, on images that it was not trained on.

    say: gets a line for each thing to know. quiet: whether nothing is printed about long waits.
    """
    o, runtime = options, choose_runtime(options.device, "fp32")
    place = model if isinstance(model, str) else UNNAMED
    model = loaded(model, o.device, o.view)
    task = task_of(model)
    task.check_head(model)
    check_options(task, o.classes, o.real)
    opened = open_for(task, data)
    task.check_source(next(iter(opened.values())))
    with note_if_slow(f"comparing {data} with the images of the training ...", quiet=quiet):
        chosen = choose_images(place, data, opened, o.split)
    origin = chosen.warning or unknown_origin(place, data, model)
    notes = tuple(note for note in (dropped(model.config), origin) if note)
    for note in notes:
        if runtime.is_main:
            say(note)
    if chosen.whole.multilabel and (o.classes or o.real):
        raise Error(
            f"{data}: several labels for each image; --classes and --real are for one",
            code="evaluation.unsupported",
        )
    return Evaluation(counted(task, model, data, chosen, o, runtime, say), task, notes, runtime.is_main)


def counted(
    task: Task,
    model: Model,
    data: str,
    chosen: Chosen,
    options: EvaluateOptions,
    runtime: Runtime,
    say: Say,
) -> dict[str, Any]:
    """The chosen images, counted, as one object."""
    source, accepted, kept = (
        matched(chosen.source, model, data, options.classes)
        if task.labelled
        else (chosen.source, None, slice(None))
    )
    numbers = chosen.numbers[kept]
    labels = reassessed(options.real, chosen.whole, model) if options.real else None
    bad = BadFiles(1.0, lambda key, why: say(f"skipped: {printable(key)}: {why}"))
    with runtime.process_group():
        workers = data_workers(options.workers)
        metrics = evaluate_model(task, model, source, options.batch, workers, bad, runtime, accepted)
        unusable = sum(runtime.all_gather_object(len(bad.reasons)))
    view = describe_view(model.preprocessing, model.config.image_size)
    facts = metrics.to_json(source.classes) | {"split": chosen.split, "view": view, "unusable": unusable}
    right = task.mistakes(metrics)
    facts |= uses_of(chosen, numbers, right)
    if options.classes:
        facts["left_out"] = len(chosen.numbers) - len(numbers)
    if right and accepted is None:
        add_predicted(facts, right)
    if right and labels is not None:
        index = torch.from_numpy(numbers)[right.index]
        order = torch.tensor(official_order(model.labels, imagenet_synsets()) or range(right.classes))
        facts["real"] = real_accuracy(order[right.predicted], index, chosen.whole.keys, labels).to_json()
    return facts


def check_options(task: Task, classes: str, real: str) -> None:
    """Refuse tables of classes for a model that does not choose one of them."""
    if task.name != "classify" and (classes or real):
        raise Error(
            f"--classes and --real are for models that predict one label of an image, not for {task.name}",
            code="evaluation.unsupported",
        )


def unknown_origin(place: str, data: str, model: Model) -> str:
    """A line on a model that was trained by vitkit and moved out of its run folder."""
    if run_folder(place) is not None or model.origin.format != "vitkit":
        return ""
    return f"{place} is in no run folder: whether images of {data} trained it is not known"


def uses_of(chosen: Chosen, numbers: np.ndarray, found: Accuracy | None) -> dict[str, Any]:
    """What the counted images were to the run, how many were left out, and the accuracy of each kind."""
    if chosen.uses is None:
        return {"matched_by": None}
    uses = chosen.uses[numbers]
    kinds = by_use(uses)
    facts: dict[str, Any] = {"matched_by": chosen.matched_by, "counted": kinds}
    facts["not_counted"] = chosen.left_out
    if len(kinds) < 2 or found is None:
        return facts
    seen = uses[found.index.numpy()]
    parts = {use: found.correct[torch.from_numpy(seen == use)] for use in kinds}
    facts["parts"] = {
        use: {"images": len(right), "top1": float(right.double().mean()), "interval": list(interval(right))}
        for use, right in parts.items() if len(right)
    }  # fmt: skip
    return facts


def add_predicted(facts: dict[str, Any], found: Accuracy) -> None:
    """To each class how often it was predicted, right or wrong."""
    times = found.predicted.bincount(minlength=found.classes).tolist()
    for row, count in zip(facts["per_class"].values(), times, strict=True):
        row["predicted"] = count


def print_evaluation(facts: dict[str, Any], task: Task) -> None:
    if "per_class" in facts:
        print_table(class_rows(facts["per_class"]))
    if left := facts.get("not_counted"):
        say(f"left out: {use_words(left)} (--split all counts them too)")
    if used := facts.get("counted"):
        say(f"counted: {use_words(used)}")
    if parts := facts.get("parts"):
        print_table({"these images": USES[use], "images": row["images"], **share_cells(row, "top1")}
                    for use, row in parts.items())  # fmt: skip
    kind = "images" if facts["split"] == "all" else f"{facts['split']} images"
    say(f"{task.summary(facts, kind)}; each {facts['view']}")
    if "left_out" in facts:
        say(f"{facts['left_out']} images of classes that the model is not asked for were left out")
    if "real" in facts:
        again = facts["real"]
        share = with_interval(again["accuracy"], again["images"]) if again["images"] else "nothing"
        say(f"reassessed labels: {share} of {again['images']} images right, {again['left_out']} have none")


def share_cells(row: dict[str, Any], key: str) -> dict[str, str]:
    """An accuracy as the cells of a table."""
    if row[key] is None:
        return {"accuracy": "–", "95 % interval": "–"}
    return {
        "accuracy": percent(row[key], row["images"]),
        "95 % interval": span(row["interval"], row["images"]),
    }


def class_rows(per_class: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each class that has images, then for those that were only predicted, the most often first."""
    if all("average_precision" in row for row in per_class.values()):
        return [{"class": name, **row} for name, row in per_class.items()]
    there = [name for name, row in per_class.items() if row["images"]]
    only = [name for name, row in per_class.items() if not row["images"] and row.get("predicted")]
    only.sort(key=lambda name: -per_class[name]["predicted"])
    rows = []
    for name in [*there, *only[:PREDICTED]]:
        row = per_class[name]
        predicted = {"predicted": row["predicted"]} if "predicted" in row else {}
        rows.append({"class": name, "images": row["images"], **share_cells(row, "accuracy"), **predicted})
    if more := only[PREDICTED:]:
        times = sum(per_class[name]["predicted"] for name in more)
        rows.append({"class": f"{len(more)} other classes", "images": 0,
                     **share_cells({"accuracy": None}, "accuracy"), "predicted": times})  # fmt: skip
    return rows


def matched(
    source: Source, model: Model, name: str, table: str
) -> tuple[Source, Tensor | None, np.ndarray | slice]:
    """The source in the model's classes; by a table in its own, with those that are right for each.

    Last, which images of the source these are: a table may name some of its classes only.
    """
    synsets, labels = imagenet_synsets(), model.labels
    if not labels:  # what the model's classes are is not known: their numbers, or the data's in their order
        numbers = tuple(map(str, range(model.config.classes)))
        labels = numbers if set(source.classes) <= set(numbers) or table else source.classes
        if len(labels) != model.config.classes:
            raise Error(
                f"{name} has {len(source.classes)} classes, and the model has {model.config.classes} without "
                "names; give --classes with their numbers",
                code="evaluation.classes",
            )
    if table:
        rows = objectnet_table() if table == "objectnet" else read_table(read_text(table), table)
        accepted = accepted_classes(rows, source.classes, labels, synsets, table)
        named = accepted.any(1).numpy()
        chosen = np.flatnonzero(named[source.labels])
        kept = source.take(chosen)
        classes = tuple(kind for kind, there in zip(source.classes, named, strict=True) if there)
        renamed = replace(kept, classes=classes, labels=(named.cumsum() - 1)[kept.labels])
        return renamed, accepted[named], chosen
    if not set(source.classes) <= set(labels) and not source.multilabel:
        places = map_classes(source.classes, labels, synsets)
        if places is not None:
            return replace(source, classes=labels, labels=np.array(places)[source.labels]), None, slice(None)
    return same_classes(source, labels, name), None, slice(None)


def reassessed(path: str, source: Source, model: Model) -> list[list[int]]:
    labels = read_labels(read_text(path), path)
    check_labels(labels, len(source), model.config.classes, path)
    return labels


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise Error(f"{path}: not a text in UTF-8", code="file.unreadable") from None
