"""Whether runs were tested on the same images, and whether one is better there than chance explains."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.proportions import SIGNIFICANT, mcnemar, percent, wilson
from vitkit.report.html import Markup, Number, details, element, name, note, table

FIRST, ROWS = 20, 1000  # classes at first, and behind a click
COLUMNS = 8  # runs in the table of classes
Run = Mapping[str, Any]


def test_of(run: Run) -> Mapping[str, Any]:
    return (run["result"] or {}).get("test") or {}


def is_same(a: Run, b: Run) -> bool:
    """By content where both runs know it, else by names, labels and sizes; unknown counts as another set."""
    mine, other = a.get("tested") or {}, b.get("tested") or {}
    key = "content" if mine.get("content") and other.get("content") else "names"
    return mine.get(key) is not None and mine.get(key) == other.get(key)


def is_known(run: Run) -> bool:
    """Whether the run folder tells which images it was tested on."""
    tested = run.get("tested") or {}
    return bool(tested.get("content") or tested.get("names"))


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The finished runs by test set, each in their order."""
    found: list[list[Run]] = []
    for run in runs:
        if run["result"]:
            group = next((group for group in found if is_same(group[0], run)), None)
            if group is None:
                found.append([run])
            else:
                group.append(run)
    return found


def counts(run: Run) -> bool:
    """Whether its result is a share of images that are right, of which there is an interval."""
    test = test_of(run)
    return test.get("top1") is not None and "mean_average_precision" not in test


def only_right(a: Run, b: Run) -> tuple[int, int] | None:
    """The images that only the first of two runs has right, and only the second; None: not kept."""
    mine, other = (run["tested"].get("right") if run.get("tested") else None for run in (a, b))
    if not mine or not other or mine.keys() != other.keys():
        return None
    return (sum(right and not other[image] for image, right in mine.items()),
            sum(right and not mine[image] for image, right in other.items()))  # fmt: skip


def p_value(a: Run, b: Run) -> float | None:
    """Of the same images; None where it is not known which of them each run has right."""
    pair = only_right(a, b)
    return None if pair is None else mcnemar(*pair)


def is_better(a: Run, b: Run, comparisons: int) -> bool:
    """Whether the first is better on the same images, at 5 % over so many comparisons.

    Where the answers were not kept, the intervals must be apart, which asks for more.
    """
    first, second = test_of(a), test_of(b)
    if first["top1"] <= second["top1"]:
        return False
    p = p_value(a, b)
    if p is not None:
        return p * comparisons < SIGNIFICANT
    return wilson(first["top1"], first["images"])[0] > wilson(second["top1"], second["images"])[1]


def best_of(group: Sequence[Run]) -> Run:
    return max(group, key=lambda run: (test_of(run)["top1"], -test_of(run)["loss"]))


def winner(group: Sequence[Run]) -> Run | None:
    """The run that is better than each of the others, if one is."""
    best = best_of(group)
    others = [run for run in group if run is not best]
    return best if all(is_better(best, run, len(others)) for run in others) else None


def section_of(runs: Sequence[Run], called: Mapping[int, str]) -> str:
    """Of each test set that several runs share: the best beside the others, and class by class."""
    shared = [group for group in groups(runs) if len(group) > 1 and all(map(counts, group))]
    told = ""
    for group in shared:
        test, names = test_of(group[0]), [called[id(run)] for run in group]
        kind = "validation" if test.get("split") == "val" else "test"
        if len(shared) > 1:
            told += element("h3", f"{test['images']:,} {kind} images: {', '.join(names)}")
        told += pairs_table(group, called) + classes_table(group, names)
    return told


def pairs_table(group: Sequence[Run], called: Mapping[int, str]) -> str:
    """The run with the most images right beside each of the others."""
    best = best_of(group)
    others = [run for run in group if run is not best]
    label, rows = called[id(best)], []
    for run in others:
        pair, p = only_right(best, run) or (None, None), p_value(best, run)
        better = is_better(best, run, len(others))
        rows.append({
            f"{label} beside": name(called[id(run)], 80),
            "only the first right": pair[0], "only the second right": pair[1],
            "p": Number("–" if p is None else f"{p:.2g}"),
            "difference": "more than chance" if better else "within chance",
        })  # fmt: skip
    lead = (
        f"The same {test_of(best)['images']:,} images. p is McNemar's exact test: how often two equally good "
    )
    lead += "models would differ so much by chance."
    if len(others) > 1:
        lead += f" With {len(others)} comparisons a difference counts below {SIGNIFICANT / len(others):.2g}."
    if any(p_value(best, run) is None for run in others):
        lead += " Where the answers to single images were not kept, the 95 % intervals must not overlap."
    return note(lead) + table(rows)


def classes_table(group: Sequence[Run], names: Sequence[str]) -> str:
    """The accuracy of each class by run, those that differ most first."""
    shown = list(zip(group, names, strict=True))[:COLUMNS]
    first = test_of(group[0]).get("per_class") or {}
    rows = []
    for kind, row in first.items():
        cells = [(test_of(run).get("per_class") or {}).get(kind) or {} for run, _ in shown]
        shares = [cell.get("accuracy") for cell in cells]
        known = [share for share in shares if share is not None]
        if not row["images"] or len(known) < len(shares):
            continue
        images = row["images"]
        line: dict[str, Any] = {"class": name(kind, 80), "images": images}
        line |= {
            label: Number(percent(share, images)) for (_, label), share in zip(shown, shares, strict=True)
        }
        line["largest difference"] = Number(f"{round((max(known) - min(known)) * images)} images")
        rows.append((max(known) - min(known), line))
    rows.sort(key=lambda one: -one[0])
    lines = [line for gap, line in rows if gap]
    if not lines:
        return note("Class by class they have equally many images right.") if rows else ""
    told = element("h3", "Class by class") + table(lines[:FIRST])
    if lines[FIRST:]:
        told += details(f"{len(lines) - FIRST:,} more classes that differ", table(lines[FIRST:ROWS]))
    if same := len(rows) - len(lines):
        told += note(f"In {same:,} more classes they have equally many right.")
    return Markup(told)
