"""What doctor and shard do, and what several verbs share."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from vitkit.data.doctor import examine
from vitkit.data.shards import shard as write_shards
from vitkit.data.sources import open_data
from vitkit.errors import Error
from vitkit.experiment.opened import load_model
from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.options import parse_view
from vitkit.report.terminal import Live, print_table, say, warn
from vitkit.training.runtime import data_workers

Emit = Callable[[Any], None] | None
STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def doctor(data: str, *, quick: bool = False, workers: int | None = None, emit: Emit = None) -> bool:
    """Whether nothing was found that would spoil a training."""
    with note_if_slow(f"listing the files of {data} ...", quiet=bool(emit)):
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
    say("nothing that would spoil a training" if report.ok else "correct the errors before training")
    return report.ok


def shard(data: str, out: Path, *, seed: int, emit: Emit) -> None:
    """Write shards, and print how many of what."""
    total = sum(len(part) for part in open_data(data).values())
    with Live("packing", total, quiet=bool(emit)) as live:
        facts = write_shards(data, out, seed=seed, workers=data_workers(None), advance=live.more)
    if emit:
        return emit(facts)
    for key, why in facts["left_out"].items():
        say(f"left out: {key}: {why}")
    say(f"{facts['images']} images in {facts['shards']} shards, {facts['bytes'] / 1e6:,.1f} MB, in {out}")


@contextmanager
def note_if_slow(text: str, *, after: float = 1.0, quiet: bool = False) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
    timer = Timer(after, lambda: None if quiet else warn(text))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def loaded(model: Model | str, device: str, view: str = "model") -> Model:
    """The model at a place on its device, or one that is loaded already, where it is; with this view."""
    if isinstance(model, str):
        return load_model(model, device, view)
    if device != "auto":
        raise Error(
            f"--device {device}: the model is loaded already and computes where it is; move it yourself with "
            "model.to(...), or give its file or folder",
            code="request.conflict",
        )
    if view == "model":
        return model
    other = copy.copy(model)  # the same parameters
    other.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return other


def split_row(row: dict[str, Any]) -> dict[str, Any]:
    sizes = row["per_class"]
    fewest = {"fewest_in_a_class": sizes["min"], "median": sizes["median"], "most": sizes["max"]}
    return {"images": row["images"], "classes": row["classes"]} | fewest
