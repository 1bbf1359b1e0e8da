"""vitkit beside timm on the CPU: inference and training of ViT-Ti/16 and ViT-B/16, eager and compiled.

    python bench/cpu.py                                   every row; prints markdown tables
    python bench/cpu.py --rows infer-Ti train-Ti --rounds 9 --batch 4 --json out.json

As bench/gpu.py: all sides of a row are in one process and take turns, and times are medians over the rounds.
Both libraries start from the same weights and do the same work in float32; where the processor multiplies in
bf16, in autocast too. A training step is AdamW, clipping and cross-entropy; vitkit's is its own `update`,
with its checks. The last column is the share of the images on which a side names the same class as timm's
eager model; in training, after two steps of each. Compiled sides need a C++ compiler. "of the limit" compares
with the images/s at which the operations of float32 would run as fast as those of a large matrix product.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from forward import pair, product_rate
from gpu import CLASSES, Row, timed
from torch import Tensor, nn

from vitkit.data.views import normalise
from vitkit.inference.builders import compiler, fast_bf16
from vitkit.metrics.cost import TRAINING, forward_flops
from vitkit.models.variants import configure
from vitkit.runtime.runtime import PRECISIONS, Runtime, cpu_cores
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, update

RATE, DECAY = 1e-4, 0.1
HALF = (0.5,) * 3  # mean and standard deviation
EAGER = ("vitkit", "timm")
COMPILED = tuple(f"{side} compiled" for side in EAGER)
ROWS = {
    "infer-Ti": Row("Ti", batch=8, train=False),
    "train-Ti": Row("Ti", batch=8),
    "infer-B": Row("B", batch=2, train=False),
    "train-B": Row("B", batch=2),
}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Side:
    """What is timed, and what its model answers to the images."""

    step: Callable[[], Any]
    ask: Callable[[], Tensor]


def random_batch(images: int, pixels: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (images, 3, pixels, pixels)
    return {
        "image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        "label": torch.arange(images) % CLASSES,
    }


def asking(call: nn.Module, batch: Batch, runtime: Runtime) -> Callable[[], Tensor]:
    images = normalise(batch["image"], HALF, HALF)

    @torch.inference_mode()
    def ask() -> Tensor:
        with runtime.autocast():
            return call(images).float()

    return ask


def our_training(model: nn.Module, call: nn.Module, batch: Batch, runtime: Runtime) -> Callable[[], Any]:
    config = OptimizerConfig(kind="adam", weight_decay=DECAY, clip=1.0)
    state, objective = (
        TrainState.start(model, config),
        ClassificationLoss(classes=CLASSES, mean=HALF, std=HALF),
    )
    return lambda: update(state, [batch], objective, RATE, config, call, runtime)


def timm_training(model: nn.Module, call: nn.Module, batch: Batch, runtime: Runtime) -> Callable[[], Any]:
    images, labels = normalise(batch["image"], HALF, HALF), batch["label"]
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)

    def train() -> None:
        with runtime.autocast():
            logits = call(images)
        F.cross_entropy(logits.float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    return train


def made(side: str, row: Row, batch: Batch, precision: str) -> Side:
    kind, _, compiled = side.partition(" ")
    runtime = Runtime(precision=precision, compile=bool(compiled))
    torch.manual_seed(0)  # the head is random, and the same for all
    model = pair(f"ViT-{row.size}/16")[kind].train(row.train)
    call = runtime.wrap(model) if kind == "vitkit" else torch.compile(model) if compiled else model
    if not row.train:
        ask = asking(call, batch, runtime)
        return Side(ask, ask)
    training = our_training if kind == "vitkit" else timm_training
    return Side(training(model, call, batch, runtime), asking(model, batch, runtime))


def turns(sides: dict[str, Side], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of one step of each side in each round; every other round goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seconds[name].append(timed(sides[name].step, "cpu", steps))
    return seconds


def compare(name: str, row: Row, precision: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    batch = random_batch(options.batch or row.batch, row.pixels)
    images = len(batch["label"])
    sides, first = {}, {}
    for side in EAGER + (COMPILED if compiler() else ()):
        begun = time.perf_counter()
        sides[side] = made(side, row, batch, precision)
        sides[side].step()
        first[side] = time.perf_counter() - begun
        sides[side].step()
    answers = {side: sides[side].ask() for side in sides}
    top1 = {side: answers[side].argmax(1) for side in sides}
    products = [product_rate()]
    seconds = turns(sides, options.rounds, options.steps)
    products += [product_rate(), product_rate()]
    work = forward_flops(configure(f"ViT-{row.size}/16")) * (TRAINING if row.train else 1)
    limit = statistics.median(products) / work if precision == "fp32" else None
    middle = {side: statistics.median(seconds[side]) for side in sides}
    best = min(middle[side] for side in sides if side.startswith("timm"))
    return [
        {"row": f"{name} {precision}", "side": side, "batch": images, "ms": 1e3 * middle[side],
         "images_per_second": images / middle[side], "against_timms_best": best / middle[side],
         "spread": (max(seconds[side]) - min(seconds[side])) / middle[side],
         "same_top1": float((top1[side] == top1["timm"]).double().mean()),
         "largest_difference": float((answers[side] - answers["timm"]).abs().max()),
         "limit_images_per_second": limit, "first_step_s": first[side], "seconds": seconds[side]}
        for side in sides
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | batch | side | images/s | of the limit | ms | spread | against timm's best | same top-1 "
        "| first step, s |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        limit = r["limit_images_per_second"]
        share = "" if limit is None else f"{r['images_per_second'] / limit:.0%} of {limit:.1f}"
        lines.append(
            f"| {r['row']} | {r['batch']} | {r['side']} | {r['images_per_second']:.2f} | {share} "
            f"| {r['ms']:.0f} | {r['spread']:.1%} | {r['against_timms_best']:.2f} | {r['same_top1']:.0%} "
            f"| {r['first_step_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="calls in a round")
    parser.add_argument("--batch", type=int, default=0, help="instead of each row's own")
    parser.add_argument("--threads", type=int, default=cpu_cores())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = {
        "processor": platform.processor() or platform.machine(), "threads": options.threads,
        "torch": torch.__version__, "timm": version("timm"), "compiler": compiler(), "bf16": fast_bf16(),
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    rows = []
    for name in options.rows:
        for precision in options.precisions:
            if precision == "bf16" and not fast_bf16():
                continue
            result = compare(name, ROWS[name], precision, options)
            print(table(result), flush=True)
            rows += result
            torch.compiler.reset()
            gc.collect()
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
