"""Near-duplicates and outliers among features, by the nearest neighbours of each image."""

# N images, D features, K neighbours

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

NEIGHBOURS = 10
SIMILARITIES = 2**24  # computed at a time
ALIKE = 0.35  # distance of near-duplicates, as a share of that to the last neighbour
FAR = 2.5  # robust standard deviations above the median from which an image is an outlier


class Neighbours(NamedTuple):
    """The nearest neighbours of each image by cosine similarity, nearest first."""

    rows: np.ndarray  # (N, K) the numbers of their rows
    distance: np.ndarray  # (N, K) one minus the cosine similarity


@torch.no_grad()
def nearest_neighbours(x: torch.Tensor, count: int = NEIGHBOURS, device: str = "cpu") -> Neighbours:
    """The neighbours of each row of the features (N, D); only a block of all similarities is in memory."""
    unit = F.normalize(x.float(), dim=1).to(device)
    count, step = min(count, len(x) - 1), max(1, SIMILARITIES // len(x))
    rows, distances = [], []
    for start in range(0, len(x), step):
        block = unit[start : start + step] @ unit.mT
        own = torch.arange(len(block), device=block.device)
        block[own, own + start] = -2.0  # an image is no neighbour of itself
        top = block.topk(count, dim=1)
        rows.append(top.indices.cpu())
        distances.append((1.0 - top.values).clamp(min=0).cpu())
    return Neighbours(torch.cat(rows).numpy(), torch.cat(distances).numpy().astype(np.float64))


def near_duplicates(neighbours: Neighbours, alike: float = ALIKE) -> list[np.ndarray]:
    """Groups of rows that are near-duplicates, directly or through others in the group.

    Two images are if they are much closer to each other than both are to the last of their neighbours, since
    how close unrelated images are depends on the model, and on how many similar images there are.
    """
    usual = neighbours.distance[:, -1]
    limit = alike * np.minimum(usual[:, None], usual[neighbours.rows])
    rows, places = np.nonzero(neighbours.distance < limit)
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while (above := parent.setdefault(row, row)) != row:
            row = above
        return row

    for first, second in zip(rows.tolist(), neighbours.rows[rows, places].tolist(), strict=True):
        a, b = root(first), root(second)
        parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for row in sorted(parent):
        groups.setdefault(root(row), []).append(row)
    return [np.array(group) for group in groups.values()]


def outliers(neighbours: Neighbours, far: float = FAR) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are far from the last of their neighbours, the farthest first, and how far.

    How far is in robust standard deviations (1.4826 times the median absolute deviation) above the median.
    """
    distance = neighbours.distance[:, -1]
    deviation = 1.4826 * np.median(np.abs(distance - np.median(distance)))
    score = (distance - np.median(distance)) / max(deviation, 1e-12)
    order = np.argsort(-score, kind="stable")
    order = order[score[order] > far]
    return order, score[order]
