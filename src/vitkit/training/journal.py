"""What a run writes down as it goes: metrics.jsonl always, TensorBoard where it is installed."""

import json
from pathlib import Path
from typing import Any


class Journal:
    """Rows of numbers by step. Reopened at a step, it forgets what was written after that step."""

    def __init__(self, folder: Path, step: int = 0):
        self.path = folder / "metrics.jsonl"
        kept = [line for line in self.lines() if json.loads(line)["step"] <= step] if step else []
        self.path.write_text("".join(line + "\n" for line in kept))
        self.file = self.path.open("a")
        self.board = tensorboard(folder / "events", step)

    def lines(self) -> list[str]:
        """Complete rows of an earlier process; a last one that was cut off does not count."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]

    def write(self, step: int, **numbers: Any) -> None:
        self.file.write(json.dumps({"step": step} | numbers) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)
