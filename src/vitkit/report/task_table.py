"""A table of metrics that a task defines: on a page, on a terminal, and as JSON in a run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from vitkit.report.charts import bar
from vitkit.report.html import Number, details, fixed_percent, name, note, table

Kind = Literal["name", "text", "count", "percent", "score"]
FIRST, NAMED = 40, 120  # rows of a page before the others are collapsed; characters of a name
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """Rows of plain values, and how each column is written."""

    title: str
    columns: Mapping[str, Kind]  # in their order; score: three decimals
    rows: Sequence[Row]
    bar: str = ""  # the column that a page also draws as a bar
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "columns": dict(self.columns), "rows": [dict(row) for row in self.rows],
                "bar": self.bar, "note": self.note}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TaskTable":
        fields = ("title", "columns", "rows", "bar", "note")
        return cls(**{key: content[key] for key in fields})

    def lines(self) -> list[dict[str, Any]]:
        """The rows for a terminal."""
        return [{key: cell(row[key], kind) for key, kind in self.columns.items()} for row in self.rows]

    @property
    def numbers(self) -> set[str]:
        return {key for key, kind in self.columns.items() if kind not in ("name", "text")}

    def markup(self) -> Markup:
        """The rows for a page; those after the first ones are collapsed."""
        first, rest = self.rows[:FIRST], self.rows[FIRST:]
        body = (note(self.note) if self.note else Markup()) + table(self.page_row(row) for row in first)
        if rest:
            body += details(f"{len(rest):,} more", table(self.page_row(row) for row in rest))
        return body

    def page_row(self, row: Row) -> dict[str, Any]:
        cells: dict[str, Any] = {}
        for key, kind in self.columns.items():
            cells[key] = name(row[key], NAMED) if kind == "name" else cell(row[key], kind)
            if key == self.bar:
                cells[" "] = bar(row[key] or 0.0)
        return cells


def cell(value: Any, kind: Kind) -> Any:
    """A value as its column writes it."""
    if kind in ("name", "text") or value is None:
        return str(value) if value is not None else Number("–")
    if kind == "percent":
        return fixed_percent(value, 1)
    return Number(f"{value:.3f}" if kind == "score" else f"{value:,}")
