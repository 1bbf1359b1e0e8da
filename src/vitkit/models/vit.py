"""The Vision Transformer (Sec. 3.1, Eq. 1-4), with or without a ResNet stem, and all variants of App. D."""

# B batch, N tokens, D width, K heads; H, W pixels; h, w grid of patches; P patch

from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, Error
from vitkit.models.attention import Attention, AttentionPool
from vitkit.models.card import Described, Origin, Preprocessing, model_repr, pair, short_repr
from vitkit.models.encoder import AxialBlock, Block, Encoder, Grid, Mlp
from vitkit.models.initialization import initialize_vit
from vitkit.models.positions import RESIZE, Positions
from vitkit.models.resnet import Stem, StemConfig
from vitkit.ops.fused import patch_embedding

DROPPED = "are dropped"  # the end of a note on pixels outside whole patches
CHOICES = {
    "head": ("token", "gap", "map"),
    "positions": ("none", "1d", "2d", "relative", "sincos2d"),
    "injection": ("stem", "every", "shared"),
    "position_resize": tuple(RESIZE),
    "attention": ("full", "axial"),
    "gelu": ("tanh", "erf"),
    "final_norm": ("tokens", "pooled"),
}


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
    representation: int = 0  # width of the tanh layer in the pre-training head; 0: none
    stem: StemConfig | None = None  # the ResNet of a hybrid

    head: str = "token"  # or gap (average pooling), map (attention pooling)
    class_token: bool | None = None  # None: only if the head reads it
    positions: str = "1d"  # kind of position embedding
    injection: str = "stem"  # where it is added
    position_resize: str = "official"  # how it is interpolated to another size
    attention: str = "full"
    final_norm: str = "tokens"  # the last LayerNorm is before pooling; "pooled": after it

    gelu: str = "tanh"
    norm_eps: float = 1e-6  # of LayerNorm
    qkv_bias: bool = True  # biases of queries, keys and values
    layer_scale: bool = False  # LayerScale: a learned factor per channel of each branch
    mask_token: bool = False  # for masked patch prediction
    dropout: float = 0.0
    attention_dropout: float = 0.0  # rate, on the attention weights
    stochastic_depth: float = 0.0  # rate of the last layer; grows linearly from 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        if self.class_token is None:
            object.__setattr__(self, "class_token", self.head == "token")
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
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] + bool(self.class_token)


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


def in_patches(images: Tensor, stride: int) -> Tensor:
    """Crop images (..., H, W) to whole patches."""
    height, width = images.shape[-2], images.shape[-1]
    if not (height % stride or width % stride):
        return images
    height, width = covered((height, width), stride)
    return images[..., :height, :width]


def dropped(config: Any, image_size: tuple[int, int] | None = None, *, strict: bool = False) -> str:
    """A note on the pixels that are outside whole patches; empty if there are none.

    strict: such a size is an error.
    """
    if not isinstance(config, ViTConfig):
        return ""
    height, width = image_size or config.image_size
    h, w = (side * config.stride for side in grid_of((height, width), config.stride, strict=strict))
    if (height, width) == (h, w):
        return ""
    return (
        f"images of {height}x{width} pixels in patches of {config.stride}: {h}x{w} pixels are used, "
        f"{height - h} at the bottom and {width - w} at the right {DROPPED}"
    )


def with_size_note(origin: Origin, config: Any) -> Origin:
    """The origin with a note on the pixels that this model drops, instead of a note for another size."""
    note = dropped(config)
    others = tuple(other for other in origin.notes if not other.endswith(DROPPED))
    return replace(origin, notes=(*others, *([note] if note else [])))


