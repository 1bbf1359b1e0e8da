"""CLIP as OpenAI and open_clip save it: the vision tower, with or without the text tower."""

from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.hf_models import CLIP_PREPROCESSING, TABLE, VECTOR
from vitkit.weights.formats.layout import (
    DENSE,
    SAME,
    Entry,
    Format,
    Hints,
    Layout,
    ModelSpec,
    Row,
    Shapes,
    Source,
    count,
    guess_heads,
    infer_image_size,
    required_shape,
    square_patch,
    table_entries,
    unsupported_fields,
    with_numerics,
)
from vitkit.weights.formats.open_clip import with_config, with_open_clip_config
from vitkit.weights.formats.text_rows import PREFIX, clip_canonical, clip_rows, clip_text

TOWER = "visual."
OWN, BLOCK = "encoder.blocks.{}.", "transformer.resblocks.{}."
ROWS: list[Row] = [
    ("project", "conv1", SAME),
    ("class_token", "class_embedding", VECTOR),
    ("positions.table", "positional_embedding", TABLE),
    ("input_norm", "ln_pre", SAME),
    (OWN + "norm1", BLOCK + "ln_1", SAME),
    (OWN + "attention.qkv.weight", BLOCK + "attn.in_proj_weight", SAME),
    (OWN + "attention.qkv.bias", BLOCK + "attn.in_proj_bias", SAME),
    (OWN + "attention.out", BLOCK + "attn.out_proj", SAME),
    (OWN + "scale1", BLOCK + "ls_1.gamma", SAME),
    (OWN + "norm2", BLOCK + "ln_2", SAME),
    (OWN + "mlp.up", BLOCK + "mlp.c_fc", SAME),
    (OWN + "mlp.down", BLOCK + "mlp.c_proj", SAME),
    (OWN + "scale2", BLOCK + "ls_2.gamma", SAME),
    ("encoder.norm", "ln_post", SAME),
    ("pool_norm", "ln_post", SAME),  # after average pooling
    ("representation.weight", "proj", DENSE),
]


def recognises(shapes: Shapes) -> bool:
    names = ("conv1.weight", "class_embedding", "ln_pre.weight", "transformer.resblocks.0.ln_1.weight")
    return any(all(prefix + name in shapes for name in names) for prefix in ("", TOWER))


def canonical_names(shapes: Shapes) -> dict[str, Source]:
    prefix = TOWER if f"{TOWER}conv1.weight" in shapes else ""
    vision = {name.removeprefix(prefix): Source(name) for name in shapes if name.startswith(prefix)}
    return vision | (clip_canonical(shapes) if prefix else {})


def written_name(name: str, config: Config) -> str:
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else TOWER + name


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    """OpenAI's heads are 64 wide; whether the GELU is QuickGELU is in open_clip's file, but in no array."""
    kernel = required_shape(shapes, "conv1.weight", 4)
    depth, patch = count(shapes, BLOCK + "ln_1.weight"), square_patch((kernel[2], kernel[3]))
    hidden = required_shape(shapes, "transformer.resblocks.0.mlp.c_fc.weight", 2)[0]
    hints = with_open_clip_config(hints, shapes, width=kernel[0], patch=patch, lead=1)
    heads, note = guess_heads(kernel[0], depth, hidden, hints)
    size, _ = infer_image_size(required_shape(shapes, "positional_embedding", 2)[0], 1, patch, hints)
    projected = "proj" in shapes
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=hidden,
        patch=patch,
        image_size=size,
        channels=kernel[1],
        classes=0,
        representation=required_shape(shapes, "proj", 2)[1] if projected else 0,
        representation_kind="linear" if projected else "tanh",
        input_norm=True,
        project_bias=False,
        layer_scale="transformer.resblocks.0.ls_1.gamma" in shapes,
        gelu="quick",
        norm_eps=1e-5,
        position_resize="timm",
        text=clip_text(shapes, hints),
    )
    gelu = "QuickGELU, as in OpenAI's models; for LAION's and DataComp's give gelu='erf' (--gelu erf)"
    spec = ModelSpec(config, CLIP_PREPROCESSING, notes=tuple(n for n in (note, gelu) if n))
    return with_config(spec, hints)


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    return table_entries(config, ROWS + clip_rows(config.text))


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and (config.classes or config.project_bias or not config.input_norm):
        return "the CLIP layout holds towers with input_norm=True, project_bias=False and classes=0"
    if isinstance(config, ViTConfig) and config.text and config.text.output_bias:
        return "the CLIP layout holds text towers whose projection has no bias"
    also = ("input_norm", "project_bias", "representation", "representation_kind", "layer_scale", "text")
    return unsupported_fields(config, "CLIP", also=also)


LAYOUT = Layout(
    name="clip",
    recognises=recognises,
    canonical_names=canonical_names,
    written_name=written_name,
    infer=infer,
    entries=entries,
    unsupported=unsupported,
    native=lambda config: with_numerics(config, norm_eps=1e-5),
)
FORMAT = Format(
    name="clip",
    description="CLIP in the names of OpenAI and open_clip, with or without the text tower",
    layouts=(LAYOUT,),
    endings=(".safetensors", ".pt", ".pth", ".bin"),
    text=True,
    order=25,
)
