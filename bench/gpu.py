"""vitkit beside timm, transformers and torchvision on one GPU: training, inference, latency, memory, start.

    python bench/gpu.py                                   every row; prints a markdown table
    python bench/gpu.py --rows train-B infer-B --rounds 12 --images tiny.npz --json out.json

All sides of a row are in one process and take turns, a round after a round; times are medians over the
rounds. Each does the same work: bf16 autocast with float32 weights, fused AdamW, clipping, cross-entropy, the
images already on the GPU. vitkit's step is its own, with its checks; "graph" is its engine for
prediction, from uint8 on the host to logits on the host, or where it says so from uint8 to logits on the GPU,
as the peers. In the row of latency every call is waited for. MFU
is three times (of inference: once) the forward FLOPs of an image, by the formula and with all tokens of the
last layer, over the rate of a large bf16 product in the same run. "same top-1" is against float32.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.inference.bf16 import CudaGraphEngine
from vitkit.inference.builders import build_engine
from vitkit.inference.engine_cache import EngineCache
from vitkit.metrics.cost import forward_flops
from vitkit.models.variants import Model, configure, fresh
from vitkit.ops.cuda_graph import WARMUP_CALLS, CudaGraph
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import ClassificationLoss
from vitkit.tasks.task import Batch
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import PendingStep, Stepper, TrainState

CLASSES, RATE = 1000, 1e-4
SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16)}
TIMM = {"S": "small", "B": "base", "L": "large"}


@dataclass(frozen=True)
class Row:
    """One line of the table: a size of ViT at so many pixels, in so large batches, trained or only asked."""

    size: str
    pixels: int = 224
    batch: int = 256
    train: bool = True
    sides: tuple[str, ...] = ("vitkit", "vitkit compiled", "timm", "timm compiled", "torchvision compiled")


ROWS = {
    "train-B": Row("B", sides=("vitkit", "vitkit compiled", "timm", "timm compiled", "transformers",
                               "torchvision compiled")),
    "train-L": Row("L", batch=128, sides=("vitkit", "vitkit compiled", "timm", "timm compiled")),
    "train-S": Row("S", batch=512, sides=("vitkit compiled", "timm compiled")),
    "tune-B-384": Row("B", pixels=384, batch=128, sides=("vitkit compiled", "timm compiled")),
    "infer-B": Row("B", train=False, sides=("vitkit", "vitkit compiled", "vitkit graph",
                                            "vitkit graph compiled", "vitkit graph compiled, on the GPU",
                                            "timm", "timm compiled", "transformers", "torchvision compiled")),
    "latency-B": Row("B", batch=1, train=False, sides=("vitkit", "vitkit graph", "vitkit graph compiled",
                                                       "vitkit graph compiled, on the GPU", "timm",
                                                       "timm compiled")),
}  # fmt: skip


def peer(kind: str, row: Row) -> nn.Module:
    """Another library's model of the same shape, from scratch."""
    if kind == "timm":
        import timm

        name = f"vit_{TIMM[row.size]}_patch16_{'384' if row.pixels == 384 else '224'}"
        return timm.create_model(name, num_classes=CLASSES, img_size=row.pixels)
    if kind == "transformers":
        from transformers import ViTConfig, ViTForImageClassification

        depth, width, heads = SIZES[row.size]
        shape = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads,
                 "intermediate_size": 4 * width, "image_size": row.pixels, "num_labels": CLASSES}  # fmt: skip
        return ViTForImageClassification(ViTConfig(**shape, attn_implementation="sdpa"))
    import torchvision.models as models

    return getattr(models, f"vit_{row.size.lower()}_16")(num_classes=CLASSES, image_size=row.pixels)


