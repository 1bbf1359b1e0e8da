"""DINOv2, DINOv3, CLIP and SigLIP in the names of transformers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitkit.models.card import Preprocessing
from vitkit.models.mlp import swiglu_width
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats import text_rows
from vitkit.weights.formats.dino import FLAT_TOKEN, IMAGENET
from vitkit.weights.formats.hf_json import (
    CONFIG,
    PREPROCESSOR,
    check_rope_base,
    configured_size,
    labels_json,
    preprocessor_json,
    read_gelu,
    read_labels,
    read_preprocessing,
    shared_json,
    size_note,
)
from vitkit.weights.formats.layout import (
    NO_KEY_BIAS,
    SAME,
    Entry,
    Form,
    Hints,
    Layout,
    ModelSpec,
    Row,
    Shapes,
    Source,
    count,
    guess_heads,
    infer_image_size,
    read_number,
    refuse_flat_patches,
    required_shape,
    square_patch,
    table_entries,
    unsupported_fields,
)

OWN = "encoder.blocks.{}."
VECTOR = Form(lambda a: a[None, None], lambda a: a[0, 0])  # (D,) <-> (1, 1, D)
TABLE = Form(lambda a: a[None], lambda a: a[0])  # (T, D) <-> (1, T, D)
CLIP_PREPROCESSING = Preprocessing(
    resize="crop",
    interpolation="bicubic",
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


def three(prefix: str, names: tuple[str, str, str]) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


DINO_LAYER = "encoder.layer.{}."
DINOV2_ROWS: list[Row] = [
    ("project", "embeddings.patch_embeddings.projection", SAME),
    ("class_token", "embeddings.cls_token", SAME),
    ("mask_token", "embeddings.mask_token", FLAT_TOKEN),
    ("registers", "embeddings.register_tokens", SAME),
    ("positions.table", "embeddings.position_embeddings", SAME),
    (OWN + "norm1", DINO_LAYER + "norm1", SAME),
    (OWN + "attention.qkv", three(DINO_LAYER + "attention.attention.", ("query", "key", "value")), SAME),
    (OWN + "attention.out", DINO_LAYER + "attention.output.dense", SAME),
    (OWN + "scale1", DINO_LAYER + "layer_scale1.lambda1", SAME),
    (OWN + "norm2", DINO_LAYER + "norm2", SAME),
    (OWN + "scale2", DINO_LAYER + "layer_scale2.lambda1", SAME),
    ("encoder.norm", "layernorm", SAME),
    ("head", "classifier", SAME),
]
V3_LAYER = "layer.{}."
DINOV3_ROWS: list[Row] = [
    ("project", "embeddings.patch_embeddings", SAME),
    ("class_token", "embeddings.cls_token", SAME),
    ("mask_token", "embeddings.mask_token", SAME),
    ("registers", "embeddings.register_tokens", SAME),
    (OWN + "norm1", V3_LAYER + "norm1", SAME),
    (
        OWN + "attention.qkv.weight",
        three(V3_LAYER + "attention.", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        SAME,
    ),
    (OWN + "attention.out", V3_LAYER + "attention.o_proj", SAME),
    (OWN + "scale1", V3_LAYER + "layer_scale1.lambda1", SAME),
    (OWN + "norm2", V3_LAYER + "norm2", SAME),
    (OWN + "mlp.down", V3_LAYER + "mlp.down_proj", SAME),
    (OWN + "scale2", V3_LAYER + "layer_scale2.lambda1", SAME),
    ("encoder.norm", "norm", SAME),
]
CLIP_LAYER = "encoder.layers.{}."
CLIP_ROWS: list[Row] = [  # SigLIP shares them
    ("project", "embeddings.patch_embedding", SAME),
    ("class_token", "embeddings.class_embedding", VECTOR),
    ("positions.table", "embeddings.position_embedding.weight", TABLE),
    ("input_norm", "pre_layrnorm", SAME),  # spelt so
    (OWN + "norm1", CLIP_LAYER + "layer_norm1", SAME),
    (OWN + "attention.qkv", three(CLIP_LAYER + "self_attn.", ("q_proj", "k_proj", "v_proj")), SAME),
    (OWN + "attention.out", CLIP_LAYER + "self_attn.out_proj", SAME),
    (OWN + "norm2", CLIP_LAYER + "layer_norm2", SAME),
    (OWN + "mlp.up", CLIP_LAYER + "mlp.fc1", SAME),
    (OWN + "mlp.down", CLIP_LAYER + "mlp.fc2", SAME),
    ("encoder.norm", "post_layernorm", SAME),
    ("representation", "visual_projection", SAME),
    ("pool.probe", "head.probe", SAME),
    ("pool.query", "head.attention.query", SAME),
    ("pool.key_value", "head.attention.key_value", SAME),
    ("pool.out", "head.attention.out_proj", SAME),
    ("pool.norm", "head.layernorm", SAME),
    ("pool.mlp.up", "head.mlp.fc1", SAME),
    ("pool.mlp.down", "head.mlp.fc2", SAME),
]
DINOV2_PREFIXES = ("dinov2.", "dinov2_with_registers.", "")
TOWER = "vision_model."
PACKED = "head.attention.in_proj_"  # q, k and v of SigLIP's pooling in one array


def dinov2_names(shapes: Shapes) -> dict[str, Source]:
    prefix = next((p for p in DINOV2_PREFIXES if f"{p}embeddings.cls_token" in shapes), "")
    return {name.removeprefix(prefix): Source(name) for name in shapes}


def written_dinov2(name: str, config: Config) -> str:
    if not config.classes or name.startswith("classifier."):
        return name
    return DINOV2_PREFIXES[bool(getattr(config, "registers", 0))] + name


def dinov3_names(shapes: Shapes) -> dict[str, Source]:
    """In memory layers are below 'model.', in files they are not; an empty array of registers is none."""
    return {name.removeprefix("model."): Source(name) for name in shapes if 0 not in shapes[name]}


def tower_names(shapes: Shapes) -> dict[str, Source]:
    """The vision tower of a model with text, or alone; pooling's packed q, k, v as query and key_value.

    Arrays of neither tower keep their names, so that a classifier, which reads the mean of the patches, is
    not lost without a word.
    """
    prefix = TOWER if f"{TOWER}embeddings.patch_embedding.weight" in shapes else ""
    text = text_rows.hf_canonical(shapes) if prefix else {}
    of_text = {source.name for source in text.values()}
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        if name not in of_text and "position_ids" not in name:
            short = name.removeprefix(prefix)
            if short.startswith(PACKED) and shape[0] % 3 == 0:
                part, third = short.removeprefix(PACKED), shape[0] // 3
                sources[f"head.attention.query.{part}"] = Source(name, rows=(0, third))
                sources[f"head.attention.key_value.{part}"] = Source(name, rows=(third, 3 * third))
            else:
                sources[short] = Source(name)
    return sources | text


def written_tower(name: str, config: Config) -> str:
    if name.startswith(text_rows.PREFIX):
        return text_rows.hf_written(name)
    for part in ("query", "key_value"):
        name = name.replace(f"head.attention.{part}.", PACKED)
    return name if name == "visual_projection.weight" else TOWER + name


def has(shapes: Shapes, prefixes: tuple[str, ...], *names: str) -> bool:
    return any(all(prefix + name in shapes for name in names) for prefix in prefixes)


def spec_of(
    shapes: Shapes, hints: Hints, settings: Mapping[str, Any], *, kernel: str, layer: str, down: str,
    positions: str, lead: int, default_eps: float, default_act: str, preprocessing: Preprocessing,
    **options: Any,
) -> ModelSpec:  # fmt: skip
    """The model of one of these layouts, from the arrays and config.json."""
    refuse_flat_patches(shapes, kernel)
    patch_shape = required_shape(shapes, kernel, 4)
    width, patch = patch_shape[0], square_patch((patch_shape[2], patch_shape[3]))
    depth, hidden = count(shapes, layer + "norm1.weight"), required_shape(shapes, down, 2)[1]
    depth = depth or count(shapes, layer + "layer_norm1.weight")
    heads = hints.heads or read_number(settings, "num_attention_heads", "heads", None, CONFIG)
    mlp = options.get("mlp", "gelu")
    heads, note = guess_heads(width, depth, hidden, Hints(heads=heads), mlp)
    size = hints.image_size or configured_size(settings)
    if positions:
        entries = shapes[positions][-2] if positions in shapes else 0
        size = infer_image_size(entries, lead, patch, Hints(image_size=size))[0]
    config = ViTConfig(
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        positions="1d" if positions else "none",
        channels=patch_shape[1],
        image_size=size or (224, 224),
        classes=0,
        gelu=read_gelu(settings, default_act) if mlp == "gelu" else "erf",
        norm_eps=float(read_number(settings, "layer_norm_eps", "norm_eps", default_eps, CONFIG)),
        mask_token="embeddings.mask_token" in shapes,
        **options,
    )
    processor = hints.files.get(PREPROCESSOR)
    notes = (note, size_note(processor or {}, config.image_size))
    read = read_preprocessing(processor) if processor else preprocessing
    return ModelSpec(config, read, notes=tuple(n for n in notes if n))


def infer_dinov2(shapes: Shapes, hints: Hints) -> ModelSpec:
    gated = "encoder.layer.0.mlp.weights_out.weight" in shapes
    registers = shapes.get("embeddings.register_tokens", (1, 0))[1]
    spec = spec_of(
        shapes, hints, hints.files.get(CONFIG, {}), kernel="embeddings.patch_embeddings.projection.weight",
        layer=DINO_LAYER, down=f"encoder.layer.0.mlp.{'weights_out' if gated else 'fc2'}.weight",
        positions="embeddings.position_embeddings", lead=1, default_eps=1e-6, default_act="gelu",
        preprocessing=IMAGENET, registers=registers, layer_scale=True, mlp="swiglu" if gated else "gelu",
        position_resize="timm" if registers else "hf",
        qkv_bias="encoder.layer.0.attention.attention.query.bias" in shapes,
    )  # fmt: skip
    if "classifier.weight" not in shapes:
        return spec
    assert isinstance(spec.config, ViTConfig)
    classes = required_shape(shapes, "classifier.weight", 2)[0]
    labels = read_labels(hints.files.get(CONFIG, {}), classes)
    return replace(spec, config=replace(spec.config, classes=classes, head="token+gap"), labels=labels)


def infer_dinov3(shapes: Shapes, hints: Hints) -> ModelSpec:
    settings = hints.files.get(CONFIG, {})
    check_rope_base(settings)
    biased = "layer.0.attention.q_proj.bias" in shapes
    training = {f"rope_{name}": settings.get(f"pos_embed_{name}") for name in ("shift", "jitter", "rescale")}
    training = {name: float(value) for name, value in training.items() if type(value) in (int, float)}
    return spec_of(
        shapes, hints, settings, kernel="embeddings.patch_embeddings.weight", layer=V3_LAYER,
        down="layer.0.mlp.down_proj.weight", positions="", lead=1, default_eps=1e-5, default_act="gelu",
        preprocessing=IMAGENET, registers=shapes.get("embeddings.register_tokens", (1, 0))[1],
        layer_scale=True, mlp="swiglu" if "layer.0.mlp.gate_proj.weight" in shapes else "gelu",
        qkv_bias=biased, key_bias=not biased, rope="dinov3", **training,
    )  # fmt: skip


def infer_clip(shapes: Shapes, hints: Hints) -> ModelSpec:
    projection = shapes.get("visual_projection.weight", (0,))[0]
    return spec_of(
        shapes, hints, vision_settings(hints), kernel="embeddings.patch_embedding.weight", layer=CLIP_LAYER,
        down="encoder.layers.0.mlp.fc2.weight", positions="embeddings.position_embedding.weight", lead=1,
        default_eps=1e-5, default_act="quick_gelu", preprocessing=CLIP_PREPROCESSING, input_norm=True,
        project_bias=False, representation=projection, position_resize="hf",
        representation_kind="linear" if projection else "tanh",
        text=text_rows.hf_text(shapes, hints, siglip=False) if projection else None,
    )  # fmt: skip


def infer_siglip(shapes: Shapes, hints: Hints) -> ModelSpec:
    return spec_of(
        shapes, hints, vision_settings(hints), kernel="embeddings.patch_embedding.weight", layer=CLIP_LAYER,
        down="encoder.layers.0.mlp.fc2.weight", positions="embeddings.position_embedding.weight", lead=0,
        default_eps=1e-6, default_act="gelu_pytorch_tanh",
        preprocessing=Preprocessing(interpolation="bicubic"),
        head="map", position_resize="hf", text=text_rows.hf_text(shapes, hints, siglip=True),
    )  # fmt: skip


def vision_settings(hints: Hints) -> Mapping[str, Any]:
    """The settings of the vision tower, which are a table of their own beside those of the text tower."""
    settings = hints.files.get(CONFIG, {})
    inner = settings.get("vision_config")
    return inner if isinstance(inner, dict) else settings


def dinov2_entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    up, down = ("weights_in", "weights_out") if config.mlp == "swiglu" else ("fc1", "fc2")
    mlp: list[Row] = [
        (OWN + "mlp.up", f"{DINO_LAYER}mlp.{up}", SAME),
        (OWN + "mlp.down", f"{DINO_LAYER}mlp.{down}", SAME),
    ]
    return table_entries(config, [*DINOV2_ROWS, *mlp])


def dinov3_entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    up = tuple(V3_LAYER + f"mlp.{part}_proj" for part in ("gate", "up"))
    row: Row = (OWN + "mlp.up", up if config.mlp == "swiglu" else up[1], SAME)
    table = table_entries(config, [*DINOV3_ROWS, row])
    for i in range(config.depth if config.qkv_bias else 0):
        foreign = tuple(f"layer.{i}.attention.{part}_proj.bias" for part in "qv")
        table.append(Entry(f"encoder.blocks.{i}.attention.qkv.bias", foreign, SAME, NO_KEY_BIAS))
    return table


def tower_entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    return table_entries(config, CLIP_ROWS + text_rows.hf_rows(config.text))


def not_square(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.image_size[0] != config.image_size[1]:
        return "a Hugging Face model takes square images; adapt the model to a square size first"
    if isinstance(config, ViTConfig) and config.classes and config.head != "token+gap":
        return "vitkit writes these models to Hugging Face's format without a head; save it as vitkit or timm"
    return ""


def unsupported_dino(config: Config) -> str:
    also: tuple[str, ...] = ("layer_scale", "qkv_bias", "registers", "mlp", "mask_token")
    if isinstance(config, ViTConfig) and config.rope == "dinov3":
        if config.qkv_bias and config.key_bias:
            return "transformers' DINOv3 has no bias for keys; use key_bias=False"
        also += ("rope", "positions", "key_bias")
    elif isinstance(config, ViTConfig):
        if mlp_ratio(config) is None:
            sizes = f"{config.hidden} at {config.width}"
            return f"transformers' DINOv2 has hidden widths of whole ratios, not {sizes}"
        also += ("token+gap",) if config.classes else ()
    if isinstance(config, ViTConfig) and not config.mask_token:
        return "transformers' DINO models have a mask token; build the model with mask_token=True"
    return not_square(config) or unsupported_fields(config, "Hugging Face", also=also)


def unsupported_clip(config: Config) -> str:
    tanh = isinstance(config, ViTConfig) and config.representation and config.representation_kind == "tanh"
    if isinstance(config, ViTConfig) and (config.project_bias or tanh):
        return "transformers' CLIP has a patch embedding without bias, and a linear projection or none"
    also = ("input_norm", "project_bias", "representation", "representation_kind", "text")
    return tower_mismatch(config, siglip=False) or unsupported_fields(config, "Hugging Face", also=also)


def unsupported_siglip(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.class_token:
        return "transformers' SigLIP has no class token"
    mismatch = tower_mismatch(config, siglip=True)
    return mismatch or unsupported_fields(config, "Hugging Face", also=("head", "text"))


def tower_mismatch(config: Config, *, siglip: bool) -> str:
    text = config.text if isinstance(config, ViTConfig) else None
    return not_square(config) or text_rows.text_mismatch(text, siglip=siglip)


def mlp_ratio(c: ViTConfig) -> int | None:
    """The whole number from which transformers' DINOv2 computes the hidden width; None if there is none."""
    for ratio in range(1, 17):
        if c.hidden == (swiglu_width(c.width, ratio) if c.mlp == "swiglu" else ratio * c.width):
            return ratio
    return None


