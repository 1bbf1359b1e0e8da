"""A run folder to its page: whatever of its files is there, and what may be typed next."""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitkit.errors import Error
from vitkit.experiment.shown import read_shown
from vitkit.experiment.spending import spent
from vitkit.io.atomic import replace_file
from vitkit.listing import is_finetuning, recipe_fields
from vitkit.options import setting, settings_of
from vitkit.report.html import encoded
from vitkit.report.run_page import run_page
from vitkit.training.journal import parse_row

REPORT, MISTAKES, BATCH = "report.html", "mistakes.csv", "training-batch.json"
BIT = "bit"  # the folder of a protocol's run by BiT's HyperRule
# what a command must name, lest it is chosen for the machine and the data
CHOSEN = ("image_size", "batch", "length.", "schedule.rate", "schedule.warmup", "keep", "patience")


def write_run_page(folder: Path) -> Path:
    """The report of a run, beside its result."""
    with drawing(folder):
        return write_page(folder / REPORT, run_page(gather(folder)))


@contextmanager
def drawing(folder: Path) -> Iterator[None]:
    """Inside, files of a run that hold JSON of another kind than a run writes are one error that says so."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise Error(
            f"{folder}: no report can be made: a .json file there holds something else than a run writes "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            code="run.corrupt",
        ) from None


def write_page(path: Path, document: str) -> Path:
    content = encoded(document)
    replace_file(path, lambda beside: beside.write_bytes(content))
    return path


def gather(folder: Path, page: Path | None = None, per_hour: float | None = None) -> dict[str, Any]:
    """What is known of a run, as plain values; None for what its folder does not hold.

    page: where it will be shown and links lead from, if not in the folder itself.
    per_hour: a price of a device's hour, in place of the one that the run was given.
    """
    recipe = settings_of(read(folder / "recipe.json") or {})
    usual = recipe_fields(str(recipe.get("name", "")))
    kept = ("result", "mistakes", "doctor", "environment", "unusable")
    found: dict[str, Any] = {name: read(folder / f"{name}.json") for name in kept}
    starts = started(found["environment"])
    if starts:  # the machine and the command are of the first, what is there now of the last
        found["environment"] = starts[0] | {key: starts[-1][key] for key in ("steps", "data")}
    done, typed = bool(found["result"]), [one["command"] for one in starts if one.get("command")]
    cost = (found["result"] or {}).get("cost") or {}
    if per_hour is not None and cost.get("device_hours") is not None:
        cost["price"] = per_hour * cost["device_hours"]
    shown = read_shown(folder, recipe, (found["result"] or {}).get("test"))
    return found | {
        "task": shown, "batch": read(folder / BATCH), "spent": spent(cost),
        "table": link(folder / MISTAKES, page or folder / REPORT) if (folder / MISTAKES).exists() else None,
        "pricing": words("report", str(folder), "--price-per-hour", "X"),
        "name": folder.resolve().name, "place": str(folder), "recipe": recipe, "usual": usual,
        "metrics": rows(folder / "metrics.jsonl"),
        "commands": commands(folder, recipe, usual, typed, done, shown["predicts"]),
    }  # fmt: skip


def started(environment: dict[str, Any] | None) -> list[dict[str, Any]]:
    """How a run was started and how it was taken up later, in order."""
    return [environment, *environment.get("later", [])] if environment else []


def link(target: Path, page: Path) -> str:
    """The way from a page to another file, as an address."""
    return quote(os.fsencode(os.path.relpath(target.resolve(), page.resolve().parent)))


def read(path: Path) -> dict[str, Any] | None:
    """A JSON table, or None where it is missing, was cut off or is something else."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a journal; one that is being written just now does not count."""
    if not path.exists():
        return []
    with path.open(errors="replace") as file:
        return [row for row in map(parse_row, file) if row]


def commands(
    folder: Path, recipe: dict[str, Any], usual: dict[str, Any], typed: list[str], done: bool, predicts: bool
) -> dict[str, list[str]]:
    """What may be typed, by what it is for; typed: the commands of the run so far."""
    run, data = str(folder), recipe.get("data") or "DATA"
    told = {}
    if typed:
        told = {"How it was trained": list(dict.fromkeys(typed))} if done else {"Go on with it": typed[-1:]}
    if recipe.get("name") and usual:
        told["Do it again in another folder"] = [again(recipe, usual)]
    if done and not predicts:
        told["Use it"] = [words("finetune", "DATA", "--weights", run)]
    elif done:
        use = words("predict", run, "IMAGE"), words("evaluate", run, data), words("inspect", run, "IMAGE")
        told["Use it"] = [*use, words("serve", run)]
    told["Look at it again"] = [words("report", run), shlex.join(["tensorboard", "--logdir", run])]
    return told


def words(*parts: str) -> str:
    return shlex.join(["vitkit", *parts])


def again(recipe: dict[str, Any], usual: dict[str, Any]) -> str:
    """One command with everything that the recipe of this name does not say."""
    start = ["--weights", recipe["weights"]] if recipe.get("weights") else ["--model", recipe["model"]]
    left = {"name", "about", "data", "weights", "model", "micro_batch"}
    fields = [
        f"{key}={setting(value)}" for key, value in recipe.items()
        if key not in left and (value != usual.get(key) or key.startswith(CHOSEN))
    ]  # fmt: skip
    verb = "finetune" if is_finetuning(recipe["name"]) else "pretrain"
    named = ["--recipe", recipe["name"], "--out", "ANOTHER"]
    return words(verb, recipe["data"], *start, *named, "--set", *fields)
