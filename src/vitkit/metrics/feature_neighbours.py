"""Near-duplicates and outliers among features, by the nearest neighbours of each image."""

# N images, D features, K neighbours, P pairs

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.metrics.frozen_features import mean_and_scale

NEIGHBOURS = 10
SIMILARITIES = 2**24  # computed at a time
ALIKE = 0.1  # distance of near-duplicates, as a share of the usual distance
FAR = 5.0  # robust standard deviations beyond the median from which an image is an outlier


class Neighbours(NamedTuple):
    """The nearest neighbours of each image by cosine similarity of standardised features, nearest first."""

    rows: np.ndarray  # (N, K) the numbers of their rows
    similarity: np.ndarray  # (N, K)


@torch.no_grad()
def nearest_neighbours(x: torch.Tensor, count: int = NEIGHBOURS, device: str = "cpu") -> Neighbours:
    """The neighbours of each row of the features (N, D); only a block of all similarities is in memory."""
    mean, scale = mean_and_scale(x.double())
    unit = F.normalize(((x.double() - mean) / scale).float(), dim=1).to(device)
    count = min(count, len(x) - 1)
    indices, similarities = [], []
    step = max(1, SIMILARITIES // len(x))
    for start in range(0, len(x), step):
        block = unit[start : start + step] @ unit.mT
        rows = torch.arange(len(block), device=block.device)
        block[rows, rows + start] = -2.0  # an image is no neighbour of itself
        top = block.topk(count, dim=1)
        indices.append(top.indices.cpu())
        similarities.append(top.values.cpu())
    return Neighbours(torch.cat(indices).numpy(), torch.cat(similarities).numpy())


def distances(neighbours: Neighbours) -> np.ndarray:
    return 1.0 - neighbours.similarity.astype(np.float64)


def near_duplicates(neighbours: Neighbours, alike: float = ALIKE) -> list[np.ndarray]:
    """Groups of rows that are near-duplicates, directly or through others in the group.

    Two images are if their distance is below a share of the usual one: the median of the distance of an image
    to the last of its neighbours. How similar unrelated images are depends on the model and the data.
    """
    rows, places = np.nonzero(distances(neighbours) < alike * np.median(distances(neighbours)[:, -1]))
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while (above := parent.setdefault(row, row)) != row:
            parent[row] = row = parent[above]
        return row

    for first, second in zip(rows.tolist(), neighbours.rows[rows, places].tolist(), strict=True):
        a, b = root(first), root(second)
        parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for row in sorted(parent):
        groups.setdefault(root(row), []).append(row)
    return [np.array(group) for group in groups.values()]


def outliers(neighbours: Neighbours, far: float = FAR) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are far from their nearest neighbours, the farthest first, and how far.

    The distance of an image is one minus its similarity to the last of its neighbours; how far is in robust
    standard deviations (1.4826 times the median absolute deviation) from the median of all images.
    """
    distance = distances(neighbours)[:, -1]
    median = np.median(distance)
    deviation = 1.4826 * np.median(np.abs(distance - median))
    score = (distance - median) / max(deviation, 1e-12)
    order = np.argsort(-score, kind="stable")
    order = order[score[order] > far]
    return order, score[order]
