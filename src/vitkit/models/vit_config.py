"""The configuration of a Vision Transformer: sizes of Table 1, options of Sec. 3, App. D and later ViTs."""

# H, W pixels; h, w grid of patches; P patch

import math
from dataclasses import dataclass
from numbers import Integral

from vitkit.errors import ConfigError, Error
from vitkit.models.card import pair, short_repr
from vitkit.models.positions import RESIZE, Grid
from vitkit.models.resnet import StemConfig
from vitkit.models.rope import KINDS
from vitkit.models.text_tower import TextConfig

CHOICES = {
    "head": ("token", "gap", "map", "token+gap"),
    "positions": ("none", "1d", "2d", "relative", "sincos2d", "sincos2d-mae"),
    "injection": ("stem", "every", "shared"),
    "position_resize": tuple(RESIZE),
    "rope": ("none", *KINDS),
    "attention": ("full", "axial"),
    "mlp": ("gelu", "swiglu"),
    "gelu": ("tanh", "erf", "quick"),
    "final_norm": ("tokens", "pooled"),
    "representation_kind": ("tanh", "linear"),
}
ROPE_TRAINING = {"rope_shift": 0.0, "rope_jitter": 1.0, "rope_rescale": 1.0}  # the value that changes nothing


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The configuration of a Vision Transformer: sizes of Table 1, options of Sec. 3 and App. D."""

    width: int = 768  # D
    depth: int = 12  # L
    heads: int = 12  # k
    hidden: int = 3072  # MLP size
    patch: int = 16  # P; in a hybrid, cells of the stem's feature map
    image_size: tuple[int, int] = (224, 224)  # H, W of the position table; other sizes are interpolated
    channels: int = 3  # of the input
    classes: int = 1000  # 0: no head, the model returns features
    representation: int = 0  # width of a layer before the head; 0: none
    representation_kind: str = "tanh"  # as in pre-training heads; or linear, without bias (CLIP's projection)
    stem: StemConfig | None = None  # the ResNet of a hybrid
    text: TextConfig | None = None  # the text tower beside it (CLIP, SigLIP)
    normalize: bool = False  # scale features to length 1 before the head, as a zero-shot classifier does

    head: str = "token"  # or gap (average pooling), map (attention pooling), token+gap (both, concatenated)
    class_token: bool | None = None  # None: only if the head reads it
    class_position: bool = True  # whether the class token has a position
    registers: int = 0  # number of register tokens, which have no position and which no head reads
    distilled: bool = False  # a distillation token with its own head; logits are the mean of both (DeiT)
    positions: str = "1d"  # kind of position embedding
    injection: str = "stem"  # where it is added
    position_resize: str = "official"  # how it is interpolated to another size
    rope: str = "none"  # rotary position embedding in every layer, with or without `positions`
    rope_shift: float = 0.0  # in training, each axis is shifted by up to this much
    rope_jitter: float = 1.0  # in training, each axis is scaled by a random factor from 1/x to x
    rope_rescale: float = 1.0  # in training, both axes are scaled by the same factor from 1/x to x
    attention: str = "full"
    input_norm: bool = False  # LayerNorm before the first layer (CLIP)
    final_norm: str = "tokens"  # the last LayerNorm is before pooling; "pooled": after it

    mlp: str = "gelu"  # or swiglu: gate and value have the width `hidden` each
    mlp_norm: bool = False  # LayerNorm after the gating of a SwiGLU (EVA-02)
    gelu: str = "tanh"
    norm_eps: float = 1e-6  # of LayerNorm
    project_bias: bool = True  # bias of the patch embedding
    qkv_bias: bool = True  # biases of queries, keys and values
    key_bias: bool = True  # False: only queries and values have a bias
    qk_norm: bool = False  # LayerNorm on queries and keys of each head
    layer_scale: bool = False  # LayerScale: a learned factor per channel of each branch
    mask_token: bool = False  # for masked patch prediction
    merge_tokens: int = 0  # in prediction, tokens that each layer merges into others (ToMe)
    dropout: float = 0.0
    attention_dropout: float = 0.0  # rate, on the attention weights
    stochastic_depth: float = 0.0  # rate of the last layer; grows linearly from 0
    stochastic_depth_uniform: bool = False  # the same rate in every layer
    stochastic_depth_rescale: bool = False  # kept branches are divided by the probability of keeping them

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        if self.class_token is None:
            object.__setattr__(self, "class_token", "token" in self.head)
        check_vit(self)

    def __repr__(self) -> str:
        always = ("width", "depth", "heads", "patch", "image_size", "classes")
        return short_repr(self, ViTConfig(), always)

    @property
    def stride(self) -> int:
        """Pixels from one token to the next."""
        return self.patch * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches at the configured image size."""
        return grid_of(self.image_size, self.stride)

    @property
    def covered(self) -> tuple[int, int]:
        """Height and width of the pixels in whole patches; the rest at the right and bottom is dropped."""
        return covered(self.image_size, self.stride)

    @property
    def pooled_width(self) -> int:
        """Width of what the head reads, before a representation layer."""
        return (2 if self.head == "token+gap" else 1) * self.width

    @property
    def lead(self) -> int:
        """Tokens before the patches that have or could have a position: class and distillation token."""
        return bool(self.class_token) + self.distilled

    @property
    def prefix(self) -> int:
        """All tokens before the patches: class token, distillation token, registers."""
        return self.lead + self.registers

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] + self.prefix


