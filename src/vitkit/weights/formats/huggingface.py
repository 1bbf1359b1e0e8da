"""ViTs in the names of Hugging Face's folders, with their config.json and preprocessor_config.json."""

import re
from collections.abc import Mapping
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing, pair
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.layout import (
    SAME,
    Entry,
    Found,
    Hints,
    Layout,
    Shapes,
    Source,
    count,
    guess_heads,
    need,
    number_in,
    pairs,
    plain_vit_objection,
    size_from,
    square_patch,
)
from vitkit.weights.limits import out_of_range

GELU = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh"}
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
LAYER = "encoder.layer.{}"
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def recognises(shapes: Shapes) -> bool:
    return any(f"{p}embeddings.patch_embeddings.projection.weight" in shapes for p in ("", "vit."))


def tidy(shapes: Shapes) -> dict[str, Source]:
    """The encoder of whatever model it stands in, without its prefix."""
    prefix = "vit." if "vit.embeddings.patch_embeddings.projection.weight" in shapes else ""
    return {name.removeprefix(prefix): Source(name) for name in shapes}


def infer(shapes: Shapes, hints: Hints) -> Found:
    told: Mapping[str, Any] = hints.files.get(CONFIG, {})
    kind = told.get("model_type", "vit")
    if kind not in ("vit", "vit_mae"):
        raise WeightsError(
            f"config.json says model_type {str(kind)[:40]!r}; only vit and vit_mae share this layout"
        )
    act = told.get("hidden_act", "gelu")
    if act not in tuple(GELU):
        raise WeightsError(f"config.json says hidden_act {str(act)[:40]!r}; known: {', '.join(GELU)}")
    kernel = need(shapes, "embeddings.patch_embeddings.projection.weight", 4)
    depth = count(shapes, LAYER + ".layernorm_before.weight")
    hidden = need(shapes, LAYER.format(0) + ".intermediate.dense.weight", 2)[0]
    heads = hints.heads or number_in(told, "num_attention_heads", "heads", None, CONFIG)
    heads, note = guess_heads(kernel[0], depth, hidden, Hints(heads=heads))
    patch = square_patch((kernel[2], kernel[3]))
    size = hints.image_size or told_size(told)
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
        norm_eps=float(number_in(told, "layer_norm_eps", "norm_eps", 1e-12, CONFIG)),
        position_resize="hf",
        qkv_bias=LAYER.format(0) + ".attention.attention.query.bias" in shapes,
        mask_token="embeddings.mask_token" in shapes,
    )
    shown = hints.files.get(PREPROCESSOR, {})
    notes = (note, size_note(shown, config.image_size))
    return Found(
        config,
        preprocessing(shown),
        labels=labels(told, config.classes),
        notes=tuple(n for n in notes if n),
        ignored=("decoder.",),
    )


def told_size(told: Mapping[str, Any]) -> tuple[int, int] | None:
    default = () if isinstance(told.get("image_size"), list) else None
    size = number_in(told, "image_size", "image_size", default, CONFIG)
    if size and not (type(size) is int or (len(size) == 2 and all(type(n) is int for n in size))):
        raise WeightsError(f"{CONFIG}: image_size is {size!r}; expected one whole number or two")
    return pair(size) if size else None


def labels(told: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """id2label in order; nothing when it is absent, of another length or only a placeholder."""
    names = told.get("id2label", {})
    if not isinstance(names, dict):
        raise WeightsError(f"{CONFIG}: id2label is {str(names)[:40]!r}; expected a table of names")
    if set(names) != {str(i) for i in range(classes)}:
        return ()
    ordered = tuple(str(names[str(i)]) for i in range(classes))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered) else ordered


def preprocessing(told: Mapping[str, Any]) -> Preprocessing:
    """The steps of an image processor, as far as a ViT's has them: resize, rescale, normalise."""
    resample = told.get("resample", 2)
    if resample not in tuple(RESAMPLE):
        known = ", ".join(f"{number} ({name})" for number, name in RESAMPLE.items())
        raise WeightsError(f"{PREPROCESSOR}: resample is {str(resample)[:40]}; known: {known}")
    scale = 255.0  # of numbers in 0..1, which we normalise
    if told.get("do_rescale", True):
        scale *= number_in(told, "rescale_factor", "std", 1 / 255, PREPROCESSOR)
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    if told.get("do_normalize", True):
        mean = number_in(told, "image_mean", "mean", (0.5, 0.5, 0.5), PREPROCESSOR)
        std = number_in(told, "image_std", "std", (0.5, 0.5, 0.5), PREPROCESSOR)
    if len(mean) != len(std) or not mean:
        raise WeightsError(f"{PREPROCESSOR}: image_mean has {len(mean)} numbers and image_std {len(std)}")
    return Preprocessing(
        **crop_of(told),
        interpolation=RESAMPLE[resample],
        mean=tuple(float(n) / scale for n in mean),
        std=tuple(float(n) / scale for n in std),
    )


def crop_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """A central crop, where the processor takes one."""
    if not told.get("do_center_crop", False):
        return {}
    whole, part = (told.get(name) for name in ("size", "crop_size"))
    shorter = whole.get("shortest_edge") if isinstance(whole, dict) else None
    side = max(part.values(), default=None) if isinstance(part, dict) else part
    if type(shorter) is not int or type(side) is not int or not 0 < side <= shorter:
        raise WeightsError(
            f"{PREPROCESSOR}: do_center_crop with size {str(whole)[:60]} and crop_size {str(part)[:60]}; "
            "expected a size of one shortest_edge and a crop_size within it"
        )
    if reason := out_of_range("crop", side / shorter, "crop_size / shortest_edge"):
        raise WeightsError(f"{PREPROCESSOR}: {reason}")
    return {"resize": "crop", "crop": side / shorter}


def size_note(told: Mapping[str, Any], size: tuple[int, int]) -> str:
    """A remark where the processor makes images of another size than the model's own, which we take."""
    theirs = told.get("crop_size") if told.get("do_center_crop") else told.get("size")
    if isinstance(theirs, dict) and {"height", "width"} <= set(theirs):
        theirs = (theirs["height"], theirs["width"])
    if type(theirs) is int:
        theirs = (theirs, theirs)
    if not isinstance(theirs, tuple) or theirs == size:
        return ""
    found = " x ".join(str(side)[:20] for side in theirs)
    return f"{PREPROCESSOR} says {found} pixels; images are shown at the model's {size[0]} x {size[1]}"


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