def config_json(c: Config) -> dict[str, Any]:
    assert isinstance(c, ViTConfig)
    if c.rope == "dinov3":
        biases = {"query_bias": c.qkv_bias, "value_bias": c.qkv_bias, "key_bias": False}
        rope = {"pos_embed_shift": c.rope_shift or None}
        for name in ("jitter", "rescale"):
            value = getattr(c, f"rope_{name}")
            rope[f"pos_embed_{name}"] = value if value > 1 else None
        own: dict[str, Any] = {
            "num_register_tokens": c.registers,
            "use_gated_mlp": c.mlp == "swiglu",
            "rope_theta": 100.0,
        }
        return shared_json(c, "dinov3_vit", "DINOv3ViTModel") | biases | rope | own
    if c.layer_scale:
        kind = ("dinov2_with_registers", "Dinov2WithRegisters") if c.registers else ("dinov2", "Dinov2")
        architecture = kind[1] + ("ForImageClassification" if c.classes else "Model")
        own = {"use_swiglu_ffn": c.mlp == "swiglu", "qkv_bias": c.qkv_bias}
        own |= {"mlp_ratio": mlp_ratio(c)} | ({"num_register_tokens": c.registers} if c.registers else {})
        return shared_json(c, kind[0], architecture) | own
    if c.input_norm and c.representation:
        projection = {"projection_dim": c.representation}
        vision = shared_json(c, "clip_vision_model", "CLIPVisionModelWithProjection") | projection
    elif c.input_norm:
        vision = shared_json(c, "clip_vision_model", "CLIPVisionModel")
    else:
        vision = shared_json(c, "siglip_vision_model", "SiglipVisionModel")
    return text_rows.both_json(c.text, vision) if c.text else vision


