"""Named models (Table 1): from a name to a configuration and to a fresh model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vitkit.errors import ConfigError, Error, did_you_mean
from vitkit.models.dense.dense_model import DenseConfig, DenseModel, published_config
from vitkit.models.families import NAMES, family_options
from vitkit.models.initialization import initialize_resnet, initialize_vit
from vitkit.models.resnet import ResNet, ResNetConfig, StemConfig
from vitkit.models.vit import ViT, ViTConfig, with_size_note

Backbone = ViT | ResNet
BackboneConfig = ViTConfig | ResNetConfig
Model = Backbone | DenseModel
Config = BackboneConfig | DenseConfig
VARIANTS = {
    "Ti": {"width": 192, "depth": 12, "heads": 3, "hidden": 768},
    "S": {"width": 384, "depth": 12, "heads": 6, "hidden": 1536},
    "b": {"width": 384, "depth": 12, "heads": 12, "hidden": 1536},  # Fig. 4: B with half the width
    "B": {"width": 768, "depth": 12, "heads": 12, "hidden": 3072},
    "L": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    "H": {"width": 1280, "depth": 32, "heads": 16, "hidden": 5120},
    "g": {"width": 1408, "depth": 40, "heads": 16, "hidden": 6144},
    "G": {"width": 1664, "depth": 48, "heads": 16, "hidden": 8192},
}
RESNETS = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
STEMS = {  # (name, total stride) -> units per stage; R50 at stride 16 moves stage 4 into stage 3
    ("R50", 16): (3, 4, 9),
    ("R50", 32): (3, 4, 6, 3),
    ("R26", 32): (2, 2, 2, 2),
}


@dataclass(frozen=True)
class Published:
    """The published cost of a variant: parameters (1000 classes, 224 px), GMAC at 224 and 384."""

    parameters: int
    gmac: float | None = None
    gmac_384: float | None = None


NAMED: dict[str, Published | None] = {
    "ViT-Ti/16": Published(5_717_416, 1.254, 4.682),
    "ViT-S/32": Published(22_878_952, 1.143, 3.443),
    "ViT-S/16": Published(22_050_664, 4.599, 15.490),
    "ViT-b/32": Published(22_878_952, 1.143, 3.443),
    "ViT-B/32": Published(88_224_232, 4.409, 13.044),
    "ViT-B/16": Published(86_567_656, 17.564, 55.484),
    "ViT-B/8": Published(86_576_872, 78.148, 294.0),
    "ViT-L/32": Published(306_535_400, 15.378, 45.276),
    "ViT-L/16": Published(304_326_632, 61.555, 191.066),
    "ViT-L/14": Published(304_203_752),
    "ViT-H/14": Published(632_045_800, 167.295),
    "ViT-g/14": Published(1_012_611_432, 267.03),
    "ViT-G/14": Published(1_844_440_680, 483.75),
    "R+ViT-Ti/16": Published(6_337_704, 0.43, 1.33),
    "R26+ViT-S/32": Published(36_431_912, 3.46, 10.26),
    "R26+ViT-B/32": Published(101_383_976),
    "R50+ViT-B/32": Published(110_945_832, 8.46, 24.94),
    "R50+ViT-B/16": Published(98_659_112, 21.54, 67.16),
    "R50+ViT-L/32": Published(328_994_856, 19.41, 57.14),
    "R50+ViT-L/16": Published(316_483_624, 65.54, 202.78),
    "Axial-ViT-B/32": None,
    "Axial-ViT-B/16": None,
    "AxialResNet-50": None,
    **dict.fromkeys(NAMES),
    **{f"BiT-R{depth}x{width}": None for depth in RESNETS for width in (1, 2, 3, 4)},
}


def variant(name: str) -> BackboneConfig:
    """The configuration of ViT-L/16, R50+ViT-B/32, BiT-R152x2, ... at 224 pixels and 1000 classes."""
    if match := re.fullmatch(r"BiT-(?:[SML]-)?R(\d+)x(\d+)", name):
        depth, factor = int(match[1]), int(match[2])
        if depth in RESNETS and factor >= 1:
            return ResNetConfig(blocks=RESNETS[depth], width=64 * factor)
    if (match := re.fullmatch(r"AxialResNet-(\d+)", name)) and int(match[1]) in RESNETS:
        return ResNetConfig(blocks=RESNETS[int(match[1])], attention="axial")
    if match := re.fullmatch(r"(Axial-)?(?:(R\d*)(?:x1)?\+)?ViT-([A-Za-z]+)[/_](\d+)", name):
        axial, stem, size, patch = match[1], match[2], match[3], int(match[4])
        if size in VARIANTS and patch and not (axial and stem):
            return vit_variant(size, patch, stem, axial=bool(axial))
    if options := family_options(name):
        return ViTConfig(**options)
    raise Error(
        f"no model {name!r};{did_you_mean(name, NAMED)} known: ViT-X/P with X one of {', '.join(VARIANTS)} "
        "and any patch size P, "
        f"Axial-ViT-X/P, R50+ViT-X/16 or /32, R26+ViT-X/32, R+ViT-X/16, "
        f"and BiT-RNxW or AxialResNet-N with N one of {', '.join(map(str, RESNETS))}, "
        "and DINOv2, DINOv3, CLIP, SigLIP, DeiT, MAE, FlexiViT, EVA02 with their sizes (see: vitkit list)",
        code="model.unknown",
    )


def published_variant(name: str) -> Config:
    """As variant, and of published models with dense outputs, such as RF-DETR-nano."""
    return published_config(name) or variant(name)


def vit_variant(size: str, stride: int, stem: str | None, *, axial: bool) -> ViTConfig:
    sizes: dict[str, Any] = dict(VARIANTS[size])
    if axial:
        sizes |= {"attention": "axial", "head": "gap"}
    if stem == "R" and stride == 16:  # its published name, although the stride is 32
        sizes |= {"stem": StemConfig(blocks=()), "patch": 8}
    elif stem:
        base = 32 if stride % 32 == 0 else stride
        if (stem, base) not in STEMS:
            known = ", ".join(f"{s}+ViT-{size}/{p}" for s, p in STEMS)
            raise Error(
                f"no hybrid {stem}+ViT-{size}/{stride}; known: {known}, R+ViT-{size}/16", code="model.unknown"
            )
        sizes |= {"stem": StemConfig(blocks=STEMS[stem, base]), "patch": stride // base}
    else:
        sizes |= {"patch": stride}
    image = -(-224 // stride) * stride  # 224, or the next larger multiple of the stride
    if stem == "R":
        image = 224
    return ViTConfig(**sizes, image_size=(image, image))


def configure(name: str, **options: Any) -> BackboneConfig:
    """The configuration of a named model with some fields changed; an unknown field is an error."""
    config = variant(name)
    known = [f.name for f in fields(config)]
    for field in options:
        if field not in known:
            raise ConfigError(f"{name} has no option {field!r}; its options: {', '.join(known)}")
    return replace(config, **following_head(options))


def following_head(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options; a new head decides whether there is a class token unless `class_token` is given."""
    return {"class_token": None, **options} if "head" in options else dict(options)


