"""What a worker process does for a study: run one trial, or measure how long its steps take."""

import json
import math
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
from vitkit.metrics.frozen_features import probe
from vitkit.models.adapt import adapt
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import SplitCache, build_model
from vitkit.runs.estimates import Trial as TimingRun
from vitkit.runs.estimates import seconds_an_image, seconds_to_prepare
from vitkit.runs.feature_monitor import MOST, LabelledFeatures, LabelledSet
from vitkit.runs.features import Extractor, open_frozen
from vitkit.runs.folder import MODEL, RunOptions
from vitkit.runs.protocol import Protocol
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.studies.attention_depth import attention_depth
from vitkit.studies.folder import RESULT, is_finished, read_result, trial_folder
from vitkit.studies.prepare import Timing
from vitkit.studies.setting import DRAWS
from vitkit.studies.study import Trial
from vitkit.studies.study_inputs import adopt_paths
from vitkit.weights.load import load
from vitkit.weights.save import save

TIMING_RUN = TimingRun(images=0, before=WARMUP_CALLS + 2, timed=5)  # `images` is set to the batch size
CACHED = 0.05  # time to read a cached batch, as a share of the time to prepare it
SPLITS = SplitCache()  # opened data, shared by all trials of this process
RECOMPILE_LIMIT = 64  # model shapes per process; beyond its own limit, PyTorch would run uncompiled
BATCHES = "batches"  # folder of cached batches in a study folder, while the study runs
FROZEN_SHOTS = 10
START = "start.safetensors"  # the initial model of a trial that sets another position resizing


@dataclass(frozen=True)
class WorkerConfig:
    """The device and the CPU resources of a worker process."""

    device: str = "cpu"
    precision: str = "auto"
    workers: int = 0  # data loader worker processes
    threads: int = 0  # PyTorch CPU threads; 0: PyTorch's default
    quiet: bool = True
    cache_batches: bool = False  # for other trials that use the same batches
    compile: bool = False  # once for all trials with the same model shape
    stop_at: float = math.inf  # time.monotonic() at which a trial saves and stops

    def runtime(self) -> Runtime:
        if self.threads:
            torch.set_num_threads(self.threads)
        return cached_runtime(self.device, self.precision, self.compile)


@lru_cache
def cached_runtime(device: str, precision: str, compile: bool) -> Runtime:
    if compile:
        import torch._dynamo.config as dynamo_config

        dynamo_config.recompile_limit = RECOMPILE_LIMIT
    return choose_runtime(device, precision, compile)


def run_trial(trial: Trial, out: Path, config: WorkerConfig) -> dict[str, Any]:
    """Run or resume a trial in its folder and return its result."""
    if not is_finished(out, trial):
        folder = trial_folder(out, trial.name)
        start: dict[str, Any] = {"weights": str(initial_weights(trial, out))} if trial.needs else {}
        options = RunOptions(
            workers=config.workers, quiet=config.quiet, stop_at=config.stop_at, report=False
        )  # the study has a page
        adopt_paths(folder, replace(trial.recipe, **start))
        keep_batches(out / BATCHES if config.cache_batches else None)
        if trial.compared:
            recipes = {name: replace(recipe, **start) for name, recipe in trial.compared.items()}
            run_protocol(recipes, folder, config.runtime(), options)
        else:
            run(replace(trial.recipe, **start), folder, config.runtime(), options, SPLITS)
        remove_checkpoints(folder)
        if not trial.keep_model:
            (folder / MODEL).unlink(missing_ok=True)
        if trial.frozen:
            score_features(trial, folder, config)
        if trial.attention:
            model = load(folder / MODEL).to(config.runtime().device)
            add_scores(folder, attention_depth(model, open_frozen(trial.attention, SPLITS)[1]))
    result = read_result(out, trial)
    assert result is not None
    return result


