"""Checkpointer: when a run is saved, and what its checkpoints hold."""

import time
from dataclasses import dataclass, field

from vitkit.runs.context import RunContext
from vitkit.runs.run_logger import RunLogger
from vitkit.training.checkpoint import Saver

SAVE_SECONDS = 300.0  # between checkpoints: the most work that a crash can lose


@dataclass
class Checkpointer:
    """Saves the training state together with the progress of the run."""

    run: RunContext
    logger: RunLogger
    last_save: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        run = self.run
        self.saver = Saver(run.out / "checkpoints", run.runtime, aside=run.options.save_aside)

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.last_save > SAVE_SECONDS

    def save(self) -> None:
        """Save now; with save_aside the files are written in the background."""
        self.logger.count_energy()
        self.saver.save(self.run.state, self.run.progress | {"machine": self.run.runtime.describe()})
        self.last_save = time.monotonic()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; an error of any process is raised in all."""
        self.saver.finish()

    def abandon(self) -> None:
        """The same after a failed run, when other processes may be gone."""
        self.saver.leave()
