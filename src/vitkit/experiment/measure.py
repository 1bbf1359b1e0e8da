"""How well a model does on a source: every image exactly once, on any number of processes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.data.batches import BadFiles, Batch, evaluation_batches
from vitkit.data.sources import Source
from vitkit.data.views import View
from vitkit.objectives.task import Evaluation, Metrics, Task
from vitkit.serving.predict import evaluation_view, logits
from vitkit.training.runtime import Runtime


def numbers(task: Task, metrics: Metrics, split: str) -> dict[str, float]:
    """What is logged of an evaluation."""
    table = {f"{split}_{name}": getattr(metrics, name) for name in (*task.measured, "loss", "images")}
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
        forward=logits, place=runtime.place, gather=runtime.gathered, images=len(source), accepted=accepted
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
    calls = -(-len(range(len(source))[:: runtime.world]) // batch) if runtime.cut else 0
    for made in evaluation_batches(source, view, batch, places=mine, workers=workers, bad=bad):
        calls -= 1
        yield made
    for _ in range(calls):
        blank()
