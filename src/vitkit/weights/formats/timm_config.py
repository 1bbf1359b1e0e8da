"""timm's config.json: what a folder or a Hub repository says about its arrays, and what ours say."""

import re
from collections.abc import Mapping
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.variants import VARIANTS, Config, Model
from vitkit.models.vit_config import ViTConfig
from vitkit.weights.formats.layout import Hints, read_number

CONFIG = "config.json"
GELU = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
POOLING = {"token": "token", "avg": "gap", "map": "map"}
# what the code of an architecture decides and its arrays do not show; an empty table: computes otherwise
ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"vit_so400m_patch16_siglip.*|vit_giantopt_.*", {"heads": 16, "gelu": "tanh"}),
    (r"vit_so400m_patch14_siglip.*|vit_base_patch16_gap_224", {"heads": 16}),
    (r"vit_base_patch32_siglip.*|vit_large_patch16_siglip_(gap_)?512", {"gelu": "tanh"}),
    (r".*_clip_quickgelu_.*", {"gelu": "quick"}),
    (r"vit_base_patch16_rpn_224|eva02_enormous_.*|vit_.*_rope_.*", {}),
)
ROPE: dict[str, dict[str, Any]] = {  # what timm's arguments may say of it
    "dinov3": {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True},
    "eva02": {"rope_type": "cat", "rope_temperature": 10_000.0, "rope_rotate_half": False,
              "ref_feat_shape": [16, 16]},
}  # fmt: skip
SIZES = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}
PATCHES = {"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (16, 32), "huge": (14,)}
STEMS = {  # blocks of a hybrid's stem -> architecture
    (): "vit_tiny_r_s16_p8_224", (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224", (3, 4, 6, 3): "vit_large_r50_s32_224",
}  # fmt: skip
RESNETS: dict[tuple[tuple[int, ...], float], str] = {  # blocks and factor of the width
    ((3, 4, 6, 3), 1): "50x1", ((3, 4, 6, 3), 3): "50x3", ((3, 4, 23, 3), 1): "101x1",
    ((3, 4, 23, 3), 3): "101x3", ((3, 8, 36, 3), 2): "152x2", ((3, 8, 36, 3), 4): "152x4",
}  # fmt: skip


def read_config(files: Mapping[str, Any]) -> dict[str, Any]:
    """The tables pretrained_cfg and model_args, and the label names, of a timm folder's config.json."""
    content = files.get(CONFIG, {})
    legacy = "architecture" in content and "pretrained_cfg" not in content  # one table, in old repositories
    tables = {"pretrained_cfg": content if legacy else content.get("pretrained_cfg") or {},
              "model_args": content.get("model_args") or {}}  # fmt: skip
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise WeightsError(f"{CONFIG}: {name} is {str(table)[:40]!r}; expected a table")
    own = tables["pretrained_cfg"]
    names = content.get("label_names") or own.get("label_names") or own.get("labels") or []
    if not isinstance(names, list) or not all(isinstance(label, str) for label in names):
        raise WeightsError(f"{CONFIG}: label_names is {str(names)[:40]!r}; expected a list of names")
    described = content.get("label_descriptions") or own.get("label_descriptions")
    if isinstance(described, dict):  # of WordNet numbers, for example
        texts = [described.get(name) for name in names]
        if all(isinstance(text, str) for text in texts) and len(set(texts)) == len(names):
            names = texts
    return tables | {"label_names": tuple(names)}


def read_fields(files: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    """Heads, GELU, pooling and image size, as far as config.json states them."""
    content, arguments = files.get(CONFIG, {}), read_config(files)["model_args"]
    architecture = str(content.get("architecture", "")).partition(".")[0]
    fields: dict[str, Any] = {}
    for pattern, known in ARCHITECTURES:
        if re.fullmatch(pattern, architecture):
            if not known:
                raise WeightsError(
                    f"{CONFIG}: the architecture {architecture} has blocks that vitkit does not have",
                    code="weights.unsupported",
                )
            fields |= known
    heads = hints.heads or read_number(arguments, "num_heads", "heads", None, CONFIG)
    if heads:
        fields["heads"] = heads
    if activation := arguments.get("act_layer"):
        if activation not in GELU:
            raise WeightsError(
                f"{CONFIG}: act_layer is {str(activation)[:40]!r}; known: {', '.join(GELU)}",
                code="weights.unsupported",
            )
        fields["gelu"] = GELU[activation]
    pooling = arguments.get("global_pool") or content.get("global_pool")
    if pooling in tuple(POOLING):
        fields["head"] = POOLING[pooling]
    return fields


def check_rope(arguments: Mapping[str, Any], rope: str) -> None:
    """Refuse arguments of another RoPE than vitkit computes for these arrays."""
    for name, own in ROPE.get(rope, {}).items():
        if arguments.get(name, own) not in (own, None):
            raise WeightsError(
                f"{CONFIG}: {name} is {str(arguments[name])[:40]!r}; vitkit has this RoPE with {own!r}",
                code="weights.unsupported",
            )


def read_size(files: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size of pretrained_cfg, which a grid of positions that is not square needs."""
    size = read_config(files)["pretrained_cfg"].get("input_size")
    if isinstance(size, list) and len(size) == 3 and all(type(n) is int and 0 < n < 2**16 for n in size):
        return size[1], size[2]
    return None


def read_preprocessing(pretrained_cfg: Mapping[str, Any]) -> Preprocessing:
    """timm's preprocessing; its defaults where config.json is missing."""
    method = pretrained_cfg.get("interpolation") or "bicubic"
    mode = pretrained_cfg.get("crop_mode") or "center"
    crop = read_number(pretrained_cfg, "crop_pct", "crop", 0.9, CONFIG)
    if method not in ("bilinear", "bicubic") or not (mode == "center" or (mode == "squash" and crop == 1)):
        raise WeightsError(
            f"{CONFIG}: interpolation is {str(method)[:40]!r} and crop_mode {str(mode)[:40]!r} with crop_pct "
            f"{crop}; supported are bilinear and bicubic, center, and squash with crop_pct 1"
        )
    return Preprocessing(
        resize="crop" if mode == "center" else "squash",
        crop=float(crop),
        interpolation=method,
        mean=tuple(map(float, read_number(pretrained_cfg, "mean", "mean", (0.5, 0.5, 0.5), CONFIG))),
        std=tuple(map(float, read_number(pretrained_cfg, "std", "std", (0.5, 0.5, 0.5), CONFIG))),
    )


def architecture(config: Config) -> str:
    """timm's name of the model whose code builds this one; empty if timm has none."""
    if config.channels != 3:
        return ""
    if isinstance(config, ResNetConfig):
        shape = RESNETS.get((config.blocks, config.width / 64))
        return f"resnetv2_{shape}_bit" if shape else ""
    if not isinstance(config, ViTConfig):
        return ""
    if config.representation and config.representation_kind == "tanh":  # timm has no such layer any more
        return ""
    if is_eva(config):
        return "vit_small_patch16_dinov3_qkvb" if config.rope == "dinov3" else "eva02_tiny_patch14_224"
    special = [name for name, applies in (
        ("deit_base_distilled_patch16_224", config.distilled),
        ("vit_giant_patch14_dinov2", config.mlp == "swiglu"),
        ("vit_base_patch16_clip_224", config.input_norm),
    ) if applies]  # fmt: skip
    if special:
        return special[0] if len(special) == 1 and not config.stem else ""
    if config.stem:
        stem: StemConfig = config.stem
        return STEMS.get(stem.blocks, "") if stem.width == 64 and config.covered == config.image_size else ""
    sizes = (config.width, config.depth, config.heads, config.hidden)
    for letter, name in SIZES.items():
        known = VARIANTS[letter]
        if sizes == tuple(known[k] for k in ("width", "depth", "heads", "hidden")):
            return (
                f"vit_{name}_patch{config.patch if config.patch in PATCHES[name] else PATCHES[name][-1]}_224"
            )
    return "vit_base_patch16_224"  # model_args state all sizes


def is_eva(config: ViTConfig) -> bool:
    """Whether timm's class Eva computes this model, and not its VisionTransformer."""
    return config.rope != "none" or config.mlp_norm or not config.key_bias


def model_args(config: Config) -> dict[str, Any]:
    """The arguments of the architecture's function: every size, and what its arrays do not show."""
    if not isinstance(config, ViTConfig):
        return {}
    hidden = config.hidden * (2 if config.mlp == "swiglu" and not is_eva(config) else 1)
    ratio = hidden / config.width
    if int(config.width * ratio) != hidden:  # timm rounds down
        ratio = (hidden + 0.5) / config.width
    arguments = {
        "img_size": list(config.image_size),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "class_token": bool(config.class_token),
        "global_pool": next(name for name, head in POOLING.items() if head == config.head),
    }
    arguments |= {"patch_size": config.patch} if not config.stem else {}
    arguments |= {"qk_norm": True} if config.qk_norm else {}
    arguments |= {"init_values": 1e-5 if config.layer_scale else None}
    return arguments | (eva_args(config) if is_eva(config) else vit_args(config))


def vit_args(config: ViTConfig) -> dict[str, Any]:
    """Further arguments of timm's VisionTransformer."""
    arguments: dict[str, Any] = {"fc_norm": config.final_norm == "pooled"}
    arguments |= {"reg_tokens": config.registers} if config.registers else {}
    arguments |= {"no_embed_class": True} if config.registers or not config.class_position else {}
    if config.mlp == "gelu":
        arguments["act_layer"] = next(name for name, gelu in GELU.items() if gelu == config.gelu)
    return arguments


def eva_args(config: ViTConfig) -> dict[str, Any]:
    """Further arguments of timm's class Eva, for EVA-02 and DINOv3."""
    arguments: dict[str, Any] = {
        "swiglu_mlp": config.mlp == "swiglu",
        "swiglu_align_to": 1 if config.mlp == "swiglu" and config.rope == "dinov3" else 0,
        "scale_mlp": config.mlp_norm,
        "qkv_fused": not config.mlp_norm,
        "num_reg_tokens": config.registers,
        "use_abs_pos_emb": config.positions == "1d",
        "use_rot_pos_emb": config.rope != "none",
        "use_fc_norm": config.final_norm == "pooled",
        "ref_feat_shape": [16, 16] if config.rope == "eva02" else None,
    }
    return arguments | (ROPE["dinov3"] if config.rope == "dinov3" else {})


def config_json(model: Model) -> dict[str, Any]:
    """What timm.create_model needs to build the model, its preprocessing and its labels."""
    config, p = model.config, model.preprocessing
    name = architecture(config)
    if not name:
        raise WeightsError(
            "timm has no architecture of these sizes or with this head, so its create_model could not load "
            "a folder; a file, such as model.safetensors, holds the arrays",
            code="weights.unsupported",
        )
    if p.resize in ("fit", "windows"):
        raise WeightsError(
            "timm does not resize images to fit and pad them as the model's preprocessing does; write a file "
            "instead of a folder, or give convert --view squash",
            code="weights.unsupported",
        )
    resnet, stem = isinstance(config, ResNetConfig), getattr(config, "stem", None)
    outputs = config.classes or getattr(config, "representation", 0)  # CLIP's projection is timm's head
    first = "stem.conv" if resnet else "patch_embed.proj"
    if stem:
        first = "patch_embed.backbone.stem.conv" if stem.blocks else "patch_embed.backbone.conv"
    pretrained = {
        "input_size": [config.channels, *config.image_size],
        "fixed_input_size": not resnet,
        "interpolation": p.interpolation,
        "crop_pct": p.crop,
        "crop_mode": "center" if p.resize == "crop" else "squash",
        "mean": list(p.mean),
        "std": list(p.std),
        "num_classes": outputs,
        "pool_size": None,
        "first_conv": first,
        "classifier": "head.fc" if resnet else "head",
    }
    features = 32 * config.width if resnet else config.width
    content = {"architecture": name, "num_classes": outputs, "num_features": features}
    if not isinstance(config, ResNetConfig):
        content["global_pool"] = model_args(config)["global_pool"]
    content |= {"pretrained_cfg": pretrained, "model_args": model_args(config)}
    return content | ({"label_names": list(model.labels)} if model.labels else {})


def json_files(model: Model) -> dict[str, Any]:
    return {CONFIG: config_json(model)}
