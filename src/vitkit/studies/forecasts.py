"""Predictions of a study: made from its small trials before the larger ones start, and never changed."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitkit.io.files import replace_file
from vitkit.studies.differences import estimate, group_rows
from vitkit.studies.fits import prediction
from vitkit.studies.folder import RESULT, Row, is_finished, read_failed, table_rows, trial_folder
from vitkit.studies.prepare import trial_flops
from vitkit.studies.study import Plan, Study, Trial

PREDICTIONS = "predictions.json"


def predicted_trials(plan: Plan, study: Study) -> list[Trial]:
    """The trials whose score is predicted from the others; none at the paper's scale."""
    if not study.predicted or plan.asked["scale"] == "paper":
        return []
    return [t for t in plan.trials if study.predicted.items() <= t.factors.items() and not t.needs]


def before_prediction(plan: Plan, study: Study, out: Path) -> Plan:
    """The plan of the trials that come before a prediction; without a pending one, the whole plan."""
    later = predicted_trials(plan, study)
    if not later or (out / PREDICTIONS).exists():
        return plan
    return replace(plan, trials=tuple(others(plan, later)))


def others(plan: Plan, later: Sequence[Trial]) -> list[Trial]:
    """The trials of a plan that neither are among these nor start from one of them."""
    names = {trial.name for trial in later}
    return [trial for trial in plan.trials if names.isdisjoint((trial.name, trial.needs))]


def predict(plan: Plan, study: Study, out: Path, log: Callable[[str], None] = lambda text: None) -> bool:
    """Write the predictions if they are due; return whether the larger trials may start.

    They wait for small trials that are neither finished nor failed. A file that exists is never written
    again, and none is written once a larger trial has started.
    """
    later, path = predicted_trials(plan, study), out / PREDICTIONS
    if not later or path.exists():
        return True
    failed = read_failed(out)
    if any(not is_finished(out, trial) and trial.name not in failed for trial in others(plan, later)):
        return False
    if any(trial_folder(out, trial.name).exists() for trial in later):
        return True
    content = predictions_of(plan, study, out, later)
    text = json.dumps(content, indent=1) + "\n"
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    log(f"wrote {len(content['predictions'])} predictions for {len(later)} larger trials: {path}")
    return True


def predictions_of(plan: Plan, study: Study, out: Path, later: Sequence[Trial]) -> dict[str, Any]:
    """The date, the trials that are used with the SHA-256 of their results, and the predicted scores."""
    rows = table_rows(out, plan)
    names = {trial.name for trial in later}
    used = [r for r in rows if r["trial"] not in names and r.get(study.score) is not None]
    digests = {row["trial"]: digest(trial_folder(out, row["trial"]) / RESULT) for row in used}
    by_name = {trial.name: trial for trial in plan.trials}
    images = plan.chosen["train_images"]
    groups, entries = group_rows(used, study.fitted), list[dict[str, Any]]()
    for setting, trials in settings_of(later).items():
        factors = dict(setting)
        group = groups.get(tuple(factors.get(name) for name in study.fitted), [])
        exaflops = trial_flops(trials[0], by_name, images) / 1e18
        errors = [1 - row[study.score] for row in group]
        compute = [row["pretrain_exaFLOPs"] for row in group]
        if (error := prediction(compute, errors, exaflops, len(trials)) if group else None) is not None:
            center, high, low = (max(0.0, 1 - value) for value in error)
            entries.append(
                {"setting": factors, "exaFLOPs": exaflops, "seeds": len(trials), "points": len(group),
                 "predicted": center, "low": low, "high": high}
            )  # fmt: skip
    total = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "score": study.score,
        "law": "error = scale * exaFLOPs^exponent for each setting of " + ", ".join(study.fitted),
        "digest": total, "trials": digests, "predictions": entries,
    }  # fmt: skip


def settings_of(trials: Sequence[Trial]) -> dict[tuple[tuple[str, Any], ...], list[Trial]]:
    """Trials that differ only in their seed, by their factors."""
    groups: dict[tuple[tuple[str, Any], ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(tuple(trial.factors.items()), []).append(trial)
    return groups


def digest(path: Path) -> str:
    """SHA-256 of what a trial measured; other parts of its result are paths, which may change."""
    result = json.loads(path.read_text(encoding="utf-8"))
    measured = {name: result[name] for name in ("steps", "test", "cost")}
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def compare(out: Path, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The stored predictions with what the larger trials measured beside them; None without predictions."""
    path = out / PREDICTIONS
    if not path.exists():
        return None
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    results = {name: trial_folder(out, name) / RESULT for name in stored["trials"]}
    changed = [name for name, value in stored["trials"].items()
               if not results[name].exists() or digest(results[name]) != value]  # fmt: skip
    compared = [entry | measured(entry, rows, stored["score"]) for entry in stored["predictions"]]
    return {"made": stored["made"], "digest": stored["digest"], "changed": changed, "compared": compared}


def measured(entry: Mapping[str, Any], rows: Sequence[Row], score: str) -> dict[str, Any]:
    """The mean over the seeds that have finished, and whether it lies in the predicted interval."""
    matching = [r for r in rows if entry["setting"].items() <= r.items() and r.get(score) is not None]
    if not matching:
        return {"measured": None, "inside": None}
    center = estimate([row[score] for row in matching]).mean
    return {"measured": center, "finished": len(matching), "inside": entry["low"] <= center <= entry["high"]}
