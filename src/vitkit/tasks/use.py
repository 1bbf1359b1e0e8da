"""What the training and prediction verbs do: choose, say what was chosen, run, and tell the result."""

import csv as csv_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.batches import BadFiles
from vitkit.data.doctor import examine
from vitkit.data.shards import shard as write_shards
from vitkit.data.sources import Source, open_data
from vitkit.data.splits import same_classes
from vitkit.evaluation.accuracy import Accuracy
from vitkit.evaluation.mapping import (
    accepted_classes,
    objectnet_table,
    official_order,
    read_table,
    translated,
)
from vitkit.evaluation.real import check_labels, read_labels, real_accuracy
from vitkit.experiment.measure import evaluate as evaluate_model
from vitkit.experiment.opened import load_model
from vitkit.models.variants import Model
from vitkit.models.vit import dropped
from vitkit.report.live import Live
from vitkit.report.terminal import csv_cell, print_table, printable, say, warn
from vitkit.serving.predict import check_head, find_images, predict_many, view_in_words
from vitkit.training.runtime import choose, data_workers
from vitkit.weights.labels import imagenet_synsets

Emit = Callable[[Any], None] | None
FEW = 64  # images that are predicted sooner than another engine is looked for
STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def in_short(found: dict[str, Any], images: str) -> str:
    """The result of an evaluation in a line."""
    if "mean_average_precision" in found:
        mean, exact, f1 = (found[k] or 0.0 for k in ("mean_average_precision", "exact_match", "f1"))
        return (
            f"mean average precision {mean:.2%}, F1 {f1:.2%} at 0.5, "
            f"every label right for {exact:.2%} of {found['images']} {images}"
        )
    five = f", top-5 {found['top5']:.2%}" if found["top5"] else ""
    return f"{share_in_words(found['top1'], found['interval'])} of {found['images']} {images} right{five}"


def share_in_words(share: float, interval: tuple[float, float]) -> str:
    """97.77% (95%: 96.10 to 99.16)."""
    low, high = (f"{100 * end:.2f}" for end in interval)
    return f"{share:.2%} (95%: {low} to {high})"


def doctor(data: str, *, quick: bool = False, workers: int | None = None, emit: Emit = None) -> bool:
    """Whether nothing was found that would spoil a training."""
    with told_if_slow(f"listing the files of {data} ...", quiet=bool(emit)):
        splits = open_data(data)
    total = sum(len(part) for part in splits.values())
    with Live("looking", total, quiet=bool(emit) or quick) as live:
        report = examine(splits, deep=not quick, workers=data_workers(workers), advance=live.more)
    if emit:
        emit(report.to_json())
        return report.ok
    print_table([{"split": name, **split_row(row)} for name, row in report.to_json()["splits"].items()])
    for finding in report.findings:
        say(f"{finding.severity}: {finding.text} {finding.remedy}", style=STYLES[finding.severity])
    say("nothing that would spoil a training" if report.ok else "mend the errors before training")
    return report.ok


def shard(data: str, out: Path, *, seed: int, emit: Emit) -> None:
    """Write shards, and tell how many of what."""
    total = sum(len(part) for part in open_data(data).values())
    with Live("packing", total, quiet=bool(emit)) as live:
        facts = write_shards(data, out, seed=seed, workers=data_workers(None), advance=live.more)
    if emit:
        return emit(facts)
    for key, why in facts["left_out"].items():
        say(f"left out: {key}: {why}")
    say(f"{facts['images']} images in {facts['shards']} shards, {facts['bytes'] / 1e6:,.1f} MB, in {out}")


@contextmanager
def told_if_slow(text: str, *, after: float = 1.0, quiet: bool = False) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
    timer = Timer(after, lambda: None if quiet else warn(text))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def split_row(row: dict[str, Any]) -> dict[str, Any]:
    spread = row["per_class"]
    fewest = {"fewest_in_a_class": spread["min"], "median": spread["median"], "most": spread["max"]}
    return {"images": row["images"], "classes": row["classes"]} | fewest


