"""Nearest neighbours: the vote against a plain loop, pieces, and what it refuses."""

import numpy as np
import pytest
import torch
from refusals import refused
from test_fewshot import clouds

from vitkit.metrics.frozen_features import neighbours


def by_hand(train_x, train_y, test_x, test_y, k, temperature):
    right = 0
    for x, y in zip(test_x, test_y, strict=True):
        similar = [float(x @ t / np.linalg.norm(x) / np.linalg.norm(t)) for t in train_x]
        votes = np.zeros(train_y.max() + 1)
        for i in np.argsort(similar)[::-1][:k]:
            votes[train_y[i]] += np.exp(similar[i] / temperature)
        right += votes.argmax() == y
    return right / len(test_y)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (5, 0.07), (20, 0.07), (40, 1.0)])
def test_it_is_the_weighted_vote_of_the_most_similar(k, temperature, monkeypatch):
    train, test = clouds(40, noise=4.0), clouds(100, noise=4.0, seed=1)
    whole = neighbours(*train, *test, k=k, temperature=temperature)
    assert whole == by_hand(*train, *test, k, temperature)
    monkeypatch.setattr("vitkit.metrics.frozen_features.SIMILARITIES", 300)
    assert neighbours(*train, *test, k=k, temperature=temperature) == whole


def test_length_does_not_matter_and_a_cold_vote_is_the_nearest_alone():
    (a, b), (c, d) = clouds(40, noise=4.0), clouds(100, noise=4.0, seed=1)
    lengths = np.linspace(0.1, 9, 40)[:, None]
    assert neighbours(a * lengths, b, c, d, k=10) == neighbours(a, b, c, d, k=10)
    assert neighbours(a, b, c, d, k=40, temperature=1e-5) == neighbours(a, b, c, d, k=1)


def test_features_of_length_0_are_similar_to_none():
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert neighbours(x, torch.tensor([0, 1, 0]), torch.tensor([[1.0, 0.1]]), torch.tensor([1]), k=1) == 1.0


@pytest.mark.parametrize("k", [0, 41, -3])
def test_more_neighbours_than_images_is_an_error(k):
    with refused("request.value", f"{k} neighbours", "1 to 40"):
        neighbours(*clouds(40), *clouds(40), k=k)


def test_bad_features_and_temperatures_are_refused():
    a, b = clouds(40)
    with refused("request.value", "temperature", 0.0):
        neighbours(a, b, a, b, k=1, temperature=0.0)
    with refused("weights.values", "40 of 40"):
        neighbours(a * np.nan, b, a, b, k=1)
