"""How far attention reaches: the mean attention distance (Fig. 7 right, Fig. 11, App. D.7)."""

# B batch, N patches, K heads, L layers; h, w grid of patches

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.inspection.subject import (
    at_least_single,
    attentions,
    batches,
    grid_for,
    lead_of,
    still,
    transformer,
)
from vitkit.models.encoder import Grid


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
