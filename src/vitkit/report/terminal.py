"""What a terminal shows: tables, facts, predictions, the progress of a run; text without colour elsewhere."""

import math
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live as Redrawn
from rich.table import Table
from rich.text import Text

JOINERS = "\u200c\u200d"  # parts of words in some scripts, and of emoji
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # kinds of characters that a reader would not see
Predictions = Sequence[tuple[str, float]]  # labels and their probabilities, the likeliest first
Rows = list[tuple[str, Any]]
UNSURE = "unsure"
FIRST = {  # what a reader looks for; the other facts of a model are its architecture
    "file", "name", "model", "format", "precision", "kind", "parameters", "classes", "image_size",
    "GFLOPs_224", "GFLOPs_384", "address", "megabytes", "pixels", "trained_on", "top1", "view", "licence",
    "input", "input_type", "input_shape", "output", "any_size", "sizes_are_multiples_of", "vitkit",
}  # fmt: skip
WITH_UNIT = {
    "GFLOPs_224": "GFLOPs 224", "GFLOPs_384": "GFLOPs 384", "megabytes": "MiB", "top1": "ImageNet top-1 %",
    "vitkit": "vitkit version",
}  # fmt: skip
EVERY = 10.0  # seconds between two lines where there is no terminal
NAMED = 3  # files that are not used and named on a terminal; the others are counted
SMOOTH = 0.9  # of a number shown, the share that its past has: batches differ more than the model changes
LEAST_BAR, MOST_BAR = 4, 40
ROOMY = 60  # columns that have room for more than the numbers
FIELDS = {  # how a number is shown, always with the same width
    "loss": "loss {:7.4f}", "accuracy": "accuracy {:6.1%}", "rate": "rate {:7.1e}",
    "images/s": "{:6.1f} images/s", "waiting %": "waiting {:3.0f} %",
}  # fmt: skip


class Output(Console):
    """Standard output. A reader who leaves early is an error like others: main() decides the exit code."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the BrokenPipeError


def console() -> Console:
    """Standard output; as wide as the table needs when it is not a terminal."""
    out = Output(highlight=False)
    return out if out.is_terminal else Output(highlight=False, width=200)


def print_table(rows: Iterable[Mapping[str, Any]], title: str = "") -> None:
    """One row a mapping, one column a key; numbers stand to the right."""
    rows = list(rows)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for key in rows[0] if rows else ():
        numeric = all(
            isinstance(row[key], int | float | None) or str(row[key]).endswith(("%", "–")) for row in rows
        )
        table.add_column(key.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(literal(safe_cell(value)) for value in row.values()))
    console().print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """One fact a line, its name before it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), literal(safe_cell(value)))
    console().print(table)


def say(text: str, style: str = "") -> None:
    """A text on standard output; in a file or a pipe one line stays one line."""
    out = console()
    out.print(literal(text), style=style or None, soft_wrap=not out.is_terminal)


def warn(text: str) -> None:
    """A line on standard error."""
    print(printable(text, lines=True), file=sys.stderr, flush=True)


def literal(text: str) -> Text:
    """Text without markup, whatever brackets it contains; no character of it controls the terminal."""
    return Text(printable(text, lines=True))


def printable(text: str, *, lines: bool = False) -> str:
    """Text that a stranger may have written, with everything that a reader would not see written out.

    Escape sequences, marks that turn the direction of writing and bytes that are no characters are shown by
    number, so that no name passes for another. lines: line breaks stay, where the text is more than a name.
    """
    if text.isprintable():
        return text
    return "".join(map(visible, text if lines else text.replace("\n", "\\n").replace("\t", "\\t")))


def csv_cell(text: str) -> str:
    """Text that a spreadsheet shows and does not compute: an apostrophe before what begins like a formula."""
    return f"'{printable(text)}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else printable(text)


def visible(character: str) -> str:
    if character in "\n\t" or character in JOINERS or unicodedata.category(character) not in HIDDEN:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python keeps a byte that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"[U+{number:04X}]"


