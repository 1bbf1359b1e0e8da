"""Instance segmentation: a mask for each object, by the queries of EoMT."""

# B images, Q queries, N instances of an image, T objects; K classes; H, W pixels of an image; h, w cells

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.target_views import SCALE, BoxView
from vitkit.data.targets import Target, tight_box
from vitkit.data.views import View
from vitkit.errors import Error
from vitkit.metrics.detection_analysis import AnalysedDetections
from vitkit.metrics.overlaps import Detections, Overlap, flattened, overlap, restored
from vitkit.models.dense import segments
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.dense.eomt import Eomt, EomtConfig, default_joint, default_upscale, unpacked
from vitkit.models.dense.feature_map import Size, cells_of, dense_encoder, in_whole_patches
from vitkit.models.dense.mask_criterion import MaskCriterion, Prediction, largest_objects
from vitkit.models.variants import Backbone, Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.options import Range
from vitkit.tasks.shared.dense import covered
from vitkit.tasks.shared.eomt_training import MaskObjective, advance, begin, count_steps, with_draws
from vitkit.tasks.shared.object_task import (
    USUAL,
    Boxes,
    Detected,
    ObjectMask,
    ObjectTask,
    keep_threshold,
)
from vitkit.tasks.task import Answer, Batch, Evaluation, OutputAgreement, Prepare, Sizes, register


