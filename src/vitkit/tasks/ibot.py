"""iBOT: DINO, and the student also predicts its teacher's outputs for patches that are masked for it.

Zhou et al., "iBOT: image BERT pre-training with online tokenizer" (2022), and its official code.
"""

# B images, K outputs, N patches, of which at most M are masked

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.order import Order
from vitkit.errors import Error
from vitkit.models.self_supervised.masked import maskable, with_mask_token
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT
from vitkit.ops.rows import rows
from vitkit.options import Range
from vitkit.runtime.collectives import sum_over_processes
from vitkit.tasks.dino import SHARE, Dino, DinoModule, mark_images
from vitkit.tasks.task import Batch, Prepare, register

ASPECT = 0.3  # of a masked block: between this and its inverse, log-uniform
ATTEMPTS = 10  # to place a block
GREY = 128  # of hidden patches in pictures


@register
@dataclass(frozen=True, kw_only=True)
class Ibot(Dino):
    """DINO with masked patches (iBOT): its options are those of dino, and what is masked in large crops."""

    name: ClassVar[str] = "ibot"
    most_prototypes: ClassVar[int] = 8192
    ranges: ClassVar[Mapping[str, Range]] = {
        **Dino.ranges,
        "mask_share": SHARE, "mask_ratio": Range(0, 1, above=True), "patch_weight": Range(0, 1e6),
        "patch_temperature": Range(0, 10, above=True), "first_patch_temperature": Range(0, 10, above=True),
        "patch_centre_momentum": SHARE,
    }  # fmt: skip
    about: ClassVar[str] = "by self-distillation without labels (iBOT),"
    batch_note: ClassVar[str] = "the first of the two large crops of each image, masked patches in grey"

    mask_share: float = 0.5  # share of the large crops of which patches are masked
    mask_ratio: tuple[float, float] = (0.1, 0.5)  # smallest and largest share of masked patches in these
    patch_weight: float = 1.0  # of the patches' loss, beside the loss of the class token
    patch_temperature: float = 0.07  # of the teacher for patches, after its warm-up
    first_patch_temperature: float = 0.04  # at the start of the warm-up
    patch_centre_momentum: float = 0.9  # of the mean that is subtracted from the teacher's patch outputs

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mask_ratio) != 2 or self.mask_ratio[0] > self.mask_ratio[1]:
            raise Error(
                f"{self.name}.mask_ratio must be the smallest and the largest share of masked patches, not "
                f"{', '.join(f'{share:g}' for share in self.mask_ratio)}",
                code="recipe.value",
            )

    # model

    def configure(self, config: Config) -> Config:
        return maskable(super().configure(config))

    def extend(self, model: Model) -> Model:
        return with_mask_token(model)

    def saved_config(self, config: Config) -> Config:
        """Without the mask token: other formats cannot store it, and fine-tuning would not train it."""
        return replace(config, mask_token=False)  # type: ignore[arg-type]

    def build(self, model: Model) -> "IbotModule":
        self.check_model(model.config)
        assert isinstance(model, ViT)
        return IbotModule(model, self)

    # training

    def prepare(self, model: Model, order: Order) -> Prepare:
        return partial(draw_masks, self, model.config.grid, order)  # type: ignore[union-attr]

    def visible(self, model: Model, order: Order, step: int, batch: Batch) -> Tensor:
        (h, w), side = model.config.grid, model.config.stride  # type: ignore[union-attr]
        mask = draw_masks(self, (h, w), order, step, batch)["mask"][:, 0].view(-1, 1, h, w)
        pixels = mask.repeat_interleave(side, 2).repeat_interleave(side, 3)
        images = batch["image"].clone()
        images[:, :, : h * side, : w * side].masked_fill_(pixels, GREY)
        return images

    def inputs(self, batch: Batch, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Any, ...]:
        """As DINO's, and the masks of the large crops, (2 B, ...), as `draw_masks` makes them."""
        masks = (batch[name].transpose(0, 1).flatten(0, 1) for name in ("mask", "masked", "share"))
        return (*super().inputs(batch, mean, std), *masks)


