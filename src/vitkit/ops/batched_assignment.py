"""The assignment of least cost for many small problems together, on their device and without a sync."""

# B problems, T rows, Q columns

import numpy as np
import torch
from torch import Tensor

from vitkit.ops.assignment import linear_assignment
from vitkit.ops.precision import widest_float

STATIC = 16  # rows up to which the tensor form is used: its operations grow with the square of them
LARGEST = 1e10  # of a cost


def assign(costs: Tensor, real: Tensor) -> Tensor:
    """The column of each row, (B, T), all different, so that the sum of the costs of real rows is least.

    costs  (B, T, Q), T <= Q; values that are not finite count as the largest
    real   (B, T) bool: the other rows are padding and get any of the columns that are left

    Up to 16 rows it takes a fixed number of operations on the device, which a CUDA graph can hold; more rows
    are solved on the CPU.
    """
    costs = torch.nan_to_num(costs.float(), nan=LARGEST).clamp(-LARGEST, LARGEST) * real[..., None]
    assert costs.shape[1] <= costs.shape[2], "a column for each row"
    return assign_on_device(costs) if costs.shape[1] <= STATIC else assign_on_cpu(costs, real)


def assign_on_cpu(costs: Tensor, real: Tensor) -> Tensor:
    """`assign` by NumPy, one problem after another."""
    rows, mask = costs.detach().cpu().numpy(), real.cpu().numpy()
    result = np.empty(rows.shape[:2], np.int64)
    for columns, cost, own in zip(result, rows, mask, strict=True):
        columns[own] = linear_assignment(cost[own])[1]
        left = np.setdiff1d(np.arange(cost.shape[1]), columns[own])
        columns[~own] = left[: len(cost) - own.sum()]
    return torch.from_numpy(result).to(costs.device)


def assign_on_device(costs: Tensor) -> Tensor:
    """`assign` by shortest augmenting paths, row by row, all problems together.

    The search for the path of row i takes at most i + 1 steps; problems that need fewer wait.
    """
    b, t, q = costs.shape
    costs = costs.to(widest_float(costs.device))
    row_price, column_price = costs.new_zeros(b, t + 1), costs.new_zeros(b, q)
    owner = torch.full((b, q), t, device=costs.device)  # row of each column; t: none
    costs = torch.cat([costs, costs.new_zeros(b, 1, q)], dim=1)  # a row t, which is never chosen
    for row in range(t):
        before, ends = shortest_path(costs, row, row_price, column_price, owner)
        owner = turned(owner, before, ends, row)
    column = torch.zeros(b, t + 1, dtype=torch.int64, device=costs.device)
    return column.scatter_(1, owner, torch.arange(q, device=costs.device).expand(b, -1))[:, :t]


def shortest_path(
    costs: Tensor, start: int, row_price: Tensor, column_price: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor]:
    """Dijkstra from one row to a free column; prices are updated in place.

    Returns for each column the one before it on its path, (B, Q), or -1 at the start; and the last, (B, 1).
    """
    b, _, q = costs.shape
    none = costs.shape[1] - 1
    distance = costs.new_full((b, q), float("inf"))
    before = torch.full((b, q), -1, device=costs.device)
    done = torch.zeros(b, q, dtype=torch.bool, device=costs.device)
    row = torch.full((b, 1), start, device=costs.device)
    last, reached = torch.full((b, 1), -1, device=costs.device), costs.new_zeros(b, 1)
    for _ in range(start + 1):
        of_row = costs.gather(1, row[..., None].expand(-1, -1, q))[:, 0]
        through = reached + of_row - row_price.gather(1, row) - column_price
        closer = (through < distance) & ~done & (row < none)
        distance, before = torch.where(closer, through, distance), torch.where(closer, last, before)
        best = distance.masked_fill(done, float("inf")).argmin(1, keepdim=True)
        going = row < none  # whether no free column was reached before
        last = torch.where(going, best, last)
        reached = torch.where(going, distance.gather(1, best), reached)
        row = torch.where(going, owner.gather(1, best), row)
        done = done.scatter(1, last, done.gather(1, last) | (row < none))
    gained = torch.where(done, reached - distance, 0.0)
    column_price -= gained
    row_price.scatter_add_(1, owner, gained)
    row_price[:, start : start + 1] += reached
    return before, last


def turned(owner: Tensor, before: Tensor, column: Tensor, start: int) -> Tensor:
    """The owners after the path that ends at a column is turned around."""
    for _ in range(start + 1):
        earlier = before.gather(1, column.clamp(min=0))
        new = torch.where(earlier < 0, start, owner.gather(1, earlier.clamp(min=0)))
        changed = owner.scatter(1, column.clamp(min=0), new)
        owner = torch.where(column < 0, owner, changed)
        column = torch.where(column < 0, column, earlier)
    return owner
