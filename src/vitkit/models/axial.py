"""Axial attention on the grid of patches: rows, then columns (App. D.6)."""

# B batch, N tokens, D width, K heads; h, w grid of patches

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitkit.models.encoder import Block, Grid


class AxialBlock(nn.Module):
    """A layer that is two: attention and MLP along each row, then along each column."""

    def __init__(self, row: Block, column: Block):
        super().__init__()
        self.row = row
        self.column = column

    def forward(self, z: Tensor, grid: Grid) -> Tensor:
        z = self.row(z.unflatten(1, grid))  # (B, h, w, D)
        return self.column(z.transpose(1, 2)).transpose(1, 2).flatten(1, 2)  # (B, N, D)

    def weights(self, z: Tensor, grid: Grid) -> Iterator[Tensor]:
        """The weights of the rows, then those of the columns, each spread out to (B, K, N, N)."""
        places = torch.arange(grid[0] * grid[1], device=z.device).view(grid)  # (h, w)
        z = z.unflatten(1, grid)
        for block in (self.row, self.column):
            lines = block.attention.weights(block.norm1(z))  # (B, lines, K, n, n)
            full = z.new_zeros(len(z), lines.shape[2], places.numel(), places.numel())
            full[:, :, places[:, :, None], places[:, None, :]] = lines.transpose(1, 2)
            yield full
            z, places = block(z).transpose(1, 2), places.mT
