"""From a table to what a person looks at: means over seeds, lines and bars, figures as files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitkit.experiment.pages import rows as journal_rows
from vitkit.experiment.run import MODEL
from vitkit.inspection.similarity import position_similarity
from vitkit.io.atomic import replace_file
from vitkit.report.figures import Point, draw_bars, draw_scores, draw_similarity, render
from vitkit.report.html import Number
from vitkit.studies.fits import spread
from vitkit.studies.folder import folder_of
from vitkit.studies.study import Picture, Plan, Study
from vitkit.studies.table import Row, chosen
from vitkit.weights.load import load

SCORES = {"top1": "top-1 accuracy", "fewshot_mean": "few-shot accuracy"}
AVERAGED = ("parameters", "GFLOPs", "exaFLOPs", "tpu_v3_core_days", "images_seen", "seconds")

Lines = dict[str, list[Point]]
Bars = dict[str, dict[str, tuple[float, float]]]


def factors_of(plan: Plan) -> list[str]:
    return list(dict.fromkeys(name for one in plan.trials for name in one.factors))


def settings(rows: Sequence[Row], factors: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each setting of some factors, in the order of the table."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in factors), []).append(row)
    return found


def means(rows: Sequence[Row], plan: Plan) -> list[Row]:
    """A row for each setting, over its seeds: scores with their spread, and what a run costs (Table 6)."""
    factors = factors_of(plan)
    told = []
    for setting, part in settings(rows, factors).items():
        line: Row = dict(zip(factors, setting, strict=True)) | {"seeds": len(part)}
        for score in SCORES:
            values = [row[score] for row in part if row[score] is not None]
            s = spread(values) if values else None
            line |= {score: s and s.mean, f"{score}_std": s and s.std}
        told.append(line | {name: mean(row[name] for row in part) for name in AVERAGED})
    return told


def label(setting: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in setting if value is not None) or "all"


def column(picture: Picture, study: Study) -> str:
    return study.score if picture.y == "score" else picture.y


def lines_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Lines:
    """For each line its points: x, the mean over seeds, their standard deviation."""
    y = column(picture, study)
    usable = [r for r in chosen(rows, picture.where) if r.get(y) is not None and r.get(picture.x) is not None]
    found: Lines = {}
    for setting, part in settings(usable, picture.lines).items():
        points = [
            (mean(r[picture.x] for r in group), mean(r[y] for r in group), deviation([r[y] for r in group]))
            for group in same_but_seed(part)
        ]
        found[label(setting)] = sorted(points)
    return found


def same_but_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in their seed alone."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["trial"].rpartition(",seed=")[0], []).append(row)
    return list(found.values())


def deviation(values: Sequence[float]) -> float:
    return spread(values).std or 0.0


def bars_of(picture: Picture, study: Study, rows: Sequence[Row]) -> Bars:
    y = column(picture, study)
    usable = [row for row in chosen(rows, picture.where) if row.get(y) is not None]
    found: Bars = {}
    for (group,), part in settings(usable, [picture.x]).items():
        found[str(group)] = {
            label(setting): (mean(r[y] for r in some), deviation([r[y] for r in some]))
            for setting, some in settings(part, picture.lines).items()
        }
    return found


def band_of(picture: Picture, study: Study, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """By group the lowest and the highest mean of the settings that are shaded."""
    shaded = bars_of(replace(picture, where=picture.band), study, rows)
    ends = {group: [middle for middle, _ in some.values()] for group, some in shaded.items()}
    return {group: (min(some), max(some)) for group, some in ends.items()}


def histories(picture: Picture, study: Study, rows: Sequence[Row], out: Path) -> Lines:
    """For each setting the score as its runs went on, over seeds."""
    y = column(picture, study)
    found: Lines = {}
    for setting, part in settings(chosen(rows, picture.where), picture.lines).items():
        by_step: dict[int, list[float]] = {}
        for row in part:
            for step, value in history(folder_of(out, row["trial"]) / "metrics.jsonl", y):
                by_step.setdefault(step, []).append(value)
        found[label(setting)] = [(s, mean(v), deviation(v)) for s, v in sorted(by_step.items())]
    return found


def history(path: Path, name: str) -> list[tuple[int, float]]:
    return list({row["step"]: row[name] for row in journal_rows(path) if name in row}.items())


def similarities(picture: Picture, rows: Sequence[Row], out: Path) -> dict[str, np.ndarray]:
    """Fig. 10: how alike the position embeddings of places are, for the first seed of each setting.

    Models are large, and somebody may have deleted them: a setting that has none has no map.
    """
    found = {}
    for setting, part in settings(chosen(rows, picture.where), picture.lines).items():
        files = [folder_of(out, row["trial"]) / MODEL for row in part]
        if kept := [file for file in files if file.exists()]:
            found[label(setting)] = position_similarity(load(kept[0]))
    return found


def figures_of(study: Study, rows: Sequence[Row], out: Path) -> list[dict[str, Any]]:
    """Every picture of a study as figures/*.svg and *.png, and what a page needs to show it."""
    told: list[dict[str, Any]] = []
    for picture in study.pictures:
        if not chosen(rows, picture.where):
            continue
        y = SCORES.get(column(picture, study), column(picture, study))
        entry: dict[str, Any] = {"title": picture.title, "kind": picture.kind, "y": y, "log_x": picture.log_x}
        entry["x"] = picture.x_label or picture.x
        drawn: dict[str, Figure] = {}
        if picture.kind == "similarity":
            entry["maps"] = similarities(picture, rows, out)
            drawn = {key: draw_similarity(of, title=key) for key, of in entry["maps"].items()}
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
        stem = f"{study.name}-{len(told) + 1}"
        entry["files"] = {name: write_figure(f, out / "figures", stem, name) for name, f in drawn.items()}
        told.append(entry)
    return told


def write_figure(figure: Figure, folder: Path, stem: str, name: str) -> Path:
    """As .svg and .png; the path of the latter."""
    folder.mkdir(exist_ok=True)
    words = "".join(letter if letter.isalnum() else "-" for letter in name)
    path = folder / (f"{stem}-{words}.png" if words else f"{stem}.png")
    for kind in ("svg", "png"):
        write_bytes(path.with_suffix(f".{kind}"), render(figure, kind))
    return path


def write_bytes(path: Path, content: bytes) -> None:
    replace_file(path, lambda beside: beside.write_bytes(content))


def table6(line: Mapping[str, Any]) -> Row:
    """A row of the means as a page has it."""
    told: Row = {}
    for name, value in line.items():
        if name in SCORES:
            std = line[f"{name}_std"]
            reach = "" if std is None else f" ± {100 * std:.2f}"
            told[f"{SCORES[name]}, %"] = None if value is None else Number(f"{100 * value:.2f}{reach}")
        elif not name.endswith("_std"):
            told[name] = round(value, 1) if name == "seconds" else value
    return told
