"""RF-DETR in the names of its own code, which transformers writes to folders, too."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.dense.rf_detr import RfDetrConfig
from vitkit.models.variants import Config, Model, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.hf_json import (
    CONFIG,
    PREPROCESSOR,
    labels_json,
    preprocessor_json,
    read_gelu,
    read_labels,
    read_preprocessing,
    shared_json,
    size_note,
)
from vitkit.weights.formats.hf_models import dinov2_entries, mlp_ratio, unsupported_dino
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
    read_number,
    required_shape,
    square_patch,
    with_numerics,
)
from vitkit.weights.formats.yolos_layouts import COCO_NAMES

ENCODER, PROJECTOR = "backbone.0.encoder.encoder.", "backbone.0.projector.stages.0."
STRIPPED = "0."  # what is left of "backbone.0." in a checkpoint whose prefix "backbone." was removed
RENAMED: tuple[tuple[str, str], ...] = (  # patterns of our names, and theirs
    (r"projector\.norm\.", PROJECTOR + "1."),
    (r"projector\.bottlenecks\.(\d+)\.conv(\d)\.", PROJECTOR + r"0.m.\1.cv\2."),
    (r"projector\.conv(\d)\.", PROJECTOR + r"0.cv\1."),
    (r"decoder\.positions\.", "transformer.decoder.ref_point_head."),
    (r"decoder\.", "transformer.decoder."),
    (r"proposals\.(\d+)\.output\.", r"transformer.enc_output.\1."),
    (r"proposals\.(\d+)\.norm\.", r"transformer.enc_output_norm.\1."),
    (r"proposals\.(\d+)\.box\.", r"transformer.enc_out_bbox_embed.\1."),
    (r"proposal_classes\.", "transformer.enc_out_class_embed."),
    (r"classify\.", "class_embed."),
    (r"box\.", "bbox_embed."),
    (r"queries$", "query_feat.weight"),
    (r"references$", "refpoint_embed.weight"),
)
WITHIN: tuple[tuple[str, str], ...] = (  # the ends of names, after that
    (r"(stages\.0\.0\..*)\.norm\.", r"\1.bn."),
    (r"\.attention\.qkv\.", ".self_attn.in_proj_"),
    (r"\.attention\.out\.", ".self_attn.out_proj."),
    (r"\.cross\.offsets\.", ".cross_attn.sampling_offsets."),
    (r"\.cross\.weights\.", ".cross_attn.attention_weights."),
    (r"\.cross\.value\.", ".cross_attn.value_proj."),
    (r"\.cross\.out\.", ".cross_attn.output_proj."),
    (r"(layers\.\d+)\.up\.", r"\1.linear1."),
    (r"(layers\.\d+)\.down\.", r"\1.linear2."),
)
FIXED = {  # of config.json, where vitkit has no other
    "hidden_expansion": 0.5, "activation_function": "silu", "decoder_activation_function": "relu",
    "attention_bias": True, "num_feature_levels": 1,
}  # fmt: skip
PREPROCESSING = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def foreign_name(own: str) -> str:
    """Their name of one of our parameters outside the encoder."""
    for pattern, new in RENAMED:
        if re.match(pattern, own):
            own = re.sub("^" + pattern, new, own)
            break
    for pattern, new in WITHIN:
        own = re.sub(pattern, new, own)
    return own


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, RfDetrConfig)
    encoder = [
        replace(e, own=f"vit.{e.own}", foreign=tuple(ENCODER + name for name in e.foreign))
        for e in dinov2_entries(config.vit)
    ]
    names = (name for name in skeleton(config).state_dict() if not name.startswith("vit."))
    return encoder + [Entry(name, (foreign_name(name),), SAME) for name in names]


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    """The names of the original code, from a file that lacks the prefix backbone. or has the prefix model."""
    prefix = "model." if "model.refpoint_embed.weight" in shapes else ""
    short = {name.removeprefix(prefix): Source(name) for name in shapes}
    return {("backbone." if n.startswith(STRIPPED) else "") + n: source for n, source in short.items()}


def recognises(shapes: Shapes) -> bool:
    names = {
        "refpoint_embed.weight",
        "query_feat.weight",
        "class_embed.weight",
        f"{ENCODER}embeddings.cls_token",
    }
    return names <= canonical_names(shapes).keys()


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    settings: Mapping[str, Any] = hints.files.get(CONFIG, {})
    check_supported(shapes, settings)
    vit, note = infer_vit(shapes, hints, settings)
    classes, width = required_shape(shapes, "class_embed.weight", 2)
    projected = required_shape(shapes, f"{PROJECTOR}0.cv1.conv.weight", 4)[1]
    windows, taken = infer_windows(vit, projected // vit.width, settings)
    groups = count(shapes, "transformer.enc_output.{}.weight")
    decoder = "transformer.decoder.layers.{}."
    heads = read_number(settings, "decoder_cross_attention_heads", "heads", max(1, width // 16), CONFIG)
    read = required_shape(shapes, decoder.format(0) + "cross_attn.attention_weights.weight", 2)[0]
    config = RfDetrConfig(
        vit=vit,
        classes=classes,
        windows=windows,
        taken=taken,
        queries=required_shape(shapes, "refpoint_embed.weight", 2)[0] // max(1, groups),
        groups=groups,
        layers=count(shapes, decoder + "linear1.weight"),
        decoder_width=width,
        decoder_hidden=required_shape(shapes, decoder.format(0) + "linear1.weight", 2)[0],
        self_heads=read_number(
            settings, "decoder_self_attention_heads", "heads", max(1, width // 32), CONFIG
        ),
        cross_heads=heads,
        points=read // heads,
        bottlenecks=count(shapes, PROJECTOR + "0.m.{}.cv1.conv.weight"),
        projector_eps=float(
            read_number(settings, "layer_norm_eps", "norm_eps", 1e-5 if settings else 1e-6, CONFIG)
        ),
    )
    processor = hints.files.get(PREPROCESSOR)
    labels, of_coco = read_labels(settings, classes), tuple(COCO_NAMES.split(", "))
    if not labels and classes == len(of_coco):
        labels = of_coco
    notes = (note, size_note(processor or {}, vit.image_size))
    return ModelSpec(
        config,
        read_preprocessing(processor) if processor else PREPROCESSING,
        labels=labels,
        notes=tuple(n for n in notes if n),
    )


def check_supported(shapes: Shapes, settings: Mapping[str, Any]) -> None:
    """Refuse what is another model with these names."""
    if any(name.startswith("segmentation_head.") for name in shapes):
        raise WeightsError(
            "an RF-DETR for instance masks; vitkit has the detector alone", code="weights.unsupported"
        )
    for name, value in FIXED.items():
        if settings.get(name, value) != value:
            raise WeightsError(
                f"{CONFIG}: {name} is {str(settings[name])[:40]!r}; vitkit has RF-DETR with {value!r}",
                code="weights.unsupported",
            )


def infer_vit(shapes: Shapes, hints: Hints, settings: Mapping[str, Any]) -> tuple[ViTConfig, str]:
    """The encoder, and a note on what the arrays do not show."""
    backbone = settings.get("backbone_config", {})
    inner: Mapping[str, Any] = backbone if isinstance(backbone, dict) else {}
    kernel = required_shape(shapes, f"{ENCODER}embeddings.patch_embeddings.projection.weight", 4)
    depth = count(shapes, ENCODER + "encoder.layer.{}.norm1.weight")
    if f"{ENCODER}encoder.layer.0.mlp.fc2.weight" not in shapes:
        raise WeightsError("its encoder has no MLP with GELU, as DINOv2-S has", code="weights.unsupported")
    hidden = required_shape(shapes, f"{ENCODER}encoder.layer.0.mlp.fc2.weight", 2)[1]
    heads = hints.heads or read_number(inner, "num_attention_heads", "heads", None, CONFIG)
    heads, note = guess_heads(kernel[0], depth, hidden, Hints(heads=heads))
    patch = square_patch((kernel[2], kernel[3]))
    positions = required_shape(shapes, f"{ENCODER}embeddings.position_embeddings", 3)[1]
    return ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        channels=kernel[1],
        image_size=infer_image_size(positions, 1, patch, Hints(image_size=hints.image_size))[0],
        classes=0,
        layer_scale=True,
        mask_token=f"{ENCODER}embeddings.mask_token" in shapes,
        gelu=read_gelu(inner),
        norm_eps=float(read_number(inner, "layer_norm_eps", "norm_eps", 1e-6, CONFIG)),
        qkv_bias=f"{ENCODER}encoder.layer.0.attention.attention.query.bias" in shapes,
        position_resize="timm",
    ), note


def infer_windows(vit: ViTConfig, maps: int, settings: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The windows along each side and the layers whose outputs are taken; as published if no file says it."""
    if settings:
        inner = settings.get("backbone_config", {})
        windows = read_number(inner, "num_windows", "blocks", 4, CONFIG)
        taken = read_number(inner, "out_indices", "depth", (), CONFIG)
        if not taken or any(type(n) is not int for n in (windows, *taken)):
            raise WeightsError(f"{CONFIG}: num_windows and out_indices must be whole numbers")
        return windows, taken
    if vit.patch == 14:  # the first base model
        return 4, tuple(range(2, vit.depth, 3))
    step = vit.depth / max(1, maps)
    return 2, tuple(math.ceil(step * (i + 1)) for i in range(maps))


