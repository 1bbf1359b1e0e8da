"""Values of maps at points between their cells, with a gradient that is the same bit for bit each time."""

# N maps, P points, T objects; H, W cells; points are (x, y) from 0 to 1 across the map

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FIXED = 2.0**40  # steps of a sum in whole numbers between 0 and the largest summand


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
        step = terms.abs().amax().clamp(min=1e-30) / FIXED
        sums = torch.zeros(len(terms), height * width, dtype=torch.int64, device=terms.device)
        sums.scatter_add_(1, places.flatten(1), (terms / step).round().long())
        return (sums.to(step.dtype) * step).to(gradient.dtype).unflatten(1, (height, width)), None


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
