"""The kernels of ops/fused.py beside a product and what inductor makes of the rest, each alone.

    python bench/fused.py --images 256 --width 768

For a product with its GELU, every kernel that cuBLASLt offers is timed, in its own order of preference; the
first is what is used. For the kernels in Triton, several shapes of their programs are.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops import cublaslt as epilogue
from vitkit.ops import triton_kernels as kernels

CHOICES = 6
SHAPES = [(128, 8, 256, 4), (128, 8, 128, 2), (256, 8, 128, 2), (512, 8, 128, 2), (256, 8, 256, 4),
          (128, 2, 1024, 4), (128, 4, 512, 4), (256, 4, 512, 4), (256, 4, 256, 2)]  # fmt: skip


def timed(run: Callable[[], Any], rounds: int = 5, times: int = 10) -> float:
    """Milliseconds of a call, by the GPU's own clock."""
    run()
    found = []
    for _ in range(rounds):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(times):
            run()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended) / times)
    return statistics.median(found)


def each_choice(run: Callable[[], Any]) -> list[float]:
    usual, found = epilogue.planned, []
    for choice in range(CHOICES):
        plans: dict[Any, epilogue.Plan] = {}

        def planned(*key: Any, choice: int = choice, plans: dict[Any, Any] = plans) -> epilogue.Plan:
            if key not in plans:
                plans[key] = epilogue.Plan(*key, choice=choice)
            return plans[key]

        epilogue.planned = planned  # type: ignore[assignment]
        try:
            found.append(timed(run))
        except RuntimeError as error:
            print(f"    choice {choice}: {error}")
            break
    epilogue.planned = usual
    return found


@torch.compile
def plain_gelu(before: Tensor) -> Tensor:
    return F.gelu(before, approximate="tanh")


@torch.compile
def plain_back(gradient: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten.gelu_backward(gradient, before, approximate="tanh")
    return found, found.sum(0)


@torch.compile
def plain_pack(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2).flatten(2).flatten(0, 1)
    return found, found.sum(0)


def asked_shape(about: str) -> argparse.Namespace:
    """Of what a layer is given."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--width", type=int, default=768)
    return parser.parse_args()


def main() -> None:
    options = asked_shape(__doc__)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    b, n, d, h = options.images, options.tokens, options.width, 4 * options.width
    m = b * n
    z, up, bias = torch.randn(m, d, **half), torch.randn(h, d, **half) / d**0.5, torch.randn(h, **half)
    before, slow = F.linear(z, up, bias), torch.randn(m, h, **half)
    heads = torch.randn(3, b, n, d // 64, 64, **half).transpose(2, 3).unbind(0)
    print(f"{b} images of {n} tokens, width {d}; milliseconds")
    for name, run in {
        "product": lambda: F.linear(z, up, bias), "gelu": lambda: plain_gelu(before),
        "gelu back and sums": lambda: plain_back(slow, before), "pack and sums": lambda: plain_pack(*heads),
    }.items():  # fmt: skip
        print(f"  {name}: {timed(run):.3f}", flush=True)
    for name, run in {
        "product with gelu": lambda: epilogue.dense_gelu(z, up, bias),
        "the same, kept": lambda: epilogue.dense_gelu_with_input(z, up, bias),
    }.items():
        print(f"  {name}: " + ", ".join(f"{t:.3f}" for t in each_choice(run)), flush=True)
    for name, constant, run in (
        ("gelu_backward", "GELU_BACK", lambda: kernels.gelu_backward(slow, before)),
        ("pack", "PACK", lambda: kernels.pack(*heads)),
    ):
        for shape in SHAPES:
            setattr(kernels, constant, shape)
            print(f"  {name} by {shape}: {timed(run):.3f}", flush=True)


if __name__ == "__main__":
    main()
