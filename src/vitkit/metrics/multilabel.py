"""Multi-label metrics: average precision of every class, and exact match and F1 at a threshold of 0.5."""

# N images in total, B per batch, C classes, at most K labels per image

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.metrics.intervals import wilson

EXACT = 2**31  # bytes of scores up to which average precision is exact
BINS, PER_LOGIT, HIGHEST = 2048, 32, 20.0  # bins of 1/32 from a logit of 20 down to -44
CHUNK = 2**24  # scores processed at a time
CLASS_CHUNK = 1024  # cumulative sums of all classes at once would take gigabytes


@dataclass(frozen=True)
class MultilabelAccuracy:
    """Metrics of a multi-label classifier.

    top1             share of images whose highest-scoring class is among their labels; an image without
                     labels counts as wrong
    top5             the same for the five highest-scoring classes; None with five classes or fewer
    precisions       average precision of each class (see average_precision), NaN without positives
    positives        number of images with each class
    exact_match      share of images with all C decisions correct, at a probability threshold of 0.5
    f1               micro-averaged F1 of the same decisions: 2 TP / (2 TP + FP + FN); 0 if there are neither
                     labels nor positive predictions
    loss             binary cross-entropy, summed over the classes and averaged over the images
    """

    images: int
    top1: float
    top5: float | None
    loss: float
    precisions: Tensor  # (C,)
    positives: Tensor  # (C,)
    exact_match: float
    f1: float

    @property
    def mean_average_precision(self) -> float | None:
        """The mean over all classes with positives; None if there are none."""
        precisions = self.precisions[self.positives > 0]
        return float(precisions.mean()) if len(precisions) else None

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        per_class = {
            name: {"images": count, "average_precision": precision if count else None}
            for name, count, precision in zip(
                classes, self.positives.tolist(), self.precisions.tolist(), strict=True
            )
        }
        return {
            "top1": self.top1, "interval": list(wilson(self.top1, self.images)), "top5": self.top5,
            "images": self.images, "loss": self.loss,
            "mean_average_precision": self.mean_average_precision,
            "classes_without_images": int((self.positives == 0).sum()),
            "exact_match": self.exact_match,
            "exact_match_interval": list(wilson(self.exact_match, self.images)), "f1": self.f1,
            "per_class": per_class,
        }  # fmt: skip


@torch.no_grad()
def multilabel_accuracy(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    classes: int,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    images: int = 0,
) -> MultilabelAccuracy:
    """Evaluate a function from images to logits; for the format of labels see `multi_hot`.

    images: the approximate number of images. Average precision needs the scores of all images in order. Up to
    2 GB (5 C bytes per image) they are stored and the result is exact; beyond that they are counted in bins
    of 1/32 of a logit. `gather` concatenates the rows of all processes.
    """
    exact = 5 * classes * images <= EXACT
    precisions: ExactPrecision | BinnedPrecision = (
        ExactPrecision(classes) if exact else BinnedPrecision(classes)
    )
    counts = torch.zeros(1, 6, dtype=torch.int64)  # images, top 1, top 5, exact, TP, 2 TP + FP + FN
    loss, positives = torch.zeros(1, dtype=torch.float64), torch.zeros(1, classes, dtype=torch.int64)
    for batch in batches:
        if batch["label"].ndim != 2:
            raise Error(
                "each image has one label; multilabel_accuracy needs labels of shape (B, C) or (B, K)",
                code="evaluation.unsupported",
            )
        scores = logits_of(batch["image"]).float()  # (B, C)
        targets = multi_hot(batch["label"].to(scores.device), classes) > 0
        predicted = scores > 0  # a logit of 0 is a probability of 0.5
        best = targets.gather(1, scores.topk(min(5, classes), dim=1).indices)
        sums = [best[:, 0].sum(), best.any(1).sum(), (predicted == targets).all(1).sum(),
                (predicted & targets).sum(), predicted.sum() + targets.sum()]  # fmt: skip
        counts += torch.stack([torch.full_like(sums[0], len(scores)), *sums]).cpu()
        loss += F.binary_cross_entropy_with_logits(scores, targets.float(), reduction="sum").cpu()
        positives += targets.sum(0).cpu()
        precisions.add(scores, targets)
    n, top1, top5, exact_matches, true_positives, f1_divisor = gather(counts).sum(0).tolist()
    if not n:
        raise Error("there are no images to evaluate on", code="data.empty")
    return MultilabelAccuracy(
        images=n, top1=top1 / n, top5=top5 / n if classes > 5 else None, loss=float(gather(loss).sum()) / n,
        precisions=precisions.result(gather), positives=gather(positives).sum(0),
        exact_match=exact_matches / n, f1=2 * true_positives / f1_divisor if f1_divisor else 0.0,
    )  # fmt: skip


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """(B, C) of 0 and 1 from class indices (B, K) padded with -1; floats are already multi-hot."""
    if labels.is_floating_point():
        return labels.float()
    table = torch.zeros(len(labels), classes + 1, device=labels.device)
    return table.scatter_(1, labels % (classes + 1), 1.0)[:, :classes]  # drops the column of the -1


