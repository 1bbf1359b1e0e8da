"""Which training images stand in other sets too, as those a model is evaluated on: by pixels and by looks."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from vitkit.data.decode import BadImage, decode
from vitkit.data.doctor import difference_hash, near_pairs
from vitkit.data.sources.source import Source

PART = 256  # images that a thread looks at in a row
NONE = np.iinfo(np.int64).max  # no match
Advance = Callable[[int], None]


class Removed(NamedTuple):
    """A training image that is left out, why, and what it is a copy of."""

    number: int
    key: str
    reason: str  # "same pixels" or "looks alike"
    match: str  # set:key


class Sight(NamedTuple):
    """What tells the images of a source apart, one row each."""

    digest: np.ndarray  # of the pixels
    hash: np.ndarray  # of how they look
    known: np.ndarray  # bool: the image can be read
    telling: np.ndarray  # bool: its looks say something


def against(
    train: Source,
    others: Sequence[Source],
    *,
    near: bool = True,
    workers: int = 4,
    advance: Advance = lambda count: None,
) -> tuple[np.ndarray, list[Removed]]:
    """The numbers of the training images that are in none of the other sets, and those that are.

    Every image is read and decoded once, by threads, since decoding leaves Python to the others. An image
    that cannot be read is a copy of none. Nothing is written: train.take(kept) is what remains.
    """
    ours = sight(train, workers, advance)
    theirs = [sight(source, workers, advance) for source in others]
    if not theirs:
        return np.arange(len(train)), []
    them = Sight(*(np.concatenate(column) for column in zip(*theirs, strict=True)))
    exact = match_exact(ours, them)
    alike = match_near(ours, them) if near else np.full(len(train), NONE)
    starts = np.cumsum([0, *(len(source) for source in others)])

    def named(number: int) -> str:
        which = int(np.searchsorted(starts, number, side="right")) - 1
        return f"{others[which].name}:{others[which].keys[number - int(starts[which])]}"

    gone = np.flatnonzero((exact < NONE) | (alike < NONE))
    removed = [
        Removed(i, train.keys[i], "same pixels", named(int(exact[i])))
        if exact[i] < NONE
        else Removed(i, train.keys[i], "looks alike", named(int(alike[i])))
        for i in gone.tolist()
    ]
    return np.setdiff1d(np.arange(len(train)), gone), removed


def sight(source: Source, workers: int, advance: Advance) -> Sight:
    count = len(source)
    found = Sight(
        np.zeros(count, "S16"), np.zeros(count, np.uint64), np.zeros(count, bool), np.zeros(count, bool)
    )

    def fill(part: range) -> int:
        for i in part:
            try:
                content = source.fetch(i)
                pixels = decode(content) if isinstance(content, bytes) else np.ascontiguousarray(content)
            except BadImage:
                continue
            height, width = pixels.shape[:2]
            key = b"%d %d" % (width, height)
            found.digest[i] = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=key).digest()
            found.known[i] = True
            if looks := difference_hash(pixels):
                found.hash[i], found.telling[i] = np.frombuffer(looks, np.uint64)[0], True
        return len(part)

    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(fill, (range(count)[at : at + PART] for at in range(0, count, PART))):
            advance(done)
    return found


def match_exact(ours: Sight, them: Sight) -> np.ndarray:
    """For each of ours the first of theirs with the same pixels."""
    found = np.full(len(ours.known), NONE)
    theirs = np.flatnonzero(them.known)
    digests, first = np.unique(them.digest[theirs], return_index=True)
    if len(digests):
        at = np.minimum(np.searchsorted(digests, ours.digest), len(digests) - 1)
        same = ours.known & (digests[at] == ours.digest)
        found[same] = theirs[first[at[same]]]
    return found


def match_near(ours: Sight, them: Sight) -> np.ndarray:
    """For each of ours the first of theirs that looks like it: no more than 3 bits of the hashes differ."""
    hashes, at = np.unique(
        np.concatenate([ours.hash[ours.telling], them.hash[them.telling]]), return_inverse=True
    )
    mine, other = at[: int(ours.telling.sum())], at[int(ours.telling.sum()) :]
    first = np.full(len(hashes), NONE)  # the first of theirs with that very hash
    np.minimum.at(first, other, np.flatnonzero(them.telling))
    best = first.copy()
    for pairs in near_pairs(hashes.view(np.uint8).reshape(-1, 8)):
        for a, b in (pairs.T, pairs.T[::-1]):
            np.minimum.at(best, a, first[b])
    found = np.full(len(ours.telling), NONE)
    found[ours.telling] = best[mine]
    return found