def unsupported(config: Config) -> str:
    if not isinstance(config, RfDetrConfig):
        return "the RF-DETR layout holds only RF-DETR models"
    if not config.vit.layer_scale or config.vit.mlp != "gelu":
        return "RF-DETR's encoder is a DINOv2 with LayerScale and an MLP; save the model as vitkit"
    return unsupported_dino(config.vit)


def native(config: Config) -> Config:
    """With the numerics of the original code."""
    assert isinstance(config, RfDetrConfig)
    vit = with_numerics(config.vit, gelu="erf", norm_eps=1e-6, position_resize="timm")
    assert isinstance(vit, ViTConfig)
    return replace(config, vit=vit, projector_eps=1e-6)


def config_json(c: RfDetrConfig) -> dict[str, Any]:
    """What transformers needs to build the model."""
    backbone = shared_json(c.vit, "rf_detr_dinov2", "RfDetrDinov2Backbone")
    backbone |= {
        "mlp_ratio": mlp_ratio(c.vit), "qkv_bias": c.vit.qkv_bias, "use_mask_token": c.vit.mask_token,
        "num_windows": c.windows, "out_indices": list(c.taken),
        "out_features": [f"stage{n}" for n in c.taken],
    }  # fmt: skip
    return FIXED | {
        "architectures": ["RfDetrForObjectDetection"],
        "model_type": "rf_detr",
        "backbone_config": backbone,
        "c2f_num_blocks": c.bottlenecks,
        "d_model": c.decoder_width,
        "decoder_ffn_dim": c.decoder_hidden,
        "decoder_layers": c.layers,
        "decoder_self_attention_heads": c.self_heads,
        "decoder_cross_attention_heads": c.cross_heads,
        "decoder_n_points": c.points,
        "dropout": c.dropout,
        "group_detr": c.groups,
        "layer_norm_eps": c.projector_eps,
        "num_queries": c.queries,
        "dtype": "float32",
    }


def json_files(model: Model) -> dict[str, Any]:
    assert isinstance(model.config, RfDetrConfig)
    processor = preprocessor_json(model.config.vit, model.preprocessing)
    return {
        PREPROCESSOR: processor | {"image_processor_type": "RfDetrImageProcessor", "do_pad": False},
        CONFIG: config_json(model.config) | labels_json(model.config.classes, model.labels),
    }


LAYOUT = Layout(
    name="rf-detr",
    recognises=recognises,
    canonical_names=canonical_names,
    infer=infer,
    entries=entries,
    unsupported=unsupported,
    native=native,
    json_files=json_files,
    remedies={"projector_eps": "config.json of a folder has it"},
)
FORMAT = Format(
    name="rf-detr",
    description="RF-DETR as its authors save it, and as transformers reads and writes it",
    layouts=(LAYOUT,),
    endings=(".pth", ".pt", ".safetensors", ""),
    order=35,
)
