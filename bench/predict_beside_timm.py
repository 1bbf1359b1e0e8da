"""Prediction on the CPU: timm in eager float32 beside each of our engines, the same weights, interleaved.

    python bench/predict_beside_timm.py --model ViT-B/16 --batch 32 --rounds 5

Each round times some batches of each in a row, as in a folder of images, in an order that turns; given are
medians with the quartiles of the rounds, the median of each round's ratio to timm, the largest difference of
the logits from timm's, and how many of the batch have the same top-1. The random weights have a random head,
so that no label is sure. int8 is calibrated on 32 generated pictures. "torch, together" is the engine `torch`
without images of its own for each core; "torch, GELU apart", with --gelu tanh, without the GELU within the
matrix product (ops/cpu_mlp.py).
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from forward import pair, product_rate

from vitkit.data.views import normalise
from vitkit.inference.agreement import sample_images
from vitkit.inference.builders import ENGINES, available
from vitkit.inference.engine_cache import EngineCache
from vitkit.inference.engines import EngineSelector, torch_engine
from vitkit.inference.predict import forward_logits
from vitkit.metrics.cost import forward_flops
from vitkit.ops import cpu_mlp


def timm_engine(theirs, ours):
    @torch.inference_mode()
    def run(images):
        return theirs(normalise(images, ours.preprocessing.mean, ours.preprocessing.std))

    return run


def built(model, batch: int, names: list[str], folder: Path) -> dict:
    """The engines that can be had here; why not, for the others."""
    calibrate = sample_images(model, 32) if any("int8" in name for name in names) else None
    cache = EngineCache(model, batch, calibrate, folder)
    selector = EngineSelector(model, torch_engine(model), batch, None, calibrate, cache)
    engines = {"torch": selector.reference}
    for name in names:
        if reason := available(name, calibrate is not None):
            print(f"{name}: {reason}", flush=True)
        elif name != "torch":
            start = time.perf_counter()
            engines[name], found = selector.build(name)
            print(f"{name}: made in {time.perf_counter() - start:.0f} s, {found.text()}", flush=True)
    return engines


def seconds(run, images, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run(images)
    return (time.perf_counter() - start) / times


def separately(run):
    """The same without oneDNN's dense layers, which compute bias and GELU within the product."""

    def separate(images):
        before, cpu_mlp.X86 = cpu_mlp.X86, False
        try:
            return run(images)
        finally:
            cpu_mlp.X86 = before

    return separate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=3, help="batches in a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--gelu", choices=("erf", "tanh"), default="erf", help="of both libraries")
    parser.add_argument("--folder", type=Path, help="Keep the graphs here for the next run.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = pair(options.model, options.gelu)
    ours = models["vitkit"]
    images = sample_images(ours, options.batch)
    with tempfile.TemporaryDirectory() as spare:
        engines = built(ours, options.batch, options.engines, options.folder or Path(spare))
        together = partial(forward_logits, ours)
        runs = {"timm": timm_engine(models["timm"], ours), "torch, together": together, **engines}
        if options.gelu == "tanh":
            runs["torch, GELU apart"] = separately(runs["torch"])
        want = runs["timm"](images)
        messages = {name: run(images) for name, run in runs.items()}  # and warm
        took: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(options.rounds):
            names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
            for name in names:
                took[name].append(seconds(runs[name], images, options.times))
    print(f"{options.model}, {options.gelu} GELU, batch {options.batch}, {options.threads} threads, "
          f"{options.rounds} rounds of {options.times}, torch {torch.__version__}")  # fmt: skip
    products = statistics.median(product_rate() for _ in range(options.rounds))
    flops = forward_flops(ours.config)
    print(f"A large product runs at {products / 1e9:.0f} GFLOP/s, an image takes {flops / 1e9:.1f} GFLOP: "
          f"at most {products / flops:.2f} images/s in float32")  # fmt: skip
    print("| engine | images a second | quartiles | times timm | logits apart | same top-1 |")
    print("|---|---|---|---|---|---|")
    for name, times in took.items():
        rates = [options.batch / t for t in times]
        low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
        ratio = statistics.median(a / b for a, b in zip(took["timm"], times, strict=True))
        apart = float((messages[name] - want).abs().max())
        same = int((messages[name].argmax(-1) == want.argmax(-1)).sum())
        print(f"| {name} | {statistics.median(rates):.2f} | {low:.2f} to {high:.2f} | {ratio:.2f} "
              f"| {apart:.1e} | {same} of {len(want)} |")  # fmt: skip


if __name__ == "__main__":
    main()
