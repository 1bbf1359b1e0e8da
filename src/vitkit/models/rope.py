"""Rotary position embeddings (RoPE) on the patch grid: queries and keys are rotated by their position."""

# h, w grid of patches, N patches, Dh head width

import math

import torch
from torch import Tensor, nn

from vitkit.models.positions import Grid

Turn = tuple[Tensor, Tensor, bool]  # sine and cosine, (N, Dh); whether pairs are halves or neighbours
KINDS = {"dinov3": 100.0, "eva02": 10_000.0}  # the base of the periods
REFERENCE = 16  # rows and columns of EVA-02's pre-training grid, to which every other is scaled


class Rope(nn.Module):
    """Angles of each patch: coordinate / period, for Dh/4 periods and both axes, shared by heads and layers.

    dinov3  coordinates of patch centres in [-1, 1], times 2 pi; channel j turns with channel j + Dh/2
    eva02   rows and columns scaled to a 16 x 16 grid; channel 2j turns with channel 2j + 1

    Training may move the coordinates, as DINOv3 does: + U(-shift, shift) and * [1/jitter, jitter] for each
    axis, * [1/rescale, rescale] for both together; one draw for a batch.
    """

    periods: Tensor  # part of the model: DINOv3's published ones are rounded

    def __init__(
        self, kind: str, head: int, *, shift: float = 0.0, jitter: float = 1.0, rescale: float = 1.0
    ):
        super().__init__()
        self.kind, self.shift, self.jitter, self.rescale = kind, shift, jitter, rescale
        self.register_buffer("periods", torch.empty(head // 4))

    def reset_parameters(self) -> None:
        self.periods.copy_(self.exact_periods())

    def exact_periods(self) -> Tensor:
        """The periods without rounding, as timm and transformers compute them."""
        count = len(self.periods)
        exponents = torch.arange(count, device=self.periods.device, dtype=torch.float32) / count
        return KINDS[self.kind] ** exponents

    def _apply(self, fn, recurse=True):
        """As for every module, but periods stay float32: half precision would be another model."""
        before = self.periods
        super()._apply(fn, recurse)
        if self.periods.element_size() < 4:
            self.periods = before.to(self.periods.device)
        return self

    def forward(self, grid: Grid) -> Turn:
        """Sine and cosine of each patch and channel, in float32."""
        angles = self.coordinates(grid)[:, :, None] / self.periods  # (N, 2, Dh/4)
        if self.kind == "dinov3":
            angles = (2 * math.pi * angles).flatten(1).tile(2)
        else:
            angles = angles.flatten(1).repeat_interleave(2, -1)
        return angles.sin(), angles.cos(), self.kind == "dinov3"

    def coordinates(self, grid: Grid) -> Tensor:
        """(y, x) of each patch, (N, 2), in raster order."""
        dtype, device = self.periods.dtype, self.periods.device
        if self.kind == "dinov3":
            axes = [2 * (torch.arange(n, dtype=dtype, device=device) + 0.5) / n - 1 for n in grid]
        else:
            axes = [torch.arange(n, dtype=dtype, device=device) / n * REFERENCE for n in grid]
        y, x = axes
        places = torch.stack([y[:, None].expand(-1, len(x)), x[None].expand(len(y), -1)], dim=-1).flatten(
            0, 1
        )
        return self.moved(places) if self.training else places

    def moved(self, places: Tensor) -> Tensor:
        """The coordinates shifted, stretched and scaled at random."""

        def uniform(count: int, limit: float) -> Tensor:
            return (2 * torch.rand(count, dtype=places.dtype, device=places.device) - 1) * limit

        if self.shift:
            places = places + uniform(2, self.shift)
        if self.jitter > 1:
            places = places * uniform(2, math.log(self.jitter)).exp()
        if self.rescale > 1:
            places = places * uniform(1, math.log(self.rescale)).exp()
        return places


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Queries or keys (B, K, T, Dh); the last N tokens, the patches, are rotated, those before are not.

    Sine and cosine are (N, Dh), or (B, 1, N, Dh) where images differ in their patches.
    """
    sin, cos, halves = turn
    lead = x.shape[2] - sin.shape[-2]
    patches = x[:, :, lead:]
    turned = (patches * cos + quarter_turn(patches, halves) * sin).to(x.dtype)
    return torch.cat([x[:, :, :lead], turned], dim=2) if lead else turned


def quarter_turn(x: Tensor, halves: bool) -> Tensor:
    """(a, b) -> (-b, a) for each pair: of the two halves, or of neighbours."""
    if halves:
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