def grid_of(image_size: tuple[int, int], stride: int, *, strict: bool = False) -> Grid:
    """(H, W) -> (h, w): whole patches only, as in a VALID convolution (27 x 27 patches of 14 at 384).

    An image smaller than a patch is an error; with `strict` so is a size that is not a multiple of it.
    """
    for side, pixels in zip(("height", "width"), image_size, strict=True):
        if pixels < stride or (strict and pixels % stride):
            below = pixels // stride * stride
            near = [str(n) for n in (below, below + stride) if n > 0]
            raise Error(
                f"image {side} {pixels} does not fit patches of {stride} pixels; "
                f"the nearest that fits: {' or '.join(near)}"
                + ("; without --strict-size the rest is dropped" if pixels >= stride else ""),
                code="model.input",
            )
    return image_size[0] // stride, image_size[1] // stride


def covered(image_size: tuple[int, int], stride: int) -> tuple[int, int]:
    """The height and width of the pixels in whole patches, from the top left."""
    h, w = grid_of(image_size, stride)
    return h * stride, w * stride


def check_vit(c: ViTConfig) -> None:
    """Raise a ConfigError if the model cannot be built."""
    for field, known in CHOICES.items():
        if getattr(c, field) not in known:
            raise ConfigError(f"{field} must be one of {', '.join(known)}, not {getattr(c, field)!r}")
    if isinstance(c.patch, list | tuple):
        raise ConfigError(f"patches are square: patch must be one number of pixels such as 16, not {c.patch}")
    zero = ("depth", "classes", "representation", "registers", "merge_tokens")  # may be 0
    for field in ("width", "heads", "hidden", "patch", "channels", *zero):
        if not isinstance(getattr(c, field), Integral):
            raise ConfigError(f"{field} must be a whole number, not {getattr(c, field)!r}")
    for field in ("width", "heads", "hidden", "patch", "channels"):
        if getattr(c, field) < 1:
            raise ConfigError(f"{field} must be at least 1, not {getattr(c, field)}")
    for field in zero:
        if getattr(c, field) < 0:
            raise ConfigError(f"{field} must not be negative: {getattr(c, field)}")
    for field in ("dropout", "attention_dropout", "stochastic_depth"):
        if not 0 <= getattr(c, field) < 1:
            raise ConfigError(f"{field} must be in [0, 1), not {getattr(c, field)}")
    if not 0 <= c.norm_eps < 1:
        raise ConfigError(f"norm_eps must be in [0, 1), not {c.norm_eps}")
    for field, least in ROPE_TRAINING.items():
        if not least <= getattr(c, field) < math.inf:
            raise ConfigError(f"{field} must be at least {least:g}, not {getattr(c, field)}")
    grid_of(c.image_size, c.stride)
    for message, applies in (conflicts(c) | token_conflicts(c) | merging_conflicts(c)).items():
        if applies:
            raise ConfigError(message)


