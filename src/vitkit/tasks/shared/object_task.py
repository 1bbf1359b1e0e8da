"""What detection and instance segmentation share: predictions that are objects, and the metrics of COCO."""

# N detections of an image, M its objects; H, W pixels of an image

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vitkit.data.run_lengths import compress_counts, counts_of, mask_of
from vitkit.data.sources.source import Source
from vitkit.data.targets import Target
from vitkit.errors import Error
from vitkit.metrics.detection_analysis import AnalysedDetections, analysed_detections, envelope, outcomes
from vitkit.metrics.overlaps import Detections, Overlap
from vitkit.models.variants import Model
from vitkit.report.detection_tables import detection_tables
from vitkit.report.target_pictures import Pair, box_pair
from vitkit.report.task_table import TaskTable
from vitkit.report.terminal import printable
from vitkit.tasks.shared.dense import Dense
from vitkit.tasks.task import Answer, Headline, Outputs, describe_images

USUAL, LEAST = 0.3, 1e-9  # threshold of models without one of their own, where 0 stands for none
CURVES = 8  # classes of which a report draws the curve


@dataclass(frozen=True)
class ObjectMask:
    """The pixels of an object, as COCO's run lengths."""

    size: tuple[int, int]  # height and width of the image
    counts: np.ndarray

    @classmethod
    def of(cls, pixels: np.ndarray) -> "ObjectMask":
        """From a mask (H, W) bool."""
        return cls((pixels.shape[0], pixels.shape[1]), counts_of(pixels))

    @classmethod
    def of_columns(cls, pixels: np.ndarray, left: int, size: tuple[int, int]) -> "ObjectMask":
        """From the columns (H, w) bool, from `left` on, of a mask of this size that is empty beside them."""
        if not pixels.size:
            return cls(size, np.array([size[0] * size[1]]))
        counts = counts_of(pixels)
        before, after = left * size[0], (size[1] - left - pixels.shape[1]) * size[0]
        counts[0] += before  # a run of zeros, as every other one
        if len(counts) % 2:
            counts[-1] += after
        elif after:
            counts = np.append(counts, after)
        return cls(size, counts)

    @property
    def pixels(self) -> np.ndarray:
        """The mask (H, W) bool."""
        return mask_of(self.counts, self.size)

    def to_json(self) -> dict[str, Any]:
        return {"size": list(self.size), "counts": compress_counts(self.counts)}


@dataclass(frozen=True)
class Detected:
    """One detection, in pixels of the original image."""

    label: str
    score: float
    box: tuple[float, float, float, float]  # left, top, right, bottom
    mask: ObjectMask | None = None  # of instance segmentation

    @property
    def value(self) -> dict[str, Any]:
        facts = {"label": self.label, "score": self.score, "box": list(self.box)}
        return facts | ({"mask": self.mask.pixels} if self.mask else {})

    def to_json(self) -> dict[str, Any]:
        facts = {"label": self.label, "score": self.score, "box": list(self.box)}
        return facts | ({"mask": self.mask.to_json()} if self.mask else {})


@dataclass(frozen=True)
class Boxes(Answer):
    """The detections of an image by their score."""

    detections: tuple[Detected, ...]
    all: tuple[Detected, ...] = ()  # also those below the threshold

    @property
    def best(self) -> tuple[str, float] | None:  # type: ignore[override]
        return (self.detections[0].label, self.detections[0].score) if self.detections else None

    @property
    def value(self) -> list[dict[str, Any]]:
        """Masks are arrays (H, W) of bool here, and compressed run lengths in JSON."""
        return [one.value for one in self.detections]

    def reject(self, below: float | None) -> "Boxes":
        """The detections of at least this score, also where it is below the usual threshold."""
        if below is None:
            return self
        return replace(self, detections=tuple(one for one in self.all if one.score >= below))

    def to_json(self) -> dict[str, Any]:
        return {"detections": [one.to_json() for one in self.detections]}

    def text(self, image: str, *, unsure: bool = False, width: int = 1 << 30, alone: bool = False) -> str:
        if alone:
            rows = [
                f"  {one.score:6.2f}  {printable(one.label)}  {' '.join(f'{side:.0f}' for side in one.box)}"
                for one in self.detections
            ]
            return "\n".join([f"{printable(image)}: {self.counts()}", *rows])
        text = f"{printable(image)}: {self.counts()}"
        return text if len(text) <= width else f"{printable(image)}: {len(self.detections)} objects"

    def counts(self) -> str:
        """How many objects of each label, as in '3 cell, 1 platelet'."""
        labels = [one.label for one in self.detections]
        parts = [f"{labels.count(label)} {printable(label)}" for label in dict.fromkeys(labels)]
        return ", ".join(parts) or "no objects"

    def cells(self) -> list[tuple[Any, ...]]:
        return [(one.label, one.score, *one.box) for one in self.detections]

    def coco(self, image_id: int, categories: Mapping[str, int]) -> list[dict[str, Any]]:
        """Entries of COCO's results file; categories: the number of each label.

        One with a mask has no box, from which pycocotools would take its area; it makes the box of the mask.
        """
        results = []
        for one in self.detections:
            x0, y0, x1, y1 = one.box
            place = {"segmentation": one.mask.to_json()} if one.mask else {"bbox": [x0, y0, x1 - x0, y1 - y0]}
            entry = {"image_id": image_id, "category_id": categories[one.label], **place, "score": one.score}
            results.append(entry)
        return results


