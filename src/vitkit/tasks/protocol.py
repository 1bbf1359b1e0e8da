"""The paper's protocol: rates compared on a held-out slice of train, then all of train, n seeds, the test."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitkit.experiment.fingerprint import check_data
from vitkit.experiment.run import MODEL, REMOVED, How, Result, run
from vitkit.experiment.start import Opener, open_splits
from vitkit.experiment.terms import read_result
from vitkit.recipes.recipe import Recipe, read_recipe
from vitkit.training.runtime import Runtime
from vitkit.weights.save import replace_file

Say = Callable[[str], None]


def follow(
    recipe: Recipe,
    out: Path,
    runtime: Runtime,
    how: How,
    *,
    seeds: int,
    convolutional: bool,
    say: Say,
    opened: Opener = open_splits,
) -> dict[str, Any]:
    """Every run is a folder below `out` and resumes on its own; one that is finished is only read.

    Rates are compared on val and the test set is looked at once, by runs on all of train with the best rate.
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, not {seeds}")
    rates = recipe.rates or (recipe.schedule.rate,)
    rates += recipe.convolution_rates if convolutional else ()
    tried = {}
    for rate in rates if len(rates) > 1 else ():
        at = replace(recipe, schedule=replace(recipe.schedule, rate=rate), report_on="val", evaluations=0)
        tried[rate] = finished(at, out / f"rate-{rate:g}", runtime, how, say, opened).test
        say(f"rate {rate:g}: {tried[rate]['top1']:.2%} of {tried[rate]['images']} held-out images right")
    best = max(tried, key=lambda rate: (tried[rate]["top1"], -tried[rate]["loss"])) if tried else rates[0]
    final = replace(recipe, schedule=replace(recipe.schedule, rate=best), train_on="train+val", patience=0)
    results = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        results.append(finished(replace(final, seed=seed), out / f"seed-{seed}", runtime, how, say, opened))
        say(f"seed {seed}: {results[-1].test['top1']:.2%} of {results[-1].test['images']} test images right")
    accuracies = [result.test["top1"] for result in results]
    told = {
        "run": str(out), "model": str(out / MODEL), "steps": results[0].steps,
        "rates": {f"{rate:g}": test["top1"] for rate, test in tried.items()}, "rate": best,
        "seeds": accuracies, "mean": mean(accuracies), "std": stdev(accuracies) if seeds > 1 else None,
        "test": results[0].test, "images": results[0].test["images"],
        "device_hours": sum(result.cost["device_hours"] for result in results),
    }  # fmt: skip
    if runtime.main:
        replace_file(out / MODEL, lambda beside: shutil.copyfile(results[0].model, beside))
        replace_file(out / "protocol.json", lambda beside: beside.write_text(json.dumps(told, indent=2)))
    return told


def finished(recipe: Recipe, out: Path, runtime: Runtime, how: How, say: Say, opened: Opener) -> Result:
    """The result of a run, now or before; one of before must be of the same data."""
    path, told = out / "result.json", out / "recipe.json"
    if path.exists() and told.exists() and read_recipe(told) == recipe:
        splits = opened(recipe, out / REMOVED)
        check_data(splits, out, runtime, accept=how.accept_changed_data, labelled=True, say=say)
        return read_result(path)
    return run(recipe, out, runtime, how, opened)
