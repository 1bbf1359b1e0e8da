"""One tidy table of a study: a row a trial, as CSV, JSON and, where pyarrow is there, Parquet."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.io.atomic import replace_file
from vitkit.options import part_of
from vitkit.studies.folder import result_of
from vitkit.studies.study import Plan, Trial

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
