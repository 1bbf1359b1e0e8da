"""What tasks without labels share: a model without a head, and the evaluation of its features."""

# B: batch size, D: features

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.metrics.feature_statistics import effective_rank, feature_std
from vitkit.models.adapt import adapt
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.tasks.task import Answer, Batch, Evaluation, Headline, Sizes, Task, describe_images


@dataclass(frozen=True)
class FeatureMetrics:
    """The loss on images that were not trained on, and the statistics of their features."""

    images: int
    loss: float
    std: float  # of L2-normalised features, times sqrt(D): 0 if all are equal, 1 if in all directions alike
    rank: float  # effective number of dimensions
    top1: None = None  # images have no predicted label

    def to_json(self, classes: tuple[str, ...] = ()) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SelfSupervised(Task):
    """A task that learns features without labels; its model is saved without a head and then fine-tuned."""

    headline: ClassVar[Headline] = Headline("loss", "loss", higher=False, percent=False)
    metric_names: ClassVar[tuple[str, ...]] = ("std", "rank")
    labelled: ClassVar[bool] = False
    unused_fields: ClassVar[tuple[str, ...]] = (
        "mixup", "cutmix", "label_noise", "label_smoothing", "class_weights", "sampling", "head_init",
        "patience", "optimizer.layer_decay", "train", "patch_sizes",
    )  # fmt: skip
    predicts: ClassVar[bool] = False
    rate_power: ClassVar[float] = 1.0  # MAE, SimMIM, DINO and MoCo v3 state the rate for 256 or 512 images

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return ()  # the model is trained without a head

    def configure(self, config: Config) -> Config:
        return headless(config, self.name)

    def initial(self, config: Config, seed: int) -> Model:
        model = super().initial(config, seed)
        model.task = self.name  # its file says so, since fine-tuning depends on it
        return model

    def extend(self, model: Model) -> Model:
        if model.config.classes or getattr(model.config, "representation", 0):
            model = adapt(model, classes=0, keep_representation=False)
        model.task = self.name
        return model

    def each(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss (B,) and the features (B, D) of each image of an evaluation batch."""
        raise NotImplementedError

    @torch.no_grad()
    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        loss, features = self.each(module, context.place(batch))
        return torch.cat([loss[:, None], features], dim=1).float().cpu()  # (B, 1 + D)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> FeatureMetrics:
        rows = [self.outputs(module, batch, context) for batch in batches]
        width = 1 + feature_width(self.extract(module).config)
        table = context.gather(torch.cat(rows) if rows else torch.zeros(0, width))
        if not len(table):
            raise Error("there are no images to evaluate", code="data.empty")
        features = table[:, 1:]
        return FeatureMetrics(
            len(table), float(table[:, 0].double().mean()), float(feature_std(features)),
            effective_rank(features),
        )  # fmt: skip

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        return f"loss {test['loss']:.4g} on {test['images']} {images}; {statistics_text(test)}"

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        return f"Loss {test['loss']:.4g}", f"on {describe_images(test)}; {statistics_text(test)}"

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        raise NotImplementedError  # `predicts` is False: the saved model has to be fine-tuned first


def statistics_text(test: Mapping[str, Any]) -> str:
    """The statistics of the features in words; those of a single image are 0, which is no collapse."""
    if test["images"] < 2:
        return "feature std and rank need two images or more"
    return f"feature std {test['std']:.2f}, effective rank {test['rank']:.1f}"


def feature_width(config: Any) -> int:
    """The number of features that a head would read."""
    return config.width * (2 if config.head == "token+gap" else config.lead if config.head == "token" else 1)


def captioned(made: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Pictures for a report, image by image, from images (B, 3, H, W) by what they show."""
    rows = zip(*made.values(), strict=True)
    return [(name, picture) for row in rows for name, picture in zip(made, row, strict=True)]


def headless(config: Any, task: str) -> ViTConfig:
    """The configuration of a ViT without a head and its hidden layer, which a task without labels needs."""
    if not isinstance(config, ViTConfig) or config.stem is not None:
        raise Error(f"{task} needs a ViT without a ResNet; give another --model", code="model.unsupported")
    return replace(config, classes=0, representation=0, representation_kind="tanh")
