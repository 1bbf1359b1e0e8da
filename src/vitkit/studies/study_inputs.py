"""inputs.json: the content of a study's data and weights, so that it goes on where they have other paths."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.datasets.opening import data_and_part, open_data
from vitkit.errors import Error
from vitkit.io.files import replace_file, sha256
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import TaskOptions
from vitkit.runs.provenance.fingerprint import is_same, summary, with_hashes, with_sizes
from vitkit.studies.folder import PLAN, existing_plan, is_finished, read_plan, write_plan
from vitkit.studies.scale import study as named_study
from vitkit.studies.study import Plan

FILE = "inputs.json"
PATHS = ("data", "downstream", "weights")  # options of a request that may differ between machines
Paths = Mapping[str, str]  # each path of a study, and where the same content is on this machine


def resumed_plan(out: Path, asked: Mapping[str, Any]) -> Plan | None:
    """The plan of the folder, with the paths of this command; None if it has none.

    Raises an error if the plan was made for another request.
    """
    plan = read_plan(out) if (out / PLAN).exists() else None
    paths = renamed(plan.asked, asked) if plan else {}
    return relocated(plan, paths, asked) if plan and paths else existing_plan(out, asked)


def check_inputs(out: Path, plan: Plan) -> None:
    """Refuse data or weights with other content than those of the study in the folder.

    The first call writes inputs.json, and a later one adopts new paths into plan.json.
    """
    moved = (out / PLAN).exists() and read_plan(out).asked != plan.asked
    if not moved and all(is_finished(out, trial) for trial in plan.trials):
        return
    current, path = contents(plan.asked), out / FILE
    if not path.exists():
        if moved:
            raise Error(
                f"{out} has no {FILE} to compare the data with, so its paths must stay: "
                f"{', '.join(sorted(paths_of(read_plan(out).asked)))}",
                code="run.changed",
            )
        write_json(path, current)
        return
    compare(out, read(path), current, plan.asked)
    if moved:
        write_plan(out, plan)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {name: stored[name] for name in PATHS}
    except (ValueError, KeyError, TypeError) as error:
        raise Error(f"{path} is damaged ({type(error).__name__}: {error})", code="study.corrupt") from None


def contents(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies each input; None for a downstream that is not given, and weights that are no file."""
    weights, downstream = asked.get("weights", ""), asked["downstream"]
    return {
        "data": [data_content(place) for place in asked["data"]],
        "downstream": data_content(downstream) if downstream else None,
        "weights": sha256(Path(weights)) if weights and Path(weights).is_file() else None,
    }


def data_content(place: str) -> dict[str, Any]:
    """Digests of all images, names and labels of a data set."""
    opened = open_data(data_and_part(place)[0])  # before vitkit splits off test images
    first = next(iter(opened))
    splits = opened if "train" in opened else {"train" if n == first else n: p for n, p in opened.items()}
    return summary(with_sizes(with_hashes(splits)))


def compare(
    out: Path, stored: Mapping[str, Any], current: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    """Raise an error that names the input whose content differs, and how."""
    pairs = list(zip(stored["data"], current["data"], asked["data"], strict=True))
    if stored["downstream"] and current["downstream"]:
        pairs.append((stored["downstream"], current["downstream"], asked["downstream"]))
    for before, now, place in pairs:
        if not is_same(before, now):
            raise Error(
                f"{place} is not the data that the study in {out} was run on: {data_change(before, now)}. "
                "Give the path of that data, or choose another --out",
                code="data.changed",
            )
    if stored["weights"] != current["weights"]:
        raise Error(
            f"{asked['weights']} does not hold the weights that the study in {out} was run with: SHA-256 "
            f"{stored['weights']} -> {current['weights']}. Give the path of those, or choose another --out",
            code="run.changed",
        )


def data_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first difference between two data sets, in a few words."""
    if before["classes"] != now["classes"]:
        return f"{len(before['classes'])} classes -> {len(now['classes'])}, or others"
    for name, row in now["splits"].items():
        count = before["splits"].get(name, {}).get("images")
        if count != row["images"]:
            return f"{name}: {count} images -> {row['images']}"
    return "other images, labels or file names"


def paths_of(asked: Mapping[str, Any]) -> dict[str, str]:
    """The paths in a request, each by its option and place: data 1, downstream, weights."""
    places = {f"data {i}": place for i, place in enumerate(asked["data"], 1)}
    others = {name: asked[name] for name in PATHS[1:] if asked.get(name)}
    return places | others


def renamed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Paths:
    """Each changed path of a request, if two requests differ only in paths; otherwise nothing."""
    before, after = paths_of(old), paths_of(new)
    same = {k: v for k, v in old.items() if k not in PATHS} == {
        k: v for k, v in new.items() if k not in PATHS
    }
    if not same or before.keys() != after.keys():
        return {}
    paths: dict[str, str] = {}
    for name, place in before.items():
        other = after[name]
        if name == "weights":
            if place != other and not Path(other).is_file():
                return {}  # a name stands for other weights, and a folder cannot be compared
        else:
            (place, part), (other, other_part) = data_and_part(place), data_and_part(other)
            if part != other_part:
                return {}
        if paths.setdefault(place, other) != other:
            return {}
    return {place: other for place, other in paths.items() if place != other}


def relocated(plan: Plan, paths: Paths, asked: Mapping[str, Any]) -> Plan:
    """The same plan with other paths; names and factors of trials stay, as results refer to them."""
    trials = tuple(
        replace(
            trial,
            recipe=with_paths(trial.recipe, paths),
            compared={name: with_paths(recipe, paths) for name, recipe in trial.compared.items()},
            frozen=paths.get(trial.frozen, trial.frozen),
            attention=paths.get(trial.attention, trial.attention),
        )
        for trial in plan.trials
    )
    chosen = dict(plan.chosen)
    if not named_study(plan.study).base:  # which counts the images by label
        chosen["train_images"] = {paths.get(p, p): n for p, n in chosen["train_images"].items()}
    if "weights" in chosen:
        chosen["weights"] = paths.get(chosen["weights"], chosen["weights"])
    return replace(plan, asked=dict(asked), chosen=chosen, trials=trials)


def with_paths(recipe: Recipe, paths: Paths) -> Recipe:
    """A recipe with its data, weights and teacher at other paths."""
    options = {
        name: paths.get(value, value) if name.endswith(".teacher") else value
        for name, value in recipe.task_options.items()
    }
    places = {
        name: paths.get(value := getattr(recipe, name), value) for name in ("data", "fewshot", "weights")
    }
    return replace(recipe, task_options=TaskOptions(options), **places)


def adopt_paths(folder: Path, recipe: Recipe) -> None:
    """Give the interrupted runs of a trial the paths that the trial has on this machine.

    Each run compares the content of its data when it resumes.
    """
    for path in (folder / "recipe.json", *folder.glob("*/recipe.json")):
        if not path.exists():
            continue
        stored = json.loads(path.read_text(encoding="utf-8"))
        if "data" not in stored:  # of a version that grouped the fields
            continue
        options = stored.get("task_options") or {}
        teachers = {name: value for name, value in recipe.task_options.items() if name.endswith(".teacher")}
        places = {"data": recipe.data, "fewshot": recipe.fewshot, "weights": recipe.weights}
        new = stored | places | ({"task_options": options | teachers} if teachers else {})
        if new != stored:
            write_json(path, new)
