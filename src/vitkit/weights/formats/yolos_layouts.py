"""YOLOS in its original names and in those of transformers."""

from dataclasses import replace
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing
from vitkit.models.dense.yolos import BOX_LAYERS, YolosConfig
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.hf_json import (
    CONFIG,
    PREPROCESSOR,
    configured_size,
    labels_json,
    preprocessor_json,
    read_gelu,
    read_labels,
    read_preprocessing,
    shared_json,
)
from vitkit.weights.formats.layout import (
    SAME,
    Entry,
    Form,
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

IMAGENET = Preprocessing(resize="fit", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PUBLISHED_SIZES = {4150: (800, 1333), 1728: (512, 864), 4200: (800, 1344)}  # patches of 16 -> H, W
MIDDLE, MIDDLE_IN_MEMORY = "encoder.mid_position_embeddings", "encoder.interpolation.mid_position_embeddings"
LAYERS = Form(lambda a: a[:, 0], lambda a: a[:, None])  # (L - 1, 1, T, D) <-> (L - 1, T, D)
COCO_NAMES = (  # of the numbers 0 to 90, some of which no object has
    "N/A, person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire "
    "hydrant, N/A, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, "
    "zebra, giraffe, N/A, backpack, umbrella, N/A, N/A, handbag, tie, suitcase, frisbee, skis, "
    "snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, "
    "bottle, N/A, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, "
    "carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, N/A, dining table, N/A, N/A, "
    "toilet, N/A, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, "
    "refrigerator, N/A, book, clock, vase, scissors, teddy bear, hair drier, toothbrush"
)
NAMES = {  # our module or parameter: that of the original, and that of transformers; {} is the layer
    "vit.project": ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
    "vit.encoder.norm": ("norm", "layernorm"),
    "class_head.layers": ("class_embed.layers", "class_labels_classifier.layers"),
    "box_head.layers": ("bbox_embed.layers", "bbox_predictor.layers"),
    "vit.class_token": ("cls_token", "embeddings.cls_token"),
    "detection_tokens": ("det_token", "embeddings.detection_tokens"),
    "positions": ("pos_embed", "embeddings.position_embeddings"),
    "middle_positions": ("mid_pos_embed", MIDDLE),
    "norm1": ("blocks.{}.norm1", "encoder.layer.{}.layernorm_before"),
    "attention.qkv": ("blocks.{}.attn.qkv", "encoder.layer.{}.attention.attention"),
    "attention.out": ("blocks.{}.attn.proj", "encoder.layer.{}.attention.output.dense"),
    "norm2": ("blocks.{}.norm2", "encoder.layer.{}.layernorm_after"),
    "mlp.up": ("blocks.{}.mlp.fc1", "encoder.layer.{}.intermediate.dense"),
    "mlp.down": ("blocks.{}.mlp.fc2", "encoder.layer.{}.output.dense"),
}  # fmt: skip
ORIGINAL_NAMES = {own: names[0] for own, names in NAMES.items()}
BACKBONE, HEADS = "backbone.", ("class_embed.", "bbox_embed.")
HF_NAMES = {own: names[1] for own, names in NAMES.items()}


def entries(config: Config, names: dict[str, str], parts_of_qkv: tuple[str, ...]) -> list[Entry]:
    """Every parameter of a YOLOS; the table of positions is that of our ViT and of our tokens together."""
    assert isinstance(config, YolosConfig)
    tokens = config.detections
    table = [
        *pairs("vit.project", names["vit.project"]),
        Entry("vit.class_token", (names["vit.class_token"],), SAME),
        Entry("vit.positions.table", (names["positions"],), Form(lambda a: a[:, :-tokens], lambda a: a)),
        Entry("detection_positions", (names["positions"],), Form(lambda a: a[:, -tokens:], lambda a: a)),
        Entry("detection_tokens", (names["detection_tokens"],), SAME),
        *pairs("vit.encoder.norm", names["vit.encoder.norm"]),
    ]
    if any(config.middle_size):
        table += [Entry("middle_positions", (names["middle_positions"],), LAYERS)]
    for i in range(config.vit.depth):
        block = f"vit.encoder.blocks.{i}"
        for part in ("weight", "bias") if config.vit.qkv_bias else ("weight",):
            foreign = names["attention.qkv"].format(i)
            qkv = tuple(f"{foreign}{name}.{part}" for name in parts_of_qkv)
            table += [Entry(f"{block}.attention.qkv.{part}", qkv, SAME)]
        for module in ("norm1", "attention.out", "norm2", "mlp.up", "mlp.down"):
            table += pairs(f"{block}.{module}", names[module].format(i))
    for head in ("class_head.layers", "box_head.layers"):
        for i in range(BOX_LAYERS):
            table += pairs(f"{head}.{i}", f"{names[head]}.{i}")
    return table


def original_entries(config: Config) -> list[Entry]:
    return entries(config, ORIGINAL_NAMES, ("",))


def hf_entries(config: Config) -> list[Entry]:
    return entries(config, HF_NAMES, (".query", ".key", ".value"))


def spec_of(
    shapes: Shapes, hints: Hints, names: dict[str, str], *, qkv_bias: str, **fields: Any
) -> ModelSpec:
    """The model of the arrays; fields: of the ViT, as config.json or the original code has them."""
    kernel = required_shape(shapes, f"{names['vit.project']}.weight", 4)
    width, patch = kernel[0], square_patch((kernel[2], kernel[3]))
    depth = count(shapes, names["norm1"] + ".weight")
    hidden = required_shape(shapes, names["mlp.up"].format(0) + ".weight", 2)[0]
    heads, note = guess_heads(width, depth, hidden, hints)
    tokens = required_shape(shapes, names["detection_tokens"], 3)[1]
    size = table_size(required_shape(shapes, names["positions"], 3)[1] - tokens, patch, hints)
    middle = (0, 0)
    if names["middle_positions"] in shapes:
        entries = required_shape(shapes, names["middle_positions"], 4)[2] - tokens
        middle = table_size(entries, patch, replace(hints, image_size=size), other=True)
    vit = ViTConfig(
        width=width, depth=depth, heads=heads, hidden=hidden, patch=patch, channels=kernel[1],
        image_size=size, classes=0, position_resize="hf", qkv_bias=qkv_bias in shapes, **fields,
    )  # fmt: skip
    last = f"{names['class_head.layers']}.{BOX_LAYERS - 1}.weight"
    classes = required_shape(shapes, last, 2)[0] - 1
    config = YolosConfig(vit=vit, classes=classes, detections=tokens, middle_size=middle)
    of_coco = tuple(COCO_NAMES.split(", "))
    labels = of_coco if classes == len(of_coco) else ()
    return ModelSpec(config, IMAGENET, labels, notes=(note,) if note else ())


def table_size(entries: int, patch: int, hints: Hints, *, other: bool = False) -> tuple[int, int]:
    """The image size of a table of positions with one for the class token; other: the hint may not fit."""
    if other and hints.image_size:
        h, w = hints.image_size
        hints = hints if (h // patch) * (w // patch) == entries - 1 else replace(hints, image_size=None)
    published = PUBLISHED_SIZES.get(entries - 1) if patch == 16 else None
    if published and hints.image_size is None:
        return published
    return infer_image_size(entries, 1, patch, hints)[0]


def infer_original(shapes: Shapes, hints: Hints) -> ModelSpec:
    spec = spec_of(
        shapes, hints, ORIGINAL_NAMES, qkv_bias="blocks.0.attn.qkv.bias", gelu="erf", norm_eps=1e-6
    )
    return replace(spec, ignored=("head.",))


def infer_hf(shapes: Shapes, hints: Hints) -> ModelSpec:
    settings = hints.files.get(CONFIG, {})
    kind = settings.get("model_type", "yolos")
    if kind != "yolos":
        raise WeightsError(f"{CONFIG}: model_type is {str(kind)[:40]!r}; expected 'yolos'")
    heads = hints.heads or read_number(settings, "num_attention_heads", "heads", None, CONFIG)
    size = hints.image_size or configured_size(settings)
    spec = spec_of(
        shapes, replace(hints, heads=heads, image_size=size), HF_NAMES,
        qkv_bias="encoder.layer.0.attention.attention.query.bias", gelu=read_gelu(settings),
        norm_eps=float(read_number(settings, "layer_norm_eps", "norm_eps", 1e-12, CONFIG)),
    )  # fmt: skip
    labels = read_labels(settings, spec.config.classes) or spec.labels
    if PREPROCESSOR in hints.files:
        read = read_preprocessing(hints.files[PREPROCESSOR])
        spec = replace(spec, preprocessing=replace(read, resize="fit", crop=1.0))
    return replace(spec, labels=labels)


def hf_names(shapes: Shapes) -> dict[str, Source]:
    """The names without the prefix of the encoder; that of middle positions as files have it."""
    short = {name.removeprefix("vit."): name for name in shapes}
    return {MIDDLE if name == MIDDLE_IN_MEMORY else name: Source(full) for name, full in short.items()}


def written_hf(name: str, config: Config) -> str:
    return name if name.startswith(("class_labels_classifier.", "bbox_predictor.")) else f"vit.{name}"


def unsupported(config: Config) -> str:
    if not isinstance(config, YolosConfig):
        return "the YOLOS layout holds only YOLOS detectors"
    if config.vit.position_resize != "hf":
        return "YOLOS resizes positions by position_resize='hf'; save this model as vitkit"
    return unsupported_fields(config.vit, "YOLOS", also=("qkv_bias",))


def unsupported_hf(config: Config) -> str:
    if isinstance(config, YolosConfig) and config.middle_size not in ((0, 0), config.vit.image_size):
        return "transformers has the positions between the layers at the size of the others"
    return unsupported(config)


def native_original(config: Config) -> Config:
    assert isinstance(config, YolosConfig)
    return replace(config, vit=replace(config.vit, gelu="erf", norm_eps=1e-6))


def json_files(model: Model) -> dict[str, Any]:
    """What transformers needs to build the model and to prepare images."""
    config = model.config
    assert isinstance(config, YolosConfig)
    h, w = config.image_size
    own = {
        "image_size": [h, w],
        "num_detection_tokens": config.detections,
        "use_mid_position_embeddings": any(config.middle_size),
        "qkv_bias": config.vit.qkv_bias,
    }
    processor = preprocessor_json(config, replace(model.preprocessing, resize="squash")) | {
        "image_processor_type": "YolosImageProcessor",
        "format": "coco_detection",
        "do_pad": True,
        "size": {"shortest_edge": min(h, w), "longest_edge": max(h, w)},
    }
    settings = shared_json(config.vit, "yolos", "YolosForObjectDetection") | own
    return {PREPROCESSOR: processor, CONFIG: settings | labels_json(config.classes, model.labels)}


ORIGINAL = Layout(
    name="yolos",
    recognises=lambda shapes: any(f"{prefix}det_token" in shapes for prefix in ("", BACKBONE)),
    canonical_names=lambda shapes: {name.removeprefix(BACKBONE): Source(name) for name in shapes},
    written_name=lambda name, config: name if name.startswith(HEADS) else BACKBONE + name,
    infer=infer_original,
    entries=original_entries,
    unsupported=unsupported,
    native=native_original,
    axes={BACKBONE + ORIGINAL_NAMES["positions"]: 1},
)
HF = Layout(
    name="hf-yolos",
    recognises=lambda shapes: "vit.embeddings.detection_tokens" in shapes,
    canonical_names=hf_names,
    written_name=written_hf,
    infer=infer_hf,
    entries=hf_entries,
    unsupported=unsupported_hf,
    native=lambda config: config,
    json_files=json_files,
    axes={f"vit.{HF_NAMES['positions']}": 1},
)
FORMAT = Format(
    name="yolos",
    description="the detector YOLOS in its original names; in those of transformers: hf",
    layouts=(ORIGINAL,),
    endings=(".pth", ".safetensors"),
    order=14,
)
