"""What a process does for a study, here or on another machine: one trial, or how long its steps take."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vitkit.data.batch_cache import keep_batches
from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.models.adapt import adapt
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import SplitCache, build_model
from vitkit.runs.estimates import Trial as Tried
from vitkit.runs.estimates import seconds_an_image, seconds_to_prepare
from vitkit.runs.folder import MODEL, RunOptions
from vitkit.runs.protocol import Protocol
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.studies.folder import RESULT, done, folder_of, result_of
from vitkit.studies.prepare import Pace
from vitkit.studies.study import Trial
from vitkit.weights.load import load
from vitkit.weights.save import save

TRIED = Tried(
    images=0, before=WARMUP_CALLS + 2, timed=5
)  # of a whole batch: small models are slow for few images
KEPT = 0.05  # what it takes to have a batch again that was kept, as a share of making it
OPENED = SplitCache()  # by this process, for all its trials
SHAPES = 64  # of models that a process compiles; beyond its limit PyTorch would compute without
BATCHES = "batches"  # a folder of a study while it runs
START = "start.safetensors"  # the model of another trial, with another way of resizing positions


@dataclass(frozen=True)
class Place:
    """Where a process works, and with how much of the machine."""

    device: str = "cpu"
    precision: str = "auto"
    workers: int = 0  # processes that prepare data
    threads: int = 0  # of PyTorch on the CPU; 0: its own choice
    quiet: bool = True
    keeps: bool = False  # batches, for other trials on the same ones
    compile: bool = False  # once for all trials of a shape

    def runtime(self) -> Runtime:
        if self.threads:
            torch.set_num_threads(self.threads)
        return settled(self.device, self.precision, self.compile)


@lru_cache
def settled(device: str, precision: str, compile: bool) -> Runtime:
    if compile:
        import torch._dynamo.config as compiling

        compiling.recompile_limit = SHAPES
    return choose_runtime(device, precision, compile)


def perform(trial: Trial, out: Path, place: Place) -> dict[str, Any]:
    """Run a trial in its folder, or go on with it; what it came to."""
    if not done(out, trial):
        folder = folder_of(out, trial.name)
        start: dict[str, Any] = {"weights": str(beginning(trial, out))} if trial.needs else {}
        how = RunOptions(
            workers=place.workers, quiet=place.quiet, report=False
        )  # the study's page tells of it
        keep_batches(out / BATCHES if place.keeps else None)
        if trial.compared:
            some = {name: replace(recipe, **start) for name, recipe in trial.compared.items()}
            tune(some, folder, place.runtime(), how)
        else:
            run(replace(trial.recipe, **start), folder, place.runtime(), how, OPENED)
        clean(folder)
    found = result_of(out, trial)
    assert found is not None
    return found


def tune(some: Mapping[str, Recipe], folder: Path, runtime: Runtime, how: RunOptions) -> None:
    """By the protocol, with one final run; its result is the trial's, with what was chosen."""
    summary = Protocol(folder, runtime, how, lambda text: None, OPENED).follow(some, seeds=1)
    (final,) = folder.glob(f"seed-*/{RESULT}")
    result = json.loads(final.read_text()) | {key: summary[key] for key in ("model", "chosen", "tried")}
    for name in some:  # its accuracy is kept; the model is trained again on all of train
        (folder / name / MODEL).unlink(missing_ok=True)
    replace_file(folder / RESULT, lambda beside: beside.write_text(json.dumps(result)))


def beginning(trial: Trial, out: Path) -> Path:
    """The model that a trial starts from."""
    model = folder_of(out, trial.needs) / MODEL
    if not model.exists():
        raise Error(
            f"{trial.name} starts from {model}, which does not exist: run the whole study",
            code="weights.not-found",
        )
    if not trial.resize:
        return model
    start = folder_of(out, trial.name) / START
    if not start.exists():
        start.parent.mkdir(parents=True, exist_ok=True)
        save(adapt(load(model), resize=trial.resize), start)
    return start


def clean(folder: Path) -> None:
    """Checkpoints are for going on; a finished trial keeps its model."""
    (folder / START).unlink(missing_ok=True)
    for place in (folder, *folder.glob("*/")):
        shutil.rmtree(place / "checkpoints", ignore_errors=True)


def pace_of(recipe: Recipe, place: Place) -> Pace:
    """How long steps take, and looks at an image afterwards: the slower of computing and preparing."""
    runtime = place.runtime()
    keep_batches(None)
    train = OPENED(recipe)["train"]
    computing = seconds_an_image(
        recipe, build_model(recipe, train), runtime, replace(TRIED, images=recipe.batch)
    )
    preparing = seconds_to_prepare(recipe, train)

    def both(preparing: float) -> tuple[float, float]:
        if place.workers and runtime.device.startswith("cuda"):  # at the same time
            each = preparing / place.workers
            return recipe.batch * max(computing, each), max(computing / 3, each)
        return recipe.batch * (computing + preparing), computing / 3 + preparing

    return Pace(*both(preparing), *both(KEPT * preparing if place.keeps else preparing))
