"""Distillation of labels (DeiT): classification with a token that learns the predictions of a frozen teacher.

The class token learns the labels, the distillation token the answers: the teacher's best class (hard), or its
probabilities at a temperature (soft). The saved model is a classifier whose logits are the mean of both
tokens' logits. Teacher and student see the same, possibly mixed, images.
"""

# B: batch size, K: classes

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.metrics.classification import Accuracy, accuracy, map_classes
from vitkit.models.self_supervised.student import LabelStudent, with_distillation_token
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.options import MOST_PIXELS, Range
from vitkit.tasks.classify import Classify, one_hot
from vitkit.tasks.distill import as_float, check_named, check_same_teacher, open_teacher, passes_with_teacher
from vitkit.tasks.task import Batch, Evaluation, Objective, Task, register
from vitkit.weights.card import imagenet_synsets

KINDS = ("hard", "soft")


@register
@dataclass(frozen=True, kw_only=True)
class DistillLabels(Classify):
    """DeiT: (1 - alpha) times the loss of the labels, plus alpha times that of the teacher's answers."""

    name: ClassVar[str] = "distill_labels"
    unused_fields: ClassVar[tuple[str, ...]] = ("patch_sizes", "optimizer.layer_decay")
    ranges: ClassVar[Mapping[str, Range]] = {
        "alpha": Range(0, 1), "temperature": Range(0, 1000, above=True), "teacher_size": Range(0, MOST_PIXELS)
    }  # fmt: skip
    about: ClassVar[str] = "by labels and by distillation of a teacher's answers"

    teacher: str = ""  # a file or a published name of a classifier of the same classes
    teacher_size: int = 0  # pixels of a side of the teacher's images; 0: its own size
    kind: str = "hard"  # or soft
    alpha: float = 0.5  # share of the teacher
    temperature: float = 1.0  # of soft

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Error(
                f"distill_labels.kind must be {' or '.join(KINDS)}, not {self.kind!r}; features of a teacher "
                "are learned by objective=distill",
                code="recipe.value",
            )
        super().__post_init__()

    def for_source(self, source: Source) -> Task:
        if source.multilabel:
            raise Error(
                f"{source.name} has several labels per image, but distill_labels needs one; use "
                "objective=distill, which needs none",
                code="data.labels",
            )
        return super().for_source(source)

    def configure(self, config: Config) -> Config:
        check_named(self.teacher, self.name)
        if not isinstance(config, ViTConfig):
            raise Error(f"{self.name} needs a ViT; give another --model", code="model.unsupported")
        return replace(config, distilled=True)

    def extend(self, model: Model) -> Model:
        return with_distillation_token(model)

    def build(self, model: Model) -> LabelStudent:
        assert isinstance(model, ViT)
        teacher = open_teacher(self.teacher, self.name, self.teacher_size, model)
        teacher.outputs = same_classes(teacher.model, model, self.teacher)
        model.task = "classify"  # what the saved model is
        return LabelStudent(model, teacher)

    def extract(self, module: nn.Module) -> Model:
        return module.student if isinstance(module, LabelStudent) else module  # type: ignore[return-value]

    def objective(self, model: Model) -> Objective:  # type: ignore[override]
        of_labels, classes = super().objective(model), model.config.classes

        def loss(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
            images, targets = as_float(batch["image"], model.preprocessing), one_hot(batch["label"], classes)
            logits, distilled, answers = module(images, taught=True)
            parts = of_labels.value(logits, targets), self.taught(distilled, answers)
            best = (logits + distilled).argmax(1, keepdim=True)
            correct = targets.gather(1, best) == targets.amax(1, keepdim=True)
            return {"loss": (1 - self.alpha) * parts[0] + self.alpha * parts[1],
                    "accuracy": correct.float().mean(), "labels": parts[0], "teacher": parts[1]}  # fmt: skip

        return loss

    def taught(self, logits: Tensor, answers: Tensor) -> Tensor:
        """The loss of the distillation token against the teacher's logits, both (B, K).

        The soft loss is DeiT's: a mean over images and classes, so it is smaller the more classes there are.
        """
        if self.kind == "hard":
            return F.cross_entropy(logits, answers.argmax(1))
        t = self.temperature
        own, other = (values.div(t).log_softmax(1) for values in (logits, answers))
        return t * t * F.kl_div(own, other, reduction="sum", log_target=True) / logits.numel()

    def begin(self, module: nn.Module, steps: int) -> None:
        check_same_teacher(module, self.teacher)

    def passes(self, model: Model) -> float | None:
        return passes_with_teacher(model)

    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        return context.forward(module, batch["image"])  # type: ignore[arg-type]  # called like a model

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> Accuracy:
        return accuracy(
            lambda images: self.outputs(module, {"image": images}, context), batches,
            self.extract(module).config.classes, context.gather, context.accepted,
            calibrate=context.calibrate and self.loss == "softmax",
        )  # fmt: skip


def same_classes(teacher: Model, student: Model, place: str) -> tuple[int, ...]:
    """The teacher's class for each class of the student; empty if they are in the same order.

    ImageNet's classes may be named in another way; other classes must have the same names.
    """
    count, names = student.config.classes, student.labels
    if teacher.task != "classify" or not teacher.config.classes:
        raise Error(
            f"the teacher {place} is no classifier of one label per image, which distill_labels needs; use "
            "objective=distill for its features",
            code="model.unsupported",
        )
    if teacher.labels == names or (not teacher.labels and teacher.config.classes == count):
        return ()
    order: Any = None
    if sorted(teacher.labels) == sorted(names):
        order = [teacher.labels.index(name) for name in names]
    elif teacher.config.classes == count:
        order = map_classes(names, teacher.labels, imagenet_synsets())
    if order is None or len(set(order)) != count:
        raise Error(
            f"the teacher {place} has {teacher.config.classes} classes ({', '.join(teacher.labels[:3])} ...) "
            f"and the data {count} ({', '.join(names[:3])} ...), but they must be the same; give a teacher "
            "that was fine-tuned on this data",
            code="evaluation.classes",
        )
    return tuple(order)
