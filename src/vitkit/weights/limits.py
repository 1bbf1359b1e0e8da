"""The allowed range of every number in a model file, for our card and for the JSON of other libraries."""

import math
from dataclasses import fields
from typing import Any

from vitkit.errors import ConfigError
from vitkit.models.card import Preprocessing
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.text_tower import TextConfig
from vitkit.models.vit import ViTConfig

RANGES: dict[str, tuple[float, float]] = {  # field -> smallest and largest value; of a list, for each element
    "width": (1, 2**16),
    "depth": (0, 1024),
    "heads": (1, 1024),
    "hidden": (1, 2**20),
    "patch": (1, 4096),
    "image_size": (1, 8192),
    "channels": (1, 1024),
    "classes": (0, 2**24),
    "representation": (0, 2**20),
    "blocks": (1, 1024),
    "norm_eps": (0, 1),
    "std_eps": (0, 1),
    "dropout": (0, 1),
    "attention_dropout": (0, 1),
    "stochastic_depth": (0, 1),
    "registers": (0, 1024),
    "vocabulary": (1, 2**24),
    "length": (1, 2**14),
    "output": (1, 2**20),
    "end_token": (-1, 2**24),
    "merge_tokens": (0, 2**18),
    "rope_shift": (0, 100),
    "rope_jitter": (1, 100),
    "rope_rescale": (1, 100),
    "crop": (0.05, 1),
    "mean": (-1e4, 1e4),
    "std": (1e-4, 1e4),
}
LONGEST_LABEL = 10_000  # characters
MOST_TOKENS = 2**18  # patches of one image
LARGEST_TENSOR = 2**30  # elements of an activation for one image: 4 GiB in float32
LARGEST_RESIZE = 8192  # pixels of the shorter side before the central crop
Checked = ViTConfig | StemConfig | TextConfig | ResNetConfig | DenseConfig | Preprocessing


def out_of_range(field: str, value: Any, name: str = "") -> str:
    """Why a value is out of range, with the `name` that the file has for the field; empty if it is not."""
    if isinstance(value, tuple | list):
        return next((reason for item in value if (reason := out_of_range(field, item, name))), "")
    if field not in RANGES or isinstance(value, bool | str | None):
        return ""
    low, high = RANGES[field]
    if isinstance(value, int | float) and low <= value <= high:  # false for NaN
        return ""
    return f"{name or field} is {str(value)[:40]}; expected a number from {low:.10g} to {high:.10g}"


def check_model(
    config: ViTConfig | ResNetConfig | DenseConfig, preprocessing: Preprocessing, labels: tuple[str, ...]
) -> None:
    """Refuse numbers out of range, and sizes with which one image would run out of memory."""
    vit = config.vit if isinstance(config, DenseConfig) else config
    inner = (vit.stem, vit.text) if isinstance(vit, ViTConfig) else ()
    for part in {id(part): part for part in (config, vit, preprocessing, *inner) if part}.values():
        check_fields(part)
    longest = max(map(len, labels), default=0)
    if longest > LONGEST_LABEL:
        raise ConfigError(f"labels: one has {longest} characters; the limit is {LONGEST_LABEL}")
    if len(labels) > RANGES["classes"][1]:
        raise ConfigError(f"labels: {len(labels)} of them; the limit is {RANGES['classes'][1]}")
    if len(preprocessing.mean) not in (3, config.channels):
        numbers = len(preprocessing.mean)
        raise ConfigError(f"mean has {numbers} numbers, but the model takes {config.channels} channels")
    resized = max(config.image_size) / preprocessing.crop
    if preprocessing.resize == "crop" and resized > LARGEST_RESIZE:
        raise ConfigError(
            f"crop is {preprocessing.crop}: images would be resized to {resized:.0f} pixels for a crop of "
            f"{max(config.image_size)}; the limit is {LARGEST_RESIZE} pixels per side"
        )
    check_size(vit)


def check_fields(value: Checked) -> None:
    for field in fields(value):
        if reason := out_of_range(field.name, getattr(value, field.name)):
            raise ConfigError(reason)


def check_size(config: ViTConfig | ResNetConfig) -> None:
    """Refuse sizes with which the activations of one image would be too large."""
    height, width = config.image_size
    tensors = [height * width * config.channels]
    if isinstance(config, ViTConfig):
        tokens = config.tokens
        if tokens > MOST_TOKENS:
            raise ConfigError(
                f"image_size is {height}x{width} and patch {config.patch}: {tokens} patches per image; "
                f"the limit is {MOST_TOKENS}"
            )
        tensors += [tokens * 3 * config.width, 2 * tokens * config.hidden]
        if config.positions == "relative" and config.attention == "full":
            tensors += [config.heads * tokens * tokens]
        tensors += [config.stem.width * height * width // 4] if config.stem else []
        if text := config.text:
            tensors += [text.length * max(3 * text.width, text.hidden)]
    else:
        tensors += [config.width * height * width // 4]
    if max(tensors) > LARGEST_TENSOR:
        raise ConfigError(
            f"image_size is {height}x{width}: with the model's other sizes, one tensor of one image would "
            f"take {math.ceil(max(tensors) / 2**28)} GiB; the limit is {LARGEST_TENSOR // 2**28} GiB"
        )
