"""The HTML page of `vitkit doctor` on data with masks or boxes: samples, and the numbers of each class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vitkit.report.html import (
    Number,
    details,
    element,
    fill,
    fixed_percent,
    joined,
    name,
    note,
    page,
    picture,
    table,
)

NAMED = 80  # characters of a file name below a picture


@dataclass(frozen=True)
class Sample:
    """An image with its annotations drawn."""

    image: str  # a JPEG in base64
    file: str
    split: str
    caption: str  # what is annotated

    def shown(self) -> Markup:
        drawn = picture(self.image, "image/jpeg", f"{self.split}: {self.caption}")
        where = element("div", self.caption) + element("div", name(self.file, NAMED), class_="file")
        return element("li", drawn + where)


@dataclass(frozen=True)
class TargetPage:
    """The content of the page."""

    data: str
    samples: Sequence[Sample]
    targets: Mapping[str, Mapping[str, Any]]  # facts by split, as in the report of the doctor
    findings: Sequence[Mapping[str, Any]]

    def render(self) -> str:
        images = sum(facts["images"] for facts in self.targets.values())
        title = f"{self.data}: masks and boxes"
        kinds = ", ".join(sorted({kind for facts in self.targets.values() for kind in facts["kinds"]}))
        header = element("h1", name(title)) + element("p", f"{images:,} images with {kinds}.")
        sections = {
            "Samples": element("ul", joined(sample.shown() for sample in self.samples), class_="pictures"),
            "Classes": joined(self.class_section(split) for split in self.targets),
            "All findings": self.finding_section(),
        }
        return page(title, header, sections)

    def class_section(self, split: str) -> Markup:
        facts = self.targets[split]
        rows = [class_row(key, row) for key, row in facts["classes"].items()]
        body = table(rows) if rows else note("Not counted.")
        if "ignored" in facts:
            body += note(f"{facts['ignored']:.1%} of the pixels are ignored.")
        if "objects" in facts:
            body += note(f"{facts['objects']:,} objects, {facts['crowd']:,} marked as crowd or difficult; at "
                         f"most {facts['most']:,} in one image, none in {facts['empty']:,}.")  # fmt: skip
        return details(f"{split}: {facts['images']:,} images", body)

    def finding_section(self) -> Markup:
        rows = [
            {"": fill("run.html", "severity", row["severity"]),
             "finding": fill("doctor.html", "finding", name(row["text"], 1000), row["remedy"])}
            for row in self.findings
        ]  # fmt: skip
        return table(rows) if rows else note("No problems found.")


def class_row(key: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A class in a table."""
    cells: dict[str, Any] = {"class": name(key), "images": row["images"]}
    if "pixels" in row:
        return cells | {"pixels": fixed_percent(row["pixels"])}
    side, aspect = (
        Number("–" if row[k] is None else f"{row[k]:.{d}f}") for k, d in (("side", 0), ("aspect", 2))
    )
    return cells | {"objects": row["objects"], "median side at 512 px": side, "width : height": aspect}
