"""The original files of DINOv2 and DINOv3, in the names of their own code."""

import re
from functools import partial

import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.layout import (
    SAME,
    Entry,
    Form,
    Format,
    Hints,
    Layout,
    ModelSpec,
    Row,
    Shapes,
    Source,
    count,
    guess_heads,
    infer_image_size,
    required_shape,
    square_patch,
    table_entries,
    unsupported_fields,
    with_numerics,
)

FLAT_TOKEN = Form(lambda a: a[None], lambda a: a[0])  # (1, D) <-> (1, 1, D)
IMAGENET = Preprocessing(
    resize="crop", crop=0.875, interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
BLOCK, OWN = "blocks.{}.", "encoder.blocks.{}."
BACKBONE, LINEAR_HEAD = "backbone.", "linear_head"  # of the classifiers in their torch.hub
SHARED: list[Row] = [
    ("project", "patch_embed.proj", SAME),
    ("class_token", "cls_token", SAME),
    ("mask_token", "mask_token", FLAT_TOKEN),
    (OWN + "norm1", BLOCK + "norm1", SAME),
    (OWN + "attention.qkv", BLOCK + "attn.qkv", SAME),
    (OWN + "attention.out", BLOCK + "attn.proj", SAME),
    (OWN + "scale1", BLOCK + "ls1.gamma", SAME),
    (OWN + "norm2", BLOCK + "norm2", SAME),
    (OWN + "scale2", BLOCK + "ls2.gamma", SAME),
    ("encoder.norm", "norm", SAME),
    ("head", LINEAR_HEAD, SAME),
]
MLP: list[Row] = [(OWN + "mlp.up", BLOCK + "mlp.fc1", SAME), (OWN + "mlp.down", BLOCK + "mlp.fc2", SAME)]
V2: list[Row] = [*SHARED, ("registers", "register_tokens", SAME), ("positions.table", "pos_embed", SAME)]
V2_GATED: list[Row] = [
    (OWN + "mlp.up", BLOCK + "mlp.w12", SAME),
    (OWN + "mlp.down", BLOCK + "mlp.w3", SAME),
]
V3: list[Row] = [
    *SHARED,
    ("registers", "storage_tokens", SAME),
    ("encoder.rope.periods", "rope_embed.periods", SAME),
]
V3_GATED: list[Row] = [
    (OWN + "mlp.up", (BLOCK + "mlp.w1", BLOCK + "mlp.w2"), SAME),
    (OWN + "mlp.down", BLOCK + "mlp.w3", SAME),
]


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """Training checkpoints name blocks blocks.CHUNK.INDEX, published files blocks.INDEX."""
    short = {name: name.removeprefix(BACKBONE) for name in shapes}
    return {re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", new): Source(old) for old, new in short.items()}


def written_name(name: str, config: Config) -> str:
    return BACKBONE + name if config.classes and not name.startswith(LINEAR_HEAD) else name


def backbone(shapes: Shapes) -> Shapes:
    return {name.removeprefix(BACKBONE): shape for name, shape in shapes.items()}


def is_v3(shapes: Shapes) -> bool:
    shapes = backbone(shapes)
    return "rope_embed.periods" in shapes and "patch_embed.proj.weight" in shapes


def is_v2(shapes: Shapes) -> bool:
    """timm's names; the mask token without a batch axis or the registers tell it from timm's files."""
    shapes = backbone(shapes)
    flat = len(shapes.get("mask_token", ())) == 2
    return (flat or "register_tokens" in shapes) and {"patch_embed.proj.weight", "pos_embed"} <= shapes.keys()


def infer(shapes: Shapes, hints: Hints, *, v3: bool) -> ModelSpec:
    kernel = required_shape(shapes, "patch_embed.proj.weight", 4)
    depth = count(shapes, BLOCK + "norm1.weight")
    patch, down = square_patch((kernel[2], kernel[3])), "blocks.0.mlp.w3.weight"
    gated = down in shapes
    hidden = required_shape(shapes, down if gated else "blocks.0.mlp.fc2.weight", 2)[1]
    mlp = "swiglu" if gated else "gelu"
    if v3 and hints.heads is None:  # Dh / 4 periods
        heads, note = kernel[0] // (4 * required_shape(shapes, "rope_embed.periods", 1)[0]), ""
    else:
        heads, note = guess_heads(kernel[0], depth, hidden, hints, mlp)
    registers = shapes.get("storage_tokens" if v3 else "register_tokens", (1, 0))[1]
    size = hints.image_size or (224, 224)
    if not v3:
        size, _ = infer_image_size(required_shape(shapes, "pos_embed", 3)[1], 1, patch, hints)
    bias = "blocks.0.attn.qkv.bias" in shapes
    classes = infer_classes(shapes, kernel[0])
    options = {"positions": "none", "rope": "dinov3", "rope_rescale": 2.0, "norm_eps": 1e-5} if v3 else {}
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        image_size=size,
        channels=kernel[1],
        classes=classes,
        head="token+gap" if classes else "token",
        registers=registers,
        mask_token="mask_token" in shapes,
        mlp=mlp,
        gelu="erf",
        position_resize="timm" if registers else "dinov2",
        layer_scale="blocks.0.ls1.gamma" in shapes,
        qkv_bias=bias,
        key_bias=not (bias and "blocks.0.attn.qkv.bias_mask" in shapes),
        **options,  # type: ignore[arg-type]
    )
    return ModelSpec(config, IMAGENET, notes=(note,) if note else (), ignored=("local_cls_norm.",))


def infer_classes(shapes: Shapes, width: int) -> int:
    """The outputs of a classifier on class token and mean of patches; 0 for a backbone."""
    if f"{LINEAR_HEAD}.weight" not in shapes:
        return 0
    classes, inputs = required_shape(shapes, f"{LINEAR_HEAD}.weight", 2)
    if inputs != 2 * width:
        raise WeightsError(
            f"its linear head reads {inputs} numbers; vitkit has the one on class token and mean of patches "
            f"({2 * width}), not that on four layers",
            code="weights.unsupported",
        )
    return classes


def entries(config: Config, *, v3: bool) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    gated = (V3_GATED if v3 else V2_GATED) if config.mlp == "swiglu" else MLP
    return table_entries(config, [*(V3 if v3 else V2), *gated])


def bias_masks(config: Config) -> dict[str, Tensor]:
    """DINOv3 multiplies the qkv bias by a stored mask: ones for q and v, zeros for k."""
    assert isinstance(config, ViTConfig)
    if config.key_bias or config.rope == "none":
        return {}
    q = torch.ones(config.width)
    mask = torch.cat([q, torch.zeros_like(q), q])
    return {f"blocks.{i}.attn.qkv.bias_mask": mask.clone() for i in range(config.depth)}


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and bool(config.classes) != (config.head == "token+gap"):
        return "DINO's own classifiers have head='token+gap'; save it in another format"
    also: tuple[str, ...] = ("mask_token", "layer_scale", "qkv_bias", "registers", "mlp", "token+gap")
    if isinstance(config, ViTConfig) and config.rope == "dinov3" and config.positions == "none":
        also += ("rope", "positions", "key_bias")
    return unsupported_fields(config, "DINO", also=also)


V2_LAYOUT = Layout(
    name="dinov2",
    recognises=is_v2,
    canonical_names=canonical_names,
    written_name=written_name,
    infer=partial(infer, v3=False),
    entries=partial(entries, v3=False),
    unsupported=unsupported,
    native=lambda config: with_numerics(config, gelu="erf", norm_eps=1e-6),
)
V3_LAYOUT = Layout(
    name="dinov3",
    recognises=is_v3,
    canonical_names=canonical_names,
    written_name=written_name,
    infer=partial(infer, v3=True),
    entries=partial(entries, v3=True),
    unsupported=unsupported,
    native=lambda config: with_numerics(config, gelu="erf", norm_eps=1e-5),
    constants=bias_masks,
)


def choose(config: Config) -> Layout:
    return V3_LAYOUT if isinstance(config, ViTConfig) and config.rope == "dinov3" else V2_LAYOUT


FORMAT = Format(
    name="dino",
    description="DINOv2 and DINOv3 as their authors save them, with or without a linear head",
    layouts=(V3_LAYOUT, V2_LAYOUT),
    endings=(".pth", ".pt", ".safetensors"),
    choose=choose,
    tokens=lambda c: {"class_position": True, "mask_token": True},  # by which DINOv2 is recognised
    order=15,
)
