"""Triton kernels for training in bf16: gradients with the sums that biases need, and LayerNorm.

The gradient of a bias is the sum of its layer's gradient over all tokens. torch.compile reads that gradient
again for the sum, and computes that of a GELU twice. Autocast computes LayerNorm on float32 copies of its
input and its gradient. Imported on first use, where Triton is installed.
"""

# M tokens of all images, D width, H hidden, B batch, N tokens of an image, K heads, Dh head width
# A program handles BLOCK columns and CHUNK rows, ROWS at a time; the sums of chunks are added at the end

import torch
import triton
import triton.language as tl
from torch import Tensor

GELU, PACK = (128, 2, 1024, 4), (512, 8, 128, 2)  # CHUNK, ROWS, BLOCK, warps; by bench/fused.py
NORM_CHUNK, NORM_TILE, NORM_WARPS = 32, 4096, 8  # of LayerNorm; a tile of ROWS x BLOCK numbers, BLOCK >= D


@triton.jit
def slope(x):
    """The derivative of the tanh GELU, written as x * s(a x + b x^3) with a sigmoid s: no tanh is needed."""
    square = x * x
    share = 1 / (1 + tl.exp2(x * (-2.302208198 - 0.1029432396 * square)))  # a and b times -log2(e)
    return share + share * (1 - share) * x * (1.5957691216 + 0.2140644488 * square)  # a + 3 b x^2


@triton.jit
def gelu_backward_kernel(
    gradient, before, inner, sums, rows, columns,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(1) * CHUNK
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in range(0, CHUNK, ROWS):
        row = first + at + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        place = row.to(tl.int64) * columns + column
        x = tl.load(before + place, inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, inside, other=0.0).to(tl.float32)
        result = g * slope(x)
        tl.store(inner + place, result.to(inner.dtype.element_ty), inside)
        total += result
    whole = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(1) * columns + whole, tl.sum(total, 0), whole < columns)


