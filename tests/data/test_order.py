"""The order contract: each sample once an epoch, everything a pure function of (seed, step, place)."""

import numpy as np
import pytest
from refusals import refused

from vitkit.data.order import Order, shuffled


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_every_epoch_is_a_permutation(length):
    for key in (0, 1, 2**63):
        assert sorted(shuffled(i, length, key) for i in range(length)) == list(range(length))


def test_epochs_and_seeds_differ():
    def epoch(seed: int, number: int) -> list[int]:
        order = Order(100, 10, seed)
        return [order.sample(number * 10 + step, place) for step in range(10) for place in range(10)]

    lists = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    assert all(sorted(one) == list(range(100)) for one in lists)
    assert len({tuple(one) for one in lists}) == 3 and lists[0] != list(range(100))


def test_batches_run_on_over_the_end_of_an_epoch():
    order = Order(length=10, batch=4, seed=3)
    stream = [order.sample(step, place) for step in range(5) for place in range(4)]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))


def test_the_order_is_well_mixed():
    """Neighbours do not stay neighbours, and every place is as likely as any other."""
    length = 5000
    places = np.array([shuffled(i, length, 12345) for i in range(length)])
    assert abs(np.corrcoef(np.arange(length), places)[0, 1]) < 0.05
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    firsts = np.array([shuffled(0, 50, key) for key in range(5000)])
    counts = np.bincount(firsts, minlength=50)
    assert counts.min() > 60 and counts.max() < 145  # 100 each on average


def test_a_billion_samples_cost_nothing_to_order():
    order = Order(10**9, 4096, seed=1)
    assert len({order.sample(123_456, place) for place in range(4096)}) == 4096


def test_random_choices_follow_step_and_place_alone():
    order = Order(10, 4, seed=5)
    again = Order(99, 7, seed=5)
    assert order.rng(3, 2).random() == again.rng(3, 2).random()
    draws = {
        Order(10, 4, seed).rng(step, place).random()
        for seed in (0, 1)
        for step in range(9)
        for place in range(-1, 4)
    }
    assert len(draws) == 2 * 9 * 5


def test_the_order_never_changes_between_versions():
    order = Order(1000, 8, seed=42)
    assert [order.sample(5, place) for place in range(8)] == GOLDEN
    assert order.rng(5, 3).integers(1000, size=3).tolist() == GOLDEN_RNG
    for (length, seed), numbers in GOLDEN_OF_OTHERS.items():
        assert [Order(length, 8, seed).sample(5, place) for place in range(4)] == numbers


GOLDEN = [372, 133, 814, 530, 376, 544, 97, 456]
GOLDEN_RNG = [621, 440, 679]
GOLDEN_OF_OTHERS = {  # by length and seed
    (3, 0): [2, 1, 0, 2],
    (1000, 2**64 - 1): [747, 780, 616, 630],
    (2**20 + 7, -5): [885548, 921653, 545543, 973002],
    (10**9, 1): [626823715, 538850255, 904049216, 467575547],
}


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11, 2**64 - 1])
@pytest.mark.parametrize("length", [1, 2, 3, 1000, 2**20 + 7])
def test_samples_of_many_places_are_those_of_each(length, seed):
    order = Order(length, 64, seed)
    for steps in ([0], [1], [2**20 // 64], [977, 3, 2**33]):  # within an epoch, over its end, in any order
        places = [(step, place) for step in steps for place in (*range(64), -1)]
        assert order.samples(places).tolist() == [order.sample(*place) for place in places]
    assert order.samples([]).tolist() == []


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11, 2**64 - 1])
def test_generators_of_many_places_draw_what_those_of_each_draw(seed):
    order = Order(1000, 64, seed)
    places = [(step, place) for step in (0, 1, 977, 2**33) for place in (*range(40), -1, -9, 2**40)]
    for number, (place, reused) in enumerate(zip(places, order.rngs(places), strict=True)):
        assert draws(reused, number % 7) == draws(order.rng(*place), number % 7)


def draws(rng: np.random.Generator, count: int) -> list[float]:
    """Some that leave half a word behind, or part of a block of four; none at all for 0."""
    kinds = (lambda: rng.integers(9), rng.random, lambda: rng.uniform(0.75, 1.33), rng.standard_normal)
    return [float(kinds[number % 4]()) for number in range(count)]


@pytest.mark.parametrize(("length", "batch"), [(0, 4), (4, 0)])
def test_nothing_to_order_is_refused(length, batch):
    with refused("request.value", f"{length} and {batch}"):
        Order(length, batch)
