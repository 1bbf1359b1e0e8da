"""Few-shot accuracy: the closed form against a direct solve, its conventions, and what it refuses."""

import numpy as np
import pytest
import torch
from refusals import refused

import vitkit
from vitkit.metrics.frozen_features import (
    EPSILON,
    GRID,
    HEAD_L2,
    SCALES,
    best_l2,
    choose_shots,
    dual,
    fewshot,
    fewshot_grid,
    head_scale,
    primal,
    ridge_head,
    solve,
    with_constant,
)


def clouds(images: int, width: int = 12, classes: int = 4, noise: float = 2.0, seed: int = 0):
    """Features around a centre for each class, which is the same for every seed."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(100).normal(size=(classes, width)) * 3 + 5
    labels = np.arange(images) % classes
    return centres[labels] + noise * rng.normal(size=(images, width)), labels


def by_hand(train_x, train_y, test_x, test_y, l2):
    """The definition, solved directly."""
    mean, std = train_x.mean(0), train_x.std(0) + 1e-5
    x, z = (np.c_[(a - mean) / std, np.full(len(a), 100.0)] for a in (train_x, test_x))
    y = 2.0 * np.eye(train_y.max() + 1)[train_y] - 1
    w = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)
    return float(((z @ w).argmax(1) == test_y).mean())


@pytest.mark.parametrize("images", [8, 12, 13, 200])  # fewer and more than there are features
@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 1024.0, 2.0**19])
def test_it_is_the_regularised_least_squares_solution(images, l2):
    train, test = clouds(images), clouds(300, seed=1)
    assert fewshot(*train, *test, l2=l2) == by_hand(*train, *test, l2)


@pytest.mark.parametrize("images", [8, 200])
def test_features_far_from_zero_lose_no_digits(images):
    """They are not standardised one by one; with a mean of 10^5 spreads, 11 digits of the scores are left."""
    (train_x, train_y), (test_x, test_y) = clouds(images), clouds(300, seed=1)
    far = np.linspace(-1e6, 1e6, train_x.shape[1])
    moved = (train_x + far, train_y, test_x + far, test_y)
    assert fewshot(*moved, l2=1.0) == by_hand(*moved, 1.0)


@pytest.mark.gpu
def test_it_is_the_same_on_a_gpu():
    train, (test_x, test_y) = clouds(40), clouds(400, seed=1)
    there = torch.from_numpy(test_x).cuda()
    assert fewshot_grid(*train, there, test_y) == fewshot_grid(*train, test_x, test_y)


@pytest.mark.parametrize("shape", [(5, 30), (30, 5), (9, 9)])
def test_primal_and_dual_give_the_weights_of_a_direct_solve(shape):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = torch.randn(shape[0], 3, generator=generator, dtype=torch.float64)
    for l2 in (2.0**-10, 1.0, 1024.0):
        direct = torch.linalg.solve(x.mT @ x + l2 * torch.eye(shape[1], dtype=x.dtype), x.mT @ y)
        for form in (primal, dual, solve):
            left, values, right = form(x, y)
            assert torch.allclose(left @ (right / (values + l2)[:, None]), direct, atol=1e-9, rtol=1e-9)
    assert len(solve(x, y).values) == min(shape)


def test_the_grid_is_every_penalty_at_once():
    train, test = clouds(40), clouds(400, seed=1)
    assert len(GRID) == 30 and GRID[0] == 2.0**-10 and GRID[-1] == 2.0**19
    assert fewshot_grid(*train, *test) == [fewshot(*train, *test, l2=l2) for l2 in GRID]


def test_tensors_arrays_and_any_class_numbers_give_the_same():
    (a, b), (c, d) = clouds(40), clouds(400, seed=1)
    result = fewshot(a, b, c, d)
    assert 0.5 < result < 1
    assert vitkit.fewshot(*(torch.from_numpy(t) for t in (a, b, c, d))) == result
    assert fewshot(a, b * 7 + 3, c, d * 7 + 3) == result


def test_test_images_are_counted_in_pieces_and_none_is_left_out(monkeypatch):
    train, test = clouds(40), clouds(101, seed=1)
    whole = fewshot_grid(*train, *test)
    monkeypatch.setattr("vitkit.metrics.frozen_features.ROWS", 7)
    assert fewshot_grid(*train, *test) == whole


def test_scale_and_offset_of_a_feature_do_not_matter():
    (a, b), (c, d) = clouds(40), clouds(400, seed=1)
    scale, offset = np.logspace(-1, 3, a.shape[1]), np.linspace(-50, 50, a.shape[1])
    assert fewshot(a * scale + offset, b, c * scale + offset, d) == pytest.approx(
        fewshot(a, b, c, d), abs=0.01
    )


@pytest.mark.parametrize("l2", [2.0**-10, 1024.0])
def test_a_feature_without_variance_has_no_say(l2):
    (a, b), (c, d) = clouds(40), clouds(400, seed=1)
    wild = 1e6 * np.random.default_rng(5).normal(size=(400, 1))
    with_dead = fewshot(np.c_[a, np.full(40, 0.1)], b, np.c_[c, wild], d, l2=l2)
    assert with_dead == fewshot(a, b, c, d, l2=l2)


def broken(value):
    a, b = clouds(40)
    a[3, 2] = value
    return (a, b, *clouds(20, seed=1))


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        (broken(np.nan), "weights.values", ("train", "1 of 40", "image 3")),
        (broken(np.inf), "weights.values", ("train", "1 of 40")),
        ((*clouds(20), *broken(np.nan)[:2]), "weights.values", ("test", "1 of 40")),
        ((np.ones((8, 12)), clouds(8)[1], *clouds(8)), "evaluation.unsupported", ()),
        ((clouds(8)[0], np.full(8, 2), *clouds(8)), "data.classes", ("class 2",)),
        ((*clouds(8, classes=2), *clouds(8, classes=4)), "data.classes", ([2, 3],)),
        ((clouds(8)[0][:, :5], clouds(8)[1], *clouds(8)), "request.value", (5, 12)),
        ((clouds(8)[0], clouds(8)[1][:5], *clouds(8)), "request.value", ("train", (8, 12), (5,))),
        ((clouds(8)[0].astype(int), clouds(8)[1], *clouds(8)), "request.value", ("train", "int64")),
        ((*clouds(8), np.ones((0, 12)), np.zeros(0, int)), "data.empty", ("test",)),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_is_a_clear_error(arguments, code, values):
    with refused(code, *values):
        fewshot(*arguments)


@pytest.mark.parametrize("l2", [0.0, -1.0, float("nan"), float("inf")])
def test_a_penalty_is_a_number_above_0(l2):
    with refused("request.value", "l2", f"{l2:g}"):
        fewshot(*clouds(8), *clouds(8), l2=l2)


def test_shots_are_of_each_class_seeded_and_nested():
    labels = np.random.default_rng(0).integers(0, 5, 200)
    many, few = choose_shots(labels, 10, seed=4), choose_shots(labels, 3, seed=4)
    assert many.shape == (5, 10) and (labels[many] == np.arange(5)[:, None]).all()
    assert (many[:, :3] == few).all() and len(np.unique(many)) == 50
    assert (choose_shots(labels, 10, seed=4) == many).all()
    assert (choose_shots(labels, 10, seed=5) != many).any()


def test_shots_are_the_official_permutation():
    labels = np.array([1, 0, 1, 0, 0, 1, 1])
    rng = np.random.default_rng(9)
    expected = [rng.permutation(np.flatnonzero(labels == c))[:2] for c in (0, 1)]
    assert (choose_shots(labels, 2, seed=9) == expected).all()


def test_an_unusable_image_is_passed_over_and_moves_no_other():
    labels = np.arange(40) % 2
    before = choose_shots(labels, 5, seed=1)
    usable = np.ones(40, dtype=bool)
    usable[before[0, 1]] = False
    after = choose_shots(labels, 5, seed=1, usable=usable)
    assert (after[1] == before[1]).all() and after[0, :4].tolist() == before[0, [0, 2, 3, 4]].tolist()


def test_fewer_images_than_shots_is_an_error_by_name():
    with refused("evaluation.unsupported", "'cat'", "2 usable", "3 shots"):
        choose_shots(np.array([0, 0, 0, 1, 1]), 3, names=("dog", "cat"))
    with refused("request.value", "shots", 0):
        choose_shots(np.array([0, 1]), 0)


def test_the_penalty_is_the_best_in_mean_rank_over_data_sets():
    table = np.array([[0.10, 0.90, 0.80], [0.52, 0.50, 0.51], [0.11, 0.12, 0.13]])
    assert best_l2(table) == 2  # mean ranks 5/3, 1, 2/3; its mean accuracy is not the best
    assert best_l2(np.array([[0.5, 0.7, 0.7]])) == 2  # equal: the stronger penalty
    assert best_l2(np.array([[0.5, 0.9, 0.6], [0.6, 0.5, 0.7], [0.5, 0.5, 0.5]])) == 2


def test_equal_penalties_share_their_rank():
    assert best_l2(np.array([[0.9, 0.9, 0.8], [0.7, 0.6, 0.8]])) == 0  # mean ranks 0.75, 1.25, 1


def by_hand_divisor(x: torch.Tensor, *, single: bool) -> torch.Tensor:
    """The definition: the common deviation of all features, or its geometric mean with a feature's own."""
    own, common = x.std(0, correction=0) + EPSILON, (x - x.mean(0)).square().mean().sqrt() + EPSILON
    return common.repeat(x.shape[1]) if single else (own * common) ** 0.5


