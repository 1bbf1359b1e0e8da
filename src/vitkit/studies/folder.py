"""The study folder: plan, trials, failures, and one table as CSV, JSON and Parquet."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitkit.errors import Error, similar_path
from vitkit.flat_recipe import flat
from vitkit.io.files import replace_file
from vitkit.options import part_of
from vitkit.runs.folder import has_learned
from vitkit.studies.study import Plan, Trial, from_json, to_json

PLAN, FAILED, TRIALS, RESULT = "plan.json", "failed.json", "trials", "result.json"
MAX_DIFFERENCES = 5  # listed in the error about another plan


def read_plan(out: Path) -> Plan:
    path = out / PLAN
    if not path.exists():
        raise Error(
            f"{out} is not a study folder: it has no {PLAN};{similar_path(out)} give the --out of vitkit "
            "study run",
            code="study.unknown",
        )
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Error(
            f"{path} is damaged ({type(error).__name__}: {error}); choose another --out", code="study.corrupt"
        ) from None


def existing_plan(out: Path, request: Mapping[str, Any]) -> Plan | None:
    """The plan of the folder, or None if it has none; raise an error if it was made for another request."""
    if not (out / PLAN).exists():
        return None
    plan = read_plan(out)
    if plan.asked != request:
        keys = [k for k in (plan.asked | dict(request)) if plan.asked.get(k) != request.get(k)]
        changed = "; ".join(f"{k}: {plan.asked.get(k)} -> {request.get(k)}" for k in keys)
        raise Error(
            f"{out} has a study with other options ({changed}); choose another --out", code="run.changed"
        )
    return plan


def claim_folder(out: Path, plan: Plan) -> None:
    """Write the plan into the folder; raise an error if the folder has another plan."""
    path = out / PLAN
    if path.exists():
        changed = differences(read_plan(out), plan)
        if changed:
            raise Error(
                f"{out} has another plan ({'; '.join(changed[:MAX_DIFFERENCES])}); choose another --out",
                code="run.changed",
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_plan(out, plan)


def write_plan(out: Path, plan: Plan) -> None:
    text = to_json(plan) + "\n"
    replace_file(out / PLAN, lambda beside: beside.write_text(text, encoding="utf-8"))


def differences(old: Plan, new: Plan) -> list[str]:
    """One line for each difference between two plans."""
    if old.study != new.study:
        return [f"study: {old.study} -> {new.study}"]
    before, after = ({trial.name: trial for trial in plan.trials} for plan in (old, new))
    lines = [f"without {name}" for name in before if name not in after]
    lines += [f"with {name}" for name in after if name not in before]
    for name in before.keys() & after.keys():
        a, b = flat(asdict(before[name])), flat(asdict(after[name]))
        lines += [f"{name}, {k}: {a.get(k)} -> {b.get(k)}" for k in (a | b) if a.get(k) != b.get(k)]
    return lines


def trial_folder(out: Path, name: str) -> Path:
    return out / TRIALS / name


def is_finished(out: Path, trial: Trial) -> bool:
    result = read_result(out, trial)
    scored = {"knn": trial.frozen, "attention_first": trial.attention}
    return result is not None and all(name in result["test"] for name, data in scored.items() if data)


def has_begun(out: Path, trial: Trial) -> bool:
    """Whether an unfinished trial, or a run in it, has saved a checkpoint or a result."""
    folder = trial_folder(out, trial.name)
    return any(has_learned(run) for run in (folder, *folder.glob("*/")))


def read_result(out: Path, trial: Trial) -> dict[str, Any] | None:
    path = trial_folder(out, trial.name) / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_failed(out: Path) -> dict[str, dict[str, str]]:
    """The error of each trial that failed the last time it ran."""
    path = out / FAILED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_failed(out: Path, failed: Mapping[str, Mapping[str, str]]) -> None:
    text = json.dumps(failed, indent=1)
    replace_file(out / FAILED, lambda beside: beside.write_text(text + "\n", encoding="utf-8"))


Row = dict[str, Any]
COSTS = ("parameters", "images_seen", "exaFLOPs", "seconds", "images_per_second", "device_hours",
         "tpu_v3_core_days", "energy_kWh", "MFU", "device", "precision")  # fmt: skip
FROZEN = ("knn", "probe", "frozen_images")  # of the features of a trial's model
ATTENTION = ("attention_first", "attention_last", "attention_growth")  # distances in its layers
TESTS = ("top1", "images", "fewshot_mean", "fewshot_std", "fewshot_shots", "fewshot_images")


def table_rows(out: Path, plan: Plan) -> list[Row]:
    """One row for each finished trial; all rows have all columns, with None for missing values."""
    factors = list(dict.fromkeys(name for trial in plan.trials for name in trial.factors))
    rows, needs = [], {}
    for trial in plan.trials:
        result = read_result(out, trial)
        if result is not None:
            rows.append(table_row(plan, trial, result, factors))
            needs[trial.name] = trial.needs
    firsts = {row["trial"]: row for row in rows}
    least = min((row["GFLOPs"] for row in rows), default=1.0)
    for row in rows:
        pretrained = needs[row["trial"]]
        first = firsts.get(pretrained, {}) if pretrained else row
        row["pretrain_exaFLOPs"] = first.get("exaFLOPs")
        row["pretrain_images"] = first.get("train_images")
        row["relative_compute"] = row["GFLOPs"] / least
    return rows


def table_row(plan: Plan, trial: Trial, result: Mapping[str, Any], factors: Sequence[str]) -> Row:
    test, cost, recipe = result["test"], result["cost"], trial.recipe
    row: Row = {"trial": trial.name, **{name: trial.factors.get(name) for name in factors}}
    row |= {"seed": recipe.seed}
    row |= {"model": recipe.model or None} if "model" not in row else {}
    row |= {"steps": result["steps"], "chosen": result.get("chosen")}
    row |= {"train_images": train_images(plan, trial)}
    row |= {"GFLOPs": cost["forward_FLOPs"] / 1e9}
    row |= {name: cost.get(name) for name in COSTS}
    names = {"images": "test_images"}
    tests = (*TESTS, *(FROZEN if any(other.frozen for other in plan.trials) else ()))
    tests += ATTENTION if any(other.attention for other in plan.trials) else ()
    return row | {names.get(name, name): test.get(name) for name in tests}


def train_images(plan: Plan, trial: Trial) -> int | None:
    """The number of distinct training images of a trial; None if the plan does not determine it."""
    images = plan.chosen.get("train_images", {})
    if trial.factors.get("data") in images:  # counted for this part of the data
        return images[trial.factors["data"]]
    total = images.get(trial.recipe.data)
    part = part_of(trial.recipe.subset)
    if total is None or part.keys() & {"per_class", "imbalance"}:
        return None
    return int(part["count"]) if "count" in part else round(float(part.get("fraction", 1.0)) * total)


def write_table(out: Path, rows: Sequence[Row]) -> list[Path]:
    """Write the same rows as table.csv, table.json and, if pyarrow is installed, table.parquet."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    paths = [out / "table.csv", out / "table.json"]
    replace_file(paths[0], lambda beside: beside.write_text(text.getvalue(), encoding="utf-8"))
    content = json.dumps(list(rows), indent=1)
    replace_file(paths[1], lambda beside: beside.write_text(content, encoding="utf-8"))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return paths
    if rows:
        columns = pyarrow.Table.from_pylist(list(rows))
        replace_file(out / "table.parquet", lambda beside: parquet.write_table(columns, beside))
        paths.append(out / "table.parquet")
    return paths


def select_rows(rows: Sequence[Row], factors: Mapping[str, Any]) -> list[Row]:
    """The rows whose factors have the given values."""
    return [row for row in rows if all(row.get(name) == value for name, value in factors.items())]
