"""The timm format: ViTs and hybrids in timm's names, which DeiT, MAE, DINO and open_clip's SigLIP share."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.resnet import StemConfig
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats import bit, eva
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
    required_shape,
    square_patch,
    table_entries,
    unsupported_fields,
    with_numerics,
)
from vitkit.weights.formats.open_clip import with_config, with_open_clip_config
from vitkit.weights.formats.text_rows import clip_canonical, clip_rows, clip_text
from vitkit.weights.formats.timm_config import (
    CONFIG,
    check_rope,
    is_eva,
    json_files,
    read_config,
    read_fields,
    read_preprocessing,
    read_size,
)

STEM = "patch_embed.backbone"
TRUNK = "visual.trunk."  # of a timm model in open_clip's files
QUICK = re.compile(r"openai|metaclip_\w+")  # tags of CLIP towers that were trained with QuickGELU
MEAN = {"head": "give timm global_pool='avg'"}  # of a class token, which only this pooling can leave unread
DECODER = ("decoder_", "mask_token")  # of a masked autoencoder; not part of the encoder


def recognises(shapes: Shapes) -> bool:
    return "patch_embed.proj.weight" in shapes and "blocks.0.attn.proj.weight" in shapes


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """Without open_clip's prefix and text tower; DeiT III names LayerScale gamma_1 and gamma_2."""
    prefix = TRUNK if f"{TRUNK}patch_embed.proj.weight" in shapes else ""
    tower = prefix.partition(".")[0]  # a projection after the trunk is in no entry, and must not be lost
    names = {name: name.removeprefix(prefix) for name in shapes if name.startswith(tower)}
    return {
        re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", short): Source(name)
        for name, short in names.items()
    }


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, "patch_embed.proj.weight", 4)
    depth = count(shapes, "blocks.{}.attn.proj.weight")
    rows = required_shape(shapes, "blocks.0.mlp.fc1.weight", 2)[0]
    gated = rows == 2 * required_shape(shapes, "blocks.0.mlp.fc2.weight", 2)[1]
    mlp, hidden = ("swiglu", rows // 2) if gated else ("gelu", rows)
    metadata, stated = read_config(hints.files), read_fields(hints.files, hints)
    heads, note = guess_heads(kernel[0], depth, hidden, Hints(heads=stated.get("heads")), mlp)
    stem = infer_stem(shapes)
    patch = square_patch((kernel[2], kernel[3]))
    clip = "norm_pre.weight" in shapes
    if clip and "attn_pool.latent" in shapes:
        raise WeightsError(
            "arrays norm_pre and attn_pool: a Perception Encoder, whose RoPE vitkit does not have",
            code="weights.unsupported",
        )
    tokens, size_note = infer_tokens(shapes, patch * (stem.stride if stem else 1), hints)
    tokens["head"] = stated.get("head", tokens["head"])
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        stem=stem,
        channels=required_shape(shapes, f"{root_of(shapes)}.conv.weight", 4)[1] if stem else kernel[1],
        classes=required_shape(shapes, "head.weight", 2)[0] if "head.weight" in shapes else 0,
        representation=(
            required_shape(shapes, "pre_logits.fc.weight", 2)[0] if "pre_logits.fc.weight" in shapes else 0
        ),
        **tokens,
        input_norm=clip,
        mlp=mlp,
        gelu=stated.get("gelu", "erf"),
        norm_eps=1e-5 if clip else 1e-6,
        project_bias=bool(stem) or "patch_embed.proj.bias" in shapes,
        qk_norm="blocks.0.attn.q_norm.weight" in shapes,
        position_resize="timm",
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        layer_scale="blocks.0.ls1.gamma" in shapes,
    )
    has_decoder = any(name.startswith("decoder_") for name in shapes)
    labels = metadata["label_names"] if len(metadata["label_names"]) == config.classes else ()
    return ModelSpec(
        config,
        read_preprocessing(metadata["pretrained_cfg"]),
        labels,
        notes=tuple(n for n in (note, size_note) if n),
        ignored=DECODER if has_decoder else (),
    )


