"""Shared by all inspections: input checks, class lookup, evaluation mode and batching."""

# B batch, C channels, K heads; H, W pixels; h, w grid of patches

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import Error, did_you_mean
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.encoder import Grid
from vitkit.models.vit import ViT, grid_of

NO_HEAD = "this model has no head"  # why there are no class maps


def transformer(model: Any) -> ViT:
    """The model as a ViT; an error if it is neither a ViT nor a hybrid."""
    if isinstance(model, DenseModel):
        return model.vit
    if not isinstance(model, ViT):
        kind = type(model).__name__
        raise Error(
            f"only a ViT or a hybrid has patch tokens and attention to inspect, not a {kind}",
            code="inspection.unsupported",
        )
    return model


def check_class_maps(model: Any, classes: Sequence[int | str]) -> None:
    """Raise an error if class maps are asked for of a model that answers for parts of an image."""
    if classes and isinstance(model, DenseModel):
        raise Error(
            f"there are no class maps of a model for {model.config.task}, which has no classes of whole "
            "images; omit the class",
            code="inspection.unsupported",
        )


def note_dense(model: Any, skipped: dict[str, str]) -> None:
    """State why a model for segmentation or detection has no class maps."""
    if "class_maps" in skipped and isinstance(model, DenseModel) and skipped["class_maps"] == NO_HEAD:
        skipped["class_maps"] = f"a model for {model.config.task} has no classes of whole images"


def attention_count(model: ViT) -> int:
    """The number of attention operations: one per layer, or two per axial layer (rows, then columns)."""
    count = model.config.depth * (2 if model.config.attention == "axial" else 1)
    if not count:
        raise Error(
            "this model has depth 0, so it has no attention to inspect", code="inspection.unsupported"
        )
    return count


def class_number(model: Any, name: int | str, close: bool = True) -> int:
    """The index of the class with this label or number; the error for an unknown one suggests labels.

    close: also suggest labels with a similar spelling, which is slow for thousands of classes.
    """
    count, labels, text = model.config.classes, model.labels, str(name)
    if not count:
        message = f"there is no class {text[:80]!r}: this model has no head; fine-tune it first"
        raise Error(message, code="model.unsupported")
    if isinstance(name, str) and text in labels:
        return labels.index(text)
    if re.fullmatch("-?[0-9]+", text):
        if re.fullmatch("[0-9]{1,8}", text) and int(text) < count:
            return int(text)
        message = f"there is no class {text[:80]}: the model has classes 0 to {count - 1}"
        raise Error(message, code="request.unknown")
    matches = [i for i, label in enumerate(labels) if text and text.casefold() in names_in(label)]
    if len(matches) == 1:
        return matches[0]
    if not labels:
        message = f"there is no class {text[:80]!r}: the classes have no names; give 0 to {count - 1}"
        raise Error(message, code="request.unknown")
    folded = text[:80].casefold()
    suggestions = [labels[i] for i in matches] or [
        label for label in labels if folded and folded in label.casefold()
    ]
    hint = did_you_mean(folded, labels if close else (), matches=suggestions[:5], count=5)
    message = f"there is no class {text[:80]!r};{hint} give a label or a number from 0 to {count - 1}"
    raise Error(message, code="request.unknown")


def names_in(label: str) -> set[str]:
    """A label and each of its comma-separated names, case-folded."""
    return {part.strip().casefold() for part in (label, *label.split(","))}


def prefix_tokens(model: ViT) -> int:
    """The number of tokens before the patch tokens: class token, distillation token and registers."""
    return model.config.prefix


def grid_for(model: ViT, images: Tensor) -> Grid:
    """The patch grid of a batch of images; an error if the model does not take them."""
    channels = model.config.channels
    if images.ndim != 4 or images.shape[1] != channels or not len(images):
        raise Error(
            f"images must have shape (B, {channels}, H, W) with B at least 1, not {tuple(images.shape)}",
            code="model.input",
        )
    if not images.is_floating_point():
        raise Error(
            f"images must be normalised floating-point tensors, not {images.dtype} pixels",
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
def eval_mode(model: ViT) -> Iterator[None]:
    """Evaluation mode without gradients; restores the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def at_least_float32(x: Tensor) -> Tensor:
    """Promote half precision, which is too coarse for sums, to float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def array(x: Tensor) -> np.ndarray:
    """A float32 NumPy array, in host memory."""
    return x.detach().float().cpu().numpy()
