"""ViTs in the names of Hugging Face's folders, with their config.json and preprocessor_config.json."""

import re
from collections.abc import Mapping
from typing import Any

from vitkit.layouts.layout import (
    SAME,
    Entry,
    Found,
    Hints,
    Layout,
    Shapes,
    Source,
    WeightsError,
    count,
    guess_heads,
    need,
    pairs,
    plain_vit_objection,
    size_from,
    square_patch,
)
from vitkit.models.card import Preprocessing, pair
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig

GELU = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh"}
LAYER = "encoder.layer.{}"
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def recognises(shapes: Shapes) -> bool:
    return any(f"{p}embeddings.patch_embeddings.projection.weight" in shapes for p in ("", "vit."))


def tidy(shapes: Shapes) -> dict[str, Source]:
    """The encoder of whatever model it stands in, without its prefix."""
    prefix = "vit." if "vit.embeddings.patch_embeddings.projection.weight" in shapes else ""
    return {name.removeprefix(prefix): Source(name) for name in shapes}


def infer(shapes: Shapes, hints: Hints) -> Found:
    told: Mapping[str, Any] = hints.files.get("config.json", {})
    kind = told.get("model_type", "vit")
    if kind not in ("vit", "vit_mae"):
        raise WeightsError(f"config.json says model_type {kind!r}; only vit and vit_mae share this layout")
    act = told.get("hidden_act", "gelu")
    if act not in GELU:
        raise WeightsError(f"config.json says hidden_act {act!r}; known: {', '.join(GELU)}")
    kernel = need(shapes, "embeddings.patch_embeddings.projection.weight", 4)
    depth = count(shapes, LAYER + ".layernorm_before.weight")
    hidden = need(shapes, LAYER.format(0) + ".intermediate.dense.weight", 2)[0]
    heads, note = guess_heads(kernel[0], depth, hidden, hints if hints.heads else told_heads(told))
    patch = square_patch((kernel[2], kernel[3]))
    size = hints.image_size or told.get("image_size")
    size = pair(size) if size else None
    entries = need(shapes, "embeddings.position_embeddings", 3)[1]
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        channels=kernel[1],
        image_size=size_from(entries, True, patch, Hints(image_size=size))[0],
        classes=need(shapes, "classifier.weight", 2)[0] if "classifier.weight" in shapes else 0,
        representation=need(shapes, "pooler.dense.weight", 2)[0] if "pooler.dense.weight" in shapes else 0,
        gelu=GELU[act],
        norm_eps=float(told.get("layer_norm_eps", 1e-12)),
        position_resize="hf",
        qkv_bias=LAYER.format(0) + ".attention.attention.query.bias" in shapes,
        mask_token="embeddings.mask_token" in shapes,
    )
    return Found(
        config,
        preprocessing(hints.files.get("preprocessor_config.json", {})),
        labels=labels(told, config.classes),
        notes=(note,) if note else (),
        ignored=("decoder.",),
    )


def told_heads(told: Mapping[str, Any]) -> Hints:
    heads = told.get("num_attention_heads")
    return Hints(heads=heads if type(heads) is int and heads > 0 else None)


def labels(told: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """id2label in order; nothing when it is absent, of another length or only a placeholder."""
    names = told.get("id2label", {})
    if set(names) != {str(i) for i in range(classes)}:
        return ()
    ordered = tuple(str(names[str(i)]) for i in range(classes))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered) else ordered


def preprocessing(told: Mapping[str, Any]) -> Preprocessing:
    half = (0.5, 0.5, 0.5)
    return Preprocessing(
        interpolation=RESAMPLE.get(told.get("resample", 2), "bilinear"),
        mean=tuple(float(n) for n in told.get("image_mean", half)),
        std=tuple(float(n) for n in told.get("image_std", half)),
    )


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    table = [
        *pairs("project", "embeddings.patch_embeddings.projection"),
        Entry("class_token", ("embeddings.cls_token",), SAME),
        Entry("positions.table", ("embeddings.position_embeddings",), SAME),
        *pairs("encoder.norm", "layernorm"),
    ]
    if config.mask_token:
        table += [Entry("mask_token", ("embeddings.mask_token",), SAME)]
    for i in range(config.depth):
        own, foreign = f"encoder.blocks.{i}", LAYER.format(i)
        for part in ("weight", "bias") if config.qkv_bias else ("weight",):
            joined = tuple(f"{foreign}.attention.attention.{n}.{part}" for n in ("query", "key", "value"))
            table += [Entry(f"{own}.attention.qkv.{part}", joined, SAME)]
        table += [
            *pairs(f"{own}.norm1", f"{foreign}.layernorm_before"),
            *pairs(f"{own}.attention.out", f"{foreign}.attention.output.dense"),
            *pairs(f"{own}.norm2", f"{foreign}.layernorm_after"),
            *pairs(f"{own}.mlp.up", f"{foreign}.intermediate.dense"),
            *pairs(f"{own}.mlp.down", f"{foreign}.output.dense"),
        ]
    table += pairs("representation", "pooler.dense") if config.representation else []
    return table + (pairs("head", "classifier") if config.classes else [])


def objection(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.representation and config.classes:
        return "a Hugging Face classifier has no tanh layer under its head; adapt the model first"
    if isinstance(config, ViTConfig) and config.image_size[0] != config.image_size[1]:
        return "a Hugging Face ViT has square images; adapt the model to a square size first"
    return plain_vit_objection(config, "Hugging Face", also=("representation", "qkv_bias", "mask_token"))


def prefixed(name: str, config: Config) -> str:
    """The encoder stands under 'vit.' in a classifier, bare in a ViTModel."""
    return name if name.startswith("classifier.") or not config.classes else f"vit.{name}"


def config_json(config: Config, label_names: tuple[str, ...]) -> dict[str, Any]:
    """What transformers needs to build the model again."""
    assert isinstance(config, ViTConfig)
    told: dict[str, Any] = {
        "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "patch_size": config.patch,
        "image_size": config.image_size[0],
        "num_channels": config.channels,
        "hidden_act": "gelu" if config.gelu == "erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "torch_dtype": "float32",
    }
    if config.representation:
        told |= {"pooler_output_size": config.representation, "pooler_act": "tanh"}
    if config.classes:
        names = label_names or tuple(f"LABEL_{i}" for i in range(config.classes))
        told["id2label"] = {str(i): name for i, name in enumerate(names)}
        told["label2id"] = {name: i for i, name in enumerate(names)}
    return told


def preprocessor_json(config: Config, p: Preprocessing) -> dict[str, Any]:
    h, w = config.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": h, "width": w},
        "resample": next(number for number, name in RESAMPLE.items() if name == p.interpolation),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
    }


LAYOUT = Layout(
    name="hf",
    recognises=recognises,
    tidy=tidy,
    infer=infer,
    entries=entries,
    objection=objection,
    native=lambda config: config,  # config.json tells it all
)
