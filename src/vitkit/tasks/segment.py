"""Semantic segmentation: a class for each pixel, by a linear head on patches or by the queries of EoMT."""

# B batch, N images, K classes; H, W pixels of an image; h, w cells of the outputs

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.target_views import MaskView
from vitkit.data.targets import Target
from vitkit.data.views import View, normalise, sized
from vitkit.errors import Error
from vitkit.metrics.intervals import percent, span
from vitkit.metrics.segmentation import (
    PixelCounts,
    SegmentationMetrics,
    pixel_counts,
    segmentation_metrics,
    total_counts,
)
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.dense.eomt import Eomt, EomtConfig, default_joint, default_upscale
from vitkit.models.dense.feature_map import (
    Size,
    cells_of,
    check_window,
    dense_encoder,
    in_whole_patches,
    resized_maps,
)
from vitkit.models.dense.linear_segmenter import NORMS, LinearSegmenterConfig
from vitkit.models.dense.mask_criterion import MaskCriterion, objects_of_classes
from vitkit.models.dense.pixel_loss import IGNORE, pixel_loss
from vitkit.models.variants import Backbone, Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.options import Range
from vitkit.report.segmentation_tables import segmentation_tables
from vitkit.report.target_overlay import background
from vitkit.report.target_pictures import Pair, mask_pair
from vitkit.report.task_table import TaskTable
from vitkit.tasks.shared.class_mask import PIXELS, ClassMask
from vitkit.tasks.shared.dense import Dense, covered
from vitkit.tasks.shared.eomt_training import MaskObjective, advance, begin, count_steps, with_draws
from vitkit.tasks.shared.image_windows import covering_image, in_image_windows
from vitkit.tasks.task import (
    Answer,
    Batch,
    Evaluation,
    Headline,
    OutputAgreement,
    Prepare,
    Sizes,
    describe_images,
    register,
)

HEADS = ("auto", "linear", "eomt")
INFERENCE = ("resize", "windows")
WEIGHTING = ("none", "rare")
LARGEST = 2**22  # logits at the pixels of an image that are in memory at a time; more are slower on a CPU
LOOKED_AT = 500  # masks whose pixels are counted to weigh classes
SCALE = (0.5, 2.0)  # of training images, relative to the size that fits


