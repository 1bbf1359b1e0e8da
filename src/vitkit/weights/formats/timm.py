"""The timm format: ViTs and hybrids in timm's names, which DeiT, MAE and DINO share."""

from dataclasses import replace

from vitkit.models.resnet import StemConfig
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats import bit
from vitkit.weights.formats.layout import (
    SAME,
    Entry,
    Format,
    Hints,
    Layout,
    ModelSpec,
    Shapes,
    count,
    guess_heads,
    infer_image_size,
    pairs,
    position_table,
    required_shape,
    square_patch,
    unsupported_fields,
    with_numerics,
)
from vitkit.weights.formats.timm_config import (
    json_files,
    read_config,
    read_fields,
    read_preprocessing,
    read_size,
)

STEM = "patch_embed.backbone"
DECODER = ("decoder_", "mask_token")  # of a masked autoencoder; not part of the encoder


def recognises(shapes: Shapes) -> bool:
    return "patch_embed.proj.weight" in shapes and "blocks.0.attn.proj.weight" in shapes


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, "patch_embed.proj.weight", 4)
    depth = count(shapes, "blocks.{}.attn.proj.weight")
    hidden = required_shape(shapes, "blocks.0.mlp.fc1.weight", 2)[0]
    metadata, stated = read_config(hints.files), read_fields(hints.files, hints)
    heads, note = guess_heads(kernel[0], depth, hidden, Hints(heads=stated.get("heads")))
    stem = infer_stem(shapes)
    patch = square_patch((kernel[2], kernel[3]))
    class_token = "cls_token" in shapes
    pooled = "fc_norm.weight" in shapes
    stride = patch * (stem.stride if stem else 1)
    positions = required_shape(shapes, "pos_embed", 3)[1]
    if not hints.image_size and (sides := read_size(hints.files)):
        fits = (sides[0] // stride) * (sides[1] // stride) in (positions, positions - class_token)
        hints = replace(hints, image_size=sides) if fits else hints
    size, size_note = infer_image_size(positions, class_token, stride, hints)
    notes = tuple(n for n in (note, size_note) if n)
    head = "map" if "attn_pool.latent" in shapes else "gap" if pooled or not class_token else "token"
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        stem=stem,
        image_size=size,
        channels=required_shape(shapes, f"{root_of(shapes)}.conv.weight", 4)[1] if stem else kernel[1],
        classes=required_shape(shapes, "head.weight", 2)[0] if "head.weight" in shapes else 0,
        representation=(
            required_shape(shapes, "pre_logits.fc.weight", 2)[0] if "pre_logits.fc.weight" in shapes else 0
        ),
        head=stated.get("head", head),
        class_token=class_token,
        final_norm="pooled" if pooled else "tokens",
        gelu=stated.get("gelu", "erf"),
        position_resize="timm",
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        layer_scale="blocks.0.ls1.gamma" in shapes,
    )
    has_decoder = any(name.startswith("decoder_") for name in shapes)
    labels = metadata["label_names"] if len(metadata["label_names"]) == config.classes else ()
    return ModelSpec(
        config,
        read_preprocessing(metadata["pretrained_cfg"]),
        labels,
        notes=notes,
        ignored=DECODER if has_decoder else (),
    )


def root_of(shapes: Shapes) -> str:
    """The prefix of a hybrid's root convolution (timm wraps only stems with stages); empty for other ViTs."""
    return next((r for r in (f"{STEM}.stem", STEM) if f"{r}.conv.weight" in shapes), "")


