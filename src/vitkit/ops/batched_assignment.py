"""The assignment of least cost for many problems together: a kernel on an NVIDIA GPU, NumPy elsewhere.

The kernel reads nothing back, so that a CUDA graph can hold it.
"""

# B problems, T rows, Q columns; of a match Q predictions, M objects

import importlib.util

import numpy as np
import torch
from torch import Tensor

from vitkit.ops.assignment import linear_assignment
from vitkit.ops.custom_op import custom_op

AVAILABLE = importlib.util.find_spec("triton") is not None
MOST = 4096  # rows and columns of the kernel
LARGEST = 1e5  # of a cost
UNUSED = 1e9  # cost of an object that is not there, more than any number of others


def match(costs: Tensor, real: Tensor) -> Tensor:
    """The object of each prediction, (B, Q), or -1, so that the sum of the costs of all pairs is least.

    costs  (B, Q, M); values that are not finite count as the largest
    real   (B, M) bool: the objects that are there; of more objects than predictions some are left out
    """
    b, q, m = costs.shape
    if m > q:
        every = torch.ones(b, q, dtype=torch.bool, device=costs.device)
        objects = solved(torch.where(real[:, None], finite(costs), UNUSED), every)
        return torch.where(real.gather(1, objects), objects, -1)
    rows = torch.full((b, q + 1), -1, device=costs.device)  # the last place is that of objects not there
    places = torch.where(real, assign(costs.mT, real), q)
    return rows.scatter(1, places, torch.arange(m, device=costs.device).expand(b, -1))[:, :q]


def assign(costs: Tensor, real: Tensor) -> Tensor:
    """The column of each row, (B, T), all different, so that the sum of the costs of real rows is least.

    costs  (B, T, Q), T <= Q; values that are not finite count as the largest
    real   (B, T) bool: the other rows are padding and get any of the columns that are left
    """
    assert costs.shape[1] <= costs.shape[2], "a column for each row"
    return solved(finite(costs), real)


def finite(costs: Tensor) -> Tensor:
    return torch.nan_to_num(costs.detach().float(), nan=LARGEST).clamp(-LARGEST, LARGEST)


def solved(costs: Tensor, real: Tensor) -> Tensor:
    """`assign` for finite costs."""
    if costs.is_meta or (costs.is_cuda and AVAILABLE and max(costs.shape[1:]) <= MOST):
        return assign_by_kernel(costs, real)
    rows, mask = costs.cpu().numpy(), real.cpu().numpy()
    result = np.empty(rows.shape[:2], np.int64)
    for columns, cost, own in zip(result, rows, mask, strict=True):
        columns[own] = linear_assignment(cost[own])[1]
        left = np.setdiff1d(np.arange(cost.shape[1]), columns[own])
        columns[~own] = left[: len(cost) - own.sum()]
    return torch.from_numpy(result).to(costs.device)


def empty_columns(costs: Tensor, real: Tensor) -> Tensor:
    return torch.empty(costs.shape[:2], dtype=torch.int64, device=costs.device)


@custom_op(empty_columns)
def assign_by_kernel(costs: Tensor, real: Tensor) -> Tensor:
    """`assign` for finite costs on an NVIDIA GPU."""
    from vitkit.ops import assignment_kernel  # Triton is slow to import

    return assignment_kernel.assign_columns(costs, real)
