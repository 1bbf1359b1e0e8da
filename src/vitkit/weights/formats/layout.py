"""The types that describe a weight format, and helpers to infer a model from names and shapes of arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.models.adapt import with_table, with_tokens, without_text
from vitkit.models.card import Preprocessing
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.resnet import StemConfig
from vitkit.models.variants import VARIANTS, Config, Model, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.weights.limits import out_of_range

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """How an array is reshaped or transposed when it is read, and back when it is written."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """A parameter of ours and the arrays that hold it; several arrays are concatenated on the first axis."""

    own: str
    foreign: tuple[str, ...]
    form: Form
    joined: Form = Form(lambda a: a, lambda a: a)  # how the concatenation of all of them is read and written


@dataclass(frozen=True)
class ModelSpec:
    """The model that a file describes: its configuration, preprocessing and labels."""

    config: Config
    preprocessing: Preprocessing = Preprocessing()
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # prefixes of arrays that are not part of the model


@dataclass(frozen=True)
class Layout:
    """How a library names and shapes its arrays: one table, for reading and for writing."""

    name: str
    recognises: Callable[[Shapes], bool]
    infer: Callable[[Shapes, Hints], ModelSpec]
    entries: Callable[[Config], list[Entry]]
    unsupported: Callable[[Config], str]  # why a model cannot be written in this layout; empty if it can
    native: Callable[[Config], Config]  # the configuration with the numerics of that library
    peer: str = ""  # the library that `vitkit convert` compares with; empty for none
    canonical_names: Callable[[Shapes], dict[str, Source]] = lambda shapes: {n: Source(n) for n in shapes}
    written_name: Callable[[str, Config], str] = lambda name, config: name  # back from the canonical name
    json_files: Callable[[Model], dict[str, Any]] | None = None  # beside the weights; they override the card
    json_fields: tuple[str, ...] = ()  # of the configuration, where these files override the card
    remedies: Mapping[str, str] = field(default_factory=dict)  # field -> how to set it in that library
    constants: Callable[[Config], dict[str, Tensor]] = lambda config: {}  # arrays with fixed values
    axes: Mapping[str, int] = field(default_factory=dict)  # of arrays whose parts are not joined along 0


@dataclass(frozen=True)
class Format:
    """A weight format as users name it: one or more layouts, and the files that they are written to."""

    name: str
    description: str
    layouts: tuple[Layout, ...]  # tried in this order to recognise a file
    endings: tuple[str, ...]  # of the files to write; an empty ending means a folder
    default_ending: str | None = None  # a file name with this ending selects the format
    choose: Callable[[Config], Layout] | None = None  # the layout for a model; without it the first one
    tokens: Callable[[ViTConfig], dict[str, bool]] | None = None  # class_position, mask_token it must have
    text: bool = False  # whether it stores text towers
    order: int = 100  # formats are recognised and listed by this number, then by name

    def layout_for(self, config: Config) -> Layout:
        """The layout in which a model of this configuration is written."""
        return self.choose(config) if self.choose else self.layouts[0]

    def equivalent(self, model: Model) -> Model:
        """A model of the same outputs that the format can store: with another set of tokens if it must be."""
        model = model if self.text else without_text(model)
        c = model.config
        if isinstance(c, ViTConfig) and c.positions.startswith("sincos2d"):
            model = with_table(model) if self.layout_for(c).unsupported(c) else model
            c = model.config
        if self.tokens is None or not isinstance(c, ViTConfig):
            return model
        own = {"class_position": c.class_position, "mask_token": c.mask_token}
        needed = own | self.tokens(c)
        if not c.class_token or c.distilled or c.positions != "1d" or c.injection != "stem":
            needed["class_position"] = c.class_position
        return model if needed == own else with_tokens(model, **needed)


@dataclass(frozen=True)
class Source:
    """The origin of a canonical array: an array of the file, one layer of a stacked array, or some rows."""

    name: str
    layer: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Hints:
    """What the caller or the JSON files know and the arrays do not show."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)  # config.json, preprocessor_config.json


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


