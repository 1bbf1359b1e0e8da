"""Adapt a model to a new task: a zero head, another image size (Sec. 3.2) or patch size (FlexiViT)."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.models.card import pair
from vitkit.models.positions import resize_patch, resize_positions
from vitkit.models.resnet import check_size
from vitkit.models.variants import Backbone, BackboneConfig, Model, backbone, skeleton
from vitkit.models.vit import ViT, ViTConfig, with_size_note

HEADS = ("head.", "distillation_head.")
TRAINING = (  # fields without parameters
    "dropout", "attention_dropout", "stochastic_depth", "stochastic_depth_uniform",
    "stochastic_depth_rescale", "rope_shift", "rope_jitter", "rope_rescale", "merge_tokens",
)  # fmt: skip


def adapt(
    model: Model,
    *,
    classes: int | None = None,
    image_size: tuple[int, int] | int | None = None,
    patch: int | None = None,
    labels: Iterable[str] = (),
    multilabel: bool = False,
    keep_representation: bool = False,
    resize: str | None = None,
    mean_pooling: bool = False,
    **training: Any,
) -> Backbone:
    """A copy of the model with a zero head for `classes` (or `labels`); the old model is not changed.

    image_size           interpolate the positions to it, by `resize` or the model's own method
    patch                resize the patch embedding by the pseudo-inverse, as FlexiViT; the image size stays
    multilabel           an image may have several labels: every output has its own sigmoid
    keep_representation  keep the tanh layer of the pre-training head and replace only the last layer
    mean_pooling         the head reads the mean of the patches through a new norm, instead of the final norm
    training             fields without parameters: dropout, stochastic_depth, merge_tokens, ...
    """
    labels = tuple(labels)
    classes = len(labels) or None if classes is None else classes
    if labels and len(labels) != classes:
        raise Error(f"there are {len(labels)} labels for {classes} classes", code="data.labels")
    check_training(model := backbone(model), training)
    changes = training | {"text": None} | ({} if resize is None else {"position_resize": resize})
    changes |= mean_pooled(model) if mean_pooling else {}
    changes |= {} if image_size is None else {"image_size": pair(image_size)}
    if patch is not None:
        check_patch(model)
        changes["patch"] = patch
    changes |= {} if classes is None else new_head(classes, keep_representation)
    known = {f.name for f in fields(model.config)}
    config = replace(model.config, **{k: v for k, v in changes.items() if k in known})
    new = backbone(skeleton(config))
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state |= resized_positions(model, config)
    if patch is not None:
        state["project.weight"] = resize_patch(state["project.weight"], patch)
    state = (fresh_pool_norm(model) if mean_pooling else {}) | state  # a norm that exists already stays
    state |= zero_heads(model, new) if classes is not None else {}
    new.load_state_dict({name: state[name] for name in new.state_dict()}, assign=True)
    new.requires_grad_(True)
    new.labels = labels if classes is not None else model.labels
    new.task = "multilabel" if multilabel else model.task if classes is None else "classify"
    new.reject_below = model.reject_below if classes is None else 0.0
    new.preprocessing, new.origin = model.preprocessing, with_size_note(model.origin, config)
    return new.train(model.training)


def with_tokens(model: Model, *, class_position: bool, mask_token: bool) -> Model:
    """The same outputs with or without a position of the class token and with or without a mask token.

    A position of the class token is only ever added to it; a mask token is used in pre-training alone.
    """
    assert isinstance(model, ViT)
    config = replace(model.config, class_position=class_position, mask_token=mask_token)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "mask_token"}
    if mask_token:
        zero = model.project.weight.new_zeros(1, 1, config.width)
        state["mask_token"] = zero if model.mask_token is None else model.mask_token.detach()
    if class_position and not model.config.class_position:
        table = state["positions.table"]  # (1, T, D)
        state["positions.table"] = torch.cat([torch.zeros_like(table[:, : config.lead]), table], dim=1)
    elif model.config.class_position and not class_position:
        table = state["positions.table"]
        state["class_token"] = state["class_token"] + table[:, :1]
        state["positions.table"] = table[:, 1:]
    return rebuilt(model, config, state)


def with_table(model: Model) -> Model:
    """The same outputs with a table in place of fixed positions, which then can be trained and resized."""
    assert isinstance(model, ViT)
    table = model.positions.at(model.config.grid, device=model.project.weight.device)
    state = model.state_dict() | {"positions.table": table.to(model.project.weight.dtype)}
    return rebuilt(model, replace(model.config, positions="1d"), state)


def without_text(model: Model) -> Model:
    """The model without its text tower; it shares the parameters of the image tower."""
    if not isinstance(model, ViT) or model.text is None:
        return model
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("text.")}
    return rebuilt(model, replace(model.config, text=None), state)


def rebuilt(model: Model, config: BackboneConfig, state: Mapping[str, Tensor]) -> Model:
    """A model of another configuration with this state and the description of the old one."""
    new = skeleton(config)
    new.load_state_dict(state, assign=True)
    for name in ("labels", "task", "reject_below", "preprocessing", "origin"):
        setattr(new, name, getattr(model, name))
    return new.train(model.training)


def check_training(model: Model, training: Mapping[str, Any]) -> None:
    """Refuse fields that adapt does not know; a ResNet has none of them."""
    for field in training:
        if field not in TRAINING or not isinstance(model, ViT):
            allowed = ", ".join(TRAINING)
            raise Error(f"adapt cannot change {field!r}, only {allowed} of a ViT", code="model.unsupported")


def zero_heads(model: Model, new: Model) -> dict[str, Tensor]:
    """Heads of zeros for a new model, with the dtype and on the device of the old one."""
    old = next(iter(model.parameters()))
    heads = {n: t.shape for n, t in new.state_dict().items() if n.startswith(HEADS)}
    return {name: torch.zeros(shape, dtype=old.dtype, device=old.device) for name, shape in heads.items()}


def fresh_pool_norm(model: Model) -> dict[str, Tensor]:
    """A norm after pooling, of ones and zeros, with the dtype and on the device of the model."""
    ones = next(iter(model.parameters())).new_ones(model.config.width)
    return {"pool_norm.weight": ones, "pool_norm.bias": torch.zeros_like(ones)}


def new_head(classes: int, keep_representation: bool) -> dict[str, Any]:
    """The fields of a head for other classes."""
    hidden = {} if keep_representation else {"representation": 0, "representation_kind": "tanh"}
    return {"classes": classes, "normalize": False} | hidden


def mean_pooled(model: Model) -> dict[str, Any]:
    """The fields of mean pooling; not for a ResNet, without patches, or for two tokens with a head each."""
    if not isinstance(model, ViT) or model.config.distilled:
        kind = "a model with a distillation token" if isinstance(model, ViT) else "a ResNet"
        raise Error(f"{kind} has a pooling of its own; use pooling=model", code="model.unsupported")
    return {"head": "gap", "final_norm": "pooled"}


def linear_heads(model: Model) -> list[nn.Linear]:
    """The layers whose mean is the logits: the head, and that of a distillation token."""
    heads: tuple[Any, Any] = (getattr(model, "head", None), getattr(model, "distillation_head", None))
    return [head for head in heads if head is not None]


@torch.no_grad()
def set_head(model: Model, weight: Tensor, bias: Tensor) -> None:
    """Make the logits `weight` (classes, D) times the features plus `bias`; two heads read one half each."""
    heads = linear_heads(model)
    for head, part in zip(heads, weight.chunk(len(heads), dim=1), strict=True):
        head.weight.copy_(len(heads) * part)
        head.bias.copy_(bias)


def check_patch(model: Model) -> None:
    """Refuse another patch size for a model without a patch embedding of pixels."""
    if not isinstance(model, ViT) or model.stem is not None:
        raise Error(
            "only a ViT whose patches are pixels can get another patch size, not a hybrid or a ResNet",
            code="model.unsupported",
        )


def resized_positions(model: Backbone, config: BackboneConfig) -> dict[str, Tensor]:
    """The position tables interpolated to the grid of another configuration; a ResNet has none."""
    if not isinstance(model, ViT):
        check_size(model.config, config.image_size)
        return {}
    assert isinstance(config, ViTConfig)
    old, new = model.config.grid, config.grid
    if old == new:
        return {}
    if config.positions == "relative":
        raise Error(
            f"relative positions were learned on a {old} grid and cannot be resized to {new}; "
            "keep the image size",
            code="model.unsupported",
        )
    positions, tables = model.positions, {}
    with torch.no_grad():
        if config.positions == "1d":
            layers = [resize_positions(t[None], old, new, config.position_resize) for t in positions.table]
            tables["positions.table"] = torch.cat(layers)
        if config.positions == "2d":
            for axis, k in (("y", 0), ("x", 1)):
                table = getattr(positions, axis)
                layers = [
                    resize_positions(t[None], (old[k], 1), (new[k], 1), config.position_resize) for t in table
                ]
                tables[f"positions.{axis}"] = torch.cat(layers)
    return {name: table.detach().clone() for name, table in tables.items()}
