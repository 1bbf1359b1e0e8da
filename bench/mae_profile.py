"""Where the time of a step goes on a GPU: kernels of MAE and of supervised training, by what they do.

    python bench/mae_profile.py --batch 256 --out mae-profile.json
    python bench/mae_profile.py --smoke   # operators on a CPU, small models, to see it run

For ViT-B/16 and ViT-L/16 at 224 pixels and for each task: the time of a step as training runs it (with its
CUDA graph), then the kernels of one more step under the profiler, summed by group, and the slowest kernels by
name. The sum of the kernels is below the time of the step where the GPU waits. --compile compiles both.
"""

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from self_supervision import MAE, SUPERVISED, at_size, synchronize, train_source
from torch.profiler import ProfilerActivity, profile

from vitkit.data.order import Order
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions
from vitkit.runs.build import build_model, start_training
from vitkit.runs.estimates import noise
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.step import Stepper

GROUPS = (  # the first that matches a kernel's name
    ("attention", r"attention|fmha|flash|sdpa|softmax"),
    ("products", r"gemm|cublas|cutlass|nvjet|xmma|addmm|aten::mm|aten::bmm|linear|convolution|mkldnn"),
    ("norm", r"layer_?norm|LayerNorm|GammaBeta|native_layer"),
    ("optimizer, copies and norms of weights", r"multi_tensor|foreach|fused_adam|lpnorm|linalg_vector"),
    ("gather and scatter", r"index|gather|scatter|embedding|radix|sort"),
    ("GELU and qkv gradients", r"gelu|pack_qkv"),
    ("concatenation", r"CatArray|aten::cat"),
    ("copies and casts", r"memcpy|copy|_to_copy"),
    ("memset", r"memset|fill|zero_"),
    ("reductions", r"reduce|aten::sum|aten::mean|var_mean"),
    ("elementwise", r"elementwise|triton|aten::"),
)
TOP = 15


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def stepper(recipe: Recipe, runtime: Runtime) -> Callable[[], Any]:
    """A training step of a recipe on random images that are on the device."""
    model = build_model(recipe, train_source())
    task = recipe.task
    state = start_training(recipe, task, model, runtime)
    count, classes = recipe.batch, max(1, model.config.classes)
    images = noise(count, model.config.channels, *recipe.image_size)
    batch = {"image": images, "label": torch.arange(count) % classes, "place": torch.arange(count)}
    prepare = task.prepare(model, Order(count, count))
    batch = runtime.to_device(prepare(0, batch) if prepare else batch)
    step = Stepper(state, task.objective(model), recipe.optimizer, runtime.wrap(state.model), runtime)
    return lambda: step([batch], 0.0)


def milliseconds(step: Callable[[], Any], device: str, times: int) -> float:
    """The median over steps."""
    taken = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken)


def kernels(step: Callable[[], Any], device: str) -> dict[str, tuple[float, int]]:
    """Milliseconds and number of launches by kernel of one step; on a CPU by operator."""
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        step()
        synchronize(device)
    found: dict[str, tuple[float, int]] = {}
    for row in recorded.key_averages():
        spent = row.self_device_time_total if cuda else row.self_cpu_time_total
        if spent:
            found[row.key] = (spent / 1000, row.count)
    return found


def measured(name: str, recipe: Recipe, runtime: Runtime, times: int) -> dict[str, Any]:
    step = stepper(recipe, runtime)
    for _ in range(WARMUP_CALLS + 2 if runtime.device.startswith("cuda") else 1):
        step()
    whole = milliseconds(step, runtime.device, times)
    found = kernels(step, runtime.device)
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel, (spent, count) in found.items():
        groups[group_of(kernel)][0] += spent
        groups[group_of(kernel)][1] += count
    slowest = sorted(found.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "step": name, "batch": recipe.batch, "milliseconds": whole,
        "images_per_second": 1000 * recipe.batch / whole,
        "kernels": sum(spent for spent, _ in found.values()),
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1][0])),
        "slowest": [(kernel[:150], group_of(kernel), spent, count) for kernel, (spent, count) in slowest],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    print(
        f"\n{row['step']}, batch {row['batch']}: {row['milliseconds']:.2f} ms a step, "
        f"{row['images_per_second']:,.0f} images/s; kernels {row['kernels']:.2f} ms"
    )
    print("| group | ms | share | launches |\n|---|---|---|---|")
    for group, (spent, count) in row["groups"].items():
        print(f"| {group} | {spent:.2f} | {spent / row['kernels']:.1%} | {count} |")
    for kernel, group, spent, count in row["slowest"]:
        print(f"{spent:9.3f} ms {count:5d} x  [{group}] {kernel}")
    print(end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--models", nargs="+", default=["ViT-B/16", "ViT-L/16"])
    parser.add_argument("--tasks", nargs="+", choices=(MAE, SUPERVISED), default=[MAE, SUPERVISED])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="ViT-Ti/4 of 32 pixels")
    parser.add_argument("--out", type=Path, help="results as JSON")
    options = parser.parse_args()
    runtime = choose_runtime(options.device, options.precision, options.compile)
    small = options.smoke or not runtime.device.startswith("cuda")
    models, pixels = (["ViT-Ti/4"], 32) if small else (options.models, 224)
    batch = 8 if small else options.batch
    rows = []
    for model in models:
        for task in options.tasks:
            plain: dict[str, Any] = {"randaugment": (), "mixup": 0.0, "model_options": ModelOptions()}
            recipe = at_size(task, model, pixels, batch, **({} if task == MAE else plain))
            rows.append(measured(f"{task} {model}", replace(recipe, seed=0), runtime, 3 if small else 10))
            show(rows[-1])
            runtime.empty_cache()
    if options.out:
        content = {"machine": runtime.describe(), "compiled": options.compile, "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
