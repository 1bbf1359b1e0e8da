"""Terminal output: tables, facts, predictions and the progress of a run; plain text without a terminal."""

import math
import sys
import time
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

JOINERS = "\u200c\u200d"  # needed by some scripts and by emoji
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # Unicode categories of invisible characters
Predictions = Sequence[tuple[str, float]]  # labels and probabilities, in descending order
Rows = list[tuple[str, Any]]
UNSURE = "unsure"
UNKNOWN = "unknown"  # the label of a rejected image
FIRST = {  # the main facts of a model; all others are listed as its architecture
    "file", "name", "model", "format", "precision", "kind", "parameters", "classes", "image_size",
    "GFLOPs_224", "GFLOPs_384", "address", "megabytes", "pixels", "trained_on", "top1", "view", "licence",
    "input", "input_type", "input_shape", "output", "any_size", "sizes_are_multiples_of", "vitkit",
}  # fmt: skip
WITH_UNIT = {
    "GFLOPs_224": "GFLOPs 224", "GFLOPs_384": "GFLOPs 384", "megabytes": "MiB", "top1": "ImageNet top-1 %",
    "vitkit": "vitkit version",
}  # fmt: skip
EVERY = 10.0  # seconds between progress lines without a terminal
NAMED = 3  # skipped files that are named on a terminal; the others are only counted
SMOOTH = 0.9  # decay of the moving averages: batches differ more than the model changes
MIN_BAR, MAX_BAR = 4, 40
WIDE = 60  # columns from which the word "left" is shown
FIELDS = {  # formats of the numbers in a progress line; the width is constant
    "loss": "loss {:7.4f}", "accuracy": "accuracy {:6.1%}", "rate": "lr {:7.1e}",
    "images/s": "{:6.1f} images/s", "waiting %": "data wait {:3.0f} %",
}  # fmt: skip


class Output(Console):
    """Standard output that re-raises BrokenPipeError, so that main() decides the exit code."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the BrokenPipeError


def console() -> Console:
    """Standard output; 200 columns wide if it is not a terminal."""
    out = Output(highlight=False)
    return out if out.is_terminal else Output(highlight=False, width=200)


def print_table(rows: Iterable[Mapping[str, Any]], title: str = "", numbers: Container[str] = ()) -> None:
    """Print one row per mapping and one column per key; numbers, and columns of `numbers`, at the right."""
    rows = list(rows)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for key in rows[0] if rows else ():
        numeric = key in numbers or all(
            isinstance(row[key], int | float | None) or str(row[key]).endswith(("%", "–")) for row in rows
        )
        table.add_column(key.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(literal(safe_cell(value)) for value in row.values()))
    console().print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print one name and value per line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), literal(safe_cell(value)))
    console().print(table)


def say(text: str, style: str = "") -> None:
    """Print text to standard output; lines are wrapped on a terminal only."""
    out = console()
    out.print(literal(text), style=style or None, soft_wrap=not out.is_terminal)


def warn(text: str) -> None:
    """Print a line to standard error."""
    print(printable(text, lines=True), file=sys.stderr, flush=True)


def literal(text: str) -> Text:
    """Text without rich markup and without control characters."""
    return Text(printable(text, lines=True))


def printable(text: str, *, lines: bool = False) -> str:
    """Untrusted text with invisible characters escaped.

    Escape sequences, bidirectional marks and undecodable bytes are shown by code point, so that no name can
    imitate another. lines: keep line breaks and tabs.
    """
    if text.isprintable():
        return text
    return "".join(map(visible, text if lines else text.replace("\n", "\\n").replace("\t", "\\t")))


def csv_cell(text: str) -> str:
    """Text that a spreadsheet does not evaluate: an apostrophe precedes what looks like a formula."""
    return f"'{printable(text)}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else printable(text)


def visible(character: str) -> str:
    if character in "\n\t" or character in JOINERS or unicodedata.category(character) not in HIDDEN:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8, as surrogateescape decodes it
        return f"\\x{number - 0xDC00:02x}"
    return f"[U+{number:04X}]"


def safe_cell(value: Any) -> str:
    """A value for a table cell; the items of a list are on separate lines."""
    items = value if isinstance(value, tuple | list) else (value,)
    return "\n".join(printable(cell(item)) for item in items) or "-"


def cell(value: Any) -> str:
    """Format a value for display: 1,234, 0.5, yes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 and value else f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, tuple | list):
        return "\n".join(map(str, value)) or "-"
    return str(value)


