"""What doctor, shard and predict do, and what several verbs share."""

import csv as csv_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from torch import Tensor

from vitkit.data.doctor import examine
from vitkit.data.shards import shard as write_shards
from vitkit.data.sources import open_data
from vitkit.experiment.opened import load_model
from vitkit.models.variants import Model
from vitkit.models.vit import dropped
from vitkit.report.live import Live
from vitkit.report.terminal import print_table, printable, say, warn
from vitkit.serving.predict import check_head, find_images, predict_many
from vitkit.training.runtime import data_workers

Emit = Callable[[Any], None] | None
FEW = 64  # images that are predicted sooner than another engine is looked for
STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


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


def csv_cell(text: str) -> str:
    """Text that a spreadsheet shows and does not compute: an apostrophe before what begins like a formula."""
    return f"'{printable(text)}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else printable(text)


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
