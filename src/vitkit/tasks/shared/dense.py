"""What segmentation and detection share: a ViT with a head for parts of an image, and views with targets."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, decode
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.target_checks import NEEDED
from vitkit.data.targets import Target
from vitkit.data.views import fitted
from vitkit.errors import Error
from vitkit.models.adapt import adapt
from vitkit.models.card import Preprocessing
from vitkit.models.dense.dense_model import DenseConfig, DenseModel
from vitkit.models.variants import Backbone, Config, Model, backbone, fresh
from vitkit.models.vit import ViTConfig
from vitkit.report.target_pictures import Pair, jpeg, legend, training_picture
from vitkit.tasks.shared.image_windows import covering
from vitkit.tasks.task import Batch, Outputs, Task

WORST, TYPICAL = 12, 6  # images of a report
TARGETS = ("mask", "boxes", "classes", "segments")  # arrays of a batch that pictures show
SIDE = 192  # pixels of the longer side of a training image there

Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Dense(Task):
    """A task whose model answers for parts of an image; it learns from the masks or boxes of a source."""

    unused_fields: ClassVar[tuple[str, ...]] = (
        "mixup", "cutmix", "label_noise", "label_smoothing", "class_weights", "sampling", "head_init",
        "pooling", "keep_representation", "patch_sizes", "crop", "crop_area", "resize", "randaugment",
        "three_augment", "erasing", "evaluation_crop", "calibrate", "head_bias", "loss",
    )  # fmt: skip

    @abstractmethod
    def head_config(self, vit: ViTConfig, classes: int) -> DenseConfig:
        """Return the configuration of a model with this ViT, which has no head of its own."""

    def check_source(self, source: Source) -> None:
        if source.targets is None or self.targets not in source.targets.kinds:
            raise Error(
                f"{source.name} does not have what a model for {self.name} learns from: "
                f"{NEEDED[self.targets]}",
                code="data.labels",
            )

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return classes

    def configure(self, config: Config) -> Config:
        if isinstance(config, DenseConfig):
            return config
        if not isinstance(config, ViTConfig) or config.attention == "axial":
            raise Error(
                f"{self.name} needs a ViT with full attention; give another --model or --weights",
                code="model.unsupported",
            )
        vit = replace(config, classes=0, representation=0, representation_kind="tanh", text=None)
        return self.head_config(vit, config.classes)

    def adapt(
        self, model: Model, labels: tuple[str, ...], image_size: tuple[int, int], seed: int, **options: Any
    ) -> Model:
        """Return a model with this ViT at the image size; the head is kept where it is that of the task.

        What depends on the classes is kept only if the labels are the same.
        """
        training = {name: options[name] for name in ("dropout", "stochastic_depth") if name in options}
        vit = adapt(backbone(model), classes=0, image_size=image_size, **training)
        config = self.adapted_config(model, vit, len(labels))
        assert isinstance(config, DenseConfig)
        new = fresh(config, seed=seed)
        assert isinstance(new, DenseModel)
        kept = {f"vit.{name}": tensor for name, tensor in vit.state_dict().items()}
        kept |= kept_head(model, new, same_labels=model.labels == labels)
        own = new.state_dict()  # without parts that only a classifier reads, such as attention pooling
        new.load_state_dict(own | {k: v for k, v in kept.items() if k in own}, assign=True)
        new.requires_grad_(True)
        new.preprocessing, new.origin = model.preprocessing, model.origin
        return new.train(model.training)

    def adapted_config(self, model: Model, vit: Backbone, classes: int) -> Config:
        """Return the configuration of a model with this ViT, which is that of `model` at another size."""
        return self.configure(replace_classes(vit, classes))

    def build(self, model: Model) -> Any:
        return model

    def visible(self, model: Model, order: Order, step: int, batch: Batch) -> Tensor:
        """Return small pictures of the images with their masks or boxes."""
        pictures = []
        for row, image in enumerate(batch["image"]):
            targets: dict[str, np.ndarray] = {
                name: batch[name][row].numpy() for name in TARGETS if name in batch
            }
            pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
            pictures.append(torch.from_numpy(training_picture(pixels, targets, SIDE)).permute(2, 0, 1))
        return torch.stack(pictures)

    @abstractmethod
    def ranked(self, metrics: Any) -> list[tuple[int, str]]:
        """Return the number of each image in its source and how good its prediction is, the worst first."""

    @abstractmethod
    def compared(
        self, pixels: np.ndarray, target: Target, answer: Any, names: Sequence[str], metrics: Any
    ) -> Pair:
        """Return pictures of the truth and of the prediction of an image (H, W, 3); names: of the classes."""

    def examples(self, metrics: Any, source: Source, model: Model, outputs: Outputs) -> dict[str, Any]:
        ranked = self.ranked(metrics)
        worst = ranked[:WORST]
        first = max(len(worst), (len(ranked) - TYPICAL) // 2)
        groups = {
            "Worst images": (self.worst_lead(metrics), worst),
            "Typical images": ("Images in the middle of the same order.", ranked[first : first + TYPICAL]),
        }
        shown = []
        for title, (lead, rows) in groups.items():
            images = (self.example(metrics, source, model, outputs, *row) for row in rows)
            shown.append({"title": title, "lead": lead, "images": [image for image in images if image]})
        return {"groups": shown, "legend": legend(source.classes)}

    def example(
        self, metrics: Any, source: Source, model: Model, outputs: Outputs, index: int, caption: str
    ) -> dict[str, Any] | None:
        """Return the truth and the prediction of an image as pictures; None if it cannot be read any more."""
        assert source.targets is not None
        try:
            content = source.fetch(index)
            pixels = decode(content) if isinstance(content, bytes) else np.ascontiguousarray(content)
            target = source.targets.read(index)
        except (BadImage, OSError):
            return None
        answer = self.answers(model, outputs(pixels), 1, [target.size])[0]
        truth, predicted = self.compared(pixels, target, answer, source.classes, metrics)
        key = str(source.keys[index])
        return {"key": key, "caption": caption, "truth": jpeg(truth), "predicted": jpeg(predicted)}

    @abstractmethod
    def worst_lead(self, metrics: Any) -> str:
        """Return a sentence about the order of the images."""

    def targets_of(self, source: Source | None, indices: Tensor) -> list[Target]:
        """Return the annotations of the images of an evaluation batch."""
        assert source is not None and source.targets is not None
        return [source.targets.read(index) for index in indices.tolist()]


def resized(model: DenseModel, image_size: Size) -> DenseModel:
    """The same model for images of another size: of its parameters only positions in the image change."""
    vit = adapt(backbone(model), classes=0, image_size=image_size)
    assert isinstance(vit.config, ViTConfig)
    new = fresh(replace(model.config, vit=vit.config), seed=0)
    assert isinstance(new, DenseModel)
    kept = model.state_dict() | {f"vit.{name}": tensor for name, tensor in vit.state_dict().items()}
    new.load_state_dict({name: kept[name] for name in new.state_dict()}, assign=True)
    for name in ("labels", "task", "reject_below", "preprocessing", "origin"):
        setattr(new, name, getattr(model, name))
    return new.train(model.training)


def covered(size: Size, view_size: Size, preprocessing: Preprocessing, patch: int = 1) -> Size:
    """The height and width of what an image covers of its view, from the top left; or of all its windows."""
    if preprocessing.resize == "crop":
        raise Error(
            "view centre crops the image, but masks and boxes are of the whole image; use view fit or squash",
            code="request.conflict",
        )
    if preprocessing.resize == "windows":
        return covering(size, view_size, patch)
    return fitted(size, view_size) if preprocessing.resize == "fit" else view_size


def replace_classes(vit: Backbone, classes: int) -> ViTConfig:
    """The configuration of a ViT as it would be with a head for these classes."""
    if not isinstance(vit.config, ViTConfig):
        raise Error("dense tasks need a ViT, not a ResNet; give other --weights", code="model.unsupported")
    return replace(vit.config, classes=classes)


def kept_head(model: Model, new: DenseModel, *, same_labels: bool) -> dict[str, Tensor]:
    """The parameters of a head that fit the new model: all of them if it has the same labels."""
    if not isinstance(model, DenseModel) or model.config.kind != new.config.kind:
        return {}
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith("vit.")
        and shapes.get(name) == tensor.shape
        and (same_labels or not name.startswith(tuple(new.heads)))
    }
