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
from vitkit.io.free_memory import free_memory
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Evaluation, Metrics, Task

KEPT_BYTES, KEPT_SHARE = 2**30, 0.1  # of images in memory, for all processes together; of the free memory


class KeptBatches:
    """The batches of a source that is evaluated repeatedly: in memory after the first time, if small.

    One object is for one source, view, batch size and process.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] | None = None

    def __call__(self, batches: Iterator[Batch], size: int, world: int) -> Iterator[Batch]:
        """The same batches; `batches` is not started if they are kept. size: in bytes, at most."""
        if self.batches is not None:
            yield from self.batches
            return
        keep = size <= min(KEPT_BYTES, KEPT_SHARE * free_memory()) / world
        kept: list[Batch] = []
        for batch in batches:
            if keep:  # a copy, since the images of a worker are in shared memory, with an open file each
                kept.append(batch | {"image": batch["image"].clone()})
            yield batch
        self.batches = kept if keep else None


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
    kept: KeptBatches | None = None,
) -> Metrics:
    """The task's metrics over every image, with the model's own preprocessing; each process does a share.

    module: the trained module, or a finished model of a task that wraps nothing around it.
    accepted: which of the model's classes are right for each class of the source, where the two differ.
    calibrate: also find the temperature at which the probabilities fit, if the task has any.
    tta: test-time augmentation, see inference/tta.py.
    kept: keeps the batches for the next evaluation of the same source.
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
        source=source,
        accepted=accepted,
        calibrate=calibrate,
    )
    black = torch.zeros(1, model.config.channels, *view.size, dtype=torch.uint8)
    zero = torch.zeros(1, dtype=torch.int64)
    blank = {"image": black, "label": zero, "index": zero, "place": zero}
    batches = local_batches(
        source, view, batch, workers, bad, runtime, lambda: task.outputs(module, blank, evaluation), kept
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
    kept: KeptBatches | None = None,
) -> Iterator[Batch]:
    """This process's share of a source.

    The forward pass of a sharded model is collective: a process with fewer batches than the others calls
    `forward_blank` for each one that it lacks.
    """
    mine = slice(runtime.rank, None, runtime.world)
    share = len(range(len(source))[:: runtime.world])
    missing = -(-share // batch) if runtime.is_sharded else 0
    batches = evaluation_batches(source, view, batch, places=mine, workers=workers, bad=bad)
    if kept:
        batches = kept(batches, share * 3 * view.size[0] * view.size[1], runtime.world)
    for images in batches:
        missing -= 1
        yield images
    for _ in range(missing):
        forward_blank()