def infer_stem(shapes: Shapes) -> StemConfig | None:
    if not root_of(shapes):
        return None
    stages = count(shapes, STEM + ".stages.{}.blocks.0.conv1.weight")
    blocks = tuple(count(shapes, f"{STEM}.stages.{s}.blocks.{{}}.conv1.weight") for s in range(stages))
    width = required_shape(shapes, f"{root_of(shapes)}.conv.weight", 4)[0]
    return StemConfig(blocks=blocks, width=width, norm_eps=1e-5, std_eps=1e-8, std_eps_in="variance")


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    table = [*pairs("project", "patch_embed.proj")]
    table += [Entry("positions.table", ("pos_embed",), position_table(config.tokens))]
    if config.class_token:
        table += [Entry("class_token", ("cls_token",), SAME)]
    for i in range(config.depth):
        own, foreign = f"encoder.blocks.{i}", f"blocks.{i}"
        qkv = ("weight", "bias") if config.qkv_bias else ("weight",)
        table += [
            *pairs(f"{own}.norm1", f"{foreign}.norm1"),
            *pairs(f"{own}.attention.qkv", f"{foreign}.attn.qkv", parts=qkv),
            *pairs(f"{own}.attention.out", f"{foreign}.attn.proj"),
            *pairs(f"{own}.norm2", f"{foreign}.norm2"),
            *pairs(f"{own}.mlp.up", f"{foreign}.mlp.fc1"),
            *pairs(f"{own}.mlp.down", f"{foreign}.mlp.fc2"),
        ]
        if config.layer_scale:
            table += [Entry(f"{own}.scale{k}", (f"{foreign}.ls{k}.gamma",), SAME) for k in (1, 2)]
    table += pairs("pool_norm", "fc_norm") if config.final_norm == "pooled" else pairs("encoder.norm", "norm")
    if config.head == "map":
        table += pool_entries()
    table += pairs("representation", "pre_logits.fc") if config.representation else []
    table += pairs("head", "head") if config.classes else []
    return table + (stem_entries(config.stem) if config.stem else [])


def pool_entries() -> list[Entry]:
    names = {
        "query": "q",
        "key_value": "kv",
        "out": "proj",
        "norm": "norm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }
    table = [Entry("pool.probe", ("attn_pool.latent",), SAME)]
    for own, foreign in names.items():
        table += pairs(f"pool.{own}", f"attn_pool.{foreign}")
    return table


def stem_entries(stem: StemConfig) -> list[Entry]:
    root = f"{STEM}.stem" if stem.blocks else STEM
    table = [*pairs("stem.root", f"{root}.conv", parts=("weight",)), *pairs("stem.root_norm", f"{root}.norm")]
    for s, units in enumerate(stem.blocks):
        for u in range(units):
            own, foreign = f"stem.stages.{s}.{u}", f"{STEM}.stages.{s}.blocks.{u}"
            for k, norm in ((1, "norm1"), (2, "norm2"), (3, "closing_norm")):
                table += pairs(f"{own}.conv{k}", f"{foreign}.conv{k}", parts=("weight",))
                table += pairs(f"{own}.{norm}", f"{foreign}.norm{k}")
            if u == 0:
                table += pairs(f"{own}.shortcut", f"{foreign}.downsample.conv", parts=("weight",))
                table += pairs(f"{own}.shortcut_norm", f"{foreign}.downsample.norm")
    return table


def unsupported(config: Config) -> str:
    also = ("head", "final_norm", "layer_scale", "qkv_bias", "stem")
    return unsupported_fields(config, "timm", also=also)


def choose(config: Config) -> Layout:
    return LAYOUT if isinstance(config, ViTConfig) else bit.TIMM


def native(config: Config) -> Config:
    stem = {"norm_eps": 1e-5, "std_eps": 1e-8, "std_eps_in": "variance"}
    return with_numerics(config, stem, gelu="erf", norm_eps=1e-6)


LAYOUT = Layout(
    name="timm",
    recognises=recognises,
    infer=infer,
    entries=entries,
    unsupported=unsupported,
    native=native,
    peer="timm",
    remedies={"gelu": "give it act_layer='gelu_tanh'"},
    json_files=json_files,
)
FORMAT = Format(
    name="timm",
    description="ViT, hybrid, BiT; also DeiT, MAE and DINO encoders; a folder as timm.create_model loads it",
    layouts=(LAYOUT, bit.TIMM),
    endings=(".safetensors", ".pth", ".pt", ".bin", ""),
    choose=choose,
    order=20,
)
