"""Images to look at before training: likely wrong labels, near-duplicates and outliers by their features."""

# N usable images of all splits

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitkit.data.decode import BadImage, decode
from vitkit.data.doctor import file_names, ordered
from vitkit.data.findings import Finding, find, some
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.metrics.feature_neighbours import near_duplicates, nearest_neighbours, outliers
from vitkit.metrics.label_errors import LabelErrors, label_errors
from vitkit.runs.corrections import Suspect
from vitkit.runs.features import Extractor
from vitkit.runs.samples import SIDE, jpeg, resized

COPIES = ("duplicates", "leakage", "near-duplicates", "near-leakage")  # kinds of findings by pixels
FEWEST = 20  # images that can be compared with each other


@dataclass(frozen=True)
class Pool:
    """The usable images of all splits with their features, row by row."""

    splits: dict[str, Source]
    names: Mapping[str, Sequence[str]]  # of files in findings, by split
    split: list[str]  # (N,) the split of each row
    index: np.ndarray  # (N,) its index in the split
    x: torch.Tensor  # (N, D)

    def __len__(self) -> int:
        return len(self.index)

    def name(self, row: int) -> str:
        return self.names[self.split[row]][self.index[row]]

    def suspect(self, row: int) -> Suspect:
        source, index = self.splits[self.split[row]], int(self.index[row])
        label = "" if source.multilabel else source.classes[source.labels[index]]
        return Suspect(str(source.keys[index]), self.split[row], label)

    def labels(self) -> tuple[np.ndarray, list[str]]:
        """Class numbers (N,) that all splits share, and the names of the classes."""
        classes = sorted({name for source in self.splits.values() for name in source.classes})
        number = {name: i for i, name in enumerate(classes)}
        parts = []
        for split, source in self.splits.items():
            own = np.array([number[name] for name in source.classes])
            rows = self.index[np.array(self.split) == split]
            parts.append(own[np.asarray(source.labels)[rows]])
        return np.concatenate(parts), classes


@dataclass(frozen=True)
class Suspects:
    """The images to look at, by reason, and the findings about them."""

    images: Mapping[int, Suspect]  # by row of the pool, each image once
    labels: tuple[int, ...]  # rows of the pool, the most certain first
    groups: tuple[tuple[int, ...], ...]  # near-duplicates
    outliers: tuple[int, ...]  # the farthest first
    checked: int  # images
    accuracy: float | None  # share of labels that the out-of-fold answers agree with; None: not checked
    notes: tuple[str, ...]


def gather(splits: Mapping[str, Source], extractor: Extractor) -> Pool:
    """The features of all images."""
    splits = ordered(splits)
    parts = {split: extractor.features(source) for split, source in splits.items()}
    names = [split for split, part in parts.items() for _ in range(len(part.index))]
    index = np.concatenate([part.index.numpy() for part in parts.values()])
    x = torch.cat([part.x for part in parts.values()])
    if not bool(x.isfinite().all()):
        raise Error("the features are not finite; check the weights of the model", code="weights.values")
    return Pool(splits, file_names(splits), names, index, x)


def find_suspects(pool: Pool, copies: Sequence[Finding] = (), device: str = "cpu", seed: int = 0) -> Suspects:
    """Compare every image with all others. copies: findings by pixels, which are not reported again."""
    if len(pool) < FEWEST:
        raise Error(
            f"--model: {len(pool)} usable images; at least {FEWEST} are needed to compare them",
            code="data.empty",
        )
    errors, classes, notes = check_labels(pool, seed)
    neighbours = nearest_neighbours(pool.x, device=device)
    groups = new_groups(pool, near_duplicates(neighbours), copies)
    far, _ = outliers(neighbours)
    suspects: dict[int, Suspect] = {}

    def add(row: int, reason: str, **more: Any) -> None:
        suspect = suspects.get(row) or pool.suspect(row)
        suspects[row] = replace(suspect, reasons=(*suspect.reasons, reason), **more)

    if errors:
        for row, number, p in zip(errors.rows.tolist(), errors.suggested, errors.probability, strict=True):
            add(row, "label", suggested=classes[number], probability=float(p))
    for group in groups:
        for row, of in extra_copies(pool, group):
            add(row, "near-duplicate", duplicate_of=f"{pool.split[of]}:{pool.suspect(of).image}")
    for row in far.tolist():
        add(row, "outlier")
    return Suspects(
        suspects, tuple(errors.rows.tolist()) if errors else (), tuple(groups),
        tuple(far.tolist()), len(pool), errors.accuracy if errors else None, notes,
    )  # fmt: skip


def new_groups(pool: Pool, groups: Sequence[np.ndarray], copies: Sequence[Finding]) -> list[tuple[int, ...]]:
    """Groups of near-duplicates, in which one image represents the copies that are reported already."""
    known = [group for finding in copies if finding.kind in COPIES for group in finding.groups]
    first = {name: group[0] for group in known for name in group}
    kept = []
    for group in groups:
        distinct = {first.get(pool.name(row), pool.name(row)): row for row in reversed(group.tolist())}
        if len(distinct) > 1:
            kept.append(tuple(sorted(distinct.values())))
    return sorted(kept, key=lambda group: -len({pool.split[row] for row in group}))  # across splits first


def check_labels(pool: Pool, seed: int) -> tuple[LabelErrors | None, list[str], tuple[str, ...]]:
    """The likely wrong labels, the names of the classes, and a note where labels cannot be checked."""
    if any(source.multilabel for source in pool.splits.values()):
        return None, [], ("Labels were not checked: the images have several labels each.",)
    labels, classes = pool.labels()
    if len(np.unique(labels)) < 2:
        return None, classes, ("Labels were not checked: all images have the same label.",)
    return label_errors(pool.x.numpy(), labels, seed=seed), classes, ()


def extra_copies(pool: Pool, group: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each image of a group but the one to keep, and that one: of test rather than of val or train."""
    order = {split: place for place, split in enumerate(("test", "val", "train", "all"))}
    keep, *others = sorted(group, key=lambda row: (order.get(pool.split[row], len(order)), row))
    for row in others:
        yield row, keep


def findings(pool: Pool, suspects: Suspects, page: str, table: str) -> Iterator[Finding]:
    """The findings; page and table are where to look and what to edit."""
    files = {"page": page, "table": table}
    if suspects.labels:
        named = [pool.name(row) for row in suspects.labels]
        likely = [(pool.name(row), suspects.images[row]) for row in suspects.labels]
        listed = [f"{name} ({image.label}, likely {image.suggested})" for name, image in likely]
        yield find("wrong-labels", named, count=f"{suspects.checked:,}", listed=some(listed), **files)
    by_splits: dict[tuple[str, ...], list[list[str]]] = {}
    for group in suspects.groups:
        names = tuple(dict.fromkeys(pool.split[row] for row in group))
        by_splits.setdefault(names, []).append([pool.name(row) for row in group])
    for names, groups in sorted(by_splits.items()):
        kind = "similar-across" if len(names) > 1 else "similar"
        yield find(kind, groups=groups, place=" and ".join(names), **files)
    if suspects.outliers:
        yield find("outliers", [pool.name(row) for row in suspects.outliers], **files)


def thumbnail(pool: Pool, row: int) -> str:
    """A small JPEG in base64; empty if the image has become unreadable."""
    source = pool.splits[pool.split[row]]
    try:
        content = source.fetch(int(pool.index[row]))
        return jpeg(resized(decode(content, shorter=SIDE) if isinstance(content, bytes) else content))
    except BadImage:
        return ""