class ExactPrecision:
    """Stores the scores of all images and computes the exact average precision of each class."""

    def __init__(self, classes: int):
        self.scores, self.targets = [torch.zeros(0, classes)], [torch.zeros(0, classes, dtype=torch.bool)]

    def add(self, scores: Tensor, targets: Tensor) -> None:
        self.scores.append(scores.cpu())
        self.targets.append(targets.cpu())

    def result(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        scores, targets = gather(torch.cat(self.scores)), gather(torch.cat(self.targets))
        precisions = [average_precision(scores[:, c], targets[:, c]) for c in range(scores.shape[1])]
        return torch.tensor(precisions, dtype=torch.float64)


class BinnedPrecision:
    """Counts images and positives per class and score bin, in constant memory."""

    def __init__(self, classes: int):
        self.classes = classes
        self.images = self.positives = torch.zeros(0, dtype=torch.int32)  # (C, BINS), the highest bin first

    def add(self, scores: Tensor, targets: Tensor) -> None:
        if not len(self.images):
            self.images, self.positives = (
                torch.zeros(self.classes * BINS, dtype=torch.int32, device=scores.device) for _ in range(2)
            )
        offsets = torch.arange(self.classes, device=scores.device) * BINS
        one = torch.ones(1, dtype=torch.int32, device=scores.device)
        step = max(1, CHUNK // self.classes)
        for start in range(0, len(scores), step):
            bins = ((HIGHEST - scores[start : start + step]) * PER_LOGIT).clamp(0, BINS - 1).long()
            indices = (bins + offsets).flatten()
            self.images.scatter_add_(0, indices, one.expand(len(indices)))
            hits = indices[targets[start : start + step].flatten()]
            self.positives.scatter_add_(0, hits, one.expand(len(hits)))

    def result(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for start in range(0, self.classes, CLASS_CHUNK):
            rows = slice(start * BINS, (start + CLASS_CHUNK) * BINS)
            empty = torch.zeros(min(CLASS_CHUNK, self.classes - start) * BINS, dtype=torch.int32)
            images, hits = (
                gather((table[rows].cpu() if len(table) else empty)[None]).sum(0).view(-1, BINS).double()
                for table in (self.images, self.positives)
            )
            precision = hits.cumsum(1) / images.cumsum(1).clamp(min=1)  # at each bin
            parts.append((hits * precision).sum(1) / hits.sum(1))  # NaN without positives
        return torch.cat(parts)


def average_precision(scores: Tensor, targets: Tensor) -> float:
    """The sum over descending thresholds of (change in recall) x (precision); NaN without positives.

    Images with equal scores share a threshold, so their order does not matter; nothing is interpolated.
    scikit-learn's average_precision_score uses the same definition.
    """
    positives = int(targets.sum())
    if not positives:
        return float("nan")
    ordered, order = scores.sort(descending=True)
    true_positives = targets[order].cumsum(0).double()  # down to each rank
    last = torch.ones(len(ordered), dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]  # the last rank of each distinct score
    true_positives, ranks = true_positives[last], torch.arange(1, len(ordered) + 1)[last]
    recall_gain = torch.diff(true_positives, prepend=true_positives.new_zeros(1)) / positives
    return float((recall_gain * (true_positives / ranks)).sum())
