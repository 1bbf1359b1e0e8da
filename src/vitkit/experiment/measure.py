"""How well a model does on a source: every image exactly once, on any number of processes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vitkit.data.batches import BadFiles, Batch, evaluation_batches
from vitkit.data.sources import Source
from vitkit.evaluation.accuracy import Accuracy, accuracy
from vitkit.evaluation.multilabel import MultilabelAccuracy, multilabel_accuracy
from vitkit.models.variants import Model
from vitkit.serving.predict import evaluation_view, logits
from vitkit.training.runtime import Runtime


def evaluate(
    model: Model,
    source: Source,
    batch: int,
    workers: int,
    bad: BadFiles | None = None,
    runtime: Runtime = Runtime(),
) -> Accuracy | MultilabelAccuracy:
    """Accuracy over every image of a source, by the model's own preprocessing; each process does a share."""
    if model.multilabel != source.multilabel:
        data, told = ("several labels", "one") if source.multilabel else ("one label", "any number")
        hint = "" if source.multilabel else "; in a .csv, a ';' behind a label says that there may be several"
        raise ValueError(f"{source.name}: {data} for each image, but the model tells {told} of them{hint}")
    model.eval()
    view = evaluation_view(model.preprocessing, model.config.image_size)
    mine = slice(runtime.rank, None, runtime.world)
    batches = evaluation_batches(source, view, batch, places=mine, workers=workers, bad=bad)
    if runtime.cut:  # a model whose tensors are spread is called by all processes, as often as by the busiest
        blank = torch.zeros(1, model.config.channels, *view.size, dtype=torch.uint8)
        calls = -(-len(range(len(source))[:: runtime.world]) // batch)
        batches = evened(batches, calls, lambda: logits(model, blank))
    measure = multilabel_accuracy if model.multilabel else accuracy
    return measure(lambda images: logits(model, images), batches, model.config.classes, runtime.gathered)


def evened(batches: Iterator[Batch], calls: int, blank: Callable[[], Any]) -> Iterator[Batch]:
    """The batches, and for each that this process has fewer than others a call of `blank`."""
    done = 0
    for done, batch in enumerate(batches, start=1):  # noqa: B007
        yield batch
    for _ in range(calls - done):
        blank()
