"""The MLP of a Transformer block: two layers with a GELU, or a gated one (SwiGLU)."""

# D width, M hidden width

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.ops.cpu_mlp import mlp

GELU = {"tanh": "tanh", "erf": "none", "quick": "quick"}  # our names -> the forms of ops.cpu_mlp.mlp


class Mlp(nn.Module):
    """Two layers with a GELU between them; dropout after each dense layer (App. B.1)."""

    def __init__(self, width: int, hidden: int, *, gelu: str = "tanh", dropout: float = 0.0):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.approximate = GELU[gelu]
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor) -> Tensor:
        dropout = self.dropout.p if self.training else 0.0
        return mlp(z, self.up, self.down, gelu=self.approximate, dropout=dropout)


class SwiGlu(nn.Module):
    """W_down (silu(W_gate z) * (W_value z)); `up` has the rows of W_gate, then those of W_value.

    EVA-02 normalises the product before W_down.
    """

    def __init__(self, width: int, hidden: int, *, norm_eps: float | None = None, dropout: float = 0.0):
        """`hidden` is the width of the product; `norm_eps`: normalise it with this epsilon."""
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden)
        self.norm = None if norm_eps is None else nn.LayerNorm(hidden, eps=norm_eps)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor) -> Tensor:
        gate, value = self.up(z).chunk(2, -1)
        hidden = self.dropout(F.silu(gate) * value)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return self.dropout(self.down(hidden))


def swiglu_width(width: int, ratio: float = 4.0, align: int = 8) -> int:
    """The hidden width of a SwiGLU that replaces an MLP of this ratio: 2/3 of it, rounded up to `align`.

    >>> swiglu_width(1536), swiglu_width(1280, ratio=6), swiglu_width(4096, ratio=3, align=64)
    (4096, 5120, 8192)
    """
    hidden = int(width * ratio * 2 / 3)
    return hidden + -hidden % align
