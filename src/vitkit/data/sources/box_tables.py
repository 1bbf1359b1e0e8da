"""Boxes and shapes of objects, of all images of a split in a few arrays; read as one target per image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitkit.data.image_frames import Frame, Frames, needs_turn, turn_boxes, turn_mask
from vitkit.data.run_lengths import mask_of, parse_counts, polygon_mask
from vitkit.data.sources.annotation_tree import Note, Tree
from vitkit.data.sources.source import Source
from vitkit.data.targets import Target, Targets, digest_of
from vitkit.errors import Error

FARTHEST = 1e7  # pixels: coordinates beyond it are damaged
MOST_OBJECTS = 10_000  # of one image
MOST_POINTS = 200_000  # of the polygons of one object
NEGLIGIBLE = 0.1  # pixels by which a box may cross the edge of the image, as rounded numbers do
Runs = tuple[int, int, Any]  # height, width and run lengths, as a list or compressed text


@dataclass
class ObjectRows:
    """The objects of a split while its files are parsed, image by image."""

    where: list[str] = field(default_factory=list)  # file and line or id of each object, for messages
    boxes: list[tuple[float, ...]] = field(default_factory=list)  # x0, y0, x1, y1; NaN: from the shape
    labels: list[int] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)  # NaN: that of the box
    polygons: dict[int, list[np.ndarray]] = field(default_factory=dict)  # (N, 2) each, by object
    runs: dict[int, Runs] = field(default_factory=dict)
    starts: list[int] = field(default_factory=lambda: [0])  # of each image; one more than images
    sizes: list[tuple[int, int]] = field(default_factory=list)  # annotated height and width; 0 if unknown

    def add(
        self, where: str, box: Sequence[float], label: int, *, crowd: bool = False, area: float = math.nan
    ) -> int:
        """Add an object of the present image; its number is returned."""
        self.where.append(where)
        self.boxes.append(tuple(box))
        self.labels.append(label)
        self.crowd.append(crowd)
        self.areas.append(area)
        if len(self.labels) - self.starts[-1] > MOST_OBJECTS:
            raise Error(
                f"{where}: more than {MOST_OBJECTS} objects in one image; cut the image into tiles",
                code="data.labels",
            )
        return len(self.labels) - 1

    def end_image(self, size: tuple[int, int] = (0, 0)) -> None:
        """End the objects of an image."""
        self.starts.append(len(self.labels))
        self.sizes.append(size)


def check_points(points: Sequence[Any], where: str, most: int = MOST_POINTS) -> np.ndarray:
    """The points (N, 2) of a polygon x, y, x, y, ...; at least three."""
    if len(points) > 2 * most:
        raise Error(f"{where}: a polygon of {len(points) // 2} points; simplify it", code="data.labels")
    if len(points) < 6 or len(points) % 2:
        raise Error(
            f"{where}: a polygon of {len(points)} numbers; expected at least 6, x and y in turn",
            code="data.labels",
        )
    return np.array([coordinate(value, where) for value in points], np.float64).reshape(-1, 2)


def coordinate(value: Any, where: str) -> float:
    """A finite number of a sensible size."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= FARTHEST:  # NaN too
        raise Error(
            f"{where}: the coordinate {str(value)[:40]!r}; expected a number of pixels", code="data.labels"
        )
    return float(value)


def box_around(polygons: Sequence[np.ndarray]) -> tuple[float, ...]:
    points = np.concatenate(polygons)
    return (*points.min(0).tolist(), *points.max(0).tolist())


def polygon_area(points: np.ndarray) -> float:
    """The area inside a polygon (N, 2)."""
    x, y = (points - points[0]).T
    return 0.5 * abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1)))


