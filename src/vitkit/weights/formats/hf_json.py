"""The JSON files of a Hugging Face folder: config.json and preprocessor_config.json, read and written."""

import re
from collections.abc import Mapping
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing, pair, shorter_side
from vitkit.models.rope import KINDS
from vitkit.models.variants import Config
from vitkit.models.vit_config import ViTConfig
from vitkit.weights.formats.layout import read_number
from vitkit.weights.limits import out_of_range

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
GELU = {
    "gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh",
    "quick_gelu": "quick",
}  # fmt: skip
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def read_gelu(settings: Mapping[str, Any], default: str = "gelu") -> str:
    act = settings.get("hidden_act", default)
    if act not in tuple(GELU):
        raise WeightsError(f"{CONFIG}: hidden_act is {str(act)[:40]!r}; known: {', '.join(GELU)}")
    return GELU[act]


def written_gelu(gelu: str) -> str:
    return next(name for name, own in GELU.items() if own == gelu)


def check_rope_base(settings: Mapping[str, Any]) -> None:
    """Refuse a DINOv3 whose RoPE has another base."""
    if (base := settings.get("rope_theta", KINDS["dinov3"])) != KINDS["dinov3"]:
        raise WeightsError(
            f"{CONFIG}: rope_theta is {str(base)[:40]}; vitkit has DINOv3's RoPE with {KINDS['dinov3']:g}",
            code="weights.unsupported",
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


def labels_json(classes: int, names: tuple[str, ...]) -> dict[str, Any]:
    """The tables of label names, with placeholders if there are none; empty for a model without a head."""
    if not classes:
        return {}
    names = names or tuple(f"LABEL_{i}" for i in range(classes))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


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


def shared_json(c: ViTConfig, kind: str, architecture: str) -> dict[str, Any]:
    """What the config.json of all these models have in common."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "intermediate_size": c.hidden,
        "patch_size": c.patch,
        "image_size": c.image_size[0],
        "num_channels": c.channels,
        "hidden_act": "silu" if kind == "dinov3_vit" and c.mlp == "swiglu" else written_gelu(c.gelu),
        "layer_norm_eps": c.norm_eps,
        "dtype": "float32",
    }


def preprocessor_json(config: Config, p: Preprocessing) -> dict[str, Any]:
    if p.resize in ("fit", "windows"):
        raise WeightsError(
            f"{PREPROCESSOR}: none of these image processors resizes to fit and pads as the model's "
            "preprocessing does; write a file instead of a folder, or give convert --view squash",
            code="weights.unsupported",
        )
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
