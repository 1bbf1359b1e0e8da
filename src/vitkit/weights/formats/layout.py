"""What a layout is: how another library names and lays out the arrays that we hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.resnet import StemConfig
from vitkit.models.variants import VARIANTS, Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.limits import out_of_range

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """One way to lay out an array: from theirs to ours, and back."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and where a layout keeps it; several arrays are joined on our first axis."""

    own: str
    foreign: tuple[str, ...]
    form: Form


@dataclass(frozen=True)
class Found:
    """What the arrays of a file tell: the model, and what goes with it."""

    config: Config
    preprocessing: Preprocessing = Preprocessing()
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # prefixes of arrays that are not part of the model


@dataclass(frozen=True)
class Layout:
    """A library's names: recognise them, infer the model, list the entries."""

    name: str
    recognises: Callable[[Shapes], bool]
    infer: Callable[[Shapes, Hints], Found]
    entries: Callable[[Config], list[Entry]]
    objection: Callable[[Config], str]  # why a model cannot be written so; empty: it can
    native: Callable[[Config], Config]  # the model as that library would compute it
    tidy: Callable[[Shapes], dict[str, Source]] = lambda shapes: {name: Source(name) for name in shapes}


@dataclass(frozen=True)
class Source:
    """Where a tidied array comes from: an array of the file, or one layer of a stacked one."""

    name: str
    layer: int | None = None


@dataclass(frozen=True)
class Hints:
    """What the arrays alone cannot tell."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)  # config.json and its like


SAME = Form(lambda a: a, lambda a: a)
FLAT = Form(lambda a: a.flatten(), lambda a: a)  # (1, 1, 1, C) or (C,) -> (C,)
CONV = Form(lambda a: a.permute(3, 2, 0, 1), lambda a: a.permute(2, 3, 1, 0))  # HWIO <-> OIHW
DENSE = Form(lambda a: a.mT, lambda a: a.mT)  # (in, out) <-> (out, in)
CONV_HEAD = Form(lambda a: a.flatten(1), lambda a: a[:, :, None, None])  # (K, F, 1, 1) <-> (K, F)


def heads_in(heads: int) -> Form:
    """(D, K, Dh) <-> (K * Dh, D)"""
    return Form(lambda a: a.flatten(1).mT, lambda a: a.mT.unflatten(1, (heads, -1)))


def heads_bias(heads: int) -> Form:
    """(K, Dh) <-> (K * Dh,)"""
    return Form(lambda a: a.flatten(), lambda a: a.unflatten(0, (heads, -1)))


def heads_out(heads: int) -> Form:
    """(K, Dh, D) <-> (D, K * Dh)"""
    return Form(lambda a: a.flatten(0, 1).mT, lambda a: a.mT.unflatten(0, (heads, -1)))


def position_table(tokens: int) -> Form:
    """(1, T, D); a table without the class token's entry gets a zero one, which changes nothing."""

    def read(a: Tensor) -> Tensor:
        if a.ndim == 3 and a.shape[1] == tokens - 1:
            return torch.cat([a.new_zeros(a.shape[0], 1, a.shape[2]), a], dim=1)
        return a

    return Form(read, lambda a: a)


def pairs(
    own: str, foreign: str, form: Form = SAME, parts: tuple[str, ...] = ("weight", "bias")
) -> list[Entry]:
    """The weight and the bias of one module that both sides call so."""
    return [Entry(f"{own}.{part}", (f"{foreign}.{part}",), form) for part in parts]