def infer_tokens(shapes: Shapes, stride: int, hints: Hints) -> tuple[dict[str, Any], str]:
    """The options of the tokens: which there are, which have a position, what the head reads; and a note."""
    class_token, distilled = "cls_token" in shapes, "dist_token" in shapes
    entries, pooled = required_shape(shapes, "pos_embed", 3)[1], "fc_norm.weight" in shapes
    lead = class_token + distilled
    size, note = infer_image_size(entries, lead, stride, with_stated_size(hints, entries, lead, stride))
    options = {
        "image_size": size,
        "class_token": class_token,
        "class_position": not class_token or entries > (size[0] // stride) * (size[1] // stride),
        "registers": required_shape(shapes, "reg_token", 3)[1] if "reg_token" in shapes else 0,
        "distilled": distilled,
        "head": "map" if "attn_pool.latent" in shapes else "gap" if pooled or not class_token else "token",
        "final_norm": "pooled" if pooled else "tokens",
    }
    return options, note


def with_stated_size(hints: Hints, entries: int, lead: int, stride: int) -> Hints:
    """The hints with the image size of config.json, if it fits the positions (0 entries: there are none)."""
    sides = read_size(hints.files)
    if hints.image_size or not sides:
        return hints
    fits = (sides[0] // stride) * (sides[1] // stride) in (entries, entries - lead)
    return replace(hints, image_size=sides) if fits or not entries else hints


def root_of(shapes: Shapes) -> str:
    """The prefix of a hybrid's root convolution (timm wraps only stems with stages); empty for other ViTs."""
    return next((r for r in (f"{STEM}.stem", STEM) if f"{r}.conv.weight" in shapes), "")


def infer_stem(shapes: Shapes) -> StemConfig | None:
    if not root_of(shapes):
        return None
    stages = count(shapes, STEM + ".stages.{}.blocks.0.conv1.weight")
    blocks = tuple(count(shapes, f"{STEM}.stages.{s}.blocks.{{}}.conv1.weight") for s in range(stages))
    width = required_shape(shapes, f"{root_of(shapes)}.conv.weight", 4)[0]
    return StemConfig(blocks=blocks, width=width, norm_eps=1e-5, std_eps=1e-8, std_eps_in="variance")


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    table = pairs(
        "project", "patch_embed.proj", parts=("weight", "bias") if config.project_bias else ("weight",)
    )
    table += [Entry("positions.table", ("pos_embed",), SAME)]
    tokens = {
        "class_token": (config.class_token, "cls_token"),
        "distillation_token": (config.distilled, "dist_token"),
        "registers": (config.registers, "reg_token"),
    }
    table += [Entry(own, (foreign,), SAME) for own, (present, foreign) in tokens.items() if present]
    table += pairs("input_norm", "norm_pre") if config.input_norm else []
    for i in range(config.depth):
        own, foreign = f"encoder.blocks.{i}", f"blocks.{i}"
        qkv = ("weight", "bias") if config.qkv_bias else ("weight",)
        table += [
            *pairs(f"{own}.norm1", f"{foreign}.norm1"),
            *pairs(f"{own}.attention.qkv", f"{foreign}.attn.qkv", parts=qkv),
            *pairs(f"{own}.attention.out", f"{foreign}.attn.proj"),
            *pairs(f"{own}.norm2", f"{foreign}.norm2"),
            *pairs(f"{own}.mlp.up", f"{foreign}.mlp.fc1"),
            *pairs(f"{own}.mlp.down", f"{foreign}.mlp.fc2"),
        ]
        if config.qk_norm:
            table += pairs(f"{own}.attention.query_norm", f"{foreign}.attn.q_norm")
            table += pairs(f"{own}.attention.key_norm", f"{foreign}.attn.k_norm")
        if config.layer_scale:
            table += [Entry(f"{own}.scale{k}", (f"{foreign}.ls{k}.gamma",), SAME) for k in (1, 2)]
    table += pairs("pool_norm", "fc_norm") if config.final_norm == "pooled" else pairs("encoder.norm", "norm")
    if config.head == "map":
        table += pool_entries()
    if config.representation_kind == "linear":  # CLIP's projection is timm's head, with a bias of zeros
        table += pairs("representation", "head", parts=("weight",))
    else:
        table += pairs("representation", "pre_logits.fc") if config.representation else []
    table += pairs("head", "head") if config.classes else []
    table += pairs("distillation_head", "head_dist") if config.classes and config.distilled else []
    return table + (stem_entries(config.stem) if config.stem else [])


def pool_entries() -> list[Entry]:
    names = {
        "query": "q",
        "key_value": "kv",
        "out": "proj",
        "norm": "norm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }
    table = [Entry("pool.probe", ("attn_pool.latent",), SAME)]
    for own, foreign in names.items():
        table += pairs(f"pool.{own}", f"attn_pool.{foreign}")
    return table


def stem_entries(stem: StemConfig) -> list[Entry]:
    root = f"{STEM}.stem" if stem.blocks else STEM
    table = [*pairs("stem.root", f"{root}.conv", parts=("weight",)), *pairs("stem.root_norm", f"{root}.norm")]
    for s, units in enumerate(stem.blocks):
        for u in range(units):
            own, foreign = f"stem.stages.{s}.{u}", f"{STEM}.stages.{s}.blocks.{u}"
            for k, norm in ((1, "norm1"), (2, "norm2"), (3, "closing_norm")):
                table += pairs(f"{own}.conv{k}", f"{foreign}.conv{k}", parts=("weight",))
                table += pairs(f"{own}.{norm}", f"{foreign}.norm{k}")
            if u == 0:
                table += pairs(f"{own}.shortcut", f"{foreign}.downsample.conv", parts=("weight",))
                table += pairs(f"{own}.shortcut_norm", f"{foreign}.downsample.norm")
    return table


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.registers and config.distilled:
        return "timm has no model with registers and a distillation token; save it as vitkit"
    if isinstance(config, ViTConfig) and config.input_norm and config.head == "map":
        return "timm has attention pooling and a norm before the blocks only together with RoPE"
    if isinstance(config, ViTConfig) and config.input_norm == config.project_bias and not config.stem:
        return "timm has a bias of the patch embedding if and only if there is no norm before the blocks"
    if isinstance(config, ViTConfig) and config.representation_kind == "linear" and config.classes:
        return "timm has no head after CLIP's projection; adapt the model first"
    also = (
        "head",
        "final_norm",
        "layer_scale",
        "qkv_bias",
        "stem",
        "class_position",
        "registers",
        "distilled",
    )
    clip = ("input_norm", "project_bias", "representation_kind", "representation")
    linear = isinstance(config, ViTConfig) and config.representation_kind == "linear"
    also += ("mlp", "qk_norm", *(clip if linear else clip[:2]))
    return unsupported_fields(config, "timm", also=also)


def projection_bias(config: Config) -> dict[str, Tensor]:
    linear = isinstance(config, ViTConfig) and config.representation_kind == "linear"
    return {"head.bias": torch.zeros(config.representation)} if linear else {}  # type: ignore[union-attr]


def choose(config: Config) -> Layout:
    if not isinstance(config, ViTConfig):
        return bit.TIMM
    return EVA if is_eva(config) else LAYOUT


def needed_tokens(config: ViTConfig) -> dict[str, bool]:
    """timm has no mask token, and beside registers no position of the class token."""
    beside_registers = {"class_position": False} if config.registers and not is_eva(config) else {}
    return {"mask_token": False} | beside_registers


def native(config: Config) -> Config:
    stem = {"norm_eps": 1e-5, "std_eps": 1e-8, "std_eps_in": "variance"}
    assert isinstance(config, ViTConfig)
    gelu = "quick" if config.gelu == "quick" else "erf"
    return with_numerics(config, stem, gelu=gelu, norm_eps=1e-5 if config.input_norm else 1e-6)


def vit_spec(shapes: Shapes, hints: Hints) -> ModelSpec:
    """The model of a file of class VisionTransformer, with a note where its GELU is not certain."""
    spec = infer(shapes, hints)
    assert isinstance(spec.config, ViTConfig)
    note = gelu_note(spec.config, hints.files.get(CONFIG, {}), read_config(hints.files)["pretrained_cfg"])
    if not note or "gelu" in read_fields(hints.files, hints):
        return spec
    return replace(spec, notes=(*spec.notes, note))


def gelu_note(config: ViTConfig, content: Mapping[str, Any], pretrained_cfg: Mapping[str, Any]) -> str:
    """What to do if the arrays are of a model with another GELU than timm's default; often nothing."""
    named = "architecture" in content
    if config.input_norm and (not named or QUICK.fullmatch(str(pretrained_cfg.get("tag", "")))):
        return "erf GELU, as timm computes; OpenAI's were trained with QuickGELU: gelu='quick' (--gelu quick)"
    if config.head == "map" and not named:
        return "erf GELU, as most of timm's SigLIP; they were trained with tanh: gelu='tanh' (--gelu tanh)"
    return ""


def eva_spec(shapes: Shapes, hints: Hints) -> ModelSpec:
    """The model of a file of class Eva, with what timm's config.json says about it."""
    metadata, stated = read_config(hints.files), read_fields(hints.files, hints)
    patch, entries = required_shape(shapes, "patch_embed.proj.weight", 4)[2], shapes.get("pos_embed", (1, 0))
    hints = with_stated_size(replace(hints, heads=stated.get("heads")), entries[1], 1, patch)
    spec = eva.infer(shapes, hints)
    assert isinstance(spec.config, ViTConfig)
    check_rope(metadata["model_args"], spec.config.rope)
    labels = metadata["label_names"] if len(metadata["label_names"]) == spec.config.classes else ()
    spec = replace(spec, preprocessing=read_preprocessing(metadata["pretrained_cfg"]), labels=labels)
    if "head" in stated:
        return replace(spec, config=replace(spec.config, head=stated["head"]))
    note = "features are the class token, as in DINOv3's code; timm pools patches by default"
    return replace(spec, notes=(*spec.notes, note)) if not entries[1] else spec


def siglip_spec(shapes: Shapes, hints: Hints) -> ModelSpec:
    """open_clip's timm towers with attention pooling are SigLIP, trained with the tanh GELU."""
    kernel, text = required_shape(shapes, "patch_embed.proj.weight", 4), clip_text(shapes, hints)
    lead = int("cls_token" in shapes)
    hints = with_open_clip_config(hints, shapes, width=kernel[0], patch=kernel[2], lead=lead)
    spec = infer(shapes, hints)
    if "attn_pool.latent" in shapes and isinstance(spec.config, ViTConfig):
        squash = Preprocessing(interpolation="bicubic")
        spec = replace(spec, config=replace(spec.config, gelu="tanh", text=text), preprocessing=squash)
    return with_config(spec, hints)


def open_clip_entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    return entries(config) + table_entries(config, clip_rows(config.text))


LAYOUT = Layout(
    name="timm",
    recognises=recognises,
    canonical_names=canonical_names,
    infer=vit_spec,
    entries=entries,
    constants=projection_bias,
    unsupported=unsupported,
    native=native,
    peer="timm",
    remedies={"gelu": "give it act_layer='gelu_tanh'"} | MEAN,
    json_files=json_files,
)
EVA = Layout(
    name="timm-eva",
    recognises=eva.recognises,
    infer=eva_spec,
    entries=eva.entries,
    unsupported=eva.unsupported,
    native=eva.native,
    peer="timm",
    remedies=MEAN,
    json_files=json_files,
)
OPEN_CLIP = Layout(
    name="open_clip",
    recognises=lambda shapes: f"{TRUNK}patch_embed.proj.weight" in shapes,
    canonical_names=lambda shapes: canonical_names(shapes) | clip_canonical(shapes),
    written_name=lambda name, config: TRUNK + name,
    infer=siglip_spec,
    entries=open_clip_entries,
    unsupported=unsupported,
    native=lambda config: with_numerics(config, norm_eps=1e-6),
)
FORMAT = Format(
    name="timm",
    description="ViT, hybrid, BiT, DeiT, MAE, DINO, CLIP, SigLIP, EVA-02; folders for timm.create_model",
    layouts=(EVA, LAYOUT, OPEN_CLIP, bit.TIMM),
    endings=(".safetensors", ".pth", ".pt", ".bin", ""),
    choose=choose,
    tokens=needed_tokens,
    order=20,
)
