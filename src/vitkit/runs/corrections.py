"""The table of suspicious images that `vitkit doctor` writes, and its corrections applied to a data set."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import numpy as np

from vitkit.data.findings import some
from vitkit.data.sources.source import Source
from vitkit.data.sources.tables import csv_rows
from vitkit.data.splits import same_classes
from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.recipes.recipe import read_recipe
from vitkit.report.terminal import csv_cell
from vitkit.runs.folder import same_place
from vitkit.weights.locate import RECIPE

FILE = "corrections.csv"  # in a run folder: a copy of the table that the run was started with
COLUMNS = ("image", "split", "label", "suggested", "probability", "reason", "duplicate_of", "action")
ACTIONS = ("exclude", "relabel")  # an empty cell keeps the image as it is


@dataclass(frozen=True)
class Suspect:
    """A row of the table: an image to look at, and why."""

    image: str
    split: str
    label: str  # empty for multi-label data
    suggested: str = ""  # the label to use instead
    probability: float | None = None  # of the suggested label
    reasons: tuple[str, ...] = ()  # label, near-duplicate, outlier
    duplicate_of: str = ""  # split:image
    action: str = ""

    def cells(self) -> dict[str, str]:
        shown = "" if self.probability is None else f"{self.probability:.4f}"
        return dict(zip(COLUMNS, (
            csv_cell(self.image), self.split, csv_cell(self.label), csv_cell(self.suggested), shown,
            "; ".join(self.reasons), csv_cell(self.duplicate_of), self.action,
        ), strict=True))  # fmt: skip


def write_table(path: Path, suspects: Iterable[Suspect]) -> None:
    """Write the table; every action is empty, so that nothing changes before somebody has looked."""
    text = StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(suspect.cells() for suspect in suspects)
    replace_file(path, lambda beside: beside.write_bytes(text.getvalue().encode("utf-8")))


@dataclass(frozen=True)
class Change:
    """A correction: leave an image out, or give it another label."""

    where: str  # file and line, for messages
    split: str
    image: str
    label: str  # the new one; empty: leave it out


def read_changes(path: Path) -> list[Change]:
    """The rows of a table that have an action."""
    if not path.is_file():
        raise Error(
            f"--corrections {path}: there is no such file; `vitkit doctor DATA --model MODEL` writes one",
            code="file.not-found",
        )
    changes: dict[tuple[str, str], Change] = {}
    for where, row in csv_rows(path, ("image", "split", "suggested", "action")):
        action = row["action"].strip().lower()
        if not action:
            continue
        if action not in ACTIONS:
            raise Error(
                f"{where}: action {row['action']!r} is none of {', '.join(ACTIONS)}; leave the cell empty to "
                "keep the image as it is",
                code="data.labels",
            )
        if action == "relabel" and not row["suggested"]:
            raise Error(f"{where}: relabel needs the new label in the column suggested", code="data.labels")
        label = row["suggested"] if action == "relabel" else ""
        change = Change(where, row["split"], row["image"], label)
        before = changes.setdefault((change.split, change.image), change)
        if before.label != label:
            raise Error(f"{where}: {row['image']!r} has another action in {before.where}", code="data.labels")
    if not changes:
        raise Error(
            f"{path}: no row has an action; look at the images and write exclude or relabel in the column "
            "action",
            code="data.empty",
        )
    return list(changes.values())


def corrected(splits: Mapping[str, Source], path: Path) -> dict[str, Source]:
    """The opened data without the excluded images, and with the new labels; the images are not touched."""
    known = {csv_cell(name): name for source in splits.values() for name in source.classes}
    by_split: dict[str, list[Change]] = {}
    for change in read_changes(path):
        if change.split not in splits:
            raise refusal(change, f"no split {change.split!r} in the data, only {', '.join(splits)}")
        by_split.setdefault(change.split, []).append(change)
    return {
        split: correct(source, by_split[split], known) if split in by_split else source
        for split, source in splits.items()
    }


def correct(source: Source, changes: list[Change], known: Mapping[str, str]) -> Source:
    """One split; an unknown image or label is an error that names its row.

    known: the classes of all splits, by their name in the table.
    """
    wanted = {change.image: change for change in changes}
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(source.keys):
        if (written := csv_cell(key)) in wanted:
            rows.setdefault(written, []).append(row)
    for change in changes:
        if change.image not in rows:
            raise refusal(change, f"no image {change.image!r} in {change.split}; is the table of other data?")
        if change.label and source.targets is not None:
            raise refusal(change, "the images have masks or boxes, so that they can only be excluded")
        if change.label and source.multilabel:
            raise refusal(change, "the images have several labels each, so that they can only be excluded")
        if change.label and change.label not in known:
            raise refusal(change, f"no class {change.label!r}; the data has {some(list(known.values()))}")
    new = {known[change.label]: None for change in changes if change.label}
    source = same_classes(source, tuple(dict.fromkeys((*source.classes, *new)))) if new else source
    labels, kept = np.array(source.labels) if new else source.labels, np.ones(len(source), dtype=bool)
    for change in changes:
        if change.label:
            labels[rows[change.image]] = source.classes.index(known[change.label])
        else:
            kept[rows[change.image]] = False
    changed = replace(source, labels=labels)
    return changed if kept.all() else changed.take(np.flatnonzero(kept))


def refusal(change: Change, problem: str) -> Error:
    return Error(f"{change.where}: {problem}", code="data.labels")


def keep_copy(path: Path, out: Path) -> str:
    """Copy the table into the run folder; for example: manifest.csv: 3 images excluded, 5 relabelled."""
    changes, content = read_changes(path), path.read_bytes()
    replace_file(out / FILE, lambda beside: beside.write_bytes(content))
    excluded = sum(not change.label for change in changes)
    return f"{path}: {excluded:,} images excluded, {len(changes) - excluded:,} relabelled"


def as_in_run(opened: Mapping[str, Source], data: str, folder: Path | None) -> Mapping[str, Source]:
    """The opened data with the corrections of a run, if it is the data that the run was trained on."""
    recipe = read_recipe(folder / RECIPE) if folder else None
    if folder is None or recipe is None or not recipe.corrections or not same_place(recipe.data, data):
        return opened
    return corrected(opened, folder / FILE)


def has_actions(path: Path) -> bool:
    """Whether a table exists and somebody has written actions into it."""
    if not path.is_file():
        return False
    return any(row["action"].strip() for _, row in csv_rows(path, ("image", "action")))
