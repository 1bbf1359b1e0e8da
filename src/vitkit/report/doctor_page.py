"""The HTML page of `vitkit doctor --model`: likely wrong labels, near-duplicates and outliers to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vitkit.report.html import commands, details, fill, name, note, page, picture, table
from vitkit.report.terminal import probability_text

NAMED = 80  # characters of a label or file name below a picture


@dataclass(frozen=True)
class Photo:
    """An image on the page, and what is said about it."""

    image: str  # a JPEG in base64; empty: no longer readable
    file: str
    split: str
    label: str
    suggested: str = ""
    probability: float = 0.0

    def shown(self) -> dict[str, Any]:
        return {
            "image": picture(self.image, "image/jpeg", f"labelled {self.label[:40]}") if self.image else "",
            "file": name(self.file, NAMED), "split": self.split, "label": name(self.label, NAMED),
            "where": "" if self.file.startswith(f"{self.split}/") else f"{self.split}: ",
            "suggested": name(self.suggested, NAMED) if self.suggested else "",
            "probability": probability_text(self.probability).replace(" ", "\N{NO-BREAK SPACE}"),
        }  # fmt: skip


@dataclass(frozen=True)
class DoctorPage:
    """The content of the page; of each kind the first images, and how many there are."""

    data: str
    model: str
    checked: int  # images
    labels: Sequence[Photo]
    groups: Sequence[Sequence[Photo]]
    outliers: Sequence[Photo]
    counts: Mapping[str, int]  # labels, groups and outliers in all
    findings: Sequence[Mapping[str, Any]]
    splits: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    agreement: str  # how many labels the out-of-fold answers agree with
    table: str  # the name of the table to edit
    next_commands: Sequence[str]

    def render(self) -> str:
        sections = {
            "Likely wrong labels": self.label_section(),
            "Near-duplicates": self.group_section(),
            "Outliers": self.outlier_section(),
            "What to do": self.remedy_section(),
            "All findings": self.finding_section(),
        }
        title = f"{self.data}: images to look at"
        return page(title, self.header(title), sections)

    def header(self, title: str) -> Markup:
        wrong, groups, far = (self.counts[kind] for kind in ("labels", "groups", "outliers"))
        small = f"likely wrong {'label' if wrong == 1 else 'labels'} among {self.checked:,} images"
        others = (
            f"{groups:,} {'group' if groups == 1 else 'groups'} of near-duplicates, "
            f"{far:,} {'outlier' if far == 1 else 'outliers'}"
        )
        values = title, f"{wrong:,}", small, others, self.model, self.agreement
        return fill("doctor.html", "header", *values, self.notes)

    def lead(self, kind: str, shown: int, text: str) -> Markup:
        count = self.counts[kind]
        part = f" The first {shown:,} of {count:,}; {self.table} lists all of them." if shown < count else ""
        return note(text + part)

    def label_section(self) -> Markup:
        if not self.labels:
            return note("None.") if not self.notes else Markup()
        text = (
            "The label of each image, and the one that a linear classifier on the model's features prefers, "
            "which was trained on other images. The most certain come first; some are right and only unusual."
        )
        shown = fill("doctor.html", "labels", [photo.shown() for photo in self.labels])
        return self.lead("labels", len(self.labels), text) + shown

    def group_section(self) -> Markup:
        if not self.groups:
            return note("None that the comparison of pixels had not found.")
        text = "Images with almost the same features, which the comparison of pixels did not find."
        shown = fill("doctor.html", "groups", [[photo.shown() for photo in group] for group in self.groups])
        return self.lead("groups", len(self.groups), text) + shown

    def outlier_section(self) -> Markup:
        if not self.outliers:
            return note("None.")
        text = "Images that are far from all others in the model's features. The farthest come first."
        shown = fill("doctor.html", "outliers", [photo.shown() for photo in self.outliers])
        return self.lead("outliers", len(self.outliers), text) + shown

    def remedy_section(self) -> Markup:
        return fill("doctor.html", "remedy", self.table, commands(self.next_commands))

    def finding_section(self) -> Markup:
        rows = [
            {"": fill("run.html", "severity", row["severity"]),
             "finding": fill("doctor.html", "finding", name(row["text"], 1000), row["remedy"])}
            for row in self.findings
        ]  # fmt: skip
        splits = details("Images per split", table(self.splits))
        return (table(rows) if rows else note("No problems found.")) + splits
