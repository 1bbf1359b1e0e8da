"""Where a model looks in one picture: every head of every layer, the rollout, and the map of a class."""

# L layers, K heads, T tokens, N patches; H, W pixels; h, w grid of patches

from base64 import b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.inspection.classmap import class_map
from vitkit.inspection.rollout import attention_rollout
from vitkit.inspection.subject import (
    array,
    at_least_single,
    attentions,
    grid_for,
    lead_of,
    still,
    transformer,
)
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.report.overlay import stretched, to_bytes
from vitkit.serving.predict import ready


def attention_objection(model: Model) -> str:
    """Why a model has no attention maps over all patches; empty where it has them."""
    try:
        if attentions(transformer(model)) and model.config.attention == "axial":
            return "this model is axial: no layer of it has one attention over all patches to show"
    except ValueError as error:
        return str(error)
    return ""


def explain(model: ViT, pixels: Tensor, target: int | None) -> dict[str, Any]:
    """The maps of uint8 pixels (3, H, W) as plain numbers, ready for JSON; `target`: whose class map."""
    image = ready(model, pixels[None])
    grid, maps = grid_for(model, image), every_map(model, image)
    shape = (*maps.shape[:2], *grid)
    by_class = None if target is None else class_map(model, image, target=target)[0]
    each = np.stack([[to_bytes(255 * stretched(heat)) for heat in layer] for layer in maps])
    return {
        "grid": list(grid),
        "layers": shape[0],
        "heads": shape[1],
        "rollout": numbers(attention_rollout(model, image)[0]),
        "maps": b64encode(each.reshape(shape).tobytes()).decode("ascii"),
        "class_map": None if by_class is None else numbers(by_class),
        "image_size": list(pixels.shape[1:]),
    }


def every_map(model: ViT, image: Tensor) -> np.ndarray:
    """What each head of each layer looks at, (L, K, N), in one pass; see inspection.rollout.head_maps."""
    lead = lead_of(model)
    with still(model), torch.no_grad():
        weights = (w[0, ..., lead:] for w in model.attention(image.to(model.project.weight)))  # (K, T, N)
        return np.stack([array(w[:, 0] if lead else at_least_single(w).mean(1)) for w in weights])


def numbers(heat: np.ndarray) -> list[float]:
    """A map scaled to 0..1, row after row."""
    return [round(float(value), 4) for value in stretched(heat).ravel()]
