"""Principal components of the rows of a matrix."""

from typing import NamedTuple

import numpy as np

from vitkit.errors import Error


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