@register
@dataclass(frozen=True, kw_only=True)
class Instances(ObjectTask):
    """Masks of objects by EoMT: its size, its losses, and which objects are predicted."""

    name: ClassVar[str] = "instances"
    targets: ClassVar[str] = "instances"
    about: ClassVar[str] = "for instance segmentation"
    output_names: ClassVar[tuple[str, str]] = ("objects", "objects")
    ranges: ClassVar[Mapping[str, Range]] = {
        "scale": Range(0, 10, above=True), "queries": Range(1, 1000), "joint": Range(0, 100),
        "upscale": Range(-1, 4), "objects": Range(1, 1000), "points": Range(4, 2**20),
        "mask_weight": Range(0, 100), "dice_weight": Range(0, 100), "class_weight": Range(0, 100),
        "threshold": Range(0, 1), "detections": Range(1, 1000),
    }  # fmt: skip

    scale: tuple[float, float] = SCALE  # of training images, relative to the size that fits the view
    queries: int = 200  # each a mask and a class
    joint: int = 0  # blocks that read the queries; 0: those of the weights, else 3 of 12, 4 of 24, 5 of 40
    upscale: int = -1  # blocks that double the resolution; -1: to cells of about 4 pixels
    objects: int = 100  # of an image that are learned; of more, those with the most pixels
    points: int = 12_544  # where masks are compared
    mask_weight: float = 5.0  # of the cross-entropy of masks in the loss
    dice_weight: float = 5.0  # of their dice loss
    class_weight: float = 2.0  # of the cross-entropy of their classes
    threshold: float = USUAL  # the minimum score of a predicted object
    detections: int = 100  # of an image, the best ones

    # data

    def target_view(self, view: View, source: Source) -> BoxView:
        assert source.targets is not None
        return BoxView(
            size=view.size, scale=self.scale, flip=view.flip, photometric=view.color_jitter,
            interpolation=view.interpolation, most=max(1, source.targets.most), segments=True,
        )  # fmt: skip

    # model

    def head_config(self, vit: ViTConfig, classes: int) -> DenseConfig:
        vit = dense_encoder(vit, self.name)
        return EomtConfig(
            vit=vit, classes=classes, queries=self.queries, joint=self.joint or default_joint(vit.depth),
            upscale=default_upscale(vit.stride) if self.upscale < 0 else self.upscale, output="masks",
            detections=self.detections,
        )  # fmt: skip

    def adapted_config(self, model: Model, vit: Backbone, classes: int) -> Config:
        """With the blocks of the model, if it is an EoMT, where the task does not set them."""
        config, own = super().adapted_config(model, vit, classes), model.config
        if not isinstance(config, EomtConfig) or not isinstance(own, EomtConfig):
            return config
        return replace(config, joint=self.joint or own.joint,
                       upscale=own.upscale if self.upscale < 0 else self.upscale)  # fmt: skip

    def build(self, model: Model) -> Model:
        assert isinstance(model, Eomt)
        keep_threshold(model, self.threshold)
        return count_steps(model)

    # training

    def prepare(self, model: Model, order: Order) -> Prepare:
        assert isinstance(model.config, EomtConfig)
        return partial(with_draws_for_objects, order, model.config, self.most(model.config))

    def most(self, config: EomtConfig) -> int:
        """The objects of an image that can be learned."""
        return min(self.objects, config.queries)

    def begin(self, module: Any, steps: int) -> None:
        begin(module, steps)

    def after_update(self, module: Any) -> None:
        advance(module)

    @property
    def criterion(self) -> MaskCriterion:
        return MaskCriterion(
            mask=self.mask_weight, dice=self.dice_weight, classes=self.class_weight, points=self.points
        )

    def objective(self, model: Model) -> MaskObjective:
        p, config = model.preprocessing, model.config
        assert isinstance(config, EomtConfig)
        objects = partial(annotated_objects, config, self.most(config))
        return MaskObjective(criterion=self.criterion, config=config, objects=objects, mean=p.mean, std=p.std)

    # evaluation

    def evaluate(
        self, module: nn.Module, batches: Iterable[Batch], context: Evaluation
    ) -> AnalysedDetections:
        """Compare masks at the pixels of the original images; the loss is that of the last prediction."""
        model: Any = self.extract(module)
        model.read_masked()
        rows = [np.zeros(0)]
        for batch in batches:
            values = self.outputs(module, batch, context)
            view_size = (batch["image"].shape[-2], batch["image"].shape[-1])
            targets = self.targets_of(context.source, batch["index"])
            for row, target, index in zip(values, targets, batch["index"].tolist(), strict=True):
                prediction = predicted(context.place({"row": row})["row"], view_size, model.config)
                fit = covered(target.size, view_size, model.preprocessing)
                ranked = segments.instances_at_pixels(
                    *prediction, fit, target.size, model.config.cell, model.config.detections
                )
                detected = Detections(
                    scores=ranked.scores.double().cpu().numpy(), classes=ranked.classes.cpu().numpy(),
                    masks=ranked.masks.cpu().numpy(),
                )  # fmt: skip
                loss = self.loss_of(prediction, target, fit, model.config, context)
                rows.append(np.concatenate([[index, loss], flattened(overlap(detected, target))]))
        numbers = context.gather(torch.from_numpy(np.concatenate(rows))[:, None])[:, 0].numpy()
        images = sorted(separated(numbers), key=lambda image: image[0])
        index, losses = (np.array([image[column] for image in images]) for column in (0, 1))
        loss = float(losses.mean()) if len(losses) else 0.0
        overlaps = [image for _, _, image in images]
        return self.metrics_of(overlaps, model.config.classes, loss, index.astype(np.int64))

    def loss_of(
        self, prediction: Prediction, target: Target, fit: Size, config: EomtConfig, context: Evaluation
    ) -> float:
        """The loss of the masks (Q, h, w) and classes of an image, at points that are always the same."""
        masks, classes = (values[None] for values in prediction)
        size = (round(masks.shape[-2] * config.cell), round(masks.shape[-1] * config.cell))
        batch = context.place(owners(target, fit, size))
        owner, labels = largest_objects(batch["owner"], batch["labels"], self.most(config))
        shifts = torch.zeros(1, 1, labels.shape[1] + 1, 2, device=labels.device)
        return float(self.criterion([(masks, classes)], owner, labels, shifts=shifts)["loss"])

    def masks_of(self, detections: Sequence[Detected], size: Size) -> np.ndarray:
        masks = [one.mask.pixels for one in detections if one.mask]
        return np.array(masks, bool).reshape(-1, *size)

    # prediction

    def check_head(self, model: Any) -> None:
        super().check_head(model)
        if getattr(model.config, "output", "") != "masks":
            raise Error(
                "this model answers with classes of pixels, not with objects; fine-tune it: vitkit finetune "
                "DATA --task instances --weights MODEL",
                code="model.unsupported",
            )

    def output_shape(self, config: Any) -> tuple[int | None, ...]:
        height, width = cells_of(config.image_size, config.cell)
        return None, config.queries, config.classes + 1 + height * width

    def agreement(self, reference: Tensor, outputs: Tensor, tolerance: float) -> OutputAgreement:
        """Each cell of a mask, and each logit of a class, has the same sign."""
        tolerance *= max(1.0, float(reference.abs().max()))
        other = (reference > 0) != (outputs > 0)
        return OutputAgreement(
            largest=float((reference - outputs).abs().max()), tolerance=tolerance,
            same=1 - float(other.double().mean()), others=int((other & (reference.abs() > tolerance)).sum()),
            about="side of 0 for {share} of the logits of {images} images",
        )  # fmt: skip

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        """The objects of each image above the threshold, all of them whatever `top` is."""
        config, view_size = model.config, tuple(model.config.image_size)
        names = model.labels or tuple(map(str, range(config.classes)))
        least = model.reject_below or self.threshold
        answers: list[Answer] = []
        for row, size in zip(values.float(), sizes or [view_size] * len(values), strict=True):
            fit = covered(size, view_size, model.preprocessing)
            prediction = predicted(row, view_size, config)
            everything = detected_at_pixels(prediction, fit, size, config, names)
            answers.append(Boxes(tuple(one for one in everything if one.score >= least), everything))
        return answers


