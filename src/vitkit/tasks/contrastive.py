"""Contrastive learning (MoCo v3): two views of an image must be more alike than views of other images.

A student with a projector and a predictor learns to find the key of the other view of the same image, among
the keys of all images of the batch. A momentum encoder, whose weights are an average of the student's,
computes the keys.
"""

# B: images of this process, N: places for the images of all processes, D: width of the model, E: of a key

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.augment import Distortion
from vitkit.data.order import Order
from vitkit.data.views import MoreViews, View, normalise
from vitkit.errors import Error
from vitkit.metrics.feature_statistics import effective_rank, feature_std
from vitkit.models.initialization import generator_of
from vitkit.models.self_supervised.projection import Projection
from vitkit.models.self_supervised.student import feature_width
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.ops.precision import product
from vitkit.options import Range
from vitkit.runtime.collectives import gather_rows, sum_over_processes
from vitkit.tasks.shared.self_supervised import FeatureMetrics, SelfSupervised
from vitkit.tasks.shared.teacher import StudentTeacher
from vitkit.tasks.task import Batch, Evaluation, Objective, Prepare, register

FROZEN = ("auto", "yes", "no")
GROUP = 256  # images that evaluation compares with each other
COLLAPSED = 1e-3  # standard deviation of features below which they are all the same; fresh models: 0.1 to 0.4
GRACE = 500  # steps before a run is stopped for it: LayerScale starts close to 0, and so do differences
FIRST = Distortion(blur=1.0, solarize=0.0)  # of the two views; crop and flip are the recipe's
SECOND = Distortion(blur=0.1, solarize=0.2)


