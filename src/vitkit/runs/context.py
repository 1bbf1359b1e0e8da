"""RunContext: the recipe, data, state and progress that all parts of one run share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe
from vitkit.runs.batches import training_order
from vitkit.runs.folder import RunOptions
from vitkit.runtime.runtime import Runtime, data_workers
from vitkit.tasks.task import Task
from vitkit.training.schedule import Stage
from vitkit.training.step import TrainState


@dataclass
class RunContext:
    """One run in progress."""

    recipe: Recipe
    task: Task
    out: Path
    runtime: Runtime
    options: RunOptions
    splits: dict[str, Source]
    state: TrainState
    stages: list[Stage]
    progress: dict[str, Any]  # stored in each checkpoint: the best evaluation, seconds and joules so far
    began: float = field(default_factory=time.monotonic)  # when this process began with the run
    total: int = field(init=False)  # steps
    workers: int = field(init=False)  # data loader processes
    order: Order = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.stages[-1].end
        self.workers = data_workers(self.options.workers)
        self.order = training_order(self.recipe, self.splits["train"])

    def count(self, part: str, seconds: float) -> None:
        """Add to the seconds that a part of the run has taken: start, data, evaluation or saving."""
        parts = self.progress.get("time", {})  # replaced, as a thread may be writing it into a checkpoint
        self.progress["time"] = parts | {part: parts.get(part, 0.0) + seconds}

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Count what happens inside."""
        start = time.monotonic()
        yield
        self.count(part, time.monotonic() - start)

    @property
    def model(self) -> Model:
        """The model inside the trained module."""
        return self.task.extract(self.state.model)


def continuation_starts(stages: list[Stage]) -> set[int]:
    """The steps at which a finished run is trained further."""
    return {stage.start for stage in stages[1:]}
