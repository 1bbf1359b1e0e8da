"""Training length and learning-rate schedules, as pure functions of the step."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitkit.errors import Error
from vitkit.options import BATCH, EPOCHS, MOST_PIXELS, RATE, SEEDS, SHOTS, STEPS, Range, check_within

SHARE = Range(0, 1, below=True)
COUNT = Range(0, STEPS.largest)
DECAYS = ("linear", "cosine", "stairs", "constant")
RANGES = {
    "image_size": Range(1, MOST_PIXELS),
    "patch_sizes": Range(1, 4096),
    "resize": Range(0, 2 * MOST_PIXELS),
    "randaugment": Range(0, 100),
    "crop_area": Range(0, 1, above=True),
    "color_jitter": Range(0, 10),
    "erasing": Range(0, 1),
    "mixup": Range(0, 1000),
    "cutmix": Range(0, 1000),
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
    "label_noise": SHARE,
    "label_smoothing": SHARE,
    "head_bias": Range(-1000, 1000),
    "dropout": SHARE,
    "stochastic_depth": SHARE,
    "val": SHARE,
    "val_images": COUNT,
    "test": SHARE,
    "evaluations": Range(0, 10**6),
    "shots": SHOTS,
    "draws": SEEDS,
    "patience": Range(0, 10**6),
    "keep_margin": Range(0, 100),
    "seed": Range(0, 2**63 - 1),
}


def check_ranges(value: Any, prefix: str = "") -> None:
    """Raise an error for a number of a recipe, or of a part of it, that is out of range."""
    ranges = {name.removeprefix(prefix): r for name, r in RANGES.items() if name.startswith(prefix)}
    check_within(value, ranges, prefix)


@dataclass(frozen=True)
class Duration:
    """A training length in steps or in epochs, whichever unit the paper uses."""

    steps: int | None = None  # number of optimizer steps
    epochs: float | None = None  # number of passes over the training images

    def __post_init__(self):
        if (self.steps is None) == (self.epochs is None):
            value = "neither" if self.steps is None else f"{self}"
            raise Error(
                f"give the training length in either steps or epochs, not {value}", code="recipe.value"
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
    """Linear warm-up, then decay; as in the paper's code, the warm-up factor multiplies the decayed rate."""

    rate: float = 0.01  # peak learning rate
    warmup: int = 0  # steps
    decay: str = "cosine"
    floor: float = 0.0  # final learning rate of linear and cosine decay
    stairs: tuple[float, ...] = ()  # fractions of the run after which the rate is divided by ten

    def __post_init__(self):
        if self.decay not in DECAYS:
            raise Error(f"decay must be one of {', '.join(DECAYS)}, not {self.decay!r}", code="recipe.value")
        check_ranges(self, "schedule.")

    def at(self, step: int, total: int) -> float:
        """The learning rate at a step of `total`; with a warm-up, the first step has rate 0."""
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
    """A part of a run with its own schedule: the original training, or a continuation of a finished run."""

    start: int  # its first step
    steps: int
    schedule: Schedule

    @property
    def end(self) -> int:
        return self.start + self.steps

    def rate(self, step: int) -> float:
        return self.schedule.at(step - self.start, self.steps)


def parse_stages(texts: Sequence[str]) -> list[tuple[int, int]]:
    """'40+20' -> (40, 20): 20 steps from step 40; a stage starts within the previous one or at its end."""
    parsed: list[tuple[int, int]] = []
    for text in texts:
        if not (match := re.fullmatch(r"([0-9]{1,10})\+([0-9]{1,10})", text)) or not int(match[2]):
            raise Error(
                f"more_steps: {text!r} is not of the form START+STEPS, such as 40+20", code="recipe.value"
            )
        start, steps = int(match[1]), int(match[2])
        if start < 1 or (parsed and not parsed[-1][0] < start <= sum(parsed[-1])):
            raise Error(
                f"more_steps: {text!r} does not start within or at the end of the previous stage",
                code="recipe.value",
            )
        parsed.append((start, steps))
    return parsed


def stages(length: int, schedule: Schedule, more: Sequence[str] = ()) -> list[Stage]:
    """The stages of a run of `length` steps that was continued by `more`.

    Each restarts the schedule: a warm-up of at most a tenth of the stage, then the peak rate and its decay.
    """
    result = [Stage(0, length, schedule)]
    for start, steps in parse_stages(more):
        short = replace(schedule, warmup=min(schedule.warmup, steps // 10))
        result.append(Stage(start, steps, short))
    return result


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage to which a step belongs: the one that started last."""
    return max((stage for stage in stages if stage.start <= step), key=lambda stage: stage.start)
