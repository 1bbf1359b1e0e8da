"""DINO: from small crops a student predicts the outputs for large ones of a teacher, its averaged weights.

Caron et al., "Emerging properties in self-supervised vision transformers" (2021), and its official code. Its
schedules change from epoch to epoch or step to step; here all of them change with each step.
"""

# B images, V views of an image, K outputs, D features; h, w pixels of a crop

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.augment import Distortion
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.views import MoreViews, View, normalise
from vitkit.errors import Error
from vitkit.inspection.attention import head_maps
from vitkit.models.self_supervised.dino_head import DinoHead
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT
from vitkit.models.vit_config import grid_of
from vitkit.options import Range
from vitkit.report.overlay import overlay
from vitkit.runtime.collectives import sum_over_processes
from vitkit.runtime.runtime import local_shard
from vitkit.tasks.shared.self_supervised import SelfSupervised
from vitkit.tasks.shared.teacher import StudentTeacher
from vitkit.tasks.task import Batch, Objective, Prepare, register

LOCAL = 3 / 7  # side of a local crop as a share of the image's: 96 of 224 pixels
FEWEST = 256  # prototypes, if they are chosen by the number of images
IMAGES_EACH = 16  # at least: ImageNet then has the published 65,536
SHARE, COUNT = Range(0, 1), Range(0, 10**9)
CLIP_EPS = 1e-6  # of the official clipping
MEMORY = 0.9  # of the averages over batches by which collapse is detected
HEADS_SHOWN = 3  # of the last layer, in pictures
COLLAPSE_FROM = 0.1  # share of the run before which nothing is called a collapse
LEAST_INFORMATION, LEAST_STD = 1e-4, 1e-2  # below: collapsed


