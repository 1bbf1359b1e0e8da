"""The torchvision format: ViTs in torchvision's names."""

from vitkit.models.card import Preprocessing
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.layout import (
    SAME,
    Entry,
    Format,
    Hints,
    Layout,
    ModelSpec,
    Shapes,
    Source,
    count,
    guess_heads,
    infer_image_size,
    pairs,
    required_shape,
    square_patch,
    unsupported_fields,
    with_numerics,
)

LAYER = "encoder.layers.encoder_layer_{}"
HEAD = {"heads.head": "head", "heads.pre_logits": "representation"}


def recognises(shapes: Shapes) -> bool:
    return "conv_proj.weight" in shapes and "encoder.pos_embedding" in shapes


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """Old files name the layers of the MLP linear_1 and linear_2."""
    return {
        n.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3."): Source(n) for n in shapes
    }


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, "conv_proj.weight", 4)
    depth = count(shapes, LAYER + ".ln_1.weight")
    hidden = required_shape(shapes, LAYER.format(0) + ".mlp.0.weight", 2)[0]
    heads, note = guess_heads(kernel[0], depth, hidden, hints)
    patch = square_patch((kernel[2], kernel[3]))
    sizes = {
        own: required_shape(shapes, f"{n}.weight", 2)[0] for n, own in HEAD.items() if f"{n}.weight" in shapes
    }
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        channels=kernel[1],
        image_size=infer_image_size(
            required_shape(shapes, "encoder.pos_embedding", 3)[1], True, patch, hints
        )[0],
        classes=sizes.get("head", 0),
        representation=sizes.get("representation", 0),
        gelu="erf",
        position_resize="torchvision",
    )
    preprocessing = Preprocessing(
        resize="crop", crop=0.875, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    return ModelSpec(config, preprocessing, notes=(note,) if note else ())


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    table = [
        *pairs("project", "conv_proj"),
        Entry("class_token", ("class_token",), SAME),
        Entry("positions.table", ("encoder.pos_embedding",), SAME),
        *pairs("encoder.norm", "encoder.ln"),
    ]
    for i in range(config.depth):
        own, foreign = f"encoder.blocks.{i}", LAYER.format(i)
        table += [
            *pairs(f"{own}.norm1", f"{foreign}.ln_1"),
            Entry(f"{own}.attention.qkv.weight", (f"{foreign}.self_attention.in_proj_weight",), SAME),
            Entry(f"{own}.attention.qkv.bias", (f"{foreign}.self_attention.in_proj_bias",), SAME),
            *pairs(f"{own}.attention.out", f"{foreign}.self_attention.out_proj"),
            *pairs(f"{own}.norm2", f"{foreign}.ln_2"),
            *pairs(f"{own}.mlp.up", f"{foreign}.mlp.0"),
            *pairs(f"{own}.mlp.down", f"{foreign}.mlp.3"),
        ]
    table += pairs("representation", "heads.pre_logits") if config.representation else []
    return table + (pairs("head", "heads.head") if config.classes else [])


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.gelu != "erf":
        return (
            f"torchvision always uses the erf GELU and this model uses {config.gelu}, so its outputs would "
            "change; to accept that: vitkit convert --gelu erf (load(FILE, gelu='erf') in Python)"
        )
    return unsupported_fields(config, "torchvision", also=("representation",))


LAYOUT = Layout(
    name="torchvision",
    recognises=recognises,
    canonical_names=canonical_names,
    infer=infer,
    entries=entries,
    unsupported=unsupported,
    native=lambda config: with_numerics(config, gelu="erf", norm_eps=1e-6),
    peer="torchvision",
)
FORMAT = Format(
    tokens=lambda c: {"class_position": True},
    name="torchvision",
    description="ViT; the erf GELU only",
    layouts=(LAYOUT,),
    endings=(".pth", ".pt", ".bin", ".safetensors"),
    order=40,
)
