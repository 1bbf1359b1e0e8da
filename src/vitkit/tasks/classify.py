"""Classification: one label for each image, by softmax or by a sigmoid for each class."""

# B: batch size, K: classes

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.targets import kind_names
from vitkit.data.views import normalise
from vitkit.errors import Error
from vitkit.metrics.classification import Accuracy, accuracy
from vitkit.metrics.intervals import percent, span, wilson, with_interval
from vitkit.metrics.multilabel import multi_hot
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.report.terminal import UNKNOWN, UNSURE, prediction_line, prediction_rows
from vitkit.tasks.task import (
    Answer,
    Batch,
    Evaluation,
    Headline,
    Prepare,
    Sizes,
    Task,
    describe_images,
    register,
    task_class,
)

LOSSES = ("softmax", "sigmoid")
CLASS_WEIGHTS = ("none", "balanced")
PATCH = -2  # the place of a step's patch size in the order of random numbers


@dataclass(frozen=True, kw_only=True)
class ClassificationLoss:
    """The training loss of classification; normalises uint8 images on their device."""

    classes: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    loss: str = "softmax"
    label_smoothing: float = 0.0
    per_class: tuple[float, ...] = ()  # weights of the classes; empty: all 1

    def __post_init__(self) -> None:
        check_loss(self.loss)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return "loss" and "accuracy" of one batch; float images are already normalised (and mixed)."""
        images = batch["image"]
        if not images.is_floating_point():
            images = normalise(images, self.mean, self.std)
        targets = one_hot(batch["label"], self.classes)
        patch = {"patch": batch["patch"].shape[1]} if "patch" in batch else {}
        logits = model(images, **patch).float()
        correct = targets.gather(1, logits.argmax(1, keepdim=True)) == targets.amax(1, keepdim=True)
        return {"loss": self.value(logits, targets), "accuracy": correct.float().mean()}

    def value(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, or binary cross-entropy summed over classes; averaged over the batch."""
        weight = on_device(self.per_class, logits.device) if self.per_class else None
        if self.loss == "softmax":
            return F.cross_entropy(logits, targets, weight, label_smoothing=self.label_smoothing)
        smooth = targets * (1 - self.label_smoothing) + self.label_smoothing / targets.shape[1]
        return F.binary_cross_entropy_with_logits(logits, smooth, weight, reduction="none").sum(1).mean()


@cache  # a copy to the GPU synchronises, and cannot be captured in a CUDA graph
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def balanced_weights(source: Source) -> tuple[float, ...]:
    """A weight for each class, inversely proportional to its images; 1 in the mean over all images."""
    counts = np.bincount(source.labels, minlength=len(source.classes))
    present = np.count_nonzero(counts)
    return tuple((len(source) / (present * np.maximum(counts, 1))).tolist())


