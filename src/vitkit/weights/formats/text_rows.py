"""The text towers of CLIP and SigLIP in the names of transformers, open_clip (as OpenAI) and big_vision.

The canonical names of their arrays start with "text.", in every layout.
"""

import re
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.text_tower import LARGEST, TextConfig
from vitkit.weights.formats.hf_json import CONFIG, read_gelu, written_gelu
from vitkit.weights.formats.layout import (
    DENSE,
    HEADS,
    SAME,
    Entry,
    Form,
    Hints,
    Row,
    Shapes,
    Source,
    count,
    guess_heads,
    heads_bias,
    heads_in,
    heads_out,
    read_number,
    required_shape,
)
from vitkit.weights.formats.open_clip import read, text_with_config

PREFIX = "text."  # of our parameters and of the canonical names
OWN = "text.encoder.blocks.{}."
TABLE = Form(lambda a: a[None], lambda a: a[0])  # (T, D) <-> (1, T, D)
SCALAR = Form(lambda a: a.reshape(1), lambda a: a[0])  # () <-> (1,)
ONE = Form(lambda a: a.reshape(1), lambda a: a)  # () or (1,) -> (1,)
HF_LAYER, CLIP_LAYER = "text.encoder.layers.{}.", "text.transformer.resblocks.{}."
HF_TOP = ("text_projection.weight", "logit_scale", "logit_bias")  # names outside text_model
CLIP_TOP = re.compile(
    r"(token_embedding\.weight|positional_embedding|transformer\.resblocks\..*|ln_final\..*|"
    r"text_projection|logit_scale|logit_bias)"
)
FIRST_SIGLIP = 32_000  # tokens of SigLIP; SigLIP 2 has 256,000


def hf_canonical(shapes: Shapes) -> dict[str, Source]:
    """The text tower of a CLIPModel or SiglipModel of transformers; empty without one."""
    sources = {}
    for name in shapes:
        if name.startswith("text_model.") and "position_ids" not in name:
            sources[PREFIX + name.removeprefix("text_model.")] = Source(name)
        elif name in HF_TOP:
            sources[PREFIX + name] = Source(name)
    return sources


def hf_written(name: str) -> str:
    short = name.removeprefix(PREFIX)
    return short if short in HF_TOP else f"text_model.{short}"


def hf_rows(text: TextConfig | None) -> list[Row]:
    if text is None:
        return []
    names = ("q_proj", "k_proj", "v_proj")
    scalar = ONE if text.sigmoid else SCALAR  # SigLIP's have an axis
    return [
        ("text.tokens", "text.embeddings.token_embedding", SAME),
        ("text.positions", "text.embeddings.position_embedding.weight", TABLE),
        (OWN + "norm1", HF_LAYER + "layer_norm1", SAME),
        (OWN + "attention.qkv", tuple(f"{HF_LAYER}self_attn.{name}" for name in names), SAME),
        (OWN + "attention.out", HF_LAYER + "self_attn.out_proj", SAME),
        (OWN + "norm2", HF_LAYER + "layer_norm2", SAME),
        (OWN + "mlp.up", HF_LAYER + "mlp.fc1", SAME),
        (OWN + "mlp.down", HF_LAYER + "mlp.fc2", SAME),
        ("text.encoder.norm", "text.final_layer_norm", SAME),
        ("text.project", "text.head" if text.output_bias else "text.text_projection", SAME),
        ("text.logit_scale", "text.logit_scale", scalar),
        ("text.logit_bias", "text.logit_bias", scalar),
    ]


def hf_text(shapes: Shapes, hints: Hints, *, siglip: bool) -> TextConfig | None:
    """The text tower that the arrays and config.json describe."""
    projection = "text.head.weight" if siglip else "text.text_projection.weight"
    if "text.embeddings.token_embedding.weight" not in shapes or projection not in shapes:
        return None
    settings = hints.files.get(CONFIG, {}).get("text_config")
    settings = settings if isinstance(settings, dict) else {}
    vocabulary, width = required_shape(shapes, "text.embeddings.token_embedding.weight", 2)
    depth = count(shapes, HF_LAYER + "layer_norm1.weight")
    hidden = required_shape(shapes, HF_LAYER.format(0) + "mlp.fc1.weight", 2)[0]
    heads = read_number(settings, "num_attention_heads", "heads", None, CONFIG)
    end = read_number(settings, "eos_token_id", "end_token", LARGEST, CONFIG)
    return TextConfig(
        vocabulary=vocabulary,
        length=required_shape(shapes, "text.embeddings.position_embedding.weight", 2)[0],
        width=width,
        depth=depth,
        heads=heads or text_heads(width, depth, hidden, hints),
        hidden=hidden,
        output=required_shape(shapes, projection, 2)[0],
        gelu=read_gelu(settings, "gelu_pytorch_tanh" if siglip else "quick_gelu"),
        norm_eps=float(read_number(settings, "layer_norm_eps", "norm_eps", 1e-6 if siglip else 1e-5, CONFIG)),
        causal=not siglip,
        pool="last" if siglip else "end",
        end_token=LARGEST if siglip or end == 2 else end,  # 2: of configurations that never were right
        output_bias=siglip,
        sigmoid=siglip,
    )


