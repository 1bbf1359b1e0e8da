"""What a run writes down as it goes: metrics.jsonl and TensorBoard events always, other trackers if asked."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.io.atomic import naming, staged
from vitkit.report.terminal import warn
from vitkit.training.trackers import TensorBoard, Tracker, check_trackers, open_tracker

LAST, HUGE = 2**53, 1e300  # what counts as a step, and as a number; NaN does not
SECOND = 1.0  # between two passing rows that trackers are told


def tell(text: str) -> None:
    warn(f"vitkit: {text}")


def parse_row(line: str) -> dict[str, Any] | None:
    """The numbers of a line by their names, a step among them; None where it is something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # cut off, or being written just now
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] <= LAST:
        return None
    return {name: value for name, value in row.items() if type(value) in (int, float) and abs(value) < HUGE}


class Journal:
    """Rows of numbers by step. Reopened at a step, it forgets what was written after that step.

    metrics.jsonl is the record, and what goes wrong with it is an error. A tracker that fails is left out
    with one note, be it at the start, in the middle or at the end: no training ends for it.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        *,
        trackers: Sequence[str] = (),
        about: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = tell,
    ):
        check_trackers(trackers)
        self.say, self.trackers, self.told = say, dict[str, Tracker](), 0.0
        self.path = folder / "metrics.jsonl"
        read = [(line, parse_row(line)) for line in self.lines()] if step else []
        kept = [line for line, row in read if row and row["step"] <= step]
        if odd := sum(row is None for _, row in read):
            say(f"{self.path}: {odd} lines that are no rows of numbers were left out")
        with staged(self.path, durable=False) as beside:
            beside.write_text("".join(line + "\n" for line in kept))
        self.file = self.path.open("a")
        self.attempt("tensorboard", self.board, folder / "events", step, about or {})
        for name in dict.fromkeys(trackers):
            self.attempt(name, self.open, name, folder, about or {})

    def board(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        self.trackers["tensorboard"] = TensorBoard(folder, step, about)

    def open(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        self.trackers[name] = tracker = open_tracker(name, folder, about)
        self.say(f"{name}: {tracker.where}")

    def attempt(self, name: str, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:  # whatever a library or a network comes up with
            self.trackers.pop(name, None)
            why = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
            self.say(f"{name} failed and is left out from here on: {why}")

    def lines(self) -> list[str]:
        """Complete rows of an earlier process; a last one that was cut off does not count."""
        if not self.path.exists():
            return []
        text = self.path.read_text(errors="replace")
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]

    def write(self, step: int, *, passing: bool = False, **numbers: Any) -> None:
        """A row; of passing ones, which every step has, trackers are told one a second.

        TensorBoard computes its checksums in Python, half a millisecond for each number.
        """
        with naming(self.path):
            self.file.write(json.dumps({"step": step} | numbers) + "\n")
            self.file.flush()
        if passing and time.monotonic() - self.told < SECOND:
            return
        self.told = time.monotonic() if passing else self.told
        values = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        for name, tracker in list(self.trackers.items()):
            self.attempt(name, tracker.log, step, values)

    def close(self, failed: bool = False) -> None:
        """Once is enough; more often does no harm."""
        with naming(self.path):
            self.file.close()
        for name, tracker in list(self.trackers.items()):
            self.attempt(name, tracker.close, failed)
        self.trackers.clear()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
