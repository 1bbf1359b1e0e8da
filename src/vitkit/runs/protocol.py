"""The paper's protocol: compare settings on a held-out part of train, retrain the best with n seeds, test."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.metrics.intervals import percent, wilson
from vitkit.recipes.recipe import VERSION, Recipe, as_meant, read_recipe
from vitkit.runs.build import Opener, open_splits
from vitkit.runs.folder import MODEL, Result, RunOptions, read_result, starting_version
from vitkit.runs.page import BIT
from vitkit.runs.provenance.fingerprint import check_data
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime

PROTOCOL = "protocol.json"  # in the protocol's folder: everything that was compared, and the result
Say = Callable[[str], None]
Candidates = Mapping[str, Recipe]  # by the folder name of each run


def candidates(
    recipe: Recipe, *, convolutional: bool = False, bit: Recipe | None = None
) -> dict[str, Recipe]:
    """The recipes to compare: each learning rate, 0.06 too for convolutions, and BiT's rule if given."""
    rates = recipe.rates or (recipe.schedule.rate,)
    rates += recipe.convolution_rates if convolutional else ()
    recipes = {f"rate-{r:g}": replace(recipe, schedule=replace(recipe.schedule, rate=r)) for r in rates}
    return recipes | ({BIT: bit} if bit else {})


def called(name: str) -> str:
    """The name of a candidate in messages."""
    return "BiT's HyperRule" if name == BIT else name.replace("-", " ")


@dataclass(frozen=True)
class Subruns:
    """Performs several runs, each resumable in a subfolder of `out`; finished ones are read."""

    out: Path
    runtime: Runtime
    options: RunOptions
    say: Say
    opener: Opener = open_splits

    def finished(self, recipe: Recipe, name: str) -> Result:
        """The result of a run; an earlier result is reused if the data has not changed."""
        out, recipe = self.out / name, as_meant(recipe, self.starting_version())
        path, stored = out / "result.json", out / "recipe.json"
        if path.exists() and stored.exists() and read_recipe(stored) == recipe:
            splits, accept = self.opener(recipe, out), self.options.accept_changed_data
            check_data(splits, out, self.runtime, accept=accept, labelled=True, say=self.say)
            return read_result(path)
        return run(recipe, out, self.runtime, self.options, self.opener)

    def starting_version(self) -> int:
        """The earliest recipe version in the folder: runs that are compared must read recipes alike."""
        return min(
            (starting_version(path.parent) for path in self.out.glob("*/recipe.json")), default=VERSION
        )


@dataclass(frozen=True)
class Protocol(Subruns):
    """The runs of the paper's protocol."""

    def follow(self, candidates: Candidates, *, seeds: int) -> dict[str, Any]:
        """Compare candidates on val, then retrain the best one on all of train and test it."""
        check_seeds(seeds)
        tried = self.compare(candidates) if len(candidates) > 1 else {}
        best = max(
            tried,
            key=lambda name: (tried[name]["top1"], -tried[name]["loss"]),
            default=next(iter(candidates)),
        )
        if BIT in tried:
            self.say(f"{called(best)} is the best of {len(tried)} on the held-out images")
        return self.retrain(candidates[best], best, tried, seeds=seeds)

    def compare(self, candidates: Candidates) -> dict[str, dict[str, Any]]:
        """The metrics of each candidate on val, trained on train."""
        tried = {}
        for name, recipe in candidates.items():
            tried[name] = self.finished(replace(recipe, report_on="val", evaluations=0), name).test
            images = tried[name]["images"]
            accuracy = percent(tried[name]["top1"], images)
            self.say(f"{called(name)}: {accuracy} of {images} held-out images correct")
        return tried

    def retrain(
        self, recipe: Recipe, name: str, tried: Mapping[str, Mapping[str, Any]], *, seeds: int
    ) -> dict[str, Any]:
        """Train the chosen recipe on all of train, test it, and write protocol.json."""
        final = replace(recipe, train_on="train+val", patience=0, keep="auto")
        results = []
        for seed in range(recipe.seed, recipe.seed + seeds):
            results.append(self.finished(replace(final, seed=seed), f"seed-{seed}"))
            images = results[-1].test["images"]
            self.say(
                f"seed {seed}: {percent(results[-1].test['top1'], images)} of {images} test images correct"
            )
        summary = summarise(self.out, recipe, name, tried, results)
        if self.runtime.is_main:
            replace_file(self.out / MODEL, lambda beside: shutil.copyfile(results[0].model, beside))
            text = json.dumps(summary, indent=2)
            replace_file(self.out / PROTOCOL, lambda beside: beside.write_text(text, encoding="utf-8"))
        return summary


def summarise(
    out: Path,
    recipe: Recipe,
    name: str,
    tried: Mapping[str, Mapping[str, Any]],
    results: Sequence[Result],
) -> dict[str, Any]:
    """The content of protocol.json: all candidates, and the mean over the seeds of the best one."""
    accuracies, images = [result.test["top1"] for result in results], results[-1].test["images"]
    scores = {key: test["top1"] for key, test in tried.items()}
    return {
        "run": str(out), "model": str(out / MODEL), "steps": results[0].steps,
        "rates": {key.removeprefix("rate-"): top1 for key, top1 in scores.items() if is_rate(key)},
        "rate": recipe.schedule.rate, "chosen": name, "tried": scores,
        "seeds": accuracies, "mean": mean(accuracies),
        "std": stdev(accuracies) if len(accuracies) > 1 else None,
        "interval": list(wilson(mean(accuracies), images)),
        "test": results[0].test, "images": images,
        "device_hours": sum(result.cost["device_hours"] for result in results),
    }  # fmt: skip


def check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise Error(f"--seeds must be at least 1, not {seeds}", code="request.value")


def is_rate(name: str) -> bool:
    """Whether a candidate differs from the others only in its learning rate."""
    return name.startswith("rate-") and "-steps-" not in name
