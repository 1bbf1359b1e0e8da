"""Matching at the least cost, compared with SciPy."""

import numpy as np
import pytest

from vitkit.ops.assignment import linear_assignment

SHAPES = [(0, 0), (0, 3), (4, 0), (1, 1), (3, 7), (7, 3), (20, 20), (100, 30), (300, 9)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["any", "whole", "by_row"])
def test_the_pairs_are_those_of_scipy(shape, kind):
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(sum(shape))
    for _ in range(5):
        cost = rng.normal(size=shape)
        if kind == "whole":  # with ties
            cost = rng.integers(0, 4, shape).astype(np.float32)
        elif kind == "by_row":  # all columns compete for the same rows
            cost = 0.1 * cost + rng.normal(size=(shape[0], 1))
        rows, columns = linear_assignment(cost)
        expected = optimize.linear_sum_assignment(cost)
        assert len(rows) == min(shape) == len(set(columns.tolist()))
        assert (np.diff(rows) > 0).all()
        assert cost[rows, columns].sum() == pytest.approx(cost[expected].sum(), abs=1e-6)
        if kind != "whole":
            assert (rows == expected[0]).all() and (columns == expected[1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_costs_must_be_finite(bad):
    with pytest.raises(ValueError):
        linear_assignment(np.array([[bad, 1.0], [0.0, 2.0]]))
