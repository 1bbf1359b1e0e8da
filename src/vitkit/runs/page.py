"""The report page of a run folder: its files, its cost, and the commands to run next."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from vitkit.errors import Error
from vitkit.flat_recipe import setting, settings_of
from vitkit.io.files import replace_file
from vitkit.listing import is_finetuning, recipe_fields
from vitkit.report.html import encoded
from vitkit.report.run_page import run_page
from vitkit.training.logging import parse_row

if TYPE_CHECKING:
    from vitkit.tasks.task import Task

# (dollars an hour to rent, watts under load) of one device: round numbers for estimates
DEVICES = {
    "B200": (5.0, 900), "H200": (3.5, 600), "H100": (3.0, 600), "A100": (1.8, 350), "L40S": (1.2, 300),
    "A10G?": (1.0, 150), "L4": (0.7, 70), "V100": (1.5, 250), "T4": (0.5, 70),
}  # fmt: skip
OTHER_GPU, COMPUTER = (1.0, 250), (0.2, 100)
GPU = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|Radeon|Instinct", re.IGNORECASE)


def spent(cost: Mapping[str, Any], per_hour: float | None = None) -> dict[str, Any]:
    """Price and energy of a run, and how each was determined; `per_hour` overrides the run's own price.

    given: whether the user has set the price of an hour, in any currency; else it is assumed, in dollars.
    """
    hours = cost.get("device_hours")
    if hours is None:
        return {}
    assumed, watts = assumptions(str(cost.get("device", "")))
    if per_hour is None and cost.get("price") is not None and hours:
        per_hour = cost["price"] / hours
    rate = assumed if per_hour is None else per_hour
    measured = cost.get("energy_kWh")
    return {
        "hours": hours, "per_hour": rate, "given": per_hour is not None, "price": hours * rate,
        "kWh": hours * watts / 1000 if measured is None else measured,
        "watts": watts if measured is None else None,
    }  # fmt: skip


def assumptions(device: str) -> tuple[float, int]:
    """(dollars an hour, watts) of a device by its name."""
    for name, estimate in DEVICES.items():
        if re.search(rf"\b{name}\b", device):
            return estimate
    return OTHER_GPU if GPU.search(device) else COMPUTER


FILE = "task.json"
FIELDS = {"name", "about", "metric", "predicts", "mistakes", "headline"}


def write_shown(out: Path, task: "Task", test: dict[str, Any] | None = None) -> None:
    """Write task.json: at the start of a run, and again with its metrics at the end."""
    text = json.dumps(shown(task, test), indent=2)
    replace_file(out / FILE, lambda beside: beside.write_text(text, encoding="utf-8"))


def shown(task: "Task", test: dict[str, Any] | None) -> dict[str, Any]:
    """The content of task.json: what a page shows of a task; test: the metrics of the result."""
    about: dict[str, Any] = {
        "name": task.name,
        "about": task.about,
        "metric": vars(task.headline),
        "predicts": task.predicts,
        "mistakes": task.labelled and not task.targets,
        "headline": list(task.report_headline(test)) if test else None,
    }
    if task.targets:
        about |= {"metrics": list(task.metric_names), "counted": task.counted}
    if test and (tables := task.tables(test)):
        about["tables"] = [table.to_json() for table in tables]
    return about


def read_shown(folder: Path, recipe: dict[str, Any], test: dict[str, Any] | None) -> dict[str, Any]:
    """The content of task.json; runs of older versions, which have no such file, get it from their task."""
    try:
        stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if stored.keys() >= FIELDS and (stored["headline"] or not test):
            return stored
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    from vitkit.tasks.task import task_class

    return shown(task_class(task_name(recipe, test or {}))(), test)


def run_task(folder: Path, test: dict[str, Any]) -> "Task":
    """The task of a run folder, by name; test: the metrics of one of its results."""
    from vitkit.tasks.task import task_class

    try:
        name = json.loads((folder / FILE).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, LookupError, TypeError):
        name = task_name({}, test)
    return task_class(name)()


def task_name(recipe: dict[str, Any], test: dict[str, Any]) -> str:
    """The task of a run of version 0.1, by its recipe and its metrics."""
    if "mean_average_precision" in test:
        return "multilabel"
    return "masked" if "patches" in test else recipe.get("objective") or "classify"


REPORT, MISTAKES = "report.html", "mistakes.csv"
BATCH, SAMPLES = "training-batch.json", "samples.json"
PICTURES = "feature-pictures.json"  # of a run without labels
FOLDS = "folds.json"  # in the folder of a cross-validation: the accuracy of each fold, and their mean
BIT = "bit"  # the folder of a protocol's run by BiT's HyperRule
# fields that a command must name, or they would be chosen for the machine and the data
CHOSEN = ("image_size", "batch", "length.", "schedule.rate", "schedule.warmup", "keep", "patience")
BY_RULES = (  # of default recipes
    "optimizer.", "mixup", "label_smoothing", "stochastic_depth", "pooling", "calibrate",
)  # fmt: skip


def write_run_page(folder: Path) -> Path:
    """Write report.html into the run folder."""
    with drawing(folder):
        return write_page(folder / REPORT, run_page(gather(folder)))


@contextmanager
def drawing(folder: Path) -> Iterator[None]:
    """Inside, errors from malformed JSON files of the run become one error that names the folder."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise Error(
            f"{folder}: cannot write a report: a .json file there is not as a run writes it "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            code="run.corrupt",
        ) from None


