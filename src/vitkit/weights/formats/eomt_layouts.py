"""EoMT in its original names and in those of transformers."""

from dataclasses import replace
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.dense.eomt import EomtConfig
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.hf_json import (
    CONFIG,
    PREPROCESSOR,
    configured_size,
    labels_json,
    preprocessor_json,
    read_gelu,
    read_labels,
    read_preprocessing,
    shared_json,
)
from vitkit.weights.formats.hf_models import TABLE, mlp_ratio
from vitkit.weights.formats.layout import (
    SAME,
    Entry,
    Form,
    Format,
    Hints,
    Layout,
    ModelSpec,
    Shapes,
    Source,
    count,
    guess_heads,
    infer_image_size,
    read_number,
    required_shape,
    square_patch,
    unsupported_fields,
)

IMAGENET = Preprocessing(resize="fit", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
IGNORED = ("network.encoder.pixel_", "criterion.", "metrics.")  # constants, and sums of an evaluation
BACKBONE = "network.encoder.backbone."
NAMES = {  # our module or parameter: that of the original, and that of transformers; {} is a number
    "vit.project": (BACKBONE + "patch_embed.proj", "embeddings.patch_embeddings.projection"),
    "vit.class_token": (BACKBONE + "cls_token", "embeddings.cls_token"),
    "vit.registers": (BACKBONE + "reg_token", "embeddings.register_tokens"),
    "vit.positions.table": (BACKBONE + "pos_embed", "embeddings.position_embeddings.weight"),
    "vit.encoder.norm": (BACKBONE + "norm", "layernorm"),
    "queries": ("network.q.weight", "query.weight"),
    "class_head": ("network.class_head", "class_predictor"),
    "mask_head": ("network.mask_head.{}", "mask_head.fc{}"),
    "upscale.up": ("network.upscale.{}.conv1", "upscale_block.block.{}.conv1"),
    "upscale.mix": ("network.upscale.{}.conv2", "upscale_block.block.{}.conv2"),
    "upscale.norm": ("network.upscale.{}.norm", "upscale_block.block.{}.layernorm2d"),
    "mask_probabilities": ("network.attn_mask_probs", "attn_mask_probs"),
    "norm1": (BACKBONE + "blocks.{}.norm1", "layers.{}.norm1"),
    "attention.qkv": (BACKBONE + "blocks.{}.attn.qkv", "layers.{}.attention"),
    "attention.out": (BACKBONE + "blocks.{}.attn.proj", "layers.{}.attention.out_proj"),
    "scale1": (BACKBONE + "blocks.{}.ls1.gamma", "layers.{}.layer_scale1.lambda1"),
    "norm2": (BACKBONE + "blocks.{}.norm2", "layers.{}.norm2"),
    "mlp.up": (BACKBONE + "blocks.{}.mlp.fc1", "layers.{}.mlp.fc1"),
    "mlp.down": (BACKBONE + "blocks.{}.mlp.fc2", "layers.{}.mlp.fc2"),
    "scale2": (BACKBONE + "blocks.{}.ls2.gamma", "layers.{}.layer_scale2.lambda1"),
}  # fmt: skip
GATED = ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"), "layers.{}.mlp.down_proj"
PACKED, PACKED_DOWN = ".mlp.weights_in.", ".mlp.weights_out."  # of earlier versions of transformers
ORIGINAL_NAMES = {own: names[0] for own, names in NAMES.items()}
HF_NAMES = {own: names[1] for own, names in NAMES.items()}
HF_QKV = (".q_proj", ".k_proj", ".v_proj")
MASK_LAYERS = (0, 2, 4), (1, 2, 3)  # the numbers of the mask head's layers in either


def module(own: str, *foreign: str, bias: bool = True) -> list[Entry]:
    """The weight and the bias of a module; several foreign ones are joined."""
    parts = ("weight", "bias") if bias else ("weight",)
    return [Entry(f"{own}.{part}", tuple(f"{name}.{part}" for name in foreign), SAME) for part in parts]


def entries(
    config: Config, names: dict[str, str], qkv: tuple[str, ...], numbers: tuple[int, ...], table: Form
) -> list[Entry]:
    """Every parameter of an EoMT. qkv: the parts of that layer; numbers: of the mask head's layers.

    A name with a space stands for two modules.
    """
    assert isinstance(config, EomtConfig)
    result = [
        *module("vit.project", names["vit.project"]),
        Entry("vit.class_token", (names["vit.class_token"],), SAME),
        Entry("vit.positions.table", (names["vit.positions.table"],), table),
        *module("vit.encoder.norm", names["vit.encoder.norm"]),
        Entry("queries", (names["queries"],), TABLE),
        *module("class_head", names["class_head"]),
        Entry("mask_probabilities", (names["mask_probabilities"],), SAME),
    ]
    if config.vit.registers:
        result.append(Entry("vit.registers", (names["vit.registers"],), SAME))
    for i in range(config.vit.depth):
        block = f"vit.encoder.blocks.{i}"
        foreign = names["attention.qkv"].format(i)
        for part in ("weight", "bias"):
            three = tuple(f"{foreign}{name}.{part}" for name in qkv)
            result.append(Entry(f"{block}.attention.qkv.{part}", three, SAME))
        for scale in ("scale1", "scale2"):
            result.append(Entry(f"{block}.{scale}", (names[scale].format(i),), SAME))
        for name in ("norm1", "attention.out", "norm2", "mlp.up", "mlp.down"):
            result += module(f"{block}.{name}", *(n.format(i) for n in names[name].split()))
    for i in range(config.upscale):
        for name in ("up", "mix", "norm"):
            result += module(f"upscale.{i}.{name}", names[f"upscale.{name}"].format(i), bias=name != "mix")
    for i, number in enumerate(numbers):
        result += module(f"mask_head.{i}", names["mask_head"].format(number))
    return result


def original_entries(config: Config) -> list[Entry]:
    return entries(config, ORIGINAL_NAMES, ("",), MASK_LAYERS[0], SAME)


def gated_names() -> dict[str, str]:
    """The names in transformers where the MLP is a SwiGLU."""
    return HF_NAMES | {"mlp.up": " ".join(GATED[0]), "mlp.down": GATED[1]}


def hf_names(shapes: Shapes) -> dict[str, Source]:
    """The names of today's transformers; earlier versions had gate and value in one layer."""
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        if PACKED in name and shape[0] % 2 == 0:
            for number, own in enumerate(("gate_proj", "up_proj")):
                rows = (number * shape[0] // 2, (number + 1) * shape[0] // 2)
                sources[name.replace(PACKED, f".mlp.{own}.")] = Source(name, rows=rows)
        else:
            sources[name.replace(PACKED_DOWN, ".mlp.down_proj.")] = Source(name)
    return sources


def hf_entries(config: Config) -> list[Entry]:
    assert isinstance(config, EomtConfig)
    names = gated_names() if config.vit.mlp == "swiglu" else HF_NAMES
    return entries(config, names, HF_QKV, MASK_LAYERS[1], TABLE)


def spec_of(shapes: Shapes, hints: Hints, names: dict[str, str], **fields: Any) -> ModelSpec:
    """The model of the arrays; fields: of the ViT, as config.json or the original code has them."""
    if names["vit.positions.table"] not in shapes:
        raise WeightsError(
            "an EoMT without position embeddings: its encoder is DINOv3, and such files are published as "
            "differences to DINOv3's weights, which are not a model. Take one with a DINOv2 encoder, whose "
            "name does not end in _dinov3 (vitkit list weights)",
            code="weights.unsupported",
        )
    kernel = required_shape(shapes, f"{names['vit.project']}.weight", 4)
    width, patch = kernel[0], square_patch((kernel[2], kernel[3]))
    depth = count(shapes, names["norm1"] + ".weight")
    up = [required_shape(shapes, n.format(0) + ".weight", 2) for n in names["mlp.up"].split()]
    rows = sum(shape[0] for shape in up)
    hidden = required_shape(shapes, names["mlp.down"].format(0) + ".weight", 2)[1]
    mlp = "swiglu" if rows == 2 * hidden else "gelu"
    heads, note = guess_heads(width, depth, hidden, hints, mlp)
    positions = shapes[names["vit.positions.table"]][-2]
    vit = ViTConfig(
        width=width, depth=depth, heads=heads, hidden=hidden, patch=patch, channels=kernel[1], mlp=mlp,
        image_size=infer_image_size(positions, 0, patch, hints)[0], classes=0, class_position=False,
        registers=shapes.get(names["vit.registers"], (1, 0))[1], layer_scale=True, position_resize="timm",
        **fields,
    )  # fmt: skip
    config = EomtConfig(
        vit=vit, classes=required_shape(shapes, names["class_head"] + ".weight", 2)[0] - 1,
        queries=required_shape(shapes, names["queries"], 2)[0],
        joint=required_shape(shapes, names["mask_probabilities"], 1)[0],
        upscale=count(shapes, names["upscale.up"] + ".weight"),
    )  # fmt: skip
    return ModelSpec(config, IMAGENET, notes=(note,) if note else (), ignored=IGNORED)


def infer_original(shapes: Shapes, hints: Hints) -> ModelSpec:
    return spec_of(shapes, hints, ORIGINAL_NAMES, gelu="erf", norm_eps=1e-6)


def infer_hf(shapes: Shapes, hints: Hints) -> ModelSpec:
    settings = hints.files.get(CONFIG, {})
    kind = settings.get("model_type", "eomt")
    if kind != "eomt":
        raise WeightsError(
            f"{CONFIG}: model_type is {str(kind)[:40]!r}; expected 'eomt', whose encoder is DINOv2",
            code="weights.unsupported",
        )
    heads = hints.heads or read_number(settings, "num_attention_heads", "heads", None, CONFIG)
    size = hints.image_size or configured_size(settings)
    gated = GATED[1].format(0) + ".weight" in shapes
    spec = spec_of(
        shapes, replace(hints, heads=heads, image_size=size), gated_names() if gated else HF_NAMES,
        gelu="erf" if gated else read_gelu(settings),
        norm_eps=float(read_number(settings, "layer_norm_eps", "norm_eps", 1e-6, CONFIG)),
    )  # fmt: skip
    if PREPROCESSOR in hints.files:
        read = read_preprocessing(hints.files[PREPROCESSOR])
        spec = replace(spec, preprocessing=replace(read, resize="fit", crop=1.0))
    return replace(spec, labels=read_labels(settings, spec.config.classes))


def unsupported(config: Config) -> str:
    """Why a model is no EoMT as its authors have it; empty if it is."""
    if not isinstance(config, EomtConfig):
        return "the EoMT layout holds only segmenters with queries (head=eomt)"
    c = config.vit
    needed = {"layer_scale": True, "class_position": False, "class_token": True}
    for name, value in needed.items():
        if getattr(c, name) != value:
            return f"EoMT has {name}={value}, as DINOv2 with registers; save this model as vitkit"
    return unsupported_fields(c, "EoMT", also=("layer_scale", "class_position", "registers", "mlp", "head"))


def unsupported_hf(config: Config) -> str:
    if isinstance(config, EomtConfig) and config.image_size[0] != config.image_size[1]:
        return "transformers' EoMT takes square images; adapt the model to a square size first"
    if isinstance(config, EomtConfig) and mlp_ratio(config.vit) is None:
        return f"transformers' EoMT has hidden widths of whole ratios, not {config.vit.hidden}"
    return unsupported(config)


def native(config: Config) -> Config:
    """What transformers' configuration holds: neither windows, objects nor how positions are resized."""
    assert isinstance(config, EomtConfig)
    vit = replace(config.vit, position_resize="timm")
    return replace(config, window=0, output="semantic", detections=EomtConfig.detections, vit=vit)


def native_original(config: Config) -> Config:
    config = native(config)
    assert isinstance(config, EomtConfig)
    return replace(config, vit=replace(config.vit, gelu="erf", norm_eps=1e-6))


def json_files(model: Model) -> dict[str, Any]:
    """What transformers needs to build the model and to prepare images."""
    config = model.config
    assert isinstance(config, EomtConfig)
    c, side = config.vit, config.image_size[0]
    own = {
        "num_queries": config.queries,
        "num_blocks": config.joint,
        "num_upscale_blocks": config.upscale,
        "num_register_tokens": c.registers,
        "use_swiglu_ffn": c.mlp == "swiglu",
        "mlp_ratio": mlp_ratio(c),
    }
    processor = preprocessor_json(config, replace(model.preprocessing, resize="squash")) | {
        "image_processor_type": "EomtImageProcessor",
        "do_pad": True,
        "size": {"shortest_edge": side, "longest_edge": side},
    }
    settings = shared_json(c, "eomt", "EomtForUniversalSegmentation") | own
    return {PREPROCESSOR: processor, CONFIG: settings | labels_json(config.classes, model.labels)}


ORIGINAL = Layout(
    name="eomt",
    recognises=lambda shapes: {"network.q.weight", "network.class_head.weight"} <= shapes.keys(),
    infer=infer_original,
    entries=original_entries,
    unsupported=unsupported,
    native=native_original,
)
HF = Layout(
    name="hf-eomt",
    canonical_names=hf_names,
    recognises=lambda shapes: {"query.weight", "class_predictor.weight", "attn_mask_probs"} <= shapes.keys(),
    infer=infer_hf,
    entries=hf_entries,
    unsupported=unsupported_hf,
    native=native,
    json_files=json_files,
)
FORMAT = Format(
    name="eomt",
    description="the segmenter EoMT in its original names; in those of transformers: hf",
    layouts=(ORIGINAL,),
    endings=(".pth", ".safetensors"),
    order=15,
)