def text_heads(width: int, depth: int, hidden: int, hints: Hints) -> int:
    """The number of heads, of which the arrays say nothing: they are 64 wide, but for SigLIP's So400m.

    Sizes of image towers say nothing either: with that of ViT-H, the text tower of CLIP G has 20 heads.
    """
    published = HEADS.get((width, depth, hidden, "gelu"))
    if published is None and width % 64:
        return guess_heads(width, depth, hidden, hints)[0]
    return published or width // 64


def hf_json(c: TextConfig) -> dict[str, Any]:
    """text_config of config.json; transformers reads 2 as "the largest number"."""
    kind = "siglip_text_model" if c.sigmoid else "clip_text_model"
    own: dict[str, Any] = {"projection_size" if c.sigmoid else "projection_dim": c.output}
    own |= {} if c.sigmoid else {"eos_token_id": 2 if c.end_token == LARGEST else c.end_token}
    return own | {
        "model_type": kind,
        "vocab_size": c.vocabulary,
        "max_position_embeddings": c.length,
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "intermediate_size": c.hidden,
        "hidden_act": written_gelu(c.gelu),
        "layer_norm_eps": c.norm_eps,
    }


def both_json(text: TextConfig, vision: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model with both towers, from that of the image tower."""
    family, name = ("siglip", "SiglipModel") if text.sigmoid else ("clip", "CLIPModel")
    shared = {key: vision[key] for key in ("projection_dim", "dtype") if key in vision}
    parts = {"text_config": hf_json(text), "vision_config": vision}
    return {"architectures": [name], "model_type": family} | shared | parts


def clip_canonical(shapes: Shapes) -> dict[str, Source]:
    """The text tower of OpenAI and open_clip, whose newer models have it below "text."; or none."""
    below = f"{PREFIX}token_embedding.weight" in shapes
    scale = ("logit_scale", "logit_bias")
    if below:
        return {name if name not in scale else PREFIX + name: Source(name)
                for name in shapes if name.startswith(PREFIX) or name in scale}  # fmt: skip
    return {PREFIX + name: Source(name) for name in shapes if CLIP_TOP.fullmatch(name)}


def clip_rows(text: TextConfig | None) -> list[Row]:
    if text is None:
        return []
    projection: Row = ("text.project", "text.text_projection", SAME)
    if not text.output_bias:  # a matrix, not a layer
        projection = ("text.project.weight", "text.text_projection", DENSE)
    return [
        ("text.tokens", "text.token_embedding", SAME),
        ("text.positions", "text.positional_embedding", TABLE),
        (OWN + "norm1", CLIP_LAYER + "ln_1", SAME),
        (OWN + "attention.qkv.weight", CLIP_LAYER + "attn.in_proj_weight", SAME),
        (OWN + "attention.qkv.bias", CLIP_LAYER + "attn.in_proj_bias", SAME),
        (OWN + "attention.out", CLIP_LAYER + "attn.out_proj", SAME),
        (OWN + "norm2", CLIP_LAYER + "ln_2", SAME),
        (OWN + "mlp.up", CLIP_LAYER + "mlp.c_fc", SAME),
        (OWN + "mlp.down", CLIP_LAYER + "mlp.c_proj", SAME),
        ("text.encoder.norm", "text.ln_final", SAME),
        projection,
        ("text.logit_scale", "text.logit_scale", SCALAR),
        ("text.logit_bias", "text.logit_bias", SCALAR),
    ]


def clip_text(shapes: Shapes, hints: Hints) -> TextConfig | None:
    """The text tower of OpenAI's and open_clip's arrays; a logit bias means SigLIP."""
    projection = shapes.get("text.text_projection", shapes.get("text.text_projection.weight", ()))
    positions, layers = "text.positional_embedding", count(shapes, CLIP_LAYER + "ln_1.weight")
    if "text.token_embedding.weight" not in shapes or len(projection) != 2 or not layers:
        return None  # none, or that of another library, as in some models of open_clip
    vocabulary, width = required_shape(shapes, "text.token_embedding.weight", 2)
    hidden = required_shape(shapes, CLIP_LAYER.format(0) + "mlp.c_fc.weight", 2)[0]
    siglip = "text.logit_bias" in shapes
    layer = "text.text_projection.weight" in shapes
    stated = read(hints.files)
    config = TextConfig(
        vocabulary=vocabulary,
        length=required_shape(shapes, positions, 2)[0],
        width=width,
        depth=layers,
        heads=stated.text_heads(width) if stated else text_heads(width, layers, hidden, hints),
        hidden=hidden,
        output=projection[0 if layer else 1],
        gelu="tanh" if siglip else "quick",
        norm_eps=1e-6 if siglip else 1e-5,
        causal=not siglip,
        pool="last" if siglip else "end",
        output_bias="text.text_projection.bias" in shapes,
        sigmoid=siglip,
    )
    return text_with_config(config, hints)


BV_LAYER = "text.Encoder_0/encoderblock_{}/"


def big_vision_canonical(shapes: Shapes) -> dict[str, Source]:
    """The text tower of big_vision's SigLIP, its layers single or stacked; empty without one."""
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        short = name.removeprefix("params/txt/")
        if name in ("params/t", "params/b"):
            sources[PREFIX + name.removeprefix("params/")] = Source(name)
        elif short == name:
            continue
        elif short.startswith("Encoder_0/encoderblock/"):
            if not shape or shape[0] > 1_000:
                message = f"array {name!r} of shape {shape} is not a stack of layers"
                raise WeightsError(message, code="weights.shape")
            rest = short.removeprefix("Encoder_0/encoderblock/")
            sources |= {BV_LAYER.format(layer) + rest: Source(name, layer) for layer in range(shape[0])}
        else:
            sources[PREFIX + short] = Source(name)
    return sources


def big_vision_text(shapes: Shapes) -> TextConfig | None:
    if "text.Embed_0/embedding" not in shapes:
        return None
    vocabulary, width = required_shape(shapes, "text.Embed_0/embedding", 2)
    return TextConfig(
        vocabulary=vocabulary,
        length=required_shape(shapes, "text.pos_embedding", 3)[1],
        width=width,
        depth=count(shapes, BV_LAYER + "LayerNorm_0/scale"),
        heads=required_shape(
            shapes, BV_LAYER.format(0) + "MultiHeadDotProductAttention_0/query/kernel", 3
        )[1],
        hidden=required_shape(shapes, BV_LAYER.format(0) + "MlpBlock_0/Dense_0/kernel", 2)[1],
        output=required_shape(shapes, "text.head/kernel", 2)[1],
        gelu="tanh",
        norm_eps=1e-6,
        causal=False,
        pool="last",
        output_bias=True,
        sigmoid=True,
    )  # fmt: skip


def big_vision_entries(text: TextConfig | None) -> list[Entry]:
    if text is None:
        return []

    def layer(own: str, foreign: str, form: Form = DENSE, kernel: str = "kernel") -> list[Entry]:
        weight = Entry(f"{own}.weight", (f"{foreign}/{kernel}",), form)
        return [weight, Entry(f"{own}.bias", (f"{foreign}/bias",), SAME)]

    table = [
        Entry("text.tokens.weight", ("text.Embed_0/embedding",), SAME),
        Entry("text.positions", ("text.pos_embedding",), SAME),
        Entry("text.logit_scale", ("text.t",), ONE),
        Entry("text.logit_bias", ("text.b",), ONE),
        *layer("text.project", "text.head"),
        *layer("text.encoder.norm", "text.Encoder_0/encoder_norm", SAME, "scale"),
    ]
    for i in range(text.depth):
        own, foreign = OWN.format(i), BV_LAYER.format(i)
        attention = f"{foreign}MultiHeadDotProductAttention_0/"
        for part, form in (("kernel", heads_in(text.heads)), ("bias", heads_bias(text.heads))):
            qkv = tuple(f"{attention}{name}/{part}" for name in ("query", "key", "value"))
            table.append(Entry(f"{own}attention.qkv.{'weight' if part == 'kernel' else part}", qkv, form))
        table += [
            *layer(f"{own}attention.out", f"{attention}out", heads_out(text.heads)),
            *layer(f"{own}norm1", f"{foreign}LayerNorm_0", SAME, "scale"),
            *layer(f"{own}norm2", f"{foreign}LayerNorm_1", SAME, "scale"),
            *layer(f"{own}mlp.up", f"{foreign}MlpBlock_0/Dense_0"),
            *layer(f"{own}mlp.down", f"{foreign}MlpBlock_0/Dense_1"),
        ]
    return table


def text_mismatch(text: TextConfig | None, *, siglip: bool) -> str:
    """Why transformers' class for these images has no such text tower; empty if it has."""
    if text is None or {text.sigmoid, text.output_bias, not text.causal, text.pool == "last"} == {siglip}:
        return ""
    return f"transformers' {'SigLIP' if siglip else 'CLIP'} has another kind of text tower"