@register
@dataclass(frozen=True, kw_only=True)
class Segment(Dense):
    """Semantic segmentation: the head, its losses, and the windows in which large images are computed."""

    name: ClassVar[str] = "segment"
    counted: ClassVar[str] = "pixels"
    targets: ClassVar[str] = "mask"
    headline: ClassVar[Headline] = Headline("miou", "mean IoU")
    metric_names: ClassVar[tuple[str, ...]] = ("miou", "pixel_accuracy")
    about: ClassVar[str] = "for semantic segmentation"
    columns: ClassVar[tuple[str, ...]] = ("label", "share")
    output_names: ClassVar[tuple[str, str]] = ("logits", "probabilities")
    from_recipe: ClassVar[tuple[str, ...]] = ("per_class",)
    ranges: ClassVar[Mapping[str, Range]] = {
        "upscale": Range(-1, 4), "head_dropout": Range(0, 1, below=True), "dice": Range(0, 100),
        "queries": Range(1, 1000), "joint": Range(0, 100), "window": Range(0, 2**14),
        "mask_weight": Range(0, 100), "dice_weight": Range(0, 100), "class_weight": Range(0, 100),
        "points": Range(4, 2**20), "objects": Range(1, 256), "scale": Range(0, 10, above=True),
    }  # fmt: skip

    head: str = "auto"  # linear; eomt, queries in the last blocks; auto: as the weights, else linear
    upscale: int = -1  # blocks that double the resolution; -1: to cells of about 4 pixels
    inference: str = "resize"  # or windows: images are resized to cover the image size, and cut into windows
    window: int = 0  # side of training crops and of the windows of predictions; 0: the image size
    scale: tuple[float, ...] = SCALE  # smallest and largest factor of training images
    weighting: str = "none"  # or rare: classes with few pixels count more in the loss of a linear head
    norm: str = "layer"  # of a linear head, over channels: layer, batch or none
    head_dropout: float = 0.0  # of a linear head
    dice: float = 0.0  # of a linear head: weight of the dice loss beside cross-entropy
    queries: int = 100  # of EoMT
    joint: int = 0  # of EoMT: blocks that read the queries; 0: 3 of 12, 4 of 24, 5 of 40
    mask_weight: float = 5.0  # of EoMT: of the cross-entropy of masks in the loss
    dice_weight: float = 5.0  # of EoMT: of their dice loss
    class_weight: float = 2.0  # of EoMT: of the cross-entropy of their classes
    points: int = 12_544  # of EoMT: where masks are compared
    objects: int = 64  # of EoMT: classes of an image that are learned; of more, those with the most pixels
    per_class: tuple[float, ...] = ()  # weights of the classes, once the data is known

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("head", HEADS),
            ("weighting", WEIGHTING),
            ("norm", tuple(NORMS)),
            ("inference", INFERENCE),
        ):
            if getattr(self, name) not in known:
                raise Error(
                    f"{self.name}.{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}",
                    code="recipe.value",
                )
        if len(self.scale) != 2 or self.scale[0] > self.scale[1]:
            raise Error(
                f"{self.name}.scale must be the smallest and the largest factor, not {self.scale}",
                code="recipe.value",
            )

    # data

    def for_source(self, source: Source) -> "Segment":
        if self.weighting == "none" or source.targets is None:
            return self
        return replace(self, per_class=rare_class_weights(source))

    def target_view(self, view: View, source: Source) -> MaskView:
        """Return the view of training images: scaled at random, cropped to the window or the image size."""
        size = (self.window, self.window) if self.window else view.size
        larger = max(view.size) / max(size)  # scales are relative to the image size
        return MaskView(
            size=size, scale=(self.scale[0] * larger, self.scale[1] * larger), flip=view.flip,
            photometric=view.color_jitter, interpolation=view.interpolation,
        )  # fmt: skip

    # model

    def head_config(self, vit: ViTConfig, classes: int) -> DenseConfig:
        vit = dense_encoder(vit, self.name)
        check_window(self.window, vit.stride)
        upscale = default_upscale(vit.stride) if self.upscale < 0 else self.upscale
        shared: dict[str, Any] = {
            "vit": vit, "classes": classes, "upscale": upscale, "window": self.window,
        }  # fmt: skip
        if self.head != "eomt":
            return LinearSegmenterConfig(norm=self.norm, dropout=self.head_dropout, **shared)
        joint = self.joint or default_joint(vit.depth)
        return EomtConfig(queries=self.queries, joint=joint, **shared)

    def adapted_config(self, model: Model, vit: Backbone, classes: int) -> Config:
        """With the sizes of the head that the model has, if of this kind, where the task sets none."""
        own = model.config
        if self.head == "auto" and isinstance(own, EomtConfig):
            return replace(self, head="eomt").adapted_config(model, vit, classes)
        config = super().adapted_config(model, vit, classes)
        if not isinstance(config, LinearSegmenterConfig | EomtConfig) or type(own) is not type(config):
            return config
        unset = {"upscale": self.upscale < 0, "joint": not self.joint}
        unset |= {name: getattr(self, name) == getattr(Segment, name) for name in ("norm", "queries")}
        kept = {name: getattr(own, name) for name, free in unset.items() if free and hasattr(own, name)}
        return replace(config, **kept)

    def build(self, model: Model) -> Model:
        return count_steps(model) if isinstance(model, Eomt) else model

    # training

    def prepare(self, model: Model, order: Order) -> Prepare | None:
        if not isinstance(model.config, EomtConfig):
            return None
        return partial(with_draws, order, model.config, self.most(model.config))

    def most(self, config: EomtConfig) -> int:
        """The classes of an image that EoMT can learn."""
        return min(self.objects, config.queries, config.classes)

    def begin(self, module: Any, steps: int) -> None:
        if isinstance(module, Eomt):
            begin(module, steps)

    def after_update(self, module: Any) -> None:
        if isinstance(module, Eomt):
            advance(module)

    def objective(self, model: Model) -> "PixelObjective | MaskObjective":
        p, config = model.preprocessing, model.config
        scale: dict[str, Any] = {"mean": p.mean, "std": p.std}
        if isinstance(config, EomtConfig):
            criterion = MaskCriterion(
                mask=self.mask_weight, dice=self.dice_weight, classes=self.class_weight, points=self.points
            )
            objects = partial(objects_in_mask, config, self.most(config))
            return MaskObjective(criterion=criterion, config=config, objects=objects, **scale)
        assert isinstance(config, LinearSegmenterConfig)
        return PixelObjective(cell=config.cell, dice=self.dice, per_class=self.per_class, **scale)

    # evaluation

    @property
    def resize(self) -> str:
        return "fit" if self.inference == "resize" else "windows"

    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Any:
        """The outputs of each image: one tensor, or of images in windows a list of tensors (K, h, w)."""
        model: Any = self.extract(module)
        if model.preprocessing.resize != "windows" or context.source is None:
            return super().outputs(module, batch, context)
        if type(next(model.parameters())) is not nn.Parameter:
            raise Error(
                "a model that is sharded over processes cannot be evaluated in windows, of which images have "
                "different numbers; use --parallel ddp",
                code="evaluation.unsupported",
            )
        values = []
        for index in batch["index"].tolist():
            content, size = sized(context.source.fetch(index))
            image = covering_image(content, size, model.config, model.preprocessing)
            values.append(in_image_windows(partial(context.forward, model), image, model.config))
        return values

    def evaluate(
        self, module: nn.Module, batches: Iterable[Batch], context: Evaluation
    ) -> SegmentationMetrics:
        """Compare each pixel of the original images; the loss is the cross-entropy there, without weights."""
        model: Any = self.extract(module)
        if isinstance(model, Eomt):
            model.read_masked()
        classes = model.config.classes
        counts = [PixelCounts(torch.zeros(classes, classes, dtype=torch.int64),
                              torch.zeros(0, 3, classes, dtype=torch.int64))]  # fmt: skip
        rows: list[list[float]] = []  # of each image: its number, its loss, and its pixels
        for batch in batches:
            values, (height, width) = self.outputs(module, batch, context), batch["image"].shape[-2:]
            targets = self.targets_of(context.source, batch["index"])
            for row, target, index in zip(values, targets, batch["index"].tolist(), strict=True):
                fit = covered(target.size, (height, width), model.preprocessing, model.config.stride)
                mask = torch.from_numpy(np.ascontiguousarray(target.mask))
                pair = context.place({"values": row, "mask": mask})
                predicted, loss = compared(pair["values"], pair["mask"], fit, model)
                counts.append(pixel_counts(predicted, pair["mask"], classes))
                rows.append([index, loss, mask.numel()])
        own = total_counts(counts)
        everyone = PixelCounts(context.gather(own.confusion[None]).sum(0), context.gather(own.images))
        table = context.gather(torch.tensor(rows, dtype=torch.float64).view(-1, 3))
        if not len(table):
            raise Error("there are no images to evaluate", code="data.empty")
        metrics = segmentation_metrics(everyone, float(table[:, 1].mean()))
        ignored = 1 - float(metrics.pixels.sum() / table[:, 2].sum())
        return replace(metrics, index=table[:, 0].long(), ignored=ignored)

    def ranked(self, metrics: Any) -> list[tuple[int, str]]:
        rows = zip(metrics.index.tolist(), metrics.image_ious.tolist(), metrics.image_accuracies.tolist(),
                   strict=True)  # fmt: skip
        known = sorted((iou, index, right) for index, iou, right in rows if iou == iou)
        return [(index, f"mean IoU {percent(iou, PIXELS)}, {percent(right, PIXELS)} of pixels correct")
                for iou, index, right in known]  # fmt: skip

    def worst_lead(self, metrics: Any) -> str:
        return (
            "The lowest mean IoU of the classes that an image has. At left the annotation, at right the "
            "prediction; striped pixels are not annotated and do not count."
        )

    def compared(
        self, pixels: np.ndarray, target: Target, answer: Any, names: Sequence[str], metrics: Any
    ) -> Pair:
        assert target.mask is not None
        return mask_pair(pixels, target.mask, answer.mask, background(names))

    # text

    def tables(self, test: Mapping[str, Any]) -> tuple[TaskTable, ...]:
        return segmentation_tables(test)

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        interval = f"95 % interval: {span(test['interval'], PIXELS)}"
        return (
            f"mean IoU {percent(test['miou'], PIXELS)} ({interval}) on {test['images']} {images}; "
            f"{percent(test['pixel_accuracy'], PIXELS)} of pixels correct"
        )

    def progress(self, metrics: Any, split: str) -> str:
        return f"mean IoU {percent(metrics.miou, PIXELS)} on {metrics.images} {split} images"

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        correct = f"{percent(test['pixel_accuracy'], PIXELS)} of pixels correct"
        about = f"on {describe_images(test)}; 95 % interval {span(test['interval'], PIXELS)}; {correct}"
        return f"{percent(test['miou'], PIXELS)} mean IoU", about

    # prediction

    def output_shape(self, config: Any) -> tuple[int | None, ...]:
        return None, config.classes, *cells_of(config.image_size, config.cell)

    def agreement(self, reference: Tensor, outputs: Tensor, tolerance: float) -> OutputAgreement:
        alike = super().agreement(reference, outputs, tolerance)
        return replace(alike, about="class for {share} of the cells of {images} images")

    def activate(self, values: Tensor) -> Tensor:
        return values.softmax(1)

    def invert(self, values: Tensor) -> Tensor:
        return values.clamp(min=torch.finfo(values.dtype).tiny).log()  # finite, so that cells can be mixed

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        """Return a class mask for each image, at its original size or else that of the model's input."""
        view = model.config.image_size
        labels = model.labels or tuple(map(str, range(model.config.classes)))
        result: list[Answer] = []
        for row, size in zip(values, sizes or [view] * len(values), strict=True):
            fit = covered(size, view, model.preprocessing, getattr(model.config, "stride", 1))
            mask = class_map(row.float(), fit, size, model.config.cell)
            result.append(ClassMask(mask.numpy(), labels, top))
        return result


