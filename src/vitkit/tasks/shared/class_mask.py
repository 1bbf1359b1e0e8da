"""ClassMask: the prediction of segmentation for an image, the class of each of its pixels."""

# H, W pixels of an image

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitkit.data.run_lengths import class_counts, compress_counts
from vitkit.metrics.intervals import percent
from vitkit.tasks.task import Answer

PIXELS = 1000  # of an image there are more, but their shares are printed with one decimal


@dataclass(frozen=True)
class ClassMask(Answer):
    """The class of each pixel of an image."""

    mask: np.ndarray = field(repr=False)  # (H, W) uint8
    labels: tuple[str, ...]
    top: int = 5  # classes that a terminal and a table show

    @property
    def value(self) -> np.ndarray:
        return self.mask

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The classes in the image with their shares of its pixels, the largest first."""
        pixels = np.bincount(self.mask.ravel(), minlength=len(self.labels))
        order = np.argsort(-pixels, kind="stable")
        return [(self.labels[k], float(pixels[k] / self.mask.size)) for k in order if pixels[k]]

    def to_json(self) -> dict[str, Any]:
        """Size, classes with their shares, and their masks as COCO's compressed run lengths."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        size, counts = list(self.mask.shape), class_counts(self.mask)
        return {
            "size": size,
            "classes": [
                {"label": label, "class": numbers[label], "share": share,
                 "mask": {"size": size, "counts": compress_counts(counts[numbers[label]])}}
                for label, share in self.shares
            ],
        }  # fmt: skip

    def text(self, image: str, *, unsure: bool = False, width: int = 1 << 30, alone: bool = False) -> str:
        named = self.shares[: self.top]
        parts = [f"{label} {percent(share, PIXELS)}" for label, share in named]
        more = len(self.shares) - len(named)
        return f"{image}: {', '.join(parts)}" + (f" and {more} more" if more else "")

    def cells(self) -> list[tuple[Any, ...]]:
        return [(label, share) for label, share in self.shares[: self.top]]
