"""Multi-head self-attention (App. A, Eq. 5-8), with relative positions (App. D.4) or RoPE as options."""

# B batch, N tokens, D width, K heads, Dh head width

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.models.rope import Turn, rotate
from vitkit.ops.fused import qkv


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 5-8)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qkv_bias: bool = True,
        key_bias: bool = True,
        norm_eps: float | None = None,
        dropout: float = 0.0,
        offsets: int = 0,
    ):
        """`dropout` acts on the attention weights; `offsets` > 0 adds relative positions.

        key_bias  False: the keys' third of the bias counts as zero (DINOv3)
        norm_eps  normalise queries and keys of each head, with this epsilon
        """
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.key_bias = key_bias
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)  # U_qkv
        self.out = nn.Linear(width, width)  # U_msa
        head = width // heads
        self.query_norm = None if norm_eps is None else nn.LayerNorm(head, eps=norm_eps)
        self.key_norm = None if norm_eps is None else nn.LayerNorm(head, eps=norm_eps)
        # App. D.4: one embedding for each offset p_q - p_k in [-(N-1), N-1]
        self.relative = nn.Parameter(torch.empty(offsets, width)) if offsets else None

    def forward(self, z: Tensor, first: int | None = None, turn: Turn | None = None) -> Tensor:
        """Attend along the last but one axis of z, (..., N, D) -> (..., N, D), or (..., first, D).

        first  queries of the first tokens only, which RoPE does not rotate; None: of all tokens
        turn   the rotation of each patch (RoPE)
        """
        q, k, v = self.project(z.flatten(0, -3), first, turn)
        dropout = self.dropout if self.training else 0.0
        bias = None if self.relative is None else self.relative_logits(q, k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # Eq. 6-7
        return self.out(mixed.transpose(1, 2).flatten(2)).unflatten(0, z.shape[:-2])  # Eq. 8

    def weights(self, z: Tensor, turn: Turn | None = None) -> Tensor:
        """A of Eq. 6, (..., K, N, N): the attention weights."""
        q, k, _ = self.project(z.flatten(0, -3), None, turn)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.relative is not None:
            logits = logits + self.relative_logits(q, k.shape[2])
        return logits.softmax(-1).unflatten(0, z.shape[:-2])

    def project(
        self, z: Tensor, first: int | None = None, turn: Turn | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: queries of the first tokens or of all, keys and values, each (B, K, N, Dh)."""
        q, k, v = qkv(z, self.qkv, self.heads, first, key_bias=self.key_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        if turn is not None:
            q, k = q if first else rotate(q, turn), rotate(k, turn)
        return q, k, v

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