def json_files(model: Model) -> dict[str, Any]:
    return {
        PREPROCESSOR: preprocessor_json(model.config, model.preprocessing),
        CONFIG: config_json(model.config)
        | labels_json(model.config.classes, model.labels)
        | (
            {"problem_type": "multi_label_classification"}
            if model.multilabel and model.config.classes
            else {}
        ),
    }


def layout(name: str, *, fields: tuple[str, ...] = ("heads", "gelu", "norm_eps"), **functions: Any) -> Layout:
    return Layout(
        name=name, native=lambda config: config, peer="transformers", json_files=json_files,
        json_fields=fields, **functions,
    )  # fmt: skip


DINOV2 = layout(
    "hf-dinov2",
    recognises=lambda shapes: has(shapes, DINOV2_PREFIXES, "encoder.layer.0.layer_scale1.lambda1"),
    canonical_names=dinov2_names,
    written_name=written_dinov2,
    infer=infer_dinov2,
    entries=dinov2_entries,
    unsupported=unsupported_dino,
)
DINOV3 = layout(
    "hf-dinov3",
    recognises=lambda shapes: (
        has(shapes, ("", "model."), "layer.0.attention.q_proj.weight")
        and "embeddings.patch_embeddings.weight" in shapes
    ),
    canonical_names=dinov3_names,
    infer=infer_dinov3,
    entries=dinov3_entries,
    unsupported=unsupported_dino,
)
CLIP = layout(
    "hf-clip",
    fields=("heads", "gelu", "norm_eps", "text"),
    recognises=lambda shapes: has(shapes, (TOWER, ""), "embeddings.class_embedding", "pre_layrnorm.weight"),
    canonical_names=tower_names,
    written_name=written_tower,
    infer=infer_clip,
    entries=tower_entries,
    unsupported=unsupported_clip,
)
SIGLIP = layout(
    "hf-siglip",
    fields=("heads", "gelu", "norm_eps", "text"),
    recognises=lambda shapes: has(shapes, (TOWER, ""), "embeddings.patch_embedding.weight", "head.probe"),
    canonical_names=tower_names,
    written_name=written_tower,
    infer=infer_siglip,
    entries=tower_entries,
    unsupported=unsupported_siglip,
)
