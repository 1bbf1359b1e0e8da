"""Token features as colours: their three main directions over the grid."""

# B batch, N patches, D width; h, w grid of patches

from typing import Any

import numpy as np
from torch import Tensor

from vitkit.inspection.components import principal
from vitkit.inspection.subject import array, batches, grid_for, lead_of, still, transformer


def feature_colours(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """The first three principal components of the patch tokens, (B, h, w, 3), each stretched to 0..1.

    The tokens are the encoder's output without the class token. The components, and the stretching, are
    those of all the images together, so that one colour means one thing in all of them; images shown one
    at a time get colours of their own. A direction in which nothing differs is 0.
    """
    vit = transformer(model)
    grid, lead = grid_for(vit, images), lead_of(vit)
    with still(vit):
        tokens = [array(vit.tokens(part)[:, lead:]) for part in batches(vit, images, batch)]
    rows = np.concatenate(tokens).reshape(-1, vit.config.width)  # (B*N, D)
    found = principal(rows, 3)
    values = np.zeros((len(rows), 3))
    values[:, : len(found.axes)] = (rows - found.mean) @ found.axes.T
    low, high = values.min(0), values.max(0)
    flat = high - low <= 1e-6 * np.abs(rows).max()  # rounding, not a difference
    colours = np.where(flat, 0.0, (values - low) / np.where(flat, 1.0, high - low))
    return colours.reshape(-1, *grid, 3).astype(np.float32)