def peer_step(kind: str, row: Row, images: Tensor, labels: Tensor, compiled: bool) -> Callable[[], Any]:
    model = peer(kind, row).to(images.device)
    call: Any = torch.compile(model) if compiled else model
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=images.is_cuda)

    def logits() -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            result = call(images)
        return result.logits if kind == "transformers" else result

    def train() -> None:
        F.cross_entropy(logits().float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    model.train(row.train)
    return train if row.train else torch.inference_mode()(logits)


def our_model(row: Row) -> Model:
    """With a head that says something: a new one is zero."""
    size = (row.pixels, row.pixels)
    model = fresh(configure(f"ViT-{row.size}/16", classes=CLASSES, image_size=size), seed=0)
    nn.init.normal_(model.head.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return model


def our_step(row: Row, images: Tensor, labels: Tensor, compiled: bool) -> Callable[[], Any]:
    """By the training loop's own update; inference as the server calls a model."""
    runtime = Runtime(device=images.device.type, precision="bf16", compile=compiled)
    model = runtime.place(our_model(row))
    call = runtime.wrap(model)
    if not row.train:
        model.eval()

        def ask() -> Tensor:
            with torch.inference_mode(), runtime.autocast():
                return call(images)

        return ask
    config = OptimizerConfig(kind="adam", weight_decay=0.1, clip=1.0)
    state = TrainState.start(model, config)
    model.train()
    batch = {
        "image": as_bytes(images),
        "label": labels,
        "index": torch.arange(len(images), device=images.device),
    }
    objective = ClassificationLoss(classes=CLASSES, mean=(0.5,) * 3, std=(0.5,) * 3)
    step = stepping(Stepper(state, objective, config, call, runtime, print))
    return lambda: step([batch])


def stepping(steps: Stepper) -> Callable[[list[Batch]], float]:
    """Training as the loop does it, a step by each call; its loss, or where it is played that before it."""
    behind: list[PendingStep] = []

    def step(micro_batches: list[Batch]) -> float:
        behind.append(steps.begin(micro_batches, RATE))
        late = behind[0].replayed and len(behind) == 1
        return math.nan if late else steps.finish(behind.pop(0))["loss"]

    return step


def as_bytes(images: Tensor) -> Tensor:
    return (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def our_engine(how: str, row: Row, images: Tensor) -> Callable[[], Any]:
    model, pixels = our_model(row).to(images.device).eval(), as_bytes(images)
    engine, _, there = how.partition(", ")
    if not there:
        held, cache = pixels.cpu(), EngineCache(model, len(images))
        run = build_engine(engine.replace(" ", "-"), model, len(images), None, cache)
        return lambda: run(held)
    graphed = CudaGraphEngine(model, len(images), compiled="compiled" in engine)
    with torch.inference_mode():
        pixels = pixels.clone()  # as the recording's own, or it would be compiled anew in its midst
        for _ in range(WARMUP_CALLS):
            graphed.compute(pixels)
        graph = CudaGraph(lambda given: graphed.compute(given["image"]), {"image": pixels})

    @torch.inference_mode()
    def ask() -> Tensor:
        assert graphed  # whose weights must live
        return graph.replay({"image": pixels})

    return ask


def step_of(side: str, row: Row, images: Tensor, labels: Tensor) -> Callable[[], Any]:
    kind, _, how = side.partition(" ")
    if how.startswith("graph"):
        return our_engine(how, row, images)
    make = our_step if kind == "vitkit" else lambda *rest: peer_step(kind, *rest)
    return make(row, images, labels, bool(how))


def agreeing(side: str, row: Row, step: Callable[[], Any], images: Tensor) -> float | None:
    """Of ours, how many images have the top-1 that the same weights give in float32."""
    if row.train or not side.startswith("vitkit"):
        return None
    with torch.inference_mode():
        want = our_model(row).to(images.device).eval()(images).argmax(1).cpu()
    return float((step().argmax(1).cpu() == want).float().mean())


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], Any], device: str, times: int, each: bool = False) -> float:
    """Seconds of one call, over several of them; `each` is waited for before the next."""
    wait(device)
    begun = time.perf_counter()
    for _ in range(times):
        step()
        if each:
            wait(device)
    wait(device)
    return (time.perf_counter() - begun) / times


def pictures(options: argparse.Namespace, count: int, pixels: int) -> Tensor:
    """Real images, if some were given, else noise; in -1..1, (count, 3, pixels, pixels)."""
    if not options.images:
        return torch.randn(count, 3, pixels, pixels, device=options.device).clamp(-1, 1)
    with np.load(options.images) as held:
        chosen = torch.from_numpy(held["x_test"][:count]).to(options.device).permute(0, 3, 1, 2).float()
    return F.interpolate(chosen / 127.5 - 1, (pixels, pixels), mode="bilinear")


