"""Multi-head self-attention (App. A, Eq. 5-8), with relative positions as an option (App. D.4)."""

# B batch, N tokens, D width, K heads, Dh head width

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.ops.fused import qkv


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 5-8)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        offsets: int = 0,
    ):
        """`dropout` acts on the attention weights; `offsets` > 0 adds relative positions."""
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)  # U_qkv
        self.out = nn.Linear(width, width)  # U_msa
        # App. D.4: one embedding for each offset p_q - p_k in [-(N-1), N-1]
        self.relative = nn.Parameter(torch.empty(offsets, width)) if offsets else None

    def forward(self, z: Tensor, first: int | None = None) -> Tensor:
        """Attend along the last but one axis of z, (..., N, D) -> (..., N, D), or (..., first, D).

        first: queries of the first tokens only; None: of all tokens.
        """
        q, k, v = self.project(z.flatten(0, -3), first)
        dropout = self.dropout if self.training else 0.0
        bias = None if self.relative is None else self.relative_logits(q, k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # Eq. 6-7
        return self.out(mixed.transpose(1, 2).flatten(2)).unflatten(0, z.shape[:-2])  # Eq. 8

    def weights(self, z: Tensor) -> Tensor:
        """A of Eq. 6, (..., K, N, N): the attention weights."""
        q, k, _ = self.project(z.flatten(0, -3))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.relative is not None:
            logits = logits + self.relative_logits(q, k.shape[2])
        return logits.softmax(-1).unflatten(0, z.shape[:-2])

    def project(self, z: Tensor, first: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: queries of the first tokens or of all, keys and values, each (B, K, N, Dh)."""
        return qkv(z, self.qkv, self.heads, first)

    def relative_logits(self, q: Tensor, n: int) -> Tensor:
        """App. D.4: the content queries against the embedding of each offset, (B, K, queries, N).

        The embeddings act as extra keys, so each head sees its own Dh columns of them, and the
        logits are scaled as those of the content are.
        """
        assert self.relative is not None
        keys = self.relative.unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (K, 2N-1, Dh)
        by_offset = q @ keys.mT * q.shape[-1] ** -0.5  # (B, K, N, 2N-1)
        place = torch.arange(n, device=q.device)
        offset = place[: q.shape[2], None] - place[None, :] + n - 1  # (queries, N), p_q - p_k from 0
        return by_offset.gather(-1, offset.expand(*by_offset.shape[:2], *offset.shape))


class AttentionPool(nn.Module):
    """One learned query reads all tokens, then an MLP: the attention-pooling ("MAP") head."""

    def __init__(self, width: int, heads: int, mlp: nn.Module, *, eps: float):
        super().__init__()
        self.heads = heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp

    def forward(self, z: Tensor) -> Tensor:
        q = self.query(self.probe).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (1, K, 1, Dh)
        kv = self.key_value(z).unflatten(-1, (2, self.heads, -1))  # (B, N, 2, K, Dh)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q.expand(len(z), -1, -1, -1), k, v)
        y = self.out(mixed.transpose(1, 2).flatten(2))  # (B, 1, D)
        return (y + self.mlp(self.norm(y)))[:, 0]
