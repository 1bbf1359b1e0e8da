"""Folds for cross-validation: stratified by class, by content, with copies of an image in the same fold."""

# N images

import os
import re

import numpy as np

from vitkit.data.doctor import near_pairs
from vitkit.data.duplicates import hash_images
from vitkit.data.sources.source import Source
from vitkit.data.splits import by_class, fingerprints
from vitkit.errors import Error

MOST_FOLDS = 100
FEW = 20_000  # images up to which near-duplicates are looked for; every image is decoded for it


def parse_fold(text: str) -> tuple[int, int]:
    """'2/5' -> (2, 5): the second of five folds."""
    match = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count or not 2 <= count <= MOST_FOLDS:
        raise Error(
            f"fold must be NUMBER/FOLDS with 2 to {MOST_FOLDS} folds, as in 2/5, not {text!r}",
            code="recipe.value",
        )
    return number, count


def duplicate_groups(source: Source) -> np.ndarray:
    """(N,): a number for each image, the same for exact copies and for near-duplicates."""
    _, groups = np.unique(fingerprints(source), return_inverse=True)
    if len(source) > FEW:
        return groups
    hashes = hash_images(source, os.cpu_count() or 1, lambda count: None)
    known = np.flatnonzero(hashes.distinctive)
    values, index, inverse = np.unique(hashes.perceptual[known], return_index=True, return_inverse=True)
    first = known[index]  # the first image with each value
    links = [(known, first[inverse])]
    for pairs in near_pairs(values.view(np.uint8).reshape(-1, 8)):
        links.append((first[pairs[:, 0]], first[pairs[:, 1]]))
    return joined(groups, links)


def joined(groups: np.ndarray, links: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The groups with those of linked images made one."""
    parent = list(range(int(groups.max(initial=-1)) + 1))

    def root(group: int) -> int:
        while parent[group] != group:
            parent[group] = parent[parent[group]]
            group = parent[group]
        return group

    for first, second in links:
        for a, b in zip(groups[first].tolist(), groups[second].tolist(), strict=True):
            low, high = sorted((root(a), root(b)))
            parent[high] = low
    return np.array([root(group) for group in range(len(parent))], dtype=np.int64)[groups]


def check_classes(source: Source, count: int, groups: np.ndarray | None = None) -> None:
    """Refuse more folds than a class has images, or groups of copies of images if they are known."""
    if source.multilabel:
        return
    sizes = {
        number: len(members) if groups is None else len(np.unique(groups[members]))
        for number, members in enumerate(by_class(source))
        if len(members)
    }
    smallest = min(sizes, key=lambda number: sizes[number], default=0)
    if not sizes or sizes[smallest] >= count:
        return
    fewest = sizes[smallest]
    remedy = "add images of it, or leave --folds out"
    remedy = f"use --folds {fewest}, or {remedy}" if fewest > 1 else remedy
    kind = "image" if groups is None else "different image"
    raise Error(
        f"{source.name}: --folds {count} needs {count} training images of each class, but class "
        f"{source.classes[smallest]!r} has {fewest} {kind}{'' if fewest == 1 else 's'}; {remedy}",
        code="data.empty",
    )


def fold_numbers(source: Source, count: int, groups: np.ndarray) -> np.ndarray:
    """(N,): the fold of each image, from 0; every class is spread evenly, and no group is divided.

    It depends only on the content and the labels of the images, not on their names or order.
    """
    check_classes(source, count, groups)
    hashes, folds, totals = fingerprints(source), np.full(len(source), -1), np.zeros(count, int)
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(int(groups.max(initial=-1)) + 2))
    for members in by_class(source):
        own = np.bincount(folds[members][folds[members] >= 0], minlength=count)
        inside = np.zeros(len(source), bool)
        inside[members] = True
        free = members[folds[members] < 0]
        for group in dict.fromkeys(groups[free[np.argsort(hashes[free], kind="stable")]].tolist()):
            rows = order[starts[group] : starts[group + 1]]
            fold = min(range(count), key=lambda number: (own[number], totals[number]))
            folds[rows] = fold
            totals[fold] += len(rows)
            own[fold] += int(inside[rows].sum())
    if not totals.all():
        raise Error(
            f"{source.name}: {int((totals > 0).sum())} of {count} folds have images; use fewer folds, or add "
            "images (copies of one image stay together)",
            code="data.empty",
        )
    return folds


def fold_split(source: Source, number: int, count: int, groups: np.ndarray) -> tuple[Source, Source]:
    """(rest, fold): the images outside and inside of one of the folds, which are counted from 1."""
    inside = fold_numbers(source, count, groups) == number - 1
    return source.take(np.flatnonzero(~inside)), source.take(np.flatnonzero(inside))
