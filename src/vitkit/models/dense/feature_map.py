"""What segmentation heads share: patch tokens as a map, images in whole patches, maps at a finer scale."""

# B batch, D width, C channels; H, W pixels; h, w grid of patches or cells; L, l lengths along one axis

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, Error
from vitkit.models.dense.windows import windowed
from vitkit.models.positions import Grid
from vitkit.models.vit import ViT, ViTConfig
from vitkit.ops.precision import interpolates_repeatably, product

EPS = 1e-6  # of norms over channels
Size = tuple[int, int]


def dense_encoder(config: Any, task: str) -> ViTConfig:
    """The configuration of a ViT whose patch tokens a dense head reads: without any head of its own.

    What only a classifier reads is left out: attention pooling, the representation layer, the text tower and
    the mask token. All of its parameters are trained, which data-parallel training needs.
    """
    if not isinstance(config, ViTConfig):
        raise Error(
            f"{task} needs a ViT or a hybrid, not a ResNet; give another --model", code="model.unsupported"
        )
    head = "gap" if config.head == "map" else config.head
    return replace(
        config, head=head, classes=0, representation=0, representation_kind="tanh", text=None,
        normalize=False, mask_token=False, merge_tokens=0,
    )  # fmt: skip


def final_norm(vit: ViT) -> nn.Module:
    """The last norm, for each token; a norm that follows pooling is used for every patch."""
    return vit.encoder.norm if vit.pool_norm is None else vit.pool_norm


def patch_map(vit: ViT, images: Tensor) -> Tensor:
    """The patch tokens after the final norm as a map (B, D, h, w); other tokens are dropped."""
    vit.check_unmerged()
    patches, grid = vit.patches(images)
    z = vit.encode(patches, grid)
    z = z if vit.pool_norm is None else vit.pool_norm(z)
    return as_map(z, grid)


def as_map(z: Tensor, grid: Grid) -> Tensor:
    """The last h * w tokens of (B, T, D) as a map (B, D, h, w)."""
    return z[:, z.shape[1] - grid[0] * grid[1] :].unflatten(1, grid).permute(0, 3, 1, 2)


def in_whole_patches(images: Tensor, stride: int, fill: int = 0) -> Tensor:
    """Images (..., H, W) padded at the right and bottom to whole patches."""
    down, right = (-side % stride for side in images.shape[-2:])
    return F.pad(images, (0, right, 0, down), value=fill) if down or right else images


def check_window(window: int, stride: int) -> None:
    """Refuse windows that are not whole patches."""
    if window < 0 or window % stride:
        near = max(1, round(window / stride)) * stride
        raise ConfigError(
            f"window must be 0 or a multiple of the patch of {stride} pixels, not {window}; try {near}"
        )


