"""One page with the claims of all studies: the paper, the measurement, the verdict, a small figure."""

import csv
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.report.claim_figure import draw_curve, draw_interval
from vitkit.report.figure_style import render
from vitkit.report.study_page import OUTCOMES, capitalized
from vitkit.report.terminal import say
from vitkit.studies.claims import NOT_TESTED, Verdict, evaluate_claim, number
from vitkit.studies.folder import PLAN, Row, read_plan
from vitkit.studies.scale import STUDIES
from vitkit.studies.study import Claim, Study

PAGE, FIGURES = "index.md", "figures"
START = """# The paper's claims at a glance

{counts} [Studies](../studies.md#how-claims-are-tested)
says what a claim compares and how its verdict is computed. A verdict is about small models on small data,
and no more.

In the figures, the dot is the measured difference with its 95 % interval over seeds. The diamond is the
paper's own value, where it has a number; it is about far larger models and other data. The shaded range
counts as equal or good enough. Curves show the difference along an axis; the claim is about where they cross
zero. An inconclusive claim says how many seeds would decide it, if the differences vary as much as they did
here; from few seeds, this is a rough estimate.
"""
FOOT = "\nThis page is written by `vitkit study index FOLDER... --to DIR` from the tables of the studies.\n"


@dataclass(frozen=True)
class Published:
    """The table of a study, and where it and the report are."""

    study: Study
    rows: Sequence[Row]
    table: Path
    report: Path
    scale: str = "mini"


def write_index(folders: Sequence[Path], to: Path) -> dict[str, Any]:
    """Write the page and its figures from the results in some folders; return the outcomes of all claims."""
    published: dict[str, Published] = {}
    for folder in folders:
        for one in read_results(folder):
            name = one.study.name
            if name in published:
                raise Error(
                    f"two results of the study {name}: {published[name].table} and {one.table}; give one "
                    "folder of each study",
                    code="study.value",
                )
            published[name] = one
    (to / FIGURES).mkdir(parents=True, exist_ok=True)
    entries, sections, missing = list[dict[str, Any]](), list[str](), list[str]()
    for study in (study for study in STUDIES.values() if study.claims):
        result = published.get(study.name)
        claims = study.claims_at(result.scale if result else "mini")
        rows = result.rows if result else ()
        verdicts = [(claim, evaluate_claim(claim, rows, study.score)) for claim in claims]
        remove_figures(study, to)
        entries += [{"study": study.name} | verdict.to_json() for _, verdict in verdicts]
        (sections if result else missing).append(section(study, result, verdicts, to))
    text = START.format(counts=counted(entries)) + "".join([*sections, *missing]) + FOOT
    replace_file(to / PAGE, lambda beside: beside.write_text(text, encoding="utf-8"))
    return {"page": str(to / PAGE), "claims": entries}


def read_results(folder: Path) -> list[Published]:
    """The result of a study folder, or those of a folder with published tables STUDY.csv."""
    if (folder / PLAN).exists():
        plan = read_plan(folder)
        table = folder / "table.csv"
        return [Published(STUDIES[plan.study], read_table(table), table, folder / "page.html",
                          plan.asked["scale"])]  # fmt: skip
    tables = {name: folder / f"{name}.csv" for name in STUDIES}
    results = [Published(STUDIES[name], read_table(path), path, path.with_suffix(".html"))
               for name, path in tables.items() if path.exists()]  # fmt: skip
    if not results:
        raise Error(
            f"{folder} has no results: neither the {PLAN} of a study folder nor a table such as scaling.csv",
            code="study.unknown",
        )
    return results


