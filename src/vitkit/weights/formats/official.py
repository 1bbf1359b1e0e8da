"""The official format: '/'-joined array names, as vision_transformer and big_vision save them."""

import re

from vitkit.errors import WeightsError
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats import bit
from vitkit.weights.formats.layout import (
    CONV,
    DENSE,
    FLAT,
    SAME,
    Entry,
    Form,
    Format,
    Hints,
    Layout,
    ModelSpec,
    Shapes,
    Source,
    heads_bias,
    heads_in,
    heads_out,
    infer_image_size,
    refuse_flat_patches,
    required_shape,
    square_patch,
    unsupported_fields,
    with_numerics,
)
from vitkit.weights.formats.text_rows import big_vision_canonical, big_vision_entries, big_vision_text

PREFIXES = ("opt/target/", "params/img/", "params/", "")
POSITIONS = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_{}/"
LINEN = {  # Flax counts modules per class now; the published files count all modules of a block
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
}


def recognises(shapes: Shapes) -> bool:
    return any(f"{prefix}embedding/kernel" in shapes for prefix in PREFIXES)


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """The published names for every variant: prefixes, numbering, stacked layers, the position table."""
    prefix = next((p for p in PREFIXES if f"{p}embedding/kernel" in shapes), "")
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        if not name.startswith(prefix):
            continue
        short = name.removeprefix(prefix)
        short = POSITIONS if short == "pos_embedding" else short
        if short.startswith("Transformer/encoderblock/"):  # layers stacked on the first axis
            if not shape or shape[0] > 1_000 or len(sources) > 100_000:
                raise WeightsError(
                    f"array {name!r} of shape {shape} is not a stack of layers", code="weights.shape"
                )
            rest = short.removeprefix("Transformer/encoderblock/")
            for layer in range(shape[0]):
                sources[BLOCK.format(layer) + published_name(rest)] = Source(name, layer)
        else:
            inside = re.match(r"(Transformer/encoderblock_\d+/)(.*)", short)
            sources[inside[1] + published_name(inside[2]) if inside else short] = Source(name)
    return sources | (big_vision_canonical(shapes) if prefix == "params/img/" else {})


def published_name(rest: str) -> str:
    """The name within a block, in the numbering of the published files."""
    first, slash, last = rest.partition("/")
    return LINEN.get(first, first) + slash + last


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    refuse_flat_patches(shapes, "embedding/kernel")
    kernel = required_shape(shapes, "embedding/kernel", 4)
    depth = len({m[1] for name in shapes if (m := re.match(r"Transformer/encoderblock_(\d+)/", name))})
    block = BLOCK.format(0)
    query = required_shape(shapes, block + "MultiHeadDotProductAttention_1/query/kernel", 3)
    hidden = required_shape(shapes, block + "MlpBlock_3/Dense_0/kernel", 2)[1]
    class_token = "cls" in shapes
    stem = infer_stem(shapes)
    patch = square_patch((kernel[0], kernel[1]))
    notes: list[str] = []
    if POSITIONS in shapes:
        positions = "1d"
        entries = required_shape(shapes, POSITIONS, 3)[1]
        size, note = infer_image_size(entries, class_token, patch * (stem.stride if stem else 1), hints)
        notes += [note] if note else []
    elif class_token:
        raise WeightsError(f"array {POSITIONS!r} is missing", code="weights.names")
    else:  # fixed positions are not stored
        positions, size = "sincos2d", hints.image_size or (224, 224)
        notes.append(f"no position table: fixed sincos2d positions, at {size[0]}x{size[1]} pixels")
    class_position = positions != "1d" or not class_token or entries > config_patches(size, patch, stem)
    pre_logits = "pre_logits/kernel" in shapes
    config = ViTConfig(
        width=kernel[3],
        depth=depth,
        heads=query[1],
        hidden=hidden,
        patch=patch,
        image_size=size,
        channels=required_shape(shapes, "conv_root/kernel", 4)[2] if stem else kernel[2],
        classes=required_shape(shapes, "head/kernel", 2)[1] if "head/kernel" in shapes else 0,
        representation=required_shape(shapes, "pre_logits/kernel", 2)[1] if pre_logits else 0,
        stem=stem,
        class_token=class_token,
        class_position=class_position,
        positions=positions,
        qkv_bias=block + "MultiHeadDotProductAttention_1/query/bias" in shapes,
        head="map" if "MAPHead_0/probe" in shapes else "token" if class_token else "gap",
        text=big_vision_text(shapes),
    )
    return ModelSpec(config, notes=tuple(notes))


