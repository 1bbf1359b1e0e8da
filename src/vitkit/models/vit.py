"""The Vision Transformer (Sec. 3.1, Eq. 1-4), with or without a ResNet stem, and its variants since."""

# B batch, N patches, T tokens, D width, K heads; H, W pixels; h, w grid of patches; P patch

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.models.attention import Attention, AttentionPool
from vitkit.models.card import Described, Origin, Preprocessing, model_repr
from vitkit.models.encoder import AxialBlock, Block, Encoder, Grid
from vitkit.models.initialization import initialize_vit
from vitkit.models.merging import encode_merging, weighted_mean
from vitkit.models.mlp import Mlp, SwiGlu
from vitkit.models.positions import Positions, resize_patch
from vitkit.models.resnet import Stem
from vitkit.models.rope import Rope
from vitkit.models.text_tower import TextTower
from vitkit.models.vit_config import ViTConfig, covered, grid_of
from vitkit.ops.fused import patch_embedding, patchify
from vitkit.ops.rows import rows

DROPPED = "are dropped"  # the end of a note on pixels outside whole patches


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
        self.project = nn.Conv2d(channels, c.width, c.patch, stride=c.patch, bias=c.project_bias)  # E
        self.class_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.distilled else None
        self.registers = nn.Parameter(torch.empty(1, c.registers, c.width)) if c.registers else None
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.width)) if c.mask_token else None
        self.positions = Positions(  # E_pos
            c.positions,
            c.injection,
            grid=c.grid,
            width=c.width,
            depth=c.depth,
            lead=c.lead if c.class_position else 0,
            resize=c.position_resize,
        )
        self.dropout = nn.Dropout(c.dropout)
        norm = nn.LayerNorm(c.width, eps=c.norm_eps)
        pooled = c.final_norm == "pooled"
        self.input_norm = nn.LayerNorm(c.width, eps=c.norm_eps) if c.input_norm else None
        layers = [make_layer(c, i) for i in range(c.depth)]
        self.encoder = Encoder(layers, nn.Identity() if pooled else norm, make_rope(c))
        self.pool = AttentionPool(c.width, c.heads, make_mlp(c), eps=c.norm_eps) if c.head == "map" else None
        self.pool_norm = norm if pooled else None
        biased = c.representation_kind == "tanh"
        self.representation = (
            nn.Linear(c.pooled_width, c.representation, bias=biased) if c.representation else None
        )
        self.head = nn.Linear(c.representation or c.pooled_width, c.classes) if c.classes else None
        self.distillation_head = nn.Linear(c.width, c.classes) if c.classes and c.distilled else None
        self.text = TextTower(c.text) if c.text else None  # not part of forward
        initialize_vit(self)

    def __repr__(self) -> str:
        return model_repr(self)

    def forward(self, images: Tensor, mask: Tensor | None = None, patch: int | None = None) -> Tensor:
        """Images (B, C, H, W) -> logits (B, classes); patch: another patch size, as in FlexiViT."""
        return self.forward_head(self.features(images, mask, patch))

    def forward_head(self, features: Tensor) -> Tensor:
        """Features (B, D), or (B, 2 D) for head='token+gap' or if distilled -> logits (B, classes)."""
        features = F.normalize(features, dim=-1) if self.config.normalize else features
        if self.head is None or self.distillation_head is None:
            return features if self.head is None else self.head(features)
        of_class, of_distillation = features.chunk(2, -1)
        return (self.head(of_class) + self.distillation_head(of_distillation)) / 2

    def features(self, images: Tensor, mask: Tensor | None = None, patch: int | None = None) -> Tensor:
        """The input of the head, (B, D) or (B, 2 D); the last layer computes only what the head reads."""
        patches, grid = self.patches(images, patch)
        first = self.config.lead if self.config.head == "token" else None
        if self.config.merge_tokens:
            return self.pooled(*self.encode_merged(patches, grid, mask, first))
        return self.pooled(self.encode(patches, grid, mask, first))

    def pooled(self, z: Tensor, sizes: Tensor | None = None) -> Tensor:
        """y of Eq. 4 from the encoder's output, after the tanh or linear layer if there is one.

        sizes: of merged tokens, (B, T, 1); None: no tokens were merged
        """
        prefix = self.config.prefix
        patch_sizes = None if sizes is None else sizes[:, prefix:]
        if self.pool is not None:
            y = self.pool(z[:, prefix:])
        elif self.config.head == "gap":
            y = weighted_mean(z[:, prefix:], patch_sizes)
            y = y if self.pool_norm is None else self.pool_norm(y)
        elif self.config.head == "token+gap":  # as DINOv2's classifiers
            y = torch.cat([z[:, 0], weighted_mean(z[:, prefix:], patch_sizes)], dim=-1)
        else:
            y = z[:, : self.config.lead].flatten(1)  # Eq. 4; the encoder has normalised every token
        return self.represented(y)

    def represented(self, y: Tensor) -> Tensor:
        """The tanh layer of the pre-training head, or CLIP's projection; without either, y itself."""
        if self.representation is None:
            return y
        y = self.representation(y)
        return y.tanh() if self.config.representation_kind == "tanh" else y

    def tokens(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's output, (B, T, D): class token, distillation token, registers, then patches."""
        self.check_unmerged()
        patches, grid = self.patches(images)
        return self.encode(patches, grid, mask)

    def patches(
        self, images: Tensor, patch: int | None = None, chosen: Tensor | None = None
    ) -> tuple[Tensor, Grid]:
        """x_p E of Eq. 1: the patch embeddings (B, N, D), and their grid.

        patch   cut the image into patches of another size, with the embedding resized as by FlexiViT
        chosen  the places (B, K) of the patches to embed; None: all in order
        """
        if images.ndim != 4 or images.shape[1] != self.config.channels:
            raise Error(
                f"images must have shape (B, {self.config.channels}, H, W), not {tuple(images.shape)}",
                code="model.input",
            )
        stride = self.config.stride if patch is None else patch
        grid = grid_of((images.shape[2], images.shape[3]), stride)
        images = in_patches(images, stride)
        if stride != self.config.stride or chosen is not None:
            return self.project_patches(images, stride, chosen), grid
        maps = images if self.stem is None else self.stem(images)
        return patch_embedding(maps, self.project), grid

    def project_patches(self, images: Tensor, patch: int, chosen: Tensor | None = None) -> Tensor:
        """The embeddings of all or chosen patches of any size; gradients reach the model's own embedding."""
        if self.stem is not None:
            raise Error(
                f"patches of {patch} pixels: a hybrid has no patches of pixels, so its patch size is fixed",
                code="model.unsupported",
            )
        weight = resize_patch(self.project.weight, patch).flatten(1)
        pixels = patchify(images, patch)
        return F.linear(pixels if chosen is None else rows(pixels, chosen), weight, self.project.bias)

    def encode(
        self, patches: Tensor, grid: Grid, mask: Tensor | None = None, first: int | None = None
    ) -> Tensor:
        """Patch embeddings (B, N, D) -> the encoder's output, (B, T, D), or the first tokens of it."""
        return self.encoder(self.embed(patches, grid, mask), grid, self.inject(grid), first)

    def encode_merged(
        self, patches: Tensor, grid: Grid, mask: Tensor | None = None, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`encode` with merged tokens: the tokens that are left, and their sizes (B, T, 1)."""
        c = self.config
        if self.training:
            raise Error(
                f"merge_tokens={c.merge_tokens} is for prediction; call model.eval(), and train with "
                "merge_tokens=0",
                code="model.unsupported",
            )
        z = self.embed(patches, grid, mask)
        return encode_merging(self.encoder, z, c.merge_tokens, c.prefix, first)

    def check_unmerged(self) -> None:
        """Refuse what needs one token for each patch."""
        if self.config.merge_tokens:
            raise Error(
                f"merge_tokens={self.config.merge_tokens} leaves no token for each patch; use "
                "adapt(model, merge_tokens=0)",
                code="model.unsupported",
            )

    def embed(
        self, patches: Tensor, grid: Grid, mask: Tensor | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """z_0 of Eq. 1: [x_class; x_p E] + E_pos, with masked patches (B, N) replaced.

        chosen: the places (B, K) of the patches; None: all in order
        """
        if self.config.positions == "relative" and grid != self.config.grid:
            raise Error(
                f"relative positions were learned on a {self.config.grid} grid and cannot be resized to "
                f"{grid}; use images of {self.config.image_size}",
                code="model.input",
            )
        z = patches if mask is None else self.masked(patches, mask)
        lead, c = [self.class_token, self.distillation_token], self.config
        if c.class_position:
            z = self.positions(prepended(lead, z), grid, 0, chosen)  # Eq. 1
        else:
            z = prepended(lead, self.positions(z, grid, 0, chosen))
        if self.registers is not None:  # which have no position
            z = torch.cat([z[:, : c.lead], prepended([self.registers], z[:, c.lead :])], dim=1)
        z = self.dropout(z)
        return z if self.input_norm is None else self.input_norm(z).to(z.dtype)

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
        self.check_unmerged()
        patches, grid = self.patches(images)
        states = self.encoder.states(self.embed(patches, grid), grid, self.inject(grid))
        turn = self.encoder.turn(grid)
        for block, z in zip(self.encoder.blocks, states, strict=False):  # the last state has no block
            yield from block.weights(z, grid, turn)  # type: ignore[operator]


def prepended(tokens: list[nn.Parameter | None], z: Tensor) -> Tensor:
    """Learned tokens (1, n, D) before z; those that are None do not exist."""
    lead = [t.to(z.dtype).expand(len(z), -1, -1) for t in tokens if t is not None]  # z may be half precision
    return torch.cat([*lead, z], dim=1) if lead else z


def make_mlp(c: ViTConfig) -> Mlp | SwiGlu:
    if c.mlp == "swiglu":
        eps = c.norm_eps if c.mlp_norm else None
        return SwiGlu(c.width, c.hidden, norm_eps=eps, dropout=c.dropout)
    return Mlp(c.width, c.hidden, gelu=c.gelu, dropout=c.dropout)


def make_rope(c: ViTConfig) -> Rope | None:
    if c.rope == "none":
        return None
    training = {"shift": c.rope_shift, "jitter": c.rope_jitter, "rescale": c.rope_rescale}
    return Rope(c.rope, c.width // c.heads, **training)


def make_layer(c: ViTConfig, index: int) -> Block | AxialBlock:
    """Layer `index` of the encoder; stochastic depth grows linearly to its full rate, or is uniform."""
    linear = c.stochastic_depth * index / max(1, c.depth - 1)

    def block(tokens: int) -> Block:
        offsets = 2 * tokens - 1 if c.positions == "relative" else 0
        attention = Attention(
            c.width,
            c.heads,
            qkv_bias=c.qkv_bias,
            key_bias=c.key_bias,
            norm_eps=c.norm_eps if c.qk_norm else None,
            dropout=c.attention_dropout,
            offsets=offsets,
        )
        return Block(
            attention,
            make_mlp(c),
            width=c.width,
            eps=c.norm_eps,
            dropout=c.dropout,
            drop_path=c.stochastic_depth if c.stochastic_depth_uniform else linear,
            rescale=c.stochastic_depth_rescale,
            layer_scale=c.layer_scale,
        )

    if c.attention == "axial":
        h, w = c.grid
        return AxialBlock(row=block(w), column=block(h))
    return block(c.tokens)
