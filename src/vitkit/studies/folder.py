"""The study folder: one plan, its trials' run folders, what failed, and who may work in it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.io.atomic import replace_file
from vitkit.recipes.recipe import flat
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
