"""A way to try: gradients of biases summed while the gradient is written, by kernels in Triton.

A layer's bias has the sum of its gradient over all tokens as its own. Inductor reads the gradient again for
it, and of GELU computes it again too. `install` puts these kernels into our models for one process; on the
H200 they have brought nothing that could be seen (docs/speed.md), so the package does without.

    python bench/summing.py             each kernel alone beside what inductor makes of the same, for B/16
"""

# M tokens of all images, D width, H hidden, B batch, N tokens of an image, K heads, Dh head width
# A program has BLOCK columns and CHUNK rows, ROWS of them at a time; the sums of chunks are added up later.

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from vitkit.models.attention import Attention
from vitkit.models.encoder import Mlp

CHUNK, ROWS, BLOCK, WARPS = 256, 8, 256, 4


@triton.jit
def slope_and_share(x):
    """Of GELU by tanh: x * s(x), where s is a sigmoid, so that no tanh is needed; s, and the slope at x."""
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    share = tl.sigmoid(inner)
    slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return share, slope


@triton.jit
def gelu_kernel(given, out, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    x = tl.load(given + place, inside).to(tl.float32)
    share, _ = slope_and_share(x)
    tl.store(out + place, x * share, inside)


@triton.jit
def gelu_back_kernel(
    gradient, before, out, sums, rows, columns, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(1) * CHUNK
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in range(0, CHUNK, ROWS):
        row = first + at + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        place = row.to(tl.int64) * columns + column
        x = tl.load(before + place, inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, inside, other=0.0).to(tl.float32)
        _, slope = slope_and_share(x)
        found = (g * slope).to(out.dtype.element_ty)
        tl.store(out + place, found, inside)
        total += found.to(tl.float32)
    whole = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(1) * columns + whole, tl.sum(total, 0), whole < columns)


@triton.jit
def pack_kernel(
    q, k, v, out, sums, rows, tokens, width, head, qi, qt, qh, ki, kt, kh, vi, vt, vh,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """qi, qt, qh: steps in memory from one image, token and head of q to the next; of k and v likewise."""
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


@triton_op("vitkit::gelu", mutates_args={})
def gelu(before: Tensor) -> Tensor:
    out, size = torch.empty_like(before), 1024
    count = before.numel()
    wrap_triton(gelu_kernel)[(triton.cdiv(count, size),)](before, out, count, SIZE=size)
    return out


@triton_op("vitkit::gelu_back", mutates_args={})
def gelu_back(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a GELU, and the sum of it over all but the last axis."""
    columns = before.shape[-1]
    rows = before.numel() // columns
    out, chunks = torch.empty_like(before), triton.cdiv(rows, CHUNK)
    sums = before.new_empty((chunks, columns), dtype=torch.float32)
    wrap_triton(gelu_back_kernel)[(triton.cdiv(columns, BLOCK), chunks)](
        gradient, before, out, sums, rows, columns, CHUNK=CHUNK, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS
    )
    return out, sums.sum(0)


@triton_op("vitkit::pack", mutates_args={})
def pack(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three of (B, K, N, Dh) -> (B, N, 3 K Dh), and the sum of that over images and tokens."""
    batch, heads, tokens, head = q.shape
    rows, width = batch * tokens, heads * head
    out, chunks = q.new_empty((batch, tokens, 3 * width)), triton.cdiv(rows, CHUNK)
    sums = q.new_empty((chunks, 3 * width), dtype=torch.float32)
    steps = [given.stride(axis) for given in (q, k, v) for axis in (0, 2, 1)]
    wrap_triton(pack_kernel)[(triton.cdiv(width, BLOCK), chunks, 3)](
        q,
        k,
        v,
        out,
        sums,
        rows,
        tokens,
        width,
        head,
        *steps,
        CHUNK=CHUNK,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out, sums.sum(0)


class UpGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        before = F.linear(z, weight, bias)
        ctx.save_for_backward(z, weight, before)
        return gelu(before)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        z, weight, before = ctx.saved_tensors
        found, sums = gelu_back(gradient.contiguous(), before)
        return of_linear(found, z, weight, sums)


class ProjectQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Any:
        ctx.save_for_backward(z, weight)
        qkv = F.linear(z, weight, bias).unflatten(-1, (3, heads, -1))  # (B, N, 3, K, Dh)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        z, weight = ctx.saved_tensors
        found, sums = pack(*(t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)))
        return *of_linear(found, z, weight, sums), None


def of_linear(gradient: Tensor, z: Tensor, weight: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of what a dense layer was given, from that of what it gave and the sums of that."""
    rows = gradient.flatten(0, -2)
    return gradient @ weight, rows.mT @ z.flatten(0, -2), sums.to(weight.dtype)


def install() -> None:
    """From here on, models of this process use them; in bf16 on a GPU, without dropout."""
    plain = Attention.split

    def up(self: Mlp, z: Tensor) -> Tensor:
        half = [t.to(torch.bfloat16) for t in (z, self.up.weight, self.up.bias)]
        with torch.autocast("cuda", enabled=False):
            found = UpGelu.apply(*half)
        return self.down(found)

    def split(self: Attention, z: Tensor, first: int | None = None) -> Any:
        if first is not None:
            return plain(self, z, first)
        half = [t.to(torch.bfloat16) for t in (z, self.qkv.weight, self.qkv.bias)]
        with torch.autocast("cuda", enabled=False):
            return ProjectQKV.apply(*half, self.heads)

    Mlp.forward, Attention.split = up, split


def plain_back(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten.gelu_backward(gradient, before, approximate="tanh")
    return found, found.flatten(0, -2).sum(0)


def plain_pack(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2).flatten(2)
    return found, found.flatten(0, -2).sum(0)


def main() -> None:
    """Gigabytes a second, counting one read and one write of everything."""
    from triton.testing import do_bench

    wide = torch.randn(2, 256, 197, 3072, device="cuda", dtype=torch.bfloat16).unbind(0)
    heads = torch.randn(3, 256, 197, 12, 64, device="cuda", dtype=torch.bfloat16).transpose(2, 3).unbind(0)
    cases = {"gelu": (gelu, lambda x: F.gelu(x, approximate="tanh"), wide[:1], 2),
             "gelu_back": (gelu_back, plain_back, wide, 3), "pack": (pack, plain_pack, heads, 6)}  # fmt: skip
    ways = [(256, 8, 256, 4), (128, 8, 256, 4), (128, 16, 128, 4), (64, 8, 256, 4), (64, 16, 256, 8),
            (128, 4, 512, 4), (256, 16, 128, 8), (32, 8, 512, 8)]  # fmt: skip
    for name, (ours, plain, given, passes) in cases.items():
        moved = passes * given[0].nbytes / 1e6
        milliseconds = do_bench(lambda: torch.compile(plain)(*given))  # noqa: B023
        print(f"{name}: inductor {milliseconds:.3f} ms, {moved / milliseconds:,.0f} GB/s", flush=True)
        for way in ways if name != "gelu" else ways[:1]:
            globals().update(zip(("CHUNK", "ROWS", "BLOCK", "WARPS"), way, strict=True))
            milliseconds = do_bench(lambda: ours(*given))  # noqa: B023
            print(f"    {way}: {milliseconds:.3f} ms, {moved / milliseconds:,.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()
