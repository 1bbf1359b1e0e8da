"""DINO's projection head: an MLP, L2 normalisation, and a weight-normalised layer to the outputs."""

# D features, K outputs of the head

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.02  # of the MLP's initial weights


class DinoHead(nn.Module):
    """Features (..., D) -> logits (..., K). State-dict names: mlp.{0,2,4}.*, last.{weight,scale}."""

    def __init__(
        self, width: int, outputs: int, *, hidden: int = 2048, bottleneck: int = 256,
        trained_scale: bool = False, generator: torch.Generator | None = None,
    ):  # fmt: skip
        """`trained_scale`: the norms of the last layer's rows are trained too, instead of staying 1."""
        super().__init__()
        dense = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, bottleneck)]
        for layer in dense:
            nn.init.trunc_normal_(layer.weight, std=STD, generator=generator)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(dense[0], nn.GELU(), dense[1], nn.GELU(), dense[2])
        self.last = WeightNormLinear(bottleneck, outputs, trained_scale, generator)

    def bottleneck(self, features: Tensor) -> Tensor:
        """The input of the last layer, of length 1, in float32."""
        return F.normalize(self.mlp(features).float(), dim=-1)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.bottleneck(features))


class WeightNormLinear(nn.Module):
    """A linear layer without bias whose rows are scale * weight / |weight|, as weight_norm has it."""

    def __init__(
        self, width: int, outputs: int, trained_scale: bool = False, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5, generator=generator)  # as nn.Linear
        self.scale = nn.Parameter(torch.ones(outputs, 1), requires_grad=trained_scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.scale * self.weight / self.weight.norm(dim=1, keepdim=True))