class Projected(nn.Module):
    """A ViT and a projector on its features. State-dict names: vit.*, projector.*"""

    def __init__(self, vit: ViT, projector: Projection):
        super().__init__()
        self.vit = vit
        self.projector = projector

    def forward(self, images: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Both views (2 B, 3, H, W) to their features (2 B, D) and to the projections (B, E) of each view.

        Each view has its own batch statistics, as if it were projected alone.
        """
        features = self.vit.features(images).float()
        first, second = (self.projector(view, used) for view in features.chunk(2))
        return features, first, second


class MomentumContrast(StudentTeacher):
    """Student, predictor and momentum encoder. State-dict names: student.*, teacher.*, predictor.*, step."""

    def __init__(self, student: Projected, predictor: Projection, temperature: float):
        super().__init__(student)
        self.predictor = predictor
        self.temperature = temperature

    def forward(
        self, first: Tensor, second: Tensor, used: Tensor | None = None, batch: int = 0
    ) -> tuple[Tensor, ...]:
        """Training: the loss and the accuracy of each image, (B,), and the features' standard deviation.

        first, second  normalised views (B, 3, H, W)
        used           (B,) bool: false for a blank row, which stands for no image
        batch          images of the global batch

        Evaluation: features (B, D), then queries and keys of both views, (B, E) each.
        """
        images = torch.cat([first, second])
        features, *projections = self.student(images, used)
        queries = [self.predictor(projection, used) for projection in projections]
        with torch.no_grad():
            _, *keys = self.teacher(images, used)
        if used is None:
            return (features[: len(first)], *queries, *keys)
        world = dist.get_world_size() if dist.is_initialized() else 1
        loss, correct = contrast(queries, keys, used, -(-batch // world), self.temperature)
        return loss, correct, std_of_views(features.detach(), used)


def contrast(
    queries: list[Tensor], keys: list[Tensor], used: Tensor, places: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The loss of each image in both directions, (B,), and the share in which its own key is the nearest.

    The keys are those of all images of the batch. A process has at most `places` images; where it has fewer,
    the places that are left have no key.
    """
    rows = torch.cat([*keys, used[:, None].float()], dim=1)
    rows, start = gather_rows(F.pad(rows, (0, 0, 0, places - len(rows))))
    present = rows[:, -1] > 0  # (N,)
    of_first, of_second = rows[:, :-1].chunk(2, dim=1)
    own = start + torch.arange(len(used), device=rows.device)
    loss, correct = info_nce(queries[0], of_second, own, temperature, used, present)
    more, again = info_nce(queries[1], of_first, own, temperature, used, present)
    return loss + more, (correct.float() + again.float()) / 2


def info_nce(
    queries: Tensor, keys: Tensor, own: Tensor, temperature: float, used: Tensor, present: Tensor
) -> tuple[Tensor, Tensor]:
    """2 T times the cross-entropy of cos(query, key) / T for each query (B, E), and whether it is correct.

    keys (N, E), own (B,): the index of each query's key; `used` (B,) and `present` (N,) are false for rows
    that are no images.
    """
    logits = product(F.normalize(queries.float(), dim=1), F.normalize(keys.float(), dim=1).mT) / temperature
    logits = logits.masked_fill(~present, -torch.inf)
    logits = torch.where(used[:, None], logits, 0.0)  # a blank row may have no key of its own
    loss = 2 * temperature * F.cross_entropy(logits, own, reduction="none")
    return loss, logits.argmax(1) == own


@torch.no_grad()
def std_of_views(features: Tensor, used: Tensor) -> Tensor:
    """`feature_std` of both views (2 B, D) of the images of all processes."""
    unit = F.normalize(features, dim=1) * used.repeat(2)[:, None]
    total = torch.cat([unit.sum(0), unit.square().sum(0), 2 * used.sum()[None].to(unit.dtype)])
    total = sum_over_processes(total)
    mean, square = (total[:-1] / total[-1].clamp(min=1)).chunk(2)
    return (square - mean.square()).clamp(min=0).sqrt().mean() * features.shape[1] ** 0.5


@register
@dataclass(frozen=True, kw_only=True)
class Contrastive(SelfSupervised):
    """MoCo v3: the temperature, the momentum of the averaged weights, and the sizes of the two MLPs."""

    name: ClassVar[str] = "contrastive"
    unused_fields: ClassVar[tuple[str, ...]] = (*SelfSupervised.unused_fields, "micro_batch")
    ranges: ClassVar[Mapping[str, Range]] = {
        "temperature": Range(0, 100, above=True), "momentum": Range(0, 1), "hidden": Range(1, 65_536),
        "key_width": Range(1, 65_536), "projector_layers": Range(1, 8), "predictor_layers": Range(1, 8),
    }  # fmt: skip
    about: ClassVar[str] = "by contrastive learning (MoCo v3), without labels,"
    batch_note: ClassVar[str] = "the first of two views"

    temperature: float = 0.2  # by which the similarities of query and keys are divided
    momentum: float = 0.99  # of the averaged weights at the start; rises to 1 by a cosine
    hidden: int = 4096  # width of the hidden layers of projector and predictor
    key_width: int = 256  # numbers of a key
    projector_layers: int = 3  # linear layers of the projector
    predictor_layers: int = 2  # linear layers of the predictor
    frozen_patches: str = "auto"  # keep the random patch embedding; auto: only when training from scratch

    def __post_init__(self) -> None:
        if self.frozen_patches not in FROZEN:
            raise Error(
                f"contrastive.frozen_patches must be one of {', '.join(FROZEN)}, not {self.frozen_patches!r}",
                code="recipe.value",
            )
        super().__post_init__()

    def build(self, model: Model) -> MomentumContrast:
        assert isinstance(model, ViT)
        if self.frozen_patches == "yes" or (self.frozen_patches == "auto" and is_fresh(model)):
            model.project.requires_grad_(False)
        generator = generator_of(model.project.weight)
        inner = [self.hidden] * (self.projector_layers - 1)
        projector = Projection((feature_width(model.config), *inner, self.key_width), generator)
        inner = [self.hidden] * (self.predictor_layers - 1)
        predictor = Projection((self.key_width, *inner, self.key_width), generator)
        return MomentumContrast(Projected(model, projector), predictor, self.temperature)

    def extract(self, module: nn.Module) -> Model:
        return module.student.vit  # type: ignore[union-attr, return-value]

    def first_view(self, view: View) -> View:
        return replace(view, distortion=FIRST)

    def more_views(self, view: View) -> MoreViews:
        return (("second", (replace(view, distortion=SECOND),)),)

    def prepare(self, model: Model, order: Order) -> Prepare:
        if order.batch < 2:
            raise Error(
                "contrastive compares the images of a batch with each other: give --batch 2 or more",
                code="recipe.value",
            )
        return partial(with_counts, order.batch)

    def objective(self, model: Model) -> Objective:
        p = model.preprocessing

        def loss(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
            check_full_batch(batch)
            views = [normalise(images, p.mean, p.std) for images in (batch["image"], batch["second"][:, 0])]
            used = batch["used"] > 0
            each, correct, std = module(*views, used, batch["counts"].shape[-1])
            images = used.sum().clamp(min=1)
            return {"loss": (each * used).sum() / images, "accuracy": (correct * used).sum() / images,
                    "std": std}  # fmt: skip

        return loss

    def begin(self, module: nn.Module, steps: int) -> None:
        module.steps = steps  # type: ignore[assignment]

    def after_update(self, module: nn.Module) -> None:
        """Average the weights, with the momentum of the next step.

        MoCo v3 does so at the start of the next step, before its keys: that is the same.
        """
        assert isinstance(module, MomentumContrast)
        module.update_teacher(module.cosine(self.momentum, 1.0, ahead=1))

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > GRACE and metrics["std"] < COLLAPSED:
            raise Error(
                f"step {step}: the features of all images are the same (standard deviation "
                f"{metrics['std']:.2g}); use a lower --lr, a longer warm-up (--set schedule.warmup) or a "
                "larger --batch",
                code="training.collapsed",
            )

    def passes(self, model: Model) -> float:
        return 2 * (3 + 1)  # two views, forward and backward of the student and forward of its average

    @torch.no_grad()
    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        """Features of an image, and queries and keys of it and of its centre, (B, D + 4 E)."""
        p = self.extract(module).preprocessing
        images = normalise(context.place(batch)["image"], p.mean, p.std)
        return torch.cat([rows.float() for rows in module(images, centre(images))], dim=1).cpu()

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> FeatureMetrics:
        """The loss without distortions: the views are an image and its centre, enlarged.

        Images are compared in groups of at most 256 in the order of the data, so that neither the batch size
        nor the number of processes matters.
        """
        width = feature_width(self.extract(module).config)  # type: ignore[arg-type]
        rows, index = [torch.zeros(0, width + 4 * self.key_width)], [torch.zeros(0, dtype=torch.int64)]
        for batch in batches:
            rows.append(self.outputs(module, batch, context))
            index.append(batch["index"].cpu())
        order = context.gather(torch.cat(index)).argsort()
        table = context.gather(torch.cat(rows))[order]
        if not len(table):
            raise Error("there are no images to evaluate", code="data.empty")
        groups = table[:, width:].tensor_split(-(-len(table) // GROUP))
        loss = sum(float(full_batch_loss(group, self.temperature).double().sum()) for group in groups)
        features = table[:, :width]
        return FeatureMetrics(
            len(table), loss / len(table), float(feature_std(features)), effective_rank(features)
        )


def centre(images: Tensor) -> Tensor:
    """The central three quarters of each side of images (B, 3, H, W), at the same size."""
    height, width = images.shape[-2:]
    part = images[..., height // 8 : height - height // 8, width // 8 : width - width // 8]
    return F.interpolate(part, (height, width), mode="bilinear", align_corners=False)


def full_batch_loss(rows: Tensor, temperature: float) -> Tensor:
    """The loss of each image, (B,), from the queries and keys of all images, (B, 4 E)."""
    *queries, first, second = rows.chunk(4, dim=1)
    own, all_used = torch.arange(len(rows)), torch.ones(len(rows), dtype=torch.bool)
    losses = [
        info_nce(query, keys, own, temperature, all_used, all_used)[0]
        for query, keys in zip(queries, (second, first), strict=True)
    ]
    return losses[0] + losses[1]


def is_fresh(model: Model) -> bool:
    """Whether the model was not loaded but initialised, so that its patch embedding is random."""
    return model.origin.source.endswith("from scratch")


def with_counts(total: int, step: int, batch: Batch) -> Batch:
    """The batch with "used", which is 1 for each image, so that a blank row has 0, and "counts".

    "counts" has no elements. Its shape (B, 0, n, N) says how many images n the batch of this process has
    before it is split, and how many N the global batch has, without a number to read from a GPU.
    """
    n = len(batch["image"])
    used, counts = torch.ones(n, dtype=torch.uint8), torch.zeros(n, 0, n, total, dtype=torch.uint8)
    return batch | {"used": used, "counts": counts}


def check_full_batch(batch: Batch) -> None:
    """Refuse a part of a batch: the loop makes parts when memory is short, which would change the loss.

    A blank row, which stands for no image, is allowed.
    """
    images, (whole, total) = len(batch["image"]), batch["counts"].shape[2:]
    if images == whole or not whole or (images == 1 and not batch["used"].any()):
        return
    raise Error(
        f"a batch of {total} images does not fit into memory, and it cannot be split, since contrastive "
        "compares all of its images with each other; use a smaller --batch, more processes, or --recompute",
        code="training.out-of-memory",
    )
