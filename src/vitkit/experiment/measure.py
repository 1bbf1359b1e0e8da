"""How well a model does on a source: every image exactly once, on any number of processes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vitkit.data.batches import BadFiles, Batch, evaluation_batches
from vitkit.data.sources import Source
from vitkit.data.views import View
from vitkit.evaluation.accuracy import Accuracy, accuracy
from vitkit.evaluation.multilabel import MultilabelAccuracy, multilabel_accuracy
from vitkit.models.masked import MaskedViT
from vitkit.models.variants import Model
from vitkit.proportions import percent
from vitkit.serving.predict import evaluation_view, logits
from vitkit.training.masked import Masked, fixed
from vitkit.training.runtime import Runtime


@dataclass(frozen=True)
class PatchAccuracy:
    """How well corrupted patches are told: the mean over those of all images."""

    images: int
    patches: int  # corrupted ones, in all
    target: str
    loss: float  # cross-entropy of a colour, or the mean squared error of normalised pixels
    accuracy: float | None  # share of the colours that are right; None for pixels
    top1: None = None  # nothing is said of whole images

    def to_json(self, classes: tuple[str, ...] = ()) -> dict[str, Any]:
        return asdict(self)


Found = Accuracy | MultilabelAccuracy | PatchAccuracy


def numbers(found: Found, split: str) -> dict[str, float]:
    """What is written down of an evaluation."""
    names = ("accuracy" if found.top1 is None else "top1", "loss", "images")
    told = {f"{split}_{name}": getattr(found, name) for name in names}
    return {name: value for name, value in told.items() if value is not None}


def in_words(found: Found, what: str) -> str:
    """An evaluation while a run goes on, in a line."""
    if not isinstance(found, PatchAccuracy):
        return f"{percent(found.top1, found.images)} of {found.images} {what} images right"
    right = (
        "" if found.accuracy is None else f"{percent(found.accuracy, found.patches)} of their colours right, "
    )
    return f"{found.patches} corrupted patches of {found.images} {what} images: {right}loss {found.loss:.4g}"


def evaluate(
    model: Model,
    source: Source,
    batch: int,
    workers: int,
    bad: BadFiles | None = None,
    runtime: Runtime = Runtime(),
    accepted: Tensor | None = None,
) -> Accuracy | MultilabelAccuracy:
    """Accuracy over every image of a source, by the model's own preprocessing; each process does a share.

    `accepted`: where the source's classes are not the model's, which of those are right for each of them.
    """
    check_kind(model, source)
    model.eval()
    view = evaluation_view(model.preprocessing, model.config.image_size)
    blank = torch.zeros(1, model.config.channels, *view.size, dtype=torch.uint8)
    batches = shared(source, view, batch, workers, bad, runtime, lambda: logits(model, blank))
    classes, gather = model.config.classes, runtime.gathered
    if model.multilabel:
        assert accepted is None
        return multilabel_accuracy(
            lambda images: logits(model, images), batches, classes, gather, len(source)
        )
    return accuracy(lambda images: logits(model, images), batches, classes, gather, accepted)


def check_kind(model: Model, source: Source) -> None:
    """Refuse data with several labels an image for a model of one, and the other way round."""
    if model.multilabel != source.multilabel:
        data, told = ("several labels", "one") if source.multilabel else ("one label", "any number")
        hint = "" if source.multilabel else "; in a .csv, a ';' behind a label says that there may be several"
        raise ValueError(f"{source.name}: {data} for each image, but the model tells {told} of them{hint}")


@torch.no_grad()
def evaluate_masked(
    model: MaskedViT,
    objective: Masked,
    source: Source,
    batch: int,
    workers: int,
    bad: BadFiles | None = None,
    runtime: Runtime = Runtime(),
) -> PatchAccuracy:
    """The same for masked patch prediction; an image is corrupted alike at every evaluation of every run."""
    model.eval()
    vit = model.vit
    view = evaluation_view(vit.preprocessing, vit.config.image_size)
    patches = vit.config.grid[0] * vit.config.grid[1]

    def each(pixels: Batch) -> torch.Tensor:
        found = objective.each(model, runtime.place(fixed(objective.config, patches, pixels)))
        return torch.stack([*found.values()], 1).double().cpu()  # (B, 1 or 2)

    image = torch.zeros(1, vit.config.channels, *view.size, dtype=torch.uint8)
    blank = {"image": image, "place": torch.zeros(1, dtype=torch.int64)}
    batches = shared(source, view, batch, workers, bad, runtime, lambda: each(blank))
    columns = 1 if objective.config.target == "pixels" else 2
    empty = torch.zeros(0, columns, dtype=torch.float64)
    table = runtime.gathered(torch.cat([empty, *map(each, batches)]))
    if not len(table):
        raise ValueError("there is no image to evaluate on")
    loss, *right = table.mean(0).tolist()
    corrupted = len(table) * objective.config.counts(patches)[0]
    return PatchAccuracy(len(table), corrupted, objective.config.target, loss, right[0] if right else None)


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
