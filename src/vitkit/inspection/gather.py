"""All inspection maps for a few images, and summary statistics of the layers."""

# B batch, N patches, K heads, L layers; h, w grid of patches

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.errors import Error
from vitkit.inspection.attention import attention_rollout, class_map, distances, head_maps, register_maps
from vitkit.inspection.embeddings import feature_colours
from vitkit.inspection.subject import NO_HEAD, attention_count, grid_for, prefix_tokens
from vitkit.models.encoder import Grid
from vitkit.models.vit import ViT

LOCAL = 0.5  # a head is local if its distance is below this share of uniform attention's


def uniform_distance(model: ViT, grid: Grid) -> float | None:
    """The mean attention distance in pixels of uniform attention; None for axial attention."""
    if model.config.attention == "axial":
        return None
    patches = grid[0] * grid[1]
    return float(distances(grid, model.config.stride).mean()) * patches / (patches + prefix_tokens(model))


def distance_facts(distance: np.ndarray, uniform: float | None) -> dict[str, Any]:
    """Statistics of attention distances (L, K): per-layer mean and range, trend with depth, local heads.

    The slope is that of a linear fit to the layer means. The rank correlation is Spearman's between layer
    and mean, None if all means are equal.
    """
    values = np.asarray(distance, np.float64)
    mean, layers = values.mean(1), np.arange(len(values))
    varied = np.ptp(mean) > 1e-6 * max(1.0, np.abs(mean).max())  # beyond rounding errors
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
    """The mean similarity of a patch, from (h, w, h, w), to its neighbours, row, column and the rest."""
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
    return {
        name: round(float(values[mask].mean()), 6) if mask.any() else None for name, mask in pairs.items()
    }


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks in ascending order from 0; ties share their mean rank.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [1.5, 0.0, 1.5]
    """
    below, not_above = (values[:, None] > values).sum(1), (values[:, None] >= values).sum(1)
    return (below + not_above - 1) / 2


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in values]


WEIGHTS = 2**28  # memory limit for the attention weights of one layer, in bytes


@dataclass
class Gathered:
    """Inspection arrays by name, and the reasons for those that the model does not support."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, compute: Callable[[], np.ndarray]) -> None:
        """Add an array, or the reason why the model does not support it."""
        try:
            self.arrays[name] = compute()
        except Error as error:
            if error.code != "inspection.unsupported":
                raise
            self.skipped[name] = str(error)


def gather(model: ViT, images: Tensor, *, layer: int, targets: Sequence[Sequence[int]]) -> Gathered:
    """The rollout (B, h, w), head_maps (B, K, h, w), class_maps (len(targets), B, h, w) and feature_colours
    (B, h, w, 3) of normalised images. Each item of `targets` holds one class per image.
    """
    batch = batch_for(model, grid_for(model, images))
    result = Gathered()
    result.add("rollout", lambda: attention_rollout(model, images, batch=batch))
    result.add("head_maps", lambda: head_maps(model, images, layer=layer, batch=batch))
    if model.config.registers:
        result.add("register_maps", lambda: register_maps(model, images, layer=layer, batch=batch))
    if model.head is None:
        result.skipped["class_maps"] = NO_HEAD
    else:
        result.add(
            "class_maps",
            lambda: np.stack([class_map(model, images, target=t, batch=batch) for t in targets]),
        )
    result.add("feature_colours", lambda: feature_colours(model, images, batch=batch))
    return result


def batch_for(model: ViT, grid: Grid) -> int:
    """The batch size, 1 to 8, that keeps the attention weights of a layer within WEIGHTS bytes."""
    tokens = grid[0] * grid[1] + prefix_tokens(model)
    return max(1, min(8, WEIGHTS // (4 * model.config.heads * tokens**2)))


def check_layer(model: ViT, layer: int) -> None:
    """Raise an error if the model has no such layer, before anything is computed."""
    if model.config.depth and not -attention_count(model) <= layer < attention_count(model):
        raise Error(f"there is no layer {layer}: the model has layers 0 to {attention_count(model) - 1}")