def check_loss(loss: str) -> None:
    if loss not in LOSSES:
        raise Error(f"loss must be one of {', '.join(LOSSES)}, not {loss!r}", code="recipe.value")


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Targets (B, K) from class indices (B,) or from labels with two dimensions (several labels, Mixup)."""
    return multi_hot(labels, classes) if labels.ndim == 2 else F.one_hot(labels, classes).float()


@dataclass(frozen=True)
class Ranking(Answer):
    """The top labels of an image with their probabilities."""

    top: tuple[tuple[str, float], ...]
    several: bool = False  # multi-label: an image may have several of them
    rejected: bool | None = None  # whether the label is "unknown"; None: there was no threshold

    @property
    def best(self) -> tuple[str, float] | None:  # type: ignore[override]
        if not self.top:
            return None
        return (UNKNOWN, self.top[0][1]) if self.rejected else self.top[0]

    @property
    def value(self) -> list[tuple[str, float]]:
        return [(UNKNOWN, self.top[0][1])] if self.rejected else list(self.top)

    def reject(self, below: float | None) -> "Ranking":
        return self if below is None else replace(self, rejected=self.top[0][1] < below)

    def to_json(self) -> dict[str, Any]:
        content = self.brief()
        label = {"label": UNKNOWN} if self.rejected else {}
        return {**content["top"][0], **label, **content}

    def brief(self) -> dict[str, Any]:
        top = [{"label": label, "probability": probability} for label, probability in self.top]
        return {"top": top} if self.rejected is None else {"rejected": self.rejected, "top": top}

    def text(self, image: str, *, unsure: bool = False, width: int = 1 << 30, alone: bool = False) -> str:
        verdict = UNKNOWN if self.rejected else UNSURE if unsure else ""
        if alone:
            return prediction_rows(image, self.top, verdict=verdict)
        return prediction_line(image, self.top, verdict=verdict, width=width)

    def cells(self) -> list[tuple[Any, ...]]:
        return self.value if self.several else self.value[:1]


@dataclass(frozen=True, kw_only=True)
class Supervised(Task):
    """Training with labels, with one patch size or, as FlexiViT, with a random one in each step."""

    from_recipe: ClassVar[tuple[str, ...]] = (
        "patch_sizes", "loss", "label_smoothing", "class_weights", "per_class",
    )  # fmt: skip

    patch_sizes: tuple[int, ...] = ()  # of which each step draws one; empty: always the model's own

    def configure(self, config: Config) -> Config:
        if self.patch_sizes:
            check_flexible(config)
        return config

    def prepare(self, model: Model, order: Order) -> Prepare | None:
        return partial(with_patch_size, self.patch_sizes, order) if self.patch_sizes else None


def check_flexible(config: Config) -> None:
    """Refuse random patch sizes for a model whose patch size is fixed."""
    fixed = {
        "a ResNet": not isinstance(config, ViTConfig),
        "a hybrid": getattr(config, "stem", None) is not None,
        "relative positions": getattr(config, "positions", "") == "relative",
    }
    for name, applies in fixed.items():
        if applies:
            raise Error(
                f"patch_sizes does not support {name}, whose patch size is fixed; leave it out, or use a "
                "model such as FlexiViT-B/16",
                code="model.unsupported",
            )


def with_patch_size(sizes: tuple[int, ...], order: Order, step: int, batch: Batch) -> Batch:
    """The batch with the patch size of its step, which depends on the seed and the step alone.

    It is the width of a tensor "patch" (B, P), so that nobody has to read a value from a GPU.
    """
    patch = sizes[order.rng(step, PATCH).integers(len(sizes))]
    return batch | {"patch": torch.zeros(len(batch["image"]), patch, dtype=torch.uint8)}


def check_labels(source: Source) -> None:
    """Raise an error for data that has masks or boxes instead of labels."""
    if source.targets is not None:
        raise Error(
            f"{source.name} has {kind_names(source.targets.kinds)}, but no label for each image, "
            "which a classifier needs",
            code="data.labels",
        )


@register
@dataclass(frozen=True, kw_only=True)
class Classify(Supervised):
    """Single-label classification: each image has exactly one class."""

    name: ClassVar[str] = "classify"
    headline: ClassVar[Headline] = Headline("top1", "accuracy")
    metric_names: ClassVar[tuple[str, ...]] = ("top1",)
    columns: ClassVar[tuple[str, ...]] = ("label", "probability")
    output_names: ClassVar[tuple[str, str]] = ("logits", "probabilities")

    loss: str = "softmax"
    label_smoothing: float = 0.0
    class_weights: str = "none"
    per_class: tuple[float, ...] = ()  # the weights themselves, once the data is known

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss(self.loss)

    def for_source(self, source: Source) -> Task:
        if not source.multilabel:
            weighted = self.class_weights == "balanced"
            return replace(self, per_class=balanced_weights(source)) if weighted else self
        if self.loss != "sigmoid":
            raise Error(
                f"{source.name} has several labels per image, which loss=softmax cannot learn; use "
                "--set loss=sigmoid",
                code="data.labels",
            )
        own: Any = {"label_smoothing": self.label_smoothing, "patch_sizes": self.patch_sizes}
        return task_class("multilabel")(**own)

    def check_source(self, source: Source) -> None:
        check_labels(source)
        if source.multilabel:
            raise Error(
                f"{source.name} has several labels per image, but the model predicts exactly one",
                code="data.labels",
            )

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return classes

    def objective(self, model: Model) -> ClassificationLoss:
        p = model.preprocessing
        return ClassificationLoss(
            classes=model.config.classes, mean=p.mean, std=p.std, loss=self.loss,
            label_smoothing=self.label_smoothing, per_class=self.per_class,
        )  # fmt: skip

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> Accuracy:
        model = self.extract(module)
        return accuracy(
            lambda images: context.forward(model, images), batches, model.config.classes, context.gather,
            context.accepted, calibrate=context.calibrate and self.loss == "softmax",
        )  # fmt: skip

    def mistakes(self, metrics: Any) -> Accuracy | None:
        return metrics

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        n = test["images"]
        top5 = f", top-5 {with_interval(test['top5'], n)}" if test["top5"] is not None else ""
        return f"{with_interval(test['top1'], n)} of {n} {images} correct{top5}"

    def progress(self, metrics: Any, split: str) -> str:
        return f"{percent(metrics.top1, metrics.images)} of {metrics.images} {split} images correct"

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        n = test["images"]
        details = f"on {describe_images(test)}; 95 % interval {span(wilson(test['top1'], n), n)}"
        if test.get("top5") is not None:
            details += f"; top-5 accuracy {with_interval(test['top5'], n)}"
        return f"{percent(test['top1'], n)} accuracy", details

    def activate(self, values: Tensor) -> Tensor:
        return values.softmax(-1)

    def invert(self, values: Tensor) -> Tensor:
        return values.log()

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        return [Ranking(row) for row in ranked(model.labels, self.activate(values), top)]


def ranked(labels: tuple[str, ...], probabilities: Tensor, top: int) -> list[tuple[tuple[str, float], ...]]:
    """The top labels of each image with their probabilities, from probabilities (B, K)."""
    names = labels or tuple(str(i) for i in range(probabilities.shape[1]))
    best = probabilities.topk(min(top, probabilities.shape[1]), dim=-1)
    return [
        tuple((names[i], p) for p, i in zip(row, indices, strict=True))
        for row, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
