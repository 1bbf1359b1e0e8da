"""The Hugging Face format: a folder of safetensors, config.json and preprocessor_config.json."""

import re
from collections.abc import Mapping
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing, pair, shorter_side
from vitkit.models.variants import Config, Model
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
    read_number,
    required_shape,
    square_patch,
    unsupported_fields,
)
from vitkit.weights.hub import MODEL_TYPES
from vitkit.weights.limits import out_of_range

GELU = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh"}
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
LAYER = "encoder.layer.{}"
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def recognises(shapes: Shapes) -> bool:
    return any(f"{p}embeddings.patch_embeddings.projection.weight" in shapes for p in ("", "vit."))


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """The names without the prefix that the encoder has inside a classifier."""
    prefix = "vit." if "vit.embeddings.patch_embeddings.projection.weight" in shapes else ""
    return {name.removeprefix(prefix): Source(name) for name in shapes}


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    settings: Mapping[str, Any] = hints.files.get(CONFIG, {})
    kind = settings.get("model_type", "vit")
    if kind not in MODEL_TYPES:
        raise WeightsError(
            f"{CONFIG}: model_type is {str(kind)[:40]!r}; only {' and '.join(MODEL_TYPES)} have this layout"
        )
    act = settings.get("hidden_act", "gelu")
    if act not in tuple(GELU):
        raise WeightsError(f"config.json: hidden_act is {str(act)[:40]!r}; known: {', '.join(GELU)}")
    kernel = required_shape(shapes, "embeddings.patch_embeddings.projection.weight", 4)
    depth = count(shapes, LAYER + ".layernorm_before.weight")
    hidden = required_shape(shapes, LAYER.format(0) + ".intermediate.dense.weight", 2)[0]
    heads = hints.heads or read_number(settings, "num_attention_heads", "heads", None, CONFIG)
    heads, note = guess_heads(kernel[0], depth, hidden, Hints(heads=heads))
    patch = square_patch((kernel[2], kernel[3]))
    size = hints.image_size or configured_size(settings)
    entries = required_shape(shapes, "embeddings.position_embeddings", 3)[1]
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        channels=kernel[1],
        image_size=infer_image_size(entries, True, patch, Hints(image_size=size))[0],
        classes=required_shape(shapes, "classifier.weight", 2)[0] if "classifier.weight" in shapes else 0,
        representation=required_shape(shapes, "pooler.dense.weight", 2)[0]
        if "pooler.dense.weight" in shapes
        else 0,
        gelu=GELU[act],
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


def configured_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    default = () if isinstance(settings.get("image_size"), list) else None
    size = read_number(settings, "image_size", "image_size", default, CONFIG)
    if size and not (type(size) is int or (len(size) == 2 and all(type(n) is int for n in size))):
        raise WeightsError(f"{CONFIG}: image_size is {size!r}; expected one whole number or two")
    return pair(size) if size else None


def read_labels(settings: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """id2label in order; empty if it is missing, of the wrong length or only placeholders."""
    names = settings.get("id2label", {})
    if not isinstance(names, dict):
        raise WeightsError(f"{CONFIG}: id2label is {str(names)[:40]!r}; expected a table of names")
    if set(names) != {str(i) for i in range(classes)}:
        return ()
    ordered = tuple(str(names[str(i)]) for i in range(classes))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered) else ordered


def read_preprocessing(processor: Mapping[str, Any]) -> Preprocessing:
    """The steps of a ViT's image processor: resize, rescale, normalise."""
    resample = processor.get("resample", 2)
    if resample not in tuple(RESAMPLE):
        known = ", ".join(f"{number} ({name})" for number, name in RESAMPLE.items())
        raise WeightsError(f"{PREPROCESSOR}: resample is {str(resample)[:40]}; known: {known}")
    scale = 255.0  # relative to pixels in 0..1, which is what we normalise
    if processor.get("do_rescale", True):
        scale *= read_number(processor, "rescale_factor", "std", 1 / 255, PREPROCESSOR)
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    if processor.get("do_normalize", True):
        mean = read_number(processor, "image_mean", "mean", (0.5, 0.5, 0.5), PREPROCESSOR)
        std = read_number(processor, "image_std", "std", (0.5, 0.5, 0.5), PREPROCESSOR)
    if len(mean) != len(std) or not mean:
        raise WeightsError(f"{PREPROCESSOR}: image_mean has {len(mean)} numbers and image_std {len(std)}")
    return Preprocessing(
        **read_crop(processor),
        interpolation=RESAMPLE[resample],
        mean=tuple(float(n) / scale for n in mean),
        std=tuple(float(n) / scale for n in std),
    )


