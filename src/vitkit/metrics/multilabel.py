"""Images with several labels each: average precision of every label, and what is right at 0.5."""

# N images in all, B in a batch, C classes, K labels of an image at most

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.metrics.intervals import wilson

EXACT = 2**31  # bytes of scores that are kept
BINS, PER_LOGIT, HIGHEST = 2048, 32, 20.0  # steps of 1/32 from a logit of 20 down to -44
AT_ONCE = 2**24  # scores


@dataclass(frozen=True)
class MultilabelAccuracy:
    """How well the labels of images are told, and on how many images that was counted.

    top1             share of images whose highest-scored label is among their labels; an image that has
                     no label counts as wrong
    top5             the same of the five highest-scored labels; None where there are not more than five
    precisions       of each class its average precision (see average_precision), NaN without a positive
    positives        of each class the images that have it
    exact_match      share of images of which all C labels are right, with those said that have a
                     probability above 0.5
    f1               of the same decisions over all images and labels together (micro): 2 TP / (2 TP + FP
                     + FN); 0 where no image has a label and none is said
    loss             binary cross-entropies, summed over the classes, the mean over the images
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
        """The plain mean over the classes that have a positive; None where none has one."""
        counted = self.precisions[self.positives > 0]
        return float(counted.mean()) if len(counted) else None

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
    """Every batch through a function from images to logits; labels as `multi_hot` takes them.

    images: how many there will be, about. A label's precision depends on the order of the scores of all
    images; while those take 2 GB or less (5 C bytes an image) they are kept and it is exact, else they are
    counted by steps of 1/32 of a logit. `gather` brings the rows of several processes together.
    """
    exact = 5 * classes * images <= EXACT
    precisions: Kept | Counted = Kept(classes) if exact else Counted(classes)
    counts = torch.zeros(1, 6, dtype=torch.int64)  # images, top 1, top 5, exact, TP, 2 TP + FP + FN
    loss, positives = torch.zeros(1, dtype=torch.float64), torch.zeros(1, classes, dtype=torch.int64)
    for batch in batches:
        if batch["label"].ndim != 2:
            raise Error(
                "each image has one label here: several are given as (B, C) or (B, K)",
                code="evaluation.unsupported",
            )
        scores = logits_of(batch["image"]).float()  # (B, C)
        there = multi_hot(batch["label"].to(scores.device), classes) > 0
        said = scores > 0  # a logit of 0 is a probability of 0.5
        best = there.gather(1, scores.topk(min(5, classes), dim=1).indices)
        found = [best[:, 0].sum(), best.any(1).sum(), (said == there).all(1).sum(), (said & there).sum(),
                 said.sum() + there.sum()]  # fmt: skip
        counts += torch.stack([torch.full_like(found[0], len(scores)), *found]).cpu()
        loss += F.binary_cross_entropy_with_logits(scores, there.float(), reduction="sum").cpu()
        positives += there.sum(0).cpu()
        precisions.add(scores, there)
    n, top1, top5, same, right, decided = gather(counts).sum(0).tolist()
    if not n:
        raise Error("there are no images to evaluate on", code="data.empty")
    return MultilabelAccuracy(
        images=n, top1=top1 / n, top5=top5 / n if classes > 5 else None, loss=float(gather(loss).sum()) / n,
        precisions=precisions.result(gather), positives=gather(positives).sum(0),
        exact_match=same / n, f1=2 * right / decided if decided else 0.0,
    )  # fmt: skip


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """(B, C) of 0 and 1 out of class numbers (B, K), with -1 where an image has fewer; floats as they are."""
    if labels.is_floating_point():
        return labels.float()
    table = torch.zeros(len(labels), classes + 1, device=labels.device)
    return table.scatter_(1, labels % (classes + 1), 1.0)[:, :classes]  # -1 is the last column, left out


class Kept:
    """The scores of all images, and the exact average precision of each class."""

    def __init__(self, classes: int):
        self.scores, self.there = [torch.zeros(0, classes)], [torch.zeros(0, classes, dtype=torch.bool)]

    def add(self, scores: Tensor, there: Tensor) -> None:
        self.scores.append(scores.cpu())
        self.there.append(there.cpu())

    def result(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        scores, there = gather(torch.cat(self.scores)), gather(torch.cat(self.there))
        found = [average_precision(scores[:, c], there[:, c]) for c in range(scores.shape[1])]
        return torch.tensor(found, dtype=torch.float64)


class Counted:
    """How many images of each class have a score in each of many steps: the same memory for any number."""

    def __init__(self, classes: int):
        self.classes = classes
        self.images = self.positives = torch.zeros(0, dtype=torch.int32)  # (C, BINS), the highest step first

    def add(self, scores: Tensor, there: Tensor) -> None:
        if not len(self.images):
            self.images, self.positives = (
                torch.zeros(self.classes * BINS, dtype=torch.int32, device=scores.device) for _ in range(2)
            )
        first = torch.arange(self.classes, device=scores.device) * BINS
        step = max(1, AT_ONCE // self.classes)
        for at in range(0, len(scores), step):
            bins = ((HIGHEST - scores[at : at + step]) * PER_LOGIT).clamp(0, BINS - 1).long()
            places, hits = (bins + first).flatten(), there[at : at + step].flatten()
            ones = torch.ones(1, dtype=torch.int32, device=scores.device)
            self.images.scatter_add_(0, places, ones.expand(len(places)))
            hits = places[hits]
            self.positives.scatter_add_(0, hits, ones.expand(len(hits)))

    def result(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for at in range(0, self.classes, 1024):  # the sums of all classes at once would be gigabytes
            rows = slice(at * BINS, (at + 1024) * BINS)
            empty = torch.zeros(min(1024, self.classes - at) * BINS, dtype=torch.int32)
            images, hits = (
                gather((table[rows].cpu() if len(table) else empty)[None]).sum(0).view(-1, BINS).double()
                for table in (self.images, self.positives)
            )
            shares = hits.cumsum(1) / images.cumsum(1).clamp(min=1)  # precision at each step
            parts.append((hits * shares).sum(1) / hits.sum(1))  # NaN without a positive
        return torch.cat(parts)


def average_precision(scores: Tensor, there: Tensor) -> float:
    """The sum over thresholds t of (R(t) - R(t-1)) P(t), t going down the distinct scores; NaN without R.

    P(t) is the share of positives among the images scored t or higher, R(t) the share of the positives
    that those are. Images with equal scores come together, so their order does not matter; nothing is
    interpolated. It is what scikit-learn computes.
    """
    positives = int(there.sum())
    if not positives:
        return float("nan")
    ordered, order = scores.sort(descending=True)
    found = there[order].cumsum(0).double()  # true positives down to each place
    last = torch.ones(len(ordered), dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]  # of those with one score
    found, places = found[last], torch.arange(1, len(ordered) + 1)[last]
    gained = torch.diff(found, prepend=found.new_zeros(1)) / positives
    return float((gained * (found / places)).sum())
