"""Students of a frozen teacher: of its features, or of its labels by a distillation token (DeiT)."""

# B batch; N patches; h, w grid of patches; H, W pixels; D width of the student, T of the teacher; K classes

import hashlib
import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.models.adapt import adapt, rebuilt
from vitkit.models.card import Preprocessing
from vitkit.models.positions import Grid
from vitkit.models.variants import Backbone, Config, Model, backbone
from vitkit.models.vit import ViT, ViTConfig
from vitkit.ops.precision import product


class FrozenTeacher:
    """A trained model that is not part of the module: not trained, not sharded, not in checkpoints.

    Every process has a whole copy, on the device of its images.
    """

    def __init__(self, model: Model, student: Preprocessing, image_size: tuple[int, int] | None = None):
        """`student`: how the images are normalised; `image_size`: of the teacher's input, None: its own."""
        self.digest = digest_of(model)
        changes: dict[str, Any] = {}
        if isinstance(model, ViT) and model.config.merge_tokens:
            changes["merge_tokens"] = 0
        if image_size is not None and image_size != tuple(model.config.image_size):
            changes["image_size"] = image_size
        model = adapt(model, **changes) if changes else backbone(model)
        self.model = model.eval().requires_grad_(False)
        own = model.preprocessing
        pairs = [*zip(student.mean, student.std, own.mean, own.std, strict=True)]
        self.scale = tuple(old / new for _, old, _, new in pairs)
        self.shift = tuple((mean - other) / new for mean, _, other, new in pairs)
        self.outputs: tuple[int, ...] = ()  # the teacher's class for each class of the student; empty: equal

    def ready(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) as the student gets them, normalised and resized for the teacher."""
        if next(self.model.parameters()).device != images.device:
            self.model.to(images.device)
        if any(shift != 0 or scale != 1 for shift, scale in zip(self.shift, self.scale, strict=True)):
            images = images * per_channel(self.scale, images.device) + per_channel(self.shift, images.device)
        size = self.model.config.image_size
        if images.shape[-2:] == tuple(size):
            return images
        return F.interpolate(images, size, mode="bilinear", antialias=True)

    @torch.no_grad()
    def features(self, images: Tensor) -> tuple[Tensor, Tensor, Grid]:
        """The input of the teacher's head (B, T), its patches (B, N, T), and their grid."""
        images = self.ready(images)
        if isinstance(self.model, ViT):
            return tokens_of(self.model, images)
        cells = self.model.tokens(images)  # a ResNet's last feature map
        height, width = images.shape[-2:]
        rows = round(math.sqrt(cells.shape[1] * height / width))
        return cells.mean(1), cells, (rows, cells.shape[1] // rows)

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """The teacher's logits (B, K) in the order of the student's classes."""
        logits = self.model(self.ready(images)).float()
        return logits[:, indices(self.outputs, logits.device)] if self.outputs else logits


class FeatureStudent(nn.Module):
    """A model and linear layers from its features to the teacher's.

    State-dict names: student.*, to_feature.*, to_patches.*, teacher
    """

    teacher: Tensor  # SHA-256 of the teacher

    def __init__(self, student: ViT, teacher: FrozenTeacher, *, patches: bool, generator: torch.Generator):
        super().__init__()
        self.student = student
        self.frozen = teacher
        width, patch_width = feature_widths(teacher.model)
        self.to_feature = nn.Linear(feature_width(student.config), width)
        self.to_patches = nn.Linear(student.config.width, patch_width) if patches else None
        for layer in (self.to_feature, self.to_patches):
            if layer is not None:
                nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
                nn.init.zeros_(layer.bias)
        self.register_buffer("teacher", teacher.digest.clone())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images (B, C, H, W) to the errors of the feature and of the patches, (B,), and features (B, D).

        Both are mean squared errors against the teacher's feature, or each of its patches, standardised to
        mean 0 and variance 1. The student's patches are interpolated to the teacher's grid.
        """
        feature, patches, grid = self.frozen.features(images)
        if self.to_patches is None:
            pooled = self.student.features(images)
            error = squared_error(self.to_feature(pooled), feature)
            return error, torch.zeros_like(error), pooled
        pooled, own, own_grid = tokens_of(self.student, images)
        mapped = resized(self.to_patches(own).float(), own_grid, grid)
        dense = squared_error(mapped, patches).mean(1)
        return squared_error(self.to_feature(pooled), feature), dense, pooled


class LabelStudent(nn.Module):
    """A model with a distillation token beside its teacher. State-dict names: student.*, teacher"""

    teacher: Tensor  # SHA-256 of the teacher

    def __init__(self, student: ViT, teacher: FrozenTeacher):
        super().__init__()
        self.student = student
        self.frozen = teacher
        self.register_buffer("teacher", teacher.digest.clone())

    @property
    def config(self) -> Config:
        return self.student.config

    @property
    def preprocessing(self) -> Preprocessing:
        return self.student.preprocessing

    def forward(self, images: Tensor, taught: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Images (B, C, H, W) to logits (B, K), the mean of both heads.

        taught: to the logits of the head, of the distillation head, and of the teacher.
        """
        if not taught:
            logits: Tensor = self.student(images)
            return logits
        of_class, of_distillation = self.student.features(images).chunk(2, -1)
        assert self.student.head is not None and self.student.distillation_head is not None
        logits = self.student.head(of_class).float()
        return logits, self.student.distillation_head(of_distillation).float(), self.frozen.logits(images)


def tokens_of(model: ViT, images: Tensor) -> tuple[Tensor, Tensor, Grid]:
    """The input of the head (B, D), the patches (B, N, D) after the last layer, and their grid."""
    patches, grid = model.patches(images)
    z = model.encode(patches, grid)
    return model.pooled(z), z[:, model.config.prefix :], grid


def feature_widths(model: Backbone) -> tuple[int, int]:
    """The widths of what `FrozenTeacher.features` returns."""
    if isinstance(model, ViT):
        return feature_width(model.config), model.config.width
    return model.norm.num_channels, model.norm.num_channels


def feature_width(c: ViTConfig) -> int:
    """The width of a ViT's features, the input of its head."""
    tokens = c.lead if c.head == "token" else 1
    return c.representation or tokens * c.pooled_width


def squared_error(x: Tensor, target: Tensor) -> Tensor:
    """The mean squared error (...,) of x (..., T) against a target standardised over its last axis."""
    target = F.layer_norm(target.float(), target.shape[-1:])
    return (x.float() - target).square().mean(-1)


def resized(patches: Tensor, grid: Grid, new_grid: Grid) -> Tensor:
    """Patches (B, N, D) of a grid, bilinearly interpolated to another grid.

    By products of matrices, since the gradient of F.interpolate is not deterministic on a GPU.
    """
    if grid == new_grid:
        return patches
    rows, columns = (line_resize(*pair, patches.device) for pair in zip(grid, new_grid, strict=True))
    square = product(rows, patches.unflatten(1, grid).flatten(2))  # (B, new h, w * D)
    return product(columns, square.unflatten(2, (grid[1], -1))).flatten(1, 2)


@cache
def line_resize(old: int, new: int, device: torch.device) -> Tensor:
    """The matrix (new, old) of a linear interpolation with half-pixel centres."""
    units = torch.eye(old, device=device)[None]
    return F.interpolate(units, new, mode="linear", align_corners=False)[0].mT.contiguous()


@cache  # a copy to the GPU synchronises, and cannot be captured in a CUDA graph
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None, None]


@cache
def indices(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def digest_of(model: Model) -> Tensor:
    """SHA-256 of a model's configuration, preprocessing and weights, as 32 bytes."""
    digest = hashlib.sha256(f"{model.config!r} {model.preprocessing!r}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def with_distillation_token(model: Model) -> Model:
    """The model with a distillation token that starts as a copy of the class token, and a head of zeros."""
    if not isinstance(model, ViT) or model.config.distilled:
        return model
    c = model.config
    if c.positions == "relative":
        raise Error(
            "a model with relative positions cannot get a distillation token; train it from scratch with "
            "--model, or give other --weights",
            code="model.unsupported",
        )
    config = replace(c, distilled=True, class_token=True)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    state["distillation_token"] = state["class_token"].clone()
    if c.class_position:
        for name in {"positions.table", "positions.first"} & state.keys():
            state[name] = torch.cat([state[name][:, :1], state[name]], dim=1)
    if model.head is not None:
        state["distillation_head.weight"] = torch.zeros_like(state["head.weight"])
        state["distillation_head.bias"] = torch.zeros_like(state["head.bias"])
    new = rebuilt(model, config, state)
    return new.requires_grad_(True)
