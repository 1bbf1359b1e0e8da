"""Forward time and memory of vitkit and timm on the same weights, interleaved in one run, on the CPU.

    python bench/forward.py --model ViT-B/16 --batch 8 --rounds 20

Each round times both, in alternating order; given are medians with the quartiles of the rounds, and the
ratio of each round's pair. Memory is what one forward adds at its peak, in a process of its own.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import importable_peers  # noqa: F401

import vitkit
from vitkit.models.resnet import ResNetConfig
from vitkit.weights.convert import timm_resnet, timm_vit
from vitkit.weights.save import foreign_arrays, layout_for


def pair(name: str, gelu: str = "erf"):
    """The same weights in both libraries; of a ViT with this GELU: erf is timm's, tanh the official one."""
    options = {} if name.startswith("BiT") else {"gelu": gelu}
    ours = vitkit.build(name, seed=0, **options).eval()
    torch.nn.init.normal_(ours.head.weight, std=0.02)  # a zero head would hide every difference
    theirs = timm_resnet(ours.config) if isinstance(ours.config, ResNetConfig) else timm_vit(ours.config)
    layout = layout_for(ours.config, "timm", Path("x.pth"))
    theirs.load_state_dict(dict(foreign_arrays(ours, layout)), strict=True)
    return {"vitkit": ours, "timm": theirs.eval()}


def product_rate(size: int = 2048, times: int = 5) -> float:
    """Operations per second of a product of square matrices in float32, which no float32 engine exceeds."""
    left, right = torch.randn(2, size, size)
    left @ right
    start = time.perf_counter()
    for _ in range(times):
        left @ right
    return times * 2 * size**3 / (time.perf_counter() - start)


@torch.inference_mode()
def seconds(model, images: torch.Tensor) -> float:
    start = time.perf_counter()
    model(images)
    return time.perf_counter() - start


def memory(name: str, which: str, batch: int) -> float:
    """Peak MiB that one forward of one of them adds, in a process of its own."""
    command = [sys.executable, __file__, "--model", name, "--batch", str(batch), "--memory", which]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[-1])


@torch.inference_mode()
def measure_memory(name: str, which: str, batch: int) -> None:
    model = pair(name)[which]
    images = torch.randn(batch, 3, *vitkit.build(name).config.image_size)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from now on
    before = kilobytes("VmRSS")
    model(images)
    print((kilobytes("VmHWM") - before) / 1024)


def kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", choices=("vitkit", "timm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        return measure_memory(options.model, options.memory, options.batch)
    torch.set_num_threads(options.threads)
    models = pair(options.model)
    images = torch.randn(options.batch, 3, *models["vitkit"].config.image_size)
    with torch.inference_mode():
        difference = float((models["vitkit"](images) - models["timm"](images)).abs().max())
    times: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(options.rounds):
        for name in sorted(models, reverse=bool(round_ % 2)):
            times[name].append(seconds(models[name], images))
    ratios = [t / v for v, t in zip(times["vitkit"], times["timm"], strict=True)]
    result = {
        "command": " ".join(["python", *sys.argv]), "machine": platform.processor() or platform.machine(),
        "threads": options.threads, "torch": torch.__version__, "rounds": options.rounds,
        "images_per_second": {
            name: [round(options.batch / q, 2) for q in statistics.quantiles(t, n=4)[::-1]]
            for name, t in times.items()
        },
        "speed_of_vitkit_over_timm": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
        "forward_peak_MiB": {n: round(memory(options.model, n, options.batch), 1) for n in models},
        "largest_difference_of_logits": difference,
    }  # fmt: skip
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
