"""Collective operations for modules, which know no Runtime: over the processes of the run."""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_processes(value: Tensor) -> Tensor:
    """The sum over all processes, in place and without gradients; one process: the value itself."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """The rows of all processes in rank order, without gradients, and the place of this process's first one.

    Every process must have the same number of rows.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows, 0
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts), dist.get_rank() * len(rows)
