"""open_clip_config.json: what open_clip states beside its weights, compared with the arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing, pair
from vitkit.models.text_tower import TextConfig
from vitkit.models.vit_config import ViTConfig
from vitkit.weights.formats.layout import Hints, ModelSpec, Shapes, read_number
from vitkit.weights.published_modern import CLIP

CONFIG = "open_clip_config.json"
POOLING = {"tok": "token", "avg": "gap"}
TEXT_POOLING = {"argmax": "end", "last": "last"}
RESIZE = {"shortest": "crop", "squash": "squash"}
INTERPOLATION = {"bicubic": "bicubic", "bilinear": "bilinear", "random": "bicubic"}  # random: in training
HEAD_WIDTH, TEXT_HEADS = 64, 8  # open_clip's defaults
SIZES = {"width": "width", "layers": "depth", "patch_size": "patch", "vocab_size": "vocabulary",
         "context_length": "length", "embed_dim": "output"}  # fmt: skip
TIMM = {  # timm's word for a size: width, heads
    "tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16), "so400m": (1152, 16),
    "giantopt": (1536, 16),
}  # fmt: skip


@dataclass(frozen=True)
class OpenClipConfig:
    """The tables of open_clip_config.json."""

    model: Mapping[str, Any]
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    preprocess: Mapping[str, Any]

    @property
    def trunk(self) -> str:
        """timm's name of the image tower; empty if it is open_clip's own."""
        return str(self.vision.get("timm_model_name") or "")

    @property
    def image_size(self) -> tuple[int, int] | None:
        default = () if isinstance(self.vision.get("image_size"), list) else None
        size = read_number(self.vision, "image_size", "image_size", default, CONFIG)
        if size and type(size) is not int and not (type(size) is tuple and whole_pair(size)):
            raise WeightsError(f"{CONFIG}: image_size is {size!r}; expected one whole number or two")
        return pair(size) if size else None

    def vision_heads(self, width: int) -> int | None:
        """The heads of the image tower; None if the name of timm's model does not say."""
        if not self.trunk:
            size = read_number(self.vision, "head_width", "width", HEAD_WIDTH, CONFIG)
            check_heads("vision_cfg.head_width", width % size == 0, size, width)
            return int(width // size)
        word = next((word for word in TIMM if f"_{word}_" in self.trunk), "")
        if word and TIMM[word][0] != width:
            stated = f"timm_model_name {self.trunk[:60]} has the width {TIMM[word][0]}"
            raise disagreement("vision_cfg", [f"{stated}, the arrays have {width}"])
        return TIMM[word][1] if word else None

    def text_heads(self, width: int) -> int:
        heads = read_number(self.text, "heads", "heads", TEXT_HEADS, CONFIG)
        check_heads("text_cfg.heads", type(heads) is int and width % heads == 0, heads, width)
        return int(heads)

    def gelu(self, tower: Mapping[str, Any], default: str) -> str:
        """open_clip's GELU is the erf, unless the model or the tower says otherwise."""
        arguments = table(tower, "act_kwargs")
        if (kind := arguments.get("approximate", "none")) not in ("none", "tanh"):
            raise unsupported("act_kwargs.approximate", kind, ("none", "tanh"))
        if switch(self.model, "quick_gelu"):
            return "quick"
        return {"none": "erf", "tanh": "tanh"}[kind] if "approximate" in arguments else default


def read(files: Mapping[str, Any]) -> OpenClipConfig | None:
    """What the file says; None without it."""
    if CONFIG not in files:
        return None
    if "model_cfg" not in files[CONFIG]:
        raise WeightsError(
            f"{CONFIG}: no table model_cfg; take the file that was published with these weights"
        )
    model = table(files[CONFIG], "model_cfg")
    return OpenClipConfig(
        model, table(model, "vision_cfg"), table(model, "text_cfg"), table(files[CONFIG], "preprocess_cfg")
    )


def table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise WeightsError(f"{CONFIG}: {name} is {str(value)[:40]!r}; expected a table")
    return value


def switch(content: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = content.get(name)
    if value is not None and not isinstance(value, bool):
        raise WeightsError(f"{CONFIG}: {name} is {str(value)[:40]!r}; expected true or false")
    return default if value is None else value


def whole_pair(size: tuple[Any, ...]) -> bool:
    return len(size) == 2 and all(type(side) is int for side in size)


def check_heads(name: str, fits: bool, value: Any, width: int) -> None:
    if not fits:
        raise WeightsError(f"{CONFIG}: {name} is {value}, which does not divide the width {width}",
                           code="weights.shape")  # fmt: skip


def disagreement(section: str, wrong: list[str]) -> WeightsError:
    return WeightsError(
        f"{CONFIG}: {section} is that of other weights: {'; '.join(wrong)}; take the file that was published "
        "with these weights",
        code="weights.shape",
    )


def unsupported(name: str, value: Any, known: Any) -> WeightsError:
    return WeightsError(
        f"{CONFIG}: {name} is {str(value)[:40]!r}; vitkit has {', '.join(map(str, known))}",
        code="weights.unsupported",
    )


def compare(section: str, stated: Mapping[str, Any], actual: Mapping[str, int]) -> None:
    """Refuse sizes that are not those of the arrays."""
    numbers = {name: read_number(stated, name, SIZES[name], None, CONFIG) for name in actual}
    wrong = [
        f"{name} is {number:g}, the arrays have {actual[name]}"
        for name, number in numbers.items()
        if number not in (None, actual[name])
    ]
    if wrong:
        raise disagreement(section, wrong)


def with_open_clip_config(hints: Hints, shapes: Shapes, *, width: int, patch: int, lead: int) -> Hints:
    """The hints with the heads and the image size of the image tower; those of the caller come first."""
    stated = read(hints.files)
    if stated is None:
        return hints
    heads, size = hints.heads or stated.vision_heads(width), hints.image_size or stated.image_size
    names = [name for name in ("positional_embedding", "pos_embed") if name in shapes]
    if size and names and hints.image_size is None:
        (h, w), entries = (side // patch for side in size), shapes[names[0]][-2]
        if h * w not in (entries, entries - lead):
            wrong = f"image_size {size[0]}x{size[1]} has {h * w} patches of {patch} pixels"
            raise disagreement("vision_cfg", [f"{wrong}, the arrays have {entries - lead}"])
    return replace(hints, heads=heads, image_size=size)


def with_config(spec: ModelSpec, hints: Hints) -> ModelSpec:
    """The model with what open_clip_config.json says of its image tower and its preprocessing."""
    stated, c = read(hints.files), spec.config
    if stated is None or not isinstance(c, ViTConfig):
        return spec
    spec = replace(spec, preprocessing=preprocessing(stated.preprocess))
    if stated.trunk:
        return spec
    actual = {"width": c.width, "layers": c.depth, "patch_size": c.patch}
    compare("vision_cfg", stated.vision, actual)
    ratio = read_number(stated.vision, "mlp_ratio", "", None, CONFIG)
    if ratio and (hidden := int(c.width * ratio)) != c.hidden:
        wrong = f"mlp_ratio {ratio} has the width {hidden}"
        raise disagreement("vision_cfg", [f"{wrong}, the arrays have {c.hidden}"])
    compare("model_cfg", stated.model, {"embed_dim": c.representation} if c.representation else {})
    for name in ("attentional_pool", "no_ln_pre"):
        if switch(stated.vision, name):
            raise unsupported(f"vision_cfg.{name}", stated.vision[name], (False,))
    if (pooling := stated.vision.get("pool_type", "tok")) not in tuple(POOLING):
        raise unsupported("vision_cfg.pool_type", pooling, POOLING)
    after = pooling == "avg" and switch(stated.vision, "final_ln_after_pool")
    arguments = table(stated.vision, "norm_kwargs")
    config = replace(
        c,
        gelu=stated.gelu(stated.vision, "erf"),
        head=POOLING[pooling],
        final_norm="pooled" if after else "tokens",
        norm_eps=float(read_number(arguments, "eps", "norm_eps", c.norm_eps, CONFIG)),
    )
    return replace(spec, config=config, notes=tuple(note for note in spec.notes if "GELU" not in note))


def preprocessing(stated: Mapping[str, Any]) -> Preprocessing:
    """The steps of open_clip's transform for evaluation; OpenAI's values where the file has none."""
    mode, method = stated.get("resize_mode") or "shortest", stated.get("interpolation") or "bicubic"
    if mode not in tuple(RESIZE):
        raise unsupported("preprocess_cfg.resize_mode", mode, RESIZE)
    if method not in tuple(INTERPOLATION):
        raise unsupported("preprocess_cfg.interpolation", method, INTERPOLATION)
    return Preprocessing(
        resize=RESIZE[mode],
        interpolation=INTERPOLATION[method],
        mean=tuple(map(float, read_number(stated, "mean", "mean", CLIP.mean, CONFIG))),
        std=tuple(map(float, read_number(stated, "std", "std", CLIP.std, CONFIG))),
    )


def text_with_config(text: TextConfig, hints: Hints) -> TextConfig:
    """The text tower as stated; the GELU of SigLIP's is that of its training, unless the file has another."""
    if (stated := read(hints.files)) is None:
        return text
    actual = {"width": text.width, "layers": text.depth, "vocab_size": text.vocabulary,
             "context_length": text.length}  # fmt: skip
    compare("text_cfg", stated.text, actual)
    compare("model_cfg", stated.model, {"embed_dim": text.output})
    default = "last" if text.sigmoid else "argmax"
    if (pooling := stated.text.get("pool_type", default)) not in tuple(TEXT_POOLING):
        raise unsupported("text_cfg.pool_type", pooling, TEXT_POOLING)
    arguments = table(stated.text, "norm_kwargs")
    return replace(
        text,
        gelu=stated.gelu(stated.text, text.gelu if text.sigmoid else "erf"),
        norm_eps=float(read_number(arguments, "eps", "norm_eps", text.norm_eps, CONFIG)),
        causal=not switch(stated.text, "no_causal_mask", not text.causal),
        pool=TEXT_POOLING[pooling],
    )
