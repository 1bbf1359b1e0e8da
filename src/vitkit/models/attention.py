"""Multi-head self-attention (App. A, Eq. 5-8), with relative positions as an option (App. D.4)."""

# B batch, N tokens, D width, K heads, Dh head width

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitkit.models.fused import in_half, project_qkv

KERNELS = [  # by speed on a GPU that has them all; each takes what those before it cannot
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
]  # fmt: skip


@contextmanager
def quick_attention(device: torch.device | str) -> Iterator[None]:
    """Inside, attention runs by the quickest kernel that the device has; PyTorch's own order is cautious."""
    if has_quick(str(device)):
        with sdpa_kernel(KERNELS, set_priority=True):
            yield
    else:
        yield


@cache
def has_quick(device: str) -> bool:
    """Whether cuDNN's attention is quick there: on Hopper GPUs and later ones."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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

        first: only so many tokens look at all the others; None, every one does.
        """
        q, k, v = self.split(z.flatten(0, -3), first)
        dropout = self.dropout if self.training else 0.0
        bias = None if self.relative is None else self.relative_logits(q, k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # Eq. 6-7
        return self.out(mixed.transpose(1, 2).flatten(2)).unflatten(0, z.shape[:-2])  # Eq. 8

    def weights(self, z: Tensor) -> Tensor:
        """A of Eq. 6, (..., K, N, N): what each token looks at."""
        q, k, _ = self.split(z.flatten(0, -3))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.relative is not None:
            logits = logits + self.relative_logits(q, k.shape[2])
        return logits.softmax(-1).unflatten(0, z.shape[:-2])

    def split(self, z: Tensor, first: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: queries of the first tokens or of all, keys and values, each (B, K, N, Dh)."""
        if (
            first is None
            and torch.is_grad_enabled()
            and self.qkv.bias is not None
            and in_half(z, self.qkv.weight)
        ):
            return project_qkv(z, self.qkv, self.heads)
        if first is None:
            qkv = self.qkv(z).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, K, Dh)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        width, bias = z.shape[-1], self.qkv.bias
        wq, wkv = self.qkv.weight.tensor_split([width])
        bq, bkv = (None, None) if bias is None else bias.tensor_split([width])
        q = F.linear(z[:, :first], wq, bq).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = F.linear(z, wkv, bkv).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
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
