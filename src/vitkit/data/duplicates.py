"""Find training images that are also in other data sets, such as test sets: exact and near-duplicates."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from vitkit.data.decode import BadImage, decode
from vitkit.data.doctor import difference_hash, near_pairs
from vitkit.data.sources.source import Source

PART = 256  # images that a thread hashes in a row
NONE = np.iinfo(np.int64).max  # no match
Advance = Callable[[int], None]


class Removed(NamedTuple):
    """A training image that is left out, the reason, and the image that it duplicates."""

    number: int
    key: str
    reason: str  # "same pixels" or "looks alike"
    match: str  # set:key


class Hashes(NamedTuple):
    """The hashes of the images of a source, one row each."""

    digest: np.ndarray  # of the pixels
    perceptual: np.ndarray  # of the appearance
    readable: np.ndarray  # bool: the image can be decoded
    distinctive: np.ndarray  # bool: the perceptual hash is meaningful


def against(
    train: Source,
    others: Sequence[Source],
    *,
    near: bool = True,
    workers: int = 4,
    advance: Advance = lambda count: None,
) -> tuple[np.ndarray, list[Removed]]:
    """The indices of the training images that are in none of the other sets, and the ones that are.

    Every image is decoded once, in a thread pool, since decoding releases the GIL. An unreadable image
    matches nothing. Nothing is written: train.take(indices) is the rest.
    """
    train_hashes = hash_images(train, workers, advance)
    parts = [hash_images(source, workers, advance) for source in others]
    if not parts:
        return np.arange(len(train)), []
    other_hashes = Hashes(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    exact = match_exact(train_hashes, other_hashes)
    alike = match_near(train_hashes, other_hashes) if near else np.full(len(train), NONE)
    starts = np.cumsum([0, *(len(source) for source in others)])

    def name(number: int) -> str:
        which = int(np.searchsorted(starts, number, side="right")) - 1
        return f"{others[which].name}:{others[which].keys[number - int(starts[which])]}"

    matches = np.flatnonzero((exact < NONE) | (alike < NONE))
    removed = [
        Removed(i, train.keys[i], "same pixels", name(int(exact[i])))
        if exact[i] < NONE
        else Removed(i, train.keys[i], "looks alike", name(int(alike[i])))
        for i in matches.tolist()
    ]
    return np.setdiff1d(np.arange(len(train)), matches), removed


def hash_images(source: Source, workers: int, advance: Advance) -> Hashes:
    count = len(source)
    hashes = Hashes(
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
            hashes.digest[i] = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=key).digest()
            hashes.readable[i] = True
            if perceptual := difference_hash(pixels):
                hashes.perceptual[i] = np.frombuffer(perceptual, np.uint64)[0]
                hashes.distinctive[i] = True
        return len(part)

    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(fill, (range(count)[start : start + PART] for start in range(0, count, PART))):
            advance(done)
    return hashes


def match_exact(train: Hashes, others: Hashes) -> np.ndarray:
    """For each training image, the first of the other images with the same pixels."""
    matches = np.full(len(train.readable), NONE)
    readable = np.flatnonzero(others.readable)
    digests, first = np.unique(others.digest[readable], return_index=True)
    if len(digests):
        nearest = np.minimum(np.searchsorted(digests, train.digest), len(digests) - 1)
        same = train.readable & (digests[nearest] == train.digest)
        matches[same] = readable[first[nearest[same]]]
    return matches


def match_near(train: Hashes, others: Hashes) -> np.ndarray:
    """For each training image, the first of the other images whose hash differs in no more than 3 bits."""
    both = [train.perceptual[train.distinctive], others.perceptual[others.distinctive]]
    hashes, inverse = np.unique(np.concatenate(both), return_inverse=True)
    count = len(both[0])
    first = np.full(len(hashes), NONE)  # the first of the other images with exactly that hash
    np.minimum.at(first, inverse[count:], np.flatnonzero(others.distinctive))
    best = first.copy()
    for pairs in near_pairs(hashes.view(np.uint8).reshape(-1, 8)):
        for a, b in (pairs.T, pairs.T[::-1]):
            np.minimum.at(best, a, first[b])
    matches = np.full(len(train.distinctive), NONE)
    matches[train.distinctive] = best[inverse[:count]]
    return matches
