"""Position embeddings: kinds, where they are added (App. D.4), and 2D interpolation (Sec. 3.2)."""

# N tokens (T with the class token), D width; h, w grid of patches

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.ops.precision import interpolates_repeatably, product, widest_float

Grid = tuple[int, int]
# Libraries interpolate in six ways, whose results differ by several per cent.
RESIZE: dict[str, dict] = {
    "official": {"mode": "bilinear", "align_corners": True},  # scipy.ndimage.zoom, order 1
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "flexivit": {"mode": "bilinear", "align_corners": False, "antialias": True},  # jax.image.resize
    "hf": {"mode": "bicubic", "align_corners": False},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "dinov2": {"mode": "bicubic", "align_corners": False},  # with a scale factor of (new grid + 0.1) / grid
}


def resize_positions(table: Tensor, grid: Grid, new_grid: Grid, method: str = "official") -> Tensor:
    """Interpolate a table (1, N to N+2, D) from a grid (h, w) to a new one.

    Entries of the class and distillation tokens, which come first, are copied.

    >>> resize_positions(torch.zeros(1, 197, 8), (14, 14), (24, 24)).shape
    torch.Size([1, 577, 8])
    """
    if method not in RESIZE:
        raise Error(f"no resize method {method!r}; known: {', '.join(RESIZE)}")
    if min(*grid, *new_grid) < 1:
        raise Error(f"a grid needs at least one row and one column: {grid} -> {new_grid}")
    h, w = grid
    extra = table.shape[-2] - h * w
    if table.ndim != 3 or extra not in (0, 1, 2):
        raise Error(
            f"a position table for a {h}x{w} grid has shape (1, {h * w} or {h * w + 1}, D), "
            f"not {tuple(table.shape)}",
            code="model.input",
        )
    if tuple(grid) == tuple(new_grid):
        return table
    first, patches = table[:, :extra], table[:, extra:]
    square = patches.unflatten(1, (h, w)).permute(0, 3, 1, 2)  # (1, D, h, w)
    size: dict = {"size": tuple(new_grid)}
    if method == "dinov2":
        size = {"scale_factor": tuple((new + 0.1) / old for new, old in zip(new_grid, grid, strict=True))}
    # the official code interpolates in float64, the others in the dtype of the table
    least = widest_float(table.device) if method == "official" else torch.float32
    dtype = torch.promote_types(table.dtype, least)
    square = F.interpolate(square.to(dtype), **size, **RESIZE[method]).to(table.dtype)
    assert square.shape[-2:] == tuple(new_grid)
    return torch.cat([first, square.flatten(2).mT], dim=1)


def resize_learned(table: Tensor, grid: Grid, new_grid: Grid, method: str) -> Tensor:
    """`resize_positions` of a table that learns, as a product with a matrix, in the table's precision.

    The gradient of a product is deterministic on a GPU, and that of an interpolation is not.
    """
    matrix = resize_matrix(grid, new_grid, method, table.device)
    extra = table.shape[-2] - matrix.shape[1]
    return torch.cat([table[:, :extra], product(matrix.to(table.dtype), table[:, extra:])], dim=1)


@lru_cache(maxsize=64)  # a model sees few sizes, and each in every step
def resize_matrix(grid: Grid, new_grid: Grid, method: str, device: torch.device) -> Tensor:
    """The matrix (new h*w, h*w) by which `resize_positions` interpolates."""
    with torch.inference_mode(False), torch.no_grad():
        units = torch.eye(grid[0] * grid[1], device=device)[None]
        return resize_positions(units, grid, new_grid, method)[0].contiguous()


def resize_patch(kernel: Tensor, patch: int) -> Tensor:
    """A patch embedding (D, C, P, P) for another patch size, by the pseudo-inverse of a resize (FlexiViT).

    With B the matrix of a bilinear resize of patches, w_new = pinv(B^T) w: a larger patch that is a resized
    image has the embedding of the original, exactly.
    """
    old = kernel.shape[-1]
    if old == patch:
        return kernel
    inverse = inverse_resize(old, patch, kernel.device)
    flat = kernel.to(inverse.dtype).flatten(2) @ inverse.mT
    return flat.unflatten(-1, (patch, patch)).to(kernel.dtype).contiguous()


@lru_cache(maxsize=64)  # training with many patch sizes needs each of them again and again
def inverse_resize(old: int, new: int, device: torch.device) -> Tensor:
    """pinv(B^T), (new^2, old^2), with B the matrix of a bilinear resize of patches from old to new pixels."""
    with torch.inference_mode(False), torch.no_grad():  # kept for the gradients of later steps
        units = torch.eye(old * old, dtype=widest_float(device), device=device).view(-1, 1, old, old)
        resized = F.interpolate(units, (new, new), mode="bilinear", align_corners=False)
        return torch.linalg.pinv(resized.flatten(1))


