"""Precision: the widest type that a device computes in, and products that autocast does not round."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def widest_float(device: torch.device | None) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def interpolates_repeatably(device: torch.device) -> bool:
    """Whether the gradient of PyTorch's interpolation is the same each time; on an NVIDIA GPU it is not."""
    return device.type != "cuda"


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context without autocast; on the meta device, which has no autocast, it does nothing."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in the tensors' own precision, also under autocast."""
    with without_autocast(right.device):
        return left @ right


def add_product(start: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """start + scale * left @ right in the tensors' own precision, also under autocast."""
    with without_autocast(start.device):
        return torch.addmm(start, left, right, alpha=scale)
