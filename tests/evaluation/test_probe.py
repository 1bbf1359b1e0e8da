"""The linear probe: many rates at once are each rate alone, and the choice is made on a held-out part."""

import numpy as np
import torch
import torch.nn.functional as F
from refusals import refused
from test_fewshot import clouds

from vitkit.metrics.frozen_features import BATCH, held_out_mask, probe, probe_accuracies, train_linear


def test_many_rates_at_once_are_each_rate_alone():
    x, y = (torch.from_numpy(a) for a in clouds(60))
    rates = [0.01, 0.1, 1.0]
    together = train_linear(x, y, 4, rates, epochs=5, seed=0)
    for i, rate in enumerate(rates):
        alone = train_linear(x, y, 4, [rate], epochs=5, seed=0)
        assert torch.allclose(together[0][:, i], alone[0][:, 0]) and torch.allclose(
            together[1][i], alone[1][0]
        )


def test_a_step_follows_the_gradient_of_the_cross_entropy():
    x, y = (torch.from_numpy(a) for a in clouds(60))
    assert len(x) <= BATCH  # one step an epoch, over all images
    weight, bias = train_linear(x, y, 4, [0.1], epochs=1, seed=0)
    start = torch.zeros(12, 4, dtype=x.dtype, requires_grad=True)
    offset = torch.zeros(4, dtype=x.dtype, requires_grad=True)
    F.cross_entropy(x @ start + offset, y).backward()
    assert torch.allclose(weight[:, 0], -0.1 * start.grad) and torch.allclose(bias[0], -0.1 * offset.grad)


def test_it_separates_what_can_be_separated_and_says_which_rate():
    train, test = clouds(200, noise=1.0), clouds(200, noise=1.0, seed=1)
    result = probe(*train, *test, rates=(0.1, 1e-7, 0.01))
    assert result.top1 > 0.97 and len(result.held_out) == 3
    assert result.rate == 1e-7  # of equally good ones the smallest
    assert result == probe(*train, *test, rates=(0.1, 1e-7, 0.01))
    assert set(result.to_json()) == {"top1", "rate", "held_out"}


def test_test_labels_do_not_decide_the_rate():
    train, (x, y) = clouds(200, noise=4.0), clouds(200, seed=1)
    assert probe(*train, x, y, epochs=3).rate == probe(*train, x, np.roll(y, 1), epochs=3).rate


def test_a_fifth_of_each_class_is_held_out_and_never_its_only_image():
    labels = np.array([0] * 50 + [1] * 10 + [2] * 2 + [3])
    held = held_out_mask(labels, 0).numpy()
    assert [int(held[labels == c].sum()) for c in range(4)] == [10, 2, 1, 0]


def test_pieces_change_nothing(monkeypatch):
    x, y = (torch.from_numpy(a) for a in clouds(60))
    weights = train_linear(x, y, 4, [0.1, 0.01], epochs=2, seed=0)
    whole = probe_accuracies(weights, x, y)
    monkeypatch.setattr("vitkit.metrics.frozen_features.LOGITS", 50)
    assert probe_accuracies(weights, x, y) == whole


def test_a_feature_without_variance_has_no_say():
    (a, b), (c, d) = clouds(60), clouds(60, seed=1)
    wild = 1e6 * np.random.default_rng(5).normal(size=(60, 1))
    dead = probe(np.c_[a, np.full(60, 0.1)], b, np.c_[c, wild], d, epochs=3)
    assert dead == probe(a, b, c, d, epochs=3)


def test_what_cannot_be_learned_from_is_a_clear_error():
    a, b = clouds(40)
    with refused("request.value", ()):
        probe(a, b, a, b, rates=())
    with refused("request.value", (0.1, -1.0)):
        probe(a, b, a, b, rates=(0.1, -1.0))
    with refused("evaluation.unsupported"):
        probe(a[:4], b[:4], a, b)
    with refused("weights.values", "40 of 40"):
        probe(a * np.nan, b, a, b)
