"""Distillation of features: a student learns to predict the features of a frozen teacher, without labels.

The loss is `global_weight` times the squared error of the teacher's feature (the input of its head, which is
the class token of most) plus `dense_weight` times that of its patches. Each is a mean over channels (and
patches) against a target that is standardised over its channels to mean 0 and variance 1: near 1 at the
start, 0 for a perfect copy. Linear layers map the student's features to the teacher's, and its patches are
interpolated to the teacher's grid. Teacher and student see the same view, also where the recipe mixes images:
mixup=1 is LightlyTrain's uniform share, with the previous image of the batch in any process as partner.
"""

# B: batch size, D: features

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitkit.data.augment import Distortion
from vitkit.data.views import View, normalise
from vitkit.errors import Error
from vitkit.metrics.cost import forward_flops, training_passes
from vitkit.models.card import Preprocessing
from vitkit.models.initialization import generator_of
from vitkit.models.self_supervised.student import FeatureStudent, FrozenTeacher
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT
from vitkit.options import MOST_PIXELS, Range
from vitkit.tasks.shared.self_supervised import SelfSupervised
from vitkit.tasks.task import Batch, Objective, register
from vitkit.weights.load import load

DISTORTION = Distortion(blur=0.0)  # jitter 0.8 * (0.4, 0.4, 0.2, 0.1) and grayscale, as LightlyTrain
LARGEST = 224  # side of a teacher's images; published ones of up to 518 pixels would take most of the time
PASSES: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()  # of the teacher, in those of its student


@register
@dataclass(frozen=True, kw_only=True)
class Distill(SelfSupervised):
    """A teacher's features: the teacher, the size of its images, and the weights of the parts of the loss."""

    name: ClassVar[str] = "distill"
    unused_fields: ClassVar[tuple[str, ...]] = tuple(
        field for field in SelfSupervised.unused_fields if field not in ("mixup", "cutmix")
    )
    ranges: ClassVar[Mapping[str, Range]] = {
        "teacher_size": Range(0, MOST_PIXELS), "global_weight": Range(0, 1e6, above=True),
        "dense_weight": Range(0, 1e6),
    }  # fmt: skip
    about: ClassVar[str] = "by distillation of a teacher's features, without labels,"
    rate_power: ClassVar[float] = 0.5  # LightlyTrain's rate grows with the root of the batch

    teacher: str = ""  # a file or a published name
    teacher_size: int = 0  # pixels of a side of the teacher's images; 0: its own size, at most 224
    global_weight: float = 1.0  # of the feature in the loss
    dense_weight: float = 1.0  # of the patches in the loss; 0: they are not compared
    distort: bool = True  # random colours and grayscale besides the recipe's augmentations

    def configure(self, config: Config) -> Config:
        check_named(self.teacher, self.name)
        return super().configure(config)

    def first_view(self, view: View) -> View:
        return replace(view, distortion=DISTORTION) if self.distort else view

    def build(self, model: Model) -> FeatureStudent:
        assert isinstance(model, ViT)
        teacher = open_teacher(self.teacher, self.name, self.teacher_size, model, LARGEST)
        return FeatureStudent(
            model, teacher, patches=self.dense_weight > 0, generator=generator_of(model.project.weight)
        )

    def extract(self, module: nn.Module) -> Model:
        return module.student  # type: ignore[return-value]

    def objective(self, model: Model) -> Objective:
        def loss(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
            images = as_float(batch["image"], model.preprocessing)
            of_feature, of_patches, _ = module(images)
            parts = {"global": of_feature.mean(), "dense": of_patches.mean()}
            return {"loss": self.total(parts["global"], parts["dense"]), **parts}

        return loss

    def total(self, of_feature: Tensor, of_patches: Tensor) -> Tensor:
        """The weighted sum of both parts."""
        return self.global_weight * of_feature + self.dense_weight * of_patches

    def each(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images = as_float(batch["image"], self.extract(module).preprocessing)
        of_feature, of_patches, features = module(images)
        return self.total(of_feature, of_patches), features

    def begin(self, module: nn.Module, steps: int) -> None:
        check_same_teacher(module, self.teacher)

    def passes(self, model: Model) -> float | None:
        return passes_with_teacher(model)


def passes_with_teacher(model: Model) -> float | None:
    """What a training step costs with the teacher's forward pass; None while no teacher is loaded."""
    return training_passes(model) + PASSES[model] if model in PASSES else None


def as_float(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Normalised images; those that are float already are (and mixed)."""
    if images.is_floating_point():
        return images
    return normalise(images, preprocessing.mean, preprocessing.std)


def check_named(teacher: str, task: str) -> None:
    if not teacher:
        raise Error(
            f"{task} needs a teacher: --teacher FILE|NAME; vitkit list weights shows the names",
            code="request.missing",
        )


def open_teacher(place: str, task: str, size: int, student: ViT, largest: int = MOST_PIXELS) -> FrozenTeacher:
    """Load the teacher, and note what a training step costs with it.

    size: of a side of its images; 0: its own, or `largest` where that is less
    """
    check_named(place, task)
    model = load(place)
    if model.config.channels != student.config.channels:
        raise Error(
            f"the teacher {place} sees images of {model.config.channels} channels, the student of "
            f"{student.config.channels}; give another teacher",
            code="model.input",
        )
    size = size or (largest if max(model.config.image_size) > largest else 0)
    teacher = FrozenTeacher(model, student.preprocessing, (size, size) if size else None)
    PASSES[student] = forward_flops(teacher.model.config) / forward_flops(student.config)
    return teacher


def check_same_teacher(module: nn.Module, place: str) -> None:
    """Refuse to resume with another teacher than the one that the run started with."""
    assert isinstance(module.frozen, FrozenTeacher)
    started: Any = module.teacher
    if not torch.equal(started.cpu(), module.frozen.digest):
        raise Error(
            f"the teacher {place} is not the one that this run started with; give that file again, or start "
            "a new run with another --out",
            code="run.changed",
        )
