"""Token merging (ToMe, Bolya et al., ICLR 2023): each layer merges the pairs of patches with similar keys."""

# B batch, T tokens, D width, K heads, Dh head width

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.models.encoder import Block, Encoder, scaled

Pairs = tuple[Tensor, Tensor, Tensor]  # of tokens at even places: merged, kept; where the merged ones go


def encode_merging(
    encoder: Encoder, z: Tensor, count: int, prefix: int, first: int | None = None
) -> tuple[Tensor, Tensor]:
    """z_0 -> LN(z_L) and the sizes (B, T, 1) of its tokens: the number of patches that each one stands for.

    count   tokens to merge in each layer; at most half of the patches are
    prefix  tokens before the patches, which are never merged
    first   compute only these tokens of the last layer, where no others are read
    """
    sizes: Tensor | None = None  # all 1
    for layer, block in enumerate(encoder.blocks):
        assert isinstance(block, Block)
        last = layer == len(encoder.blocks) - 1
        z, sizes = merging_layer(block, z, sizes, count, prefix, first if last else None)
    return encoder.norm(z), torch.ones_like(z[..., :1]) if sizes is None else sizes


def merging_layer(
    block: Block, z: Tensor, sizes: Tensor | None, count: int, prefix: int, first: int | None
) -> tuple[Tensor, Tensor | None]:
    """Eq. 2-3 with proportional attention, and merging between attention and MLP."""
    attention = block.attention
    q, k, v = attention.project(block.norm1(z), first)
    bias = None if sizes is None else sizes.log().mT[:, None].to(q.dtype)  # (B, 1, 1, T)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    mixed = attention.out(mixed.transpose(1, 2).flatten(2))
    z = (z if first is None else z[:, :first]) + scaled(mixed, block.scale1)
    if first is None:  # otherwise only tokens that are never merged are left
        z, sizes = merge(z, sizes, k.mean(1), count, prefix)
    return z + scaled(block.mlp(block.norm2(z)), block.scale2), sizes


def merge(
    z: Tensor, sizes: Tensor | None, keys: Tensor, count: int, prefix: int
) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, T, D) and their sizes (B, T, 1) after merging; a merged token is the mean by size."""
    count = merged_tokens(z.shape[1], count, prefix)
    if not count:
        return z, sizes
    merged, kept, target = match(keys.float(), count, prefix)
    sizes = torch.ones_like(z[..., :1], dtype=torch.float32) if sizes is None else sizes
    rows = torch.cat([z * sizes, sizes], dim=-1)  # (B, T, D + 1)
    even, odd = rows[:, ::2], rows[:, 1::2]
    odd = odd.scatter_add(1, along(target, odd), even.gather(1, along(merged, even)))
    even = even.gather(1, along(kept, even))
    rows = torch.cat([rows[:, :prefix], even[:, (prefix + 1) // 2 :], odd[:, prefix // 2 :]], dim=1)
    total, sizes = rows[..., :-1], rows[..., -1:]
    return (total / sizes).to(z.dtype), sizes


def merged_tokens(tokens: int, count: int, prefix: int) -> int:
    """How many tokens a layer merges: `count`, or half of the patches if there are fewer."""
    return min(count, (tokens - prefix) // 2)


def match(keys: Tensor, count: int, prefix: int) -> Pairs:
    """Bipartite soft matching of keys (B, T, Dh): the most similar of the tokens at even places are merged.

    Each of them has one candidate: the token at an odd place with the largest cosine similarity.
    """
    unit = keys / keys.norm(dim=-1, keepdim=True)
    scores = unit[:, ::2] @ unit[:, 1::2].mT
    rows, columns = (torch.arange(n, device=keys.device) for n in scores.shape[1:])
    protected = (rows < (prefix + 1) // 2)[:, None] | (columns < prefix // 2)
    similarity, candidate = scores.masked_fill(protected, -torch.inf).max(-1)
    order = similarity.argsort(-1, descending=True)
    merged, kept = order[:, :count], order[:, count:]
    if prefix:  # as published: in the order of the image, the protected ones first
        kept = kept.sort(-1).values
    return merged, kept, candidate.gather(1, merged)


def along(index: Tensor, rows: Tensor) -> Tensor:
    """Indices (B, N) of tokens for gather and scatter on rows (B, T, C)."""
    return index[..., None].expand(-1, -1, rows.shape[-1])


def weighted_mean(z: Tensor, sizes: Tensor | None) -> Tensor:
    """The mean of tokens (B, T, D), each weighted by its size (B, T, 1); None: all alike."""
    return z.mean(1) if sizes is None else ((z * sizes).sum(1) / sizes.sum(1)).to(z.dtype)