def duration(seconds: float) -> str:
    """A duration in a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def print_groups(facts: Mapping[str, Any]) -> None:
    """Print the facts of each group as a table of names and values."""
    for title, rows in fact_groups(facts).items():
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(literal(f"{'  ' * bool(title)}{name}"), literal(value_text(value)))
        if title:
            console().print()
            console().print(literal(title), style="bold")
        console().print(table)


def fact_groups(facts: Mapping[str, Any]) -> dict[str, Rows]:
    """Facts by group title: nested mappings and dotted names are groups, all others have an empty title."""
    grouped: dict[str, Rows] = {"": []}
    architecture: Rows = []
    for key, value in facts.items():
        group, _, name = key.rpartition(".")
        if isinstance(value, Mapping):
            grouped[key] = [(inner.replace("_", " "), item) for inner, item in value.items()]
        elif key == "labels":
            grouped[key] = [("" if text.startswith("... ") else str(n), text) for n, text in enumerate(value)]
        elif key == "notes":
            grouped[key] = [("-", text) for text in value]
        else:
            is_detail = "kind" in facts and key not in FIRST
            rows = architecture if is_detail else grouped.setdefault(group, [])
            rows.append((WITH_UNIT.get(key, name.replace("_", " ")), value))
    return {title: rows for title, rows in (grouped | {"architecture": architecture}).items() if rows}


def value_text(value: Any) -> str:
    """A value on one line: a size as 224 x 224, other lists separated by commas."""
    if isinstance(value, tuple | list):
        is_size = len(value) == 2 and all(type(item) is int for item in value)
        return (" x " if is_size else ", ").join(printable(cell(item)) for item in value) or "-"
    return printable(cell(value)) or "-"


def probability_text(probability: float) -> str:
    """A probability as 10.5 %; it is never rounded to 0 or 100 %."""
    if probability < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if probability >= 0.9995 else f"{100 * probability:.1f} %"


def predictions_text(predictions: Predictions) -> str:
    """tabby cat 10.5 %; tiger cat 3.1 %. Labels may contain commas, so the separator is a semicolon."""
    return "; ".join(
        f"{printable(label)} {probability_text(probability)}" for label, probability in predictions
    )


def prediction_line(image: str, predictions: Predictions, *, verdict: str = "", width: int) -> str:
    """A line with the image name and as many predictions as fit the width, at least one.

    verdict: "unsure" or "unknown", which is put before them.
    """
    for count in range(len(predictions), 0, -1):
        line = predictions_text(predictions[:count]) + ("; ..." if count < len(predictions) else "")
        text = f"{printable(image)}: {verdict} ({line})" if verdict else f"{printable(image)}: {line}"
        if cell_len(text) <= width:
            break
    return text


def prediction_rows(image: str, predictions: Predictions, *, verdict: str = "") -> str:
    """The image name, then one line per prediction with aligned probabilities."""
    rows = [f"  {probability_text(probability):>7}  {printable(label)}" for label, probability in predictions]
    return "\n".join([f"{printable(image)}: {verdict}".rstrip(), *rows])


class Live:
    """A progress line with bar, step, remaining time and loss; other metrics are added if there is space."""

    def __init__(
        self,
        title: str,
        total: int,
        start: int = 0,
        *,
        every: float = EVERY,
        quiet: bool = False,
        listed: str = "the run's unusable.json",
    ):
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.title, self.total, self.done, self.listed = title, total, start, listed
        self.numbers: dict[str, Average] = {}
        self.every, self.last = every, time.monotonic()
        self.first: tuple[int, float] | None = None  # the first step of this process and its end time
        self.left: float | None = None
        self.skipped = 0
        self.notes: tuple[str, ...] = ()  # texts at the end of a line of a log, the most important first
        self.interactive = self.console.is_terminal and not quiet
        self.bar = RichLive(console=self.console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> "Live":
        if self.interactive:
            self.bar.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.interactive:
            self.bar.stop()
        if self.interactive and self.skipped > NAMED:
            more = self.skipped - NAMED
            self.say(f"skipped: {more} more images; all are listed in {self.listed}")

    def step(self, step: int, **numbers: float) -> None:
        now = time.monotonic()
        for name, value in numbers.items():
            self.numbers.setdefault(name, Average(0.0 if name == "rate" else SMOOTH)).add(value)
        if self.first is None:
            self.first = step, now  # excludes one-time costs, such as compilation, from the estimate
        elif step > self.first[0]:
            self.left = (now - self.first[1]) / (step - self.first[0]) * (self.total - step)
        self.done = step
        if not self.interactive and (now - self.last >= self.every or step == self.total):
            self.last = now
            left = f"{clock(self.left)} left"
            self.print("  ".join([self.title, self.position(), *self.fields(), left, *self.notes]))

    def more(self, count: int) -> None:
        """Advance by `count` steps."""
        self.step(self.done + count)

    def say(self, text: str) -> None:
        self.print(printable(text, lines=True))

    def skip(self, name: str, reason: str) -> None:
        """Report a skipped file; a log names every file, a terminal only the first few."""
        self.skipped += 1
        if not self.interactive or self.skipped <= NAMED:
            self.say(f"skipped: {name}: {reason}")

    def print(self, text: str) -> None:
        """Print a line above the bar; lines are wrapped on a terminal only."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def position(self) -> str:
        return f"{self.done:>{len(str(self.total))}}/{self.total}"

    def fields(self) -> list[str]:
        """The formatted numbers, the most important first."""
        values = {name: average.value for name, average in self.numbers.items()}
        return [field(name, values[name]) for name in [*FIELDS, *(values.keys() - FIELDS)] if name in values]

    def line(self, width: int) -> tuple[str, int, str]:
        """The text before the bar, the length of the bar, and the text after it, for the given width."""
        left = f"{clock(self.left)} left" if width >= WIDE else clock(self.left)
        before, after, *optional = f"{self.title} ", f" {self.position()} {left}", *self.fields()
        if "loss" in self.numbers:
            after = f"{after}  {optional.pop(0)}"
        optional = [*self.notes[:1], *optional, *self.notes[1:]]
        space = width - len(after)
        if space < len(before) + MIN_BAR:
            before = ""
        space -= len(before)
        for text in optional:
            if space - len(text) - 2 < 2 * MIN_BAR:
                break
            after, space = f"{after}  {text}", space - len(text) - 2
        return before, max(0, min(MAX_BAR, space)), after

    def render(self) -> Text:
        """The progress line as rich redraws it."""
        # some terminals wrap after the last column
        before, length, after = self.line(self.console.width - 1)
        full, rest = ("#", "-") if self.console.options.ascii_only else ("━", "─")
        done = round(length * min(1.0, self.done / max(1, self.total)))
        text = Text(before, no_wrap=True, overflow="crop")
        text.append(full * done, "bar.finished" if self.done >= self.total else "bar.complete")
        return text.append(rest * (length - done), "bar.back").append(after)


