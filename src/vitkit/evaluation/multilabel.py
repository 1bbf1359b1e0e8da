"""Images with several labels each: average precision of every label, and what is right at 0.5."""

# N images in all, B in a batch, C classes

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
            "top1": self.top1, "top5": self.top5, "images": self.images, "loss": self.loss,
            "mean_average_precision": self.mean_average_precision,
            "classes_without_images": int((self.positives == 0).sum()),
            "exact_match": self.exact_match, "f1": self.f1, "per_class": per_class,
        }  # fmt: skip


@torch.no_grad()
def multilabel_accuracy(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    classes: int,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> MultilabelAccuracy:
    """Every batch through a function from images to logits; labels are (B, C) of 0 and 1.

    The logits of all images are kept until the end, 5 C bytes an image, for a label's precision depends on
    the order of all of them. `gather` brings the rows of several processes together.
    """
    kept, truth = [torch.zeros(0, classes)], [torch.zeros(0, classes, dtype=torch.bool)]
    for batch in batches:
        if batch["label"].ndim != 2:
            raise ValueError("each image has one label here: several are told for each by (B, C) of 0 and 1")
        kept.append(logits_of(batch["image"]).float().cpu())  # (B, C)
        truth.append(batch["label"].cpu() > 0)
    scores, there = gather(torch.cat(kept)), gather(torch.cat(truth))
    n, said = len(scores), scores > 0  # a logit of 0 is a probability of 0.5
    if not n:
        raise ValueError("there is no image to evaluate on")
    best = there.gather(1, scores.topk(min(5, classes), dim=1).indices)
    right, decided = int((said & there).sum()), int(said.sum()) + int(there.sum())  # TP; 2 TP + FP + FN
    precisions = [average_precision(scores[:, c], there[:, c]) for c in range(classes)]
    return MultilabelAccuracy(
        images=n, top1=int(best[:, 0].sum()) / n, top5=int(best.any(1).sum()) / n if classes > 5 else None,
        loss=float(F.binary_cross_entropy_with_logits(scores, there.float(), reduction="sum")) / n,
        precisions=torch.tensor(precisions, dtype=torch.float64), positives=there.sum(0),
        exact_match=int((said == there).all(1).sum()) / n, f1=2 * right / decided if decided else 0.0,
    )  # fmt: skip


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
