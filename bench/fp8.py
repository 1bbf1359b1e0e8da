"""What products in fp8 would bring to a training step, and what they would cost in digits.

    python bench/fp8.py --images 256 --width 768

One layer of a ViT: its four products forward and the eight of their gradients, in bf16 and in fp8 (e4m3, and
e5m2 for gradients) with one scale a tensor. An fp8 product wants both sides with the summed index last, so
that what a layer keeps is rounded twice, once turned; "rounding" is a compiled kernel that does both for all
eight tensors, where nothing rounds them on the way. Errors are of a weight's gradient beside float64, with
inputs like those of a layer: normal ones, a sixteenth of them ten times as large.
"""

from collections.abc import Callable

import torch
from fused import asked_shape, timed
from torch import Tensor

KINDS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def scale_of(x: Tensor, kind: torch.dtype) -> Tensor:
    return x.abs().amax().float() / KINDS[kind]


@torch.compile
def both(x: Tensor, scale: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounded, and rounded and turned."""
    rounded = (x.float() / scale).to(kind)
    return rounded, rounded.t().contiguous()


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """a @ b.T in bf16."""
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def like_a_layers(rows: int, columns: int) -> Tensor:
    values = torch.randn(rows, columns, device="cuda")
    values[:, ::16] *= 10
    return values.bfloat16()


def layer(tokens: int, inward: int, outward: int) -> tuple[dict[str, Callable], dict[str, Callable], list]:
    """The three products of a dense layer in bf16 and in fp8, and its roundings."""
    x, y = like_a_layers(tokens, inward), torch.randn(tokens, outward, device="cuda").bfloat16()
    w = 0.02 * torch.randn(outward, inward, device="cuda").bfloat16()
    forward, back = KINDS
    sx, sw, sy = scale_of(x, forward), scale_of(w, forward), scale_of(y, back)
    (x8, xt8), (w8, wt8), (y8, yt8) = both(x, sx, forward), both(w, sw, forward), both(y, sy, back)
    wide = {"forward": lambda: x @ w.t(), "to x": lambda: y @ w, "to w": lambda: y.t() @ x}
    narrow = {
        "forward": lambda: product(x8, w8, sx, sw),
        "to x": lambda: product(y8, wt8, sy, sw),
        "to w": lambda: product(yt8, xt8, sy, sx),
    }
    return wide, narrow, [lambda: both(x, sx, forward), lambda: both(y, sy, back)]


def error(tokens: int, width: int) -> dict[str, float]:
    x, y = like_a_layers(tokens, width), torch.randn(tokens, width, device="cuda").bfloat16()
    x, y = x.double() + 1e-3 * torch.randn_like(x).double(), y.double() + 1e-3 * torch.randn_like(y).double()
    exact = y.t() @ x
    forward, back = KINDS
    sx = scale_of(x, forward)
    _, xt8 = both(x, sx, forward)
    result = {"bf16": y.bfloat16().t() @ x.bfloat16()}
    for name, kind in (("fp8, e5m2", back), ("fp8, e4m3", forward)):
        sy = scale_of(y, kind)
        result[name] = product(both(y, sy, kind)[1], xt8, sy, sx)
    return {name: float((value.double() - exact).norm() / exact.norm()) for name, value in result.items()}


def main() -> None:
    options = asked_shape(__doc__)
    tokens, width = options.images * options.tokens // 16 * 16, options.width
    totals = {"bf16": 0.0, "fp8": 0.0, "rounding": 0.0}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {tokens} tokens of {width}, ms")
    print("| layer | " + " | ".join(f"{k}, {t}" for k in ("forward", "to x", "to w") for t in ("bf16", "fp8"))
          + " | rounding |\n" + "|---" * 8 + "|")  # fmt: skip
    sizes = {"q, k, v": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    for name, (inward, outward) in sizes.items():
        wide, narrow, roundings = layer(tokens, inward * width, outward * width)
        row = []
        for part in wide:
            row += [timed(wide[part]), timed(narrow[part])]
        rounding = sum(timed(one) for one in roundings)
        for kind, value in (("bf16", sum(row[::2])), ("fp8", sum(row[1::2])), ("rounding", rounding)):
            totals[kind] += value
        print(f"| {name} | " + " | ".join(f"{ms:.3f}" for ms in row) + f" | {rounding:.3f} |", flush=True)
    print("a layer: " + ", ".join(f"{name} {value:.2f}" for name, value in totals.items()))
    print({name: f"{value:.1e}" for name, value in error(tokens, width).items()})


if __name__ == "__main__":
    main()
