"""Attention: how far it reaches, its rollout through all layers, and the map of one class."""

# B batch, N patches, T tokens, D width, K heads, L layers; h, w grid of patches
# B batch, N patches, K heads, L layers; h, w grid of patches
# B batch, N patches, T tokens, K heads, Dh head width; h, w grid of patches

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
from vitkit.models.encoder import Block, Grid, scaled
from vitkit.models.vit import ViT


def attention_distance(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """The mean attention distance in pixels of each layer and head, (L, K).

    For query patch q it is sum_k A[q, k] |p_q - p_k|, with p the places of the patches in pixels, averaged
    over all queries and all images. The row and the column of the class token are left out, and the rest
    is not renormalised: what a patch pays to the class token counts as no distance.

    Images are normalised and of any size that fits; `batch` of them are in memory at a time, with the
    weights of one layer. An axial layer has two rows here: attention along rows, then along columns.
    """
    vit = transformer(model)
    grid, lead = grid_for(vit, images), lead_of(vit)
    between = distances(grid, vit.config.stride)  # (N, N)
    sums = np.zeros((attentions(vit), vit.config.heads))
    with still(vit):
        for part in batches(vit, images, batch):
            for layer, weights in enumerate(vit.attention(part)):
                weights = at_least_single(weights[:, :, lead:, lead:])
                by_query = torch.einsum("bkij,ij->bki", weights, between.to(weights))
                sums[layer] += by_query.mean(-1).sum(0).cpu().numpy()
    return (sums / len(images)).astype(np.float32)


def distances(grid: Grid, stride: int) -> Tensor:
    """Pixels from each patch of a grid to each other, (N, N), in raster order."""
    rows, columns = (torch.arange(n) * float(stride) for n in grid)
    places = torch.cartesian_prod(rows, columns)  # (N, 2)
    return torch.linalg.vector_norm(places[:, None] - places[None], dim=-1)


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


def class_map(model: Any, images: Tensor, *, target: int | Sequence[int], batch: int = 8) -> np.ndarray:
    """How much each patch speaks for a class, one for all images or one for each: (B, h, w), at least 0.

    With y the logit of the class and A_l the attention weights of layer l (Chefer et al., 2021):

        C_l = mean over heads of the positive part of (dy / dA_l) * A_l
        R   = (I + C_L) ... (I + C_1),  rows not renormalised

    With the class token as the head: its row of R, without its class column. With average pooling: the
    mean of the rows of the patches, less the 1 / N that I alone would give to every patch. With attention
    pooling: c R with c the same product, positive part and mean for the weights of the pooling.

    Only the inputs of the layers are kept. Going back, each layer is computed again with its attention
    written out, so the weights of one layer, and their gradients, are in memory at a time.
    """
    vit = transformer(model)
    if vit.config.attention == "axial":
        raise Error(
            "class maps need one attention over all patches in each layer; this model is axial",
            code="inspection.unsupported",
        )
    if vit.head is None:
        raise Error(
            "this model has no head, and so no logit of a class; fine-tune it first",
            code="inspection.unsupported",
        )
    attentions(vit)
    grid = grid_for(vit, images)
    maps = []
    with torch.inference_mode(False), still(vit):
        wanted = targets(target, images=len(images), classes=vit.config.classes)
        for part, classes in zip(batches(vit, images, batch), wanted.split(batch), strict=True):
            maps.append(array(explained(vit, part, classes.to(part.device))))
    return np.concatenate(maps).reshape(-1, *grid)


def targets(target: int | Sequence[int], *, images: int, classes: int) -> Tensor:
    """The class of each image, (B,), checked."""
    wanted = torch.as_tensor(target)
    if wanted.ndim == 0:
        wanted = wanted.expand(images)
    if wanted.shape != (images,) or wanted.is_floating_point():
        raise Error(f"target must be one class, or one for each of the {images} images: {target}")
    if wanted.min() < 0 or wanted.max() >= classes:
        raise Error(f"target must be a class from 0 to {classes - 1}: {target}")
    return wanted.long()


def explained(model: ViT, images: Tensor, classes: Tensor) -> Tensor:
    """The maps of one batch, (B, N), with one row of R carried from the last layer to the first."""
    patches, grid = model.patches(images)
    states = model.encoder.states(model.embed(patches, grid), grid, model.inject(grid))
    *inputs, last = states
    gradient, start = from_head(model, last, classes)
    added = torch.zeros_like(start)  # start R - start
    norm: nn.Module = model.encoder.norm  # the last state has been through it
    for block, z in zip(reversed(model.encoder.blocks), reversed(inputs), strict=True):
        assert isinstance(block, Block)
        gradient, relevance = from_layer(block, z, gradient, norm)  # positions are added: the same gradient
        added = added + ((start + added)[:, None] @ relevance)[:, 0]
        norm = nn.Identity()
    lead = lead_of(model)
    return (added if model.pool is None else start + added)[:, lead:]


def from_head(model: ViT, z: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """dy/dz at the encoder's output (B, T, D), and the row (B, T) with which the head begins."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        logits, weights = written_head(model, z)
        y = logits.gather(1, classes[:, None]).sum()
        wanted = [z] if weights is None else [z, weights]
        gradient, *rest = torch.autograd.grad(y, wanted)
    lead = lead_of(model)
    start = at_least_single(torch.zeros_like(z[..., 0]))
    if weights is not None:
        start[:, lead:] = positive(weights, rest[0])[:, 0]
    elif model.config.head == "token":
        start[:, 0] = 1
    else:
        start[:, lead:] = 1 / (z.shape[1] - lead)
    return gradient, start


def from_layer(block: Block, z: Tensor, gradient: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """dy/dz before a layer from dy/dz after it (and after `norm`), and C_l, (B, T, T)."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        out, weights = written_layer(block, z)
        before, by_weight = torch.autograd.grad(norm(out), (z, weights), gradient)
    return before, positive(weights, by_weight)


def positive(weights: Tensor, gradient: Tensor) -> Tensor:
    """The mean over heads of the positive part of weights times gradient: (B, K, ...) -> (B, ...)."""
    return at_least_single(weights.detach() * gradient).clamp(min=0).mean(1)


def written_layer(block: Block, z: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 2-3 with the attention of Eq. 6-7 written out: the layer's output, and A."""
    x = block.norm1(z)
    weights = block.attention.weights(x)  # (B, K, T, T), Eq. 6
    mixed = weights @ block.attention.project(x)[2]  # Eq. 7
    z = z + scaled(block.attention.out(mixed.transpose(1, 2).flatten(2)), block.scale1)  # Eq. 8, 2
    return z + scaled(block.mlp(block.norm2(z)), block.scale2), weights  # Eq. 3


def written_head(model: ViT, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits from the encoder's output, and the weights (B, K, 1, N) of the attention pooling, if any."""
    assert model.head is not None
    patches, weights, pool = z[:, lead_of(model) :], None, model.pool
    if pool is not None:
        weights = pool_weights(pool, patches)
        v = pool.key_value(patches).unflatten(-1, (2, pool.heads, -1))[:, :, 1].transpose(1, 2)
        y = pool.out((weights @ v).transpose(1, 2).flatten(2))  # (B, 1, D)
        y = (y + pool.mlp(pool.norm(y)))[:, 0]
    elif model.config.head == "gap":
        y = patches.mean(1)
        y = y if model.pool_norm is None else model.pool_norm(y)
    else:
        y = z[:, 0]  # Eq. 4
    y = y if model.representation is None else model.representation(y).tanh()
    return model.head(y), weights
