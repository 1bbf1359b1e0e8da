"""Axial attention for the AxialResNet: along rows, then columns, instead of a 3x3 convolution (App. D.6)."""

# B batch, C channels, K heads, Dh head width; h, w feature map; n positions in a row, M = B K h rows

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AxialAttention(nn.Module):
    """Attention along the rows of a feature map, with relative positions for queries, keys and values.

    As in axial-deeplab (Wang et al. 2020): queries and keys are half as wide as values, all heads share
    the embeddings, and the logits are not scaled. GroupNorm replaces its batch norm.
    """

    def __init__(self, width: int, heads: int, length: int, groups: int, eps: float):
        """`length`: positions in a row, n; there is an embedding for each of the 2n-1 offsets."""
        super().__init__()
        self.heads = heads
        head = width // heads
        self.parts = [head // 2, head // 2, head]  # widths of queries, keys and values
        self.qkv = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.qkv_norm = nn.GroupNorm(groups, 2 * width, eps=eps)
        self.relative = nn.Parameter(torch.empty(2 * length - 1, 2 * head))
        self.out_norm = nn.GroupNorm(groups, width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, C, h, w)"""
        b, _, h, w = x.shape
        qkv = self.qkv_norm(self.qkv(x)).unflatten(1, (self.heads, -1))  # (B, K, 2 Dh, h, w)
        q, k, v = qkv.permute(0, 1, 3, 4, 2).flatten(0, 2).split(self.parts, -1)  # (M, n, Dh/2 or Dh)
        rq, rk, rv = self.relative_embeddings(w).split(self.parts, -1)  # (n, n, Dh/2 or Dh)
        logits = q @ k.mT + positionwise(q, rq.mT) + positionwise(k, rk.permute(1, 2, 0)).mT
        weights = logits.softmax(-1)  # (M, n, n)
        mixed = weights @ v + positionwise(weights, rv)  # (M, n, Dh)
        mixed = mixed.unflatten(0, (b, self.heads, h)).permute(0, 1, 4, 2, 3)  # (B, K, Dh, h, w)
        return self.out_norm(mixed.flatten(1, 2))

    def relative_embeddings(self, n: int) -> Tensor:
        """The embedding of the offset p_q - p_k for each query and key, (n, n, 2 Dh)."""
        position = torch.arange(n, device=self.relative.device)
        return self.relative[position[:, None] - position[None, :] + n - 1]


def positionwise(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each position by its own matrix: (M, n, a) and (n, a, m) -> (M, n, m)."""
    return (x.transpose(0, 1) @ matrices).transpose(0, 1)


class RowsThenColumns(nn.Module):
    """Replaces a 3x3 convolution on feature maps of one size; a stride becomes average pooling after it."""

    def __init__(self, width: int, heads: int, size: tuple[int, int], stride: int, groups: int, eps: float):
        super().__init__()
        self.stride = stride
        self.row = AxialAttention(width, heads, size[1], groups, eps)
        self.column = AxialAttention(width, heads, size[0], groups, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.column(self.row(x).mT).mT
        return F.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x
