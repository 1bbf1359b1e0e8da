"""Later ViTs as options of ViTConfig: DINOv2, DINOv3, CLIP, SigLIP, DeiT, MAE, FlexiViT, EVA-02."""

import re
from typing import Any

from vitkit.models.mlp import swiglu_width

SIZES: dict[str, tuple[int, int, int, int]] = {  # width, depth, heads, hidden
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "M": (512, 12, 8, 2048),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
    "So400m": (1152, 27, 16, 4304),
    "g-opt": (1536, 40, 16, 6144),
}
LAYER_SCALE = {"layer_scale": True, "gelu": "erf"}
DINOV2 = LAYER_SCALE | {"classes": 0, "image_size": 518, "mask_token": True, "position_resize": "dinov2"}
DINOV3 = LAYER_SCALE | {
    "classes": 0, "positions": "none", "rope": "dinov3", "rope_rescale": 2.0, "registers": 4,
    "norm_eps": 1e-5, "key_bias": False, "mask_token": True,
}  # fmt: skip
CLIP = {
    "gelu": "quick", "norm_eps": 1e-5, "input_norm": True, "project_bias": False, "classes": 0,
    "representation_kind": "linear", "position_resize": "timm",
}  # fmt: skip
SIGLIP = {"head": "map", "classes": 0, "position_resize": "hf"}
GATED = {"mlp": "swiglu"}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # name: options, sizes with patches
    "DINOv2": (DINOV2, ("S/14", "B/14", "L/14", "g/14")),
    "DINOv2-reg": (
        DINOV2 | {"registers": 4, "position_resize": "timm"}, ("S/14", "B/14", "L/14", "g/14"),
    ),
    "DINOv3": (DINOV3, ("S/16", "S+/16", "B/16", "L/16", "H+/16", "7B/16")),
    "CLIP": (CLIP, ("B/32", "B/16", "L/14", "H/14", "g/14", "G/14")),
    "SigLIP": (SIGLIP, ("B/16", "L/16", "So400m/14")),
    "SigLIP2": (SIGLIP, ("B/32", "B/16", "L/16", "So400m/14", "So400m/16", "g-opt/16")),
    "DeiT": ({"gelu": "erf", "position_resize": "timm"}, ("Ti/16", "S/16", "B/16")),
    "DeiT-distilled": (
        {"gelu": "erf", "position_resize": "timm", "distilled": True}, ("Ti/16", "S/16", "B/16"),
    ),
    "DeiT3": (
        LAYER_SCALE | {"class_position": False, "position_resize": "timm"},
        ("S/16", "M/16", "B/16", "L/16", "H/14"),
    ),
    "MAE": ({"gelu": "erf", "classes": 0, "position_resize": "hf"}, ("B/16", "L/16", "H/14")),
    "FlexiViT": (
        {"class_position": False, "image_size": 240, "position_resize": "flexivit"}, ("S/16", "B/16", "L/16"),
    ),
    "EVA02": (
        GATED | {
            "rope": "eva02", "key_bias": False, "gelu": "erf", "head": "gap", "class_token": True,
            "final_norm": "pooled", "position_resize": "timm",
        },
        ("Ti/14", "S/14", "B/14", "L/14"),
    ),
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {  # what a size has beside its family's options
    "DINOv2-g": {"width": 1536, "depth": 40, "heads": 24, "hidden": swiglu_width(1536), **GATED},
    "DINOv3-S+": {"width": 384, "depth": 12, "heads": 6, "hidden": swiglu_width(384, 6), **GATED},
    "DINOv3-H+": {"width": 1280, "depth": 32, "heads": 20, "hidden": swiglu_width(1280, 6), **GATED},
    "DINOv3-7B": {
        "width": 4096, "depth": 40, "heads": 32, "hidden": swiglu_width(4096, 3, 64), **GATED,
        "qkv_bias": False, "key_bias": True,
    },
    "EVA02-B": {"hidden": swiglu_width(768, align=1), "mlp_norm": True},
    "EVA02-L": {"hidden": swiglu_width(1024, align=1), "mlp_norm": True},
    "EVA02-Ti": {"hidden": swiglu_width(192, align=1)},
    "EVA02-S": {"hidden": swiglu_width(384, align=1)},
    **{f"CLIP-{size}": {"representation": width, "gelu": "erf"} for size, width in
       {"H": 1024, "g": 1024, "G": 1280}.items()},
    "CLIP-B": {"representation": 512},
    "CLIP-L": {"representation": 768},
}  # fmt: skip
NAMES = tuple(f"{family}-{size}" for family, (_, sizes) in FAMILIES.items() for size in sizes)


def family_options(name: str) -> dict[str, Any] | None:
    """The options of DINOv3-H+/16, CLIP-L/14, ... for ViTConfig; None for a name of no family."""
    if name not in NAMES:
        return None
    family, size, patch = re.fullmatch(r"(.+)-([^-/]+|g-opt)/(\d+)", name).groups()  # type: ignore[union-attr]
    if family.endswith("-g"):  # g-opt
        family, size = family.removesuffix("-g"), "g-opt"
    shape = dict(zip(("width", "depth", "heads", "hidden"), SIZES.get(size, ()), strict=False))
    other = OTHERS.get(f"{family.replace('-reg', '')}-{size}", {})
    image = -(-224 // int(patch)) * int(patch)
    return {"image_size": image, **shape, **FAMILIES[family][0], **other, "patch": int(patch)}