def read_crop(processor: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a central crop, if the processor takes one."""
    if not processor.get("do_center_crop", False):
        return {}
    size, crop_size = processor.get("size"), processor.get("crop_size")
    shorter = size.get("shortest_edge") if isinstance(size, dict) else None
    side = max(crop_size.values(), default=None) if isinstance(crop_size, dict) else crop_size
    if type(shorter) is not int or type(side) is not int or not 0 < side <= shorter:
        raise WeightsError(
            f"{PREPROCESSOR}: do_center_crop with size {str(size)[:60]} and crop_size {str(crop_size)[:60]}; "
            "expected a size with shortest_edge and a crop_size that is not larger"
        )
    if reason := out_of_range("crop", side / shorter, "crop_size / shortest_edge"):
        raise WeightsError(f"{PREPROCESSOR}: {reason}")
    return {"resize": "crop", "crop": side / shorter}


def size_note(processor: Mapping[str, Any], size: tuple[int, int]) -> str:
    """A note if the processor resizes images to another size than the model's; we use the model's."""
    output = processor.get("crop_size") if processor.get("do_center_crop") else processor.get("size")
    if isinstance(output, dict) and {"height", "width"} <= set(output):
        output = (output["height"], output["width"])
    if type(output) is int:
        output = (output, output)
    if not isinstance(output, tuple) or output == size:
        return ""
    pixels = " x ".join(str(side)[:20] for side in output)
    return f"{PREPROCESSOR} says {pixels} pixels; images are resized to the model's {size[0]} x {size[1]}"


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
    return table + (pairs("head", "classifier") if config.classes else [])


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.representation and config.classes:
        return "a Hugging Face classifier has no tanh layer before its head; adapt the model first"
    if isinstance(config, ViTConfig) and config.image_size[0] != config.image_size[1]:
        return "a Hugging Face ViT takes square images; adapt the model to a square size first"
    return unsupported_fields(config, "Hugging Face", also=("representation", "qkv_bias", "mask_token"))


def written_name(name: str, config: Config) -> str:
    """The encoder has the prefix 'vit.' in a classifier and none in a ViTModel."""
    return name if name.startswith("classifier.") or not config.classes else f"vit.{name}"


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
        "hidden_act": "gelu" if config.gelu == "erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "torch_dtype": "float32",
    }
    if config.representation:
        content |= {"pooler_output_size": config.representation, "pooler_act": "tanh"}
    if config.classes:
        names = label_names or tuple(f"LABEL_{i}" for i in range(config.classes))
        content["id2label"] = {str(i): name for i, name in enumerate(names)}
        content["label2id"] = {name: i for i, name in enumerate(names)}
    return content


def preprocessor_json(config: Config, p: Preprocessing) -> dict[str, Any]:
    h, w = config.image_size
    steps: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": {"height": h, "width": w}}
    if p.resize == "crop":  # the processor of a ViT has no central crop
        steps = {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": shorter_side(config.image_size, p)},
            "do_center_crop": True,
            "crop_size": {"height": h, "width": w},
            "do_convert_rgb": True,
        }
    return steps | {
        "do_resize": True,
        "resample": next(number for number, name in RESAMPLE.items() if name == p.interpolation),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
    }


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
FORMAT = Format(
    name="hf",
    description="config.json and safetensors, as transformers reads and writes them",
    layouts=(LAYOUT,),
    endings=("",),
    default_ending="",
    order=30,
)