def read_table(path: Path) -> list[Row]:
    """The rows of a table.csv, with numbers as numbers and None for empty cells."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{name: value_of(text) for name, text in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError, csv.Error, TypeError) as error:
        raise Error(f"{path} cannot be read: {error}", code="study.corrupt") from None
    if not rows or not {"trial", "seed", "top1"} <= rows[0].keys():
        raise Error(
            f"{path} is not the table of a study: it has no trial, seed and top1", code="study.corrupt"
        )
    return rows


def value_of(text: str) -> Any:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def counted(entries: Sequence[Mapping[str, Any]]) -> str:
    """How many claims there are, and the outcomes."""
    count = Counter(entry["outcome"] for entry in entries)
    parts = [f"{count[outcome]} {one if count[outcome] == 1 else many}"
             for outcome, (one, many, _) in OUTCOMES.items() if count[outcome]]  # fmt: skip
    return f"Of {len(entries)} claims, {', '.join(parts[:-1])}{' and ' * (len(parts) > 1)}{parts[-1]}."


def section(
    study: Study, result: Published | None, verdicts: Sequence[tuple[Claim, Verdict]], to: Path
) -> str:
    """A heading, how it was measured, and a table with a line for each claim."""
    text = f"\n## {study.name} ({study.shows})\n\n{capitalized(study.about)}. "
    if result is None:
        text += "There is no published result yet.\n\n| claim | paper |\n|---|---|\n"
        return text + "".join(
            f"| {capitalized(claim.text)} | {paper_value(claim)} |\n" for claim, _ in verdicts
        )
    text += f"{conditions(result, to)}\n\n"
    text += "| claim | paper | measured | verdict | figure |\n|---|---|---|---|---|\n"
    for place, (claim, verdict) in enumerate(verdicts, start=1):
        needed = capitalized(verdict.needed.removeprefix("; "))
        cells = [capitalized(claim.text), paper_value(claim), verdict.words.removesuffix(verdict.needed),
                 f"**{verdict.outcome}**" + (f". {needed}" if needed else ""),
                 figure_cell(study, claim, verdict, place, to)]  # fmt: skip
        text += f"| {' | '.join(cell or '–' for cell in cells)} |\n"
    return text


def conditions(result: Published, to: Path) -> str:
    """How a result was measured, in one line, with links to the report and the table."""
    rows = result.rows
    facts = [f"{len(rows)} trials, {len({row['seed'] for row in rows})} seeds"]
    sizes = sorted({row["parameters"] for row in rows if row.get("parameters")})
    steps = sorted({row["steps"] for row in rows if row.get("steps")})
    images = sorted({row["train_images"] for row in rows if row.get("train_images")})
    facts += [f"{ranged([size / 1e6 for size in sizes])} million parameters"] if sizes else []
    facts += [f"{ranged(steps)} steps"] if steps else []
    facts += [f"{ranged(images)} training images"] if images else []
    facts += sorted({f"{row['device']}, {row['precision']}" for row in rows if row.get("device")})
    links = [(result.report, "report with the command and all numbers"), (result.table, "table")]
    shown = [f"[{name}]({relative(path, to)})" for path, name in links if path.exists()]
    return f"{'; '.join(facts)}: {', '.join(shown)}."


def relative(path: Path, to: Path) -> str:
    return Path(os.path.relpath(path, to)).as_posix()


def ranged(values: Sequence[float]) -> str:
    ends = list(dict.fromkeys(number(value) if value < 1000 else f"{value:,.0f}" for value in values))
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def paper_value(claim: Claim) -> str:
    """The paper's own value, and where it is; many are only plotted."""
    unit = {"compute": "times the compute", "data": "times the data"}.get(claim.measure, claim.unit)
    sign = "+" if claim.measure in ("score", "crossing") else ""
    values = " to ".join(f"{value:{sign if value else ''}g}" for value in claim.printed)
    return f"{values} {unit} ({claim.source})" if values else claim.source or "–"


def figure_cell(study: Study, claim: Claim, verdict: Verdict, place: int, to: Path) -> str:
    """Draw the figure of a claim, and return the Markdown that shows it; empty without a measurement."""
    figure = draw(claim, verdict)
    if figure is None:
        return ""
    path = to / FIGURES / f"{study.name}-claim-{place}.svg"
    content = render(figure, "svg")
    replace_file(path, lambda beside: beside.write_bytes(content))
    return f"![{claim.text}]({FIGURES}/{path.name})"


def draw(claim: Claim, verdict: Verdict) -> Figure | None:
    """The figure of a claim; None if nothing was measured."""
    if verdict.outcome == NOT_TESTED or verdict.difference is None:
        return None
    if verdict.curve:
        points = [(x, *(100 * (e.mean if end is None else end) for end in (e.mean, e.low, e.high)))
                  for x, e in verdict.curve]  # fmt: skip
        label = "times the data" if claim.measure == "data" else "pre-training images"
        return draw_curve(points, x_label=label, printed=claim.printed)
    ratio = claim.measure == "compute"
    scale = 1.0 if ratio else 100.0
    ends = None
    if verdict.low is not None and verdict.high is not None:
        ends = scale * verdict.low, scale * verdict.high
    printed = [math.log2(value) if ratio else value for value in claim.printed]
    least, most = (scale * limit for limit in claim.limits)
    unit = "times less compute" if ratio else claim.unit
    return draw_interval(scale * verdict.difference, ends, limits=(least, most), printed=printed, ratio=ratio,
                         unit=unit)  # fmt: skip


def remove_figures(study: Study, to: Path) -> None:
    """Remove the figures of an earlier page, which may have had other claims."""
    for path in (to / FIGURES).glob(f"{study.name}-claim-*.svg"):
        path.unlink()


def print_index(summary: Mapping[str, Any]) -> None:
    say(f"{counted(summary['claims'])} page: {summary['page']}")