def in_windows(compute: Callable[[Tensor], Tensor], images: Tensor, config: Any) -> Tensor:
    """compute(images) for images in whole patches, in the windows of the configuration if they are larger.

    Windows overlap by a third, in whole patches.
    """
    window, patch = config.window, config.stride
    if not window or max(images.shape[-2:]) <= window:
        return compute(images)
    stride = max(1, window * 2 // (3 * patch)) * patch
    scale = 2**config.upscale  # windows begin at whole patches, so at whole cells
    return windowed(compute, images, (window, window), (stride, stride), Fraction(patch, scale))


def cut_padding(maps: Tensor, size: Size, cell: float) -> Tensor:
    """Maps (B, C, h, w) without the cells that lie wholly in padding; `size`: pixels of the image."""
    h, w = cells_of(size, cell)
    return maps[..., :h, :w]


def cells_of(size: Size, cell: float) -> Size:
    """Rows and columns of cells of so many pixels that cover an image.

    >>> cells_of((360, 480), 4.0), cells_of((355, 480), 3.5)
    ((90, 120), (102, 138))
    """
    h, w = (math.ceil(side / cell - 1e-9) for side in size)
    return h, w


def upsample(maps: Tensor, size: Size, cell: float) -> Tensor:
    """Maps (B, C, h, w), each of whose cells covers `cell` pixels, at the pixels (H, W); bilinear.

    The gradient of PyTorch's interpolation is not the same each time on an NVIDIA GPU, and that of a product
    with matrices is.
    """
    height, width = size
    if cell == 1:
        return maps[..., :height, :width]
    if not maps.requires_grad or interpolates_repeatably(maps.device):
        fine = F.interpolate(
            maps, scale_factor=cell, mode="bilinear", align_corners=False, recompute_scale_factor=False
        )
        return fine[..., :height, :width]
    rows = axis_matrix(maps.shape[-2], height, cell, maps.device).to(maps.dtype)
    columns = axis_matrix(maps.shape[-1], width, cell, maps.device).to(maps.dtype)
    return product(rows, product(maps, columns.mT))


@lru_cache(maxsize=64)  # a run sees few sizes, and each in every step
def axis_matrix(cells: int, length: int, cell: float, device: torch.device) -> Tensor:
    """The matrix (L, l) that interpolates linearly from cells along an axis to pixels."""
    with torch.inference_mode(False), torch.no_grad():
        first, second, share = axis_weights(cells, length, cell, device)
        matrix = torch.zeros(length, cells, device=device)
        matrix.scatter_(1, first[:, None], (1 - share)[:, None])
        return matrix.scatter_add_(1, second[:, None], share[:, None])


def axis_weights(
    cells: int, length: int, cell: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each pixel along an axis the two nearest cells and the share of the second, each (L,)."""
    pixels = torch.arange(length, device=device, dtype=torch.float32)
    place = ((pixels + 0.5) / cell - 0.5).clamp(0, cells - 1)
    first = place.floor()
    return first.long(), (first + 1).clamp(max=cells - 1).long(), place - first


def axes_at_pixels(fit: Size, size: Size, cell: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`axis_weights` of the height and of the width, for the pixels of the original image.

    fit   the pixels of the model's input that the image covers, from the top left; the rest is padding
    size  height and width of the original image
    """
    sides = zip(cells_of(fit, cell), size, fit, strict=True)
    return [axis_weights(length, pixels, cell * pixels / own) for length, pixels, own in sides]


def resized_maps(
    maps: Tensor, fit: Size, size: Size, cell: float, rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Some rows and columns of maps (C, h, w) at the pixels of the original image; bilinear.

    fit, size: see `axes_at_pixels`
    """
    axes = axes_at_pixels(fit, size, cell)
    down, along = (share.to(maps) for _, _, share in axes)
    top, bottom = axes[0][0][rows], axes[0][1][rows]
    first, last = int(top[0]), int(bottom[-1]) + 1  # cells that these rows lie between
    left, right, top, bottom = (
        index.to(maps.device)
        for index in (axes[1][0][columns], axes[1][1][columns], top - first, bottom - first)
    )
    lines = maps[:, first:last]  # along rows of cells first, which are fewer than rows of pixels
    lines = lines[..., left].lerp(lines[..., right], along[columns])
    return lines[:, top].lerp(lines[:, bottom], down[rows, None])


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of a map (B, C, h, w), at each place."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, maps: Tensor) -> Tensor:
        last = maps.permute(0, 2, 3, 1)
        return F.layer_norm(last, self.weight.shape, self.weight, self.bias, EPS).permute(0, 3, 1, 2)


class BatchNorm(nn.Module):
    """Batch normalisation of a map; as PyTorch's, but its state is floating-point numbers alone."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, maps: Tensor) -> Tensor:
        return F.batch_norm(maps, self.mean, self.variance, self.weight, self.bias, self.training, eps=1e-5)


class ScaleBlock(nn.Module):
    """A map at twice its resolution (EoMT): transposed convolution, GELU, depthwise 3 x 3, norm."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = ChannelNorm(width)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, D, h, w) -> (B, D, 2 h, 2 w), with channels last in memory.

        Windows of the transposed convolution do not overlap, so it is a product with a matrix.
        """
        kernel = self.up.weight.flatten(1).mT  # (D 2 2, D)
        bias = None if self.up.bias is None else self.up.bias.repeat_interleave(4)
        cells = F.linear(maps.permute(0, 2, 3, 1), kernel, bias).unflatten(
            -1, (-1, 2, 2)
        )  # (B, h, w, D, 2, 2)
        fine = cells.permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2)  # (B, 2 h, 2 w, D)
        return self.norm(self.mix(F.gelu(fine).permute(0, 3, 1, 2)))


@torch.no_grad()
def initialize_layers(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """PyTorch's own initialisation of layers, from a generator; norms with scale 1 and bias 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            bound = part.weight[0].numel() ** -0.5
            nn.init.uniform_(part.weight, -bound, bound, generator=generator)
            if part.bias is not None:
                nn.init.uniform_(part.bias, -bound, bound, generator=generator)
        elif isinstance(part, ChannelNorm | BatchNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
            if isinstance(part, BatchNorm):
                nn.init.zeros_(part.mean)
                nn.init.ones_(part.variance)
