"""Accuracy over every image of a split exactly once: top-1, top-5, per class, confusion."""

# N images in all, B in a batch, C classes

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHOWN = 1000  # classes up to which the confusion matrix is written out


@dataclass(frozen=True)
class Accuracy:
    """What a classifier gets right, and on how many images that was counted."""

    images: int
    top1: float
    top5: float | None  # None where there are not more than five classes
    loss: float
    classes: int
    truth: Tensor  # (N,) what is
    said: Tensor  # (N,) what was said

    @property
    def confusion(self) -> Tensor:
        """(C, C): rows are what is, columns what was said."""
        pairs = self.truth * self.classes + self.said
        return pairs.bincount(minlength=self.classes**2).view(self.classes, self.classes)

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        counts = self.truth.bincount(minlength=self.classes).tolist()
        right = self.truth[self.truth == self.said].bincount(minlength=self.classes).tolist()
        per_class = {
            name: {"images": n, "accuracy": r / n if n else None}
            for name, n, r in zip(classes, counts, right, strict=True)
        }
        return {
            "top1": self.top1, "top5": self.top5, "images": self.images, "loss": self.loss,
            "per_class": per_class, "confusion": self.confusion.tolist() if len(classes) <= SHOWN else None,
        }  # fmt: skip


@torch.no_grad()
def accuracy(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    classes: int,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Accuracy:
    """Every batch through a function from images to logits; single labels only.

    `gather` brings the rows of several processes together, where each has some of the images.
    """
    rows = [torch.zeros(0, 4, dtype=torch.float64)]  # truth, said, among five, loss
    for batch in batches:
        logits = logits_of(batch["image"]).float().cpu()  # (B, C)
        labels = batch["label"].cpu()
        if labels.ndim != 1:
            raise ValueError("each image may have several labels here: multilabel_accuracy counts those")
        best = logits.topk(min(5, classes), dim=1).indices
        five = (best == labels[:, None]).any(1)
        loss = F.cross_entropy(logits, labels, reduction="none")
        rows.append(torch.stack([labels, logits.argmax(1), five, loss], 1).double())
    table = gather(torch.cat(rows))
    if not len(table):
        raise ValueError("there is no image to evaluate on")
    truth, said = table[:, 0].long(), table[:, 1].long()
    top1, fives, mean_loss = float((truth == said).double().mean()), *table[:, 2:].mean(0).tolist()
    return Accuracy(len(table), top1, fives if classes > 5 else None, mean_loss, classes, truth, said)