def write_page(path: Path, document: str) -> Path:
    content = encoded(document)
    replace_file(path, lambda beside: beside.write_bytes(content))
    return path


def gather(folder: Path, page: Path | None = None, per_hour: float | None = None) -> dict[str, Any]:
    """The content of a run's report; None for files that its folder does not have.

    page: the file that links start from, if not report.html in the folder itself.
    per_hour: the price of a device for an hour, in place of the run's own.
    """
    recipe = settings_of(read(folder / "recipe.json") or {})
    usual = recipe_fields(str(recipe.get("name", "")))
    names = ("result", "mistakes", "doctor", "environment", "unusable")
    files: dict[str, Any] = {name: read(folder / f"{name}.json") for name in names}
    starts = started(files["environment"])
    if starts:  # machine and command of the first start; steps and data of the last
        files["environment"] = starts[0] | {key: starts[-1][key] for key in ("steps", "data")}
    done, typed = bool(files["result"]), [start["command"] for start in starts if start.get("command")]
    cost = (files["result"] or {}).get("cost") or {}
    if per_hour is not None and cost.get("device_hours") is not None:
        cost["price"] = per_hour * cost["device_hours"]
    shown = read_shown(folder, recipe, (files["result"] or {}).get("test"))
    return files | {
        "task": shown, "batch": read(folder / BATCH), "samples": read(folder / SAMPLES), "spent": spent(cost),
        "pictures": read(folder / PICTURES),
        "folds": read(folder / FOLDS),
        "table": link(folder / MISTAKES, page or folder / REPORT) if (folder / MISTAKES).exists() else None,
        "pricing": words("report", str(folder), "--price-per-hour", "X"),
        "name": folder.resolve().name, "place": str(folder), "recipe": recipe, "usual": usual,
        "metrics": rows(folder / "metrics.jsonl"),
        "commands": commands(folder, recipe, usual, typed, done, shown["predicts"])
        | tuning_commands(folder, recipe, files["result"] or {}),
    }  # fmt: skip


def started(environment: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The start of a run and its later resumptions, in order."""
    return [environment, *environment.get("later", [])] if environment else []


def link(target: Path, page: Path) -> str:
    """A relative URL from a page to another file."""
    return quote(os.fsencode(os.path.relpath(target.resolve(), page.resolve().parent)))


def read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file is missing, truncated or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without one that is still being written."""
    if not path.exists():
        return []
    with path.open(errors="replace", encoding="utf-8") as file:
        return [row for row in map(parse_row, file) if row]


def commands(
    folder: Path, recipe: dict[str, Any], usual: dict[str, Any], typed: list[str], done: bool, predicts: bool
) -> dict[str, list[str]]:
    """Suggested commands by purpose; typed: the commands of the run so far."""
    run, data = str(folder), recipe.get("data") or "DATA"
    groups = {}
    if typed:
        groups = {"How it was trained": list(dict.fromkeys(typed))} if done else {"Resume it": typed[-1:]}
    if recipe.get("name") and usual:
        groups["Repeat it in another folder"] = [again(recipe, usual)]
    if done and not predicts:
        groups["Use it"] = [words("finetune", "DATA", "--weights", run)]
    elif done:
        use = words("predict", run, "IMAGE"), words("evaluate", run, data), words("inspect", run, "IMAGE")
        groups["Use it"] = [*use, words("serve", run)]
    groups["View it"] = [words("report", run), shlex.join(["tensorboard", "--logdir", run])]
    return groups


def tuning_commands(folder: Path, recipe: dict[str, Any], result: dict[str, Any]) -> dict[str, list[str]]:
    """Commands that compare a run without labels with its start by fine-tuning, which takes two more runs."""
    if not result.get("features"):
        return {}
    start = ["--weights", recipe["weights"]]
    if not recipe.get("weights"):
        options = recipe.get("model_options") or ()
        start = [
            "--model",
            recipe["model"],
            *(["--set", *(f"model.{text}" for text in options)] if options else ()),
        ]
    size = ["--image-size", "x".join(map(str, recipe["image_size"]))]
    data, outs = result["features"]["data"], (f"{folder}-tuned", f"{folder}-start-tuned")
    starts = (["--weights", str(folder)], start)
    lines = [
        words("finetune", data, "--recipe", "finetune", "--out", out, *size, *first)
        for out, first in zip(outs, starts, strict=True)
    ]
    return {"Compare it with its start by fine-tuning": [*lines, words("report", *outs)]}


def words(*parts: str) -> str:
    return shlex.join(["vitkit", *parts])


def again(recipe: dict[str, Any], usual: dict[str, Any]) -> str:
    """A command with every setting that differs from the named recipe."""
    start = ["--weights", recipe["weights"]] if recipe.get("weights") else ["--model", recipe["model"]]
    omitted = {"name", "about", "data", "weights", "model", "micro_batch"}
    chosen = (*CHOSEN, *BY_RULES) if "rules" in (usual.get("auto") or ()) else CHOSEN
    fields = [
        f"{key}={setting(value)}" for key, value in recipe.items()
        if key not in omitted and (value != usual.get(key) or key.startswith(chosen))
    ]  # fmt: skip
    verb = "finetune" if is_finetuning(recipe["name"]) else "pretrain"
    named = ["--recipe", recipe["name"], "--out", "ANOTHER"]
    return words(verb, recipe["data"], *start, *named, "--set", *fields)
