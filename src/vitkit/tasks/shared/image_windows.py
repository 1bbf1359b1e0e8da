"""Large images in windows of the model's size: the outputs of a whole image as the mean over its windows."""

# B windows, K classes; H, W pixels of the resized image, h, w of a window; cells: rows of outputs

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.views import View, apply
from vitkit.errors import Error
from vitkit.models.card import Preprocessing
from vitkit.models.dense.eomt import EomtConfig
from vitkit.models.dense.windows import window_starts

BATCH = 8  # windows that are computed at a time
Size = tuple[int, int]


def covering(size: Size, window: Size, patch: int) -> Size:
    """The size to which an image is resized to cover a window: one side fits, the other is longer.

    It is in whole patches, or the side of the window.

    >>> covering((600, 1500), (512, 512), 16), covering((512, 512), (512, 512), 16)
    ((512, 1280), (512, 512))
    """
    scale = max(side / own for side, own in zip(window, size, strict=True))
    height, width = (
        max(side, round(own * scale / patch) * patch) for side, own in zip(window, size, strict=True)
    )
    return height, width


def covering_image(
    content: bytes | np.ndarray, size: Size, config: Any, preprocessing: Preprocessing
) -> Tensor:
    """An image of this size as windows are cut from it, uint8 (3, H, W)."""
    if getattr(config, "task", "") != "segment" or getattr(config, "output", "semantic") == "masks":
        raise Error(
            "view windows is for semantic segmentation, not for this model; use another --view",
            code="request.conflict",
        )
    whole = covering(size, config.image_size, config.stride)
    view = View(size=whole, crop="squash", interpolation=preprocessing.interpolation)
    return apply(content, view, np.random.default_rng(0))  # which draws nothing at random


def in_image_windows(compute: Callable[[Tensor], Tensor], image: Tensor, config: Any) -> Tensor:
    """The outputs (K, H / cell, W / cell) of an image (3, H, W), from those of windows of the model's size.

    compute: uint8 images (B, 3, h, w) to outputs (B, K, ...), by any engine. Windows overlap by a third, and
    the outputs of a cell are the mean of the windows that show it: of logits, or of the scores of EoMT. So
    memory and answers do not depend on how many images are predicted at a time.
    """
    (h, w), patch, scale = config.image_size, config.stride, 2**config.upscale
    if h % patch or w % patch:
        raise Error(
            f"windows of {h} x {w} pixels are not whole patches of {patch}; use view fit",
            code="model.unsupported",
        )
    axes = [
        window_starts(side, own, max(1, own * 2 // (3 * patch)) * patch)
        for side, own in zip(image.shape[1:], (h, w), strict=True)
    ]
    places = list(product(*axes))
    if len(places) == 1:
        return compute(image[None])[0]
    cell, logarithms = Fraction(patch, scale), isinstance(config, EomtConfig)
    total, count = torch.empty(0), torch.empty(0)
    for first in range(0, len(places), BATCH):
        part = places[first : first + BATCH]
        values = compute(torch.stack([image[:, y : y + h, x : x + w] for y, x in part])).float()
        for (top, left), row in zip(part, values.exp() if logarithms else values, strict=True):
            if not len(total):
                rows, columns = (int(side / cell) for side in image.shape[1:])
                total, count = row.new_zeros(len(row), rows, columns), row.new_zeros(rows, columns)
            y, x = int(top / cell), int(left / cell)
            total[:, y : y + row.shape[1], x : x + row.shape[2]] += row
            count[y : y + row.shape[1], x : x + row.shape[2]] += 1
    mean = total / count
    return mean.log() if logarithms else mean