def conflicts(c: ViTConfig) -> dict[str, object]:
    """Choices that exclude each other: message -> whether it applies."""
    return {
        f"width {c.width} is not divisible by {c.heads} heads": c.width % c.heads,
        f"2d positions need an even width, not {c.width}": c.positions == "2d" and c.width % 2,
        f"sincos2d positions need a width divisible by 4, not {c.width}": "sincos2d" in c.positions
        and c.width % 4,
        f"head={c.head!r} needs a class token; with class_token=False use head='gap' or 'map'": (
            "token" in c.head and not c.class_token
        ),
        f"positions={c.positions!r} cannot be added before every layer; use injection='stem'": (
            c.positions in ("none", "relative") and c.injection != "stem"
        ),
        "sincos2d positions are fixed, so every layer has the same; use injection='shared'": (
            "sincos2d" in c.positions and c.injection == "every"
        ),
        "final_norm='pooled' needs head='gap'": c.final_norm == "pooled" and c.head != "gap",
        "mlp_norm=True needs mlp='swiglu'": c.mlp_norm and c.mlp != "swiglu",
        "key_bias=False is for models with qkv_bias=True; without it no key has a bias": (
            not c.key_bias and not c.qkv_bias
        ),
        f"the text tower has embeddings of width {c.text and c.text.output}, the image tower of "
        f"{c.representation or c.pooled_width}": c.text
        and c.text.output != (c.representation or c.pooled_width),
        "representation_kind='linear' needs a width: representation=512": (
            c.representation_kind == "linear" and not c.representation
        ),
        f"rope={c.rope!r} needs a head width divisible by 4, not {c.width // c.heads}": (
            c.rope != "none" and c.width // c.heads % 4
        ),
        f"rope={c.rope!r} and relative positions exclude each other; use positions='none' or '1d'": (
            c.rope != "none" and c.positions == "relative"
        ),
        "axial attention does not support RoPE; use rope='none'": c.rope != "none" and c.attention == "axial",
        **{
            f"{field}={value} changes the coordinates of RoPE, and this model has none; use rope='dinov3' or "
            f"{field}={neutral:g}": c.rope == "none" and value != neutral
            for field, neutral in ROPE_TRAINING.items()
            for value in (getattr(c, field),)
        },
    }


def token_conflicts(c: ViTConfig) -> dict[str, object]:
    """Choices of tokens before the patches that exclude others: message -> whether it applies."""
    every = c.injection != "stem"
    return {
        "axial attention does not support a class token; "
        "use head='gap' or 'map' and class_token=False": c.attention == "axial" and c.class_token,
        "axial attention does not support registers; use registers=0": (
            c.attention == "axial" and c.registers
        ),
        "relative positions do not support registers; use registers=0": (
            c.positions == "relative" and c.registers
        ),
        "positions before every layer are added to all tokens: registers and class_position=False need "
        "injection='stem'": every and (c.registers or not c.class_position),
        "distilled=True needs head='token' and representation=0: each of the two tokens has its own head": (
            c.distilled and (c.head != "token" or c.representation)
        ),
        "normalize=True and distilled=True exclude each other": c.normalize and c.distilled,
    }


def merging_conflicts(c: ViTConfig) -> dict[str, object]:
    """Choices with which tokens cannot be merged: message -> whether it applies."""
    fixed = {
        "axial attention": c.attention == "axial",
        "relative positions": c.positions == "relative",
        "positions before every layer": c.injection != "stem",
        f"rope={c.rope!r}": c.rope != "none",
    }
    unsupported = f"merge_tokens={c.merge_tokens} does not support"
    reason = "where every layer needs the position of every patch; use merge_tokens=0"
    return {
        **{f"{unsupported} {name}, {reason}": c.merge_tokens and applies for name, applies in fixed.items()},
        f"{unsupported} head='map', which attends to all patches alike; use merge_tokens=0": (
            c.merge_tokens and c.head == "map"
        ),
    }