@dataclass(frozen=True, kw_only=True)
class PixelObjective:
    """Cross-entropy, with or without dice, at each labelled pixel of the training images."""

    cell: float
    dice: float = 0.0
    per_class: tuple[float, ...] = ()
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = module(normalise(batch["image"], self.mean, self.std))
        weights = on_device(self.per_class, logits.device) if self.per_class else None
        return {"loss": pixel_loss(logits, batch["mask"], self.cell, weights=weights, dice=self.dice).mean()}


def objects_in_mask(config: EomtConfig, most: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """The classes of each image as objects, padded to the whole patches that predicted masks cover."""
    mask = in_whole_patches(batch["mask"], config.stride, IGNORE)
    return objects_of_classes(mask, config.classes, most)


@cache  # a copy to the GPU synchronises, and cannot be captured in a CUDA graph
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def rare_class_weights(source: Source) -> tuple[float, ...]:
    """1 / ln(1.02 + share of pixels) of each class, as ENet weighs them, divided by their mean."""
    assert source.targets is not None
    pixels = np.zeros(256, np.int64)
    for index in range(0, len(source), max(1, len(source) // LOOKED_AT)):
        mask = source.targets.read(index).mask
        pixels += 0 if mask is None else np.bincount(mask.ravel(), minlength=256)
    pixels = pixels[: len(source.classes)]
    weights = 1 / np.log(1.02 + pixels / max(1, pixels.sum()))
    return tuple((weights / weights.mean()).tolist())


def parts_at_pixels(values: Tensor, fit: Size, size: Size, cell: float) -> Iterator[tuple[slice, Tensor]]:
    """Rows of an original image and the logits of its pixels there, (K, rows, W), a few at a time."""
    h, w = cells_of(fit, cell)
    rows = max(1, LARGEST // (len(values) * size[1]))
    for first in range(0, size[0], rows):
        part = slice(first, min(first + rows, size[0]))
        yield part, resized_maps(values[:, :h, :w], fit, size, cell, part)


def best_class(logits: Tensor) -> Tensor:
    """The class with the highest of logits (K, H, W), as uint8."""
    return logits.max(0).indices.to(torch.uint8)  # on a CPU several times as fast as argmax


@torch.no_grad()
def class_map(values: Tensor, fit: Size, size: Size, cell: float) -> Tensor:
    """The class of each pixel, (H, W) uint8, from logits (K, h, w); `fit`: see `resized_maps`."""
    rows = [best_class(logits) for _, logits in parts_at_pixels(values, fit, size, cell)]
    return torch.cat(rows)


@torch.no_grad()
def compared(values: Tensor, mask: Tensor, fit: Size, model: Any) -> tuple[Tensor, float]:
    """The class of each pixel, and the mean cross-entropy of those that are labelled."""
    rows, total = [], torch.zeros((), dtype=torch.float64, device=mask.device)
    size = (mask.shape[0], mask.shape[1])
    for part, logits in parts_at_pixels(values.float(), fit, size, model.config.cell):
        rows.append(best_class(logits))
        target = mask[None, part].long()
        total += F.cross_entropy(logits[None], target, ignore_index=IGNORE, reduction="sum").double()
    return torch.cat(rows), float(total / (mask != IGNORE).sum().clamp(min=1))
