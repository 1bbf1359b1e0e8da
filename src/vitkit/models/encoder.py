"""The Transformer encoder: the pre-norm block (Eq. 2-3) and the stack of them."""

# B batch, N tokens, D width, K heads; h, w grid of patches

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.models.attention import Attention
from vitkit.models.mlp import Mlp, SwiGlu
from vitkit.models.norm import LayerNorm
from vitkit.models.rope import Rope, Turn


def recomputed(block: nn.Module, *inputs: Any, again: bool) -> Tensor:
    """block(*inputs), to the same bits either way: dropout draws the same numbers the second time."""
    return checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)


Grid = tuple[int, int]
Inject = Callable[[Tensor, int], Tensor]  # (z, layer) -> z with that layer's positions


class Block(nn.Module):
    """One pre-norm layer of the encoder (Eq. 2-3)."""

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp | SwiGlu,
        *,
        width: int,
        eps: float,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        rescale: bool = False,
        layer_scale: bool = False,
    ):
        """`rescale`: branches that stochastic depth keeps are divided by their share, as in most code."""
        super().__init__()
        self.norm1 = LayerNorm(width, eps=eps)
        self.attention = attention
        self.norm2 = LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.scale1 = nn.Parameter(torch.empty(width)) if layer_scale else None
        self.scale2 = nn.Parameter(torch.empty(width)) if layer_scale else None
        self.dropout = nn.Dropout(dropout)
        self.drop_path = drop_path
        self.rescale = rescale

    def forward(
        self, z: Tensor, grid: Grid | None = None, first: int | None = None, turn: Turn | None = None
    ) -> Tensor:
        """The tokens after this layer, or only the first of them."""
        mixed = self.attention(self.norm1(z), first, turn)
        z = z if first is None else z[..., :first, :]
        z = z + self.keep(scaled(self.dropout(mixed), self.scale1))  # Eq. 2
        return z + self.keep(scaled(self.mlp(self.norm2(z)), self.scale2))  # Eq. 3

    def weights(self, z: Tensor, grid: Grid | None = None, turn: Turn | None = None) -> Iterator[Tensor]:
        """The attention weights of this layer, (B, K, N, N)."""
        yield self.attention.weights(self.norm1(z), turn)

    def keep(self, branch: Tensor) -> Tensor:
        """Stochastic depth: drop the branch for some examples; as published, without rescaling."""
        if not (self.training and self.drop_path):
            return branch
        keep = torch.rand(len(branch), device=branch.device) >= self.drop_path
        branch = branch / (1 - self.drop_path) if self.rescale else branch
        return branch * keep.view(-1, *[1] * (branch.ndim - 1))


def scaled(branch: Tensor, scale: Tensor | None) -> Tensor:
    return branch if scale is None else branch * scale.to(branch.dtype)


class Encoder(nn.Module):
    """L blocks; positions may be added before each of them (App. D.4), or rotate queries and keys (RoPE)."""

    recompute = False  # what a block computes is not kept for the backward pass, but computed again there

    def __init__(self, blocks: Iterable[nn.Module], norm: nn.Module, rope: Rope | None = None):
        super().__init__()
        self.rope = rope
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, z: Tensor, grid: Grid, inject: Inject, first: int | None = None) -> Tensor:
        """z_0 -> LN(z_L); of the last layer only the first tokens are computed, where no others are read."""
        again, turn = self.recompute and self.training, self.turn(grid)
        for layer, block in enumerate(self.blocks):
            read = first if layer == len(self.blocks) - 1 else None
            z = recomputed(block, inject(z, layer), grid, read, turn, again=again)
        return self.norm(z)

    def turn(self, grid: Grid) -> Turn | None:
        """The rotation of each patch, the same in all layers; None without RoPE."""
        return None if self.rope is None else self.rope(grid)

    def units(self) -> list[nn.Module]:
        """The parts that are recomputed, or sharded over processes, one by one."""
        return list(self.blocks)

    def states(self, z: Tensor, grid: Grid, inject: Inject) -> Iterator[Tensor]:
        """z_0 ... z_{L-1}, each as its block sees it, and at last LN(z_L)."""
        turn = self.turn(grid)
        for layer, block in enumerate(self.blocks):
            z = inject(z, layer)
            yield z
            z = block(z, grid, None, turn)
        yield self.norm(z)


class AxialBlock(nn.Module):
    """A layer that is two: attention and MLP along each row, then along each column."""

    def __init__(self, row: Block, column: Block):
        super().__init__()
        self.row = row
        self.column = column

    def forward(self, z: Tensor, grid: Grid, first: None = None, turn: None = None) -> Tensor:
        """The tokens after this layer; it has neither a class token to read alone nor RoPE."""
        z = self.row(z.unflatten(1, grid))  # (B, h, w, D)
        return self.column(z.transpose(1, 2)).transpose(1, 2).flatten(1, 2)  # (B, N, D)

    def weights(self, z: Tensor, grid: Grid, turn: None = None) -> Iterator[Tensor]:
        """The weights of the rows, then those of the columns, each spread out to (B, K, N, N)."""
        places = torch.arange(grid[0] * grid[1], device=z.device).view(grid)  # (h, w)
        z = z.unflatten(1, grid)
        for block in (self.row, self.column):
            lines = block.attention.weights(block.norm1(z))  # (B, lines, K, n, n)
            full = z.new_zeros(len(z), lines.shape[2], places.numel(), places.numel())
            full[:, :, places[:, :, None], places[:, None, :]] = lines.transpose(1, 2)
            yield full
            z, places = block(z).transpose(1, 2), places.mT
