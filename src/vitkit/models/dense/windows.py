"""Sliding windows: the outputs of a large image as the mean over overlapping windows of it."""

# B batch, C channels; H, W pixels; h, w cells

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops import fused

Size = tuple[int, int]


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Where the windows along an axis begin; the last is moved back to end with the image.

    >>> window_starts(1024, 512, 341), window_starts(512, 512, 341), window_starts(300, 512, 341)
    ([0, 341, 512], [0], [0])
    """
    count = max(length - window + stride - 1, 0) // stride + 1
    return [max(0, min(i * stride + window, length) - window) for i in range(count)]


def windowed(
    forward: Callable[[Tensor], Tensor], images: Tensor, window: Size, stride: Size,
    cell: int | Fraction = 1,
) -> Tensor:  # fmt: skip
    """The mean of forward(window) over windows of images (B, C, H, W) -> outputs (B, K, h, w).

    forward  images of a window's size, or of the whole image where it is smaller, to outputs whose rows and
             columns cover `cell` pixels each; windows must begin at multiples of `cell`
    """
    sizes = (images.shape[-2], images.shape[-1])
    starts = [window_starts(*axis) for axis in zip(sizes, window, stride, strict=True)]
    assert not any(start % cell for axis in starts for start in axis), "windows begin at whole cells"
    height, width = (min(pair) for pair in zip(sizes, window, strict=True))
    places = list(product(*starts))
    windows = [images[..., top : top + height, left : left + width] for top, left in places]
    outputs: Iterable[Tensor]
    if fused.EXPORTING:  # all in one batch, or the graph would hold the model once for each window
        outputs = forward(torch.cat(windows)).unflatten(0, (len(places), -1))
    else:
        outputs = map(forward, windows)
    h, w = (int(-(-side // cell)) for side in sizes)
    total, count = torch.empty(0), torch.zeros(h, w, device=images.device)
    for number, ((top, left), part) in enumerate(zip(places, outputs, strict=True)):
        y, x = int(top // cell), int(left // cell)
        bottom, right = y + part.shape[-2], x + part.shape[-1]
        around = (x, w - right, y, h - bottom)
        if number == 0:
            total = F.pad(part, around)
        elif fused.EXPORTING:  # additions to slices take long to trace
            total = total + F.pad(part, around)
        else:
            total[..., y:bottom, x:right] += part
        count[y:bottom, x:right] += 1
    return total / count.to(total.dtype)
