"""`vitkit evaluate`: choose the images, measure the model on them and print the metrics."""

from collections import Counter
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
from vitkit.datasets.opening import open_data
from vitkit.errors import Error
from vitkit.inference.predict import describe_view
from vitkit.inference.rejection import rejection_threshold
from vitkit.inference.tta import Tta
from vitkit.inference.zero_shot import zero_shot
from vitkit.metrics.classification import (
    Accuracy,
    accepted_classes,
    accuracy_with_rejection,
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
from vitkit.runs.corrections import as_in_run
from vitkit.runs.evaluation import evaluate as evaluate_model
from vitkit.runs.provenance.membership import USES, Chosen, by_use, choose_images, run_folder, use_words
from vitkit.runtime.runtime import Runtime, choose_runtime, data_workers
from vitkit.tasks.task import Task, task_of
from vitkit.weights.card import imagenet_labels, imagenet_synsets

UNNAMED = "the model"  # stands for a model object in messages, where a path would be
Say = Callable[[str], None]
PREDICTED = 10  # rows for classes without images that the model predicted


@dataclass(frozen=True)
class Evaluation:
    """The metrics as --json prints them, and notes for their interpretation."""

    facts: dict[str, Any]
    task: Task
    notes: tuple[str, ...]
    main: bool  # whether this is the main process, which prints


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of evaluate, by the names of its flags."""

    split: str | None = None
    batch: int = 32
    classes: str = ""  # table that maps classes of the data to labels of the model
    real: str = ""  # file of ReaL labels
    view: str = "model"
    tta: Tta = "none"
    merge_tokens: int = 0
    reject: str | None = None  # "model" or a probability, as --reject takes it
    labels: tuple[str, ...] | None = None  # zero-shot; without any, the classes of the data
    template: tuple[str, ...] = ()
    workers: int | None = None
    device: str = "auto"


def evaluate(place: str, data: str, options: EvaluateOptions, *, emit: Emit = None) -> None:
    """Measure the model and print or emit the metrics."""
    evaluation = measure(place, data, options, say=warn, quiet=bool(emit))
    if evaluation.main:
        emit(evaluation.facts) if emit else print_evaluation(evaluation.facts, evaluation.task)


def measure(
    model: Model | str, data: str, options: EvaluateOptions, *, say: Say, quiet: bool = True
) -> Evaluation:
    """Metrics of a model, or of the model at a path, on images that it was not trained on.

    say: called with each note. quiet: print nothing during long operations.
    """
    o, runtime = options, choose_runtime(options.device, "fp32")
    place = model if isinstance(model, str) else UNNAMED
    model = loaded(model, o.device, o.view, o.merge_tokens, text=o.labels is not None)
    named = {} if o.labels is None else with_names(open_data(data))
    if o.labels is not None:
        model = zero_shot_for(model, next(iter(named.values())), o)
    task = task_of(model)
    task.check_head(model)
    if task.targets:
        check_dense_options(task, o)
    reject_below = rejection_threshold(model, o.reject)
    check_label_files(task, o.classes, o.real)
    opened = as_in_run(named or open_for(task, data), data, run_folder(place))
    task.check_source(next(iter(opened.values())))
    with note_if_slow(f"comparing {data} with the training images ...", quiet=quiet):
        chosen = choose_images(place, data, opened, o.split)
    origin = chosen.warning or unknown_origin(place, data, model)
    notes = tuple(note for note in (dropped(model.config), origin) if note)
    for note in notes:
        if runtime.is_main:
            say(note)
    if chosen.whole.multilabel and (o.classes or o.real):
        raise Error(
            f"{data} has several labels per image; --classes and --real need one label per image",
            code="evaluation.unsupported",
        )
    facts = measure_chosen(task, model, data, chosen, o, runtime, say, reject_below)
    return Evaluation(facts, task, notes, runtime.is_main)


def zero_shot_for(model: Model, source: Source, options: EvaluateOptions) -> Model:
    """The classifier for the labels, or for the classes of the data; it has the task of the data."""
    new = zero_shot(model, options.labels or source.classes, options.template)
    new.task = new.task if source.multilabel else "classify"
    return new


def with_names(opened: dict[str, Source]) -> dict[str, Source]:
    """The data with the names of ImageNet's classes, where all its classes are WordNet numbers."""
    known = dict(zip((number for number, _ in imagenet_synsets()), imagenet_labels(), strict=True))
    return {
        split: replace(source, classes=tuple(known[name] for name in source.classes))
        if set(source.classes) <= set(known)
        else source
        for split, source in opened.items()
    }


def measure_chosen(
    task: Task,
    model: Model,
    data: str,
    chosen: Chosen,
    options: EvaluateOptions,
    runtime: Runtime,
    say: Say,
    reject_below: float | None = None,
) -> dict[str, Any]:
    """The metrics on the chosen images as one object."""
    source, accepted, selected = (
        match_classes(chosen.source, model, data, options.classes)
        if task.labelled
        else (chosen.source, None, slice(None))
    )
    numbers = chosen.numbers[selected]
    labels = read_real_labels(options.real, chosen.whole, model) if options.real else None
    bad = BadFiles(1.0, lambda key, why: say(f"skipped: {printable(key)}: {why}"))
    with runtime.process_group():
        workers = data_workers(options.workers)
        metrics = evaluate_model(
            task, model, source, options.batch, workers, bad, runtime, accepted, tta=options.tta
        )
        unusable = sum(runtime.all_gather_object(len(bad.reasons)))
    view = describe_view(model.preprocessing, model.config.image_size, options.tta)
    facts = metrics.to_json(source.classes) | {"split": chosen.split, "view": view, "unusable": unusable}
    accuracy = task.mistakes(metrics)
    facts |= uses_of(chosen, numbers, accuracy)
    if options.classes:
        facts["left_out"] = len(chosen.numbers) - len(numbers)
    if accuracy and accepted is None:
        add_predicted(facts, accuracy)
    if accuracy and reject_below is not None:
        facts["rejection"] = accuracy_with_rejection(accuracy, reject_below)
    if accuracy and labels is not None:
        index = torch.from_numpy(numbers)[accuracy.index]
        order = torch.tensor(official_order(model.labels, imagenet_synsets()) or range(accuracy.classes))
        facts["real"] = real_accuracy(order[accuracy.predicted], index, chosen.whole.keys, labels).to_json()
    return facts


def check_label_files(task: Task, classes: str, real: str) -> None:
    """Reject --classes and --real for a model that is not a single-label classifier."""
    if task.name != "classify" and (classes or real):
        raise Error(
            f"--classes and --real need a single-label classifier, not a model for {task.name}",
            code="evaluation.unsupported",
        )


def check_dense_options(task: Task, options: EvaluateOptions) -> None:
    """Reject the options that change the image as a whole, for a model that answers for parts of it."""
    unfit = {
        "--tta": options.tta != "none",
        "--merge-tokens": options.merge_tokens > 0,
        "--reject": options.reject is not None,
    }
    unfit["--view"] = options.view not in (
        ("model", "fit", "windows") if task.name == "segment" else ("model", "fit", "squash")
    )
    if flags := [flag for flag, given in unfit.items() if given]:
        raise Error(
            f"{' and '.join(flags)} cannot be used with a model for {task.name}, whose predictions are "
            "places in the image; omit it",
            code="evaluation.unsupported",
        )


def unknown_origin(place: str, data: str, model: Model) -> str:
    """The note for a model of vitkit outside of its run folder, whose training images are unknown."""
    if run_folder(place) is not None or model.origin.format != "vitkit":
        return ""
    return f"{place} is not in a run folder, so images of {data} may have been used to train it"


def uses_of(chosen: Chosen, numbers: np.ndarray, accuracy: Accuracy | None) -> dict[str, Any]:
    """How the run used the evaluated images, how many were left out, and the accuracy for each use."""
    if chosen.uses is None:
        return {"matched_by": None}
    uses = chosen.uses[numbers]
    kinds = by_use(uses)
    facts: dict[str, Any] = {"matched_by": chosen.matched_by, "counted": kinds}
    facts["not_counted"] = chosen.left_out
    if len(kinds) < 2 or accuracy is None:
        return facts
    evaluated = uses[accuracy.index.numpy()]
    parts = {use: accuracy.correct[torch.from_numpy(evaluated == use)] for use in kinds}
    facts["parts"] = {
        use: {"images": len(right), "top1": float(right.double().mean()), "interval": list(interval(right))}
        for use, right in parts.items() if len(right)
    }  # fmt: skip
    return facts


def add_predicted(facts: dict[str, Any], accuracy: Accuracy) -> None:
    """Add to each class how often it was predicted, correctly or not."""
    counts = accuracy.predicted.bincount(minlength=accuracy.classes).tolist()
    for row, count in zip(facts["per_class"].values(), counts, strict=True):
        row["predicted"] = count


def print_evaluation(facts: dict[str, Any], task: Task) -> None:
    tables = task.tables(facts)
    for table in tables:
        print_table(table.lines(), table.title, table.numbers)
        say("")
    if "per_class" in facts and not tables:
        print_table(class_rows(facts["per_class"]))
    if left_out := facts.get("not_counted"):
        say(f"left out: {use_words(left_out)} (--split all includes them)")
    if uses := facts.get("counted"):
        say(f"evaluated: {use_words(uses)}")
    if parts := facts.get("parts"):
        print_table({"these images": USES[use], "images": row["images"], **share_cells(row, "top1")}
                    for use, row in parts.items())  # fmt: skip
    kind = "images" if facts["split"] == "all" else f"{facts['split']} images"
    say(f"{task.summary(facts, kind)}; each {facts['view']}")
    if "rejection" in facts:
        say(rejection_text(facts["rejection"], facts["images"]))
    if "left_out" in facts:
        say(f"left out: {facts['left_out']} images of classes that are not in --classes")
    if "real" in facts:
        real = facts["real"]
        share = with_interval(real["accuracy"], real["images"]) if real["images"] else "none"
        say(f"ReaL labels: {share} of {real['images']} images correct; {real['left_out']} have no label")


def rejection_text(row: dict[str, Any], images: int) -> str:
    """One line about --reject: coverage, and accuracy on the accepted images."""
    text = f"accepted at {row['threshold']:.3g}: {percent(row['coverage'], images)} of the images"
    if row["accepted"]:
        text += f"; {with_interval(row['accuracy'], row['accepted'])} of them correct"
    return f"{text}; rejected {row['rejected_mistakes']} of {row['mistakes']} mistakes"


def share_cells(row: dict[str, Any], key: str) -> dict[str, str]:
    """An accuracy as the cells of a table."""
    if row[key] is None:
        return {"accuracy": "–", "95 % interval": "–"}
    return {
        "accuracy": percent(row[key], row["images"]),
        "95 % interval": span(row["interval"], row["images"]),
    }


def class_rows(per_class: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the classes with images, then of the other classes that were predicted, most frequent first."""
    if all("average_precision" in row for row in per_class.values()):
        return [{"class": name, **row} for name, row in per_class.items()]
    present = [name for name, row in per_class.items() if row["images"]]
    only_predicted = [name for name, row in per_class.items() if not row["images"] and row.get("predicted")]
    only_predicted.sort(key=lambda name: -per_class[name]["predicted"])
    rows = []
    for name in [*present, *only_predicted[:PREDICTED]]:
        row = per_class[name]
        predicted = {"predicted": row["predicted"]} if "predicted" in row else {}
        rows.append({"class": name, "images": row["images"], **share_cells(row, "accuracy"), **predicted})
    if others := only_predicted[PREDICTED:]:
        count = sum(per_class[name]["predicted"] for name in others)
        rows.append({"class": f"{len(others)} other classes", "images": 0,
                     **share_cells({"accuracy": None}, "accuracy"), "predicted": count})  # fmt: skip
    return rows


def match_classes(
    source: Source, model: Model, name: str, table: str
) -> tuple[Source, Tensor | None, np.ndarray | slice]:
    """The source with labels in the model's classes, or, with a table, in its own classes.

    Also returns the model classes accepted for each class of the table (else None), and the indices of the
    selected images, since a table may list only some classes.
    """
    synsets, labels = imagenet_synsets(), model.labels
    if not labels:  # unnamed classes: use their numbers, or the classes of the data in order
        digits = tuple(map(str, range(model.config.classes)))
        labels = digits if set(source.classes) <= set(digits) or table else source.classes
        if len(labels) != model.config.classes:
            raise Error(
                f"{name} has {len(source.classes)} classes, but the model has {model.config.classes} classes "
                "without names; add --classes with their numbers",
                code="evaluation.classes",
            )
    if table:
        rows = objectnet_table() if table == "objectnet" else read_table(read_text(table), table)
        accepted = accepted_classes(rows, source.classes, labels, synsets, table)
        listed = accepted.any(1).numpy()
        indices = np.flatnonzero(listed[source.labels])
        part = source.take(indices)
        classes = tuple(name for name, use in zip(source.classes, listed, strict=True) if use)
        relabelled = replace(part, classes=classes, labels=(listed.cumsum() - 1)[part.labels])
        return relabelled, accepted[listed], indices
    if twice := [label for label, times in Counter(labels).items() if times > 1]:
        raise Error(
            f"several outputs of the model have the label {twice[0]!r}, so predictions cannot be compared "
            "with classes by name; give each its own: vitkit.save(vitkit.load(MODEL, labels=[...]), FILE)",
            code="evaluation.classes",
        )
    if not set(source.classes) <= set(labels) and not source.multilabel:
        numbers = map_classes(source.classes, labels, synsets)
        if numbers is not None:
            return replace(source, classes=labels, labels=np.array(numbers)[source.labels]), None, slice(None)
    return same_classes(source, labels, name), None, slice(None)


def read_real_labels(path: str, source: Source, model: Model) -> list[list[int]]:
    labels = read_labels(read_text(path), path)
    check_labels(labels, len(source), model.config.classes, path)
    return labels


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise Error(f"{path}: not a UTF-8 text file", code="file.unreadable") from None