@pytest.mark.parametrize("single", [False, True])
def test_features_of_a_head_are_divided_by_a_mean_of_own_and_common_deviation(single):
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, 7) + 3
    mean, divisor = head_scale(x, common=single)
    assert torch.allclose(mean, x.mean(0)) and torch.allclose(divisor, by_hand_divisor(x, single=single))
    assert (divisor[5] == divisor[0]) == single
    x[:, 2] = 4.0  # a constant feature is removed, but its deviation counts in the common one
    divisor = head_scale(x, common=single)[1]
    assert divisor[2] == float("inf") and torch.allclose(divisor[:2], by_hand_divisor(x, single=single)[:2])


def test_a_head_for_classes_of_one_image_has_the_common_scale():
    x, y = (
        torch.randn(6, 30, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 31),
        torch.arange(6),
    )
    head = ridge_head(x, y, 6)
    rows = with_constant((x.double() - x.double().mean(0)) / by_hand_divisor(x.double(), single=True))
    targets = 2.0 * torch.eye(6, dtype=torch.float64) - 1
    weights = torch.linalg.solve(
        rows.mT @ rows + HEAD_L2 * torch.eye(31, dtype=torch.float64), rows.mT @ targets
    )
    ratio = (x.double() @ head.weight.double().T + head.bias) / (rows @ weights)
    assert float(ratio.std()) < 1e-3 * float(ratio.mean())