def ceiling(device: str) -> float:
    """FLOP/s of a large bf16 product."""
    n = 8192 if device == "cuda" else 512
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return 2 * n**3 / statistics.median(timed(lambda: a @ a, device, 3) for _ in range(10))


def profiled(step: Any, steps: int = 3) -> dict[str, float]:
    """Milliseconds of a step by kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spent = {one.key: one.device_time_total / 1e3 / steps for one in seen.key_averages()}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def tell_kernels(spent: dict[str, float], most: int = 40) -> None:
    for name, milliseconds in list(spent.items())[:most]:
        print(f"    {milliseconds:7.3f} {name[:110]}")
    if spent:
        print(f"    {sum(spent.values()):7.3f} in all", flush=True)


def compare(name: str, row: Row, options: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    device = options.device
    torch.manual_seed(0)
    batch = options.batch or row.batch
    images = pictures(options, batch, row.pixels)
    labels = torch.arange(batch, device=device) % CLASSES
    steps, started, memory = {}, {}, {}
    for side in row.sides:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        begun = time.perf_counter()
        steps[side] = step_of(side, row, images, labels)
        steps[side]()
        wait(device)
        started[side] = time.perf_counter() - begun
        timed(steps[side], device, WARMUP_CALLS + 1)  # the last of which ours records
        memory[side] = (torch.cuda.max_memory_allocated() - held) / 1e9 if device == "cuda" else None
    seconds: dict[str, list[float]] = {side: [] for side in row.sides}
    for _ in range(options.rounds):
        for side in row.sides:
            seconds[side].append(timed(steps[side], device, options.steps, each=batch == 1))
    for side in row.sides if options.kernels else ():
        print(f"{name}, {side}: milliseconds by kernel")
        tell_kernels(profiled(steps[side]))
    flops = forward_flops(configure(f"ViT-{row.size}/16", classes=CLASSES, image_size=row.pixels))
    work = flops * (3 if row.train else 1)
    middle = {side: statistics.median(seconds[side]) for side in row.sides}
    best = min(value for side, value in middle.items() if not side.startswith("vitkit"))
    return [
        {"row": name, "side": side, "images_per_second": batch / middle[side],
         "spread": (max(seconds[side]) - min(seconds[side])) / middle[side], "ms": 1e3 * middle[side],
         "against_best_peer": best / middle[side], "MFU": work * batch / middle[side] / peak,
         "memory_GB": memory[side], "first_step_s": started[side],
         "same_top1": agreeing(side, row, steps[side], images)}
        for side in row.sides
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | side | images/s | ms | spread | against the best peer | MFU | GB | first step, s "
        "| same top-1 |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        gigabytes = "-" if r["memory_GB"] is None else f"{r['memory_GB']:.1f}"
        lines.append(
            f"| {r['row']} | {r['side']} | {r['images_per_second']:,.0f} | {r['ms']:.2f} | {r['spread']:.1%} "
            f"| {r['against_best_peer']:.2f} | {r['MFU']:.2f} | {gigabytes} | {r['first_step_s']:.1f} "
            f"| {'-' if r['same_top1'] is None else format(r['same_top1'], '.1%')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sides", nargs="+", help="of each row only these, as in 'timm compiled'")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="calls in a round")
    parser.add_argument("--batch", type=int, default=0, help="instead of each row's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", help="an .npz with x_test, uint8 (N, h, w, 3): real images")
    parser.add_argument("--kernels", action="store_true", help="Print what each kernel takes, too.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    peak = ceiling(options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, a large product runs at {peak / 1e12:.0f} TFLOP/s", flush=True)
    rows = []
    for row in options.rows:
        asked = ROWS[row]
        if options.sides:
            asked = replace(asked, sides=tuple(side for side in asked.sides if side in options.sides))
        rows += compare(row, asked, options, peak)
        print(table(rows[-len(asked.sides) :]), flush=True)
        torch.compiler.reset()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"machine": name, "peak": peak, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
