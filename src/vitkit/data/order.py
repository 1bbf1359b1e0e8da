"""The training order: which sample is at which position of which batch, a pure function of the seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

from vitkit.errors import Error

ROUNDS = 6
MASK = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15  # the increment of splitmix64
Word = TypeVar("Word", int, np.ndarray)  # a 64-bit integer, or a uint64 array


@dataclass(frozen=True)
class Order:
    """An endless shuffled order over `length` samples, each once per epoch, without a stored permutation.

    It does not depend on workers or processes, so a run resumes by asking for a later step.
    """

    length: int
    batch: int
    seed: int = 0

    def __post_init__(self):
        if self.length < 1 or self.batch < 1:
            raise Error(
                f"an order needs at least 1 sample and a batch size of 1, not {self.length} and {self.batch}",
                code="request.value",
            )

    def sample(self, step: int, place: int) -> int:
        """The index of the sample at one position of one global batch."""
        epoch, within = divmod(step * self.batch + place, self.length)
        return shuffled(within, self.length, mixed(self.seed, epoch))

    def samples(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """`sample` for many (step, place) at once."""
        steps, within = np.array(places, dtype=np.int64).reshape(-1, 2).T
        epochs, within = np.divmod(steps * self.batch + within, self.length)
        indices = np.empty_like(within)
        for epoch in set(epochs.tolist()):
            mask = epochs == epoch
            indices[mask] = all_shuffled(within[mask], self.length, mixed(self.seed, epoch))
        return indices

    def rng(self, step: int, place: int, view: int = 0) -> np.random.Generator:
        """The random generator for that sample, or for a further view of it.

        Place -1 is for the batch as a whole, those below for what a task draws for each image.
        """
        key = np.array([self.seed & MASK, 0x76_69_74], dtype=np.uint64)
        counter = np.array([0, view, (place + 1) & MASK, step & MASK], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def rngs(self, places: Sequence[tuple[int, int]]) -> Iterator[np.random.Generator]:
        """`rng` for many (step, place): one generator whose state is set for each.

        Creating a generator costs more than all draws of a sample, since it reads entropy from the system.
        """
        rng = self.rng(0, 0)
        state = rng.bit_generator.state
        counter = state["state"]["counter"]
        for step, place in places:
            counter[2], counter[3] = (place + 1) & MASK, step & MASK
            rng.bit_generator.state = state
            yield rng


@dataclass(frozen=True)
class BalancedOrder(Order):
    """An endless order in which every class has the same number of samples, whatever its size.

    Each round visits every class once, in a shuffled order. A class is shuffled anew whenever all of its
    samples were used, so those of small classes are repeated.
    """

    labels: np.ndarray = field(repr=False, compare=False, kw_only=True)  # (length,) class indices

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The samples of each class that has any."""
        by_class = np.argsort(self.labels, kind="stable")
        starts = np.unique(self.labels[by_class], return_index=True)[1]
        return np.split(by_class, starts[1:])

    def sample(self, step: int, place: int) -> int:
        count = len(self.members)
        turn, within = divmod(step * self.batch + place, count)
        chosen = shuffled(within, count, mixed(self.seed, turn))
        members = self.members[chosen]
        epoch, within = divmod(turn, len(members))
        return int(members[shuffled(within, len(members), mixed(self.seed, chosen, epoch))])

    def samples(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        return np.array([self.sample(step, place) for step, place in places], dtype=np.int64)


def mixed(*numbers: int) -> int:
    """Hash integers to one of 64 bits."""
    state = 0
    for number in numbers:
        state = finalise((state + (number & MASK) + STRIDE) & MASK)
    return state


def finalise(state: Word) -> Word:
    """The finaliser of splitmix64."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def shuffled(index: int, length: int, key: int) -> int:
    """A keyed permutation of range(length), by a Feistel network with cycle walking."""
    index = network(index, length, key)
    while index >= length:
        index = network(index, length, key)
    return index


def all_shuffled(indices: np.ndarray, length: int, key: int) -> np.ndarray:
    """`shuffled` for many indices at once."""
    results = network(indices.astype(np.uint64), length, key)
    while len(beyond := np.flatnonzero(results >= length)):
        results[beyond] = network(results[beyond], length, key)
    return results


def network(index: Word, length: int, key: int) -> Word:
    """A keyed permutation of the integers with the bit width of `length`, rounded up to an even width."""
    half = ((length - 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for state in rounds(key):
        left, right = right, left ^ (finalise((right + state) & MASK) & low)
    return (left << half) | right


@lru_cache(maxsize=4)
def rounds(key: int) -> tuple[int, ...]:
    """The round keys of an epoch, cached since all its indices share them."""
    return tuple((mixed(key, number) + STRIDE) & MASK for number in range(ROUNDS))
