"""Principal components of the patch embedding's filters (Fig. 7 left)."""

# D width, C channels, P side of a filter

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitkit.inspection.components import principal
from vitkit.inspection.subject import array, transformer
from vitkit.models.resnet import StdConv


class Filters(NamedTuple):
    """Filters as tiles of pixels, and the share of the variance that each explains."""

    tiles: np.ndarray  # (count, P, P, C), each of length 1
    variance: np.ndarray  # (count,), in 0..1


def embedding_filters(model: Any, *, count: int = 28) -> Filters:
    """The first principal components of the D filters of the embedding E, as images of P x P pixels.

    Each filter is one observation of P*P*C numbers, and the mean filter is taken away first. A hybrid
    embeds feature maps and not pixels; what looks at pixels there is the root convolution of its stem,
    standardised as it is used. A kernel with fewer than `count` components yields those it has.
    """
    vit = transformer(model)
    kernel = vit.project.weight if vit.stem is None else standardised(vit.stem.root)
    tiles = array(kernel).transpose(0, 2, 3, 1)  # (D, P, P, C)
    found = principal(tiles.reshape(len(tiles), -1), count)
    return Filters(
        found.axes.reshape(-1, *tiles.shape[1:]).astype(np.float32), found.variance.astype(np.float32)
    )


def standardised(conv: StdConv) -> Tensor:
    """The kernel that a standardised convolution applies, (D, C, P, P)."""
    weight = conv.weight - conv.weight.mean((1, 2, 3), keepdim=True)
    variance = weight.square().mean((1, 2, 3), keepdim=True)
    return weight / ((variance + conv.eps).sqrt() if conv.in_variance else variance.sqrt() + conv.eps)