class IbotModule(DinoModule):
    """DINO's module with the centre of the teacher's patch outputs; both kinds of tokens share a head."""

    task: Ibot
    patch_centre: Tensor  # (K,) mean of the teacher's logits of patches
    patch_sums: Tensor  # (K + 1,) of the batch so far, and its images

    def __init__(self, model: ViT, task: Ibot):
        super().__init__(model, task)
        self.register_buffer("patch_centre", torch.zeros(self.outputs))
        self.register_buffer("patch_sums", torch.zeros(self.outputs + 1), persistent=False)

    def forward(
        self, large: Tensor, small: Tensor | None = None, real: Tensor | None = None,
        mask: Tensor | None = None, masked: Tensor | None = None, share: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """As DINO's; mask (2 B, N): which patches of the large crops the student does not see.

        masked (2 B, M): their indices; share (2 B, M): of each in the loss of its crop, 0 for those that fill
        up the M. Without masks, as in evaluations, the loss is that of the class token alone.
        """
        if real is None or mask is None or masked is None or share is None:
            return super().forward(large, small, real)
        lead = self.teacher.backbone.config.prefix
        with torch.no_grad():
            tokens = self.teacher.backbone.tokens(large)
            features = self.teacher.backbone.pooled(tokens)
            logits = self.teacher.head(features).float()
            units = self.teacher.head.bottleneck(tokens[:, lead:])  # (2 B, N, width)
            wanted = self.teacher.head.last(rows(units, masked)).float()  # (2 B, M, K)
            average = self.teacher.head.last(units.mean(1)).float()  # the layer is linear: the mean of logits
        tokens = self.student.backbone.tokens(large, mask)
        seen = [self.student.backbone.pooled(tokens)]
        seen += [] if small is None else [self.student.backbone.features(small)]
        hidden = rows(tokens, masked + lead).flatten(0, 1)
        classes, patches = map(len, (torch.cat(seen), hidden))
        answers = self.student.head(torch.cat([*seen, hidden])).float()
        of_class, of_patches = answers.split([classes, patches])
        values, targets = self.class_loss(logits, of_class)
        self.add_up(real, logits, targets, features.float(), values["information"])
        each = torch.cat([real, real])[:, None]
        self.patch_sums += torch.cat([(average * each).sum(0), real.sum()[None]])
        patch = self.patch_loss(wanted, of_patches.view_as(wanted), share)
        values |= {"class_loss": values["loss"].detach(), "patch_loss": patch.detach()}
        loss = values["loss"] + self.task.patch_weight * patch
        return values | {"loss": loss, "features": features.float()}

    def patch_loss(self, teacher: Tensor, student: Tensor, share: Tensor) -> Tensor:
        """The cross-entropy of masked patches (2 B, M, K): the mean of each crop, then of an image's two."""
        task = self.task
        temperature = self.temperature(task.first_patch_temperature, task.patch_temperature)
        targets = F.softmax((teacher - self.patch_centre) / temperature, dim=-1)
        terms = -(targets * F.log_softmax(student / task.student_temperature, dim=-1)).sum(-1)  # (2 B, M)
        return (terms * share).sum(-1).unflatten(0, (2, -1)).mean(0)

    def update_averages(self) -> None:
        super().update_averages()
        total, images = sum_over_processes(self.patch_sums).split([self.outputs, 1])
        self.patch_centre.lerp_(total / (2 * images.clamp(min=1)), 1 - self.task.patch_centre_momentum)
        self.patch_sums.zero_()


def most_masked(task: Ibot, patches: int) -> int:
    """The largest number of masked patches of a crop; at least 1, so that no tensor is empty."""
    return max(1, int(task.mask_ratio[1] * patches))


def draw_masks(task: Ibot, grid: tuple[int, int], order: Order, step: int, batch: Batch) -> Batch:
    """Add the masks of both large crops of each image, as a pure function of (seed, step, place).

    "mask" (B, 2, N) bool; "masked" (B, 2, M) indices of masked patches, then zeros; "share" (B, 2, M) 1 / the
    number of masked patches for each of them, then zeros.
    """
    places, patches = batch["place"].tolist(), grid[0] * grid[1]
    most = most_masked(task, patches)
    mask = np.zeros((len(places), 2, patches), dtype=bool)
    masked = np.zeros((len(places), 2, most), dtype=np.int64)
    share = np.zeros((len(places), 2, most), dtype=np.float32)
    for row, place in enumerate(places):
        rng = order.rng(step, -2 - place)  # which nothing else draws from
        for crop in range(2):
            mask[row, crop] = draw_mask(task, grid, rng).flatten()
            chosen = np.flatnonzero(mask[row, crop])
            masked[row, crop, : len(chosen)] = chosen
            share[row, crop, : len(chosen)] = 1 / max(1, len(chosen))
    arrays = {"mask": mask, "masked": masked, "share": share}
    return mark_images(step, batch) | {name: torch.from_numpy(array) for name, array in arrays.items()}


def draw_mask(task: Ibot, grid: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A mask (h, w): empty by chance, or blocks until their patches reach a random share of all.

    A block has the area of the smaller side's third, squared, or more, and at most as many new patches as are
    left. Where it does not fit in ten attempts, the mask remains as it is.
    """
    height, width = grid
    mask = np.zeros(grid, dtype=bool)
    wanted = rng.uniform(*task.mask_ratio) * mask.size if rng.random() < task.mask_share else 0.0
    while (left := wanted - mask.sum()) > 0:
        for _ in range(ATTEMPTS):
            least = (min(grid) // 3) ** 2
            area = least + (left - least) * rng.random()  # also where `left` is the smaller
            aspect = math.exp(rng.uniform(math.log(ASPECT), -math.log(ASPECT)))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h >= height or w >= width:
                continue
            top, first = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            block = mask[top : top + h, first : first + w]
            if 0 < h * w - block.sum() <= left:
                block[:] = True
                break
        else:
            break
    return mask
