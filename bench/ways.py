"""Ways to make a training step on a GPU faster, each alone: what the step takes with it, or without it.

    python bench/ways.py --size B --batch 256 --json ways.json
    python bench/ways.py --ways now eager autotune

Every way is a process of its own. They compile at the same time and are timed one after the other, under a
lock. `now` is what vitkit does with --compile; `no ...` takes one thing away from it, the others add one.
"""

import argparse
import contextlib
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu
import torch
from torch import Tensor, nn

from vitkit.models import attention, encoder, vit
from vitkit.models.variants import Model
from vitkit.ops import fused
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.ops.low_precision import LowPrecisionCopy
from vitkit.runtime import runtime
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training import optimizer
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Stepper, TrainState

WAYS = {
    "now": "compiled and recorded, with all that the others take away",
    "no recording": "every kernel launched anew",
    "eager": "not compiled",
    "no cudnn": "attention by flash",
    "no spare": "all tokens in the last layer",
    "no half sums": "what layers add up in float32",
    "no fused": "AdamW by foreach",
    "no halves": "weights rounded one by one, by autocast",
    "no product": "patches by a convolution",
    "no epilogue": "MLPs as inductor compiles them",
    "no pack": "gradients of q, k and v put together and summed by inductor",
    "no summing": "the GELU's gradient by inductor",
    "no fusion": "none of ops/fused.py",
    "autotune": "inductor tries its own products (max-autotune-no-cudagraphs)",
    "tma": "the same with persistent kernels that fetch by TMA",
    "lt": "all products by cuBLASLt, not only those with a bias",
    "combo": "inductor puts small kernels that need nothing of each other together",
    "blocks": "each layer compiled by itself, so that one serves for all",
    "coordinate": "inductor tunes its kernels by coordinate descent",
}


PATIENCE = 150  # seconds for those that are still compiling


class Whole(nn.Module):
    """A model that computes every token of its last layer."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.judged(self.model.pooled(self.model.tokens(images)))


def convolved(self: Any, images: Tensor) -> tuple[Tensor, Any]:
    """What ViT.patches gives."""
    z = self.project(images)
    return z.flatten(2).mT, tuple(z.shape[-2:])


def gelu_backward(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """What models.kernels has a kernel for."""
    inner = torch.ops.aten.gelu_backward(gradient, before, approximate="tanh")
    return inner, inner.sum(0)


def arranged(way: str, model: Model, where: Runtime) -> nn.Module:
    """Change what is to be changed; the model as it is to be called."""
    call: nn.Module = model
    if way == "no cudnn":
        runtime.fastest_attention = lambda device: contextlib.nullcontext()
    if way == "no spare":
        call = Whole(model)
    if way == "no half sums":
        before = vit.ViT.embed
        vit.ViT.embed = lambda self, *given: before(self, *given).float()
    if way == "no product":
        vit.ViT.patches = convolved
    if way in ("no epilogue", "no fusion"):
        encoder.can_fuse = lambda z, weight: False
    if way in ("no pack", "no fusion"):
        attention.can_fuse = lambda z, weight: False
    if way == "no summing":
        fused.gelu_backward = gelu_backward
    if way != "no halves":
        call = LowPrecisionCopy(call)
    if way == "eager":
        return call
    if way == "blocks":
        for block in model.encoder.blocks:
            block.compile()
        return call
    if way == "tma":
        torch._inductor.config.triton.enable_persistent_tma_matmul = True
    if way == "lt":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    if way in ("coordinate", "combo"):
        asked = "coordinate_descent_tuning" if way == "coordinate" else "combo_kernels"
        return torch.compile(call, options={asked: True})
    return torch.compile(call, mode="max-autotune-no-cudagraphs" if way in ("autotune", "tma") else None)


def tried(way: str, options: argparse.Namespace) -> dict[str, Any]:
    row = gpu.Row(options.size, pixels=options.pixels, batch=options.batch)
    torch.manual_seed(0)
    images = gpu.pictures(options, options.batch, options.pixels)
    labels = torch.arange(options.batch, device=options.device) % gpu.CLASSES
    where = Runtime(device=options.device, precision="bf16", cuda_graph=way != "no recording")
    model = where.place(gpu.our_model(row))
    call = arranged(way, model, where)
    config = OptimizerConfig(kind="adam", weight_decay=0.1, clip=1.0)
    state = TrainState.start(model, config)
    if way == "no fused":
        state.optimizer = torch.optim.AdamW(optimizer.group_parameters(model, config), lr=0.0, foreach=True)
    batch = {"image": gpu.as_bytes(images), "label": labels}
    objective = ClassificationLoss(classes=gpu.CLASSES)

    go = gpu.stepping(Stepper(state, objective, config, call, where, print))

    def step() -> float:
        return go([batch])

    begun = time.perf_counter()
    losses = [step() for _ in range(WARMUP_CALLS + 3)]
    started = time.perf_counter() - begun
    Path(options.lock, way.replace(" ", "-")).touch()
    while len(list(Path(options.lock).iterdir())) < options.count and time.perf_counter() - begun < PATIENCE:
        time.sleep(0.1)  # so that nobody warms up while another is timed
    with open(options.lock + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        times = [gpu.timed(step, options.device, 5) for _ in range(options.rounds)]
        kernels = gpu.profiled(step) if options.kernels else {}
    middle = statistics.median(times)
    memory = torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else None
    return {"way": way, "ms": 1e3 * middle, "spread": (max(times) - min(times)) / middle,
            "images_per_second": options.batch / middle, "memory_GB": memory, "first_steps_s": started,
            "losses": losses, "kernels": kernels}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--size", choices=gpu.SIZES, default="B")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--images")
    parser.add_argument("--kernels", action="store_true", help="Print what each kernel takes, too.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lock:
        print(json.dumps(tried(options.ways[0], options)))
        return
    with tempfile.TemporaryDirectory() as lock:
        common = [sys.executable, __file__, *sys.argv[1:], "--lock", lock, "--count", str(len(options.ways))]
        running = [
            subprocess.Popen([*common, "--ways", way], stdout=subprocess.PIPE, text=True)
            for way in options.ways
        ]
        messages = [one.communicate()[0] for one in running]
    result = [json.loads(text.splitlines()[-1]) for one, text in zip(running, messages, strict=True)
             if one.returncode == 0]  # fmt: skip
    print("| way | ms | spread | images/s | GB | first 3 steps, s | loss |\n" + "|---" * 7 + "|")
    for one in sorted(result, key=lambda one: one["ms"]):
        print(
            f"| {one['way']} | {one['ms']:.2f} | {one['spread']:.1%} | {one['images_per_second']:,.0f} "
            f"| {one['memory_GB'] or 0:.1f} | {one['first_steps_s']:.0f} | {one['losses'][-1]:.4f} |"
        )
        gpu.tell_kernels(one["kernels"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
