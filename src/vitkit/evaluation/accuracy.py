"""Accuracy over every image of a split exactly once: top-1, top-5, per class, confusion."""

# B images in a batch, C classes

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Accuracy:
    """What a classifier gets right, and on how many images that was counted."""

    images: int
    top1: float
    top5: float | None  # None where there are not more than five classes
    loss: float
    confusion: Tensor  # (C, C): rows are what is, columns what was said

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        counts = self.confusion.sum(1)
        right = self.confusion.diagonal()
        per_class = {
            name: {
                "images": int(counts[i]),
                "accuracy": int(right[i]) / int(counts[i]) if counts[i] else None,
            }
            for i, name in enumerate(classes)
        }
        return {
            "top1": self.top1, "top5": self.top5, "images": self.images, "loss": self.loss,
            "per_class": per_class, "confusion": self.confusion.tolist(),
        }  # fmt: skip


@torch.no_grad()
def accuracy(
    logits_of: Callable[[Tensor], Tensor], batches: Iterable[dict[str, Tensor]], classes: int
) -> Accuracy:
    """Every batch through a function from images to logits; single labels only."""
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    images, fives, loss = 0, 0, 0.0
    for batch in batches:
        logits = logits_of(batch["image"]).float().cpu()  # (B, C)
        labels = batch["label"].cpu()
        confusion.index_put_((labels, logits.argmax(1)), torch.ones_like(labels), accumulate=True)
        best = logits.topk(min(5, classes), dim=1).indices
        fives += int((best == labels[:, None]).any(1).sum())
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        images += len(labels)
    if not images:
        raise ValueError("there is no image to evaluate on")
    right = int(confusion.diagonal().sum())
    return Accuracy(images, right / images, fives / images if classes > 5 else None, loss / images, confusion)