class BoxReader:
    """The boxes of the images of one split and, where all objects have shapes, their masks.

    relative: boxes and polygons are shares of the width and height of the upright image.
    """

    def __init__(
        self, place: str, frames: Frames, rows: ObjectRows, *, relative: bool = False,
        notes: tuple[Note, ...] = (), shift: tuple[float, ...] = (0, 0, 0, 0),
    ):  # fmt: skip
        self.place, self.frames, self.relative, self.notes = place, frames, relative, notes
        self.starts = np.array(rows.starts, np.int64)
        self.sizes = np.array(rows.sizes, np.int64).reshape(-1, 2)
        self.boxes = np.array(rows.boxes, np.float64).reshape(-1, 4) + np.array(shift)
        self.labels = np.array(rows.labels, np.int64)
        self.crowd, self.areas = np.array(rows.crowd, bool), np.array(rows.areas, np.float64)
        self.where, self.runs = rows.where, rows.runs
        shaped = sorted(rows.polygons)
        parts = [part for i in shaped for part in rows.polygons[i]]
        self.points = np.concatenate([*parts, np.zeros((0, 2))])
        self.point_starts = np.cumsum([0, *map(len, parts)])
        counts = np.zeros(len(self.labels), np.int64)
        counts[shaped] = [len(rows.polygons[i]) for i in shaped]
        self.part_starts = np.concatenate([[0], np.cumsum(counts)])
        self.shapes = len(self.labels) > 0 and len(shaped) + len(self.runs) == len(self.labels)

    @property
    def most(self) -> int:
        return int(np.diff(self.starts).max(initial=0))

    def __call__(self, index: int) -> Target:
        return self.checked(index)[0]

    def checked(self, index: int) -> tuple[Target, tuple[str, ...]]:
        """The target of an image, and the kinds of findings about it, one for each object concerned."""
        frame = self.frames(index)
        rows = np.arange(self.starts[index], self.starts[index + 1])
        problems: list[str] = []
        turn = self.turned(index, frame, problems)
        height, width = frame.stored if turn else frame.size
        boxes = self.boxes[rows] * (np.array([width, height] * 2) if self.relative else 1)
        areas = self.areas[rows] * (width * height if self.relative else 1)
        kept, boxes = clip(boxes, height, width, problems)
        rows, areas = rows[kept], areas[kept]
        inside = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        areas = np.fmin(areas, inside)  # NaN: that of the box
        masks = None
        if self.shapes:
            drawn = [self.mask(int(row), (height, width)) for row in rows]
            drawn = [turn_mask(mask, frame) for mask in drawn] if turn else drawn
            masks = np.stack(drawn) if drawn else np.zeros((0, *frame.size), bool)
        target = Target(
            frame.size, boxes=(turn_boxes(boxes, frame) if turn else boxes).astype(np.float32),
            labels=self.labels[rows], crowd=self.crowd[rows], areas=areas.astype(np.float32), instances=masks,
        )  # fmt: skip
        return target, tuple(problems)

    def digest(self, index: int) -> bytes:
        """A digest of what is annotated in an image, without drawing any mask."""
        rows = slice(int(self.starts[index]), int(self.starts[index + 1]))
        parts = self.part_starts[rows.start : rows.stop + 1]
        ends = self.point_starts[parts[0] : parts[-1] + 1]
        runs = [self.runs[row] for row in range(rows.start, rows.stop) if row in self.runs]
        texts = [f"{height} {width} {runs if isinstance(runs, str) else np.asarray(runs).tolist()}"
                 for height, width, runs in runs]  # fmt: skip
        return digest_of((
            self.sizes[index], self.boxes[rows], self.labels[rows], self.crowd[rows], self.areas[rows],
            parts - parts[0], ends - ends[0], self.points[ends[0] : ends[-1]],
            np.frombuffer("\n".join(texts).encode(), np.uint8),
        ))  # fmt: skip

    def turned(self, index: int, frame: Frame, problems: list[str]) -> bool:
        """Whether the annotations are those of the picture as stored, before EXIF turns it."""
        annotated = int(self.sizes[index][0]), int(self.sizes[index][1])
        turn = all(annotated) and needs_turn(annotated, frame, f"{self.place}, {self.frames.keys[index]}")
        if turn:
            problems.append("exif-turned")
        elif frame.orientation > 1 and (frame.size == frame.stored or not all(annotated)):
            problems.append("exif-unclear")
        return turn

    def mask(self, row: int, size: tuple[int, int]) -> np.ndarray:
        """The mask (H, W) bool of an object, by number."""
        where = f"{self.place}, {self.where[row]}"
        if row in self.runs:
            height, width, counts = self.runs[row]
            if (height, width) != size:
                raise Error(
                    f"{where}: a mask of {width} x {height} pixels for an image of {size[1]} x {size[0]}; "
                    "export the annotations again",
                    code="data.labels",
                )
            return mask_of(parse_counts(counts, where) if isinstance(counts, str) else counts, size, where)
        mask = np.zeros(size, bool)
        for part in range(self.part_starts[row], self.part_starts[row + 1]):
            points = self.points[self.point_starts[part] : self.point_starts[part + 1]]
            mask |= polygon_mask(points * ([size[1], size[0]] if self.relative else 1), size, where)
        return mask


def clip(boxes: np.ndarray, height: int, width: int, problems: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Which boxes (N, 4) have an area within the image, and these boxes clipped to it."""
    limits = np.array([width, height, width, height], np.float64)
    clipped = np.clip(boxes, 0, limits)
    empty = (boxes[:, 2] <= boxes[:, 0]) | (boxes[:, 3] <= boxes[:, 1])
    kept = (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])
    over = kept & (np.abs(boxes - clipped) > NEGLIGIBLE).any(axis=1)
    problems += ["box-empty"] * int(empty.sum())
    problems += ["box-outside"] * int((~kept & ~empty).sum())
    problems += ["box-clipped"] * int(over.sum())
    return kept, clipped[kept]


def box_source(
    tree: Tree, images: Sequence[str], classes: Sequence[str], rows: ObjectRows, *, relative: bool = False,
    notes: Sequence[Note] = (), shift: tuple[float, ...] = (0, 0, 0, 0),
) -> Source:  # fmt: skip
    """The images of a split with their boxes."""
    if not images:
        raise Error(f"{tree.place}: annotations without images", code="data.empty")
    reader = BoxReader(
        tree.place, Frames(tree.read, list(images)), rows, relative=relative, notes=tuple(notes), shift=shift
    )
    kinds = {"boxes", "instances"} if reader.shapes else {"boxes"}
    return tree.source(images, classes, Targets(reader, frozenset(kinds), reader.most, reader.digest))
