"""Attention maps: rollout through all layers (Fig. 6, App. D.8), and the heads of one layer."""

# B batch, N patches, T tokens, K heads, Dh head width; h, w grid of patches

from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import Error
from vitkit.inspection.subject import (
    array,
    at_least_single,
    attentions,
    batches,
    grid_for,
    lead_of,
    still,
    transformer,
)
from vitkit.models.attention import AttentionPool
from vitkit.models.vit import ViT


def attention_rollout(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """How much of each patch reaches what the head reads, (B, h, w), as raw numbers.

    R_0 = I;  R_l = rows of (mean over heads of A_l + I), each divided by its sum, times R_{l-1}

    With the class token as the head: its row of R_L, without its class column. With average pooling: the
    mean of the rows of the patches, since that is what the head reads. With attention pooling: the rows
    of the patches weighted as the pooling weighs them (mean over heads). Nothing is scaled afterwards.
    """
    vit = transformer(model)
    attentions(vit)
    grid = grid_for(vit, images)
    with still(vit):
        maps = [rolled(vit, part) for part in batches(vit, images, batch)]
    return np.concatenate([array(m) for m in maps]).reshape(-1, *grid)


def rolled(model: ViT, images: Tensor) -> Tensor:
    """The rollout maps of one batch, (B, N)."""
    rollout = None
    for weights in model.attention(images):  # (B, K, T, T)
        step = at_least_single(weights).mean(1)
        step = step + torch.eye(step.shape[-1], device=step.device, dtype=step.dtype)  # the residual path
        step = step / step.sum(-1, keepdim=True)
        rollout = step if rollout is None else step @ rollout
    assert rollout is not None
    lead = lead_of(model)
    if model.config.head == "token":
        return rollout[:, 0, lead:]
    patches = rollout[:, lead:, lead:]
    if model.pool is None:
        return patches.mean(1)
    reads = pool_weights(model.pool, model.tokens(images)[:, lead:]).mean(1)  # (B, 1, N)
    return (reads.to(patches) @ patches)[:, 0]


def head_maps(
    model: Any, images: Tensor, *, layer: int, query: tuple[int, int] | None = None, batch: int = 8
) -> np.ndarray:
    """What each head of one layer looks at, (B, K, h, w): its weights, as they are.

    Asked for patch `query` (row, column) it is that patch's row of A; without, the class token's, or where
    there is none the mean of the rows of all patches. A layer below 0 counts from the last. An axial layer
    counts as two: 2 l along the rows, 2 l + 1 along the columns.
    """
    vit = transformer(model)
    grid, lead, count = grid_for(vit, images), lead_of(vit), attentions(vit)
    if not -count <= layer < count:
        raise Error(f"there is no layer {layer}: the model's are 0 to {count - 1}")
    if query is not None and not all(0 <= place < side for place, side in zip(query, grid, strict=True)):
        raise Error(f"there is no patch {query} on a grid of {grid[0]} x {grid[1]} patches")
    maps = []
    with still(vit):
        for part in batches(vit, images, batch):
            weights = next(islice(vit.attention(part), layer % count, None))[..., lead:]  # (B, K, T, N)
            if query is not None:
                row = weights[:, :, lead + query[0] * grid[1] + query[1]]
            else:
                row = weights[:, :, 0] if lead else at_least_single(weights).mean(2)
            maps.append(array(row))
    return np.concatenate(maps).reshape(len(images), -1, *grid)


def pool_weights(pool: AttentionPool, z: Tensor) -> Tensor:
    """What the query of the attention pooling looks at, (B, K, 1, N); z is what the pooling is given."""
    q = pool.query(pool.probe).unflatten(-1, (pool.heads, -1)).transpose(1, 2)  # (1, K, 1, Dh)
    k = pool.key_value(z).unflatten(-1, (2, pool.heads, -1))[:, :, 0].transpose(1, 2)  # (B, K, N, Dh)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
