"""The range of every number of a recipe, in one table, by the names that --set takes."""

from typing import Any

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