# q and v biases, (2 D,) <-> our (3 D,) with zeros for the keys
NO_KEY_BIAS = Form(lambda a: with_zeros(*a.chunk(2)), lambda a: torch.cat([a.chunk(3)[0], a.chunk(3)[2]]))


def with_zeros(q: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q, torch.zeros_like(q), v])


Row = tuple[str, str | tuple[str, ...], Form]  # our module or parameter, theirs, how the array is reshaped


def table_entries(config: Config, rows: Sequence[Row]) -> list[Entry]:
    """An entry for each of our parameters that a row names; {} in a row stands for the layer."""
    table = {
        own: (foreign if isinstance(foreign, tuple) else (foreign,), form) for own, foreign, form in rows
    }
    entries = []
    for name in skeleton(config).state_dict():
        match = re.match(r"(?:text\.)?encoder\.blocks\.(\d+)\.", name)
        layer = match[1] if match else ""
        own = name.replace(f".{layer}.", ".{}.", 1) if match else name
        module, _, part = own.rpartition(".")
        if own in table:
            foreign, form = table[own]
            entries.append(Entry(name, tuple(f.format(layer) for f in foreign), form))
        elif module in table:
            foreign, form = table[module]
            entries.append(Entry(name, tuple(f"{f.format(layer)}.{part}" for f in foreign), form))
    return entries


def pairs(
    own: str, foreign: str, form: Form = SAME, parts: tuple[str, ...] = ("weight", "bias")
) -> list[Entry]:
    """Entries for the weight and the bias of one module."""
    return [Entry(f"{own}.{part}", (f"{foreign}.{part}",), form) for part in parts]


