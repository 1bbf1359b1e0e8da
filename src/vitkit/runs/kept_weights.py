"""Which weights a run keeps, the best on val or the last ones, and whether it stops early."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vitkit.io.files import replace_file
from vitkit.metrics.intervals import percent
from vitkit.models.adapt import linear_heads
from vitkit.models.lora import has_lora, merged_state
from vitkit.models.variants import Model, skeleton
from vitkit.recipes.recipe import Recipe
from vitkit.runtime.runtime import full_tensor
from vitkit.tasks.task import Headline, Metrics, Task
from vitkit.training.checkpoint import fill
from vitkit.weights.load import load
from vitkit.weights.save import save

BEST = "best.safetensors"  # in a run folder: the best weights on val so far
CARD = ("labels", "task", "preprocessing", "origin", "reject_below")


def after_evaluation(
    progress: Mapping[str, Any], metrics: Metrics, headline: Headline, step: int
) -> dict[str, Any]:
    """What to update in a run's progress: the best evaluation, and the number of evaluations since it.

    A higher score is better and, between equal scores, a lower loss: with few validation images many
    evaluations have the same accuracy, and the first of them is the least trained.
    """
    score = headline.score(metrics)
    fitted = getattr(metrics, "calibration", None)
    last = {"last": score} | ({"calibration": asdict(fitted)} if fitted else {})
    best, lowest = progress["best"], progress.get("best_loss", float("inf"))
    if best is None or score > best or (score == best and metrics.loss < lowest):
        return {
            "best": score, "best_loss": metrics.loss, "best_step": step, "best_images": metrics.images,
            "since": 0, **last, **({"best_calibration": last["calibration"]} if fitted else {}),
        }  # fmt: skip
    return {"since": progress["since"] + 1, **last}


def stopped_early(recipe: Recipe, progress: Mapping[str, Any]) -> bool:
    """Whether as many evaluations as the recipe's patience have brought no improvement."""
    return bool(recipe.patience and progress["since"] >= recipe.patience)


def keeps_best(recipe: Recipe, progress: Mapping[str, Any]) -> bool:
    """Whether the run keeps its best weights on val, and not the last ones.

    With a margin the best evaluation must be better than the last by that many standard errors of a share of
    val images. A score that is no share has none, so that any difference counts.
    """
    if not recipe.keeps_best or progress["best"] is None:
        return False
    best, last = progress["best"], progress.get("last")
    if not recipe.keep_margin or last is None:
        return True
    variance = max(0.0, best * (1 - best)) / max(1, progress.get("best_images") or 1)
    return best - last > recipe.keep_margin * math.sqrt(variance)


def best_notes(recipe: Recipe, headline: Headline, progress: Mapping[str, Any], left: int) -> tuple[str, ...]:
    """The best evaluation so far and, if it may come to that, when the run will stop early.

    left: the evaluations that the current stage still has.
    """
    if progress["best"] is None or "best_step" not in progress:
        return ()
    value = progress["best"] if headline.higher else -progress["best"]
    best = f"best {headline.text(value, progress['best_images'])} at step {progress['best_step']}"
    more = recipe.patience - progress["since"]
    if not recipe.patience or not 0 < more < left:  # stopped, or too few are left
        return (best,)
    evaluations = "1 more evaluation" if more == 1 else f"{more} more evaluations"
    return best, f"stops early after {evaluations} without improvement"


def describe_kept(
    recipe: Recipe, headline: Headline, progress: Mapping[str, Any], step: int, total: int
) -> dict[str, Any]:
    """For result.json: which weights are kept, and whether the run ended early at `step` of `total`."""
    best = keeps_best(recipe, progress)
    value = progress["best"] if best and headline.higher else -progress["best"] if best else None
    scores = {"val_top1": None} | ({f"val_{headline.key}": value} if best else {})
    fitted = kept_calibration(recipe, progress)
    return {
        "weights": "best" if best else "last",
        "step": progress.get("best_step") if best else step,
        **scores,
        "val_images": progress.get("best_images"),
        "stopped_early": step < total and stopped_early(recipe, progress),
        "planned_steps": total,
    } | ({"calibration": dict(fitted)} if fitted else {})


def apply_calibration(model: Model, recipe: Recipe, progress: Mapping[str, Any]) -> None:
    """Divide the logits of the kept weights by their temperature, in the head itself.

    So every format and engine gives the calibrated probabilities; no prediction changes its label.
    """
    fitted = kept_calibration(recipe, progress)
    if not fitted or model.head is None:
        return
    with torch.no_grad():
        for head in linear_heads(model):
            head.weight.div_(fitted["temperature"])
            head.bias.div_(fitted["temperature"])
    model.reject_below = fitted["threshold"]


def kept_calibration(recipe: Recipe, progress: Mapping[str, Any]) -> Mapping[str, float] | None:
    """The temperature and the threshold of the kept weights; None if the run is not calibrated."""
    return progress.get("best_calibration" if keeps_best(recipe, progress) else "calibration")


def calibration_note(calibration: Mapping[str, float]) -> str:
    """The calibration in one line."""
    text = f"calibrated on the validation images: temperature {calibration['temperature']:.3g}"
    if not calibration["threshold"]:
        return text
    return f"{text}; --reject without a number rejects below {100 * calibration['threshold']:.1f} %"


def stopping_note(kept: Mapping[str, Any], steps: int) -> str:
    """How a run ended, in one line; kept: as `describe_kept` returns it."""
    ending = f"{steps} step{'' if steps == 1 else 's'}"
    if kept["stopped_early"]:
        ending = f"stopped early at step {steps} of {kept['planned_steps']}"
    if kept["weights"] == "last":
        return f"{ending}; kept the last weights"
    step = "" if kept["step"] is None else f", of step {kept['step']}"
    accuracy = ""
    if kept["val_top1"] is not None and (images := kept.get("val_images")):
        accuracy = f" ({percent(kept['val_top1'], images)} of {images} images correct)"
    return f"{ending}; kept the best weights on validation{step}{accuracy}"


def kept_model(task: Task, module: nn.Module) -> Model:
    """A whole copy of the model on the CPU, with merged LoRA adapters.

    Collective, so every process must call it.
    """
    source = task.extract(module)
    model = skeleton(task.saved_config(source.config))
    names = model.state_dict()
    state = merged_state(source, lambda tensor: full_tensor(tensor).cpu())
    model.load_state_dict({name: state[name] for name in names}, assign=True)
    for field in CARD:
        setattr(model, field, getattr(source, field))
    return model


def save_best(task: Task, module: nn.Module, path: Path, *, main: bool) -> None:
    """Save the current weights: as a model file or, where the module is more, all that it has."""
    if is_unwrapped(task, module):
        model = kept_model(task, module)
        if main:
            save(model, path)
        return
    state = {name: full_tensor(t.detach()).cpu().contiguous() for name, t in module.state_dict().items()}
    if main:
        replace_file(path, lambda beside: save_file(state, beside))


def load_best(task: Task, module: nn.Module, path: Path) -> None:
    """Load those weights into the module, which may be sharded."""
    fill(module, load(path).state_dict() if is_unwrapped(task, module) else load_file(path))


def is_unwrapped(task: Task, module: nn.Module) -> bool:
    """Whether the module to train is a model as files hold it: no wrapper of its task, no adapters."""
    return task.extract(module) is module and not has_lora(module)
