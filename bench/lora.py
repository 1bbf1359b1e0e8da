"""Full fine-tuning, LoRA, the last four blocks and the head alone: accuracy, seconds and memory side by side.

    python bench/lora.py WEIGHTS cifar10.npz:10000 imagenette.zip:20/class --steps 500 --seeds 3 --out l.jsonl
    python bench/lora.py --smoke                   # a small random model on digits, to see that it runs

A data set is what `vitkit finetune` takes; `:10000` or `:20/class` trains on a part. All runs have the same
steps, batch size, resolution and augmentation, and keep the last weights; each has the optimizer and the
learning rate of its recipe, unless `--lr WAY=RATE` gives another. Seconds are those of training alone. Memory
is the peak that PyTorch has allocated on the GPU in the run (empty on a CPU), beside what `--plan` expects.
Results are appended to --out, and a run that is there is not repeated. The last output is a Markdown table.
"""

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import vitkit
from vitkit.metrics.cost import parameters
from vitkit.planning.memory import memory_of, trained_skeleton
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.report.terminal import duration
from vitkit.runs.build import SplitCache, build_model
from vitkit.runs.folder import ADAPTER, MODEL, RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.schedule import Duration
from vitkit.training.trainable import trainable_parameters

WAYS: dict[str, tuple[str, list[str]]] = {  # name -> recipe, changes
    "full": ("finetune", []),
    "lora": ("lora", []),
    "lora-all-linear": ("lora", ["lora.targets=all-linear"]),
    "last-4": ("finetune", ["train=last-4"]),
    "head": ("finetune", ["train=head"]),
}


def make(place: str, way: str, seed: int, options: argparse.Namespace) -> Recipe:
    data, _, part = place.partition(":")
    name, changes = WAYS[way]
    r = recipe(name)
    r = replace(
        r, data=data, subset=part, weights=str(options.weights), auto=(), seed=seed, batch=options.batch,
        image_size=(options.pixels, options.pixels), length=Duration(steps=options.steps), keep="last",
        patience=0, evaluations=0, schedule=replace(r.schedule, warmup=options.steps // 10),
    )  # fmt: skip
    rates = dict(text.split("=") for text in options.lr)
    rate = [f"schedule.rate={rates[way]}"] if way in rates else []
    return override(r, [*options.set, *changes, *rate])


def measure(r: Recipe, runtime: Runtime, options: argparse.Namespace, opener: SplitCache) -> dict[str, Any]:
    """One run: accuracy on the test images, seconds of training, peak memory."""
    cuda = runtime.device.startswith("cuda")
    model = build_model(r, opener(r)["train"])
    planned = memory_of(r, model, runtime, r.micro_batch or r.batch).total
    trainable, total = trainable_parameters(trained_skeleton(r, model.config)), parameters(model)
    del model
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        out, quiet = Path(folder), RunOptions(workers=options.workers, report=False)
        result = run(r, out, runtime, quiet, opener).to_json()
        file = out / (ADAPTER if r.train == "lora" else MODEL)
        saved = file.stat().st_size
    return {
        "top1": result["test"]["top1"], "images": result["test"]["images"], "rate": r.schedule.rate,
        "seconds": result["cost"]["seconds"], "planned": planned, "trainable": trainable, "parameters": total,
        "peak": torch.cuda.max_memory_allocated() if cuda else None, "file": saved,
        "optimizer": r.optimizer.kind, "device": runtime.describe()["device"], "precision": runtime.precision,
    }  # fmt: skip


def rows(options: argparse.Namespace, runtime: Runtime) -> Iterator[dict[str, Any]]:
    """All results: those of --out, and the others as they are measured."""
    opener, known = SplitCache(), {}
    if options.out and options.out.exists():
        for line in options.out.read_text().splitlines():
            row = json.loads(line)
            known[row["data"], row["way"], row["seed"], row["settings"]] = row
    for place in options.data:
        for way in options.ways:
            for seed in range(options.seeds):
                r = make(place, way, seed, options)
                key = place, way, seed, f"{r.weights} {r.length} {r.batch} {r.image_size} {r.schedule.rate}"
                if key not in known:
                    row = dict(zip(("data", "way", "seed", "settings"), key, strict=True))
                    known[key] = row | measure(r, runtime, options, opener)
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(known[key]) + "\n")
                yield known[key]


def table(results: list[dict[str, Any]]) -> str:
    names = ("data", "trains", "parameters", "rate", "accuracy", "training", "peak", "planned", "file")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for data, way in dict.fromkeys((row["data"], row["way"]) for row in results):
        group = [row for row in results if (row["data"], row["way"]) == (data, way)]
        first, scores = group[0], [row["top1"] for row in group]
        spread = f" ± {100 * statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        peak = f"{max(row['peak'] for row in group) / 1e9:.2f} GB" if first["peak"] else ""
        cells = (
            Path(data).name, way, f"{first['trainable'] / 1e6:.3g} of {first['parameters'] / 1e6:.1f} M",
            f"{first['rate']:g}, {first['optimizer']}", f"{100 * statistics.mean(scores):.2f} %{spread}",
            duration(statistics.mean(row["seconds"] for row in group)), peak,
            f"{first['planned'] / 1e9:.2f} GB", f"{first['file'] / 1e6:.2f} MB",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", nargs="?", help="file, or name of published weights")
    parser.add_argument("data", nargs="*", help="data sets, each with an optional :subset")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", nargs="*", default=[], metavar="WAY=RATE", help="as in lora=0.003")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="recipe fields of all runs"
    )
    parser.add_argument("--workers", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path, help="results as JSON lines")
    parser.add_argument("--smoke", action="store_true", help="a random ViT-Ti/4 of 16 pixels on digits")
    options = parser.parse_args()
    if not options.smoke and not (options.weights and options.data):
        parser.error("give WEIGHTS and at least one data set, or --smoke")
    runtime = choose_runtime(options.device, options.precision)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.weights, options.data = Path(folder) / "random.safetensors", ["digits:200"]
            options.steps, options.batch, options.pixels, options.workers = 5, 16, 16, 0
            vitkit.save(vitkit.build("ViT-Ti/4", image_size=16, classes=10), options.weights)
        results = list(rows(options, runtime))
    print(f"{options.steps} steps of {options.batch} images at {options.pixels} pixels; "
          f"{results[0]['device']}, {results[0]['precision']}\n\n{table(results)}")  # fmt: skip


if __name__ == "__main__":
    main()