def safe_cell(value: Any) -> str:
    """A value for a table: each name on a line of its own."""
    names = value if isinstance(value, tuple | list) else (value,)
    return "\n".join(printable(cell(one)) for one in names) or "-"


def cell(value: Any) -> str:
    """A value as one writes it: 1,234, 0.5, yes."""
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
    """A length of time in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def print_groups(facts: Mapping[str, Any]) -> None:
    """One table a group: its facts below each other, names before values."""
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
    """Facts by group: the first has no title, a nested mapping is one, and so are names with a dot."""
    grouped: dict[str, Rows] = {"": []}
    architecture: Rows = []
    for key, value in facts.items():
        group, _, name = key.rpartition(".")
        if isinstance(value, Mapping):
            grouped[key] = [(inner.replace("_", " "), one) for inner, one in value.items()]
        elif key == "labels":
            grouped[key] = [("" if text.startswith("... ") else str(n), text) for n, text in enumerate(value)]
        elif key == "notes":
            grouped[key] = [("-", text) for text in value]
        else:
            other = "kind" in facts and key not in FIRST
            rows = architecture if other else grouped.setdefault(group, [])
            rows.append((WITH_UNIT.get(key, name.replace("_", " ")), value))
    return {title: rows for title, rows in (grouped | {"architecture": architecture}).items() if rows}


def value_text(value: Any) -> str:
    """A value on one line: a size as 224 x 224, several values with commas."""
    if isinstance(value, tuple | list):
        square = len(value) == 2 and all(type(one) is int for one in value)
        return (" x " if square else ", ").join(printable(cell(one)) for one in value) or "-"
    return printable(cell(value)) or "-"


def percent(probability: float) -> str:
    """10.5 %; what would round to nothing or to certainty is not rounded."""
    if probability < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if probability >= 0.9995 else f"{100 * probability:.1f} %"


def in_one_line(predictions: Predictions) -> str:
    """tabby cat 10.5 %; tiger cat 3.1 %. Labels may hold commas, so a semicolon stands between them."""
    return "; ".join(f"{printable(label)} {percent(probability)}" for label, probability in predictions)


def in_words(image: str, predictions: Predictions, *, unsure: bool, width: int) -> str:
    """A line for an image: its name, then as many predictions as fit the width, at least one."""
    for shown in range(len(predictions), 0, -1):
        line = in_one_line(predictions[:shown]) + ("; ..." if shown < len(predictions) else "")
        text = f"{printable(image)}: {UNSURE} ({line})" if unsure else f"{printable(image)}: {line}"
        if cell_len(text) <= width:
            break
    return text


def in_rows(image: str, predictions: Predictions, *, unsure: bool) -> str:
    """The same with a line for each answer, probabilities below each other."""
    rows = [f"  {percent(probability):>7}  {printable(label)}" for label, probability in predictions]
    return "\n".join([f"{printable(image)}:{f' {UNSURE}' * unsure}", *rows])


class Live:
    """Shows bar, step, time left and loss; accuracy, rate, speed and waiting for data as there is room."""

    def __init__(self, what: str, total: int, start: int = 0, *, every: float = EVERY, quiet: bool = False):
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.what, self.total, self.done = what, total, start
        self.numbers: dict[str, Average] = {}
        self.every, self.last = every, time.monotonic()
        self.first: tuple[int, float] | None = None  # the first step here and when it was done
        self.left: float | None = None
        self.unused = 0
        self.shown = self.console.is_terminal and not quiet
        self.bar = Redrawn(console=self.console, get_renderable=self.drawn, refresh_per_second=4)

    def __enter__(self) -> "Live":
        if self.shown:
            self.bar.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.bar.stop()
        if self.shown and self.unused > NAMED:
            self.say(f"not used: {self.unused - NAMED} images more; unusable.json of the run lists all")

    def step(self, step: int, **numbers: float) -> None:
        now = time.monotonic()
        for name, value in numbers.items():
            self.numbers.setdefault(name, Average(0.0 if name == "rate" else SMOOTH)).add(value)
        if self.first is None:
            self.first = step, now  # what came before it, such as compiling, comes once
        elif step > self.first[0]:
            self.left = (now - self.first[1]) / (step - self.first[0]) * (self.total - step)
        self.done = step
        if not self.shown and (now - self.last >= self.every or step == self.total):
            self.last = now
            self.print("  ".join([self.what, self.place(), *self.fields(), f"{clock(self.left)} left"]))

    def more(self, count: int) -> None:
        """So many done besides those before."""
        self.step(self.done + count)

    def say(self, text: str) -> None:
        self.print(printable(text, lines=True))

    def skip(self, name: str, why: str) -> None:
        """A file that is not used. A log names each; on a terminal the first few are enough to see why."""
        self.unused += 1
        if not self.shown or self.unused <= NAMED:
            self.say(f"not used: {name}: {why}")

    def print(self, text: str) -> None:
        """On a terminal broken between words; in a file or a pipe one line stays one line."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def place(self) -> str:
        return f"{self.done:>{len(str(self.total))}}/{self.total}"

    def fields(self) -> list[str]:
        """The numbers, the more important first."""
        values = {name: average.value for name, average in self.numbers.items()}
        return [field(name, values[name]) for name in [*FIELDS, *(values.keys() - FIELDS)] if name in values]

    def line(self, width: int) -> tuple[str, int, str]:
        """What stands before the bar, how long that is, and what stands after it, in so many columns."""
        left = f"{clock(self.left)} left" if width >= ROOMY else clock(self.left)
        before, after, *more = f"{self.what} ", f" {self.place()} {left}", *self.fields()
        if "loss" in self.numbers:
            after = f"{after}  {more.pop(0)}"
        room = width - len(after)
        if room < len(before) + LEAST_BAR:
            before = ""
        room -= len(before)
        for text in more:
            if room - len(text) - 2 < 2 * LEAST_BAR:
                break
            after, room = f"{after}  {text}", room - len(text) - 2
        return before, max(0, min(MOST_BAR, room)), after

    def drawn(self) -> Text:
        """The line as it stands below what is printed meanwhile."""
        # what is written to the last column begins a new line on some terminals
        before, length, after = self.line(self.console.width - 1)
        full, rest = ("#", "-") if self.console.options.ascii_only else ("━", "─")
        done = round(length * min(1.0, self.done / max(1, self.total)))
        text = Text(before, no_wrap=True, overflow="crop")
        text.append(full * done, "bar.finished" if self.done >= self.total else "bar.complete")
        return text.append(rest * (length - done), "bar.back").append(after)


class Average:
    """A number that follows its values slowly; from the first on it is of their size."""

    def __init__(self, share: float):
        self.share, self.total, self.weight, self.last = share, 0.0, 0.0, math.nan

    def add(self, value: float) -> None:
        self.last = value
        if math.isfinite(value):
            self.total = self.share * self.total + (1 - self.share) * value
            self.weight = self.share * self.weight + 1 - self.share

    @property
    def value(self) -> float:
        """What is not finite is shown at once."""
        return self.total / self.weight if self.weight and math.isfinite(self.last) else self.last


def field(name: str, value: float) -> str:
    """A number with its name; one of an unusual size may be wider, but is never cut."""
    form = FIELDS.get(name, f"{name} {{:7.4g}}")
    if name == "loss" and abs(value) >= 100:
        form = "loss {:7.1f}" if abs(value) < 1e5 else "loss {:7.1e}"
    if name == "images/s" and value >= 1000:
        form = "{:6.0f} images/s"
    return form.format(value)


def clock(seconds: float | None) -> str:
    """A time as h:mm:ss; days where there are several."""
    if seconds is None:
        return "-:--:--"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours // 24:>3} days" if hours >= 100 else f"{hours}:{rest // 60:02}:{rest % 60:02}".rjust(7)
