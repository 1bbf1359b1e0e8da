"""Modules that reconstruct the pixels of hidden patches: MAE's autoencoder, and SimMIM's single layer."""

# B batch, N patches, K visible ones, T tokens, D width of the encoder, W width of the decoder; h, w grid

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.models.attention import Attention
from vitkit.models.encoder import Block, Encoder, recomputed
from vitkit.models.mlp import Mlp
from vitkit.models.positions import Grid, sincos2d
from vitkit.models.rope import Turn
from vitkit.models.vit import ViT, ViTConfig

PUBLISHED = (512, 8, 16)  # width, depth and heads of the decoder of all published MAE models
HEAD = 32  # channels of each of its heads
SMALL_DEPTH = 4  # of the decoder of an encoder that is narrower than the published decoder
STD = 0.02  # of tokens that start as normal numbers


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The size of MAE's decoder."""

    width: int
    depth: int
    heads: int


def decoder_config(config: ViTConfig, width: int = 0, depth: int = 0, heads: int = 0) -> DecoderConfig:
    """The decoder for an encoder; 0: chosen by the encoder's width D.

    From D = 512 on it is the published one: width 512, 8 blocks. A narrower encoder gets a decoder of its own
    width, as a multiple of 32, with 4 blocks or fewer, if it has fewer itself. Heads have 32 channels.
    """
    if not width:
        width = PUBLISHED[0] if config.width >= PUBLISHED[0] else max(HEAD, config.width // HEAD * HEAD)
    if not depth:
        small = min(SMALL_DEPTH, max(1, config.depth))
        depth = PUBLISHED[1] if config.width >= PUBLISHED[0] else small
    if not heads:
        heads = max(1, width // HEAD)
    if width % 4 or width % heads:
        raise Error(
            f"a decoder of width {width} with {heads} heads: the width must be divisible by 4, for its "
            "positions, and by the heads",
            code="recipe.value",
        )
    return DecoderConfig(width=width, depth=depth, heads=heads)


class Decoder(nn.Module):
    """MAE's decoder: encoded visible patches and mask tokens to the pixels of the hidden patches.

    Its blocks have the GELU and the epsilon of the encoder's.
    """

    positions: Tensor

    def __init__(self, encoder: ViTConfig, config: DecoderConfig, outputs: int):
        super().__init__()
        self.config, self.grid, self.lead = config, encoder.grid, int(bool(encoder.class_token))
        self.embed = nn.Linear(encoder.width, config.width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.width))
        blocks = [
            Block(
                Attention(config.width, config.heads),
                Mlp(config.width, 4 * config.width, gelu=encoder.gelu),
                width=config.width, eps=encoder.norm_eps,
            )
            for _ in range(config.depth)
        ]  # fmt: skip
        self.encoder = Encoder(blocks, nn.LayerNorm(config.width, eps=encoder.norm_eps))
        self.predict = nn.Linear(config.width, outputs)
        self.register_buffer("positions", self.positions_for(self.grid), persistent=False)

    def positions_for(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """MAE's fixed positions, (N + lead, W); the class token is last and has none."""
        table = sincos2d(grid, self.config.width, kind="sincos2d-mae", device=device)[0].float()
        return F.pad(table, (0, 0, 0, self.lead))

    def forward(self, z: Tensor, shuffle: Tensor, grid: Grid) -> Tensor:
        """Encoded tokens (B, lead + K, D) -> predictions for the hidden patches, (B, N - K, outputs).

        z        the class token, if there is one, and the patches shuffle[:, :K]
        shuffle  (B, N): an order of the patches; the predictions are for shuffle[:, K:]

        Attention does not depend on the order of the tokens. So the mask tokens come first with the positions
        of the hidden patches, and the last layer computes only them.
        """
        visible = z.shape[1] - self.lead
        known, hidden = shuffle[:, :visible], shuffle[:, visible:]
        count, last = hidden.shape[1], shuffle.new_full((len(z), self.lead), shuffle.shape[1])
        table = self.positions if grid == self.grid else self.positions_for(grid, z.device)
        z = self.embed(z)
        masks = self.mask_token.to(z.dtype).expand(len(z), count, -1)
        z = torch.cat([masks, z], dim=1) + table.to(z.dtype)[torch.cat([hidden, last, known], dim=1)]
        return self.predict(self.encoder(z, grid, lambda z, layer: z, count))


class MaskedAutoencoder(nn.Module):
    """MAE: the encoder sees only the visible patches. State-dict names: vit.*, decoder.*"""

    def __init__(self, vit: ViT, decoder: Decoder, mask_ratio: float):
        super().__init__()
        check_encoder(vit.config, "mae")
        self.vit = vit
        self.decoder = decoder
        self.mask_ratio = mask_ratio

    def forward(self, images: Tensor, shuffle: Tensor, features: bool = False) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) -> predictions for the hidden patches (B, N - K, outputs), and features.

        shuffle   (B, N): an order of the patches, of which the first K are visible
        features  whether to return what the head would read of the whole image; else they are empty
        """
        keep = visible_patches(shuffle.shape[1], self.mask_ratio)
        z, grid = self.encode_visible(images, shuffle[:, :keep])
        prediction = self.decoder(z, shuffle, grid)
        if not features:
            return prediction, images.new_empty(0)
        return prediction, self.vit.pooled(self.vit.encode(*self.vit.patches(images)))

    def encode_visible(self, images: Tensor, visible: Tensor) -> tuple[Tensor, Grid]:
        """Images and the places of visible patches (B, K) -> their encoded tokens, and the grid.

        The tokens (B, lead + K, D) are those of the class and of the patches. Registers and a distillation
        token are part of the encoder alone.
        """
        prefix, lead, encoder = self.vit.config.prefix, self.decoder.lead, self.vit.encoder
        patches, grid = self.vit.patches(images, chosen=visible)
        z, turn = self.vit.embed(patches, grid, chosen=visible), gather_rotations(encoder.turn(grid), visible)
        for block in encoder.blocks:
            z = recomputed(block, z, grid, None, turn, again=encoder.recompute and self.training)
        z = encoder.norm(z)
        return z if prefix == lead else torch.cat([z[:, :lead], z[:, prefix:]], dim=1), grid


class PixelPredictor(nn.Module):
    """SimMIM: a ViT that sees mask tokens, and one linear layer. State-dict names: vit.*, predict.*"""

    def __init__(self, vit: ViT, outputs: int):
        super().__init__()
        check_encoder(vit.config, "simmim")
        self.vit = vit
        self.predict = nn.Linear(vit.config.width, outputs)

    def forward(self, images: Tensor, hidden: Tensor, features: bool = False) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) -> predictions for all patches (B, N, outputs), and features.

        hidden    (B, N), True where a patch is replaced by the mask token, before positions are added
        features  whether to return what the head would read of the whole image; else they are empty
        """
        patches, grid = self.vit.patches(images)
        z = self.vit.encode(patches, grid, hidden)
        whole = self.vit.pooled(self.vit.encode(patches, grid)) if features else images.new_empty(0)
        return self.predict(z[:, self.vit.config.prefix :]), whole


def gather_rotations(turn: Turn | None, kept: Tensor) -> Turn | None:
    """The rotations (RoPE) of each image's patches `kept`, (B, K)."""
    if turn is None:
        return None
    sin, cos, halves = turn
    return sin[kept][:, None], cos[kept][:, None], halves  # the same for all heads


def visible_patches(patches: int, mask_ratio: float) -> int:
    """How many of N patches MAE's encoder sees: int(N (1 - ratio)), but at least one, and not all.

    >>> visible_patches(196, 0.75), visible_patches(256, 0.75)
    (49, 64)
    """
    if patches < 2:
        raise Error(
            "mae needs at least two patches per image; use larger images or smaller patches",
            code="model.unsupported",
        )
    count = int(patches * (1 - mask_ratio) + 1e-9)  # 10 * (1 - 0.9) is 0.9999999999999998
    return min(max(1, count), patches - 1)


def check_encoder(config: Any, task: str) -> None:
    """Refuse models with parts that a task does not train, or that need every patch."""
    fixed = {
        f"head={config.head} with its pooling layer": config.head == "map",
        "final_norm=pooled, a norm after pooling": config.final_norm == "pooled",
    }
    if task == "mae":
        fixed |= {
            "relative positions": config.positions == "relative",
            "axial attention": config.attention == "axial",
            f"positions before every layer (injection={config.injection})": config.injection != "stem",
        }
    for name, applies in fixed.items():
        if applies:
            raise Error(
                f"{task} does not support {name}; use a model with head=token or head=gap, final_norm=tokens "
                "and positions at the stem, such as ViT-S/16 or MAE-B/16",
                code="model.unsupported",
            )


@torch.no_grad()
def initialize_as_mae(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """The initialisation of MAE's code, for its encoder and its decoder.

    Every dense layer is Xavier uniform as a whole, so also queries, keys and values together as one (3D, D)
    matrix; the patch embedding as a (D, 3 P P) matrix, with the default bias of a convolution in PyTorch.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1), generator=generator)
            if part.bias is not None:
                bound = part.weight[0].numel() ** -0.5
                nn.init.uniform_(part.bias, -bound, bound, generator=generator)
    for name in ("class_token", "mask_token"):
        if (token := getattr(module, name, None)) is not None:
            nn.init.normal_(token, std=STD, generator=generator)


@torch.no_grad()
def initialize_predictor(module: PixelPredictor, generator: torch.Generator) -> None:
    """SimMIM's layer as PyTorch does by default; the mask token, if it is not pretrained, at 0.02."""
    bound = module.predict.in_features**-0.5
    nn.init.uniform_(module.predict.weight, -bound, bound, generator=generator)
    nn.init.uniform_(module.predict.bias, -bound, bound, generator=generator)
    token = module.vit.mask_token
    if token is not None and not token.is_meta and not token.any():
        nn.init.normal_(token, std=STD, generator=generator)
