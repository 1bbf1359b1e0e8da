"""Images with their patches permuted, or shifted: what a model's inductive bias makes of them."""

# B images, C channels; H, W pixels; g cells a side

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import Error

DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))  # rows and columns: right, left, down, up


def shuffled(images: Tensor, cells: int, places: Sequence[int], seed: int = 0) -> Tensor:
    """Each image (C, H, W) cut into g x g equal cells, which are put back in another order.

    The order depends on the seed, g and the image's place in its data set alone: it is the same for every
    model, whatever the size of its images.
    """
    b, c, h, w = images.shape
    if cells < 1 or h % cells or w % cells:
        raise Error(f"an image of {h} x {w} pixels cannot be cut into {cells} x {cells} equal cells")
    cut = images.reshape(b, c, cells, h // cells, cells, w // cells).permute(0, 2, 4, 1, 3, 5)
    cut = cut.reshape(b, cells * cells, c, h // cells, w // cells)
    orders = [np.random.default_rng((seed, cells, place)).permutation(cells * cells) for place in places]
    moved = torch.stack([one[torch.from_numpy(order)] for one, order in zip(cut, orders, strict=True)])
    back = moved.reshape(b, cells, cells, c, h // cells, w // cells).permute(0, 3, 1, 4, 2, 5)
    return back.reshape(b, c, h, w)


def shifted(images: Tensor, pixels: int, places: Sequence[int], seed: int = 0) -> Tensor:
    """Each image moved by so many pixels to one of four sides; what comes in repeats the edge.

    The side depends on the seed and the image's place in its data set alone.
    """
    h, w = images.shape[2:]
    if not 0 <= pixels < min(h, w):
        raise Error(f"an image of {h} x {w} pixels cannot be shifted by {pixels}")
    rows, columns = torch.arange(h), torch.arange(w)
    made = []
    for image, place in zip(images, places, strict=True):
        down, right = DIRECTIONS[np.random.default_rng((seed, place)).integers(len(DIRECTIONS))]
        made.append(
            image[:, (rows - down * pixels).clamp(0, h - 1)][:, :, (columns - right * pixels).clamp(0, w - 1)]
        )
    return torch.stack(made)
