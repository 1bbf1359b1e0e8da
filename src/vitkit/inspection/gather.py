"""Everything that a few images show of a model, and a summary of its layers."""

# B batch, N patches, T tokens, K heads; h, w grid of patches
# L layers, K heads; h, w grid of patches

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.errors import Error
from vitkit.inspection.attention import attention_rollout, class_map, distances, head_maps
from vitkit.inspection.embeddings import feature_colours
from vitkit.inspection.subject import attentions, grid_for, lead_of
from vitkit.models.encoder import Grid
from vitkit.models.vit import ViT

LOCAL = 0.5  # a head that reaches less than this share of uniform attention is called local


def uniform_distance(model: ViT, grid: Grid) -> float | None:
    """The mean distance in pixels when every token looks at all tokens alike.

    None for axial attention, which looks along one row or one column at a time.
    """
    if model.config.attention == "axial":
        return None
    patches = grid[0] * grid[1]
    return float(distances(grid, model.config.stride).mean()) * patches / (patches + lead_of(model))


def distance_facts(distance: np.ndarray, uniform: float | None) -> dict[str, Any]:
    """Of distances (L, K): mean, least and greatest in each layer, growth with depth, and local heads.

    The slope is that of a straight line through the means of the layers; the rank correlation is
    Spearman's between layer and mean, None where one layer, or none of them, differs.
    """
    values = np.asarray(distance, np.float64)
    mean, layers = values.mean(1), np.arange(len(values))
    varied = np.ptp(mean) > 1e-6 * max(1.0, np.abs(mean).max())  # and not by rounding alone
    facts = {
        "unit": "pixels",
        "mean": rounded(mean),
        "least": rounded(values.min(1)),
        "greatest": rounded(values.max(1)),
        "slope_per_layer": round(float(np.polyfit(layers, mean, 1)[0]), 6) if len(mean) > 1 else None,
        "rank_correlation": round(correlation(ranks(layers), ranks(mean)), 6) if varied else None,
        "uniform": None if uniform is None else round(uniform, 6),
    }
    if uniform:
        local = (values < LOCAL * uniform).sum(1)
        facts |= {"local_below": round(LOCAL * uniform, 6), "local_heads": local.tolist()}
        facts |= {"other_heads": (values.shape[1] - local).tolist()}
    return facts


def similarity_facts(similarity: np.ndarray) -> dict[str, float | None]:
    """Mean cosines (h, w, h, w) of a patch with its four neighbours, its row, its column and the rest."""
    h, w = similarity.shape[:2]
    row, column = np.indices((h, w)).reshape(2, -1)
    down, right = abs(row[:, None] - row), abs(column[:, None] - column)  # (N, N)
    values = similarity.reshape(h * w, h * w)
    pairs = {
        "neighbours": down + right == 1,
        "same_row": (down == 0) & (right > 0),
        "same_column": (right == 0) & (down > 0),
        "elsewhere": (down > 0) & (right > 0),
    }
    return {name: round(float(values[of].mean()), 6) if of.any() else None for name, of in pairs.items()}


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order from 0; equal values share the mean of theirs.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [1.5, 0.0, 1.5]
    """
    below, not_above = (values[:, None] > values).sum(1), (values[:, None] >= values).sum(1)
    return (below + not_above - 1) / 2


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in values]


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
