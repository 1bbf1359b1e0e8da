"""The head first, then all weights, beside all weights from the start: equal steps, two stages in one script.

    python bench/head_first.py WEIGHTS DATA... --share 0.2 --seeds 1 --out head-first.json

Base is the recipe of the study `recipes`. The first stage trains the head alone for a share of the steps, at
--head-rate; the second trains all weights for the rest, as base does, from the head of the first. DATA may be
a part, cifar10.npz:5000.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import vitkit.runs.build as build
from vitkit.models.adapt import adapt
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.folder import MODEL, RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.studies.recipe_changes import WARMUP, Change, base_recipe, changed
from vitkit.studies.setting import Setting
from vitkit.training.schedule import Duration


def with_its_head(model: Model, **options: Any) -> Model:
    """`adapt`, which makes a new head, but the head of a model of the same classes stays."""
    new = adapt(model, **options)
    if model.labels == tuple(options["labels"]):
        new.head.load_state_dict(model.head.state_dict())
    return new


def with_steps(recipe: Recipe, steps: int, *changes: str) -> Recipe:
    schedule = replace(recipe.schedule, warmup=round(WARMUP * steps))
    return override(replace(recipe, length=Duration(steps=steps), schedule=schedule), changes)


def train(recipe: Recipe, out: Path, runtime: Runtime, workers: int) -> float:
    """Top-1 after a run."""
    run(recipe, out, runtime, RunOptions(workers=workers, quiet=True, report=False), build.SplitCache())
    return float(json.loads((out / "result.json").read_text())["test"]["top1"])


def compare(
    place: str, seed: int, options: argparse.Namespace, runtime: Runtime, out: Path
) -> dict[str, float]:
    s = Setting(
        data=(place,), downstream="", weights=options.weights, pixels=options.image_size,
        changes=tuple(options.set), steps=options.steps,
    )  # fmt: skip
    images = len(build.open_splits(base_recipe(s, place, images=1, seed=seed))["train"])
    base = changed(base_recipe(s, place, images, seed), Change(), images)
    steps = base.length.in_steps(images, base.batch)
    head = max(1, round(options.share * steps))
    first = with_steps(base, head, "train=head", f"schedule.rate={options.head_rate}")
    second = with_steps(base, steps - head, f"weights={out / 'head' / MODEL}")
    result = {"steps": steps, "head_steps": head}
    result |= {"base": train(base, out / "base", runtime, options.workers)} if options.base else {}
    result |= {"head": train(first, out / "head", runtime, options.workers)}
    return result | {"head, then all": train(second, out / "all", runtime, options.workers)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--share", type=float, default=0.2, help="of the steps, for the head alone")
    parser.add_argument("--head-rate", type=float, default=2e-3)
    parser.add_argument("--base", action=argparse.BooleanOptionalAction, default=True, help="also run base")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=0, help="default: the length of the study")
    parser.add_argument("--set", nargs="*", default=[], help="FIELD=VALUE of the base recipe")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("head-first.json"))
    options = parser.parse_args()
    runtime = choose_runtime(options.device, "auto")
    build.adapt = with_its_head
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for place in options.data:
            scratch = Path(tempfile.mkdtemp())
            row = {"data": Path(place).name, "seed": seed}
            rows.append(row | compare(place, seed, options, runtime, scratch))
            shutil.rmtree(scratch)
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
