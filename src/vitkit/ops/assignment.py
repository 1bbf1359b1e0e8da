"""The assignment of least cost (Hungarian matching), exact and in NumPy."""

# N rows, M columns

import numpy as np

from vitkit.errors import Error


def linear_assignment(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair rows and columns of a cost matrix (N, M) so that the sum is least; min(N, M) pairs.

    Returns the rows, in order, and their columns, as scipy.optimize.linear_sum_assignment does. Costs must be
    finite. Shortest augmenting paths (Jonker and Volgenant): 300 x 100 take some milliseconds.

    >>> rows, columns = linear_assignment(np.array([[4.0, 1.0], [2.0, 0.0], [3.0, 2.0]]))
    >>> rows.tolist(), columns.tolist()
    ([0, 1], [1, 0])
    """
    if cost.ndim != 2 or not np.isfinite(cost).all():
        raise Error(
            f"matching needs finite costs with two axes, not {cost.ndim} axes or NaN; in training, the "
            "predictions have diverged: use a lower learning rate",
            code="training.diverged",
        )
    cost = cost.astype(np.float64)
    if cost.shape[0] < cost.shape[1]:
        return np.arange(cost.shape[0]), columns_of_rows(cost)
    rows = columns_of_rows(np.ascontiguousarray(cost.T))  # the row of each column
    order = rows.argsort()
    return rows[order], order


def columns_of_rows(cost: np.ndarray) -> np.ndarray:
    """The column of each row, where there are at least as many columns as rows."""
    n, m = cost.shape
    if not n:
        return np.zeros(0, np.int64)
    row_price, column_price = cost.min(1), np.zeros(m)
    owner, column = np.full(m, -1), np.full(n, -1)  # the row of each column, and the column of each row
    for row, best in enumerate(cost.argmin(1).tolist()):  # rows whose best column is free need no search
        if owner[best] < 0:
            owner[best], column[row] = row, best
    for row in np.flatnonzero(column < 0).tolist():
        augment(cost, row, row_price, column_price, owner, column)
    return column


def augment(
    cost: np.ndarray, start: int, row_price: np.ndarray, column_price: np.ndarray,
    owner: np.ndarray, column: np.ndarray,
) -> None:  # fmt: skip
    """Give a column to one more row along the shortest path to a free column (Dijkstra), in place."""
    m = cost.shape[1]
    distance, before = np.full(m, np.inf), np.full(m, -1)  # to each column, and the row it is reached from
    open_distance = distance.copy()  # infinite where a column is done
    done: list[int] = []
    row, reached = start, 0.0
    while True:
        through = cost[row] - column_price + (reached - row_price[row])
        through[done] = np.inf
        closer = through < distance
        distance[closer] = open_distance[closer] = through[closer]
        before[closer] = row
        best = int(open_distance.argmin())
        reached = float(distance[best])
        if owner[best] < 0:
            break
        done.append(best)
        open_distance[best] = np.inf
        row = int(owner[best])
    row_price[start] += reached
    if done:
        gained = reached - distance[done]
        row_price[owner[done]] += gained
        column_price[done] -= gained
    while True:  # turn the path around
        row = int(before[best])
        owner[best] = row
        column[row], best = best, int(column[row])
        if row == start:
            return
