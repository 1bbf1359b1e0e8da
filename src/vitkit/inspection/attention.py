"""Attention distance, attention rollout, and class maps from attention gradients."""

# B batch, N patches, T tokens, D width, K heads, Dh head width, L layers; h, w grid of patches

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.inspection.subject import (
    array,
    at_least_float32,
    attention_count,
    batches,
    eval_mode,
    grid_for,
    prefix_tokens,
    transformer,
)
from vitkit.models.attention import AttentionPool
from vitkit.models.encoder import Block, Grid, scaled
from vitkit.models.rope import Turn
from vitkit.models.vit import ViT


def attention_distance(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """The mean attention distance in pixels of each layer and head, (L, K).

    For query patch q it is sum_k A[q, k] |p_q - p_k|, with p the patch positions in pixels, averaged over
    all queries and all images. The row and the column of the class token are left out and the rest is not
    renormalised: attention to the class token counts as distance 0.

    Images are normalised and of any size that the model takes. `batch` images are in memory at a time, with
    the weights of one layer. An axial layer has two rows: attention along rows, then along columns.
    """
    vit = transformer(model)
    grid, prefix = grid_for(vit, images), prefix_tokens(vit)
    between = distances(grid, vit.config.stride)  # (N, N)
    sums = np.zeros((attention_count(vit), vit.config.heads))
    with eval_mode(vit):
        for part in batches(vit, images, batch):
            for layer, weights in enumerate(vit.attention(part)):
                weights = at_least_float32(weights[:, :, prefix:, prefix:])
                by_query = torch.einsum("bkij,ij->bki", weights, between.to(weights))
                sums[layer] += by_query.mean(-1).sum(0).cpu().numpy()
    return (sums / len(images)).astype(np.float32)


def distances(grid: Grid, stride: int) -> Tensor:
    """Distances in pixels between the patches of a grid, (N, N), in raster order."""
    rows, columns = (torch.arange(n) * float(stride) for n in grid)
    positions = torch.cartesian_prod(rows, columns)  # (N, 2)
    return torch.linalg.vector_norm(positions[:, None] - positions[None], dim=-1)


def attention_rollout(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """Attention rollout: how much of each patch reaches what the head reads, (B, h, w), unscaled.

    R_0 = I;  R_l = rows of (mean over heads of A_l + I), each divided by its sum, times R_{l-1}

    For a class token head: its row of R_L, without the class column. For average pooling: the mean of the
    patch rows. For attention pooling: the patch rows weighted by the pooling weights (mean over heads).
    """
    vit = transformer(model)
    attention_count(vit)
    grid = grid_for(vit, images)
    with eval_mode(vit):
        maps = [rollout_batch(vit, part) for part in batches(vit, images, batch)]
    return np.concatenate([array(m) for m in maps]).reshape(-1, *grid)


def rollout_batch(model: ViT, images: Tensor) -> Tensor:
    """The rollout of one batch, (B, N)."""
    rollout = None
    for weights in model.attention(images):  # (B, K, T, T)
        step = at_least_float32(weights).mean(1)
        step = step + torch.eye(step.shape[-1], device=step.device, dtype=step.dtype)  # the residual path
        step = step / step.sum(-1, keepdim=True)
        rollout = step if rollout is None else step @ rollout
    assert rollout is not None
    prefix = prefix_tokens(model)
    if model.config.head == "token":
        return rollout[:, : model.config.lead, prefix:].mean(1)
    patches = rollout[:, prefix:, prefix:]
    if model.config.head == "token+gap":  # half of what the head reads is the class token
        return (rollout[:, 0, prefix:] + patches.mean(1)) / 2
    if model.pool is None:
        return patches.mean(1)
    pooling = pool_weights(model.pool, model.tokens(images)[:, prefix:]).mean(1)  # (B, 1, N)
    return (pooling.to(patches) @ patches)[:, 0]


def head_maps(
    model: Any, images: Tensor, *, layer: int, query: tuple[int, int] | None = None, batch: int = 8
) -> np.ndarray:
    """The raw attention weights of each head of one layer over the patches, (B, K, h, w).

    With `query` (row, column) these are that patch's row of A; without it the class token's row or, in a
    model without a class token, the mean over all patches. Negative layers count from the last. An axial
    layer counts as two: 2 l along the rows, 2 l + 1 along the columns.
    """
    vit = transformer(model)
    grid, prefix, count = grid_for(vit, images), prefix_tokens(vit), attention_count(vit)
    if not -count <= layer < count:
        raise Error(f"there is no layer {layer}: the model has layers 0 to {count - 1}")
    if query is not None and not all(0 <= index < side for index, side in zip(query, grid, strict=True)):
        raise Error(f"there is no patch {query}: the grid has {grid[0]} x {grid[1]} patches")
    maps = []
    with eval_mode(vit):
        for part in batches(vit, images, batch):
            weights = next(islice(vit.attention(part), layer % count, None))[..., prefix:]  # (B, K, T, N)
            if query is not None:
                row = weights[:, :, prefix + query[0] * grid[1] + query[1]]
            else:
                patches = at_least_float32(weights[:, :, prefix:])
                row = patches.mean(2) if vit.class_token is None else weights[:, :, 0]
            maps.append(array(row))
    return np.concatenate(maps).reshape(len(images), -1, *grid)


def register_maps(model: Any, images: Tensor, *, layer: int, batch: int = 8) -> np.ndarray:
    """How each register attends to the patches in one layer, mean over heads, (B, registers, h, w)."""
    vit = transformer(model)
    grid, prefix, count = grid_for(vit, images), prefix_tokens(vit), attention_count(vit)
    if not vit.config.registers:
        raise Error("this model has no registers", code="inspection.unsupported")
    if not -count <= layer < count:
        raise Error(f"there is no layer {layer}: the model has layers 0 to {count - 1}")
    maps = []
    with eval_mode(vit):
        for part in batches(vit, images, batch):
            weights = next(islice(vit.attention(part), layer % count, None))
            maps.append(array(at_least_float32(weights[:, :, vit.config.lead : prefix, prefix:]).mean(1)))
    return np.concatenate(maps).reshape(len(images), -1, *grid)


def pool_weights(pool: AttentionPool, z: Tensor) -> Tensor:
    """The attention weights of the pooling query over the patch tokens z, (B, K, 1, N)."""
    q = pool.query(pool.probe).unflatten(-1, (pool.heads, -1)).transpose(1, 2)  # (1, K, 1, Dh)
    k = pool.key_value(z).unflatten(-1, (2, pool.heads, -1))[:, :, 0].transpose(1, 2)  # (B, K, N, Dh)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def class_map(model: Any, images: Tensor, *, target: int | Sequence[int], batch: int = 8) -> np.ndarray:
    """The relevance of each patch for a class, (B, h, w), at least 0; one target for all images or one each.

    With y the logit of the class and A_l the attention weights of layer l (Chefer et al., 2021):

        C_l = mean over heads of the positive part of (dy / dA_l) * A_l
        R   = (I + C_L) ... (I + C_1),  rows not renormalised

    For a class token head: its row of R, without the class column. For average pooling: the mean of the
    patch rows, less the 1 / N that I alone gives every patch. For attention pooling: c R, with c the same
    product, positive part and mean for the pooling weights.

    Only the inputs of the layers are kept. The backward pass recomputes each layer with explicit attention
    weights, so the weights of one layer and their gradients are in memory at a time.
    """
    vit = transformer(model)
    if vit.config.attention == "axial":
        raise Error(
            "class maps need attention over all patches in each layer; this model has axial attention",
            code="inspection.unsupported",
        )
    if vit.head is None:
        raise Error(
            "this model has no classification head; fine-tune it first",
            code="inspection.unsupported",
        )
    attention_count(vit)
    grid = grid_for(vit, images)
    maps = []
    with torch.inference_mode(False), eval_mode(vit):
        targets = check_targets(target, images=len(images), classes=vit.config.classes)
        for part, classes in zip(batches(vit, images, batch), targets.split(batch), strict=True):
            maps.append(array(class_map_batch(vit, part, classes.to(part.device))))
    return np.concatenate(maps).reshape(-1, *grid)


def check_targets(target: int | Sequence[int], *, images: int, classes: int) -> Tensor:
    """The target class of each image, (B,)."""
    targets = torch.as_tensor(target)
    if targets.ndim == 0:
        targets = targets.expand(images)
    if targets.shape != (images,) or targets.is_floating_point():
        raise Error(f"target must be one class, or one for each of the {images} images: {target}")
    if targets.min() < 0 or targets.max() >= classes:
        raise Error(f"target must be a class from 0 to {classes - 1}: {target}")
    return targets.long()


def class_map_batch(model: ViT, images: Tensor, classes: Tensor) -> Tensor:
    """The class maps of one batch, (B, N): one row of R, propagated from the last layer to the first."""
    patches, grid = model.patches(images)
    states = model.encoder.states(model.embed(patches, grid), grid, model.inject(grid))
    *inputs, last = states
    gradient, start = head_gradient(model, last, classes)
    added = torch.zeros_like(start)  # start R - start
    norm: nn.Module = model.encoder.norm  # already applied to the last state
    for block, z in zip(reversed(model.encoder.blocks), reversed(inputs), strict=True):
        assert isinstance(block, Block)
        # adding positions keeps the gradient
        gradient, relevance = layer_gradient(block, z, gradient, norm, model.encoder.turn(grid))
        added = added + ((start + added)[:, None] @ relevance)[:, 0]
        norm = nn.Identity()
    prefix = prefix_tokens(model)
    return (added if model.pool is None else start + added)[:, prefix:]


def head_gradient(model: ViT, z: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """dy/dz at the encoder's output (B, T, D), and the row (B, T) of R that the head starts from."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        logits, weights = written_head(model, z)
        y = logits.gather(1, classes[:, None]).sum()
        inputs = [z] if weights is None else [z, weights]
        gradient, *rest = torch.autograd.grad(y, inputs)
    prefix = prefix_tokens(model)
    start = at_least_float32(torch.zeros_like(z[..., 0]))
    if weights is not None:
        start[:, prefix:] = positive(weights, rest[0])[:, 0]
    elif model.config.head == "token":
        start[:, : model.config.lead] = 1 / model.config.lead
    else:
        share = 1.0
        if model.config.head == "token+gap":
            start[:, 0] = share = 0.5
        start[:, prefix:] = share / (z.shape[1] - prefix)
    return gradient, start


def layer_gradient(
    block: Block, z: Tensor, gradient: Tensor, norm: nn.Module, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    """dy/dz before a layer, given dy/dz after the layer and `norm`, and C_l (B, T, T)."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        out, weights = written_layer(block, z, turn)
        before, by_weight = torch.autograd.grad(norm(out), (z, weights), gradient)
    return before, positive(weights, by_weight)


def positive(weights: Tensor, gradient: Tensor) -> Tensor:
    """The mean over heads of the positive part of weights times gradient: (B, K, ...) -> (B, ...)."""
    return at_least_float32(weights.detach() * gradient).clamp(min=0).mean(1)


def written_layer(block: Block, z: Tensor, turn: Turn | None = None) -> tuple[Tensor, Tensor]:
    """A layer (Eq. 2-3) with explicit attention weights (Eq. 6-7): its output, and A."""
    x = block.norm1(z)
    weights = block.attention.weights(x, turn)  # (B, K, T, T), Eq. 6
    mixed = weights @ block.attention.project(x)[2]  # Eq. 7
    z = z + scaled(block.attention.out(mixed.transpose(1, 2).flatten(2)), block.scale1)  # Eq. 8, 2
    return z + scaled(block.mlp(block.norm2(z)), block.scale2), weights  # Eq. 3


def written_head(model: ViT, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits from the encoder's output, and the weights (B, K, 1, N) of an attention pooling, or None."""
    assert model.head is not None
    patches, weights, pool = z[:, prefix_tokens(model) :], None, model.pool
    if pool is not None:
        weights = pool_weights(pool, patches)
        v = pool.key_value(patches).unflatten(-1, (2, pool.heads, -1))[:, :, 1].transpose(1, 2)
        y = pool.out((weights @ v).transpose(1, 2).flatten(2))  # (B, 1, D)
        y = (y + pool.mlp(pool.norm(y)))[:, 0]
    elif model.config.head == "gap":
        y = patches.mean(1)
        y = y if model.pool_norm is None else model.pool_norm(y)
    elif model.config.head == "token+gap":
        y = torch.cat([z[:, 0], patches.mean(1)], dim=-1)
    else:
        y = z[:, : model.config.lead].flatten(1)  # Eq. 4
    return model.forward_head(model.represented(y)), weights