@pytest.mark.parametrize("shape", [(30, 50), (200, 20)])
def test_a_ridge_head_has_the_direct_solution_and_the_accuracy_of_leaving_one_out(shape):
    count, width = shape
    torch.manual_seed(0)
    y = torch.arange(count) % 4
    x = torch.randn(count, width) + 1.5 * torch.nn.functional.one_hot(y, width)
    x *= torch.linspace(0.5, 2, width)  # so that the features have deviations of their own
    head = ridge_head(x, y, 4, (8.0,))
    mean, divisor = x.double().mean(0), by_hand_divisor(x.double(), single=False)
    rows = with_constant((x.double() - mean) / divisor)
    targets = 2.0 * torch.nn.functional.one_hot(y, 4).double() - 1

    def fit(keep: torch.Tensor) -> torch.Tensor:
        a, b = rows[keep], targets[keep]
        return torch.linalg.solve(a.mT @ a + 8 * torch.eye(width + 1, dtype=torch.float64), a.mT @ b)

    left_out = torch.stack([rows[i] @ fit(torch.arange(count) != i) for i in range(count)])
    assert head.accuracy == pytest.approx(float((left_out.argmax(1) == y).double().mean()))
    ratio = (x @ head.weight.T + head.bias) / (rows @ fit(torch.arange(count) >= 0)).float()
    assert ratio.std() < 1e-3 and float(ratio.mean()) in [
        pytest.approx(factor, rel=1e-3) for factor in SCALES
    ]


def test_a_ridge_head_prefers_a_penalty_that_generalises():
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 200) + 1.6 * torch.nn.functional.one_hot(y, 200)
    chosen = ridge_head(x, y, 3)
    assert chosen.l2 > min(GRID) and chosen.accuracy >= ridge_head(x, y, 3, (min(GRID),)).accuracy
    assert ridge_head(x[:4], y[:4], 3).l2 == HEAD_L2  # a class with one image cannot be left out
    assert ridge_head(x[:4], y[:4], 3, (8.0,)).l2 == 8
