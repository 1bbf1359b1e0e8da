"""Which weights a run keeps, and when it stops early: by its evaluations on validation images."""

from collections.abc import Mapping
from typing import Any

from vitkit.objectives.task import Headline, Metrics
from vitkit.proportions import percent
from vitkit.recipes.recipe import Recipe

BEST = "best.safetensors"  # in a run folder: the weights that did best on val so far


def after_evaluation(
    memory: Mapping[str, Any], metrics: Metrics, headline: Headline, step: int
) -> dict[str, Any]:
    """What a run remembers after an evaluation: the best so far, and how many evaluations ago that was.

    Better is by the headline of its task or, where that is the same, a lower loss: of few validation images
    many evaluations have the same accuracy, and the first of them is the least trained.
    """
    score = headline.score(metrics)
    best, lowest = memory["best"], memory.get("best_loss", float("inf"))
    if best is None or score > best or (score == best and metrics.loss < lowest):
        return {"best": score, "best_loss": metrics.loss, "best_step": step, "since": 0,
                "best_images": metrics.images}  # fmt: skip
    return {"since": memory["since"] + 1}


def stopped(recipe: Recipe, memory: Mapping[str, Any]) -> bool:
    """Whether the run has ended early."""
    return bool(recipe.patience and memory["since"] >= recipe.patience)


def kept(
    recipe: Recipe, headline: Headline, memory: Mapping[str, Any], step: int, total: int
) -> dict[str, Any]:
    """For the result of a run that ended at `step` of `total`: whose weights it has, and why it ended."""
    best = recipe.keeps_best and memory["best"] is not None
    value = memory["best"] if best and headline.higher else -memory["best"] if best else None
    scores = {"val_top1": None} | ({f"val_{headline.key}": value} if best else {})
    return {
        "weights": "best" if best else "last",
        "step": memory.get("best_step") if best else step,
        **scores,
        "val_images": memory.get("best_images"),
        "stopped_early": step < total and stopped(recipe, memory),
        "planned_steps": total,
    }


def in_words(kept: Mapping[str, Any], steps: int) -> str:
    """One line for the end of a run."""
    ended = f"{steps} steps"
    if kept["stopped_early"]:
        ended = f"stopped early at step {steps} of {kept['planned_steps']}"
    if kept["weights"] == "last":
        return f"{ended}; kept the last weights"
    at = "" if kept["step"] is None else f", of step {kept['step']}"
    right = ""
    if kept["val_top1"] is not None and (images := kept.get("val_images")):
        right = f" ({percent(kept['val_top1'], images)} of {images} images right)"
    return f"{ended}; kept the best weights on validation{at}{right}"
