"""The range of every number of a recipe, in one table, by the names that --set takes."""

from dataclasses import fields
from typing import Any, NamedTuple


class Range(NamedTuple):
    """From `least` to `most`; whether the ends themselves are allowed."""

    least: float
    most: float
    above: bool = False  # more than `least`
    below: bool = False  # less than `most`

    def holds(self, value: Any) -> bool:
        """Not for NaN, which compares with nothing, nor for what is no number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.least < value if self.above else self.least <= value) and (
            value < self.most if self.below else value <= self.most
        )

    def __str__(self) -> str:
        return (
            f"{'above' if self.above else 'from'} {self.least:,g} {'to below' if self.below else 'to'} "
            f"{self.most:,g}"
        )


SHARE = Range(0, 1, below=True)
COUNT = Range(0, 10**9)
RATE = Range(0, 1e30)  # a rate that diverges is an error of its own, with the batch
RANGES = {
    "image_size": Range(1, 8192),
    "resize": Range(0, 16_384),
    "randaugment": Range(0, 100),
    "mixup": Range(0, 1000),
    "batch": Range(1, 2**20),
    "micro_batch": Range(0, 2**20),
    "length.steps": Range(1, 10**9),
    "length.epochs": Range(0, 10**6, above=True),
    "schedule.rate": RATE,
    "schedule.warmup": COUNT,
    "schedule.floor": RATE,
    "schedule.stairs": Range(0, 1),
    "rates": RATE,
    "convolution_rates": RATE,
    "optimizer.momentum": SHARE,
    "optimizer.betas": SHARE,
    "optimizer.eps": Range(0, 1),
    "optimizer.weight_decay": RATE,
    "optimizer.clip": Range(0, 10**9),
    "optimizer.layer_decay": Range(0, 1, above=True),
    "optimizer.average": SHARE,
    "masked.rate": Range(0, 1, above=True),
    "masked.shares": Range(0, 1),
    "masked.bits": Range(1, 5),
    "label_smoothing": SHARE,
    "head_bias": Range(-1000, 1000),
    "dropout": SHARE,
    "stochastic_depth": SHARE,
    "val": SHARE,
    "test": SHARE,
    "evaluations": Range(0, 10**6),
    "shots": Range(1, 10**6),
    "draws": Range(1, 10**4),
    "patience": Range(0, 10**6),
    "seed": Range(0, 2**63 - 1),
}


def check_ranges(value: Any, prefix: str = "") -> None:
    """Every number of a frozen value within its range, or an error with its name, its value and the range."""
    for field in fields(value):
        name, content = prefix + field.name, getattr(value, field.name)
        if name not in RANGES or content is None:
            continue
        for number in content if isinstance(content, tuple) else (content,):
            if not RANGES[name].holds(number):
                told = repr(content)
                told = told if len(told) <= 60 else f"{told[:60]} ..."
                raise ValueError(f"{name} must be {RANGES[name]}, not {told}")
