"""Classification: top-1, top-5, per class, confusion, calibration, and reassessed (ReaL) labels."""

# N images in all, B in a batch, C classes of the model, F of the data (the same, unless they are mapped)
# N images; Q bins
# N images

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.metrics.intervals import LEVEL, Interval, wilson

BINS = 15


def calibration_error(confidence: Tensor, right: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: the sum over bins of (share of images) |accuracy - mean confidence|.

    confidence (N,) is the probability of what was said, right (N,) whether it was so. The bins have equal
    width: the q-th of Q holds the confidences in ((q-1)/Q, q/Q], the first one 0 too.
    """
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    place = torch.bucketize(confidence.double().contiguous(), edges)
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, place, right.double() - confidence.double())  # N_q (accuracy - confidence) of each
    return float(gaps.abs().sum()) / len(right)


def interval(right: Tensor, *, level: float = LEVEL) -> Interval:
    """The Wilson interval of the mean of (N,) zeros and ones."""
    return wilson(int(right.sum()) / max(1, len(right)), len(right), level)


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
        rows.append(torch.stack([index, labels, *per_image_results(logits, labels, accepted)], 1).double())
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


def per_image_results(
    logits: Tensor, labels: Tensor, accepted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


Labels = list[list[int]]  # of each image the class numbers that are right, in the order of the file names


@dataclass(frozen=True)
class Real:
    """The share of images of which the class that was said is among the reassessed ones."""

    accuracy: float | None  # None where no image has a label
    interval: tuple[float, float] | None
    images: int  # counted
    left_out: int  # of both sides of the fraction, since they have no label

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_labels(text: str, name: str) -> Labels:
    """real.json as it is published: a list of lists of class numbers."""
    try:
        labels = json.loads(text)
    except ValueError as error:
        raise Error(f"{name}: not JSON: {error}", code="file.unreadable") from None
    sound = isinstance(labels, list) and all(
        isinstance(row, list) and all(type(number) is int for number in row) for row in labels
    )
    if not sound:
        raise Error(
            f"{name}: reassessed labels are a list of lists of class numbers, one for an image",
            code="data.labels",
        )
    return labels


def by_file_name(keys: Sequence[str]) -> list[int]:
    """The place of each image among all, ordered by file name whatever folders they lie in."""
    names = [key.replace("\\", "/").rpartition("/")[2] for key in keys]
    order = sorted(range(len(names)), key=names.__getitem__)
    for before, after in pairwise(order):
        if names[before] == names[after]:
            raise Error(
                f"{keys[before]!r} and {keys[after]!r} have one file name, and reassessed labels go by it",
                code="evaluation.unsupported",
            )
    places = [0] * len(names)
    for place, index in enumerate(order):
        places[index] = place
    return places


def check_labels(labels: Labels, images: int, classes: int, name: str) -> None:
    """Refuse those of other images or of other classes."""
    if len(labels) != images:
        raise Error(
            f"{name} has labels for {len(labels)} images, but the data has {images}: "
            "both must be of the same images, all of them",
            code="data.labels",
        )
    for place, row in enumerate(labels):
        if row and not 0 <= min(row) <= max(row) < classes:
            raise Error(
                f"{name}: image {place} has labels {row}, of {classes} classes from 0", code="data.labels"
            )


def real_accuracy(said: Tensor, index: Tensor, keys: Sequence[str], labels: Labels) -> Real:
    """said (N,): the class number told of each image; index (N,): which of `keys` the image is."""
    places = by_file_name(keys)
    right, left_out = [], 0
    for number, image in zip(said.tolist(), index.tolist(), strict=True):
        if allowed := labels[places[image]]:
            right.append(number in allowed)
        else:
            left_out += 1
    found = torch.tensor(right)
    if not right:
        return Real(None, None, 0, left_out)
    return Real(float(found.double().mean()), interval(found), len(right), left_out)