@register
@dataclass(frozen=True, kw_only=True)
class Dino(SelfSupervised):
    """Self-distillation from crops (DINO): the crops, the head, the teacher and the student's update."""

    name: ClassVar[str] = "dino"
    most_prototypes: ClassVar[int] = 65_536  # as published
    unused_fields: ClassVar[tuple[str, ...]] = (
        *SelfSupervised.unused_fields, "crop", "crop_area", "optimizer.weight_decay",
    )  # fmt: skip
    ranges: ClassVar[Mapping[str, Range]] = {
        "prototypes": Range(0, 2**20), "hidden": Range(1, 2**16), "bottleneck": Range(1, 2**16),
        "local_crops": Range(0, 100), "local_size": Range(0, 4096),
        "global_scale": Range(0, 1, above=True), "local_scale": Range(0, 1, above=True),
        "student_temperature": Range(0, 10, above=True), "teacher_temperature": Range(0, 10, above=True),
        "first_temperature": Range(0, 10, above=True), "temperature_warmup": SHARE,
        "centre_momentum": SHARE, "momentum": SHARE, "weight_decay": Range(0, 1e6),
        "last_weight_decay": Range(0, 1e6), "clip": COUNT, "freeze_last": SHARE, "collapse_steps": COUNT,
    }  # fmt: skip
    about: ClassVar[str] = "by self-distillation without labels (DINO),"
    batch_note: ClassVar[str] = "the first of the two large crops of each image"

    prototypes: int = 0  # outputs of the head; 0: the power of 2 up to images / 16, from 256 on
    hidden: int = 2048  # width of the head's hidden layers
    bottleneck: int = 256  # width before its last layer
    norm_last_layer: bool = True  # rows of the last layer have length 1; False: their lengths are trained
    local_crops: int = 8  # small crops of each image, besides two large ones
    local_size: int = 0  # their side in pixels; 0: 3/7 of the image size, as 96 of 224
    global_scale: tuple[float, float] = (0.4, 1.0)  # share of the image's area in a large crop
    local_scale: tuple[float, float] = (0.05, 0.4)  # and in a small one
    student_temperature: float = 0.1  # by which the student's logits are divided
    teacher_temperature: float = 0.04  # after its warm-up
    first_temperature: float = 0.04  # of the teacher, at the start of its warm-up
    temperature_warmup: float = 0.3  # share of the run in which it changes linearly
    centre_momentum: float = 0.9  # of the mean that is subtracted from the teacher's outputs
    momentum: float = 0.996  # of the teacher's weights; grows to 1 in a cosine
    weight_decay: float = 0.04  # at the start, in place of the optimizer's own
    last_weight_decay: float = 0.4  # at the end of its cosine
    clip: float = 3.0  # largest norm of each parameter's own gradient; 0: not clipped
    freeze_last: float = 0.01  # share of the run in which the last layer of the head does not change
    collapse_steps: int = 500  # collapsed steps in a row that end the run; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("global_scale", "local_scale"):
            scale = getattr(self, field)
            if len(scale) != 2 or scale[0] > scale[1]:
                raise Error(
                    f"{self.name}.{field} must be the smallest and the largest share of the area, not "
                    f"{', '.join(f'{share:g}' for share in scale)}",
                    code="recipe.value",
                )

    # data

    def for_source(self, source: Source) -> "Dino":
        return self if self.prototypes else replace(self, prototypes=self.prototypes_for(len(source)))

    def prototypes_for(self, images: int) -> int:
        """The outputs of a head for so many images."""
        return min(self.most_prototypes, max(FEWEST, 2 ** int(math.log2(max(1, images / IMAGES_EACH)))))

    def first_view(self, view: View) -> View:
        return self.crop(view, self.global_scale, Distortion(blur=1.0))

    def more_views(self, view: View) -> MoreViews:
        second = self.crop(view, self.global_scale, Distortion(blur=0.1, solarize=0.2))
        small = self.crop(view, self.local_scale, Distortion(blur=0.5))
        small = replace(small, size=(self.local_side(view.size[0]), self.local_side(view.size[1])))
        local: MoreViews = (("local", (small,) * self.local_crops),) if self.local_crops else ()
        return (("second", (second,)), *local)

    def crop(self, view: View, scale: tuple[float, float], distortion: Distortion) -> View:
        return replace(view, crop="resized", area=scale[0], largest=scale[1], distortion=distortion)

    def local_side(self, side: int) -> int:
        """Pixels of a local crop beside an image of `side` pixels; in whole patches of usual sizes."""
        unit = 16 if side >= 32 else 4
        return self.local_size or max(unit, unit * round(LOCAL * side / unit))

    # model

    def configure(self, config: Config) -> Config:
        config = super().configure(config)
        self.check_model(config)
        return config

    def check_model(self, config: Any) -> None:
        """Refuse models without one feature vector, and local crops that they cannot read."""
        if config.distilled or config.positions == "relative":
            what = "a distillation token" if config.distilled else "relative positions"
            raise Error(f"{self.name} does not train models with {what}", code="model.unsupported")
        sides = [self.local_side(side) for side in config.image_size]
        if self.local_crops and min(sides) < config.stride:
            raise Error(
                f"{self.name}.local_size: small crops of {sides[0]}x{sides[1]} pixels hold no patch of "
                f"{config.stride} pixels; set it to {config.stride} or more, or {self.name}.local_crops=0",
                code="recipe.value",
            )

    def build(self, model: Model) -> "DinoModule":
        self.check_model(model.config)
        assert isinstance(model, ViT)
        return DinoModule(model, self)

    @torch.no_grad()
    def pictures(self, module: nn.Module, images: Tensor) -> list[tuple[str, Tensor]]:
        """The attention of the class token in the teacher's last layer: mean of the heads, and some heads."""
        model = self.extract(module)
        sharded = any(hasattr(p, "to_local") for p in model.parameters())
        if not isinstance(model, ViT) or model.class_token is None or sharded:
            return []
        p = model.preprocessing
        maps = head_maps(model, normalise(images, p.mean, p.std), layer=-1)  # (B, K, h, w)
        result = []
        for image, heads in zip(images.cpu().permute(0, 2, 3, 1).numpy(), maps, strict=True):
            shown = [("mean of the heads", heads.mean(0))]
            shown += [(f"head {i + 1}", head) for i, head in enumerate(heads[:HEADS_SHOWN])]
            drawn = ((name, overlay(image, heat)) for name, heat in shown)
            result += [(name, torch.from_numpy(picture).permute(2, 0, 1)) for name, picture in drawn]
        return result

    def extract(self, module: nn.Module) -> Model:
        return module.teacher.backbone  # type: ignore[return-value, union-attr]

    # training

    def prepare(self, model: Model, order: Order) -> Prepare | None:
        return mark_images

    def objective(self, model: Model) -> Objective:
        p = model.preprocessing

        def loss(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
            values = module(*self.inputs(batch, p.mean, p.std))
            return {name: value.mean() for name, value in values.items() if name != "features"}

        return loss

    def inputs(self, batch: Batch, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Any, ...]:
        """The arguments of the module: large crops (2 B, C, H, W), small ones (or None), real images."""
        large = torch.cat([batch["image"], batch["second"][:, 0]])
        small = batch["local"].transpose(0, 1).flatten(0, 1) if self.local_crops else None
        return (
            normalise(large, mean, std),
            None if small is None else normalise(small, mean, std),
            batch["real"],
        )

    def begin(self, module: nn.Module, steps: int) -> None:
        module.steps = steps  # type: ignore[assignment]

    @torch.no_grad()
    def before_update(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(module, DinoModule)
        module.keep_last_layer()
        if self.clip:
            clip_each([p for p in module.student.parameters() if p.grad is not None], self.clip)
        decay_weights(module, optimizer, module.cosine(self.weight_decay, self.last_weight_decay))

    @torch.no_grad()
    def after_update(self, module: nn.Module) -> None:
        assert isinstance(module, DinoModule)
        module.restore_last_layer()
        module.update_averages()
        module.update_teacher(module.cosine(self.momentum, 1.0))

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.collapse_steps and metrics.get("collapsed", 0) >= self.collapse_steps:
            raise collapse(self, step, metrics)

    def passes(self, model: Model) -> float:
        """Two of the teacher, and three for each crop of the student; small crops have fewer patches."""
        size, stride = model.config.image_size, model.config.stride  # type: ignore[union-attr]
        small = grid_of((self.local_side(size[0]), self.local_side(size[1])), stride)
        return 2 + 3 * (2 + self.local_crops * math.prod(small) / math.prod(grid_of(size, stride)))

    # evaluation

    def each(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss between an image and its mirror image, and the teacher's features of the image."""
        p = self.extract(module).preprocessing
        images = normalise(batch["image"], p.mean, p.std)
        values = module(torch.cat([images, images.flip(-1)]))
        return values["loss"], values["features"][: len(images)]


class DinoNetwork(nn.Module):
    """A ViT and the head on its features. State-dict names: backbone.*, head.*"""

    def __init__(self, backbone: ViT, head: DinoHead):
        super().__init__()
        self.backbone = backbone
        self.head = head


class DinoModule(StudentTeacher):
    """Student, teacher, and the centre of the teacher's outputs. State-dict names: student.*, teacher.*, ...

    Sums over the images of a batch are gathered in `sums` while its micro-batches are computed, and become
    averages after the update. Where a step is repeated with smaller micro-batches because memory was short,
    images of the first attempt count twice in these averages.
    """

    student: DinoNetwork
    teacher: DinoNetwork
    centre: Tensor  # (K,) mean of the teacher's logits
    usage: Tensor  # (K,) mean of its probabilities
    moments: Tensor  # (2, D) means of its normalised features and of their squares
    std: Tensor  # of the features of the last batches; 1 before the first
    collapsed: Tensor  # collapsed steps in a row
    sums: Tensor

    def __init__(self, model: ViT, task: Dino):
        self.task, self.outputs = task, task.prototypes or task.most_prototypes
        width = model.config.pooled_width
        super().__init__(DinoNetwork(model, self.make_head(model, width)))
        self.width = width
        self.teacher.eval()
        self.register_buffer("centre", torch.zeros(self.outputs))
        self.register_buffer("usage", torch.full((self.outputs,), 1 / self.outputs))
        self.register_buffer("moments", torch.zeros(2, width))
        self.register_buffer("std", torch.ones(()))
        self.register_buffer("collapsed", torch.zeros(()))
        sizes = self.sizes()
        self.register_buffer("sums", torch.zeros(sum(sizes)), persistent=False)
        self.last_layer: list[Tensor] = []

    def make_head(self, model: ViT, width: int) -> DinoHead:
        """A head whose random numbers follow from those of the model, and so from the seed of a run."""
        first = model.project.weight.detach().flatten()[:1]
        seed = 0 if first.is_meta else int(first.float().cpu().view(torch.int32))
        task, generator = self.task, torch.Generator().manual_seed(seed)
        return DinoHead(
            width, self.outputs, hidden=task.hidden, bottleneck=task.bottleneck,
            trained_scale=not task.norm_last_layer, generator=generator,
        )  # fmt: skip

    def sizes(self) -> list[int]:
        """Of the parts of `sums`: logits, probabilities, features, their squares, images and information."""
        return [self.outputs, self.outputs, self.width, self.width, 2]

    def train(self, mode: bool = True) -> "DinoModule":
        super().train(mode)
        self.teacher.eval()  # it has no drop path and no dropout
        return self

    def forward(
        self, large: Tensor, small: Tensor | None = None, real: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Metrics of each image, (B,), from large crops (2 B, C, H, W) and small ones (V B, C, h, w).

        real: 1 for each image, and 0 where a black one fills an empty batch; None in evaluations, which leave
        all averages as they are.
        """
        with torch.no_grad():
            features = self.teacher.backbone.features(large)
            logits = self.teacher.head(features).float()
        seen = [self.student.backbone.features(crops) for crops in (large, small) if crops is not None]
        student = self.student.head(torch.cat(seen)).float()
        values, targets = self.class_loss(logits, student)
        if real is not None:
            self.add_up(real, logits, targets, features.float(), values["information"])
        return values | {"features": features.float()}

    def class_loss(self, teacher: Tensor, student: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Metrics of each image (B,), and the teacher's probabilities (2, B, K).

        The loss is the mean cross-entropy over all pairs of one of the teacher's two views and another view
        of the student: 18 pairs with 8 small crops. These are compared with both views of the teacher, so
        their logarithms can be added first.
        """
        views = 2 * len(student) // len(teacher)
        logs = F.log_softmax(self.sharpened(teacher), dim=-1).unflatten(0, (2, -1))
        targets = logs.exp()
        answers = F.log_softmax(student / self.task.student_temperature, dim=-1).unflatten(0, (views, -1))
        terms = (targets.flip(0) * answers[:2]).sum((0, 2))
        if views > 2:
            terms = terms + (targets.sum(0) * answers[2:].sum(0)).sum(-1)
        loss = -terms / (2 * views - 2)
        entropy = -(targets * logs).sum(-1).mean(0)
        usage = (targets * self.usage.clamp(min=1e-30).log()).sum(-1).mean(0)
        metrics = {"loss": loss, "entropy": entropy, "divergence": (loss - entropy).detach()}
        metrics |= {"information": -entropy - usage}
        return metrics | {"std": self.std.clone(), "collapsed": self.collapsed.clone()}, targets

    def sharpened(self, logits: Tensor) -> Tensor:
        """The teacher's logits, centred and divided by its temperature."""
        task = self.task
        return (logits - self.centre) / self.temperature(task.first_temperature, task.teacher_temperature)

    def temperature(self, first: float, last: float) -> Tensor:
        """The teacher's temperature at this step, after a linear warm-up from `first` to `last`."""
        share = self.task.temperature_warmup
        return self.linear(first if share else last, last, share * self.steps)

    @torch.no_grad()
    def add_up(
        self, real: Tensor, logits: Tensor, targets: Tensor, features: Tensor, information: Tensor
    ) -> None:
        """Add the images of a micro-batch to the sums."""
        each = torch.cat([real, real])[:, None]  # (2 B, 1)
        unit = F.normalize(features, dim=-1)
        rows = [logits, targets.flatten(0, 1), unit, unit.square()]
        sums = [(row * each).sum(0) for row in rows]
        self.sums += torch.cat([*sums, torch.stack([real.sum(), (real * information).sum()])])

    def update_averages(self) -> None:
        """The averages over batches, from the sums over the batch of all processes; collective."""
        task, keep = self.task, MEMORY
        logits, usage, features, squares, numbers = sum_over_processes(self.sums).split(self.sizes())
        images, information = numbers.clamp(min=1e-30)
        self.centre.lerp_(logits / (2 * images), 1 - task.centre_momentum)
        self.usage.lerp_(usage / (2 * images), 1 - keep)
        self.moments.lerp_(torch.stack([features, squares]) / (2 * images), 1 - keep)
        mean, square = self.moments / (1 - keep ** (self.step + 1))
        self.std.copy_((square - mean**2).clamp(min=0).sqrt().mean() * self.width**0.5)
        flat = (information / images < LEAST_INFORMATION) | (self.std < LEAST_STD)
        flat &= self.step >= COLLAPSE_FROM * self.steps
        self.collapsed.copy_((self.collapsed + 1) * flat)
        self.sums.zero_()

    def keep_last_layer(self) -> None:
        """Remember the head's last layer, if any part of the run leaves it as it is."""
        if self.task.freeze_last:
            layer = self.student.head.last
            self.last_layer = [local_shard(p.detach()).clone() for p in layer.parameters()]

    def restore_last_layer(self) -> None:
        """Undo its update in the first part of the run, as with a learning rate of 0 (DINOv2)."""
        frozen = self.step < self.task.freeze_last * self.steps
        for parameter, before in zip(self.student.head.last.parameters(), self.last_layer, strict=False):
            shard = local_shard(parameter.detach())
            shard.copy_(torch.where(frozen, before, shard))
        self.last_layer = []


def mark_images(step: int, batch: Batch) -> Batch:
    """Mark real images, since micro-batches without any are filled with a black one."""
    return batch | {"real": torch.ones(len(batch["image"]))}


def clip_each(parameters: list[nn.Parameter], limit: float) -> None:
    """Scale each gradient to a norm of at most `limit`, whatever the others are."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    shards = [local_shard(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(shards))
    if any(hasattr(gradient, "to_local") for gradient in gradients):
        norms = sum_over_processes(norms.square()).sqrt()
    torch._foreach_mul_(shards, list((limit / (norms + CLIP_EPS)).clamp(max=1).unbind()))


def decay_weights(module: DinoModule, optimizer: torch.optim.Optimizer, decay: Tensor) -> None:
    """Decoupled weight decay of the student's kernels, as AdamW does it: before the update itself."""
    kernels = {
        id(p) for name, p in module.student.named_parameters() if p.ndim >= 2 and name.endswith(".weight")
    }
    for group in optimizer.param_groups:
        shards = [local_shard(p) for p in group["params"] if id(p) in kernels and p.grad is not None]
        if shards:
            torch._foreach_mul_(shards, 1 - group["lr"] * decay)


def collapse(task: Dino, step: int, metrics: Mapping[str, float]) -> Error:
    """The error for a run that has collapsed, with what to change."""
    name = task.name
    if metrics["std"] < LEAST_STD:
        what = "all images have the same features"
        remedy = "a lower schedule.rate and a longer schedule.warmup, or a larger batch"
    elif metrics["entropy"] < 1:
        what = "the same output wins for all images"
        remedy = f"{name}.centre_momentum=0.9, {name}.teacher_temperature=0.04 or a lower schedule.rate"
    else:
        what = "all outputs are equally likely for every image"
        remedy = f"{name}.teacher_temperature=0.04, a lower schedule.rate or {name}.momentum closer to 1"
    return Error(
        f"step {step}: {metrics['collapsed']:.0f} steps in a row, {what} (entropy of the teacher "
        f"{metrics['entropy']:.3g}, std of features {metrics['std']:.3g}), so nothing is learned. Start "
        f"again with {remedy}; {name}.collapse_steps=0 turns this check off",
        code="training.collapsed",
    )
