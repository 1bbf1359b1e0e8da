"""Layers of a Transformer block: fused kernels in bf16 on an NVIDIA GPU, plain PyTorch elsewhere."""

# M tokens of all images, D width, H hidden, B batch, N tokens of an image, K heads, Dh head width, P patch

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.ops.cublaslt import dense_gelu, dense_gelu_with_input, library
from vitkit.ops.custom_op import custom_op

AVAILABLE = library() is not None and importlib.util.find_spec("triton") is not None
QKV = tuple[Tensor, Tensor, Tensor]
MOST_WIDTH = 4096  # of a row that LayerNorm's kernel holds
EXPORTING = False  # set by `exporting`


@contextmanager
def exporting() -> Iterator[None]:
    """Inside, models run by plain PyTorch operations alone, which every other runtime has.

    torch.compiler.is_exporting() would tell, but torch.compile of PyTorch 2.11 takes it for true, too.
    """
    global EXPORTING
    before, EXPORTING = EXPORTING, True
    try:
        yield
    finally:
        EXPORTING = before


def can_fuse(z: Tensor, weight: Tensor, *, supported: bool = True) -> bool:
    """The rule for fused kernels: z is bf16, or autocast to it, on an NVIDIA GPU, and nothing is exported.

    supported: whether the kernel computes the layer's options; others run in PyTorch.
    """
    if EXPORTING or not (supported and AVAILABLE and z.is_cuda) or any(n % 8 for n in weight.shape):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else z.dtype
    return dtype == torch.bfloat16


def mlp(z: Tensor, up: nn.Linear, down: nn.Linear, *, gelu: str = "tanh", dropout: float = 0.0) -> Tensor:
    """Two dense layers with a GELU between them, (..., D) -> (..., D).

    gelu: "tanh", "none" (its exact form) or "quick" (CLIP's z sigmoid(1.702 z))
    """
    if can_fuse(z, up.weight, supported=gelu == "tanh" and not dropout):
        return fused_mlp(z, up, down)
    hidden = quick_gelu(up(z)) if gelu == "quick" else F.gelu(up(z), approximate=gelu)
    return F.dropout(down(F.dropout(hidden, dropout)), dropout)


def quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def layer_norm(z: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over the last dimension, with statistics in float32.

    Under autocast to bf16 the result is bf16, which the dense layer after it would round it to.
    """
    fits = norm.bias is not None and z.shape[-1] <= MOST_WIDTH and torch.is_autocast_enabled("cuda")
    if can_fuse(z, norm.weight, supported=fits and not torch.compiler.is_compiling()):
        return FusedLayerNorm.apply(z, norm.weight, norm.bias, norm.eps)
    return F.layer_norm(z, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def qkv(z: Tensor, layer: nn.Linear, heads: int, queries: int | None = None, *, key_bias: bool = True) -> QKV:
    """Queries, keys and values, (B, N, D) -> three of (B, K, N, Dh); `queries`: only of the first tokens.

    key_bias: whether keys have a bias; if not, the layer's own counts as zero.
    """
    bias = layer.bias if key_bias or layer.bias is None else without_key_bias(layer.bias)
    if queries is None:
        known = bias is not None and key_bias
        if torch.is_grad_enabled() and can_fuse(z, layer.weight, supported=known):
            return fused_qkv(z, layer, heads)
        packed = layer(z) if key_bias else F.linear(z, layer.weight, bias)
        q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v
    width = z.shape[-1]
    wq, wkv = layer.weight.tensor_split([width])
    bq, bkv = (None, None) if bias is None else bias.tensor_split([width])
    q = F.linear(z[:, :queries], wq, bq).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = F.linear(z, wkv, bkv).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def without_key_bias(bias: Tensor) -> Tensor:
    """The bias of a qkv layer with zeros for the keys."""
    q, k, v = bias.chunk(3)
    return torch.cat([q, torch.zeros_like(k), v])


def patch_embedding(maps: Tensor, project: nn.Conv2d) -> Tensor:
    """x_p E of Eq. 1, (B, C, H, W) -> (B, N, D): one matrix product on a GPU, where that is faster."""
    if maps.is_cuda and not EXPORTING:
        return F.linear(patchify(maps, project.stride[0]), project.weight.flatten(1), project.bias)
    return project(maps).flatten(2).mT


def patchify(maps: Tensor, patch: int) -> Tensor:
    """x_p of Eq. 1: (B, C, H, W) -> (B, N, C P P), in the order of a convolution's weight."""
    blocks = maps.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, P, w, P)
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def compile_model(model: nn.Module) -> nn.Module:
    """torch.compile, whose result PyTorch caches for the next start although fused layers are in it."""
    from torch._functorch import config

    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        # the cache key contains the graphs of both passes
        config.autograd_cache_allow_custom_autograd_functions = True
    return torch.compile(model)  # type: ignore[return-value]


