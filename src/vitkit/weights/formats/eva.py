"""timm's class Eva: EVA-02, and DINOv3 as timm publishes it."""

from vitkit.errors import WeightsError
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.layout import (
    NO_KEY_BIAS,
    SAME,
    Entry,
    Hints,
    ModelSpec,
    Row,
    Shapes,
    count,
    guess_heads,
    infer_image_size,
    required_shape,
    square_patch,
    table_entries,
    unsupported_fields,
    with_numerics,
)

ENORMOUS = (1792, 64)  # width and layers of EVA-02 E
BLOCK, OWN = "blocks.{}.", "encoder.blocks.{}."
SEPARATE = tuple(f"{BLOCK}attn.{part}_proj" for part in "qkv")
ROWS: list[Row] = [
    ("project", "patch_embed.proj", SAME),
    ("class_token", "cls_token", SAME),
    ("registers", "reg_token", SAME),
    ("positions.table", "pos_embed", SAME),
    (OWN + "norm1", BLOCK + "norm1", SAME),
    (OWN + "attention.query_norm", BLOCK + "attn.q_norm", SAME),
    (OWN + "attention.key_norm", BLOCK + "attn.k_norm", SAME),
    (OWN + "attention.out", BLOCK + "attn.proj", SAME),
    (OWN + "scale1", BLOCK + "gamma_1", SAME),
    (OWN + "norm2", BLOCK + "norm2", SAME),
    (OWN + "mlp.norm", BLOCK + "mlp.norm", SAME),
    (OWN + "mlp.down", BLOCK + "mlp.fc2", SAME),
    (OWN + "scale2", BLOCK + "gamma_2", SAME),
    ("pool_norm", "fc_norm", SAME),
    ("encoder.norm", "norm", SAME),
    ("head", "head", SAME),
]


def recognises(shapes: Shapes) -> bool:
    first = "blocks.0."
    marks = (f"{first}attn.q_bias", f"{first}attn.q_proj.weight")
    return {"patch_embed.proj.weight", f"{first}attn.proj.weight"} <= shapes.keys() and (
        any(mark in shapes for mark in marks) or (f"{first}gamma_1" in shapes and "pos_embed" not in shapes)
    )


def separate(config: ViTConfig) -> tuple[bool, bool]:
    """Whether q, k and v, and the two parts of a SwiGLU, are matrices of their own, as in timm's models."""
    return config.mlp_norm, config.mlp_norm or config.rope == "dinov3"


def infer(shapes: Shapes, hints: Hints) -> ModelSpec:
    kernel = required_shape(shapes, "patch_embed.proj.weight", 4)
    depth, patch = count(shapes, BLOCK + "norm1.weight"), square_patch((kernel[2], kernel[3]))
    down = required_shape(shapes, "blocks.0.mlp.fc2.weight", 2)[1]
    gated = "blocks.0.mlp.fc1_g.weight" in shapes or shapes.get("blocks.0.mlp.fc1.weight") == (
        2 * down,
        kernel[0],
    )
    mlp = "swiglu" if gated else "gelu"
    heads, note = guess_heads(kernel[0], depth, down, hints, mlp)
    positions = "pos_embed" in shapes
    if (not positions and "cls_token" not in shapes) or (kernel[0], depth) == ENORMOUS:
        raise WeightsError(
            "timm computes this model with another RoPE or with norms after the branches, which vitkit does "
            "not have (vit_*_rope_*_gap, eva02_enormous)",
            code="weights.unsupported",
        )
    size = hints.image_size or (256, 256)
    if positions:
        size, _ = infer_image_size(required_shape(shapes, "pos_embed", 3)[1], 1, patch, hints)
    biased = any(f"blocks.0.attn.{name}" in shapes for name in ("q_bias", "q_proj.bias"))
    pooled = "fc_norm.weight" in shapes
    config = ViTConfig(
        width=kernel[0],
        depth=depth,
        heads=heads,
        hidden=down,
        patch=patch,
        image_size=size,
        channels=kernel[1],
        classes=required_shape(shapes, "head.weight", 2)[0] if "head.weight" in shapes else 0,
        class_token="cls_token" in shapes,
        head="gap" if pooled or "cls_token" not in shapes else "token",
        final_norm="pooled" if pooled else "tokens",
        registers=shapes["reg_token"][1] if "reg_token" in shapes else 0,
        positions="1d" if positions else "none",
        position_resize="timm",
        rope=("eva02" if gated else "none") if positions else "dinov3",
        rope_rescale=1.0 if positions else 2.0,
        mlp=mlp,
        mlp_norm="blocks.0.mlp.norm.weight" in shapes,
        gelu="erf",
        norm_eps=1e-6 if positions else 1e-5,
        qkv_bias=biased,
        key_bias=not biased,
        qk_norm="blocks.0.attn.q_norm.weight" in shapes,
        layer_scale="blocks.0.gamma_1" in shapes,
    )
    return ModelSpec(config, notes=(note,) if note else ())


def entries(config: Config) -> list[Entry]:
    assert isinstance(config, ViTConfig)
    own_qkv, own_gate = separate(config)
    parts = (BLOCK + "mlp.fc1_g", BLOCK + "mlp.fc1_x")
    rows = [
        *ROWS,
        (OWN + "attention.qkv.weight", tuple(f"{n}.weight" for n in SEPARATE), SAME)
        if own_qkv
        else (OWN + "attention.qkv.weight", BLOCK + "attn.qkv.weight", SAME),
        (OWN + "mlp.up", parts if own_gate and config.mlp == "swiglu" else BLOCK + "mlp.fc1", SAME),
    ]
    names = ("q_proj.bias", "v_proj.bias") if own_qkv else ("q_bias", "v_bias")
    table = table_entries(config, rows)
    for i in range(config.depth if config.qkv_bias else 0):
        foreign = tuple(f"blocks.{i}.attn.{name}" for name in names)
        table.append(Entry(f"encoder.blocks.{i}.attention.qkv.bias", foreign, SAME, NO_KEY_BIAS))
    return table


def unsupported(config: Config) -> str:
    if isinstance(config, ViTConfig) and config.qkv_bias and config.key_bias:
        return "timm's class Eva has no bias for keys; use key_bias=False"
    if isinstance(config, ViTConfig) and config.rope == "dinov3" and not config.class_token:
        return "timm's DINOv3 has a class token; build the model with class_token=True"
    if isinstance(config, ViTConfig) and config.head == "map":
        return "vitkit has no names of timm's class Eva for head='map'; save it as vitkit"
    if isinstance(config, ViTConfig) and config.registers and config.positions == "1d":
        return "timm's class Eva gives registers positions, and vitkit does not"
    also = ("head", "final_norm", "layer_scale", "qkv_bias", "key_bias", "rope", "mlp", "mlp_norm", "qk_norm")
    return unsupported_fields(config, "timm", also=(*also, "registers", "positions"))


def native(config: Config) -> Config:
    assert isinstance(config, ViTConfig)
    return with_numerics(config, gelu="erf", norm_eps=1e-5 if config.rope == "dinov3" else 1e-6)