def with_options(config: BackboneConfig, options: Mapping[str, Any]) -> BackboneConfig:
    """The configuration with these fields changed; fields of a stem are named stem.width and so on."""
    known = [f.name for f in fields(config)]
    stem = getattr(config, "stem", None)
    known += [f"stem.{f.name}" for f in fields(stem)] if stem else []
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            kind = type(config).__name__.removesuffix("Config")
            raise ConfigError(f"a {kind} has no option {name!r};{hint} its options: {', '.join(known)}")
    own = following_head({name: value for name, value in options.items() if "." not in name})
    inner = {name.removeprefix("stem."): value for name, value in options.items() if "." in name}
    return replace(config, **(own | ({"stem": replace(stem, **inner)} if stem and inner else {})))


def build(name: str, *, seed: int | None = None, **options: Any) -> Model:
    """A fresh model: build("ViT-B/16", classes=10, image_size=384, head="gap").

    Options are the fields of ViTConfig (or ResNetConfig); the same seed gives the same weights. Pixels
    outside whole patches are dropped, and model.origin.notes says how many.
    """
    return fresh(configure(name, **options), seed=seed)


def fresh(config: Config, *, seed: int | None = None) -> Model:
    """A model of this configuration with the published initialisation."""
    model = skeleton(config)._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # to_empty imports sympy
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if isinstance(model, DenseModel):
        model.initialize(generator)
    else:
        (initialize_vit if isinstance(model, ViT) else initialize_resnet)(model, generator)
    model.origin = with_size_note(model.origin, config)
    return model


def with_image_size(config: Config, size: tuple[int, int]) -> Config:
    """The same model for images of another size."""
    if isinstance(config, DenseConfig):
        return replace(config, vit=replace(config.vit, image_size=size))
    return replace(config, image_size=size)


def backbone(model: Model) -> Backbone:
    """The model itself, or the ViT of a model with dense outputs, with the description of that model."""
    if not isinstance(model, DenseModel):
        return model
    vit = model.vit
    vit.preprocessing, vit.origin = model.preprocessing, model.origin
    return vit


def skeleton(config: Config) -> Model:
    """The model on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        if isinstance(config, DenseConfig):
            return config.build()
        return ViT(config) if isinstance(config, ViTConfig) else ResNet(config)
