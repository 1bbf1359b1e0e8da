"""Whether the fast path is right: its gradients beside float64, its loss curve beside that of float32 seeds.

    python bench/fast_is_right.py tiny.npz --steps 500

Gradients: one batch through float64, float32 and bf16 (eager and compiled); the error of each tensor's
gradient relative to its norm in float64, the median and the worst. Curves: some seeds in float32, the same
in bf16 compiled, all at the same time; losses are averaged over windows of a tenth of the run, and the
difference of bf16 from float32 is told beside the spread of the float32 seeds. "Pairs" are the largest and
the mean difference of runs of the same seed, which begin alike and see the same images.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.models.variants import configure, fresh
from vitkit.runtime.runtime import Runtime

MODEL = ("--model", "ViT-S/4", "--image-size", "32", "--batch", "128", "--lr", "1e-3", "--set",
         "schedule.warmup=50", "mixup=0", "randaugment=", "evaluations=0")  # fmt: skip


def gradient_errors(data: str, device: str) -> None:
    model = fresh(configure("ViT-S/4", classes=200, image_size=(32, 32)), seed=0)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    with np.load(data) as held:
        images = torch.from_numpy(held["x_train"][:64]).permute(0, 3, 1, 2).float() / 127.5 - 1
        labels = torch.from_numpy(held["y_train"][:64])

    def gradients(kind: str) -> list[torch.Tensor]:
        dtype = torch.float64 if kind == "float64" else torch.float32
        where = Runtime(device=device, precision="bf16" if "bf16" in kind else "fp32")
        net = copy.deepcopy(model).to(device, dtype)
        call = torch.compile(net) if "compiled" in kind else net
        with where.autocast():
            result = call(images.to(device, dtype))
        F.cross_entropy(result.to(dtype), labels.to(device)).backward()
        return [p.grad.double() for p in net.parameters()]

    exact = gradients("float64")
    print("| gradients | median error | worst |\n|---|---|---|")
    for kind in ("float32", "bf16", "bf16, compiled"):
        errors = [float((g - e).norm() / e.norm()) for g, e in zip(gradients(kind), exact, strict=True)]
        print(f"| {kind} | {statistics.median(errors):.2e} | {max(errors):.2e} |", flush=True)


def curves(data: str, steps: int, seeds: list[int], fields: list[str], out: str) -> dict[str, np.ndarray]:
    """Losses of all runs, (seeds, steps) each."""
    runs = {(kind, seed): Path(out, f"{kind}-{seed}") for kind in ("fp32", "bf16") for seed in seeds}
    running = []
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # all runs share the cores
    for (kind, seed), place in runs.items():
        command = [sys.executable, "-m", "vitkit", "pretrain", data, *MODEL, *fields]
        command += f"--workers 2 --json --steps {steps} --seed {seed} --precision {kind}".split()
        command += ["--out", str(place)]
        command += ["--compile"] if kind == "bf16" else []
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=alone))
    codes = [one.wait() for one in running]
    if any(codes):
        raise SystemExit(f"runs have failed: {codes}")

    def losses(place: Path) -> list[float]:
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    return {kind: np.array([losses(runs[kind, seed]) for seed in seeds]) for kind in ("fp32", "bf16")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="other fields of the recipe, as in dropout=0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    gradient_errors(options.data, options.device)
    with tempfile.TemporaryDirectory() as out:
        result = curves(options.data, options.steps, options.seeds, options.set, out)
    windows = {kind: losses.reshape(len(options.seeds), 10, -1).mean(-1) for kind, losses in result.items()}
    print("| steps | float32, mean | its seeds | bf16 compiled, mean | its seeds | within | pairs |")
    print("|---" * 7 + "|")
    for i, (full, half) in enumerate(zip(windows["fp32"].T, windows["bf16"].T, strict=True)):
        within = full.min() <= half.mean() <= full.max()
        apart = half - full
        print(f"| to {(i + 1) * options.steps // 10} | {full.mean():.4f} | {full.min():.4f} to "
              f"{full.max():.4f} | {half.mean():.4f} | {half.min():.4f} to {half.max():.4f} "
              f"| {'yes' if within else 'no'} | {abs(apart).max():.4f}, {apart.mean():+.4f} |")  # fmt: skip
    first = abs(result["bf16"] - result["fp32"])[:, : options.steps // 25]
    print(f"pairs, the first {first.shape[1]} steps one by one: {first.max():.4f} apart at the most")


if __name__ == "__main__":
    main()