def fused_mlp(z: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """The MLP in bf16, with the GELU in the epilogue of the first product."""
    inputs = [t.to(torch.bfloat16) for t in (z.flatten(0, -2), up.weight, up.bias, down.weight, down.bias)]
    if torch.is_grad_enabled():
        output = FusedMlp.apply(*inputs)
    else:
        output = F.linear(dense_gelu(*inputs[:3]), *inputs[3:])
    return output.unflatten(0, z.shape[:-1])


def fused_qkv(z: Tensor, layer: nn.Linear, heads: int) -> QKV:
    """Queries, keys and values in bf16; their gradients are packed by one kernel in the backward pass."""
    inputs = [t.to(torch.bfloat16) for t in (z, layer.weight, layer.bias)]
    return FusedQkv.apply(*inputs, heads)


class FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        before, after = dense_gelu_with_input(z, up, up_bias)
        ctx.save_for_backward(z, up, down, before, after)
        return F.linear(after, down, down_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        z, up, down, before, after = ctx.saved_tensors
        inner, bias_gradient = gelu_backward(gradient @ down, before)
        return inner @ up, inner.mT @ z, bias_gradient, gradient.mT @ after, gradient.sum(0)


class FusedQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Any:
        ctx.save_for_backward(z, weight)
        packed = F.linear(z, weight, bias).unflatten(-1, (3, heads, -1))  # (B, N, 3, K, Dh)
        return packed.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        z, weight = ctx.saved_tensors
        packed, bias_gradient = pack_qkv(q, k, v)
        return (packed @ weight).view_as(z), packed.mT @ z.flatten(0, 1), bias_gradient, None


class FusedLayerNorm(torch.autograd.Function):
    """One kernel each way; torch.compile fuses more than these, so it gets PyTorch's LayerNorm instead."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from vitkit.ops import triton_kernels

        rows = z.reshape(-1, z.shape[-1]).contiguous()
        result, mean, rstd = triton_kernels.layer_norm(rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, mean, rstd)
        return result.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from vitkit.ops import triton_kernels

        rows, weight, mean, rstd = ctx.saved_tensors
        inner, scale, shift = triton_kernels.layer_norm_backward(
            gradient.reshape(rows.shape), rows, weight, mean, rstd
        )
        return inner.view(gradient.shape), scale.to(weight.dtype), shift.to(weight.dtype), None


def empty_gelu_backward(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), before.new_empty(before.shape[1])


@custom_op(empty_gelu_backward)
def gelu_backward(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a GELU from that after it, (M, H), and its sum over tokens, (H,)."""
    from vitkit.ops import triton_kernels  # Triton is slow to import

    return triton_kernels.gelu_backward(gradient, before)


def empty_pack_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, head = q.shape
    return q.new_empty((batch * tokens, 3 * heads * head)), q.new_empty(3 * heads * head)


@custom_op(empty_pack_qkv)
def pack_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three of (B, K, N, Dh) -> (B N, 3 K Dh), and the sum of that over images and tokens."""
    from vitkit.ops import triton_kernels

    return triton_kernels.pack_qkv(q, k, v)
