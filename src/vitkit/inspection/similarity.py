"""Cosine similarity of position embeddings (Fig. 7 centre, Fig. 10)."""

# N patches, D width; H, W pixels; h, w grid of patches

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.errors import Error
from vitkit.inspection.subject import array, lead_of, transformer
from vitkit.models.vit import grid_of

WITHOUT = {
    "none": "this model has no position embeddings to compare",
    "relative": "relative positions embed the offsets between two tokens, so that no patch has an "
    "embedding to compare",
}


def position_similarity(
    model: Any, *, image_size: tuple[int, int] | None = None, layer: int = 0
) -> np.ndarray:
    """Entry [i, j, k, l]: the cosine of the embeddings of patches (i, j) and (k, l), as (h, w, h, w).

    The class token's entry is left out. `image_size` (H, W) asks for the table as it is resized for such
    images; `layer` chooses one where each layer has a table of its own.
    """
    vit = transformer(model)
    c = vit.config
    if c.positions in WITHOUT:
        raise Error(WITHOUT[c.positions], code="inspection.unsupported")
    layers = c.depth if c.injection == "every" else 1
    if not 0 <= layer < layers:
        held = f"tables for layers 0 to {layers - 1}" if layers > 1 else "one table only, that of layer 0"
        raise Error(f"there is no position table of layer {layer}: the model holds {held}")
    grid = c.grid if image_size is None else grid_of(image_size, c.stride)
    with torch.no_grad():
        table = vit.positions.at(grid, layer, device=vit.project.weight.device)
        unit = F.normalize(table[0, lead_of(vit) :].float(), dim=-1)  # (N, D)
        return array((unit @ unit.mT).clamp(-1, 1).view(*grid, *grid))
