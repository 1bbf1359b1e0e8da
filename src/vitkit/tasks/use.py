"""What doctor and shard do, and what several verbs share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from vitkit.data.doctor import examine
from vitkit.data.shards import shard as write_shards
from vitkit.data.sources import open_data
from vitkit.report.terminal import Live, print_table, say, warn
from vitkit.training.runtime import data_workers

Emit = Callable[[Any], None] | None
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
