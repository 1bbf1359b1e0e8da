"""Detection: boxes with a class and a score, by a dense head (FCOS), tokens (YOLOS) or queries (RF-DETR)."""

# B images, D detections of an image, M rows of objects, K classes; H, W pixels of an image, h, w of its view

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.sources.source import Source
from vitkit.data.target_views import BoxView, TargetView
from vitkit.data.targets import Target
from vitkit.data.views import View, normalise
from vitkit.errors import Error
from vitkit.metrics.detection_analysis import AnalysedDetections
from vitkit.metrics.overlaps import Detections, overlap
from vitkit.models.card import Preprocessing
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.dense.fcos_loss import fcos_loss, positives
from vitkit.models.dense.pyramid_detector import FcosConfig, all_locations, fcos_config
from vitkit.models.dense.rf_detr import RfDetrConfig, rf_detr_on
from vitkit.models.dense.rf_detr_loss import GroupSetLoss
from vitkit.models.dense.set_loss import SetLoss
from vitkit.models.dense.yolos import YolosConfig, yolos_config
from vitkit.models.variants import Backbone, Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.ops.boxes import centres
from vitkit.options import Range
from vitkit.tasks.shared.dense import covered
from vitkit.tasks.shared.object_task import USUAL, Boxes, Detected, ObjectTask, keep_threshold
from vitkit.tasks.task import (
    Answer,
    Batch,
    Evaluation,
    Objective,
    OutputAgreement,
    Sizes,
    SummedObjective,
    register,
)

