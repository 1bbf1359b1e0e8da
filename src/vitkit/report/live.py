"""A run as it goes: on a terminal one line that fits its width, elsewhere a line now and then."""

import math
import time

from rich.console import Console
from rich.live import Live as Redrawn
from rich.text import Text

from vitkit.report.terminal import printable

EVERY = 10.0  # seconds between two lines where there is no terminal
NAMED = 3  # files that are not used and named on a terminal; the others are counted
SMOOTH = 0.9  # of a number shown, the share that its past has: batches differ more than the model changes
LEAST_BAR, MOST_BAR = 4, 40
ROOMY = 60  # columns that have room for more than the numbers
FIELDS = {  # how a number is shown, always with the same width
    "loss": "loss {:7.4f}", "accuracy": "accuracy {:6.1%}", "rate": "rate {:7.1e}",
    "images/s": "{:6.1f} images/s", "waiting %": "waiting {:3.0f} %",
}  # fmt: skip


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
