"""The Hugging Face format: a folder of safetensors, config.json and preprocessor_config.json."""

from collections.abc import Mapping
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.dense.eomt import EomtConfig
from vitkit.models.dense.yolos import YolosConfig
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats import eomt_layouts, hf_models, yolos_layouts
from vitkit.weights.formats.hf_json import (
    CONFIG,
    PREPROCESSOR,
    configured_size,
    labels_json,
    preprocessor_json,
    read_gelu,
    read_labels,
    read_preprocessing,
    size_note,
    written_gelu,
)
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
    read_number,
    required_shape,
    square_patch,
    unsupported_fields,
)
from vitkit.weights.hub import VIT_TYPES

LAYER = "encoder.layer.{}"
PREFIXES = ("vit.", "deit.", "")


def recognises(shapes: Shapes) -> bool:
    return any(f"{p}embeddings.patch_embeddings.projection.weight" in shapes for p in PREFIXES)


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """The names without the prefix that the encoder has inside a classifier."""
    projection = "embeddings.patch_embeddings.projection.weight"
    prefix = next((prefix for prefix in PREFIXES if prefix + projection in shapes), "")
    return {name.removeprefix(prefix): Source(name) for name in shapes}


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    settings: Mapping[str, Any] = hints.files.get(CONFIG, {})
    kind = settings.get("model_type", "vit")
    if kind not in VIT_TYPES:
        raise WeightsError(
            f"{CONFIG}: model_type is {str(kind)[:40]!r}; only {', '.join(VIT_TYPES)} have this layout"
        )
    gelu = read_gelu(settings)
    kernel = required_shape(shapes, "embeddings.patch_embeddings.projection.weight", 4)
    depth = count(shapes, LAYER + ".layernorm_before.weight")
    hidden = required_shape(shapes, LAYER.format(0) + ".intermediate.dense.weight", 2)[0]
    heads = hints.heads or read_number(settings, "num_attention_heads", "heads", None, CONFIG)
    heads, note = guess_heads(kernel[0], depth, hidden, Hints(heads=heads))
    patch = square_patch((kernel[2], kernel[3]))
    size = hints.image_size or configured_size(settings)
    entries = required_shape(shapes, "embeddings.position_embeddings", 3)[1]
    distilled = "embeddings.distillation_token" in shapes
    classifier = "cls_classifier.weight" if distilled else "classifier.weight"
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        channels=kernel[1],
        image_size=infer_image_size(entries, 1 + distilled, patch, Hints(image_size=size))[0],
        classes=required_shape(shapes, classifier, 2)[0] if classifier in shapes else 0,
        distilled=distilled,
        representation=required_shape(shapes, "pooler.dense.weight", 2)[0]
        if "pooler.dense.weight" in shapes
        else 0,
        gelu=gelu,
        norm_eps=float(read_number(settings, "layer_norm_eps", "norm_eps", 1e-12, CONFIG)),
        position_resize="hf",
        qkv_bias=LAYER.format(0) + ".attention.attention.query.bias" in shapes,
        mask_token="embeddings.mask_token" in shapes,
    )
    processor = hints.files.get(PREPROCESSOR, {})
    notes = (note, size_note(processor, config.image_size))
    return ModelSpec(
        config,
        read_preprocessing(processor),
        labels=read_labels(settings, config.classes),
        notes=tuple(n for n in notes if n),
        ignored=("decoder.",),
    )


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    table = [
        *pairs("project", "embeddings.patch_embeddings.projection"),
        Entry("class_token", ("embeddings.cls_token",), SAME),
        Entry("positions.table", ("embeddings.position_embeddings",), SAME),
        *pairs("encoder.norm", "layernorm"),
    ]
    if config.distilled:
        table += [Entry("distillation_token", ("embeddings.distillation_token",), SAME)]
    if config.mask_token:
        table += [Entry("mask_token", ("embeddings.mask_token",), SAME)]
    for i in range(config.depth):
        own, foreign = f"encoder.blocks.{i}", LAYER.format(i)
        for part in ("weight", "bias") if config.qkv_bias else ("weight",):
            qkv = tuple(f"{foreign}.attention.attention.{n}.{part}" for n in ("query", "key", "value"))
            table += [Entry(f"{own}.attention.qkv.{part}", qkv, SAME)]
        table += [
            *pairs(f"{own}.norm1", f"{foreign}.layernorm_before"),
            *pairs(f"{own}.attention.out", f"{foreign}.attention.output.dense"),
            *pairs(f"{own}.norm2", f"{foreign}.layernorm_after"),
            *pairs(f"{own}.mlp.up", f"{foreign}.intermediate.dense"),
            *pairs(f"{own}.mlp.down", f"{foreign}.output.dense"),
        ]
    table += pairs("representation", "pooler.dense") if config.representation else []
    if config.classes and config.distilled:
        return [
            *table,
            *pairs("head", "cls_classifier"),
            *pairs("distillation_head", "distillation_classifier"),
        ]
    return table + (pairs("head", "classifier") if config.classes else [])


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.representation and config.classes:
        return "a Hugging Face classifier has no tanh layer before its head; adapt the model first"
    if isinstance(config, ViTConfig) and config.image_size[0] != config.image_size[1]:
        return "a Hugging Face ViT takes square images; adapt the model to a square size first"
    return unsupported_fields(
        config, "Hugging Face", also=("representation", "qkv_bias", "mask_token", "distilled")
    )


