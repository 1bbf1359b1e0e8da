"""Masks of objects as COCO stores them: run lengths, compressed or not, and polygons.

Runs go down the columns, and the first is of zeros. Polygons cover the pixels that pycocotools gives them:
their outline is drawn at five times the size and closes each column where it crosses the middle of a pixel.
"""

from collections.abc import Sequence

import numpy as np

from vitkit.errors import Error

SCALE = 5  # of the outline, as in pycocotools
MOST_STEPS = 50_000_000  # of an outline, which bounds time and memory
LONGEST_COUNTS = 20_000_000  # characters of one compressed mask


def parse_counts(text: str | bytes, where: str) -> np.ndarray:
    """The run lengths of a compressed mask: groups of 5 bits, differences to the run before the last."""
    raw = np.frombuffer(text.encode("ascii", "replace") if isinstance(text, str) else text, np.uint8)
    if len(raw) > LONGEST_COUNTS:
        raise bad_runs(where, f"{len(raw)} characters")
    codes = raw.astype(np.int64) - 48
    if len(codes) and (codes.min() < 0 or codes.max() > 63 or codes[-1] & 32):
        raise bad_runs(where, "characters that no such text has")
    ends = np.flatnonzero((codes & 32) == 0)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if len(ends) and lengths.max() > 7:  # 35 bits
        raise bad_runs(where, "a run of more than 35 bits")
    place = np.arange(len(codes)) - np.repeat(starts, lengths)
    values = np.add.reduceat((codes & 31) << 5 * place, starts) if len(ends) else np.zeros(0, np.int64)
    negative = (codes[ends] & 16) != 0
    values = np.where(negative, values - (1 << 5 * lengths), values)
    values[1::2] = np.cumsum(values[1::2])  # from the fourth on each adds to the one two before it
    values[2::2] = np.cumsum(values[2::2])
    return values


def compress_counts(counts: np.ndarray) -> str:
    """Run lengths as compressed text."""
    values = np.array(counts, np.int64)
    values[3:] -= counts[1:-2]  # from the fourth on each is less the one two before it
    limits = 1 << np.arange(4, 35, 5)  # of signed numbers in 5 bits, 10 bits and so on
    groups = 1 + np.searchsorted(limits, np.where(values < 0, ~values, values), side="right")
    starts = np.cumsum(groups) - groups
    text = np.zeros(int(groups.sum()), np.uint8)
    for group in range(int(groups.max(initial=0))):
        rows = np.flatnonzero(groups > group)
        more = groups[rows] > group + 1
        text[starts[rows] + group] = 48 + (values[rows] >> 5 * group & 31) + 32 * more
    return text.tobytes().decode("ascii")


def counts_of(mask: np.ndarray) -> np.ndarray:
    """The run lengths of a mask (H, W), down the columns, beginning with zeros."""
    flat = np.concatenate([[False], mask.T.ravel().astype(bool), [True]])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    edges = changes if mask.size and not mask.T.ravel()[-1] else np.append(changes, mask.size)
    return np.diff(np.concatenate([[0], edges]))


def class_counts(mask: np.ndarray) -> dict[int, np.ndarray]:
    """The run lengths of each class of a class mask (H, W), as `counts_of` gives them for its pixels."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    starts = np.concatenate([[0], edges]) if flat.size else edges
    ends, values = np.append(edges, flat.size), flat[starts]
    runs = {}
    for number in np.unique(values).tolist():
        own = values == number
        bounds = np.stack([starts[own], ends[: len(starts)][own]], axis=1).ravel()
        if bounds[-1] < flat.size:
            bounds = np.append(bounds, flat.size)
        runs[number] = np.diff(bounds, prepend=0)
    return runs


def mask_of(counts: np.ndarray | Sequence[int], size: tuple[int, int], where: str = "mask") -> np.ndarray:
    """The mask (H, W) bool of run lengths, which must cover it exactly."""
    runs = np.asarray(counts, dtype=np.int64).ravel()
    height, width = size
    if len(runs) > height * width + 1 or (runs < 0).any() or (runs > height * width).any():
        raise bad_runs(where, "a negative run, or one that is longer than the mask")
    if int(runs.sum()) != height * width:
        raise bad_runs(where, f"runs of {int(runs.sum())} pixels in all for {height} x {width}")
    values = np.zeros(len(runs), bool)
    values[1::2] = True
    return np.repeat(values, runs).reshape(width, height).T


def bad_runs(where: str, what: str) -> Error:
    return Error(
        f"{where}: damaged run lengths of a mask ({what}); export the annotations again", code="data.labels"
    )


def polygon_mask(points: np.ndarray, size: tuple[int, int], where: str = "polygon") -> np.ndarray:
    """The mask (H, W) bool of one polygon (N, 2) of x and y."""
    height, width = size
    limits = np.array([width, height], np.float64)
    corners = np.clip(
        np.asarray(points, np.float64), -limits, 2 * limits
    )  # what is far outside stays outside
    corners = np.trunc(SCALE * corners + 0.5).astype(np.int64)
    following = np.roll(corners, -1, axis=0)
    if int(np.abs(following - corners).max(axis=1).sum()) > MOST_STEPS:
        raise Error(
            f"{where}: a polygon of {len(points)} points is too long to draw; simplify it", code="data.labels"
        )
    x, y = (np.concatenate(part) for part in zip(*map(line, corners, following), strict=True))
    steps = np.flatnonzero(x[1:] != x[:-1]) + 1
    column = (np.minimum(x[steps], x[steps - 1]) + 0.5) / SCALE - 0.5
    row = np.ceil(np.clip((np.minimum(y[steps], y[steps - 1]) + 0.5) / SCALE - 0.5, 0, height))
    hit = (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    toggles = (column[hit] * height + row[hit]).astype(np.int64)
    mask = np.zeros(height * width, bool)
    if len(toggles):
        first = toggles.min()
        crossed = np.cumsum(np.bincount(toggles - first)) % 2 == 1
        mask[first : first + len(crossed)] = crossed[: height * width - first]
        mask[first + len(crossed) :] = crossed[-1]
    return mask.reshape(width, height).T


def line(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The x and y of the points on a line in steps of one along its longer side, from start to end."""
    dx, dy = (abs(int(b) - int(a)) for a, b in zip(start, end, strict=True))
    along = 0 if dx >= dy else 1
    length = max(dx, dy)
    backwards = start[along] > end[along]
    first, last = (end, start) if backwards else (start, end)
    steps = np.arange(length + 1)
    slope = (int(last[1 - along]) - int(first[1 - along])) / length if length else 0.0
    across = np.trunc(first[1 - along] + slope * steps + 0.5).astype(np.int64)
    points = (first[along] + steps, across)
    x, y = points if along == 0 else points[::-1]
    return (x[::-1], y[::-1]) if backwards else (x, y)
