"""What can be inspected: the checks, the quiet state and the small batches that the other files share."""

# B batch, C channels, K heads; H, W pixels; h, w grid of patches

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import Error, did_you_mean
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


def class_number(model: Any, name: int | str, close: bool = True) -> int:
    """The class with this label or number; else an error that names labels like it.

    close: also those that are spelled alike, which takes a moment where there are thousands.
    """
    count, labels, text = model.config.classes, model.labels, str(name)
    if not count:
        why = f"there is no class {text[:80]!r}: this model has no head; fine-tune it first"
        raise Error(why, code="model.unsupported")
    if isinstance(name, str) and text in labels:
        return labels.index(text)
    if re.fullmatch("-?[0-9]+", text):
        if re.fullmatch("[0-9]{1,8}", text) and int(text) < count:
            return int(text)
        why = f"there is no class {text[:80]}: the model's are 0 to {count - 1}"
        raise Error(why, code="request.unknown")
    same = [i for i, label in enumerate(labels) if text and text.casefold() in words_of(label)]
    if len(same) == 1:
        return same[0]
    if not labels:
        why = f"no class of this model is {text[:80]!r}: they have no names; give 0 to {count - 1}"
        raise Error(why, code="request.unknown")
    low = text[:80].casefold()
    matches = [labels[i] for i in same] or [label for label in labels if low and low in label.casefold()]
    hint = did_you_mean(low, labels if close else (), matches=matches[:5], count=5)
    why = f"the model has no class {text[:80]!r};{hint} give a label, or a number from 0 to {count - 1}"
    raise Error(why, code="request.unknown")


def words_of(label: str) -> set[str]:
    """A label, and each of the names in it that commas separate, without case."""
    return {part.strip().casefold() for part in (label, *label.split(","))}


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