def infer_image_size(entries: int, lead: int, stride: int, hints: Hints) -> tuple[tuple[int, int], str]:
    """The image size of a position table, square unless the hints give one, and a note (or "").

    lead: tokens before the patches, such as the class token; the note says when they have no position.
    """
    if hints.image_size is not None:
        h, w = hints.image_size
        if (h // stride) * (w // stride) not in (entries, entries - lead):
            raise WeightsError(
                f"image_size {h}x{w} needs {h // stride}x{w // stride} positions, but the file has {entries}",
                code="weights.shape",
            )
        return (h, w), ""
    for count in (entries - lead, entries) if lead else (entries,):
        side = math.isqrt(max(0, count))
        if side and side * side == count:
            no_class_position = lead and count == entries
            note = f"{entries} positions: a {side}x{side} grid without one for the class token"
            return (side * stride, side * stride), note if no_class_position else ""
    raise WeightsError(
        f"{entries} positions do not form a square grid; give the image size once: vitkit convert FILE "
        "OUT.safetensors --image-size HxW (load(FILE, image_size=(H, W)) in Python)",
        code="request.missing",
    )


HEADS = {  # (width, layers, hidden width) -> heads, where heads are not 64 wide or not a variant's
    (1280, 32, 5120, "swiglu"): 20,  # DINOv3 H+
    (4096, 40, 8192, "swiglu"): 32,  # DINOv3 7B
    (1152, 27, 4304, "gelu"): 16,  # SigLIP So400m
    (1536, 40, 6144, "gelu"): 16,  # SigLIP 2 g-opt
    (330, 14, 1320, "gelu"): 6,  # YOLOS-S-dWr
}


def guess_heads(width: int, depth: int, hidden: int, hints: Hints, mlp: str = "gelu") -> tuple[int, str]:
    """The number of heads, which a fused qkv array does not show, and a note on how it was chosen."""
    if hints.heads is not None:
        return hints.heads, ""
    if heads := HEADS.get((width, depth, hidden, mlp)):
        return heads, f"{heads} heads, as in the published model of these sizes (the arrays do not show it)"
    for name, sizes in VARIANTS.items():
        if mlp == "gelu" and (sizes["width"], sizes["depth"], sizes["hidden"]) == (width, depth, hidden):
            return sizes["heads"], f"{sizes['heads']} heads, as in ViT-{name} (the arrays do not show it)"
    if width % 64 == 0:
        return width // 64, f"{width // 64} heads of width 64, the default (the arrays do not show it)"
    raise WeightsError(
        f"width {width}: the arrays do not show the number of heads; give it once: "
        "vitkit convert FILE OUT.safetensors --heads N (load(FILE, heads=N) in Python)",
        code="request.missing",
    )


def count(shapes: Shapes, pattern: str) -> int:
    """How many of pattern.format(0), pattern.format(1), ... exist without a gap."""
    n = 0
    while pattern.format(n) in shapes:
        n += 1
    return n


def required_shape(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    """The shape of an array that must exist with this many axes."""
    if name not in shapes:
        raise WeightsError(f"array {name!r} is missing", code="weights.names")
    if len(shapes[name]) != axes or 0 in shapes[name]:
        raise WeightsError(
            f"array {name!r} has shape {shapes[name]}; expected {axes} axes, none empty", code="weights.shape"
        )
    return shapes[name]


def refuse_flat_patches(shapes: Shapes, kernel: str) -> None:
    """Refuse NaFlex models (SigLIP 2), which embed flattened patches of images of any aspect ratio."""
    if len(shapes.get(kernel, ())) == 2:
        raise WeightsError(
            f"array {kernel!r} of shape {shapes[kernel]} embeds flattened patches: a NaFlex model, which "
            "vitkit does not have; take one of a fixed size (vitkit list weights)",
            code="weights.unsupported",
        )


def square_patch(kernel: tuple[int, int]) -> int:
    if kernel[0] != kernel[1]:
        raise WeightsError(
            f"patches must be square, not {kernel[0]}x{kernel[1]} pixels", code="weights.shape"
        )
    return kernel[0]


def read_number(table: Mapping[str, Any], name: str, field: str, default: Any, file: str) -> Any:
    """A number or a list of numbers from a JSON file, checked against the range of our `field`."""
    value = table.get(name)
    if value is None:
        return default
    is_list = isinstance(default, tuple)
    numbers = value if is_list else [value]
    if is_list != isinstance(value, list) or not all(type(number) in (int, float) for number in numbers):
        kind = "a list of numbers" if is_list else "a number"
        raise WeightsError(f"{file}: {name} is {str(value)[:40]!r}; expected {kind}")
    if reason := out_of_range(field, value, name):
        raise WeightsError(f"{file}: {reason}")
    return tuple(value) if is_list else value


def unsupported_fields(config: Config, library: str, *, also: tuple[str, ...] = ()) -> str:
    """Why a layout cannot hold a ViT with these options; it does support the fields in `also`."""
    if not isinstance(config, ViTConfig):
        if isinstance(config, DenseConfig):
            return f"the {library} layout holds no heads for {config.task}; save it as vitkit"
        return f"the {library} layout holds only ViTs; save a ResNet as official or timm"
    if config.head == "token+gap" and "token+gap" not in also:
        return f"the {library} layout does not support head='token+gap'; save it as dino, hf or vitkit"
    defaults = {
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
        "class_position": True,
        "registers": 0,
        "merge_tokens": 0,
        "distilled": False,
        "rope": "none",
        "input_norm": False,
        "mlp": "gelu",
        "mlp_norm": False,
        "project_bias": True,
        "key_bias": True,
        "qk_norm": False,
        "representation_kind": "tanh",
        "text": None,
        "normalize": False,
    }
    unsupported = [
        f"{k}={getattr(config, k)!r}"
        for k, v in defaults.items()
        if k not in also and getattr(config, k) not in (v, "token+gap")
    ]
    return f"the {library} layout does not support {', '.join(unsupported)}" if unsupported else ""


def with_numerics(config: Config, stem: dict[str, Any] | None = None, **numerics: Any) -> Config:
    """The configuration with the epsilons and the GELU of another library."""
    if isinstance(config, ViTConfig) and isinstance(config.stem, StemConfig) and stem:
        numerics["stem"] = replace(config.stem, **stem)
    return replace(config, **numerics)