def written_name(name: str, config: Config) -> str:
    """The encoder has the prefix 'vit.' (or 'deit.') in a classifier and none in a ViTModel."""
    if "classifier." in name or not config.classes:
        return name
    return f"deit.{name}" if isinstance(config, ViTConfig) and config.distilled else f"vit.{name}"


def config_json(config: Config, label_names: tuple[str, ...]) -> dict[str, Any]:
    """What transformers needs to build the model."""
    assert isinstance(config, ViTConfig)
    content: dict[str, Any] = {
        "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "patch_size": config.patch,
        "image_size": config.image_size[0],
        "num_channels": config.channels,
        "hidden_act": written_gelu(config.gelu),
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "torch_dtype": "float32",
    }
    if config.distilled:
        architecture = "DeiTForImageClassificationWithTeacher" if config.classes else "DeiTModel"
        content |= {"architectures": [architecture], "model_type": "deit"}
    if config.representation:
        content |= {"pooler_output_size": config.representation, "pooler_act": "tanh"}
    return content | labels_json(config.classes, label_names)


def json_files(model: Model) -> dict[str, Any]:
    """The files beside the weights, in the order in which they are written."""
    return {
        PREPROCESSOR: preprocessor_json(model.config, model.preprocessing),
        CONFIG: config_json(model.config, model.labels)
        | ({"problem_type": "multi_label_classification"} if model.multilabel else {}),
    }


LAYOUT = Layout(
    name="hf",
    recognises=recognises,
    canonical_names=canonical_names,
    infer=infer,
    entries=entries,
    unsupported=unsupported,
    native=lambda config: config,  # config.json has every field that changes the numerics
    peer="transformers",
    written_name=written_name,
    json_files=json_files,
    json_fields=("heads", "gelu", "norm_eps"),
)


def choose(config: Config) -> Layout:
    """The layout of the transformers class that computes as the model does."""
    if isinstance(config, EomtConfig):
        return eomt_layouts.HF
    if isinstance(config, YolosConfig):
        return yolos_layouts.HF
    if isinstance(config, ViTConfig):
        if config.rope == "dinov3":
            return hf_models.DINOV3
        if config.layer_scale:
            return hf_models.DINOV2
        if config.input_norm:
            return hf_models.CLIP
        if config.head == "map":
            return hf_models.SIGLIP
    return LAYOUT


def needed_tokens(config: ViTConfig) -> dict[str, bool]:
    """The class token has a position in all, and DINO has a mask token."""
    dino = {"mask_token": True} if config.layer_scale or config.rope == "dinov3" else {}
    return {"class_position": True} | dino


FORMAT = Format(
    name="hf",
    description="config.json and safetensors, as transformers reads and writes them",
    layouts=(
        eomt_layouts.HF,
        yolos_layouts.HF,
        hf_models.DINOV3,
        hf_models.DINOV2,
        hf_models.CLIP,
        hf_models.SIGLIP,
        LAYOUT,
    ),
    choose=choose,
    tokens=needed_tokens,
    text=True,
    endings=("",),
    default_ending="",
    order=30,
)
