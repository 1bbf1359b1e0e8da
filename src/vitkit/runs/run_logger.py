"""RunLogger: the metrics of a run on the terminal, in metrics.jsonl and in trackers; its time and energy."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitkit.metrics.speed import Meter
from vitkit.recipes.recipe import settings
from vitkit.report.terminal import Live
from vitkit.runs.context import RunContext
from vitkit.training.logging import Journal
from vitkit.training.step import Metrics


class RunLogger:
    """Logs the metrics of every step, and adds up the seconds and the energy spent on training."""

    def __init__(self, run: RunContext, live: Live):
        self.run, self.live = run, live
        self.waited = 0.0  # seconds that the current step has waited for data
        self.journal: Journal | None = None  # only the main process has one
        if run.runtime.is_main:
            config = settings(run.recipe) | run.runtime.describe()
            self.journal = Journal(
                run.out, run.state.step, trackers=run.options.trackers, about=config, say=live.say
            )

    def start(self) -> None:
        """Start measuring; called right before the first step."""
        self.step_start, self.meter = time.monotonic(), Meter(self.run.runtime.device)
        self.run.count("start", self.step_start - self.run.began)

    def add_wait(self, seconds: float) -> None:
        self.waited += seconds

    def say(self, text: str) -> None:
        """Print a message above the progress bar."""
        self.live.say(text)

    def log_step(self, step: int, metrics: Metrics) -> None:
        """One finished step: its line on the terminal and its row of metrics.jsonl."""
        now = time.monotonic()
        seconds, self.step_start = max(1e-9, now - self.step_start), now
        displayed = {k: v for k, v in metrics.items() if k not in ("images", "gradient_norm")}
        displayed |= {"images/s": metrics["images"] / seconds, "waiting %": 100 * self.waited / seconds}
        row = metrics | {"seconds": round(seconds, 4), "waited": round(self.waited, 4)}
        self.run.count("data", self.waited)
        self.waited = 0.0
        self.live.step(step, **displayed)
        if self.journal:
            self.journal.write(step, passing=True, **row)
        self.run.progress["seconds"] += seconds

    def write(self, **metrics: Any) -> None:
        """A row for the current step: an evaluation, or the result."""
        if self.journal:
            self.journal.write(self.run.state.step, **metrics)

    def count_energy(self) -> None:
        """Add the energy used since the last call; reading it takes milliseconds, too long for every step."""
        if (joules := self.meter.lap()) is not None:
            self.run.progress["joules"] = self.run.progress.get("joules", 0.0) + joules

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, neither time nor energy counts as training."""
        self.count_energy()
        yield
        self.step_start = time.monotonic()
        self.meter.lap()

    def close(self, failed: bool = False) -> None:
        if self.journal:
            self.journal.close(failed)
