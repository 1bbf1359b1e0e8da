"""Activation checkpointing: a block's inner results are computed again for the backward pass, not kept."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, *inputs: Any, again: bool) -> Tensor:
    """block(*inputs), to the same bits either way: dropout draws the same numbers the second time."""
    return checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
