"""LoRA adapters as small files: write what LoRA has trained, and merge it into the base model again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.io.files import replace_file
from vitkit.models.adapt import TRAINING, adapt
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.lora import LoRA, adapter_state, add_lora, merge_lora
from vitkit.models.variants import Backbone, Config, Model, backbone, fresh
from vitkit.weights.card import ADAPTER, Card, card_of, from_json, to_json
from vitkit.weights.untrusted import listed, one_line, open_arrays


def save_adapter(state: dict[str, Tensor], model: Model, lora: LoRA, base: str, path: Path) -> None:
    """Write the trained factors and the head, with the card of the model and LoRA's settings as metadata.

    state: as `models.lora.adapter_state` returns it. model: with the adapters merged. base: the place of the
    weights that LoRA started from.
    """
    card = json.loads(to_json(card_of(model, ADAPTER))) | {"lora": asdict(lora) | {"base": base}}
    arrays = {name: tensor.contiguous() for name, tensor in state.items()}
    metadata = {"vitkit": json.dumps(card)}
    replace_file(path, lambda beside: safetensors.torch.save_file(arrays, beside, metadata))


def merge_adapter(model: Model, path: str | Path) -> Model:
    """The model that a run with train=lora has saved, from the base model and the run's adapter.safetensors.

    model: the weights that the run started from, as `vitkit.load` returns them; it is not changed.
    """
    arrays = open_arrays(Path(path))
    card, lora = read_card(arrays.card, path)
    config = card.config
    if isinstance(config, DenseConfig):
        new = with_vit(fresh(config), adapt(backbone(model), classes=0, image_size=config.image_size), path)
        new.labels = card.labels
    else:
        new = adapt(
            model, classes=config.classes, labels=card.labels, image_size=config.image_size,
            keep_representation=bool(getattr(config, "representation", 0)),
        )  # fmt: skip
    if architecture(new.config) != architecture(config):
        raise WeightsError(
            f"{path} adapts {config}, but the model is {new.config}; give the weights that the run started "
            "from",
            code="weights.shape",
        )
    add_lora(new, lora)
    state = adapter_state(new, lambda tensor: tensor)  # which shares the memory of the model
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if wrong := sorted(n for n in {*shapes, *arrays.shapes} if shapes.get(n) != arrays.shapes.get(n)):
        raise WeightsError(
            f"{path}: not the adapter of this model; missing, unexpected or of another shape: "
            f"{listed(wrong)}",
            code="weights.names",
        )
    for name, tensor in state.items():
        tensor.copy_(arrays.read(name))
    merge_lora(new)
    new.task, new.preprocessing, new.reject_below = card.task, card.preprocessing, card.reject_below
    new.origin = card.origin
    return new.eval()


def with_vit(model: Model, vit: Backbone, path: str | Path) -> Model:
    """The dense model with these weights of its ViT, whose heads the adapter has."""
    own = model.state_dict()
    state = {name: tensor for n, tensor in vit.state_dict().items() if (name := f"vit.{n}") in own}
    wrong = [name for name, tensor in own.items() if name.startswith("vit.")
             and (name not in state or state[name].shape != tensor.shape)]  # fmt: skip
    if wrong:
        raise WeightsError(
            f"{path} adapts another model; missing or of another shape: {listed(wrong)}", code="weights.shape"
        )
    model.load_state_dict(own | state)
    return model


def read_card(text: str, path: str | Path) -> tuple[Card, LoRA]:
    """The card of an adapter and LoRA's settings in it; the file is untrusted."""
    card = from_json(text) if text else None
    if card is None or card.layout != ADAPTER:
        raise WeightsError(f"{path}: not a LoRA adapter, which a run with train=lora writes")
    try:
        table = json.loads(text)["lora"]
        lora = LoRA(rank=int(table["rank"]), alpha=float(table["alpha"]), targets=str(table["targets"]))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise WeightsError(f"{path}: LoRA's settings in its card are damaged ({one_line(error)})") from None
    return card, lora


def architecture(config: Config) -> dict[str, Any]:
    """The fields of a configuration that do not only matter in training."""
    return {name: value for name, value in asdict(config).items() if name not in TRAINING}