def check_vit(c: ViTConfig) -> None:
    """Raise a ConfigError if the model cannot be built."""
    for field, known in CHOICES.items():
        if getattr(c, field) not in known:
            raise ConfigError(f"{field} must be one of {', '.join(known)}, not {getattr(c, field)!r}")
    if isinstance(c.patch, list | tuple):
        raise ConfigError(f"patches are square: patch must be one number of pixels such as 16, not {c.patch}")
    for field in ("width", "heads", "hidden", "patch", "channels", "depth", "classes", "representation"):
        if not isinstance(getattr(c, field), Integral):
            raise ConfigError(f"{field} must be a whole number, not {getattr(c, field)!r}")
    for field in ("width", "heads", "hidden", "patch", "channels"):
        if getattr(c, field) < 1:
            raise ConfigError(f"{field} must be at least 1, not {getattr(c, field)}")
    for field in ("depth", "classes", "representation"):
        if getattr(c, field) < 0:
            raise ConfigError(f"{field} must not be negative: {getattr(c, field)}")
    for field in ("dropout", "attention_dropout", "stochastic_depth"):
        if not 0 <= getattr(c, field) < 1:
            raise ConfigError(f"{field} must be in [0, 1), not {getattr(c, field)}")
    if not 0 <= c.norm_eps < 1:
        raise ConfigError(f"norm_eps must be in [0, 1), not {c.norm_eps}")
    grid_of(c.image_size, c.stride)
    errors = {  # message -> whether it applies
        f"width {c.width} is not divisible by {c.heads} heads": c.width % c.heads,
        f"2d positions need an even width, not {c.width}": c.positions == "2d" and c.width % 2,
        f"sincos2d positions need a width divisible by 4, not {c.width}": c.positions == "sincos2d"
        and c.width % 4,
        "head='token' needs a class token; with class_token=False use head='gap' or 'map'": c.head == "token"
        and not c.class_token,
        f"positions={c.positions!r} cannot be added before every layer; use injection='stem'": (
            c.positions in ("none", "relative") and c.injection != "stem"
        ),
        "sincos2d positions are fixed, so every layer has the same; use injection='shared'": c.positions
        == "sincos2d"
        and c.injection == "every",
        "axial attention does not support a class token; "
        "use head='gap' or 'map' and class_token=False": c.attention == "axial" and c.class_token,
        "final_norm='pooled' needs head='gap'": c.final_norm == "pooled" and c.head != "gap",
    }
    for message, applies in errors.items():
        if applies:
            raise ConfigError(message)


