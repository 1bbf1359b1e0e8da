"""The run folder: one recipe, one process at a time, and a way to be stopped without losing work."""

import fcntl
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitkit.recipes.recipe import Recipe, from_json, to_json


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(number).name} at step {step}; the same command goes on from there"
        )
        self.number = number


def claim(out: Path, recipe: Recipe) -> None:
    """The folder belongs to one recipe: a changed one is refused, with what changed."""
    path = out / "recipe.json"
    if path.exists():
        old, new = asdict(from_json(path.read_text())), asdict(recipe)
        changed = [f"{k}: {old[k]} -> {new[k]}" for k in new if old[k] != new[k]]
        if changed:
            raise ValueError(
                f"{out} holds a run of another recipe ({'; '.join(changed)}); give another --out"
            )
    else:
        path.write_text(to_json(recipe) + "\n")


class locked:
    """One process a run folder."""

    def __init__(self, out: Path):
        self.path = out / ".lock"

    def __enter__(self) -> None:
        self.file = self.path.open("a+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            raise ValueError(f"{self.path.parent} is in use by process {self.file.read().strip()}") from None
        self.file.truncate(0)
        self.file.write(str(os.getpid()))
        self.file.flush()

    def __exit__(self, *_: object) -> None:
        self.file.close()


class signals:
    """Inside, SIGTERM and SIGINT are noted in a list and do not end the process; a second one does."""

    def __enter__(self) -> list[int]:
        self.asked: list[int] = []
        self.before: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self.note)
        return self.asked

    def note(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
