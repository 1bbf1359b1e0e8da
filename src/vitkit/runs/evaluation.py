"""Evaluation of a run's model on any number of processes, early stopping, and which weights are kept."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitkit.data.loader import BadFiles, Batch, evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.data.views import View
from vitkit.inference.predict import evaluation_view, logits
from vitkit.io.files import replace_file
from vitkit.metrics.intervals import percent
from vitkit.models.variants import Model, skeleton
from vitkit.recipes.recipe import Recipe
from vitkit.runtime.runtime import Runtime, full_tensor
from vitkit.tasks.task import Evaluation, Headline, Metrics, Task
from vitkit.training.checkpoint import fill
from vitkit.weights.load import load
from vitkit.weights.save import save


def numbers(task: Task, metrics: Metrics, split: str) -> dict[str, float]:
    """What is logged of an evaluation."""
    table = {f"{split}_{name}": getattr(metrics, name) for name in (*task.metric_names, "loss", "images")}
    return {name: value for name, value in table.items() if value is not None}


def evaluate(
    task: Task,
    module: nn.Module,
    source: Source,
    batch: int,
    workers: int,
    bad: BadFiles | None = None,
    runtime: Runtime = Runtime(),
    accepted: Tensor | None = None,
) -> Metrics:
    """The task's metrics over every image, by the model's own preprocessing; each process does a share.

    module: the one that learns, or a finished model of a task that wraps nothing around it.
    accepted: where the source's classes are not the model's, which of those are right for each of them.
    """
    task.check_source(source)
    module.eval()
    model = task.extract(module)
    view = evaluation_view(model.preprocessing, model.config.image_size)
    how = Evaluation(
        forward=logits,
        place=runtime.to_device,
        gather=runtime.all_gather_rows,
        images=len(source),
        accepted=accepted,
    )
    black = torch.zeros(1, model.config.channels, *view.size, dtype=torch.uint8)
    first = torch.zeros(1, dtype=torch.int64)
    blank = {"image": black, "label": first, "index": first, "place": first}
    batches = shared(source, view, batch, workers, bad, runtime, lambda: task.outputs(module, blank, how))
    return task.evaluate(module, batches, how)


def shared(
    source: Source,
    view: View,
    batch: int,
    workers: int,
    bad: BadFiles | None,
    runtime: Runtime,
    blank: Callable[[], Any],
) -> Iterator[Batch]:
    """This process's share of a source; for each batch that it has fewer than others a call of `blank`.

    A model whose tensors are spread is called by all processes, as often as by the busiest.
    """
    mine = slice(runtime.rank, None, runtime.world)
    calls = -(-len(range(len(source))[:: runtime.world]) // batch) if runtime.is_sharded else 0
    for made in evaluation_batches(source, view, batch, places=mine, workers=workers, bad=bad):
        calls -= 1
        yield made
    for _ in range(calls):
        blank()


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


def stopping_note(kept: Mapping[str, Any], steps: int) -> str:
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


CARD = ("labels", "task", "preprocessing", "origin")


def kept_model(task: Task, module: nn.Module) -> Model:
    """A copy of the model, whole and on the CPU; all processes must ask for it."""
    source = task.extract(module)
    model = skeleton(task.saved_config(source.config))
    names = model.state_dict()
    state = {n: full_tensor(t.detach()).cpu() for n, t in source.state_dict().items() if n in names}
    model.load_state_dict(state, assign=True)
    for field in CARD:
        setattr(model, field, getattr(source, field))
    return model


def save_best(task: Task, module: nn.Module, path: Path, *, main: bool) -> None:
    """The weights as they are: a model file or, where a task has more than the model, all of its tensors."""
    if task.extract(module) is module:
        model = kept_model(task, module)
        if main:
            save(model, path)
        return
    state = {name: full_tensor(t.detach()).cpu().contiguous() for name, t in module.state_dict().items()}
    if main:
        replace_file(path, lambda beside: save_file(state, beside))


def load_best(task: Task, module: nn.Module, path: Path) -> None:
    """Those weights back into the module, of which each process may hold its rows only."""
    fill(module, load(path).state_dict() if task.extract(module) is module else load_file(path))
