"""Values of maps at points between their cells, with a gradient that is the same bit for bit each time."""

# N maps, C channels, P points, T objects; H, W cells; points are (x, y) from 0 to 1 across the map

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.precision import interpolates_repeatably

STEPS = (12_664_746, 9_560_334)  # x and y of the R2 sequence in 2^-24 (M. Roberts, 2018)
FIXED = 2.0**40  # steps of a sum in whole numbers between 0 and the largest summand


def even_points(count: int, device: torch.device) -> Tensor:
    """The first points of a sequence that covers the unit square evenly, (count, 2) float32."""
    number = torch.arange(1, count + 1, device=device)
    return torch.stack([number * step % 2**24 for step in STEPS], dim=-1) / 2**24


def corners(points: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The four cells around each point and their weights: places in a flat map and shares, each (..., P, 4).

    Cell centres are at (i + 0.5) / n. Cells outside the map have the share 0, as in grid_sample with
    align_corners=False and padding by zeros.
    """
    height, width = size
    place = torch.stack([points[..., 0] * width - 0.5, points[..., 1] * height - 0.5], dim=-1)
    low = place.floor()
    share = place - low
    x = torch.stack([low[..., 0], low[..., 0] + 1] * 2, dim=-1)
    y = torch.stack([low[..., 1]] * 2 + [low[..., 1] + 1] * 2, dim=-1)
    right, down = share[..., :1], share[..., 1:]
    shares = torch.cat(
        [(1 - right) * (1 - down), right * (1 - down), (1 - right) * down, right * down], dim=-1
    )
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = y.clamp(0, height - 1).long() * width + x.clamp(0, width - 1).long()
    return places, shares * inside


def sample(maps: Tensor, points: Tensor) -> Tensor:
    """Maps (N, C, H, W) at points (N, P, 2) -> (N, C, P), for computations without a gradient."""
    grid = 2 * points[:, None] - 1
    return F.grid_sample(maps, grid.to(maps.dtype), align_corners=False)[:, :, 0]


def sample_each(maps: Tensor, points: Tensor) -> Tensor:
    """Maps (N, H, W), each at points of its own (N, P, 2) -> (N, P), with a gradient for the maps."""
    return SampleEach.apply(maps, points)


class SampleEach(torch.autograd.Function):
    """grid_sample of maps of one channel. Its gradient adds whole numbers, whose sum has no order."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, points: Tensor) -> Tensor:
        ctx.save_for_backward(points)
        ctx.shape = maps.shape
        return sample(maps[:, None], points)[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (points,) = ctx.saved_tensors
        _, height, width = ctx.shape
        places, shares = corners(points, (height, width))
        terms = (shares * gradient[..., None].to(shares.dtype)).flatten(1)  # (N, 4 P)
        sums = repeatable_sums(terms, places.flatten(1), height * width)
        return sums.to(gradient.dtype).unflatten(1, (height, width)), None


def repeatable_sums(terms: Tensor, places: Tensor, count: int) -> Tensor:
    """The sum of the terms (..., P) of each place (..., count), which has no order: of whole numbers."""
    step = terms.abs().amax().clamp(min=1e-30) / FIXED
    sums = torch.zeros(*terms.shape[:-1], count, dtype=torch.int64, device=terms.device)
    sums.scatter_add_(-1, places, (terms / step).round().long())
    return sums.to(step.dtype) * step


def sample_maps(maps: Tensor, points: Tensor) -> Tensor:
    """Maps (N, C, H, W), each at points of its own (N, P, 2) -> (N, C, P), with gradients for both."""
    if torch.is_grad_enabled() and not interpolates_repeatably(maps.device):
        return SampleMaps.apply(maps, points)
    return sample(maps, points)


class SampleMaps(torch.autograd.Function):
    """grid_sample whose gradient for the maps has no order of summation."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, points: Tensor) -> Tensor:
        ctx.save_for_backward(maps, points)
        return sample(maps, points)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        maps, points = ctx.saved_tensors
        size = (maps.shape[2], maps.shape[3])
        places, shares = corners(points, size)  # (N, P, 4)
        index = places.flatten(1)[:, None].expand(-1, maps.shape[1], -1)  # (N, C, 4 P)
        for_maps = for_points = None
        if ctx.needs_input_grad[0]:
            terms = (gradient[..., None].to(shares.dtype) * shares[:, None]).flatten(2)
            for_maps = repeatable_sums(terms, index, size[0] * size[1]).to(maps.dtype).unflatten(2, size)
        if ctx.needs_input_grad[1]:
            values = maps.flatten(2).gather(2, index).unflatten(2, places.shape[1:])  # (N, C, P, 4)
            of_corners = (values * gradient[..., None]).sum(1)  # (N, P, 4)
            for_points = (of_corners[..., None, :] * slopes(points, size)).sum(-1).to(points.dtype)
        return for_maps, for_points


def slopes(points: Tensor, size: tuple[int, int]) -> Tensor:
    """How the shares of the four cells change with x and y, (..., P, 2, 4)."""
    height, width = size
    place = torch.stack([points[..., 0] * width - 0.5, points[..., 1] * height - 0.5], dim=-1)
    low = place.floor()
    right, down = (place - low).unbind(-1)
    x, y = low.unbind(-1)
    columns = [(x + i >= 0) & (x + i < width) for i in (0, 1)]
    rows = [(y + i >= 0) & (y + i < height) for i in (0, 1)]
    inside = torch.stack([row & column for row in rows for column in columns], dim=-1)
    along_x = torch.stack([down - 1, 1 - down, -down, down], dim=-1) * width
    along_y = torch.stack([right - 1, -right, 1 - right, right], dim=-1) * height
    return torch.stack([along_x, along_y], dim=-2) * inside[..., None, :]


def sample_owners(owner: Tensor, points: Tensor, objects: int) -> Tensor:
    """The masks of T objects, of which each pixel has one or none, at the same points: (B, T, P).

    owner   (B, H, W) whole numbers: the object of each pixel, or -1
    points  (B, P, 2)

    As bilinear sampling of T masks of zeros and ones, without these masks in memory.
    """
    places, shares = corners(points, (owner.shape[1], owner.shape[2]))  # (B, P, 4)
    owners = owner.flatten(1).gather(1, places.flatten(1)).unflatten(1, places.shape[1:])
    own = torch.arange(objects, device=owner.device)[:, None, None]
    return ((owners[:, None] == own) * shares[:, None]).sum(-1)


def sample_own(owner: Tensor, points: Tensor) -> Tensor:
    """Masks of T objects, each at its own points: owner (B, H, W), points (B, T, P, 2) -> (B, T, P)."""
    places, shares = corners(points, (owner.shape[1], owner.shape[2]))  # (B, T, P, 4)
    owners = owner.flatten(1).gather(1, places.flatten(1)).view_as(places)
    own = torch.arange(points.shape[1], device=owner.device)[:, None, None]
    return ((owners == own) * shares).sum(-1)
