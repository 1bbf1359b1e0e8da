"""Segmentation metrics: mIoU and others from one confusion matrix of the data set, and boundary IoU."""

# N images in total, B per batch, K classes; a confusion matrix has a row for each true class

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, nan
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.metrics.intervals import LEVEL, Interval

IGNORE = 255  # pixels with this label do not count, whatever is predicted there
BOUNDARY = 0.02  # width of the band of boundary IoU, as a share of the image's diagonal
RESAMPLES = 1000
MAX_CONFUSION_CLASSES = 1000  # with more classes the JSON omits the confusion matrix


@dataclass(frozen=True)
class PixelCounts:
    """Sums over pixels, all that the metrics need; those of several batches or processes are added.

    An image's counts of a class are the pixels that are both (true and predicted), true, and predicted.
    """

    confusion: Tensor  # (K, K) int64
    images: Tensor  # (N, 3, K) int64
    boundary: Tensor | None = None  # (3, K) int64: the same three, inside of the bands along boundaries

    def __add__(self, other: "PixelCounts") -> "PixelCounts":
        return total_counts([self, other])


def total_counts(parts: Sequence[PixelCounts]) -> PixelCounts:
    """The sum of many; adding them one by one would copy the counts of all earlier images each time."""
    boundaries = [part.boundary for part in parts if part.boundary is not None]
    return PixelCounts(
        torch.stack([part.confusion for part in parts]).sum(0),
        torch.cat([part.images for part in parts]),
        torch.stack(boundaries).sum(0) if len(boundaries) == len(parts) else None,
    )


@torch.no_grad()
def pixel_counts(
    predicted: Tensor, labels: Tensor, classes: int, ignore: int = IGNORE, boundary: bool = False
) -> PixelCounts:
    """Compare class maps (B, H, W) or (H, W) of any integer type on any device; the counts are on the CPU."""
    predicted, labels = (maps.reshape(-1, *maps.shape[-2:]) for maps in (predicted, labels))
    if predicted.shape != labels.shape:
        raise Error(
            f"predictions of shape {tuple(predicted.shape)} do not fit labels of "
            f"shape {tuple(labels.shape)}; resize the logits to the size of the labels",
            code="evaluation.unsupported",
        )
    labels, predicted = labels.long(), predicted.to(labels.device).long()
    counted = labels != ignore
    check(labels, counted, classes, "label", "data.labels")
    check(predicted, counted, classes, "predicted class", "evaluation.classes")
    pairs = labels * classes + predicted
    confusion = pairs[counted].bincount(minlength=classes**2).view(classes, classes)
    images = class_counts(predicted, labels, counted, classes)
    bands = boundary_counts(predicted, labels, counted, classes).sum(0).cpu() if boundary else None
    return PixelCounts(confusion.cpu(), images.cpu(), bands)


def check(values: Tensor, counted: Tensor, classes: int, name: str, code: str) -> None:
    outside = counted & ((values < 0) | (values >= classes))
    if bool(outside.any()):
        raise Error(
            f"a pixel has the {name} {int(values[outside][0])}, but there are {classes} classes, "
            f"so it must be one of 0 to {classes - 1}, or the ignored label",
            code=code,
        )


def class_counts(predicted: Tensor, labels: Tensor, counted: Tensor, classes: int) -> Tensor:
    """(B, 3, K): the pixels of each class that are both, true, and predicted, of maps (B, H, W)."""
    start = torch.arange(len(labels), device=labels.device)[:, None, None] * classes
    selections = (
        (labels + start)[counted & (labels == predicted)], (labels + start)[counted],
        (predicted + start)[counted],
    )  # fmt: skip
    size = len(labels) * classes
    return torch.stack([s.bincount(minlength=size).view(-1, classes) for s in selections], 1)


def boundary_counts(predicted: Tensor, labels: Tensor, counted: Tensor, classes: int) -> Tensor:
    """(B, 3, K) of the bands of both maps. Ignored regions are holes in both, so their edges cost nothing."""
    width = boundary_width(*labels.shape[-2:])
    true_band = counted & inner_band(torch.where(counted, labels, classes), width)
    predicted_band = counted & inner_band(torch.where(counted, predicted, classes), width)
    both = class_counts(predicted, labels, true_band & predicted_band, classes)[:, 0]
    true = class_counts(predicted, labels, true_band, classes)[:, 1]
    return torch.stack([both, true, class_counts(predicted, labels, predicted_band, classes)[:, 2]], 1)


def boundary_width(height: int, width: int) -> int:
    return max(1, round(BOUNDARY * hypot(height, width)))


def inner_band(maps: Tensor, width: int) -> Tensor:
    """(B, H, W) bool: which pixels lie within `width` pixels of another class or of the image's border.

    For the mask of one class that is the mask without its erosion by `width` turns of a 3x3 square. One pass
    serves all classes: a pixel outlives the erosion of its class if all pixels of its window have this class.
    """
    padded = F.pad(maps[:, None].float(), (width,) * 4, value=-1.0)
    highest, lowest = window_maximum(padded, width), -window_maximum(-padded, width)
    return (highest != lowest)[:, 0]


def window_maximum(maps: Tensor, width: int) -> Tensor:
    rows = F.max_pool2d(maps, (2 * width + 1, 1), stride=1)
    return F.max_pool2d(rows, (1, 2 * width + 1), stride=1)


