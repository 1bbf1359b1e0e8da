"""Matching at the least cost, compared with SciPy; on a GPU by a kernel."""

import numpy as np
import pytest
import torch

from vitkit.ops.assignment import linear_assignment
from vitkit.ops.batched_assignment import assign, match

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


# many problems together

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOGETHER = [(1, 1), (1, 5), (4, 4), (11, 100), (16, 17), (20, 25), (40, 100), (64, 64), (64, 300)]


def problems(rows, columns):
    """Normal costs, with ties, with equal rows, and all the same; some of the rows are padding."""
    generator = torch.Generator().manual_seed(rows * columns)
    costs = torch.randn(8, rows, columns, generator=generator)
    costs[2:4] = costs[2:4].round()
    costs[4:6] = costs[4:6, :1] + (0.01 * costs[4:6]).round(decimals=2)
    costs[6] = 1.0
    return costs, torch.rand(8, rows, generator=generator) < 0.8


def least(cost):
    solve = pytest.importorskip("scipy.optimize").linear_sum_assignment
    return cost[solve(cost)].sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows,columns", TOGETHER)
def test_assignments_cost_as_little_as_those_of_scipy(rows, columns, device):
    costs, real = problems(rows, columns)
    chosen = assign(costs.to(device), real.to(device)).cpu()
    for cost, own, kept in zip(costs, chosen, real, strict=True):
        assert len(set(own.tolist())) == rows and own.min() >= 0 and own.max() < columns
        cost, own = cost[kept].numpy(), own[kept].numpy()
        assert cost[np.arange(len(own)), own].sum() == pytest.approx(least(cost), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("objects,predictions", [*TOGETHER, (30, 10), (300, 64), (5, 1)])
def test_each_prediction_has_one_object_or_none_at_the_least_cost(objects, predictions, device):
    costs, real = problems(objects, predictions)
    real[0] = False
    rows = match(costs.mT.to(device), real.to(device)).cpu()
    assert (rows[0] == -1).all()
    for cost, own, kept in zip(costs.mT, rows, real, strict=True):
        pairs = [(query, row) for query, row in enumerate(own.tolist()) if row >= 0]
        assert all(kept[row] for _, row in pairs) and len({row for _, row in pairs}) == len(pairs)
        assert len(pairs) == min(int(kept.sum()), predictions)
        total = sum(cost[pair].item() for pair in pairs)
        assert total == pytest.approx(least(cost[:, kept].numpy()), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_costs_that_are_not_finite_are_the_last_choice(device):
    costs = torch.tensor([[[float("nan"), 5.0, float("inf")], [1.0, 2.0, float("nan")]]], device=device)
    assert assign(costs, torch.ones(1, 2, dtype=torch.bool, device=device)).tolist() == [[1, 0]]


@pytest.mark.gpu
def test_a_cuda_graph_holds_the_matching_of_many_objects():
    costs, real = torch.zeros(16, 100, 64, device="cuda"), torch.ones(16, 64, dtype=torch.bool, device="cuda")
    match(costs, real)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = match(costs, real)
    costs.normal_()
    graph.replay()
    assert torch.equal(rows, match(costs, real)) and (rows >= 0).sum(1).eq(64).all()
