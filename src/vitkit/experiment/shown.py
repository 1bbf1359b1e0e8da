"""How a run's task is shown, kept in the run folder: a report needs neither torch nor the task's own file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.io.atomic import replace_file

if TYPE_CHECKING:
    from vitkit.objectives.task import Task

FILE = "task.json"
FIELDS = {"name", "about", "metric", "predicts", "mistakes", "headline"}


def write_shown(out: Path, task: "Task", test: dict[str, Any] | None = None) -> None:
    """As a run begins; with its metrics, once it is finished."""
    text = json.dumps(shown(task, test), indent=2)
    replace_file(out / FILE, lambda beside: beside.write_text(text))


def shown(task: "Task", test: dict[str, Any] | None) -> dict[str, Any]:
    """What a page shows of a task, as plain values; test: the metrics of its result."""
    return {
        "name": task.name,
        "about": task.about,
        "metric": vars(task.headline),
        "predicts": task.predicts,
        "mistakes": task.labelled,
        "headline": list(task.page(test)) if test else None,
    }


def read_shown(folder: Path, recipe: dict[str, Any], test: dict[str, Any] | None) -> dict[str, Any]:
    """The same of a run folder; of a run that did not keep it, by its task."""
    try:
        stored = json.loads((folder / FILE).read_text())
        if stored.keys() >= FIELDS and (stored["headline"] or not test):
            return stored
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    from vitkit.objectives.task import task_class

    return shown(task_class(task_name(recipe, test or {}))(), test)


def run_task(folder: Path, test: dict[str, Any]) -> "Task":
    """The task of a run folder, by name; test: the metrics of one of its results."""
    from vitkit.objectives.task import task_class

    try:
        name = json.loads((folder / FILE).read_text())["name"]
    except (OSError, ValueError, LookupError, TypeError):
        name = task_name({}, test)
    return task_class(name)()


def task_name(recipe: dict[str, Any], test: dict[str, Any]) -> str:
    """The task of a run of version 0.1, by its recipe and its metrics."""
    if "mean_average_precision" in test:
        return "multilabel"
    return "masked" if "patches" in test else recipe.get("objective") or "classify"
