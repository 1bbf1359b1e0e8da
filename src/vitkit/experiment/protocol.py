"""The paper's protocol: settings compared on a held-out slice of train, then all of train, n seeds, test."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitkit.experiment.fingerprint import check_data
from vitkit.experiment.pages import BIT
from vitkit.experiment.run import MODEL, How, Result, run
from vitkit.experiment.start import Opener, open_splits
from vitkit.experiment.terms import read_result
from vitkit.io.atomic import replace_file
from vitkit.proportions import percent, wilson
from vitkit.recipes.recipe import Recipe, read_recipe
from vitkit.training.runtime import Runtime

Say = Callable[[str], None]
Candidates = Mapping[str, Recipe]  # by the name of the folder of each run


def candidates(
    recipe: Recipe, *, convolutional: bool = False, bit: Recipe | None = None
) -> dict[str, Recipe]:
    """What is compared: every rate of the recipe, 0.06 too for convolutions, and BiT's rule for a ResNet."""
    rates = recipe.rates or (recipe.schedule.rate,)
    rates += recipe.convolution_rates if convolutional else ()
    found = {f"rate-{r:g}": replace(recipe, schedule=replace(recipe.schedule, rate=r)) for r in rates}
    return found | ({BIT: bit} if bit else {})


def called(name: str) -> str:
    """A candidate in words."""
    return "BiT's HyperRule" if name == BIT else name.replace("-", " ")


def follow(
    candidates: Candidates,
    out: Path,
    runtime: Runtime,
    how: How,
    *,
    seeds: int,
    say: Say,
    opened: Opener = open_splits,
) -> dict[str, Any]:
    """Every run is a folder below `out` and resumes on its own; one that is finished is only read.

    Candidates are compared on val; the test set is used once, by runs of the best one on all of train.
    """
    check_seeds(seeds)
    tried = compare(candidates, out, runtime, how, say, opened) if len(candidates) > 1 else {}
    best = max(
        tried, key=lambda name: (tried[name]["top1"], -tried[name]["loss"]), default=next(iter(candidates))
    )
    if BIT in tried:
        say(f"{called(best)} is the best of {len(tried)} on the held-out images")
    return retrain(candidates[best], best, tried, out, runtime, how, seeds=seeds, say=say, opened=opened)


def check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, not {seeds}")


def compare(
    candidates: Candidates, out: Path, runtime: Runtime, how: How, say: Say, opened: Opener = open_splits
) -> dict[str, dict[str, Any]]:
    """What each candidate, trained on train, comes to on val."""
    tried = {}
    for name, recipe in candidates.items():
        at = replace(recipe, report_on="val", evaluations=0)
        tried[name] = finished(at, out / name, runtime, how, say, opened).test
        images = tried[name]["images"]
        say(f"{called(name)}: {percent(tried[name]['top1'], images)} of {images} held-out images right")
    return tried


def retrain(
    recipe: Recipe,
    name: str,
    tried: Mapping[str, Mapping[str, Any]],
    out: Path,
    runtime: Runtime,
    how: How,
    *,
    seeds: int,
    say: Say,
    opened: Opener = open_splits,
) -> dict[str, Any]:
    """The chosen recipe on all of train, tested; a file protocol.json with all that was compared."""
    final = replace(recipe, train_on="train+val", patience=0, keep="auto")
    results = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        results.append(finished(replace(final, seed=seed), out / f"seed-{seed}", runtime, how, say, opened))
        images = results[-1].test["images"]
        say(f"seed {seed}: {percent(results[-1].test['top1'], images)} of {images} test images right")
    accuracies = [result.test["top1"] for result in results]
    scores = {key: test["top1"] for key, test in tried.items()}
    summary = {
        "run": str(out), "model": str(out / MODEL), "steps": results[0].steps,
        "rates": {key.removeprefix("rate-"): top1 for key, top1 in scores.items() if is_rate(key)},
        "rate": recipe.schedule.rate, "chosen": name, "tried": scores,
        "seeds": accuracies, "mean": mean(accuracies), "std": stdev(accuracies) if seeds > 1 else None,
        "interval": list(wilson(mean(accuracies), images)),
        "test": results[0].test, "images": images,
        "device_hours": sum(result.cost["device_hours"] for result in results),
    }  # fmt: skip
    if runtime.main:
        replace_file(out / MODEL, lambda beside: shutil.copyfile(results[0].model, beside))
        replace_file(out / "protocol.json", lambda beside: beside.write_text(json.dumps(summary, indent=2)))
    return summary


def is_rate(name: str) -> bool:
    """Whether a candidate differs from the others in its rate alone."""
    return name.startswith("rate-") and "-steps-" not in name


def finished(recipe: Recipe, out: Path, runtime: Runtime, how: How, say: Say, opened: Opener) -> Result:
    """The result of a run, now or before; one of before must be of the same data."""
    path, stored = out / "result.json", out / "recipe.json"
    if path.exists() and stored.exists() and read_recipe(stored) == recipe:
        splits = opened(recipe, out)
        check_data(splits, out, runtime, accept=how.accept_changed_data, labelled=True, say=say)
        return read_result(path)
    return run(recipe, out, runtime, how, opened)
