"""From a batch to a loss: classification by softmax, or by a sigmoid for each label."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.views import normalise
from vitkit.evaluation.multilabel import multi_hot

Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]

LOSSES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Classify:
    """Classification of images; batches are uint8 as decoded, and are normalised here, on their device."""

    classes: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    loss: str = "softmax"
    label_smoothing: float = 0.0

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, not {self.loss!r}")

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """{"loss", "accuracy"} of one batch; images that are floats are normalised (and mixed) already."""
        images = batch["image"]
        if not images.is_floating_point():
            images = normalise(images, self.mean, self.std)
        targets = one_hot(batch["label"], self.classes)
        logits = model(images).float()
        right = targets.gather(1, logits.argmax(1, keepdim=True)) == targets.amax(1, keepdim=True)
        return {"loss": self.value(logits, targets), "accuracy": right.float().mean()}

    def value(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, or the sum over classes of binary cross-entropies; the mean over the batch."""
        if self.loss == "softmax":
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        smooth = targets * (1 - self.label_smoothing) + self.label_smoothing / targets.shape[1]
        return F.binary_cross_entropy_with_logits(logits, smooth, reduction="none").sum(1).mean()


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Targets (B, C): of one class number an image, of several, or as they are where they were mixed."""
    return multi_hot(labels, classes) if labels.ndim == 2 else F.one_hot(labels, classes).float()
