"""LayerNorm whose result a dense layer reads."""

from torch import Tensor, nn

from vitkit.ops.fused import layer_norm


class LayerNorm(nn.LayerNorm):
    """LayerNorm before a dense layer: in training in bf16 its result is already in bf16."""

    def forward(self, z: Tensor) -> Tensor:
        return layer_norm(z, self)