@triton.jit
def pack_qkv_kernel(
    q, k, v, out, sums, rows, tokens, width, head, qi, qt, qh, ki, kt, kh, vi, vt, vh,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """qi, qt, qh: strides of q by image, token and head; likewise for k and v."""
    part = tl.program_id(2)
    given, by_image, by_token, by_head = q, qi, qt, qh
    if part == 1:
        given, by_image, by_token, by_head = k, ki, kt, kh
    if part == 2:
        given, by_image, by_token, by_head = v, vi, vt, vh
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    across = column // head * by_head + column % head
    first = tl.program_id(1) * CHUNK
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in range(0, CHUNK, ROWS):
        row = first + at + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        down = (row // tokens).to(tl.int64) * by_image + row % tokens * by_token
        g = tl.load(given + down + across, inside, other=0.0)
        tl.store(out + (row.to(tl.int64) * 3 + part) * width + column, g, inside)
        total += g.to(tl.float32)
    whole = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + (tl.program_id(1) * 3 + part) * width + whole, tl.sum(total, 0), whole < width)


@triton.jit
def layer_norm_kernel(
    z, weight, bias, out, means, rstds, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)[None, :]
    each = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = each[:, None]
    inside = (row < rows) & (column < width)
    place = row.to(tl.int64) * width + column
    x = tl.load(z + place, inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / width
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    scale = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, column < width, other=0.0).to(tl.float32)
    result = centred * rstd[:, None] * scale + shift
    tl.store(out + place, result.to(out.dtype.element_ty), inside)
    tl.store(means + each, mean, each < rows)
    tl.store(rstds + each, rstd, each < rows)


@triton.jit
def layer_norm_backward_kernel(
    gradient, z, weight, means, rstds, inner, scale_sums, shift_sums, rows, width,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    first = tl.program_id(0) * CHUNK
    scale_total = tl.zeros((ROWS, BLOCK), tl.float32)
    shift_total = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in range(0, CHUNK, ROWS):
        each = first + at + tl.arange(0, ROWS)
        row = each[:, None]
        inside = (row < rows) & (column < width)
        place = row.to(tl.int64) * width + column
        x = tl.load(z + place, inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, inside, other=0.0).to(tl.float32)
        mean = tl.load(means + each, each < rows, other=0.0)[:, None]
        rstd = tl.load(rstds + each, each < rows, other=0.0)[:, None]
        normed = tl.where(inside, (x - mean) * rstd, 0.0)
        scaled = g * scale
        along = tl.sum(scaled * normed, 1)[:, None] / width
        level = tl.sum(scaled, 1)[:, None] / width
        result = (scaled - normed * along - level) * rstd
        tl.store(inner + place, result.to(inner.dtype.element_ty), inside)
        scale_total += g * normed
        shift_total += g
    whole = tl.arange(0, BLOCK)
    at = tl.program_id(0) * width + whole
    tl.store(scale_sums + at, tl.sum(scale_total, 0), whole < width)
    tl.store(shift_sums + at, tl.sum(shift_total, 0), whole < width)


def gelu_backward(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a GELU from that after it, (M, H), and its sum, (H,)."""
    gradient, before = gradient.contiguous(), before.contiguous()
    rows, columns = before.shape
    chunk, each, block, warps = GELU
    inner, chunks = torch.empty_like(before), triton.cdiv(rows, chunk)
    sums = before.new_empty((chunks, columns), dtype=torch.float32)
    with torch.cuda.device(before.device):
        gelu_backward_kernel[(triton.cdiv(columns, block), chunks)](
            gradient, before, inner, sums, rows, columns,
            CHUNK=chunk, ROWS=each, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return inner, sums.sum(0).to(before.dtype)


def pack_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three of (B, K, N, Dh) -> (B N, 3 K Dh), and the sum of that over images and tokens."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, tokens, head = q.shape
    rows, width = batch * tokens, heads * head
    chunk, each, block, warps = PACK
    out, chunks = q.new_empty((rows, 3 * width)), triton.cdiv(rows, chunk)
    sums = q.new_empty((chunks, 3 * width), dtype=torch.float32)
    strides = [part.stride(axis) for part in (q, k, v) for axis in (0, 2, 1)]
    with torch.cuda.device(q.device):
        pack_qkv_kernel[(triton.cdiv(width, block), chunks, 3)](
            q, k, v, out, sums, rows, tokens, width, head, *strides,
            CHUNK=chunk, ROWS=each, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out, sums.sum(0).to(q.dtype)


def layer_norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm of (M, D) in bf16, and the mean and the inverse deviation of each row, (M,)."""
    rows, width = z.shape
    block, each = tile_of(width)
    out = torch.empty_like(z, dtype=torch.bfloat16)
    mean, rstd = (z.new_empty(rows, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device(z.device):
        layer_norm_kernel[(triton.cdiv(rows, each),)](
            z, weight, bias, out, mean, rstd, rows, width, eps,
            ROWS=each, BLOCK=block, num_warps=NORM_WARPS,
        )  # fmt: skip
    return out, mean, rstd


def layer_norm_backward(
    gradient: Tensor, z: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, (M, D), and of the scale and the shift, (D,), from that of the result."""
    gradient = gradient.contiguous()
    rows, width = z.shape
    (block, each), chunks = tile_of(width), triton.cdiv(rows, NORM_CHUNK)
    inner = torch.empty_like(z)
    sums = z.new_empty((2, chunks, width), dtype=torch.float32)
    with torch.cuda.device(z.device):
        layer_norm_backward_kernel[(chunks,)](
            gradient, z, weight, mean, rstd, inner, sums[0], sums[1], rows, width,
            CHUNK=NORM_CHUNK, ROWS=each, BLOCK=block, num_warps=NORM_WARPS,
        )  # fmt: skip
    scale, shift = sums.sum(1)
    return inner, scale, shift


def tile_of(width: int) -> tuple[int, int]:
    """BLOCK and ROWS for LayerNorm of this width: a whole row in each line of the tile."""
    block = triton.next_power_of_2(width)
    return block, min(NORM_CHUNK, max(1, NORM_TILE // block))
