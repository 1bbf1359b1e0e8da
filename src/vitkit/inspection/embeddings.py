"""Patch embedding filters, position embedding similarity, and patch tokens as colours."""

# B batch, N patches, D width, C channels, P side of a filter; H, W pixels; h, w grid of patches

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.inspection.subject import array, batches, eval_mode, grid_for, prefix_tokens, transformer
from vitkit.models.resnet import StdConv
from vitkit.models.vit import grid_of


class Components(NamedTuple):
    """Principal components: orthonormal axes, the largest variance first."""

    axes: np.ndarray  # (count, columns)
    variance: np.ndarray  # (count,), explained share of the variance, in 0..1
    mean: np.ndarray  # (columns,), subtracted from each row first


def principal(rows: np.ndarray, count: int) -> Components:
    """The first `count` principal components, or all if there are fewer.

    The sign is chosen so that the entry with the largest magnitude is positive.

    >>> principal(np.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]), 1).axes.round(3).tolist()
    [[0.6, 0.8]]
    """
    if count < 1:
        raise Error(f"count must be at least 1, not {count}")
    rows = np.asarray(rows, np.float64)
    mean = rows.mean(0)
    rest = rows - mean
    if len(rest) > rest.shape[1]:
        rest = np.linalg.qr(rest, mode="r")  # a small square matrix with the same components
    _, strength, axes = np.linalg.svd(rest, full_matrices=False)
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1)
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    total = np.square(strength).sum()
    share = np.square(strength) / total if total > 0 else np.zeros_like(strength)
    return Components(axes[:count], share[:count], mean)


class Filters(NamedTuple):
    """Filters as image tiles, with the share of the variance that each explains."""

    tiles: np.ndarray  # (count, P, P, C), each of length 1
    variance: np.ndarray  # (count,), in 0..1


def embedding_filters(model: Any, *, count: int = 28) -> Filters:
    """The first principal components of the D filters of the embedding E, as images of P x P pixels.

    Each filter is one observation of P*P*C numbers; the mean filter is subtracted first. A hybrid embeds
    feature maps instead of pixels, so its root convolution is used, standardised as in its forward pass. A
    kernel with fewer than `count` components yields those it has.
    """
    vit = transformer(model)
    kernel = vit.project.weight if vit.stem is None else standardised(vit.stem.root)
    tiles = array(kernel).transpose(0, 2, 3, 1)  # (D, P, P, C)
    components = principal(tiles.reshape(len(tiles), -1), count)
    axes = components.axes.reshape(-1, *tiles.shape[1:])
    return Filters(axes.astype(np.float32), components.variance.astype(np.float32))


def standardised(conv: StdConv) -> Tensor:
    """The standardised kernel of a StdConv, (D, C, P, P)."""
    weight = conv.weight - conv.weight.mean((1, 2, 3), keepdim=True)
    variance = weight.square().mean((1, 2, 3), keepdim=True)
    return weight / ((variance + conv.eps).sqrt() if conv.in_variance else variance.sqrt() + conv.eps)


UNSUPPORTED = {
    "none": "this model has no position embeddings to compare",
    "relative": "relative position embeddings encode offsets between tokens, so no patch has one of its own",
}


def position_similarity(
    model: Any, *, image_size: tuple[int, int] | None = None, layer: int = 0
) -> np.ndarray:
    """Cosine similarities of the position embeddings of patches (i, j) and (k, l), as (h, w, h, w).

    The class token is left out. `image_size` (H, W) resizes the embeddings as for images of that size;
    `layer` selects a table where every layer has its own.
    """
    vit = transformer(model)
    c = vit.config
    if c.positions in UNSUPPORTED:
        raise Error(UNSUPPORTED[c.positions], code="inspection.unsupported")
    layers = c.depth if c.injection == "every" else 1
    if not 0 <= layer < layers:
        tables = f"tables for layers 0 to {layers - 1}" if layers > 1 else "only one table, for layer 0"
        raise Error(f"there is no position table for layer {layer}: the model has {tables}")
    grid = c.grid if image_size is None else grid_of(image_size, c.stride)
    with torch.no_grad():
        table = vit.positions.at(grid, layer, device=vit.project.weight.device)
        unit = F.normalize(table[0, vit.positions.lead :].float(), dim=-1)  # (N, D)
        return array((unit @ unit.mT).clamp(-1, 1).view(*grid, *grid))


def feature_colours(model: Any, images: Tensor, *, batch: int = 8) -> np.ndarray:
    """The first three principal components of the patch tokens, (B, h, w, 3), each scaled to 0..1.

    The tokens are the encoder's output without the class token. Components and scaling are computed over
    all images together, so a colour means the same in each of them; separate calls give different colours.
    A component without variance is 0.
    """
    vit = transformer(model)
    grid, prefix = grid_for(vit, images), prefix_tokens(vit)
    with eval_mode(vit):
        tokens = [array(vit.tokens(part)[:, prefix:]) for part in batches(vit, images, batch)]
    rows = np.concatenate(tokens).reshape(-1, vit.config.width)  # (B*N, D)
    components = principal(rows, 3)
    values = np.zeros((len(rows), 3))
    values[:, : len(components.axes)] = (rows - components.mean) @ components.axes.T
    low, high = values.min(0), values.max(0)
    flat = high - low <= 1e-6 * np.abs(rows).max()  # only rounding errors
    colours = np.where(flat, 0.0, (values - low) / np.where(flat, 1.0, high - low))
    return colours.reshape(-1, *grid, 3).astype(np.float32)


DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))  # (rows, columns): right, left, down, up


def shuffled(images: Tensor, cells: int, indices: Sequence[int], seed: int = 0) -> Tensor:
    """Cut each image into `cells` x `cells` equal cells and permute them.

    The permutation depends only on the seed, the number of cells and the image's index in its data set, so
    it is the same for every model, whatever its image size.
    """
    b, c, h, w = images.shape
    if cells < 1 or h % cells or w % cells:
        raise Error(f"an image of {h} x {w} pixels cannot be cut into {cells} x {cells} equal cells")
    cut = images.reshape(b, c, cells, h // cells, cells, w // cells).permute(0, 2, 4, 1, 3, 5)
    cut = cut.reshape(b, cells * cells, c, h // cells, w // cells)
    orders = [np.random.default_rng((seed, cells, index)).permutation(cells * cells) for index in indices]
    cut = torch.stack([image[torch.from_numpy(order)] for image, order in zip(cut, orders, strict=True)])
    joined = cut.reshape(b, cells, cells, c, h // cells, w // cells).permute(0, 3, 1, 4, 2, 5)
    return joined.reshape(b, c, h, w)


def shifted(images: Tensor, pixels: int, indices: Sequence[int], seed: int = 0) -> Tensor:
    """Shift each image by `pixels` in one of four directions, repeating the edge pixels.

    The direction depends only on the seed and the image's index in its data set.
    """
    h, w = images.shape[2:]
    if not 0 <= pixels < min(h, w):
        raise Error(f"an image of {h} x {w} pixels cannot be shifted by {pixels}")
    rows, columns = torch.arange(h), torch.arange(w)
    result = []
    for image, index in zip(images, indices, strict=True):
        down, right = DIRECTIONS[np.random.default_rng((seed, index)).integers(len(DIRECTIONS))]
        result.append(
            image[:, (rows - down * pixels).clamp(0, h - 1)][:, :, (columns - right * pixels).clamp(0, w - 1)]
        )
    return torch.stack(result)
