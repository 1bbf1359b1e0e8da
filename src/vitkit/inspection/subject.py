"""What can be inspected: the checks, the quiet state and the small batches that the other files share."""

# B batch, C channels, K heads; H, W pixels; h, w grid of patches

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import Error
from vitkit.models.encoder import Grid
from vitkit.models.vit import ViT, grid_of


def transformer(model: Any) -> ViT:
    """The model, if it is a ViT or a hybrid; else an error that says why not."""
    if not isinstance(model, ViT):
        kind = type(model).__name__
        raise Error(
            f"only a ViT or a hybrid has patch tokens and attention to inspect, not a {kind}",
            code="inspection.unsupported",
        )
    return model


def attentions(model: ViT) -> int:
    """How many attentions follow each other: one a layer; in an axial layer the rows, then the columns."""
    count = model.config.depth * (2 if model.config.attention == "axial" else 1)
    if not count:
        raise Error(
            "this model has depth 0: there is no attention in it to inspect", code="inspection.unsupported"
        )
    return count


def lead_of(model: ViT) -> int:
    """1 when a class token leads the patches, else 0."""
    return int(model.class_token is not None)


def grid_for(model: ViT, images: Tensor) -> Grid:
    """The grid of patches of these images, or what is wrong with them."""
    channels = model.config.channels
    if images.ndim != 4 or images.shape[1] != channels or not len(images):
        raise Error(
            f"images must have shape (B, {channels}, H, W) with B at least 1, not {tuple(images.shape)}",
            code="model.input",
        )
    if not images.is_floating_point():
        raise Error(
            f"images must be normalised floating-point numbers, not {images.dtype} pixels",
            code="model.input",
        )
    return grid_of((images.shape[2], images.shape[3]), model.config.stride)


def batches(model: ViT, images: Tensor, size: int) -> Iterator[Tensor]:
    """The images, `size` at a time, on the model's device and in its precision."""
    if size < 1:
        raise Error(f"batch must be at least 1, not {size}")
    for part in images.split(size):
        yield part.to(model.project.weight)


@contextmanager
def still(model: ViT) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards every module is in the mode it was in before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def at_least_single(x: Tensor) -> Tensor:
    """Half precision is too coarse to add up in; double stays double."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def array(x: Tensor) -> np.ndarray:
    """A float32 array in the computer's own memory."""
    return x.detach().float().cpu().numpy()
