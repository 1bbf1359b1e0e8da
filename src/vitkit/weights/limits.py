"""The range of every number that a model file may name: one table, for our card and for others' JSON."""

import math
from dataclasses import fields
from typing import Any

from vitkit.errors import ConfigError
from vitkit.models.card import Preprocessing
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.vit import ViTConfig

RANGES: dict[str, tuple[float, float]] = {  # a field's least and largest value, each of several for itself
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
    "crop": (0.05, 1),
    "mean": (-1e4, 1e4),
    "std": (1e-4, 1e4),
}
LONGEST_LABEL = 10_000  # characters
MOST_TOKENS = 2**18  # patches of one image
LARGEST_TENSOR = 2**30  # numbers in one tensor, for one image: 4 GiB in float32
LARGEST_RESIZE = 8192  # pixels of the shorter side before the central crop
Described = ViTConfig | StemConfig | ResNetConfig | Preprocessing


def out_of_range(field: str, value: Any, name: str = "") -> str:
    """Why a value of a field is refused, under the name that its file has for it; empty if it is not."""
    if isinstance(value, tuple | list):
        return next((reason for one in value if (reason := out_of_range(field, one, name))), "")
    if field not in RANGES or isinstance(value, bool | str | None):
        return ""
    low, high = RANGES[field]
    if isinstance(value, int | float) and low <= value <= high:  # not true of nan
        return ""
    return f"{name or field} is {str(value)[:40]}; expected a number from {low:.10g} to {high:.10g}"


def check_model(config: ViTConfig | ResNetConfig, shown: Preprocessing, labels: tuple[str, ...]) -> None:
    """Refuse numbers out of their range, and sizes that together would fill the memory with one image."""
    stem = config.stem if isinstance(config, ViTConfig) else None
    for part in (config, shown, *([stem] if stem else [])):
        check_fields(part)
    long = next((label for label in labels if len(label) > LONGEST_LABEL), None)
    if long is not None:
        raise ConfigError(f"labels: one has {len(long)} characters; at most {LONGEST_LABEL} are read")
    if len(labels) > RANGES["classes"][1]:
        raise ConfigError(f"labels: {len(labels)} of them; at most {RANGES['classes'][1]} are read")
    if len(shown.mean) not in (3, config.channels):
        raise ConfigError(f"mean has {len(shown.mean)} numbers; the model takes {config.channels} channels")
    if shown.resize == "crop" and max(config.image_size) / shown.crop > LARGEST_RESIZE:
        raise ConfigError(
            f"crop is {shown.crop}: images of {max(config.image_size)} pixels are cut out of "
            f"{max(config.image_size) / shown.crop:.0f}; at most {LARGEST_RESIZE} pixels a side are read"
        )
    check_size(config)


def check_fields(value: Described) -> None:
    for field in fields(value):
        if reason := out_of_range(field.name, getattr(value, field.name)):
            raise ConfigError(reason)


def check_size(config: ViTConfig | ResNetConfig) -> None:
    """What one image of the model's own size needs, whether its positions are stored or computed."""
    height, width = config.image_size
    tensors = [height * width * config.channels]
    if isinstance(config, ViTConfig):
        tokens = config.tokens
        if tokens > MOST_TOKENS:
            raise ConfigError(
                f"image_size is {height}x{width} and patch {config.patch}: {tokens} patches of an image; "
                f"at most {MOST_TOKENS} are read"
            )
        tensors += [tokens * 3 * config.width, tokens * config.hidden]
        if config.positions == "relative" and config.attention == "full":
            tensors += [config.heads * tokens * tokens]
        tensors += [config.stem.width * height * width // 4] if config.stem else []
    else:
        tensors += [config.width * height * width // 4]
    if max(tensors) > LARGEST_TENSOR:
        raise ConfigError(
            f"image_size is {height}x{width}: with the model's other sizes one image would take "
            f"{math.ceil(max(tensors) / 2**28)} GiB in one tensor; at most {LARGEST_TENSOR // 2**28} are read"
        )
