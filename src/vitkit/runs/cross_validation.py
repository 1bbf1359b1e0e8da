"""k-fold cross-validation: one run for each fold, each resumable, and the mean accuracy over the folds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitkit.data.folds import MOST_FOLDS, parse_fold
from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.metrics.intervals import mean_interval, percent, wilson
from vitkit.recipes.recipe import Recipe, read_recipe
from vitkit.runs.folder import Result
from vitkit.runs.page import FOLDS
from vitkit.runs.protocol import Subruns
from vitkit.weights.locate import RECIPE


def check_folds(folds: int | None) -> None:
    if folds is not None and (type(folds) is not int or not 2 <= folds <= MOST_FOLDS):
        raise Error(f"--folds {folds}: expected a whole number from 2 to {MOST_FOLDS}", code="request.value")


def final_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the run on all train and val images; it has no val for early stopping or calibration."""
    return replace(recipe, fold="", train_on="train+val", report_on="test", keep="auto", patience=0)


def fold_recipe(final: Recipe, number: int, folds: int) -> Recipe:
    """The same training without the images of a fold, which it is then tested on."""
    return replace(
        final, fold=f"{number}/{folds}", train_on="train", report_on="val", evaluations=0, fewshot=""
    )


def folder_of(out: Path, number: int) -> Path:
    return out / f"fold-{number}"


def folds_in(out: Path) -> int:
    """The number of folds of the cross-validation in a folder; 0: there is none."""
    recipe = first_fold(out)
    return parse_fold(recipe.fold)[1] if recipe and recipe.fold else 0


def first_fold(out: Path) -> Recipe | None:
    path = folder_of(out, 1) / RECIPE
    return read_recipe(path) if path.exists() else None


def cross_validate(runs: Subruns, final: Recipe, folds: int) -> dict[str, Any]:
    """Train and test every fold and write folds.json; finished folds are not trained again."""
    results = []
    for number in range(1, folds + 1):
        result = runs.finished(fold_recipe(final, number, folds), folder_of(runs.out, number).name)
        results.append(result)
        images = result.test["images"]
        runs.say(
            f"fold {number} of {folds}: {percent(result.test['top1'], images)} of {images} images correct"
        )
    summary = summarise(results)
    if runs.runtime.is_main:
        text = json.dumps(summary, indent=2)
        replace_file(runs.out / FOLDS, lambda beside: beside.write_text(text, encoding="utf-8"))
    runs.runtime.barrier()  # the page of the final run reads it
    return summary


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """The content of folds.json: each fold, and mean, standard deviation and interval of the accuracy.

    The interval is that of the mean of the folds' accuracies, each on its own images (MOVER).
    """
    shares = [result.test["top1"] for result in results]
    images = [result.test["images"] for result in results]
    rows = [
        {"fold": number, "run": result.run, "images": count, "top1": share,
         "interval": list(wilson(share, count)), "loss": result.test["loss"], "steps": result.steps}
        for number, (result, share, count) in enumerate(zip(results, shares, images, strict=True), 1)
    ]  # fmt: skip
    return {
        "folds": rows, "mean": mean(shares), "std": stdev(shares), "images": sum(images),
        "interval": list(mean_interval(shares, images)),
        "device_hours": sum(result.cost["device_hours"] for result in results),
    }  # fmt: skip