def config_patches(size: tuple[int, int], patch: int, stem: StemConfig | None) -> int:
    stride = patch * (stem.stride if stem else 1)
    return (size[0] // stride) * (size[1] // stride)


def infer_stem(shapes: Shapes) -> StemConfig | None:
    if "conv_root/kernel" not in shapes:
        return None
    units = [re.match(r"block(\d+)/unit(\d+)/conv1/kernel", name) for name in shapes]
    numbers = {(int(m[1]), int(m[2])) for m in units if m}
    stages = max((s for s, _ in numbers), default=0)
    blocks = tuple(sum(s == stage for s, _ in numbers) for stage in range(1, min(stages, 4) + 1))
    return StemConfig(blocks=blocks, width=required_shape(shapes, "conv_root/kernel", 4)[3])


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    rows = [("project.weight", "embedding/kernel", CONV), ("project.bias", "embedding/bias", SAME)]
    if config.class_token:
        rows += [("class_token", "cls", SAME)]
    if config.positions == "1d":
        rows += [("positions.table", POSITIONS, SAME)]
    table = [Entry(own, (foreign,), form) for own, foreign, form in rows]
    for i in range(config.depth):
        table += block_entries(config, f"encoder.blocks.{i}", BLOCK.format(i))
    table += norm_entries("encoder.norm", "Transformer/encoder_norm")
    if config.head == "map":
        table += pool_entries(config)
    for own, foreign, present in (
        ("representation", "pre_logits", config.representation),
        ("head", "head", config.classes),
    ):
        if present:
            table += dense_entries(own, foreign)
    table += stem_entries(config.stem) if config.stem else []
    return table + big_vision_entries(config.text)


def block_entries(config: ViTConfig, own: str, foreign: str) -> list[Entry]:
    attention = foreign + "MultiHeadDotProductAttention_1/"
    qkv = tuple(f"{attention}{name}/" for name in ("query", "key", "value"))
    table = [Entry(f"{own}.attention.qkv.weight", tuple(n + "kernel" for n in qkv), heads_in(config.heads))]
    if config.qkv_bias:
        table += [
            Entry(f"{own}.attention.qkv.bias", tuple(n + "bias" for n in qkv), heads_bias(config.heads))
        ]
    return [
        *table,
        Entry(f"{own}.attention.out.weight", (attention + "out/kernel",), heads_out(config.heads)),
        Entry(f"{own}.attention.out.bias", (attention + "out/bias",), SAME),
        *norm_entries(f"{own}.norm1", foreign + "LayerNorm_0"),
        *norm_entries(f"{own}.norm2", foreign + "LayerNorm_2"),
        *dense_entries(f"{own}.mlp.up", foreign + "MlpBlock_3/Dense_0"),
        *dense_entries(f"{own}.mlp.down", foreign + "MlpBlock_3/Dense_1"),
    ]


def pool_entries(config: ViTConfig) -> list[Entry]:
    """The attention-pooling head; only big_vision has one, so its numbering is used."""
    attention = "MAPHead_0/MultiHeadDotProductAttention_0/"
    pair = tuple(attention + name for name in ("key", "value"))
    kernel, bias = heads_in(config.heads), heads_bias(config.heads)
    return [
        Entry("pool.probe", ("MAPHead_0/probe",), SAME),
        Entry("pool.query.weight", (attention + "query/kernel",), kernel),
        Entry("pool.query.bias", (attention + "query/bias",), bias),
        Entry("pool.key_value.weight", tuple(n + "/kernel" for n in pair), kernel),
        Entry("pool.key_value.bias", tuple(n + "/bias" for n in pair), bias),
        Entry("pool.out.weight", (attention + "out/kernel",), heads_out(config.heads)),
        Entry("pool.out.bias", (attention + "out/bias",), SAME),
        *norm_entries("pool.norm", "MAPHead_0/LayerNorm_0"),
        *dense_entries("pool.mlp.up", "MAPHead_0/MlpBlock_0/Dense_0"),
        *dense_entries("pool.mlp.down", "MAPHead_0/MlpBlock_0/Dense_1"),
    ]


def stem_entries(stem: StemConfig) -> list[Entry]:
    def conv_norm(own: str, own_norm: str, conv: str, norm: str) -> list[Entry]:
        return [Entry(f"{own}.weight", (f"{conv}/kernel",), CONV), *norm_entries(own_norm, norm)]

    table = conv_norm("stem.root", "stem.root_norm", "conv_root", "gn_root")
    for s, units in enumerate(stem.blocks):
        for u in range(units):
            own, foreign = f"stem.stages.{s}.{u}", f"block{s + 1}/unit{u + 1}"
            for k, norm in ((1, "norm1"), (2, "norm2"), (3, "closing_norm")):
                table += conv_norm(
                    f"{own}.conv{k}", f"{own}.{norm}", f"{foreign}/conv{k}", f"{foreign}/gn{k}"
                )
            if u == 0:
                table += conv_norm(
                    f"{own}.shortcut", f"{own}.shortcut_norm", f"{foreign}/conv_proj", f"{foreign}/gn_proj"
                )
    return table


def norm_entries(own: str, foreign: str) -> list[Entry]:
    return [
        Entry(f"{own}.weight", (f"{foreign}/scale",), FLAT),
        Entry(f"{own}.bias", (f"{foreign}/bias",), FLAT),
    ]


def dense_entries(own: str, foreign: str, form: Form = DENSE) -> list[Entry]:
    return [
        Entry(f"{own}.weight", (f"{foreign}/kernel",), form),
        Entry(f"{own}.bias", (f"{foreign}/bias",), SAME),
    ]


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.head != "token" and config.class_token:
        return "the official layout does not support a class token with a pooled head"
    if isinstance(config, ViTConfig) and config.positions == "sincos2d" and config.class_token:
        return "the official layout does not support fixed positions with a class token"
    supported = ("head", "representation", "stem", "qkv_bias", "class_position")
    fixed = isinstance(config, ViTConfig) and config.positions == "sincos2d"
    return unsupported_fields(config, "official", also=(*supported, "positions") if fixed else supported)


def choose(config: Config) -> Layout:
    """The layout of the code that computes as the model does."""
    if not isinstance(config, ResNetConfig):
        return LAYOUT
    return bit.BIG_VISION if config.root_padding == "-inf" else bit.OFFICIAL


def native(config: Config) -> Config:
    stem = {"norm_eps": 1e-6, "std_eps": 1e-5, "std_eps_in": "std"}
    return with_numerics(config, stem, gelu="tanh", norm_eps=1e-6)


LAYOUT = Layout(
    name="official",
    recognises=recognises,
    canonical_names=canonical_names,
    infer=infer,
    entries=entries,
    unsupported=unsupported,
    native=native,
    peer="timm",
)
FORMAT = Format(
    name="official",
    description="ViT, hybrid and BiT arrays of the authors' code and of big_vision; all variants are read",
    layouts=(LAYOUT, bit.OFFICIAL, bit.BIG_VISION),
    endings=(".npz",),
    default_ending=".npz",
    choose=choose,
    order=10,
)