class Average:
    """A bias-corrected exponential moving average."""

    def __init__(self, decay: float):
        self.decay, self.total, self.weight, self.last = decay, 0.0, 0.0, math.nan

    def add(self, value: float) -> None:
        self.last = value
        if math.isfinite(value):
            self.total = self.decay * self.total + (1 - self.decay) * value
            self.weight = self.decay * self.weight + 1 - self.decay

    @property
    def value(self) -> float:
        """The average, or the last value if it is not finite."""
        return self.total / self.weight if self.weight and math.isfinite(self.last) else self.last


def field(name: str, value: float) -> str:
    """A number with its name in constant width; very large numbers may be wider."""
    template = FIELDS.get(name, f"{name} {{:7.4g}}")
    if name == "loss" and abs(value) >= 100:
        template = "loss {:7.1f}" if abs(value) < 1e5 else "loss {:7.1e}"
    if name == "images/s" and value >= 1000:
        template = "{:6.0f} images/s"
    return template.format(value)


def clock(seconds: float | None) -> str:
    """A duration as h:mm:ss, or in days from 100 hours on."""
    if seconds is None:
        return "-:--:--"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours // 24:>3} days" if hours >= 100 else f"{hours}:{rest // 60:02}:{rest % 60:02}".rjust(7)
