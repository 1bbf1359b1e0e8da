"""Scaled dot-product attention by the fastest kernel that a device has."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [  # fastest first on a GPU that has them all; each takes what those before it cannot
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
]  # fmt: skip


@contextmanager
def fastest_attention(device: torch.device | str) -> Iterator[None]:
    """Inside, PyTorch prefers cuDNN's attention on GPUs where it is the fastest kernel."""
    if prefers_cudnn(str(device)):
        with sdpa_kernel(BACKENDS, set_priority=True):
            yield
    else:
        yield


@cache
def prefers_cudnn(device: str) -> bool:
    """Whether cuDNN's attention is the fastest on a device: on Hopper GPUs and later ones."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