def score_features(trial: Trial, folder: Path, config: WorkerConfig) -> None:
    """Add k-NN, linear-probe and few-shot accuracy of the model's features to the result of a trial."""
    runtime, data = (
        config.runtime(),
        LabelledSet(trial.frozen, *open_frozen(trial.frozen, SPLITS), "test images"),
    )
    data = data.capped(MOST, MOST)
    model = load(folder / MODEL).to(runtime.device)
    extractor = Extractor(model=model, runtime=runtime, batch=trial.recipe.batch, workers=config.workers)
    features = LabelledFeatures(data, *map(extractor.features, (data.reference, data.classified)))
    scores = {"knn": features.neighbours(), "probe": probe(*features.values).correct}
    facts = {name: float(correct.double().mean()) for name, correct in scores.items()}
    facts |= {f"fewshot_{name}": value for name, value in features.fewshot(FROZEN_SHOTS, DRAWS).items()}
    add_scores(folder, facts | {"frozen_images": len(features.classified.x)})


def add_scores(folder: Path, scores: Mapping[str, float]) -> None:
    """Add scores to the result of a trial."""
    path = folder / RESULT
    result = json.loads(path.read_text(encoding="utf-8"))
    result["test"] |= scores
    replace_file(path, lambda beside: beside.write_text(json.dumps(result), encoding="utf-8"))


def run_protocol(recipes: Mapping[str, Recipe], folder: Path, runtime: Runtime, options: RunOptions) -> None:
    """Run the protocol with one final run; write its result and the chosen recipe as the trial's result."""
    summary = Protocol(folder, runtime, options, lambda text: None, SPLITS).follow(recipes, seeds=1)
    (final,) = folder.glob(f"seed-*/{RESULT}")
    result = json.loads(final.read_text(encoding="utf-8")) | {
        key: summary[key] for key in ("model", "chosen", "tried")
    }
    for name in recipes:  # only their accuracy matters; the final model is trained on all of train
        (folder / name / MODEL).unlink(missing_ok=True)
    replace_file(folder / RESULT, lambda beside: beside.write_text(json.dumps(result), encoding="utf-8"))


def initial_weights(trial: Trial, out: Path) -> Path:
    """The model that a trial starts from."""
    model = trial_folder(out, trial.needs) / MODEL
    if not model.exists():
        raise Error(
            f"{trial.name} starts from {model}, which does not exist; run the whole study again",
            code="weights.not-found",
        )
    if not trial.resize:
        return model
    start = trial_folder(out, trial.name) / START
    if not start.exists():
        start.parent.mkdir(parents=True, exist_ok=True)
        save(adapt(load(model), resize=trial.resize), start)
    return start


def remove_checkpoints(folder: Path) -> None:
    """A finished trial keeps only its model; checkpoints are for resuming."""
    (folder / START).unlink(missing_ok=True)
    for run_folder in (folder, *folder.glob("*/")):
        shutil.rmtree(run_folder / "checkpoints", ignore_errors=True)


def measure_timing(recipe: Recipe, config: WorkerConfig) -> Timing:
    """Measure the time of a training step and of evaluating an image, including data loading."""
    runtime = config.runtime()
    keep_batches(None)
    train = SPLITS(recipe)["train"]
    timing_run = replace(TIMING_RUN, images=recipe.batch)  # whole batches: small ones underuse the device
    model = build_model(recipe, train)
    computing = seconds_an_image(recipe, model, runtime, timing_run, source=train)
    preparing = seconds_to_prepare(recipe, train)

    def step_and_image(preparing: float) -> tuple[float, float]:
        if config.workers and runtime.device.startswith("cuda"):  # prefetching overlaps with computing
            each = preparing / config.workers
            return recipe.batch * max(computing, each), max(computing / 3, each)
        return recipe.batch * (computing + preparing), computing / 3 + preparing

    cached = CACHED * preparing if config.cache_batches else preparing
    return Timing(*step_and_image(preparing), *step_and_image(cached))