def keep_threshold(model: Model, threshold: float) -> None:
    """Let a model keep the least score of its answers, if it is not the usual one."""
    model.reject_below = 0.0 if threshold == USUAL else max(threshold, LEAST)


@dataclass(frozen=True, kw_only=True)
class ObjectTask(Dense):
    """A task whose answers are objects with a class and a score."""

    counted: ClassVar[str] = "objects"
    headline: ClassVar[Headline] = Headline("ap", "AP", percent=False)
    metric_names: ClassVar[tuple[str, ...]] = ("ap", "ap50", "ap75")
    columns: ClassVar[tuple[str, ...]] = ("label", "score", "x0", "y0", "x1", "y1")

    # evaluation

    def ranked(self, metrics: Any) -> list[tuple[int, str]]:
        rows = []
        for index, (right, false, missed) in zip(
            metrics.index.tolist(), metrics.by_image.tolist(), strict=True
        ):
            wrong = false + missed
            f1 = 2 * right / (2 * right + wrong) if right + wrong else 1.0
            caption = f"{right} of {right + missed} objects detected, {false} false detections"
            rows.append((f1, -wrong, index, caption))
        return [(index, caption) for *_, index, caption in sorted(rows)]

    def worst_lead(self, metrics: Any) -> str:
        return (
            "The lowest F1 of an image. At left the annotation with missed objects dashed, at right the "
            f"detections with a score of at least {metrics.threshold:.2f}, false ones dashed."
        )

    def examples(self, metrics: Any, source: Source, model: Model, outputs: Outputs) -> dict[str, Any]:
        """Also the curves of the classes with the most objects."""
        order = np.argsort(-metrics.objects, kind="stable")[:CURVES]
        curves = {source.classes[k]: envelope(metrics.curves[k]) for k in order if metrics.objects[k]}
        return super().examples(metrics, source, model, outputs) | {"curves": curves}

    def compared(
        self, pixels: np.ndarray, target: Target, answer: Any, names: Sequence[str], metrics: Any
    ) -> Pair:
        numbers = {label: k for k, label in enumerate(names)}
        chosen = [one for one in answer.all if one.score >= metrics.threshold]
        boxes = np.array([one.box for one in chosen], np.float64).reshape(-1, 4)
        labels = np.array([numbers[one.label] for one in chosen], np.int64)
        masks = self.masks_of(chosen, target.size)
        detections = Detections(boxes, np.array([one.score for one in chosen]), labels, masks)
        right, seen = outcomes(detections, target, len(names))
        truth: dict[str, Any] = {"boxes": target.boxes, "labels": target.labels, "right": seen}
        truth |= {} if masks is None else {"masks": target.instances}
        predicted = {"boxes": boxes, "labels": labels, "right": right, "masks": masks}
        return box_pair(pixels, truth, predicted)

    def masks_of(self, detections: Sequence[Detected], size: tuple[int, int]) -> np.ndarray | None:
        """The masks (N, H, W) of detections, by which they are compared with objects; None: by boxes."""
        return None

    def metrics_of(
        self, overlaps: Sequence[Overlap], classes: int, loss: float, index: np.ndarray
    ) -> AnalysedDetections:
        """The metrics of all images; refuses annotations without any object."""
        metrics = analysed_detections(overlaps, classes, loss, index)
        if metrics.ap is None:
            raise Error(
                f"the annotations of {len(overlaps)} images have no objects to detect, so there is no AP",
                code="data.empty",
            )
        return metrics

    # text

    def tables(self, test: Mapping[str, Any]) -> tuple[TaskTable, ...]:
        return detection_tables(test)

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        return f"AP {test['ap']:.3f}, AP50 {test['ap50']:.3f} on {test['images']} {images}"

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        details = f"AP50 {test['ap50']:.3f}, AP75 {test['ap75']:.3f}, on {describe_images(test)}"
        return f"AP {test['ap']:.3f}", details