@dataclass(frozen=True)
class SegmentationMetrics:
    """Metrics of semantic segmentation.

    miou             the mean of the classes' IoU. A class that is only predicted counts with 0; one that is
                     neither labelled nor predicted is left out
    pixel_accuracy   share of correct pixels
    mean_accuracy    the mean, over the labelled classes, of their share of correct pixels
    weighted_iou     the mean IoU weighted by the classes' pixels
    mean_dice        the mean of the classes' Dice, 2 both / (true + predicted)
    interval         of the mIoU: the bootstrap over images
    boundary_iou     the mean IoU of the bands along the boundaries, if they were counted
    ignored          share of the pixels that have no class and do not count, if they were counted
    """

    images: int
    loss: float
    confusion: Tensor  # (K, K) int64
    class_images: Tensor  # (K,) images with pixels of each class
    interval: Interval
    boundary_ious: Tensor | None = None  # (K,), NaN for classes without a band
    image_counts: Tensor | None = None  # (N, 3, K) as in PixelCounts
    index: Tensor | None = None  # (N,) number of each image in its source
    ignored: float | None = None

    @property
    def image_ious(self) -> Tensor:
        """(N,) the mean IoU of the classes that each image has; NaN without labelled pixels."""
        assert self.image_counts is not None
        has = self.image_counts[:, 1] > 0
        return torch.where(has, iou(self.image_counts), torch.nan).nanmean(1)

    @property
    def image_accuracies(self) -> Tensor:
        """(N,) share of each image's labelled pixels that are correct."""
        assert self.image_counts is not None
        both, true, _ = self.image_counts.sum(2).double().unbind(1)
        return both / true

    @property
    def counts(self) -> Tensor:
        """(3, K): pixels that are both, true, and predicted."""
        return torch.stack([self.confusion.diagonal(), self.confusion.sum(1), self.confusion.sum(0)])

    @property
    def pixels(self) -> Tensor:
        """(K,) labelled pixels of each class."""
        return self.confusion.sum(1)

    @property
    def ious(self) -> Tensor:
        """(K,) float64, NaN for classes that are neither labelled nor predicted."""
        return iou(self.counts)

    @property
    def accuracies(self) -> Tensor:
        """(K,) share of each class's pixels that are correct, NaN without pixels."""
        return self.confusion.diagonal().double() / self.pixels

    @property
    def dices(self) -> Tensor:
        both, true, predicted = self.counts.double()
        return 2 * both / (true + predicted)

    @property
    def miou(self) -> float:
        return float(self.ious.nanmean())

    @property
    def mean_accuracy(self) -> float:
        return float(self.accuracies.nanmean())

    @property
    def mean_dice(self) -> float:
        return float(self.dices.nanmean())

    @property
    def pixel_accuracy(self) -> float:
        return float(self.confusion.diagonal().sum() / self.confusion.sum())

    @property
    def weighted_iou(self) -> float:
        return float((self.ious * self.pixels / self.pixels.sum()).nansum())

    @property
    def boundary_iou(self) -> float | None:
        return None if self.boundary_ious is None else float(self.boundary_ious.nanmean())

    def __repr__(self) -> str:
        return f"SegmentationMetrics(images={self.images}, miou={self.miou:.4f}, loss={self.loss:.4f})"

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        columns = {
            "iou": numbers(self.ious), "accuracy": numbers(self.accuracies), "dice": numbers(self.dices),
            "pixels": self.pixels.tolist(), "images": self.class_images.tolist(),
        }  # fmt: skip
        if self.boundary_ious is not None:
            columns["boundary_iou"] = numbers(self.boundary_ious)
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        written = len(classes) <= MAX_CONFUSION_CLASSES
        return {
            "images": self.images, "loss": self.loss, "miou": self.miou, "interval": list(self.interval),
            "pixel_accuracy": self.pixel_accuracy, "mean_accuracy": self.mean_accuracy,
            "weighted_iou": self.weighted_iou, "mean_dice": self.mean_dice,
            "boundary_iou": self.boundary_iou, "ignored": self.ignored,
            "per_class": dict(zip(classes, rows, strict=True)),
            "confusion": self.confusion.tolist() if written else None,
        }  # fmt: skip


def numbers(values: Tensor) -> list[float | None]:
    """JSON has no NaN."""
    return [None if value != value else value for value in values.tolist()]


def iou(counts: Tensor) -> Tensor:
    """(..., K) float64 from (..., 3, K) of both, true, and predicted; NaN where all are 0."""
    both, true, predicted = counts.double().unbind(-2)
    return both / (true + predicted - both)


def segmentation_metrics(counts: PixelCounts, loss: float = nan, seed: int = 0) -> SegmentationMetrics:
    """The metrics of all images; the counts of several processes are added first."""
    if not int(counts.confusion.sum()):
        raise Error("there are no labelled pixels to evaluate on", code="data.empty")
    return SegmentationMetrics(
        images=len(counts.images), loss=loss, confusion=counts.confusion,
        class_images=(counts.images[:, 1] > 0).sum(0), interval=miou_interval(counts.images, seed),
        boundary_ious=None if counts.boundary is None else iou(counts.boundary), image_counts=counts.images,
    )  # fmt: skip


def miou_interval(images: Tensor, seed: int = 0, level: float = LEVEL) -> Interval:
    """The percentile bootstrap of the mIoU over images, whose pixels are not independent, (N, 3, K).

    Images are drawn with replacement, and the mIoU is that of the sum of their pixels.
    """
    n = len(images)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)  # (R, N) times
    sums = torch.from_numpy(draws).double() @ images.reshape(n, -1).double()
    mious = iou(sums.view(RESAMPLES, *images.shape[1:])).nanmean(-1)
    low, high = mious.nanquantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]).double()).tolist()
    return low, high
