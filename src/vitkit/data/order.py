"""Which sample stands in which place of which batch: a pure function of (seed, step, place)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from vitkit.errors import Error

ROUNDS = 6
MASK = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15  # between the states of splitmix64
Word = TypeVar("Word", int, np.ndarray)  # a number of 64 bits, or an array of them as uint64


@dataclass(frozen=True)
class Order:
    """A shuffled, endless order over `length` samples, each once an epoch, without a table of them.

    Nothing about workers or processes enters, so a run resumes by being asked for a later step.
    """

    length: int
    batch: int
    seed: int = 0

    def __post_init__(self):
        if self.length < 1 or self.batch < 1:
            raise Error(
                f"an order needs one sample and a batch of 1 at least, not {self.length} and {self.batch}",
                code="request.value",
            )

    def sample(self, step: int, place: int) -> int:
        """The number of the sample at one place of one global batch."""
        epoch, within = divmod(step * self.batch + place, self.length)
        return shuffled(within, self.length, mixed(self.seed, epoch))

    def samples(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """What `sample` gives for each (step, place), for all of them at once."""
        steps, within = np.array(places, dtype=np.int64).reshape(-1, 2).T
        epochs, within = np.divmod(steps * self.batch + within, self.length)
        found = np.empty_like(within)
        for epoch in set(epochs.tolist()):
            here = epochs == epoch
            found[here] = all_shuffled(within[here], self.length, mixed(self.seed, epoch))
        return found

    def rng(self, step: int, place: int) -> np.random.Generator:
        """The source of every random choice made for that sample; place -1 is the batch's own."""
        key = np.array([self.seed & MASK, 0x76_69_74], dtype=np.uint64)
        counter = np.array([0, 0, (place + 1) & MASK, step & MASK], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def rngs(self, places: Sequence[tuple[int, int]]) -> Iterator[np.random.Generator]:
        """What `rng` gives for each (step, place), one after another: one generator, set anew each time.

        To make one costs more than all that a sample draws from it: it first asks the system for a seed.
        """
        rng = self.rng(0, 0)
        state = rng.bit_generator.state
        counter = state["state"]["counter"]
        for step, place in places:
            counter[2], counter[3] = (place + 1) & MASK, step & MASK
            rng.bit_generator.state = state
            yield rng


def mixed(*numbers: int) -> int:
    """Numbers stirred into one of 64 bits."""
    state = 0
    for number in numbers:
        state = stirred((state + (number & MASK) + STRIDE) & MASK)
    return state


def stirred(state: Word) -> Word:
    """The finaliser of splitmix64."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def shuffled(index: int, length: int, key: int) -> int:
    """Where a keyed permutation of range(length) sends an index: a Feistel network, walked into range."""
    index = network(index, length, key)
    while index >= length:
        index = network(index, length, key)
    return index


def all_shuffled(indices: np.ndarray, length: int, key: int) -> np.ndarray:
    """Where the same permutation sends each of many indices."""
    found = network(indices.astype(np.uint64), length, key)
    while len(beyond := np.flatnonzero(found >= length)):
        found[beyond] = network(found[beyond], length, key)
    return found


def network(index: Word, length: int, key: int) -> Word:
    """A keyed permutation of the numbers of as many bits as `length` needs, rounded up to an even count."""
    half = ((length - 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for state in rounds(key):
        left, right = right, left ^ (stirred((right + state) & MASK) & low)
    return (left << half) | right


@lru_cache(maxsize=4)
def rounds(key: int) -> tuple[int, ...]:
    """What the rounds of a network have in common for all indices of an epoch."""
    return tuple((mixed(key, number) + STRIDE) & MASK for number in range(ROUNDS))
