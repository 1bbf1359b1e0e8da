"""Lengths of training and the learning rate: pure functions of the step."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitkit.errors import Error
from vitkit.options import BATCH, EPOCHS, MOST_PIXELS, RATE, SEEDS, SHOTS, STEPS, Range, check_within

SHARE = Range(0, 1, below=True)
COUNT = Range(0, STEPS.largest)
RANGES = {
    "image_size": Range(1, MOST_PIXELS),
    "resize": Range(0, 2 * MOST_PIXELS),
    "randaugment": Range(0, 100),
    "mixup": Range(0, 1000),
    "batch": BATCH,
    "micro_batch": Range(0, BATCH.largest),
    "length.steps": STEPS,
    "length.epochs": Range(0, EPOCHS.largest, above=True),
    "schedule.rate": RATE,
    "schedule.warmup": COUNT,
    "schedule.floor": RATE,
    "schedule.stairs": Range(0, 1),
    "rates": RATE,
    "convolution_rates": RATE,
    "optimizer.momentum": SHARE,
    "optimizer.betas": SHARE,
    "optimizer.eps": Range(0, 1),
    "optimizer.weight_decay": Range(0, 1e6),
    "optimizer.clip": Range(0, 10**9),
    "optimizer.layer_decay": Range(0, 1, above=True),
    "optimizer.average": SHARE,
    "label_smoothing": SHARE,
    "head_bias": Range(-1000, 1000),
    "dropout": SHARE,
    "stochastic_depth": SHARE,
    "val": SHARE,
    "test": SHARE,
    "evaluations": Range(0, 10**6),
    "shots": SHOTS,
    "draws": SEEDS,
    "patience": Range(0, 10**6),
    "seed": Range(0, 2**63 - 1),
}


def check_ranges(value: Any, prefix: str = "") -> None:
    """Every number of a part of a recipe within its range."""
    own = {name.removeprefix(prefix): r for name, r in RANGES.items() if name.startswith(prefix)}
    check_within(value, own, prefix)


DECAYS = ("linear", "cosine", "stairs", "constant")


@dataclass(frozen=True)
class Duration:
    """A length of training, in the unit in which a paper states it: give one."""

    steps: int | None = None
    epochs: float | None = None

    def __post_init__(self):
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else f"{self}"
            raise Error(
                f"a length is given in steps or in epochs, one of them, not {given}", code="recipe.value"
            )
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
            raise Error(f"decay must be one of {', '.join(DECAYS)}, not {self.decay!r}", code="recipe.value")
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


@dataclass(frozen=True)
class Stage:
    """A part of a run with a schedule of its own: the first, or one by which a finished run is trained on."""

    start: int  # the step at which it begins
    steps: int
    schedule: Schedule

    @property
    def end(self) -> int:
        return self.start + self.steps

    def rate(self, step: int) -> float:
        return self.schedule.at(step - self.start, self.steps)


def parse_stages(texts: Sequence[str]) -> list[tuple[int, int]]:
    """'40+20' -> (40, 20): at step 40, by 20 steps; each begins after the one before, at its end at most."""
    found: list[tuple[int, int]] = []
    for text in texts:
        if not (match := re.fullmatch(r"([0-9]{1,10})\+([0-9]{1,10})", text)) or not int(match[2]):
            raise Error(
                f"more_steps: {text!r} is not of the form START+STEPS, as in 40+20", code="recipe.value"
            )
        start, steps = int(match[1]), int(match[2])
        if start < 1 or (found and not found[-1][0] < start <= sum(found[-1])):
            raise Error(
                f"more_steps: {text!r} does not begin within or after what is before it", code="recipe.value"
            )
        found.append((start, steps))
    return found


def stages(length: int, schedule: Schedule, more: Sequence[str] = ()) -> list[Stage]:
    """The stages of a run of `length` steps that was trained on by `more`.

    Each restarts the schedule: the warm-up, at most a tenth of the stage, then the peak rate and its decay.
    """
    found = [Stage(0, length, schedule)]
    for start, steps in parse_stages(more):
        short = replace(schedule, warmup=min(schedule.warmup, steps // 10))
        found.append(Stage(start, steps, short))
    return found


def stage_at(found: Sequence[Stage], step: int) -> Stage:
    """The stage to which a step belongs: the one that began last."""
    return max((stage for stage in found if stage.start <= step), key=lambda stage: stage.start)
