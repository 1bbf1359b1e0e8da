"""The MLP in prediction on an x86 CPU, with bias and GELU within the matrix product."""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    It has no gradient, torch.compile and exports have operations of their own, and a FlopCounterMode does not
    know it.
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
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()
    )
