"""BiT ResNets in the names of big_transfer, big_vision (models/bit_paper.py) and timm."""

import re
from dataclasses import replace

from vitkit.models.card import Preprocessing
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Config
from vitkit.weights.formats.layout import (
    CONV,
    CONV_HEAD,
    DENSE,
    FLAT,
    SAME,
    Entry,
    Form,
    Hints,
    Layout,
    ModelSpec,
    Shapes,
    Source,
    pairs,
    required_shape,
    with_numerics,
)
from vitkit.weights.formats.timm_config import CONFIG, json_files, read_config, read_preprocessing, read_size

# (1, 1, F, K) <-> (K, F)
KERNEL_HEAD = Form(lambda a: a.flatten(0, 2).mT, lambda a: a.mT[None, None])
NORM = Form(lambda a: a.flatten(), lambda a: a[None, None, None])  # (1, 1, 1, C) <-> (C,)
PREFIXES = ("params/", "opt/target/", "")  # of big_vision's files
ROOT = "root_block/conv_root/kernel"


def entries_official(config: Config) -> list[Entry]:
    assert isinstance(config, ResNetConfig)
    conv, norm = "standardized_conv2d/kernel", "group_norm/{}"
    table = [
        Entry("root.weight", (f"resnet/root_block/{conv}",), CONV),
        *norm_entries("norm", f"resnet/{norm}"),
    ]
    for own, s, u in units(config):
        foreign = f"resnet/block{s + 1}/unit{u + 1:02d}"
        for k, letter in ((1, "a"), (2, "b"), (3, "c")):
            table += [Entry(f"{own}.conv{k}.weight", (f"{foreign}/{letter}/{conv}",), CONV)]
            table += norm_entries(f"{own}.norm{k}", f"{foreign}/{letter}/{norm}")
        if u == 0:
            table += [Entry(f"{own}.shortcut.weight", (f"{foreign}/a/proj/{conv}",), CONV)]
    if config.classes:
        table += [
            Entry("head.weight", ("resnet/head/conv2d/kernel",), KERNEL_HEAD),
            Entry("head.bias", ("resnet/head/conv2d/bias",), SAME),
        ]
    return table


def entries_big_vision(config: Config) -> list[Entry]:
    assert isinstance(config, ResNetConfig)

    def norm(own: str, foreign: str) -> list[Entry]:
        names = {"weight": "scale", "bias": "bias"}
        return [Entry(f"{own}.{part}", (f"{foreign}/{name}",), NORM) for part, name in names.items()]

    table = [Entry("root.weight", (ROOT,), CONV), *norm("norm", "norm-pre-head")]
    for own, s, u in units(config):
        foreign = f"block{s + 1}/unit{u + 1:02d}"
        for k in (1, 2, 3):
            table += [Entry(f"{own}.conv{k}.weight", (f"{foreign}/conv{k}/kernel",), CONV)]
            table += norm(f"{own}.norm{k}", f"{foreign}/gn{k}")
        if u == 0:
            table += [Entry(f"{own}.shortcut.weight", (f"{foreign}/conv_proj/kernel",), CONV)]
    if config.classes:
        table += [Entry("head.weight", ("head/kernel",), DENSE), Entry("head.bias", ("head/bias",), SAME)]
    return table


def entries_timm(config: Config) -> list[Entry]:
    assert isinstance(config, ResNetConfig)
    table = [*pairs("root", "stem.conv", parts=("weight",)), *pairs("norm", "norm")]
    for own, s, u in units(config):
        foreign = f"stages.{s}.blocks.{u}"
        for k in (1, 2, 3):
            table += pairs(f"{own}.conv{k}", f"{foreign}.conv{k}", parts=("weight",))
            table += pairs(f"{own}.norm{k}", f"{foreign}.norm{k}")
        if u == 0:
            table += pairs(f"{own}.shortcut", f"{foreign}.downsample.conv", parts=("weight",))
    if config.classes:
        table += [
            Entry("head.weight", ("head.fc.weight",), CONV_HEAD),
            *pairs("head", "head.fc", parts=("bias",)),
        ]
    return table


def units(config: ResNetConfig) -> list[tuple[str, int, int]]:
    return [(f"stages.{s}.{u}", s, u) for s, units in enumerate(config.blocks) for u in range(units)]


def norm_entries(own: str, foreign: str) -> list[Entry]:
    names = {"weight": "gamma", "bias": "beta"}
    return [Entry(f"{own}.{part}", (foreign.format(name),), FLAT) for part, name in names.items()]


def blocks_of(shapes: Shapes, pattern: str) -> tuple[int, ...]:
    """Units in each stage, from the names of their first convolutions."""
    unit_stages = [m[1] for name in shapes if (m := re.fullmatch(pattern, name))]
    return tuple(unit_stages.count(stage) for stage in sorted(set(unit_stages)))


def infer_official(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, "resnet/root_block/standardized_conv2d/kernel", 4)
    head = "resnet/head/conv2d/kernel"
    config = ResNetConfig(
        blocks=blocks_of(shapes, r"resnet/block(\d)/unit\d+/a/standardized_conv2d/kernel"),
        width=kernel[3],
        channels=kernel[2],
        classes=required_shape(shapes, head, 4)[3] if head in shapes else 0,
        image_size=hints.image_size or (224, 224),
    )
    return ModelSpec(config)


def infer_big_vision(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, ROOT, 4)
    config = ResNetConfig(
        blocks=blocks_of(shapes, r"block(\d)/unit\d+/conv1/kernel"),
        width=kernel[3],
        channels=kernel[2],
        classes=required_shape(shapes, "head/kernel", 2)[1] if "head/kernel" in shapes else 0,
        image_size=hints.image_size or (224, 224),
        root_padding="-inf",
    )
    return ModelSpec(config)


def canonical_big_vision(shapes: Shapes) -> dict[str, Source]:
    prefix = next((p for p in PREFIXES if p + ROOT in shapes), "")
    return {name.removeprefix(prefix): Source(name) for name in shapes if name.startswith(prefix)}


def infer_timm(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, "stem.conv.weight", 4)
    config = ResNetConfig(
        blocks=blocks_of(shapes, r"stages\.(\d)\.blocks\.\d+\.conv1\.weight"),
        width=kernel[0],
        channels=kernel[1],
        classes=required_shape(shapes, "head.fc.weight", 4)[0] if "head.fc.weight" in shapes else 0,
        image_size=hints.image_size or (224, 224),
        std_eps=1e-8,
    )
    if CONFIG not in hints.files:
        return ModelSpec(config, Preprocessing(interpolation="bilinear"))
    metadata = read_config(hints.files)
    size = hints.image_size or read_size(hints.files) or config.image_size
    labels = metadata["label_names"] if len(metadata["label_names"]) == config.classes else ()
    return ModelSpec(replace(config, image_size=size), read_preprocessing(metadata["pretrained_cfg"]), labels)


def unsupported(config: Config) -> str:
    if not isinstance(config, ResNetConfig):
        return "the BiT layout holds only ResNets"
    if config.attention != "none":
        return f"the BiT layout does not support attention={config.attention!r}; save in vitkit's own format"
    return ""


OFFICIAL = Layout(
    name="official-bit",
    recognises=lambda shapes: "resnet/root_block/standardized_conv2d/kernel" in shapes,
    infer=infer_official,
    entries=entries_official,
    unsupported=unsupported,
    native=lambda config: with_numerics(
        config, norm_eps=1e-5, std_eps=1e-10, std_eps_in="variance", root_padding="zeros"
    ),
    peer="timm",
)
BIG_VISION = Layout(
    name="big_vision-bit",
    recognises=lambda shapes: any(prefix + ROOT in shapes for prefix in PREFIXES),
    infer=infer_big_vision,
    entries=entries_big_vision,
    unsupported=unsupported,
    native=lambda config: with_numerics(
        config, norm_eps=1e-5, std_eps=1e-10, std_eps_in="variance", root_padding="-inf"
    ),
    peer="big_vision",
    canonical_names=canonical_big_vision,
)
TIMM = Layout(
    name="timm-bit",
    recognises=lambda shapes: "stages.0.blocks.0.conv1.weight" in shapes and "stem.conv.weight" in shapes,
    infer=infer_timm,
    entries=entries_timm,
    unsupported=unsupported,
    native=lambda config: with_numerics(
        config, norm_eps=1e-5, std_eps=1e-8, std_eps_in="variance", root_padding="zeros"
    ),
    peer="timm",
    json_files=json_files,
)