def size_from(entries: int, lead: bool, stride: int, hints: Hints) -> tuple[tuple[int, int], str]:
    """The image size that a position table was learned at, square unless the hints say otherwise.

    With it a note where the class token (`lead`) seems to have no entry of its own.
    """
    if hints.image_size is not None:
        h, w = hints.image_size
        if (h // stride) * (w // stride) not in (entries, entries - lead):
            raise WeightsError(
                f"image_size {h}x{w} needs {h // stride}x{w // stride} positions, the file has {entries}",
                code="weights.shape",
            )
        return (h, w), ""
    for count in (entries - 1, entries) if lead else (entries,):
        side = math.isqrt(max(0, count))
        if side and side * side == count:
            bare = lead and count == entries
            note = f"{entries} positions: a {side}x{side} grid, with none for the class token" if bare else ""
            return (side * stride, side * stride), note
    raise WeightsError(
        f"{entries} positions lie on no square grid; give the image size once: vitkit convert FILE "
        "OUT.safetensors --image-size HxW (load(FILE, image_size=(H, W)) in Python)",
        code="request.missing",
    )


def guess_heads(width: int, depth: int, hidden: int, hints: Hints) -> tuple[int, str]:
    """The number of heads, which a joined qkv array does not tell, and how we know it."""
    if hints.heads is not None:
        return hints.heads, ""
    for name, sizes in VARIANTS.items():
        if (sizes["width"], sizes["depth"], sizes["hidden"]) == (width, depth, hidden):
            return sizes["heads"], f"{sizes['heads']} heads, as ViT-{name} has (the arrays do not tell)"
    if width % 64 == 0:
        return width // 64, f"{width // 64} heads of width 64, the usual (the arrays do not tell)"
    raise WeightsError(
        f"width {width}: the number of heads does not follow from the arrays; give it once: "
        "vitkit convert FILE OUT.safetensors --heads N (load(FILE, heads=N) in Python)",
        code="request.missing",
    )


def count(shapes: Shapes, pattern: str) -> int:
    """How many of pattern.format(0), pattern.format(1), ... are there in a row."""
    n = 0
    while pattern.format(n) in shapes:
        n += 1
    return n


def need(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    """The shape of an array that must be there, with this many axes."""
    if name not in shapes:
        raise WeightsError(f"array {name!r} is missing", code="weights.names")
    if len(shapes[name]) != axes or 0 in shapes[name]:
        raise WeightsError(
            f"array {name!r} has shape {shapes[name]}; expected {axes} axes, none empty", code="weights.shape"
        )
    return shapes[name]


def square_patch(kernel: tuple[int, int]) -> int:
    if kernel[0] != kernel[1]:
        raise WeightsError(f"patches of {kernel[0]}x{kernel[1]} pixels are not square", code="weights.shape")
    return kernel[0]


def number_in(table: Mapping[str, Any], name: str, field: str, default: Any, file: str) -> Any:
    """A number of a JSON file, or a list of numbers, in the range of the field of ours that it becomes."""
    value = table.get(name)
    if value is None:
        return default
    several = isinstance(default, tuple)
    if several != isinstance(value, list) or not all(
        type(one) in (int, float) for one in (value if several else [value])
    ):
        kind = "a list of numbers" if several else "a number"
        raise WeightsError(f"{file}: {name} is {str(value)[:40]!r}; expected {kind}")
    if reason := out_of_range(field, value, name):
        raise WeightsError(f"{file}: {reason}")
    return tuple(value) if several else value


def plain_vit_objection(config: Config, library: str, *, also: tuple[str, ...] = ()) -> str:
    """Why a ViT with these choices has no place in a layout; `also` are fields it does have."""
    if not isinstance(config, ViTConfig):
        return f"the {library} layout holds ViTs; a ResNet is written as official BiT or timm"
    usual = {
        "positions": "1d",
        "injection": "stem",
        "attention": "full",
        "final_norm": "tokens",
        "head": "token",
        "representation": 0,
        "layer_scale": False,
        "mask_token": False,
        "qkv_bias": True,
        "stem": None,
    }
    odd = [
        f"{k}={getattr(config, k)!r}" for k, v in usual.items() if k not in also and getattr(config, k) != v
    ]
    return f"the {library} layout has no place for {', '.join(odd)}" if odd else ""


def as_computed(config: Config, stem: dict[str, Any] | None = None, **numerics: Any) -> Config:
    """The same model with another library's epsilons and GELU."""
    if isinstance(config, ViTConfig) and isinstance(config.stem, StemConfig) and stem:
        numerics["stem"] = replace(config.stem, **stem)
    return replace(config, **numerics)
