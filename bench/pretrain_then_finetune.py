"""A small ViT and a small ResNet pre-trained on one data set through shards, then fine-tuned on another.

    python bench/pretrain_then_finetune.py PRETRAIN_SHARDS FINETUNE_DATA --models vit resnet --seeds 3

Each fine-tuned model stands beside the same model from scratch with the same fine-tuning steps. Everything
runs by the ordinary verbs' code. Images per second and the share of time spent waiting for data are over the
second half of the steps; MFU is training FLOPs a second over the rate of a large bf16 product on the device.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.folder import Result, RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.schedule import Duration

MODELS = {
    "vit": ("ViT-S/4", ("depth=8",), 32),
    "resnet": ("BiT-R50x1", ("blocks=2,2,2,2",), 64),  # its root takes a quarter of each side away
}


def pretraining(options: argparse.Namespace, kind: str, seed: int) -> Recipe:
    model, parts, pixels = MODELS[kind]
    base = replace(
        recipe("pretrain"), data=options.pretrain, model=model, model_options=parts, seed=seed, batch=1024,
        length=Duration(epochs=options.epochs), image_size=(pixels, pixels), randaugment=(), evaluations=4,
    )  # fmt: skip
    return override(base, ["schedule.warmup=300", "evaluation_crop=squash"])


def finetuning(options: argparse.Namespace, kind: str, seed: int, weights: str) -> Recipe:
    """From pre-trained weights, or with none from scratch: the same optimizer, steps and views."""
    model, parts, pixels = MODELS[kind]
    start = {"weights": weights} if weights else {"model": model, "model_options": parts}
    base = replace(
        recipe("scratch"), data=options.finetune, seed=seed, batch=512, image_size=(pixels, pixels),
        length=Duration(steps=options.steps), evaluations=0, **start,
    )  # fmt: skip
    rate = "schedule.rate=0.0003" if weights else "schedule.rate=0.001"
    return override(base, [rate, "schedule.warmup=100", "mixup=0.2"])


def pace(out: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "seconds" in row]
    rows = rows[len(rows) // 2 :]
    seconds = sum(row["seconds"] for row in rows)
    return {
        "images_per_second": sum(row["images"] for row in rows) / seconds,
        "waiting": sum(row["waited"] for row in rows) / seconds,
    }


def peak(device: str) -> float:
    """FLOP/s of a large product in the training's precision."""
    if not device.startswith("cuda"):
        return float("nan")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return 2 * 8192**3 / statistics.median(times)


def one(options: argparse.Namespace, kind: str, seed: int, runtime: Runtime, best: float) -> dict:
    how = RunOptions(workers=options.workers, quiet=True)
    folder = options.out / kind / f"seed-{seed}"

    def go(r: Recipe, name: str) -> Result:
        result = run(r, folder / name, runtime, how)
        speed = pace(folder / name)
        print(kind, seed, name, f"{result.test['top1']:.4f}", speed, flush=True)
        return result

    before = go(pretraining(options, kind, seed), "pretrain")
    speed = pace(folder / "pretrain")
    per_image = before.cost["training_FLOPs"] / before.cost["images_seen"]
    after = go(finetuning(options, kind, seed, before.model), "tuned")
    scratch = go(finetuning(options, kind, seed, ""), "scratch")
    return {
        "model": kind, "seed": seed, "parameters": before.cost["parameters"], "GFLOP": per_image / 3e9,
        "pretrain_top1": before.test["top1"], "tuned_top1": after.test["top1"],
        "scratch_top1": scratch.test["top1"], "images": after.test["images"],
        "MFU": per_image * speed["images_per_second"] / best, **speed,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pretrain")
    parser.add_argument("finetune")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain-then-finetune"))
    options = parser.parse_args()
    runtime = choose_runtime(options.device, compile=options.compile)
    best = peak(runtime.device)
    print(f"{runtime.describe()}, a large product runs at {best / 1e12:.0f} TFLOP/s", flush=True)
    for kind in options.models:
        rows = [one(options, kind, seed, runtime, best) for seed in options.seeds]
        for row in rows:
            print(json.dumps(row), flush=True)
        for name in ("pretrain_top1", "tuned_top1", "scratch_top1", "images_per_second", "waiting", "MFU"):
            values = [row[name] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(
                f"{kind} {name}: {statistics.mean(values):.4f} +- {spread:.4f} (n = {len(values)})",
                flush=True,
            )


if __name__ == "__main__":
    main()
