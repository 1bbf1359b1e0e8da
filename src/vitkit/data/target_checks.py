"""Checks of masks and boxes for `vitkit doctor`: what is wrong with them, and how many each class has."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.findings import Finding, find, some
from vitkit.data.sources.source import Source, call_at
from vitkit.data.targets import IGNORE, Target, kind_names
from vitkit.errors import Error

TRAINING_SIZE, PATCH = 512, 16  # that "too small" refers to: the longer side of the image, and a patch
NEAR, WHOLE, MOSTLY = 0.95, 0.95, 0.5  # overlap of near copies; share of an image; ignored share of a mask
MANY = 100  # objects, the fixed number of answers of small detectors
COMPARED = 1000  # objects of an image up to which all pairs are compared
PER_OBJECT = (
    "box-empty",
    "box-outside",
    "box-clipped",
    "box-copies",
    "box-near-copies",
    "box-small",
    "crowd",
)
PER_IMAGE = ("exif-unclear", "exif-turned", "box-whole", "many-objects", "mask-ignored")


@dataclass(frozen=True)
class TargetCheck:
    """What the annotations of one image hold."""

    name: str
    problems: Mapping[str, int] = field(default_factory=dict)  # kinds of findings, and of how many objects
    error: str = ""
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    crowd: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    sides: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # width, height at TRAINING_SIZE
    pixels: np.ndarray | None = None  # of each number 0..255 in the mask


def target_reader(source: Source) -> tuple[Any, Callable[[int], int]]:
    """What reads the targets of a source, and the index there of an image of the source."""
    read: Any = source.targets and source.targets.read
    rows: list[np.ndarray] = []
    while isinstance(read, partial) and read.func is call_at:
        read, numbers = read.args
        rows.append(numbers)

    def index_of(index: int) -> int:
        for numbers in rows:
            index = int(numbers[index])
        return index

    return read, index_of


def read_checked(source: Source, index: int) -> tuple[Target, tuple[str, ...]]:
    """The target of an image, and the kinds of findings that reading it made."""
    read, index_of = target_reader(source)
    checked = getattr(read, "checked", None)
    return checked(index_of(index)) if checked else (read(index_of(index)), ())


NEEDED = {
    "": "labels of whole images, as folders of classes give them",
    "mask": "class masks: images/ beside masks/, and classes.txt",
    "boxes": "boxes: COCO, YOLO or Pascal VOC",
    "instances": "the masks of all objects: polygons in COCO or YOLO",
}


FITTING = {
    "": "vitkit finetune without --task", "mask": "--task segment", "boxes": "--task detect",
    "instances": "--task instances",
}  # fmt: skip


def check_kind(splits: Mapping[str, Source], kind: str, place: str) -> None:
    """Reject data without the annotations that a task needs: "mask", "boxes", "instances" or "", labels."""
    for split, source in splits.items():
        kinds = source.targets.kinds if source.targets else frozenset({""})
        if kind not in kinds:
            fitting = " or ".join(text for name, text in FITTING.items() if name in kinds)
            raise Error(
                f"{place}: the images of {split} have {kind_names(kinds)}, but this task needs "
                f"{NEEDED[kind]} (docs/guides/data.md); use {fitting}, or add them",
                code="data.labels",
            )


def annotation_notes(splits: Mapping[str, Source]) -> Iterator[Finding]:
    """The findings of opening the annotations, without reading images."""
    notes: dict[str, list[str]] = {}
    for source in splits.values():
        for kind, names in getattr(target_reader(source)[0], "notes", ()):
            notes[kind] = list(dict.fromkeys([*notes.get(kind, ()), *names]))
    for kind, names in notes.items():
        yield find(kind, names)


def examine_targets(
    splits: Mapping[str, Source], names: Mapping[str, Sequence[str]], *, deep: bool = True, workers: int = 4
) -> tuple[dict[str, dict[str, Any]] | None, list[Finding]]:
    """Facts of the annotations by split, None if there are none; and findings on them, if `deep`."""
    annotated = {split: source for split, source in splits.items() if source.targets}
    if not annotated:
        return None, []
    checks: dict[str, list[TargetCheck]] = {split: [] for split in annotated}
    with ThreadPoolExecutor(workers) as pool:
        for split, source in annotated.items() if deep else ():
            while len(checks[split]) < len(source):  # in parts: queued tasks would fill the memory
                start = len(checks[split])
                part = range(start, min(start + 32 * workers, len(source)))
                check = partial(check_image_target, source, names[split])
                checks[split] += pool.map(check, part)
    findings = [*image_findings(checks), *object_findings(checks), *no_objects(checks, annotated)]
    for split, source in annotated.items() if deep else ():
        findings += class_findings(split, source, checks[split])
    facts = {split: split_facts(source, checks[split]) for split, source in annotated.items()}
    return facts, [*findings, *small_classes(facts)]


def check_image_target(source: Source, names: Sequence[str], index: int) -> TargetCheck:
    """Read the annotations of one image and collect what findings are based on."""
    name = names[index]
    try:
        target, problems = read_checked(source, index)
    except BadImage:  # reported as an unusable image
        return TargetCheck(name)
    except (Error, OSError) as error:
        return TargetCheck(name, error=str(error))
    counts = Counter(problems)
    if target.mask is not None:
        pixels = np.bincount(target.mask.ravel(), minlength=256)
        counts["mask-ignored"] += int(pixels[IGNORE] > MOSTLY * target.mask.size)
        return TargetCheck(name, +counts, pixels=pixels)
    height, width = target.size
    sides = np.stack([target.boxes[:, 2] - target.boxes[:, 0], target.boxes[:, 3] - target.boxes[:, 1]], 1)
    scaled = sides * (TRAINING_SIZE / max(height, width))
    counts["crowd"] += int(target.crowd.sum())
    counts["box-small"] += int((scaled.min(axis=1, initial=np.inf) < PATCH / 4).sum())
    counts["box-whole"] += int((sides.prod(axis=1) > WHOLE * height * width).sum())
    counts["many-objects"] += int(len(sides) > MANY)
    counts["box-copies"], counts["box-near-copies"] = repeated(target)
    return TargetCheck(name, +counts, labels=target.labels, crowd=target.crowd, sides=scaled)


def repeated(target: Target) -> tuple[int, int]:
    """How many boxes equal an earlier one of their class, and how many others nearly cover one."""
    rows = np.concatenate([target.boxes.astype(np.float64), target.labels[:, None]], axis=1)
    boxes = np.unique(rows, axis=0)
    copies = len(rows) - len(boxes)
    if len(boxes) > COMPARED:
        return copies, 0
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = np.minimum(boxes[:, None, 2:4], boxes[None, :, 2:4])
    inter = (high - low).clip(0).prod(axis=-1)
    areas = (boxes[:, 2:4] - boxes[:, :2]).prod(axis=1)
    overlap = inter / np.maximum(areas[:, None] + areas - inter, 1e-12)
    near = (overlap > NEAR) & (boxes[:, None, 4] == boxes[None, :, 4])
    return copies, int(np.triu(near, 1).any(axis=0).sum())


def image_findings(checks: Mapping[str, Sequence[TargetCheck]]) -> Iterator[Finding]:
    """Annotations that cannot be read, and kinds of findings that count images."""
    every = [check for part in checks.values() for check in part]
    if wrong := [check for check in every if check.error]:
        yield find("bad-annotation", [check.name for check in wrong], first=wrong[0].error)
    for kind in PER_IMAGE:
        if names := [check.name for check in every if kind in check.problems]:
            yield find(kind, names, most=str(MANY))


def object_findings(checks: Mapping[str, Sequence[TargetCheck]]) -> Iterator[Finding]:
    """Kinds of findings that count objects."""
    every = [check for part in checks.values() for check in part]
    for kind in PER_OBJECT:
        if concerned := [check for check in every if kind in check.problems]:
            count = sum(check.problems[kind] for check in concerned)
            values = {"count": f"{count:,}", "least": f"{PATCH / 4:g}", "size": str(TRAINING_SIZE)}
            yield find(kind, [check.name for check in concerned], **values)


def no_objects(
    checks: Mapping[str, Sequence[TargetCheck]], splits: Mapping[str, Source]
) -> Iterator[Finding]:
    """Images with no object in them, of data with boxes."""
    every = [check for split, part in checks.items() for check in part if has_boxes(splits[split])]
    empty = [check.name for check in every if not len(check.labels) and not check.error]
    if empty:
        yield find("no-objects", empty, count=f"{len(every):,}")


def nothing_annotated(splits: Mapping[str, Source]) -> Iterator[Finding]:
    """Splits with boxes none of whose images has any; known without reading the annotations one by one."""
    for split, source in splits.items():
        if has_boxes(source) and source.targets and not source.targets.most:
            yield find("nothing-annotated", split=split, count=f"{len(source):,}")


def single_class(splits: Mapping[str, Source]) -> Iterator[Finding]:
    """Splits with masks of a single class, of which nothing can be learned."""
    for split, source in splits.items():
        if source.targets and "mask" in source.targets.kinds and len(source.classes) == 1:
            yield find("mask-alone", classes=source.classes, split=split)


def has_boxes(source: Source) -> bool:
    return source.targets is not None and "boxes" in source.targets.kinds


def class_findings(split: str, source: Source, checks: Sequence[TargetCheck]) -> Iterator[Finding]:
    """Classes that no annotation of a split has, and masks with a single class."""
    images, _, pixels = class_counts(source, checks)
    present = [name for name, count in zip(source.classes, images, strict=True) if count]
    absent = [name for name in source.classes if name not in present]
    if pixels is not None and present == [source.classes[0]] and len(source.classes) > 1:
        if pixels[IGNORE] and len(source.classes) == 2:
            yield find("mask-white", split=split)
            return
        yield find("mask-one-class", classes=present, split=split)
    if absent:
        yield find("class-unannotated", classes=absent, split=split)


def class_counts(
    source: Source, checks: Sequence[TargetCheck]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Of each class the images and the objects that are no crowd; and the pixels of each number of masks."""
    count = len(source.classes)
    images, objects = np.zeros(count, np.int64), np.zeros(count, np.int64)
    pixels = None
    for check in checks:
        if check.pixels is not None:
            pixels = check.pixels if pixels is None else pixels + check.pixels
            images += check.pixels[:count] > 0
        else:
            own = np.bincount(check.labels[~check.crowd], minlength=count)
            objects += own
            images += own > 0
    return images, objects, pixels


