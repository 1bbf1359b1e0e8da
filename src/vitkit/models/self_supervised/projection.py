"""The projector and predictor of MoCo v3: linear layers with a batch norm over all processes."""

# B images of this process, D features

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.1  # of running statistics, as in PyTorch's batch norm
EPS = 1e-5


class Projection(nn.Module):
    """Linear layers without bias, each followed by a batch norm; ReLU between them, none after the last.

    The last norm has no scale and no shift. State-dict names: layers.N.weight, norms.N.*
    """

    def __init__(self, widths: Sequence[int], generator: torch.Generator | None = None):
        """`widths`: of the input, of each hidden layer, of the output."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in pairwise(widths))
        last = len(self.layers) - 1
        self.norms = nn.ModuleList(BatchNorm(m, affine=i < last) for i, m in enumerate(widths[1:]))
        for layer in self.layers:  # PyTorch's own initialisation, but by this generator
            nn.init.kaiming_uniform_(layer.weight, a=5**0.5, generator=generator)  # type: ignore[arg-type]

    def forward(self, x: Tensor, used: Tensor | None = None) -> Tensor:
        """x (B, D) to (B, outputs) float32; used: (B,) bool, which rows are images; None: all."""
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x.relu() if i else x), used)
        return x


class BatchNorm(nn.Module):
    """Batch norm of (B, D) in float32 whose statistics are over the images of all processes.

    It equals PyTorch's on the whole batch, however the batch is divided. Evaluation uses the running
    statistics. Rows that are no images (`used` is false) count nowhere.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, *, affine: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, used: Tensor | None = None) -> Tensor:
        x = x.float()
        mean, var = self.statistics(x, used) if self.training else (self.running_mean, self.running_var)
        y = (x - mean) * (var + EPS).rsqrt()
        return y if self.weight is None or self.bias is None else y * self.weight + self.bias

    def statistics(self, x: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over all images of the batch, which also update the running ones."""
        share = x.new_ones(len(x), 1) if used is None else used.to(x.dtype)[:, None]
        total = differentiable_sum(torch.cat([(x * share).sum(0), share.sum(0)]))
        count = total[-1].detach()
        images = count.clamp(min=1)  # 0: a pass without images, for the sake of the other processes
        mean = total[:-1] / images
        var = differentiable_sum(((x - mean).square() * share).sum(0)) / images
        with torch.no_grad():
            pace = MOMENTUM * (count > 0)
            self.running_mean.lerp_(mean, pace)
            self.running_var.lerp_(var * images / (images - 1).clamp(min=1), pace)
        return mean, var


def differentiable_sum(value: Tensor) -> Tensor:
    """The sum over all processes, through which gradients flow back to each of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    result: Tensor = SumOverProcesses.apply(value)
    return result


class SumOverProcesses(torch.autograd.Function):
    """Every process's value contributes to the result in every process, so their gradients add up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient
