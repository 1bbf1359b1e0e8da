"""A run as it goes: a live line on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitkit.report.terminal import printable


class Live:
    """Shows loss, accuracy, rate, images a second, the share of time spent waiting for data, time left."""

    def __init__(self, what: str, total: int, start: int = 0, *, every: float = 10.0, quiet: bool = False):
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        if not self.console.is_terminal:
            self.console.width = 200  # a file or a pipe: one line stays one line
        self.every, self.last, self.total = every, time.monotonic(), total
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shown = self.console.is_terminal and not quiet
        self.bar = Progress(
            *columns, TextColumn("{task.fields[told]}"), console=self.console, disable=not shown
        )
        self.task = self.bar.add_task(what, total=total, completed=start, told="")
        self.done = start
        self.shown, self.what, self.first, self.begun = shown, what, start, time.monotonic()

    def __enter__(self) -> "Live":
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)  # type: ignore[arg-type]

    def step(self, step: int, **numbers: float) -> None:
        told = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self.bar.update(self.task, completed=step, told=told)
        now = time.monotonic()
        if not self.shown and (now - self.last >= self.every or step == self.total):
            self.last = now
            left = (now - self.begun) / max(1, step - self.first) * (self.total - step)
            self.console.print(f"{self.what}  {step}/{self.total}  {told}  {left:.0f} s left")

    def more(self, count: int) -> None:
        """So many done besides those before."""
        self.done += count
        self.step(self.done)

    def say(self, text: str) -> None:
        self.console.print(printable(text, lines=True), markup=False)
