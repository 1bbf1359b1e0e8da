"""A ViT most of whose layers attend within windows of the image, as the encoder of RF-DETR."""

# B batch, D width, T tokens of a window; h, w grid of patches; W windows along each side

from collections.abc import Sequence

import torch
from torch import Tensor

from vitkit.errors import ConfigError, Error
from vitkit.models.encoder import Grid, recomputed
from vitkit.models.vit import ViT, ViTConfig


def check_windowed(config: ViTConfig, windows: int, taken: Sequence[int]) -> None:
    """Refuse a ViT that cannot be split into windows, and stages that it does not have."""
    if not taken or sorted(set(taken)) != list(taken) or not 1 <= taken[0] <= taken[-1] <= config.depth:
        raise ConfigError(f"taken={tuple(taken)} must be rising numbers from 1 to the depth, {config.depth}")
    for field, usual in (("attention", "full"), ("injection", "stem"), ("rope", "none"), ("merge_tokens", 0)):
        if getattr(config, field) != usual:
            message = f"an encoder with windows needs {field}={usual!r}, not {getattr(config, field)!r}"
            raise ConfigError(message)
    if config.positions == "relative":
        raise ConfigError("an encoder with windows does not support relative positions")
    if windows < 1 or any(side % windows for side in config.grid):
        h, w = config.grid
        raise ConfigError(f"a grid of {h}x{w} patches cannot be split into {windows}x{windows} equal windows")


def windowed_maps(vit: ViT, images: Tensor, *, windows: int, taken: Sequence[int]) -> list[Tensor]:
    """The normalised maps (B, D, h, w) after `taken` layers, counted from 1.

    Every window has its own copy of the tokens before the patches. Layers whose number, counted from 0, is
    in `taken` attend to all windows: published weights were trained with these two ways of counting.
    """
    patches, grid = vit.patches(images)
    if any(side % windows for side in grid):
        unit = vit.config.stride * windows
        raise Error(
            f"images of {images.shape[2]}x{images.shape[3]} pixels: both sides must be multiples of {unit}, "
            f"which is {windows} windows of patches of {vit.config.stride} pixels",
            code="model.input",
        )
    prefix, encoder = vit.config.prefix, vit.encoder
    z = split(vit.embed(patches, grid), grid, windows, prefix)
    tokens, maps = z.shape[1], []
    again = encoder.recompute and encoder.training
    for layer, block in enumerate(encoder.blocks[: taken[-1]]):
        if layer in taken and windows > 1:
            z = z.unflatten(0, (-1, windows**2)).flatten(1, 2)  # (B, W W T, D)
            z = recomputed(block, z, grid, None, None, again=again)
            z = z.unflatten(1, (windows**2, tokens)).flatten(0, 1)
        else:
            z = recomputed(block, z, grid, None, None, again=again)
        if layer + 1 in taken:
            maps.append(joined(encoder.norm(z)[:, prefix:], grid, windows))
    return maps


def split(z: Tensor, grid: Grid, windows: int, prefix: int) -> Tensor:
    """(B, prefix + h w, D) -> (B W W, prefix + h w / W / W, D), with the first tokens in every window."""
    if windows == 1:
        return z
    h, w = grid
    parts = (windows, h // windows, windows, w // windows)
    cells = z[:, prefix:].unflatten(1, parts).transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, W W, n, D)
    lead = z[:, None, :prefix].expand(-1, windows**2, -1, -1)
    return torch.cat([lead, cells], dim=2).flatten(0, 1)


def joined(cells: Tensor, grid: Grid, windows: int) -> Tensor:
    """(B W W, h w / W / W, D) -> (B, D, h, w)."""
    h, w = grid
    z = cells.unflatten(0, (-1, windows, windows)).unflatten(3, (h // windows, w // windows))
    return z.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