HEADS = ("auto", "fcos", "yolos", "rf-detr")
Detector = FcosConfig | YolosConfig | RfDetrConfig
PART = 1024  # images whose annotations are in memory at a time
NEW_QUERIES = 300  # of a group, in a new RF-DETR
COLUMNS = 6  # of a detection: the box, the score and the class
SHARE = Range(0, 1)
ODD = 0.01  # share of detections that another runtime may suppress otherwise
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class FcosObjective(SummedObjective):
    """The loss of FCOS, of a batch with "boxes" (B, M, 4) in pixels and "classes" (B, M)."""

    config: FcosConfig
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        size = (batch["image"].shape[-2], batch["image"].shape[-1])
        places = all_locations(self.config, size, batch["image"].device)
        return {"positives": positives(*places, batch["boxes"], batch["classes"])}

    def __call__(
        self, module: nn.Module, batch: Batch, counts: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        outputs = module(normalise(batch["image"], self.mean, self.std), train=True)
        count = None if counts is None else counts["positives"]
        return fcos_loss(outputs, batch["boxes"], batch["classes"], count)


@dataclass(frozen=True, kw_only=True)
class SetObjective(SummedObjective):
    """The loss of YOLOS or RF-DETR, of a batch with "boxes" (B, M, 4) in pixels and "classes" (B, M)."""

    criterion: SetLoss | GroupSetLoss
    predictions: int  # for an image
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return self.criterion.counts(batch["classes"], self.predictions)

    def __call__(
        self, module: nn.Module, batch: Batch, counts: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        images = batch["image"]
        outputs = module(normalise(images, self.mean, self.std), train=True)
        height, width = images.shape[-2:]
        x0, y0, x1, y1 = batch["boxes"].float().unbind(-1)
        shares = torch.stack([x0 / width, y0 / height, x1 / width, y1 / height], dim=-1)
        return self.criterion(outputs, centres(shares), batch["classes"], counts)


@register
@dataclass(frozen=True, kw_only=True)
class Detect(ObjectTask):
    """Boxes of objects: which detector, how training images are scaled, and which boxes are predicted."""

    name: ClassVar[str] = "detect"
    targets: ClassVar[str] = "boxes"
    output_names: ClassVar[tuple[str, str]] = ("detections", "detections")
    about: ClassVar[str] = "to detect objects,"
    ranges: ClassVar[Mapping[str, Range]] = {
        "scale": Range(0, 10, above=True), "threshold": SHARE, "overlap": SHARE, "detections": Range(1, 1000),
        "channels": Range(0, 2048),
    }  # fmt: skip

    head: str = "auto"  # fcos, which learns from few images; yolos; rf-detr; auto: as the weights, else fcos
    scale: tuple[float, float] = (0.5, 2.0)  # of training images, relative to the size that fits the view
    threshold: float = USUAL  # the minimum score of a predicted box
    overlap: float = 0.6  # IoU above which FCOS drops the box of lower score of the same class
    detections: int = 100  # boxes of an image, and tokens of a new YOLOS; a new RF-DETR has 300 queries
    channels: int = 0  # of the pyramid and head of FCOS; 0: 128 for a narrow ViT, 256 for others

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head not in HEADS:
            raise Error(
                f"detect.head must be one of {', '.join(HEADS)}, not {self.head!r}", code="recipe.value"
            )

    # data

    def target_view(self, view: View, source: Source) -> TargetView:
        assert source.targets is not None
        return BoxView(
            size=view.size, scale=self.scale, flip=view.flip, photometric=view.color_jitter,
            interpolation=view.interpolation, most=max(1, source.targets.most),
        )  # fmt: skip

    # model

    def head_config(self, vit: ViTConfig, classes: int) -> DenseConfig:
        if self.head == "yolos":
            return yolos_config(vit, classes, detections=self.detections)
        if self.head == "rf-detr":
            return rf_detr_on(vit, classes, queries=max(NEW_QUERIES, self.detections))
        width = {"head_width": self.channels} if self.channels else {}
        return fcos_config(vit, classes, detections=self.detections, overlap=self.overlap, **width)

    def adapted_config(self, model: Model, vit: Backbone, classes: int) -> Config:
        """As the model's own detector, if it is one of the kind that is asked for.

        Of FCOS, what the task sets is changed: the detections, the overlap and the channels.
        """
        own = model.config
        if not isinstance(own, Detector) or self.head not in ("auto", own.kind.lower()):
            return super().adapted_config(model, vit, classes)
        assert isinstance(vit.config, ViTConfig)
        names = {"detections": "detections", "overlap": "overlap", "channels": "head_width"}
        changed = {
            field: getattr(self, name) for name, field in names.items()
            if isinstance(own, FcosConfig) and getattr(self, name) != getattr(Detect, name)
        }  # fmt: skip
        return replace(own, vit=vit.config, classes=classes, **changed)

    def build(self, model: Model) -> Model:
        keep_threshold(model, self.threshold)
        return model

    # training and evaluation

    def objective(self, model: Model) -> Objective:
        config, p = model.config, model.preprocessing
        if isinstance(config, FcosConfig):
            return FcosObjective(config=config, mean=p.mean, std=p.std)
        assert isinstance(config, YolosConfig | RfDetrConfig)
        criterion = SetLoss() if isinstance(config, YolosConfig) else GroupSetLoss()
        return SetObjective(criterion=criterion, predictions=config.detections, mean=p.mean, std=p.std)

    @torch.no_grad()
    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        """One row (2 + D * 6) per image: its index, the loss of the batch, and the detections."""
        model = self.extract(module)
        detections = context.forward(model, batch["image"]).double().cpu()
        view_size = (batch["image"].shape[2], batch["image"].shape[3])
        objects = self.targets_of(context.source, batch["index"])
        with_boxes = context.place(batch | padded_objects(objects, view_size, model.preprocessing))
        loss = self.objective(model)(module, with_boxes)["loss"].double().cpu().expand(len(detections), 1)
        return torch.cat([batch["index"].double().cpu()[:, None], loss, detections.flatten(1)], dim=1)

    def evaluate(
        self, module: nn.Module, batches: Iterable[Batch], context: Evaluation
    ) -> AnalysedDetections:
        rows = [self.outputs(module, batch, context) for batch in batches]
        model = self.extract(module)
        assert isinstance(model.config, Detector)
        width = 2 + model.config.detections * COLUMNS
        table = context.gather(torch.cat(rows) if rows else torch.zeros(0, width, dtype=torch.float64))
        content = table[table[:, 0].argsort(stable=True)].numpy()
        overlaps = []
        for start in range(0, len(content), PART):
            part = content[start : start + PART]
            objects = self.targets_of(context.source, torch.from_numpy(part[:, 0]).long())
            for row, target in zip(part, objects, strict=True):
                detections = row[2:].reshape(-1, COLUMNS)
                detections = detections[detections[:, 4] > 0]
                boxes = placed(detections[:, :4], target.size, model.config.image_size, model.preprocessing)
                detected = Detections(boxes, detections[:, 4], detections[:, 5].astype(np.int64))
                overlaps.append(overlap(detected, target))
        loss = float(content[:, 1].mean()) if len(content) else 0.0
        index = content[:, 0].astype(np.int64)
        return self.metrics_of(overlaps, model.config.classes, loss, index)

    # prediction

    def output_shape(self, config: Any) -> tuple[int | None, ...]:
        return None, config.detections, COLUMNS

    def agreement(self, reference: Tensor, outputs: Tensor, tolerance: float) -> OutputAgreement:
        """Each detection has a partner of its class whose box and score differ by at most the tolerance.

        A few may lack one, since suppression turns the least difference into another set of boxes.
        """
        pairs = list(zip(reference.double().cpu(), outputs.double().cpu(), strict=True))
        both_ways = (*pairs, *(pair[::-1] for pair in pairs))
        gaps = torch.cat([max_difference(*pair, tolerance / 10) for pair in both_ways])
        close = gaps <= tolerance
        same = float(close.double().mean())
        others = int((~close).sum()) if 1 - same > max(ODD, tolerance) else 0
        return OutputAgreement(
            largest=float(gaps[close].max()) if close.any() else float(gaps.max()),
            tolerance=tolerance, same=same, others=others,
            about="box, class and score for {share} of the detections in {images} images",
        )  # fmt: skip

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        """The boxes of each image above the threshold, all of them whatever `top` is."""
        view_size: Size = tuple(model.config.image_size)
        names = model.labels or tuple(str(k) for k in range(model.config.classes))
        least = model.reject_below or self.threshold
        rows = values.double().cpu().numpy()
        answers: list[Answer] = []
        for row, size in zip(rows, sizes or [view_size] * len(rows), strict=True):
            row = row[row[:, 4] > 0]
            boxes = placed(row[:, :4], size, view_size, model.preprocessing)
            everything = tuple(
                Detected(names[int(number)], float(score), tuple(round(side, 2) for side in box))
                for box, score, number in zip(boxes.tolist(), row[:, 4], row[:, 5], strict=True)
            )
            kept = tuple(one for one in everything if one.score >= least)
            answers.append(Boxes(kept, everything))
        return answers


def max_difference(rows: Tensor, others: Tensor, margin: float) -> Tensor:
    """For each detection of (D, 6) the largest difference to the nearest of its class in (D, 6).

    Left out are those at the end of the list, by a margin of the score, whose place in it is chance; where
    that are all, the scores are compared.
    """
    clear = rows[rows[:, 4] > rows[-1, 4] + margin]
    if not len(clear):
        return (rows[:, 4] - others[:, 4]).abs()
    far = (clear[:, None, :5] - others[None, :, :5]).abs().amax(-1)  # (D, D)
    return far.masked_fill(clear[:, None, 5] != others[None, :, 5], 1.0).amin(1)


def scales(size: Size, view_size: Size, preprocessing: Preprocessing) -> tuple[float, float]:
    """Pixels of the view for each pixel of an image, along its height and its width."""
    h, w = covered(size, view_size, preprocessing)
    return h / size[0], w / size[1]


def placed(boxes: np.ndarray, size: Size, view_size: Size, preprocessing: Preprocessing) -> np.ndarray:
    """Boxes (D, 4), which are shares of a view, in pixels of the original image, clipped to it."""
    down, across = scales(size, view_size, preprocessing)
    factors = np.array([view_size[1] / across, view_size[0] / down] * 2)
    return (boxes * factors).clip(0, [size[1], size[0]] * 2)


def padded_objects(
    targets: Sequence[Target], view_size: Size, preprocessing: Preprocessing
) -> dict[str, Tensor]:
    """The objects of some images as a batch has them: "boxes" (B, M, 4) in pixels of the view, "classes"."""
    most = max([1, *(len(target.labels) for target in targets)])
    boxes, classes = np.zeros((len(targets), most, 4), np.float32), np.full((len(targets), most), -1)
    for row, target in enumerate(targets):
        down, across = scales(target.size, view_size, preprocessing)
        real = ~target.crowd
        boxes[row, : real.sum()] = target.boxes[real] * np.array([across, down] * 2)
        classes[row, : real.sum()] = target.labels[real]
    return {"boxes": torch.from_numpy(boxes), "classes": torch.from_numpy(classes)}
