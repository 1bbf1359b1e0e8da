"""Means over seeds and the figures of a study, from its table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitkit.inspection.embeddings import position_similarity
from vitkit.io.files import replace_file
from vitkit.report.figure_style import render
from vitkit.report.figures import Point, draw_bars, draw_differences, draw_scores, draw_similarity
from vitkit.report.html import Number
from vitkit.runs.folder import MODEL
from vitkit.runs.page import rows as journal_rows
from vitkit.studies.differences import changes_from_base, estimate, group_rows
from vitkit.studies.folder import Row, select_rows, trial_folder
from vitkit.studies.study import Picture, Plan, Study
from vitkit.weights.load import load

SCORES = {
    "top1": "top-1 accuracy", "fewshot_mean": "few-shot accuracy", "knn": "k-NN accuracy",
    "probe": "linear-probe accuracy", "attention_first": "attention distance, share of uniform",
}  # fmt: skip
AVERAGED = ("parameters", "GFLOPs", "exaFLOPs", "tpu_v3_core_days", "images_seen", "seconds")
Lines = dict[str, list[Point]]
Bars = dict[str, dict[str, tuple[float, float]]]


def factors_of(plan: Plan) -> list[str]:
    return list(dict.fromkeys(name for trial in plan.trials for name in trial.factors))


def means(rows: Sequence[Row], plan: Plan) -> list[Row]:
    """One row for each setting: mean and deviation of the scores over seeds, and mean costs (Table 6)."""
    factors = factors_of(plan)
    lines = []
    for setting, group in group_rows(rows, factors).items():
        line: Row = dict(zip(factors, setting, strict=True)) | {"seeds": len(group)}
        for score in (name for name in SCORES if name in group[0]):
            values = [row[score] for row in group if row[score] is not None]
            e = estimate(values) if values else None
            line |= {score: e and e.mean, f"{score}_std": e and e.std}
        lines.append(line | {name: mean(row[name] for row in group) for name in AVERAGED})
    return lines


def label(setting: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in setting if value is not None) or "all"


def column(picture: Picture, study: Study) -> str:
    return study.score if picture.y == "score" else picture.y


def lines_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Lines:
    """The points of each line: x, mean over seeds, standard deviation."""
    x, y = picture.x, column(picture, study)
    usable = [r for r in select_rows(rows, picture.where) if r.get(y) is not None and r.get(x) is not None]
    lines: Lines = {}
    for setting, group in group_rows(usable, picture.lines).items():
        points = [
            (mean(r[x] for r in seeds), mean(r[y] for r in seeds), deviation([r[y] for r in seeds]))
            for seeds in group_seeds(group)
        ]
        lines[label(setting)] = sorted(points)
    return lines


def group_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows that differ only in their seed."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["trial"].rpartition(",seed=")[0], []).append(row)
    return list(groups.values())


def deviation(values: Sequence[float]) -> float:
    return estimate(values).std or 0.0


def bars_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Bars:
    """For each value of x, the mean and deviation of each setting."""
    y = column(picture, study)
    usable = [row for row in select_rows(rows, picture.where) if row.get(y) is not None]
    bars: Bars = {}
    for (x,), group in group_rows(usable, [picture.x]).items():
        bars[str(x)] = {
            label(setting): (mean(r[y] for r in seeds), deviation([r[y] for r in seeds]))
            for setting, seeds in group_rows(group, picture.lines).items()
        }
    return bars


def band_of(picture: Picture, study: Study, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """For each value of x, the lowest and highest mean of the shaded settings."""
    shaded = bars_of(replace(picture, where=picture.band), study, rows)
    centers = {x: [center for center, _ in bars.values()] for x, bars in shaded.items()}
    return {x: (min(values), max(values)) for x, values in centers.items()}


def histories(picture: Picture, study: Study, rows: Sequence[Row], out: Path) -> Lines:
    """The score of each setting over training steps, averaged over seeds."""
    y = column(picture, study)
    lines: Lines = {}
    for setting, group in group_rows(select_rows(rows, picture.where), picture.lines).items():
        by_step: dict[int, list[float]] = {}
        for row in group:
            for step, value in history(trial_folder(out, row["trial"]) / "metrics.jsonl", y):
                by_step.setdefault(step, []).append(value)
        lines[label(setting)] = [(s, mean(v), deviation(v)) for s, v in sorted(by_step.items())]
    return lines


def history(path: Path, name: str) -> list[tuple[int, float]]:
    return list({row["step"]: row[name] for row in journal_rows(path) if name in row}.items())


def similarities(picture: Picture, rows: Sequence[Row], out: Path) -> dict[str, np.ndarray]:
    """Fig. 10: similarity of the position embeddings, for the first seed of each setting.

    Users may delete the large model files; a setting without one is left out.
    """
    maps = {}
    for setting, group in group_rows(select_rows(rows, picture.where), picture.lines).items():
        files = [trial_folder(out, row["trial"]) / MODEL for row in group]
        if existing := [file for file in files if file.exists()]:
            maps[label(setting)] = position_similarity(load(existing[0]))
    return maps


def figures_of(study: Study, rows: Sequence[Row], out: Path) -> list[dict[str, Any]]:
    """Draw all figures of a study as figures/*.svg and *.png; return what the page shows of each."""
    entries: list[dict[str, Any]] = []
    for picture in study.pictures:
        drawable = select_rows(rows, picture.where)
        if picture.y != "score":
            drawable = [row for row in drawable if row.get(picture.y) is not None]
        if not drawable:
            continue
        y = SCORES.get(column(picture, study), column(picture, study))
        entry: dict[str, Any] = {"title": picture.title, "kind": picture.kind, "y": y, "log_x": picture.log_x}
        entry["x"] = picture.x_label or picture.x
        drawn: dict[str, Figure] = {}
        if picture.kind == "similarity":
            entry["maps"] = similarities(picture, rows, out)
            drawn = {key: draw_similarity(values, title=key) for key, values in entry["maps"].items()}
        elif picture.kind == "differences":
            entry["differences"] = dots = dots_of(changes_from_base(study, rows), picture.x)
            if not dots:  # only the base has finished
                continue
            drawn = {"": draw_differences(dots, x_label=f"{y}, points", title=picture.title)}
        elif picture.kind == "bars":
            shaded = band_of(picture, study, rows) if picture.band else {}
            entry |= {"bars": (bars := bars_of(picture, study, rows)), "band": shaded}
            drawn = {"": draw_bars(bars, y_label=y, title=picture.title, band=shaded)}
        else:
            lines = (
                histories(picture, study, rows, out)
                if picture.kind == "history"
                else lines_of(picture, study, rows)
            )
            entry["lines"] = lines
            drawn = {"": draw_scores(lines, x_label=entry["x"], y_label=y, title=picture.title,
                                    log_x=picture.log_x)}  # fmt: skip
        stem = f"{study.name}-{len(entries) + 1}"
        entry["files"] = {name: write_figure(f, out / "figures", stem, name) for name, f in drawn.items()}
        entries.append(entry)
    return entries


def dots_of(changes: Sequence[Mapping[str, Any]], factor: str) -> Bars:
    """For each change, the mean difference on each data set and its deviation over seeds."""
    return {
        entry[factor]: {data: (e["mean"], e["std"] or 0.0) for data, e in entry["data"].items()}
        for entry in changes
    }


def write_figure(figure: Figure, folder: Path, stem: str, name: str) -> Path:
    """Write a figure as .svg and .png; return the path of the .png."""
    folder.mkdir(exist_ok=True)
    slug = "".join(letter if letter.isalnum() else "-" for letter in name)
    path = folder / (f"{stem}-{slug}.png" if slug else f"{stem}.png")
    for kind in ("svg", "png"):
        write_bytes(path.with_suffix(f".{kind}"), render(figure, kind))
    return path


def write_bytes(path: Path, content: bytes) -> None:
    replace_file(path, lambda beside: beside.write_bytes(content))


def means_row(line: Mapping[str, Any]) -> Row:
    """A row of the means as the page shows it."""
    row: Row = {}
    for name, value in line.items():
        if name in SCORES:
            std = line[f"{name}_std"]
            deviation = "" if std is None else f" ± {100 * std:.2f}"
            row[f"{SCORES[name]}, %"] = None if value is None else Number(f"{100 * value:.2f}{deviation}")
        elif not name.endswith("_std"):
            row[name] = round(value, 1) if name == "seconds" else value
    return row
