"""Lengths of training and the learning rate: pure functions of the step."""

import math
from dataclasses import dataclass

from vitkit.training.ranges import check_ranges

DECAYS = ("linear", "cosine", "stairs", "constant")


@dataclass(frozen=True)
class Duration:
    """A length of training, in the unit in which a paper states it: give one."""

    steps: int | None = None
    epochs: float | None = None

    def __post_init__(self):
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else f"{self}"
            raise ValueError(f"a length is given in steps or in epochs, one of them, not {given}")
        check_ranges(self, "length.")

    def __str__(self) -> str:
        steps, epochs = f"{self.steps} steps", f"{self.epochs or 0:g} epochs"
        return epochs if self.steps is None else steps if self.epochs is None else f"{steps} and {epochs}"

    def in_steps(self, images: int, batch: int) -> int:
        """The number of steps, at least one."""
        if self.steps is not None:
            return max(1, self.steps)
        return max(1, round((self.epochs or 0) * images / batch))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then decay; the warm-up multiplies the decayed value, as published."""

    rate: float = 0.01
    warmup: int = 0
    decay: str = "cosine"
    floor: float = 0.0  # of linear and cosine decay
    stairs: tuple[float, ...] = ()  # shares of the run after which the rate is divided by ten

    def __post_init__(self):
        if self.decay not in DECAYS:
            raise ValueError(f"decay must be one of {', '.join(DECAYS)}, not {self.decay!r}")
        check_ranges(self, "schedule.")

    def at(self, step: int, total: int) -> float:
        """The rate of one step of a run of `total`; with a warm-up, the first step has rate 0."""
        progress = (step - self.warmup) / max(1, total - self.warmup)
        progress = min(1.0, max(0.0, progress))
        if self.decay == "linear":
            rate = self.floor + (self.rate - self.floor) * (1 - progress)
        elif self.decay == "cosine":
            rate = self.floor + (self.rate - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
        elif self.decay == "stairs":
            rate = self.rate * 0.1 ** sum(step >= share * total for share in self.stairs)
        else:
            rate = self.rate
        return rate * min(1.0, step / self.warmup) if self.warmup else rate
