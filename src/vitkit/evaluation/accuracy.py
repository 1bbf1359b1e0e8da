"""Accuracy over every image of a split exactly once: top-1, top-5, per class, confusion, how sure it is."""

# N images in all, B in a batch, C classes of the model, F of the data (the same, unless they are mapped)

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.evaluation.certainty import calibration_error, interval
from vitkit.proportions import wilson

SHOWN = 1000  # classes up to which the confusion matrix is written out


@dataclass(frozen=True)
class Accuracy:
    """What a classifier gets right, and on how many images that was counted."""

    images: int
    top1: float
    top5: float | None  # None where there are not more than five classes
    loss: float
    classes: int  # C
    kinds: int  # F
    index: Tensor  # (N,) of the images, in their order in the data
    truth: Tensor  # (N,) what is, one of F
    said: Tensor  # (N,) what was said, one of C
    right: Tensor  # (N,) whether that counts as right
    confidence: Tensor  # (N,) the probability of what was said

    @property
    def confusion(self) -> Tensor:
        """(F, C): rows are what is, columns what was said."""
        pairs = self.truth * self.classes + self.said
        return pairs.bincount(minlength=self.kinds * self.classes).view(self.kinds, self.classes)

    def __repr__(self) -> str:
        return f"Accuracy(images={self.images}, top1={self.top1:.4f}, loss={self.loss:.4f})"

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """`classes` are the names of the F."""
        counts = self.truth.bincount(minlength=self.kinds).tolist()
        right = self.truth[self.right].bincount(minlength=self.kinds).tolist()
        per_class = {
            name: {
                "images": n, "accuracy": r / n if n else None,
                "interval": list(wilson(r / n, n)) if n else None,
            }
            for name, n, r in zip(classes, counts, right, strict=True)
        }  # fmt: skip
        five = None if self.top5 is None else list(wilson(self.top5, self.images))
        shown = max(self.classes, self.kinds) <= SHOWN
        return {
            "top1": self.top1, "interval": list(interval(self.right)), "top5": self.top5,
            "top5_interval": five,
            "images": self.images, "loss": self.loss,
            "calibration_error": calibration_error(self.confidence, self.right),
            "per_class": per_class, "confusion": self.confusion.tolist() if shown else None,
        }  # fmt: skip


@torch.no_grad()
def accuracy(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    classes: int,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    accepted: Tensor | None = None,
) -> Accuracy:
    """Every batch through a function from images to logits; single labels only.

    `gather` brings the rows of several processes together, where each has some of the images; by their
    `index` they are put in order again. `accepted` (F, C) says which of the model's classes are right for
    each of the data's; without it the two are the same, and each is right for itself.
    """
    rows, seen = [torch.zeros(0, 6, dtype=torch.float64)], 0
    for batch in batches:
        logits = logits_of(batch["image"]).float().cpu()  # (B, C)
        labels = batch["label"].cpu()
        if labels.ndim != 1:
            raise Error(
                "each image may have several labels here: multilabel_accuracy counts those",
                code="evaluation.unsupported",
            )
        index = batch["index"].cpu() if "index" in batch else torch.arange(seen, seen + len(labels))
        seen += len(labels)
        rows.append(torch.stack([index, labels, *judged(logits, labels, accepted)], 1).double())
    table = gather(torch.cat(rows))
    if not len(table):
        raise Error("there are no images to evaluate on", code="data.empty")
    table = table[table[:, 0].argsort()]
    index, truth, said = table[:, :3].long().unbind(1)
    right = truth == said if accepted is None else accepted[truth, said]
    fives, loss = table[:, 3:5].mean(0).tolist()
    return Accuracy(
        len(table), float(right.double().mean()), fives if classes > 5 else None, loss, classes,
        classes if accepted is None else len(accepted), index, truth, said, right, table[:, 5],
    )  # fmt: skip


def judged(logits: Tensor, labels: Tensor, accepted: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each image: what was said, whether a right class is among five, the loss, the confidence.

    Where several classes are right, the loss is that of their probabilities together.
    """
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    confidence = logits.softmax(1).amax(1)
    if accepted is None:
        five = (best == labels[:, None]).any(1)
        loss = F.cross_entropy(logits, labels, reduction="none")
    else:
        five = accepted[labels].gather(1, best).any(1)
        loss = -logits.log_softmax(1).masked_fill(~accepted[labels], -torch.inf).logsumexp(1)
    return logits.argmax(1), five, loss, confidence
