"""What the training and prediction verbs do: choose, say what was chosen, run, and tell the result."""

import csv as csv_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from vitkit.data.batches import BadFiles
from vitkit.data.doctor import examine
from vitkit.data.shards import shard as write_shards
from vitkit.data.sources import open_data
from vitkit.data.splits import same_classes
from vitkit.experiment.measure import evaluate as evaluate_model
from vitkit.experiment.run import MODEL
from vitkit.models.variants import Model
from vitkit.report.live import Live
from vitkit.report.terminal import print_table, say
from vitkit.serving.predict import find_images, predict_many
from vitkit.training.runtime import choose, data_workers
from vitkit.weights.load import load

Emit = Callable[[Any], None] | None
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
    return f"{found['top1']:.2%} of {found['images']} {images} right{five}"


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
    timer = Timer(after, lambda: None if quiet else print(text, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def split_row(row: dict[str, Any]) -> dict[str, Any]:
    spread = row["per_class"]
    fewest = {"fewest_in_a_class": spread["min"], "median": spread["median"], "most": spread["max"]}
    return {"images": row["images"], "classes": row["classes"]} | fewest


def load_model(place: str, device: str) -> Model:
    """A model file, a run folder or a published name, on its device."""
    folder = Path(place) / MODEL
    model = load(folder if folder.exists() else place)
    return model.to(choose(device, "fp32").device).eval()


def evaluate(
    place: str, data: str, split: str | None, batch: int, workers: int | None, device: str, emit: Emit
) -> None:
    model = load_model(place, device)
    splits = open_data(data)
    split = split or next((s for s in ("test", "val", "all", "train") if s in splits), "all")
    if split not in splits:
        raise ValueError(f"{data} has no split {split!r}, only {', '.join(splits)}")
    source = same_classes(splits[split], model.labels, data) if model.labels else splits[split]
    bad = BadFiles(1.0, lambda key, why: print(f"not used: {key}: {why}", file=sys.stderr))
    found = evaluate_model(model, source, batch, data_workers(workers), bad)
    facts = found.to_json(model.labels or source.classes) | {"split": split, "unusable": len(bad.found)}
    if emit:
        return emit(facts)
    rows = [{"class": name, **row} for name, row in facts["per_class"].items()]
    print_table(rows)
    say(in_short(facts, "images"))


def predict(place: str, images: tuple[str, ...], top: int, device: str, *, csv: bool, emit: Emit) -> bool:
    """Whether every image could be read; each is told when it is done, JSON at the end."""
    model = load_model(place, device)
    table = csv_module.writer(sys.stdout)
    if csv and not emit:
        table.writerow(("image", "label", "probability"))
    told, unread = [], 0
    for p in predict_many(model, find_images(images), top=top):
        if p.error:
            unread += 1
            print(f"not read: {p.image}: {p.error}", file=sys.stderr)
        if emit:
            told.append(p.to_json())
        elif csv:
            rows = p.top[: None if model.multilabel else 1] or [("", "")]
            table.writerows((p.image, *row) for row in rows)
            sys.stdout.flush()
        elif p.top:
            say(f"{p.image}: {', '.join(f'{label} {probability:.3f}' for label, probability in p.top)}")
    if emit:
        emit(told)
    return not unread


__all__ = ["doctor", "evaluate", "predict"]
