"""The end of a run: test the weights that are kept, then write the model, result.json and the report."""

import json
from typing import Any

from vitkit.data.loader import BadFiles
from vitkit.io.files import replace_file
from vitkit.metrics.cost import training_passes
from vitkit.models.lora import adapter_state
from vitkit.models.variants import Model
from vitkit.runs import artifacts
from vitkit.runs.context import RunContext
from vitkit.runs.estimates import cost
from vitkit.runs.evaluation import metrics_row
from vitkit.runs.evaluator import Evaluator
from vitkit.runs.folder import ADAPTER, MODEL, RESULT, Result
from vitkit.runs.kept_weights import (
    BEST,
    apply_calibration,
    describe_kept,
    keeps_best,
    kept_model,
    load_best,
)
from vitkit.runs.page import write_shown
from vitkit.runs.run_logger import RunLogger
from vitkit.runtime.runtime import full_tensor
from vitkit.training.optimizer import swap_average
from vitkit.weights.adapter import save_adapter
from vitkit.weights.save import save


def finish_run(run: RunContext, evaluator: Evaluator, logger: RunLogger, bad: BadFiles) -> Result:
    """Test the kept weights on every test image and write everything that a finished run has.

    bad: the unusable training images.
    """
    load_kept_weights(run)
    if run.recipe.calibrate and not run.model.reject_below:
        logger.say("no threshold for --reject: none of the validation images was classified correctly")
    split = run.recipe.report_on
    with run.counting("evaluation"):
        metrics, fewshot = evaluator.evaluate(split), evaluator.evaluate_fewshot(final=True)
        verdict = evaluator.monitor.verdict()
        evaluator.pictures.keep(run.state.step, last=True)
    with run.counting("saving"):
        model = save_model(run)
    test = metrics.to_json(model.labels) | {"split": split} | fewshot
    costs = run_cost(run, model, bad)
    numeric = {f"cost_{name}": value for name, value in costs.items() if isinstance(value, int | float)}
    logger.write(**metrics_row(run.task, metrics, "test"), **fewshot, **numeric)
    kept = describe_kept(run.recipe, run.task.headline, run.progress, run.state.step, run.total)
    result = Result(str(run.out), str(run.out / MODEL), run.state.step, test, costs, kept, verdict)
    if run.runtime.is_main:
        text = json.dumps(result.to_json(), indent=2)
        replace_file(run.out / RESULT, lambda beside: beside.write_text(text, encoding="utf-8"))
        write_shown(run.out, run.task, test)
    logger.close()
    if run.options.report:
        unusable = {"train": bad.reasons} | evaluator.unusable
        artifacts.finish(
            run.out, run.runtime, run.splits[split], run.task, metrics, model, unusable, logger.say
        )
    run.runtime.barrier()
    return result


def load_kept_weights(run: RunContext) -> None:
    """Into the module: the weights that did best on val, or the average, or the last ones as they are."""
    best = run.out / BEST
    if keeps_best(run.recipe, run.progress) and best.exists():
        load_best(run.task, run.state.model, best)
    else:
        swap_average(run.state.average, run.state.model)
    apply_calibration(run.model, run.recipe, run.progress)


def save_model(run: RunContext) -> Model:
    """Write the model file and the adapter of LoRA alone; returns the whole model on the CPU."""
    model = kept_model(run.task, run.state.model)
    if run.runtime.is_main:
        save(model, run.out / MODEL)
    if run.recipe.train == "lora":
        state = adapter_state(run.model, lambda tensor: full_tensor(tensor).cpu())  # collective
        if run.runtime.is_main:
            save_adapter(state, model, run.recipe.lora, run.recipe.weights, run.out / ADAPTER)
    return model


def run_cost(run: RunContext, model: Model, bad: BadFiles) -> dict[str, Any]:
    """FLOPs, time, energy and price of the training."""
    passes = run.task.passes(run.model)
    costs = cost(
        model, run.runtime, seen=run.state.step * run.recipe.batch, seconds=run.progress["seconds"],
        joules=run.progress.get("joules"), an_hour=run.options.price_per_hour,
        passes=training_passes(run.model) if passes is None else passes,
    )  # fmt: skip
    return costs | {"unusable_images": len(bad.reasons), "time": time_parts(run)}


def time_parts(run: RunContext) -> dict[str, float]:
    """The seconds of each part of the run; those of training are without waiting for data."""
    parts = {"start": 0.0, "data": 0.0, "evaluation": 0.0, "saving": 0.0} | run.progress["time"]
    training = max(0.0, run.progress["seconds"] - parts["data"])
    return {name: round(seconds, 3) for name, seconds in (parts | {"training": training}).items()}
