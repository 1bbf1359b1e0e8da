"""Dense layers whose gradients and activations take fewer passes over memory, in bf16 on an NVIDIA GPU."""

# M tokens of all images, D width, H hidden, B batch, N tokens of an image, K heads, Dh head width

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.models.epilogue import dense_gelu, dense_gelu_kept, library
from vitkit.models.operations import operation

HAVE = library() is not None and importlib.util.find_spec("triton") is not None


def in_half(z: Tensor, weight: Tensor) -> bool:
    """Whether what is here is for z and a layer of this weight: z is or will be bf16, on an NVIDIA GPU."""
    if not (HAVE and z.is_cuda) or any(side % 8 for side in weight.shape):
        return False
    half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else z.dtype
    return half == torch.bfloat16


def mlp(z: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Two dense layers with a GELU (by tanh) between them, (..., D) -> (..., D)."""
    given = [t.to(torch.bfloat16) for t in (z.flatten(0, -2), up.weight, up.bias, down.weight, down.bias)]
    learned = torch.is_grad_enabled()
    found = Through.apply(*given) if learned else F.linear(dense_gelu(*given[:3]), *given[3:])
    return found.unflatten(0, z.shape[:-1])


def project_qkv(z: Tensor, qkv: nn.Linear, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (B, N, D) -> three of (B, K, N, Dh)."""
    half = [t.to(torch.bfloat16) for t in (z, qkv.weight, qkv.bias)]
    return ProjectQKV.apply(*half, heads)


def compiled(model: nn.Module) -> nn.Module:
    """A model compiled; what is made of it is kept for the next start, also where these are in it."""
    from torch._functorch import config

    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        # the graphs of both their ways are in the key under which it is kept
        config.autograd_cache_allow_custom_autograd_functions = True
    return torch.compile(model)  # type: ignore[return-value]


class Through(torch.autograd.Function):
    """The MLP."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        before, after = dense_gelu_kept(z, up, up_bias)
        ctx.save_for_backward(z, up, down, before, after)
        return F.linear(after, down, down_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        z, up, down, before, after = ctx.saved_tensors
        inner, sums = gelu_back(gradient @ down, before)
        return inner @ up, inner.mT @ z, sums, gradient.mT @ after, gradient.sum(0)


class ProjectQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Any:
        ctx.save_for_backward(z, weight)
        qkv = F.linear(z, weight, bias).unflatten(-1, (3, heads, -1))  # (B, N, 3, K, Dh)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        z, weight = ctx.saved_tensors
        found, sums = pack(q, k, v)
        return (found @ weight).view_as(z), found.mT @ z.flatten(0, 1), sums, None


def like_before(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), before.new_empty(before.shape[1])


@operation(like_before)
def gelu_back(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a GELU from that after it, (M, H), and its sum, (H,)."""
    from vitkit.models import kernels  # Triton takes its time

    return kernels.gelu_back(gradient, before)


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, head = q.shape
    return q.new_empty((batch * tokens, 3 * heads * head)), q.new_empty(3 * heads * head)


@operation(packed)
def pack(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three of (B, K, N, Dh) -> (B N, 3 K Dh), and the sum of that over images and tokens."""
    from vitkit.models import kernels

    return kernels.pack(q, k, v)
