"""A module's metrics over every image of a source, on any number of processes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.data.loader import BadFiles, Batch, evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.data.views import View
from vitkit.inference.predict import evaluation_view, logits
from vitkit.inference.tta import augmented
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Evaluation, Metrics, Task


def metrics_row(task: Task, metrics: Metrics, split: str) -> dict[str, float]:
    """The numbers of an evaluation for metrics.jsonl, with the split before each name."""
    row = {f"{split}_{name}": getattr(metrics, name) for name in (*task.metric_names, "loss", "images")}
    return {name: value for name, value in row.items() if value is not None}


def evaluate(
    task: Task,
    module: nn.Module,
    source: Source,
    batch: int,
    workers: int,
    bad: BadFiles | None = None,
    runtime: Runtime = Runtime(),
    accepted: Tensor | None = None,
    *,
    calibrate: bool = False,
    tta: str = "none",
) -> Metrics:
    """The task's metrics over every image, with the model's own preprocessing; each process does a share.

    module: the trained module, or a finished model of a task that wraps nothing around it.
    accepted: which of the model's classes are right for each class of the source, where the two differ.
    calibrate: also find the temperature at which the probabilities fit, if the task has any.
    tta: test-time augmentation, see inference/tta.py.
    """
    task.check_source(source)
    module.eval()
    model = task.extract(module)
    view = evaluation_view(model.preprocessing, model.config.image_size, tta)
    evaluation = Evaluation(
        forward=logits
        if tta == "none"
        else lambda model, images: augmented(partial(logits, model), model, tta)(images),
        place=runtime.to_device,
        gather=runtime.all_gather_rows,
        images=len(source),
        accepted=accepted,
        calibrate=calibrate,
    )
    black = torch.zeros(1, model.config.channels, *view.size, dtype=torch.uint8)
    zero = torch.zeros(1, dtype=torch.int64)
    blank = {"image": black, "label": zero, "index": zero, "place": zero}
    batches = local_batches(
        source, view, batch, workers, bad, runtime, lambda: task.outputs(module, blank, evaluation)
    )
    return task.evaluate(module, batches, evaluation)


def local_batches(
    source: Source,
    view: View,
    batch: int,
    workers: int,
    bad: BadFiles | None,
    runtime: Runtime,
    forward_blank: Callable[[], Any],
) -> Iterator[Batch]:
    """This process's share of a source.

    The forward pass of a sharded model is collective: a process with fewer batches than the others calls
    `forward_blank` for each one that it lacks.
    """
    mine = slice(runtime.rank, None, runtime.world)
    missing = -(-len(range(len(source))[:: runtime.world]) // batch) if runtime.is_sharded else 0
    for images in evaluation_batches(source, view, batch, places=mine, workers=workers, bad=bad):
        missing -= 1
        yield images
    for _ in range(missing):
        forward_blank()
