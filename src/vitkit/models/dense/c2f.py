"""The C2f layer, which fuses the feature maps of several layers into one (RF-DETR's projector)."""

# B batch, C channels; h, w cells of the map

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of maps (B, C, h, w)."""

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNorm(nn.Module):
    """A convolution without bias, LayerNorm over the channels, and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, eps: float):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = ChannelNorm(outputs, eps=eps)

    def forward(self, maps: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(maps)))


class Bottleneck(nn.Module):
    """Two convolutions of 3x3, without a residual."""

    def __init__(self, channels: int, *, eps: float):
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, eps=eps)
        self.conv2 = ConvNorm(channels, channels, 3, eps=eps)

    def forward(self, maps: Tensor) -> Tensor:
        return self.conv2(self.conv1(maps))


class C2f(nn.Module):
    """Maps of several layers, concatenated, to one map of `width` channels.

    Half of the channels pass through a chain of bottlenecks, and the results of all of them are mixed.
    """

    def __init__(self, inputs: int, width: int, bottlenecks: int, *, eps: float):
        super().__init__()
        half = width // 2
        self.conv1 = ConvNorm(inputs, 2 * half, 1, eps=eps)
        self.bottlenecks = nn.ModuleList(Bottleneck(half, eps=eps) for _ in range(bottlenecks))
        self.conv2 = ConvNorm((2 + bottlenecks) * half, width, 1, eps=eps)
        self.norm = ChannelNorm(width, eps=1e-6)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Each (B, C, h, w) -> (B, width, h, w)."""
        parts = list(self.conv1(torch.cat(list(maps), dim=1)).chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1]))
        return self.norm(self.conv2(torch.cat(parts, dim=1)))
