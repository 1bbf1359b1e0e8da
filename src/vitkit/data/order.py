"""Which sample stands in which place of which batch: a pure function of (seed, step, place)."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

ROUNDS = 6
MASK = (1 << 64) - 1


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
            raise ValueError(f"an order needs samples and places, not {self.length} and {self.batch}")

    def sample(self, step: int, place: int) -> int:
        """The number of the sample at one place of one global batch."""
        epoch, within = divmod(step * self.batch + place, self.length)
        return shuffled(within, self.length, mixed(self.seed, epoch))

    def rng(self, step: int, place: int) -> np.random.Generator:
        """The source of every random choice made for that sample; place -1 is the batch's own."""
        key = np.array([self.seed & MASK, 0x76_69_74], dtype=np.uint64)
        counter = np.array([0, 0, (place + 1) & MASK, step & MASK], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


def mixed(*numbers: int, state: int = 0) -> int:
    """Numbers stirred into one of 64 bits (the finaliser of splitmix64), or into one already stirred."""
    for number in numbers:
        state = (state + (number & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def shuffled(index: int, length: int, key: int) -> int:
    """Where a keyed permutation of range(length) sends an index: a Feistel network, walked into range."""
    if length == 1:
        return 0
    half = ((length - 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for state in rounds(key):
            left, right = right, left ^ (mixed(right, state=state) & low)
        index = (left << half) | right
        if index < length:
            return index


@lru_cache(maxsize=4)
def rounds(key: int) -> tuple[int, ...]:
    """What the rounds of a network have in common for all indices of an epoch."""
    return tuple(mixed(key, number) for number in range(ROUNDS))