def evaluate(
    place: str,
    data: str,
    split: str | None,
    batch: int,
    workers: int | None,
    device: str,
    *,
    classes: str = "",
    real: str = "",
    view: str = "model",
    emit: Emit = None,
) -> None:
    """Measure and tell. classes: a table of the data's classes in the model's; real: reassessed labels."""
    runtime = choose(device, "fp32")
    model = load_model(place, device, view)
    if (note := dropped(model.config)) and runtime.main:
        warn(note)
    check_head(model)
    if model.multilabel and (classes or real):
        raise ValueError("--classes and --real are for models that tell one label of an image, not several")
    splits = open_data(data)
    split = split or next((s for s in ("test", "val", "all", "train") if s in splits), "all")
    if split not in splits:
        raise ValueError(f"{data} has no split {split!r}, only {', '.join(splits)}")
    if splits[split].multilabel and (classes or real):
        raise ValueError(f"{data}: several labels for each image; --classes and --real are for one")
    source, accepted = matched(splits[split], model, data, classes)
    left_out = len(splits[split]) - len(source)
    labels = reassessed(real, source, model) if real else None
    bad = BadFiles(1.0, lambda key, why: warn(f"not used: {printable(key)}: {why}"))
    with runtime.joined():
        found = evaluate_model(model, source, batch, data_workers(workers), bad, runtime, accepted)
        unusable = sum(runtime.everyones(len(bad.found)))
    shown = view_in_words(model.preprocessing, model.config.image_size)
    facts = found.to_json(source.classes) | {"split": split, "view": shown, "unusable": unusable}
    if classes:
        facts["left_out"] = left_out
    if labels is not None and isinstance(found, Accuracy):
        order = torch.tensor(official_order(model.labels, imagenet_synsets()) or range(model.config.classes))
        facts["real"] = real_accuracy(order[found.said], found.index, source.keys, labels).to_json()
    if runtime.main:
        emit(facts) if emit else tell_evaluation(facts)


def tell_evaluation(facts: dict[str, Any]) -> None:
    print_table([{"class": name, **row} for name, row in facts["per_class"].items()])
    say(f"{in_short(facts, 'images')}; each {facts['view']}")
    if "left_out" in facts:
        say(f"{facts['left_out']} images of classes that the model is not asked for were left out")
    if "real" in facts:
        again = facts["real"]
        share = share_in_words(again["accuracy"], again["interval"]) if again["images"] else "nothing"
        say(f"reassessed labels: {share} of {again['images']} images right, {again['left_out']} have none")


def matched(source: Source, model: Model, name: str, table: str) -> tuple[Source, Tensor | None]:
    """The source in the model's classes; by a table in its own, with those that are right for each."""
    synsets, labels = imagenet_synsets(), model.labels
    if not labels:  # what the model's classes are is not known: their numbers, or the data's in their order
        numbers = tuple(map(str, range(model.config.classes)))
        labels = numbers if set(source.classes) <= set(numbers) or table else source.classes
        if len(labels) != model.config.classes:
            told = f"{len(source.classes)} classes, and the model has {model.config.classes} without names"
            raise ValueError(f"{name} has {told}; give --classes with their numbers")
    if table:
        rows = objectnet_table() if table == "objectnet" else read_table(read_text(table), table)
        accepted = accepted_classes(rows, source.classes, labels, synsets, table)
        named = accepted.any(1).numpy()
        kept = source.take(np.flatnonzero(named[source.labels]))
        classes = tuple(kind for kind, there in zip(source.classes, named, strict=True) if there)
        return replace(kept, classes=classes, labels=(named.cumsum() - 1)[kept.labels]), accepted[named]
    if not set(source.classes) <= set(labels) and not source.multilabel:
        places = translated(source.classes, labels, synsets)
        if places is not None:
            return replace(source, classes=labels, labels=np.array(places)[source.labels]), None
    return same_classes(source, labels, name), None


def reassessed(path: str, source: Source, model: Model) -> list[list[int]]:
    labels = read_labels(read_text(path), path)
    check_labels(labels, len(source), model.config.classes, path)
    return labels


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text in UTF-8") from None


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
) -> bool:
    """Whether every image could be read; each is told when it is done, JSON at the end."""
    model = load_model(place, device, view)
    if note := dropped(model.config):
        warn(note)
    check_head(model)
    names = find_images(images)
    compute = engine_for(model, engine, len(names), calibrate)
    table = csv_module.writer(sys.stdout)
    if csv and not emit:
        table.writerow(("image", "label", "probability"))
    told, unread = [], 0
    for p in predict_many(model, names, top=top, engine=compute):
        if p.error:
            unread += 1
            warn(f"not read: {printable(p.image)}: {p.error}")
        if emit:
            told.append(p.to_json())
        elif csv:
            rows = p.top[: None if model.multilabel else 1] or [("", "")]
            table.writerows((csv_cell(p.image), csv_cell(label), chance) for label, chance in rows)
            sys.stdout.flush()
        elif p.top:
            said = ", ".join(f"{printable(label)} {probability:.3f}" for label, probability in p.top)
            say(f"{printable(p.image)}: {said}")
    if emit:
        emit(told)
    return not unread


def engine_for(
    model: Model, how: str, work: int, calibrate: tuple[str, ...]
) -> Callable[[Tensor], Tensor] | None:
    """What computes the answers; None is plain torch, which a few images get at once."""
    if how == "torch" or (how == "auto" and work <= FEW):
        return None
    from vitkit.serving.engines import choose_engine
    from vitkit.serving.samples import sample_images

    learned = sample_images(model, 128, places=calibrate) if calibrate else None
    engine = choose_engine(model, how, work=work, calibrate=learned, tell=warn)
    warn(f"engine: {engine.name}{f' ({engine.note})' if engine.note else ''}")
    return engine


__all__ = ["doctor", "evaluate", "predict"]
