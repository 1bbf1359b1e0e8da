"""The MLP in prediction on an x86 CPU, with bias and GELU within the matrix product."""

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from vitkit.ops import fused

X86 = platform.machine() in ("x86_64", "AMD64")  # it was not measured on other processors


def mlp(z: Tensor, up: nn.Linear, down: nn.Linear, *, gelu: str = "tanh", dropout: float = 0.0) -> Tensor:
    """As ops.fused.mlp, but faster on a CPU, where PyTorch's tanh GELU is slow."""
    if gelu == "tanh" and can_fuse(z, up):
        hidden = torch.ops.mkldnn._linear_pointwise(z, up.weight, up.bias, "gelu", [], "tanh")
        return F.linear(hidden, down.weight, down.bias)
    return fused.mlp(z, up, down, gelu=gelu, dropout=dropout)


def can_fuse(z: Tensor, layer: nn.Linear) -> bool:
    """Whether oneDNN's operation can compute the layer: float32 on a CPU, and nobody follows the operations.

    It has no derivative, and exports, tracing, torch.func and counters of operations do not know it.
    """
    if torch.compiler.is_compiling() or fused.EXPORTING or torch.is_grad_enabled() or not X86:
        return False
    return (
        z.device.type == "cpu"
        and z.dtype == layer.weight.dtype == torch.float32
        and z.numel() > 0
        and layer.bias is not None
        and type(z) is Tensor
        and type(layer.weight) in (Tensor, nn.Parameter)  # not sharded
        and not torch.is_autocast_enabled("cpu")
        and not is_followed(z)
        and has_operation()
    )


@cache
def has_operation() -> bool:
    """Whether oneDNN has this operation here, for weights that are not in its own layout."""
    ones = torch.ones(8, 8)
    try:
        torch.ops.mkldnn._linear_pointwise(ones, ones, ones[0], "gelu", [], "tanh")
    except (RuntimeError, AttributeError):  # PyTorch without oneDNN, or another version of it
        return False
    return True


def is_followed(z: Tensor) -> bool:
    """Whether something follows each operation on a tensor: a mode, torch.func, forward AD or tracing."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.is_functorch_wrapped_tensor(z)
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )
