"""`vitkit report`: the HTML page of a run, a protocol or a suite, or a comparison of several runs."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import Error, similar_path
from vitkit.report.compare_page import compare_page, protocol_page
from vitkit.report.run_page import run_page
from vitkit.report.suite_page import suite_page
from vitkit.report.terminal import say
from vitkit.runs.page import BIT, REPORT, drawing, gather, link, read, write_page
from vitkit.runs.provenance.predictions import tested_images

if TYPE_CHECKING:  # the report verb does not import torch
    from vitkit.runtime.runtime import Runtime

COMPARED = "compare.html"


def report(
    places: Sequence[str],
    out: Path | None,
    *,
    price_per_hour: float | None = None,
    emit: Callable[[Any], None] | None,
) -> None:
    """Write the page and print its path; `price_per_hour` is the price of one device-hour."""
    folders = [Path(place) for place in places]
    if not folders:
        raise Error("no run given; expected one run folder, or several to compare", code="request.missing")
    if len(folders) == 1:
        path = draw(folders[0], out, price_per_hour)
    else:
        path = compare(folders, out or Path(COMPARED), price_per_hour)
    if emit:
        return emit({"report": str(path), "bytes": path.stat().st_size, "runs": [str(f) for f in folders]})
    say(f"report: {path} ({path.stat().st_size / 1e3:,.0f} kB)")


def draw_if_possible(folder: Path, runtime: "Runtime", log: Callable[[str], None]) -> None:
    """Write the page at the end of a run in the main process; a failure is only logged."""
    from vitkit.runs.artifacts import warn_on_error

    if runtime.is_main:
        with warn_on_error(REPORT, log):
            draw(folder, None)


def draw(folder: Path, out: Path | None, per_hour: float | None = None) -> Path:
    """Write the page of a run, protocol or suite folder."""
    path = out or folder / REPORT
    if (folder / "suite.json").exists():
        return draw_suite(folder, path, per_hour)
    if (folder / "recipe.json").exists():
        with drawing(folder):
            return write_page(checked(path), run_page(gather(folder, path, per_hour)))
    parts = [*sorted(folder.glob("rate-*")), folder / BIT, *sorted(folder.glob("seed-*"))]
    runs = [part for part in parts if (part / "recipe.json").exists()]
    if not runs:
        raise Error(
            f"{folder}: not a run folder (no recipe.json, protocol.json or suite.json);"
            f"{similar_path(folder)} expected the --out of a training run",
            code="run.not-found",
        )
    title = folder.resolve().name
    with drawing(folder):
        page = protocol_page(read(folder / "protocol.json"), run_facts(runs, path, per_hour), title)
    return write_page(checked(path), page)


def draw_suite(folder: Path, path: Path, per_hour: float | None = None) -> Path:
    """Write the page of a suite and the pages of its tasks, which it links to."""
    suite: dict[str, Any] | None = read(folder / "suite.json")
    if suite is None:
        raise Error(
            f"{folder / 'suite.json'}: not valid JSON; run the suite again to rewrite it",
            code="run.corrupt",
        )
    links = {}
    with drawing(folder):
        for row in suite["tasks"]:
            task = folder / row["task"]
            if (task / "protocol.json").exists():
                links[row["task"]] = link(draw(task, None, per_hour), path)
        page = suite_page(suite, folder.resolve().name, links)
    return write_page(checked(path), page)


def compare(folders: Sequence[Path], path: Path, per_hour: float | None = None) -> Path:
    """Write a comparison of several runs; a protocol folder stands for its seeds."""
    runs: list[Path] = []
    for folder in folders:
        seeds = [f for f in sorted(folder.glob("seed-*")) if (f / "recipe.json").exists()]
        if not seeds and not (folder / "recipe.json").exists():
            raise Error(
                f"{folder}: not a run folder (no recipe.json);{similar_path(folder)} expected the --out of a "
                "training run",
                code="run.not-found",
            )
        runs += [folder] if (folder / "recipe.json").exists() else seeds
    with drawing(path):
        page = compare_page(run_facts(runs, path, per_hour))
    return write_page(checked(path), page)


def run_facts(runs: Sequence[Path], path: Path, per_hour: float | None = None) -> list[dict[str, Any]]:
    """The facts of each run for the page at `path`, with a relative link to the run's own report."""
    rows = []
    for run in runs:
        own = run / REPORT
        extra = {"link": link(own, path) if own.exists() else None, "quoted": shlex.quote(str(run))}
        facts = gather(run, path, per_hour)
        split = str(((facts["result"] or {}).get("test") or {}).get("split") or "test")
        rows.append(facts | extra | {"tested": tested_images(run, split)})
    return rows


def checked(path: Path) -> Path:
    if path.is_dir():
        raise Error(
            f"--out {path} is a folder; expected a file name, e.g. {path / REPORT}",
            code="file.not-writable",
        )
    if not path.resolve().parent.is_dir():
        raise Error(
            f"--out {path}: folder {path.parent} does not exist; create it first", code="file.not-found"
        )
    return path
