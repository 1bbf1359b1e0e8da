"""The study folder: plan, trials, failures, and one tidy table as CSV, JSON and Parquet."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.options import flat, part_of
from vitkit.studies.study import Plan, Trial, from_json, to_json

PLAN, FAILED, TRIALS, RESULT = "plan.json", "failed.json", "trials", "result.json"
SHOWN = 5  # differences of two plans that are told


def read_plan(out: Path) -> Plan:
    path = out / PLAN
    if not path.exists():
        raise Error(
            f"{out} holds no study: there is no {PLAN} in it; give the --out of vitkit study run",
            code="study.unknown",
        )
    try:
        return from_json(path.read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Error(
            f"{path} is damaged ({type(error).__name__}: {error}); give another --out", code="study.corrupt"
        ) from None


def remembered(out: Path, asked: Mapping[str, Any]) -> Plan | None:
    """The plan of the folder, if it was made for the same request; another request is refused."""
    if not (out / PLAN).exists():
        return None
    old = read_plan(out)
    if old.asked != asked:
        keys = [k for k in (old.asked | dict(asked)) if old.asked.get(k) != asked.get(k)]
        changed = "; ".join(f"{k}: {old.asked.get(k)} -> {asked.get(k)}" for k in keys)
        raise Error(
            f"{out} holds a study with other options ({changed}); give another --out", code="run.changed"
        )
    return old


def claim(out: Path, plan: Plan) -> None:
    """The folder belongs to one plan: another is refused, with what differs."""
    path = out / PLAN
    if path.exists():
        changed = differences(read_plan(out), plan)
        if changed:
            raise Error(
                f"{out} holds another plan ({'; '.join(changed[:SHOWN])}); give another --out",
                code="run.changed",
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda beside: beside.write_text(to_json(plan) + "\n"))


def differences(old: Plan, new: Plan) -> list[str]:
    """What differs between two plans, in words."""
    if old.study != new.study:
        return [f"study: {old.study} -> {new.study}"]
    before, after = ({one.name: one for one in plan.trials} for plan in (old, new))
    told = [f"without {name}" for name in before if name not in after]
    told += [f"with {name}" for name in after if name not in before]
    for name in before.keys() & after.keys():
        a, b = flat(asdict(before[name])), flat(asdict(after[name]))
        told += [f"{name}, {k}: {a.get(k)} -> {b.get(k)}" for k in (a | b) if a.get(k) != b.get(k)]
    return told


def folder_of(out: Path, name: str) -> Path:
    return out / TRIALS / name


def done(out: Path, trial: Trial) -> bool:
    return (folder_of(out, trial.name) / RESULT).exists()


def result_of(out: Path, trial: Trial) -> dict[str, Any] | None:
    path = folder_of(out, trial.name) / RESULT
    return json.loads(path.read_text()) if path.exists() else None


def read_failed(out: Path) -> dict[str, dict[str, str]]:
    """By trial: what went wrong when it was last tried."""
    path = out / FAILED
    return json.loads(path.read_text()) if path.exists() else {}


def write_failed(out: Path, failed: Mapping[str, Mapping[str, str]]) -> None:
    text = json.dumps(failed, indent=1)
    replace_file(out / FAILED, lambda beside: beside.write_text(text + "\n"))


Row = dict[str, Any]
COSTS = ("parameters", "images_seen", "exaFLOPs", "seconds", "images_per_second", "device_hours",
         "tpu_v3_core_days", "energy_kWh", "MFU", "device", "precision")  # fmt: skip
TESTS = ("top1", "images", "fewshot_mean", "fewshot_std", "fewshot_shots", "fewshot_images")


def rows_of(out: Path, plan: Plan) -> list[Row]:
    """The finished trials; each has every column, with None where it has no such number."""
    factors = list(dict.fromkeys(name for one in plan.trials for name in one.factors))
    rows = []
    for one in plan.trials:
        result = result_of(out, one)
        if result is not None:
            rows.append(row_of(plan, one, result, factors))
    spent = {row["trial"]: row["exaFLOPs"] for row in rows}
    least = min((row["GFLOPs"] for row in rows), default=1.0)
    for row, one in ((row, one) for row in rows for one in plan.trials if one.name == row["trial"]):
        row["pretrain_exaFLOPs"] = spent.get(one.needs) if one.needs else row["exaFLOPs"]
        row["relative_compute"] = row["GFLOPs"] / least
    return rows


def row_of(plan: Plan, one: Trial, result: Mapping[str, Any], factors: Sequence[str]) -> Row:
    test, cost, r = result["test"], result["cost"], one.recipe
    row: Row = {"trial": one.name, **{name: one.factors.get(name) for name in factors}, "seed": r.seed}
    row |= {"model": r.model or None} if "model" not in row else {}
    row |= {"steps": result["steps"], "chosen": result.get("chosen"), "train_images": train_images(plan, one)}
    row |= {"GFLOPs": cost["forward_FLOPs"] / 1e9}
    row |= {name: cost.get(name) for name in COSTS}
    names = {"images": "test_images"}
    return row | {names.get(name, name): test.get(name) for name in TESTS}


def train_images(plan: Plan, one: Trial) -> int | None:
    """How many different images it could learn from, by the plan's own count of its data."""
    total = plan.chosen.get("train_images", {}).get(one.recipe.data)
    part = part_of(one.recipe.subset)
    if total is None or "per_class" in part:
        return None
    return int(part["count"]) if "count" in part else round(float(part.get("fraction", 1.0)) * total)


def write_table(out: Path, rows: Sequence[Row]) -> list[Path]:
    """table.csv, table.json and, where pyarrow is there, table.parquet: the same numbers in each."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    written = [out / "table.csv", out / "table.json"]
    replace_file(written[0], lambda beside: beside.write_text(text.getvalue()))
    told = json.dumps(list(rows), indent=1)
    replace_file(written[1], lambda beside: beside.write_text(told))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return written
    if rows:
        columns = pyarrow.Table.from_pylist(list(rows))
        replace_file(out / "table.parquet", lambda beside: parquet.write_table(columns, beside))
        written.append(out / "table.parquet")
    return written


def chosen(rows: Sequence[Row], factors: Mapping[str, Any]) -> list[Row]:
    """The rows of a setting of some factors."""
    return [row for row in rows if all(row.get(name) == value for name, value in factors.items())]