def with_draws_for_objects(order: Order, config: EomtConfig, most: int, step: int, batch: Batch) -> Batch:
    """Add EoMT's random numbers for as many objects as are learned of an image."""
    return with_draws(order, config, min(most, batch["classes"].shape[1]), step, batch)


def annotated_objects(config: EomtConfig, most: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """The objects of each image, padded to the whole patches that predicted masks cover."""
    owner = in_whole_patches(batch["segments"], config.stride, -1)
    return largest_objects(owner, batch["classes"], most)


def predicted(row: Tensor, view_size: Size, config: EomtConfig) -> Prediction:
    """The outputs for an image as logits of masks (Q, h, w) and of classes (Q, K + 1)."""
    return unpacked(row, config.classes, cells_of(view_size, config.cell))


def owners(target: Target, fit: Size, size: Size) -> Batch:
    """The object of each pixel of a view, "owner" (1, h, w), and "labels" (1, T), without crowds.

    fit: the pixels of the view that the image covers; size: height and width of the view. Small objects lie
    on top of large ones.
    """
    assert target.instances is not None
    real = np.flatnonzero(~target.crowd)
    owner = np.full(target.size, -1, np.int64)
    for number in np.argsort(-target.areas[real], kind="stable"):
        owner[target.instances[real[number]]] = number
    down, across = (
        (2 * np.arange(new) + 1) * old // (2 * new) for new, old in zip(fit, target.size, strict=True)
    )
    view = np.full((1, *size), -1, np.int64)
    view[0, : fit[0], : fit[1]] = owner[down][:, across]
    labels = np.append(target.labels[real], -1)[None]  # at least one place
    return {"owner": torch.from_numpy(view), "labels": torch.from_numpy(labels)}


def separated(numbers: np.ndarray) -> list[tuple[float, float, Overlap]]:
    """The number, the loss and the overlaps of each image, from the rows of all processes."""
    images = []
    while len(numbers):
        (index, loss), (image, rest) = numbers[:2], restored(numbers[2:])
        images.append((float(index), float(loss), image))
        numbers = rest
    return images


def detected_at_pixels(
    prediction: Prediction, fit: Size, size: Size, config: EomtConfig, names: Sequence[str]
) -> tuple[Detected, ...]:
    """The objects of an image, best first, with the boxes around their masks; without those of no pixel.

    As `segments.instances_at_pixels`, but masks are kept as run lengths, since images may be large.
    """
    queries, labels, scores = segments.best_pairs(prediction[1], config.detections)
    used, rows = queries.unique(return_inverse=True)
    objects, sure = [], []
    for (down, across), inside, mean in segments.parts_at_pixels(prediction[0][used], fit, size, config.cell):
        pixels = inside.cpu().numpy()
        around = tight_box(pixels)
        box = [] if around is None else (around + [across.start, down.start] * 2).tolist()
        whole = np.zeros((size[0], pixels.shape[1]), bool)
        whole[down] = pixels
        objects.append((box, ObjectMask.of_columns(whole, across.start, size)))
        sure.append(mean.to(scores))
    scores = scores * torch.stack(sure)[rows]
    detected = []
    for place in scores.argsort(descending=True, stable=True).tolist():
        box, mask = objects[int(rows[place])]
        if box:
            detected.append(Detected(names[int(labels[place])], float(scores[place]), tuple(box), mask))
    return tuple(detected)