class ViT(Described, nn.Module):
    """An image as a sequence of patches through a Transformer encoder (Eq. 1-4)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        c = self.config = config
        self.labels: tuple[str, ...] = ()
        self.preprocessing = Preprocessing()
        self.origin = Origin()

        self.stem = Stem(c.stem, c.channels) if c.stem else None
        channels = self.stem.channels if self.stem else c.channels
        self.project = nn.Conv2d(channels, c.width, c.patch, stride=c.patch)  # E
        self.class_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.class_token else None
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.mask_token else None
        self.positions = Positions(  # E_pos
            c.positions,
            c.injection,
            grid=c.grid,
            width=c.width,
            depth=c.depth,
            lead=int(bool(c.class_token)),
            resize=c.position_resize,
        )
        self.dropout = nn.Dropout(c.dropout)
        norm = nn.LayerNorm(c.width, eps=c.norm_eps)
        pooled = c.final_norm == "pooled"
        self.encoder = Encoder([make_layer(c, i) for i in range(c.depth)], nn.Identity() if pooled else norm)
        self.pool = AttentionPool(c.width, c.heads, make_mlp(c), eps=c.norm_eps) if c.head == "map" else None
        self.pool_norm = norm if pooled else None
        self.representation = nn.Linear(c.width, c.representation) if c.representation else None
        self.head = nn.Linear(c.representation or c.width, c.classes) if c.classes else None
        initialize_vit(self)

    def __repr__(self) -> str:
        return model_repr(self)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W) -> logits (B, classes)."""
        return self.forward_head(self.features(images, mask))

    def forward_head(self, features: Tensor) -> Tensor:
        """Features (B, D) -> logits (B, classes)."""
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The input of the head, (B, D); for head='token' the last layer computes only the class token."""
        patches, grid = self.patches(images)
        first = 1 if self.config.head == "token" else None
        return self.pooled(self.encode(patches, grid, mask, first))

    def pooled(self, z: Tensor) -> Tensor:
        """y of Eq. 4 from the encoder's output, after the tanh layer if there is one."""
        lead = int(self.class_token is not None)
        if self.pool is not None:
            y = self.pool(z[:, lead:])
        elif self.config.head == "gap":
            y = z[:, lead:].mean(1)
            y = y if self.pool_norm is None else self.pool_norm(y)
        else:
            y = z[:, 0]  # Eq. 4; the encoder has normalised every token
        return y if self.representation is None else self.representation(y).tanh()

    def tokens(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's output, (B, N+1, D); the class token, if there is one, is the first."""
        patches, grid = self.patches(images)
        return self.encode(patches, grid, mask)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        """x_p E of Eq. 1: the patch embeddings (B, N, D), and their grid."""
        if images.ndim != 4 or images.shape[1] != self.config.channels:
            raise Error(
                f"images must have shape (B, {self.config.channels}, H, W), not {tuple(images.shape)}",
                code="model.input",
            )
        grid = grid_of((images.shape[2], images.shape[3]), self.config.stride)
        images = in_patches(images, self.config.stride)
        maps = images if self.stem is None else self.stem(images)
        return patch_embedding(maps, self.project), grid

    def encode(
        self, patches: Tensor, grid: Grid, mask: Tensor | None = None, first: int | None = None
    ) -> Tensor:
        """Patch embeddings (B, N, D) -> the encoder's output, (B, N+1, D), or the first tokens of it."""
        return self.encoder(self.embed(patches, grid, mask), grid, self.inject(grid), first)

    def embed(self, patches: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """z_0 of Eq. 1: [x_class; x_p E] + E_pos, with masked patches (B, N) replaced."""
        if self.config.positions == "relative" and grid != self.config.grid:
            raise Error(
                f"relative positions were learned on a {self.config.grid} grid and cannot be resized to "
                f"{grid}; use images of {self.config.image_size}",
                code="model.input",
            )
        z = patches if mask is None else self.masked(patches, mask)
        if self.class_token is not None:
            lead = self.class_token.to(z.dtype)  # the residual stream stays in half precision
            z = torch.cat([lead.expand(len(z), -1, -1), z], dim=1)
        return self.dropout(self.positions(z, grid, 0))  # Eq. 1

    def masked(self, patches: Tensor, mask: Tensor) -> Tensor:
        """The patches with the mask token where the mask is true."""
        if self.mask_token is None:
            raise Error(
                "this model has no mask token; build it with mask_token=True", code="model.unsupported"
            )
        if mask.dtype != torch.bool or mask.shape != patches.shape[:2]:
            raise Error(
                f"the mask must be boolean of shape {tuple(patches.shape[:2])}, "
                f"not {mask.dtype} of shape {tuple(mask.shape)}",
                code="model.input",
            )
        return torch.where(mask[..., None], self.mask_token.to(patches.dtype), patches)

    def inject(self, grid: Grid) -> Any:
        """The function that adds positions before each layer but the first, whose positions z_0 has."""
        return lambda z, layer: z if layer == 0 else self.positions(z, grid, layer)

    def attention(self, images: Tensor) -> Iterator[Tensor]:
        """The attention weights of each layer in turn, (B, K, N+1, N+1), one layer in memory at a time."""
        patches, grid = self.patches(images)
        states = self.encoder.states(self.embed(patches, grid), grid, self.inject(grid))
        for block, z in zip(self.encoder.blocks, states, strict=False):  # the last state has no block
            yield from block.weights(z, grid)  # type: ignore[operator]


def make_mlp(c: ViTConfig) -> Mlp:
    return Mlp(c.width, c.hidden, gelu=c.gelu, dropout=c.dropout)


def make_layer(c: ViTConfig, index: int) -> Block | AxialBlock:
    """Layer `index` of the encoder; stochastic depth grows linearly from 0 to its full rate."""
    drop_path = c.stochastic_depth * index / max(1, c.depth - 1)

    def block(tokens: int) -> Block:
        offsets = 2 * tokens - 1 if c.positions == "relative" else 0
        attention = Attention(
            c.width, c.heads, qkv_bias=c.qkv_bias, dropout=c.attention_dropout, offsets=offsets
        )
        return Block(
            attention,
            make_mlp(c),
            width=c.width,
            eps=c.norm_eps,
            dropout=c.dropout,
            drop_path=drop_path,
            layer_scale=c.layer_scale,
        )

    if c.attention == "axial":
        h, w = c.grid
        return AxialBlock(row=block(w), column=block(h))
    return block(c.tokens)
