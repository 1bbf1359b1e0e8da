"""Which settings of fine-tuning matter: one change at a time around a base recipe, on several data sets.

    python bench/recipe_levers.py WEIGHTS.npz cifar10.npz:10000 imagenette.zip:20/class digits --out l.jsonl

A data set is what `vitkit finetune` takes; `:10000` or `:20/class` trains on a part. Every run sees the same
number of images per data set (`--epochs`, at least `--least` images). Results are appended to --out as they
come, and a run that is there is not repeated, so the command continues where it was stopped. `--only` picks
changes by name. Accuracy is on test images, which no run has selected anything on: the last weights are kept.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.build import SplitCache
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

BASE = [
    "crop=resized", "crop_area=0.3", "interpolation=bicubic", "mixup=0.2", "label_smoothing=0.1",
    "optimizer.layer_decay=0.75", "optimizer.weight_decay=0.05",
]  # fmt: skip
CHANGES: dict[str, list[str]] = {
    "base": [],
    "paper": ["crop=inception", "crop_area=0.05", "interpolation=bilinear", "mixup=0", "label_smoothing=0",
              "optimizer.kind=sgd", "optimizer.layer_decay=1", "optimizer.weight_decay=0",
              "schedule.rate=0.01"],
    "paper, rate 0.03": ["crop=inception", "crop_area=0.05", "interpolation=bilinear", "mixup=0",
                         "label_smoothing=0", "optimizer.kind=sgd", "optimizer.layer_decay=1",
                         "optimizer.weight_decay=0", "schedule.rate=0.03"],
    "sgd": ["optimizer.kind=sgd", "optimizer.layer_decay=1", "optimizer.weight_decay=0",
            "schedule.rate=0.01"],
    "rate 2e-4": ["schedule.rate=2e-4"],
    "rate 1e-3": ["schedule.rate=1e-3"],
    "rate 2e-3": ["schedule.rate=2e-3"],
    "layer decay 0.65": ["optimizer.layer_decay=0.65"],
    "layer decay 0.85": ["optimizer.layer_decay=0.85"],
    "layer decay 1": ["optimizer.layer_decay=1"],
    "weight decay 0": ["optimizer.weight_decay=0"],
    "weight decay 0.3": ["optimizer.weight_decay=0.3"],
    "no mixup": ["mixup=0"],
    "mixup 0.8": ["mixup=0.8"],
    "cutmix 1": ["mixup=0", "cutmix=1"],
    "mixup 0.2 and cutmix 1": ["cutmix=1"],
    "no smoothing": ["label_smoothing=0"],
    "area 0.08": ["crop_area=0.08"],
    "area 0.6": ["crop_area=0.6"],
    "inception crop": ["crop=inception", "crop_area=0.05"],
    "bilinear": ["interpolation=bilinear"],
    "randaugment 2,10": ["randaugment=2,10"],
    "3-augment": ["three_augment=yes", "color_jitter=0.3"],
    "erasing 0.25": ["erasing=0.25"],
    "stochastic depth 0.1": ["stochastic_depth=0.1"],
    "average 0.99": ["optimizer.average=0.99"],
    "least-squares head": ["head_init=least-squares"],
    "half as long": [],
    "twice as long": [],
    "centre crop in evaluation": ["evaluation_crop=centre"],
}  # fmt: skip
LENGTHS = {"half as long": 0.5, "twice as long": 2.0}


def make(place: str, options: argparse.Namespace, change: str, seed: int, opener: SplitCache) -> Recipe:
    data, _, part = place.partition(":")
    r = replace(
        recipe("finetune"), data=data, subset=part, weights=str(options.weights), auto=(), seed=seed,
        image_size=(options.pixels, options.pixels), optimizer=OptimizerConfig(kind="adam", clip=1.0),
        keep="last", patience=0, evaluations=0, val=0.1,
    )  # fmt: skip
    images = len(opener(r)["train"])
    batch = max(8, min(options.batch, 2 ** (max(1, images // 8).bit_length() - 1)))
    seen = max(options.least, options.epochs * images) * LENGTHS.get(change, 1.0)
    steps = max(20, round(seen / batch))
    schedule = Schedule(rate=options.rate, warmup=steps // 10, decay="cosine")
    r = replace(r, batch=batch, length=Duration(steps=steps), schedule=schedule)
    return override(r, [*BASE, *CHANGES[change]])


def results(path: Path) -> Iterator[dict]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def one(r: Recipe, runtime: Runtime, workers: int, opener: SplitCache) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        options = RunOptions(quiet=True, workers=workers, report=False)
        result = run(r, Path(folder, "run"), runtime, options, opener)
        seconds = time.monotonic() - begun
    return {
        "top1": result.test["top1"], "loss": result.test["loss"], "images": result.test["images"],
        "steps": result.steps, "seconds": seconds, "training": result.cost["seconds"],
    }  # fmt: skip


def table(rows: list[dict]) -> None:
    sets = list(dict.fromkeys(row["set"] for row in rows))
    print(f"| change | {' | '.join(sets)} | mean difference |\n|---|{'---|' * (len(sets) + 1)}")
    score: dict[tuple[str, str], float] = {}
    for row in rows:
        same = [r["top1"] for r in rows if (r["change"], r["set"]) == (row["change"], row["set"])]
        score[row["change"], row["set"]] = 100 * statistics.mean(same)
    for change in dict.fromkeys(row["change"] for row in rows):
        cells = [f"{score[change, s]:.2f}" if (change, s) in score else "" for s in sets]
        both = [
            score[change, s] - score["base", s] for s in sets if {(change, s), ("base", s)} <= score.keys()
        ]
        print(f"| {change} | {' | '.join(cells)} | {statistics.mean(both) if both else float('nan'):+.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--only", nargs="+", default=list(CHANGES), choices=CHANGES, metavar="CHANGE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=float, default=15)
    parser.add_argument("--least", type=int, default=20_000, help="images of a run at least")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=Path("levers.jsonl"))
    options = parser.parse_args()
    begun, opener = time.monotonic(), SplitCache()
    runtime = choose_runtime(options.device, "auto", options.device.startswith("cuda"))
    done = {(row["set"], row["change"], row["seed"]) for row in results(options.out)}
    for seed in range(options.seeds):
        for change in options.only:
            for place in options.data:
                if (place, change, seed) in done or time.monotonic() - begun > options.seconds:
                    continue
                row = one(make(place, options, change, seed, opener), runtime, options.workers, opener)
                row = {"set": place, "change": change, "seed": seed, **row}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)
    table(list(results(options.out)))


if __name__ == "__main__":
    main()
