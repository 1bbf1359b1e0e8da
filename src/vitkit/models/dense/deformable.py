"""Deformable attention: queries read a map at a few points around their boxes; and a decoder made of it."""

# B batch, G groups of queries, Q queries of a group, D width, K heads, Dh head width, P points; h, w cells

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.models.encoder import Grid
from vitkit.ops.points import sample_maps


def moved(boxes: Tensor, deltas: Tensor) -> Tensor:
    """Boxes (..., 4) of centre and size, shifted in units of their size and scaled by exp, in their dtype."""
    deltas = deltas.to(boxes.dtype)
    centre = deltas[..., :2] * boxes[..., 2:] + boxes[..., :2]
    return torch.cat([centre, deltas[..., 2:].exp() * boxes[..., 2:]], dim=-1)


def box_sines(boxes: Tensor, width: int) -> Tensor:
    """Sines and cosines of boxes (..., 4) in the order y, x, w, h, of `width` numbers each."""
    rates = torch.arange(width // 2, dtype=boxes.dtype, device=boxes.device)
    rates = 2 * math.pi / 10_000 ** (2 * rates / width)
    # a list as an index would be copied to the GPU, which a CUDA graph cannot capture
    turned = torch.cat([boxes[..., 1:2], boxes[..., :1], boxes[..., 2:]], dim=-1)
    angles = turned[..., None] * rates  # (..., 4, width / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


class Layers(nn.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, *widths: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, z: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            z = layer(z).relu()
        return self.layers[-1](z)


class GroupAttention(nn.Module):
    """Self-attention among the queries of each group; their positions are not part of the values."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, z: Tensor, positions: Tensor, groups: int) -> Tensor:
        """Queries (B, G Q, D) and their positions -> (B, G Q, D)."""
        width = z.shape[-1]
        (weight_qk, weight_v), (bias_qk, bias_v) = (
            t.tensor_split([2 * width]) for t in (self.qkv.weight, self.qkv.bias)
        )
        parts = [F.linear(z + positions, weight_qk, bias_qk), F.linear(z, weight_v, bias_v)]
        q, k, v = (
            part.unflatten(1, (groups, -1)).flatten(0, 1).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (*parts[0].chunk(2, dim=-1), parts[1])
        )  # (B G, K, Q, Dh)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2)).unflatten(0, (-1, groups)).flatten(1, 2)


class DeformableAttention(nn.Module):
    """Each head of a query reads the map at P points, whose places the query chooses relative to its box."""

    def __init__(self, width: int, heads: int, points: int):
        super().__init__()
        self.heads, self.points = heads, points
        self.offsets = nn.Linear(width, heads * points * 2)
        self.weights = nn.Linear(width, heads * points)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, z: Tensor, boxes: Tensor, memory: Tensor, grid: Grid) -> Tensor:
        """Queries (B, Q, D), their boxes (B, Q, 4), a map (B, h w, D) -> (B, Q, D)."""
        shape = (self.heads, self.points)
        offsets = self.offsets(z).unflatten(-1, (*shape, 2)).to(boxes.dtype)  # in halves of the box / P
        centre, size = boxes[:, :, None, None, :2], boxes[:, :, None, None, 2:]
        places = centre + offsets / self.points * size * 0.5  # (B, Q, K, P, 2)
        weights = self.weights(z).unflatten(-1, shape).softmax(-1)  # (B, Q, K, P)
        value = self.value(memory).mT.unflatten(1, (self.heads, -1)).flatten(0, 1)  # (B K, Dh, h w)
        points = places.transpose(1, 2).flatten(0, 1).flatten(1, 2)  # (B K, Q P, 2)
        read = sample_maps(value.unflatten(2, grid).to(places.dtype), points)
        read = read.unflatten(2, (-1, self.points))  # (B K, Dh, Q, P)
        weights = weights.transpose(1, 2).flatten(0, 1)[:, None]  # (B K, 1, Q, P)
        mixed = (read * weights).sum(-1).unflatten(0, (-1, self.heads)).flatten(1, 2)  # (B, D, Q)
        return self.out(mixed.mT.to(z.dtype))


class DecoderLayer(nn.Module):
    """Self-attention, deformable attention and an MLP, each followed by LayerNorm."""

    def __init__(self, width: int, *, heads: tuple[int, int], points: int, hidden: int, dropout: float):
        """heads: of the self-attention and of the deformable attention"""
        super().__init__()
        self.attention = GroupAttention(width, heads[0], dropout)
        self.norm1 = nn.LayerNorm(width)
        self.cross = DeformableAttention(width, heads[1], points)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm3 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, z: Tensor, positions: Tensor, boxes: Tensor, memory: Tensor, grid: Grid, groups: int
    ) -> Tensor:
        z = self.norm1(z + self.dropout(self.attention(z, positions, groups)))
        z = self.norm2(z + self.dropout(self.cross(z + positions, boxes, memory, grid)))
        return self.norm3(z + self.dropout(self.down(self.dropout(self.up(z).relu()))))


class Decoder(nn.Module):
    """Layers that refine the queries; the boxes around which they read stay those of the start."""

    def __init__(self, width: int, layers: Iterable[DecoderLayer]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.positions = Layers(2 * width, width, width)  # of the queries, from their boxes

    def forward(self, z: Tensor, boxes: Tensor, memory: Tensor, grid: Grid, groups: int = 1) -> list[Tensor]:
        """Queries (B, G Q, D) with boxes (B, G Q, 4) -> their normalised states after each layer."""
        sines = box_sines(boxes, z.shape[-1] // 2)
        positions = self.positions(sines.to(z.dtype))
        states = []
        for layer in self.layers:
            z = layer(z, positions, boxes, memory, grid, groups)
            states.append(self.norm(z))
        return states


def initialize_deformable(attention: DeformableAttention) -> None:
    """Head k first looks in direction k around the centre of the box, at point p times as far, all alike."""
    heads = torch.arange(attention.heads, dtype=torch.float32) * (2 * math.pi / attention.heads)
    directions = torch.stack([heads.cos(), heads.sin()], dim=-1)  # (K, 2)
    directions = directions / directions.abs().amax(-1, keepdim=True)
    steps = torch.arange(1, attention.points + 1, dtype=torch.float32)
    nn.init.zeros_(attention.offsets.weight)
    with torch.no_grad():
        attention.offsets.bias.copy_((directions[:, None] * steps[:, None]).flatten())
    nn.init.zeros_(attention.weights.weight)
    nn.init.zeros_(attention.weights.bias)