def sincos2d(grid: Grid, width: int, *, kind: str = "sincos2d", device: torch.device | None = None) -> Tensor:
    """Fixed 2D sine and cosine positions, (1, h*w, D), ordered sin x, cos x, sin y, cos y.

    The D/4 rates are 10000^(-i/(D/4 - 1)) in big_vision (sincos2d), 10000^(-i/(D/4)) in MAE (sincos2d-mae).
    """
    dtype = widest_float(device)
    steps = width // 4 if kind == "sincos2d-mae" else max(1, width // 4 - 1)
    rate = torch.arange(width // 4, device=device, dtype=dtype) / steps
    rate = 10_000.0**-rate
    y, x = (torch.arange(n, device=device, dtype=dtype)[:, None] * rate for n in grid)
    y, x = (a.expand(*grid, -1) for a in (y[:, None], x[None, :]))  # (h, w, D/4)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).flatten(0, 1)[None]


class GatherRows(torch.autograd.Function):
    """Rows of a table (N, D) for each image, (B, K, D).

    The gradient is a product with a matrix of zeros and ones, which is deterministic and fast on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.rows = len(table)
        return table[chosen]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (chosen,) = ctx.saved_tensors
        row = torch.arange(ctx.rows, device=chosen.device)
        of_row = (chosen.flatten() == row[:, None]).to(gradient.dtype)  # (N, B K)
        return of_row @ gradient.flatten(0, 1), None


class Positions(nn.Module):
    """Adds position embeddings to tokens, at the stem or before every layer (App. D.4).

    kind       none, 1d (a learned row per token), 2d (learned x and y halves), sincos2d and
               sincos2d-mae (fixed, zero for the class token)
    injection  stem, every (one table per layer), shared (one table, added before every layer)
    """

    def __init__(
        self, kind: str, injection: str, *, grid: Grid, width: int, depth: int, lead: int, resize: str
    ):
        """`lead`: tokens before the patches that have a position, such as the class token."""
        super().__init__()
        self.kind, self.injection, self.grid, self.lead, self.resize = kind, injection, grid, lead, resize
        self.width = width
        layers, (h, w) = depth if injection == "every" else 1, grid
        if kind == "1d":
            self.table = nn.Parameter(torch.empty(layers, lead + h * w, width))
        if kind == "2d":
            self.y = nn.Parameter(torch.empty(layers, h, width // 2))
            self.x = nn.Parameter(torch.empty(layers, w, width // 2))
            if lead:  # the class token is not on the grid
                self.first = nn.Parameter(torch.empty(layers, lead, width))

    def forward(self, z: Tensor, grid: Grid, layer: int, chosen: Tensor | None = None) -> Tensor:
        """z plus the positions that are added before this layer.

        chosen: the places (B, K) of the patches in z, if it does not have all of them in order
        """
        if self.kind in ("none", "relative") or (layer and self.injection == "stem"):
            return z
        table = self.at(grid, layer if self.injection == "every" else 0, device=z.device).to(z.dtype)
        if chosen is not None:
            lead = table[:, : self.lead].expand(len(chosen), -1, -1)
            table = torch.cat([lead, GatherRows.apply(table[0, self.lead :], chosen)], dim=1)
        return z + table

    def at(self, grid: Grid, layer: int = 0, *, device: torch.device | None = None) -> Tensor:
        """The positions of one layer for a grid, (1, T, D)."""
        if self.kind.startswith("sincos2d"):
            table = sincos2d(grid, self.width, kind=self.kind, device=device)
            return F.pad(table, (0, 0, self.lead, 0))
        if self.kind == "2d":
            y, x = (self.line(t[layer], n) for t, n in zip((self.y, self.x), grid, strict=True))
            square = torch.cat([x[None].expand(len(y), -1, -1), y[:, None].expand(-1, len(x), -1)], -1)
            table = square.flatten(0, 1)[None]
            return torch.cat([self.first[layer][None], table], 1) if self.lead else table
        table = self.table[layer][None]
        learns = table.requires_grad and tuple(grid) != tuple(self.grid)
        if learns and not interpolates_repeatably(table.device):
            return resize_learned(table, self.grid, grid, self.resize)
        return resize_positions(table, self.grid, grid, self.resize)

    def line(self, axis: Tensor, length: int) -> Tensor:
        """One axis of a 2d table, (n, D/2), interpolated to another length."""
        return resize_positions(axis[None], (len(axis), 1), (length, 1), self.resize)[0]
