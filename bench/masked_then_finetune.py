"""Masked patch prediction, supervised pre-training and none, each followed by the same fine-tuning.

    python bench/masked_then_finetune.py PRETRAIN_DATA FINETUNE_DATA --seeds 0 1 2

Every pre-training sees as many images with the same model, optimizer and schedule; every fine-tuning takes
the same steps, at each of two rates. Runs that are finished are only read, so several processes may do a seed
each and one more prints the table.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.folder import Result, RunOptions
from vitkit.runs.protocol import Protocol
from vitkit.runtime.runtime import choose_runtime
from vitkit.training.schedule import Duration

MODEL = {"model": "ViT-Ti/4", "model_options": ("depth=8",), "image_size": (32, 32)}
ARMS = {  # what is changed of the pre-training; None: there is none
    "scratch": None,
    "supervised": ("mixup=0.2",),
    "mean-colour, 50 %": ("objective=masked", "masked.target=mean-colour", "masked.rate=0.5"),
    "mean-colour, 15 %": ("objective=masked", "masked.target=mean-colour", "masked.rate=0.15"),
    "colours-4x4, 50 %": ("objective=masked", "masked.target=colours-4x4", "masked.rate=0.5"),
    "pixels, 50 %": ("objective=masked", "masked.target=pixels", "masked.rate=0.5"),
}
RATES = (3e-4, 1e-3)


def pretraining(options: argparse.Namespace, changes: tuple[str, ...], seed: int) -> Recipe:
    base = replace(
        recipe("pretrain"), data=options.pretrain, seed=seed, batch=1024, randaugment=(), mixup=0.0,
        length=Duration(epochs=options.epochs), evaluations=0, **MODEL,
    )  # fmt: skip
    return override(base, ["schedule.warmup=300", "evaluation_crop=squash", *changes])


def finetuning(options: argparse.Namespace, weights: str, rate: float, seed: int) -> Recipe:
    start = {"weights": weights, "image_size": MODEL["image_size"]} if weights else MODEL
    base = replace(
        recipe("scratch"), data=options.finetune, seed=seed, batch=256, length=Duration(steps=options.steps),
        evaluations=0, **start,
    )  # fmt: skip
    return override(base, [f"schedule.rate={rate}", "schedule.warmup=100", "mixup=0.2"])


def runs(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, str, Result]]:
    """(arm, stage, result), as they are finished."""
    runtime, how = choose_runtime(options.device), RunOptions(workers=options.workers, quiet=True)
    for arm in options.arms:
        folder = options.out / arm.replace(" ", "").replace(",", "-").replace("%", "") / f"seed-{seed}"
        protocol = Protocol(folder, runtime, how, print)
        changes, weights = ARMS[arm], ""
        if changes is not None:
            before = protocol.finished(pretraining(options, changes, seed), "pretrain")
            yield arm, "pretrain", before
            weights = before.model
        for rate in RATES:
            after = finetuning(options, weights, rate, seed)
            yield arm, f"{rate:g}", protocol.finished(after, f"tuned-{rate:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pretrain")
    parser.add_argument("finetune")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--epochs", type=float, default=15)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/masked-then-finetune"))
    options = parser.parse_args()
    actual: dict[tuple[str, str], list[float]] = {}
    for seed in options.seeds:
        for arm, stage, result in runs(options, seed):
            test = result.test
            value = test["top1"] if "top1" in test and test["top1"] is not None else test["accuracy"]
            speed = f"{result.cost['images_per_second']:.0f} images/s, {result.cost['energy_kWh']} kWh"
            print(seed, arm, stage, value, f"loss {test['loss']:.4f}", speed, flush=True)
            actual.setdefault((arm, stage), []).append(test["loss"] if value is None else value)
    for (arm, stage), values in actual.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        output = {"arm": arm, "stage": stage, "mean": statistics.mean(values), "std": spread, "runs": values}
        print(json.dumps(output), flush=True)


if __name__ == "__main__":
    main()
