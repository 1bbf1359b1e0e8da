"""Everything that a few images show of a model; what a model does not have is told and left out."""

# B batch, N patches, T tokens, K heads; h, w grid of patches

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from vitkit.errors import Error
from vitkit.inspection.classmap import class_map
from vitkit.inspection.features import feature_colours
from vitkit.inspection.rollout import attention_rollout, head_maps
from vitkit.inspection.subject import attentions, grid_for, lead_of
from vitkit.models.encoder import Grid
from vitkit.models.vit import ViT

WEIGHTS = 2**28  # bytes of attention weights of one layer that are in memory at a time


@dataclass
class Gathered:
    """Arrays by name, and for what there is none the reason."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], np.ndarray]) -> None:
        """One array, or the reason why the model has none of this kind."""
        try:
            self.arrays[name] = make()
        except Error as error:
            if error.code != "inspection.unsupported":
                raise
            self.skipped[name] = str(error)


def gather(model: ViT, images: Tensor, *, layer: int, targets: Sequence[Sequence[int]]) -> Gathered:
    """rollout (B, h, w), head_maps (B, K, h, w), class_maps (one for each of `targets`, B, h, w) and
    feature_colours (B, h, w, 3) of normalised images. Each target names a class for every image.
    """
    batch = batch_for(model, grid_for(model, images))
    found = Gathered()
    found.add("rollout", lambda: attention_rollout(model, images, batch=batch))
    found.add("head_maps", lambda: head_maps(model, images, layer=layer, batch=batch))
    if model.head is None:
        found.skipped["class_maps"] = "this model has no head, and so no classes to explain"
    else:
        found.add(
            "class_maps",
            lambda: np.stack([class_map(model, images, target=t, batch=batch) for t in targets]),
        )
    found.add("feature_colours", lambda: feature_colours(model, images, batch=batch))
    return found


def batch_for(model: ViT, grid: Grid) -> int:
    """Images at a time, 1 to 8, such that the attention weights of a layer stay small."""
    tokens = grid[0] * grid[1] + lead_of(model)
    return max(1, min(8, WEIGHTS // (4 * model.config.heads * tokens**2)))


def check_layer(model: ViT, layer: int) -> None:
    """Before anything is computed: whether the layer is one of the model's."""
    if model.config.depth and not -attentions(model) <= layer < attentions(model):
        raise Error(f"there is no layer {layer}: the model's are 0 to {attentions(model) - 1}")