def split_facts(source: Source, checks: Sequence[TargetCheck]) -> dict[str, Any]:
    """The annotations of a split in numbers; empty classes if they were not read."""
    targets = source.targets
    assert targets is not None
    facts: dict[str, Any] = {"images": len(source), "kinds": sorted(targets.kinds), "classes": {}}
    if not checks:
        return facts
    images, objects, pixels = class_counts(source, checks)
    whole = None if pixels is None else max(int(pixels.sum()), 1)
    if pixels is None:
        labels = np.concatenate([check.labels[~check.crowd] for check in checks])
        sides = np.concatenate([check.sides[~check.crowd] for check in checks])
        facts |= {"objects": int(objects.sum()), "crowd": sum(int(check.crowd.sum()) for check in checks),
                  "most": max(len(check.labels) for check in checks),
                  "empty": sum(not len(check.labels) for check in checks)}  # fmt: skip
    else:
        facts["ignored"] = float(pixels[IGNORE] / whole)
    for n, name in enumerate(source.classes):
        row: dict[str, Any] = {"images": int(images[n])}
        if pixels is not None:
            row |= {"pixels": float(pixels[n] / whole)}
        else:
            own = sides[labels == n]
            row |= {"objects": int(objects[n])}
            side = float(np.median(np.sqrt(own.prod(axis=1)))) if len(own) else None
            row |= {"side": side, "aspect": float(np.median(own[:, 0] / own[:, 1])) if len(own) else None}
        facts["classes"][name] = row
    return facts


def small_classes(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Classes of the training split whose median side is under two patches."""
    part = facts.get("train") or facts.get("all") or next(iter(facts.values()))
    small = {
        name: row["side"] for name, row in part["classes"].items() if (row.get("side") or 1e9) < 2 * PATCH
    }
    if small:
        listed = some([f"{name}: {side:.0f} pixels" for name, side in small.items()])
        yield find("class-small", classes=small, listed=listed, size=str(TRAINING_SIZE))
