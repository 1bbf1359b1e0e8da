"""Embeddings: filters of the patch embedding, similarity of positions, tokens as colours."""

# B batch, N patches, D width; h, w grid of patches
# D width, C channels, P side of a filter
# N patches, D width; H, W pixels; h, w grid of patches
# B images, C channels; H, W pixels; g cells a side

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.inspection.subject import array, batches, grid_for, lead_of, still, transformer
from vitkit.models.resnet import StdConv
from vitkit.models.vit import grid_of


class Components(NamedTuple):
    """The main directions in which rows differ: orthonormal, the strongest first."""

    axes: np.ndarray  # (count, columns)
    variance: np.ndarray  # (count,), each one's share of the whole variance, in 0..1
    mean: np.ndarray  # (columns,), what is taken away from each row first


def principal(rows: np.ndarray, count: int) -> Components:
    """The first `count` components, or all where there are fewer.

    A component and its negative are equally good: the one is taken whose largest entry is positive.

    >>> principal(np.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]), 1).axes.round(3).tolist()
    [[0.6, 0.8]]
    """
    if count < 1:
        raise Error(f"count must be at least 1, not {count}")
    rows = np.asarray(rows, np.float64)
    mean = rows.mean(0)
    rest = rows - mean
    if len(rest) > rest.shape[1]:
        rest = np.linalg.qr(rest, mode="r")  # the same directions in a small square matrix
    _, strength, axes = np.linalg.svd(rest, full_matrices=False)
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1)
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    total = np.square(strength).sum()
    share = np.square(strength) / total if total > 0 else np.zeros_like(strength)
    return Components(axes[:count], share[:count], mean)


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


WITHOUT = {
    "none": "this model has no position embeddings to compare",
    "relative": "relative positions embed the offsets between two tokens, so that no patch has an "
    "embedding to compare",
}


def position_similarity(
    model: Any, *, image_size: tuple[int, int] | None = None, layer: int = 0
) -> np.ndarray:
    """Entry [i, j, k, l]: the cosine of the embeddings of patches (i, j) and (k, l), as (h, w, h, w).

    The class token's entry is left out. `image_size` (H, W) asks for the table as it is resized for such
    images; `layer` chooses one where each layer has a table of its own.
    """
    vit = transformer(model)
    c = vit.config
    if c.positions in WITHOUT:
        raise Error(WITHOUT[c.positions], code="inspection.unsupported")
    layers = c.depth if c.injection == "every" else 1
    if not 0 <= layer < layers:
        held = f"tables for layers 0 to {layers - 1}" if layers > 1 else "one table only, that of layer 0"
        raise Error(f"there is no position table of layer {layer}: the model holds {held}")
    grid = c.grid if image_size is None else grid_of(image_size, c.stride)
    with torch.no_grad():
        table = vit.positions.at(grid, layer, device=vit.project.weight.device)
        unit = F.normalize(table[0, lead_of(vit) :].float(), dim=-1)  # (N, D)
        return array((unit @ unit.mT).clamp(-1, 1).view(*grid, *grid))


def feature_colours(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """The first three principal components of the patch tokens, (B, h, w, 3), each stretched to 0..1.

    The tokens are the encoder's output without the class token. The components, and the stretching, are
    those of all the images together, so that one colour means one thing in all of them; images shown one
    at a time get colours of their own. A direction in which nothing differs is 0.
    """
    vit = transformer(model)
    grid, lead = grid_for(vit, images), lead_of(vit)
    with still(vit):
        tokens = [array(vit.tokens(part)[:, lead:]) for part in batches(vit, images, batch)]
    rows = np.concatenate(tokens).reshape(-1, vit.config.width)  # (B*N, D)
    found = principal(rows, 3)
    values = np.zeros((len(rows), 3))
    values[:, : len(found.axes)] = (rows - found.mean) @ found.axes.T
    low, high = values.min(0), values.max(0)
    flat = high - low <= 1e-6 * np.abs(rows).max()  # rounding, not a difference
    colours = np.where(flat, 0.0, (values - low) / np.where(flat, 1.0, high - low))
    return colours.reshape(-1, *grid, 3).astype(np.float32)


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
