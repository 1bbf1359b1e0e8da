"""COCO annotations: one .json file for each split, beside its images or in annotations/."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitkit.data.findings import some
from vitkit.data.names import SPLITS
from vitkit.data.run_lengths import mask_of, parse_counts
from vitkit.data.sources.annotation_tree import Note, Tree, basenames, locate, split_in, split_names
from vitkit.data.sources.box_tables import (
    ObjectRows,
    box_around,
    box_source,
    check_points,
    coordinate,
    polygon_area,
)
from vitkit.data.sources.source import Source
from vitkit.errors import Error

FILE = re.compile(
    r"(?:_?annotations?|instances?|labels?|coco|result)?[-_.]*"
    rf"(?P<split>{'|'.join(sorted(SPLITS, key=len, reverse=True))}|default|all)?"
    r"(?:20\d\d)?(?:[-_.]*coco)?\.json",
    re.IGNORECASE,
)
MARKS = (b'"images"', b'"annotations"', b'"categories"', b'"file_name"', b'"category_id"', b'"bbox"')
SNIFFED = 2**16  # bytes at each end that show whether a .json is of this kind
MOST_PIXELS = 50_000_000  # of an image, as in vitkit.data.decode


def is_coco_name(name: str) -> bool:
    """Whether a file is named like COCO annotations."""
    return name.count("/") <= 3 and bool(FILE.fullmatch(name.rpartition("/")[2]))


def is_coco(data: bytes) -> bool:
    """Whether the beginning and end of a file have the keys of COCO annotations."""
    return sum(mark in data for mark in MARKS) >= 2


def coco_split(name: str) -> str:
    """The split of an annotation file: from its name, otherwise from its folder."""
    match = FILE.fullmatch(name.rpartition("/")[2])
    written = (match["split"] or "").lower() if match else ""
    return SPLITS.get(written) or split_in(name)


def open_coco(tree: Tree, files: Sequence[str]) -> dict[str, Source]:
    """The splits of a data set with these annotation files."""
    by_split: dict[str, str] = {}
    for file in files:
        other = by_split.setdefault(coco_split(file), file)
        if other != file:
            raise Error(
                f"{tree.place}: {other} and {file} both annotate the split {coco_split(file)}; keep one of "
                "them, or merge them",
                code="data.layout",
            )
    split_names(tree.place, tree.images)
    content = {split: parse_json(tree, file) for split, file in by_split.items()}
    categories = all_categories(tree, by_split, content)
    listed = [a.get("category_id") for data in content.values() for a in data["annotations"]]
    used = {number for number in listed if is_int(number)}
    roots = unused_roots(categories, used)
    ids = sorted(set(categories) - set(roots))
    if not ids:
        raise Error(f"{tree.place}, {files[0]}: no categories", code="data.classes")
    classes = [categories[number]["name"] for number in ids]
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise Error(
            f"{tree.place}, {files[0]}: two categories are called {twice!r}; merge them, or rename one",
            code="data.classes",
        )
    numbers = {number: i for i, number in enumerate(ids)}
    paths = basenames(tree.images)
    root_notes = [Note("unused-root", tuple(categories[root]["name"] for root in roots))] if roots else []
    return {
        split: read_split(tree, file, split, content[split], numbers, paths, classes, root_notes)
        for split, file in by_split.items()
    }


def parse_json(tree: Tree, file: str) -> dict[str, Any]:
    """The content of an annotation file, with its three lists of objects."""
    where = f"{tree.place}, {file}"
    try:
        data = json.loads(tree.bytes_of(file), parse_constant=refuse_constant)
    except RecursionError:
        raise Error(f"{where}: nested too deeply for COCO annotations", code="data.labels") from None
    except ValueError as error:  # also of the decoder of text, and of refuse_constant
        raise Error(f"{where}: not readable as JSON ({error}); export it again", code="data.labels") from None
    if not isinstance(data, dict):
        raise Error(f"{where}: a {type(data).__name__}, not an object with images", code="data.labels")
    for key in ("images", "annotations", "categories"):
        rows = data.get(key)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise Error(
                f"{where}: {key!r} is {'missing' if rows is None else 'not a list of objects'}; expected the "
                "lists images, annotations and categories of COCO",
                code="data.labels",
            )
    return data


def refuse_constant(text: str) -> None:
    raise Error(f"{text} is not a finite number", code="data.labels")


def all_categories(
    tree: Tree, files: Mapping[str, str], content: Mapping[str, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The categories of all splits by id, which must agree."""
    categories: dict[int, dict[str, Any]] = {}
    origin: dict[int, str] = {}
    for split, data in content.items():
        here: set[int] = set()
        for row in data["categories"]:
            where = f"{tree.place}, {files[split]}, category {row.get('id')!r}"
            number, name = row.get("id"), row.get("name")
            if not is_int(number) or not isinstance(name, str) or not name.strip():
                raise Error(
                    f"{where}: named {name!r}; expected a whole number and a name", code="data.classes"
                )
            if number in here:
                raise Error(f"{where}: listed twice; give each category its own id", code="data.classes")
            here.add(number)
            other = categories.setdefault(number, row)
            if other["name"] != name:
                raise Error(
                    f"{where}: {name!r} here, but {other['name']!r} in {files[origin[number]]}; export all "
                    "splits with the same categories",
                    code="data.classes",
                )
            origin.setdefault(number, split)
    return categories


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def unused_roots(categories: Mapping[int, Mapping[str, Any]], used: set[Any]) -> list[int]:
    """Categories without objects that are only the supercategory of others, as Roboflow writes them."""
    above = {n: row.get("supercategory") for n, row in categories.items()}
    uses = Counter(name for name in above.values() if isinstance(name, str))
    names = {n: row["name"] for n, row in categories.items()}
    roots = [n for n, name in names.items() if n not in used and uses[name] > (above[n] == name)]
    return roots if len(roots) < len(categories) else []


def read_split(
    tree: Tree, file: str, split: str, data: Mapping[str, Any], numbers: Mapping[int, int],
    paths: Mapping[str, Sequence[str]], classes: Sequence[str], notes: Sequence[Note],
) -> Source:  # fmt: skip
    """The images of one annotation file."""
    where = f"{tree.place}, {file}"
    images = read_images(tree, file, split, data["images"], paths)
    by_image: dict[Any, list[dict[str, Any]]] = {number: [] for number in images}
    for row in data["annotations"]:
        number = row.get("image_id")
        if not isinstance(number, int | str) or number not in by_image:
            raise Error(
                f"{where}, annotation {row.get('id')!r}: the image_id {str(number)[:40]!r} of type "
                f"{type(number).__name__} is that of no image; delete the annotation, or list its image",
                code="data.labels",
            )
        by_image[number].append(row)
    rows, keys = ObjectRows(), []
    for number, (key, size) in sorted(images.items(), key=lambda item: item[1][0]):
        keys.append(key)
        for annotation in by_image[number]:
            add_object(rows, annotation, numbers, file, tree.place)
        rows.end_image(size)
    unlisted = sorted(unlisted_images(tree, split) - set(keys))
    extra = [Note("unlisted-images", tuple(unlisted))] if unlisted else []
    if odd := odd_ids(data["annotations"]):
        extra.append(Note("odd-ids", odd))
    return box_source(tree, keys, classes, rows, notes=[*notes, *extra])


def read_images(
    tree: Tree, file: str, split: str, listed: Sequence[Mapping[str, Any]], paths: Mapping[str, Sequence[str]]
) -> dict[Any, tuple[str, tuple[int, int]]]:
    """The file and the annotated size of each image, by id."""
    where, near = f"{tree.place}, {file}", file.rpartition("/")[0]
    images: dict[Any, tuple[str, tuple[int, int]]] = {}
    missing: list[str] = []
    owners: dict[str, Any] = {}
    for row in listed:
        number, name = row.get("id"), row.get("file_name")
        if not (is_int(number) or isinstance(number, str)) or not isinstance(name, str) or not name:
            raise Error(
                f"{where}: an image with the id {number!r} and the file_name {name!r}; both are needed",
                code="data.labels",
            )
        if number in images:
            raise Error(f"{where}: two images have the id {number!r}; number them anew", code="data.labels")
        try:
            key = locate(name, paths, f"{near}/" if near else "", split)
        except Error as error:
            raise Error(f"{where}, image {number!r}: {error}", code="data.labels") from None
        if not key:
            missing.append(name)
            continue
        if owners.setdefault(key, number) != number:
            raise Error(
                f"{where}: the images {owners[key]!r} and {number!r} are the same file, {key}; keep one",
                code="data.labels",
            )
        images[number] = key, (side(row.get("height"), where, number), side(row.get("width"), where, number))
    if missing:
        raise Error(
            f"{where}: {len(missing)} of {len(listed)} images are not there: {some(missing)}; copy them into "
            f"the folder of {'the images' if split == 'all' else split}, or delete their entries",
            code="data.labels",
        )
    return images


def side(value: Any, where: str, number: Any) -> int:
    """A width or height; 0 if it is missing."""
    if value is None or value == 0:
        return 0
    if not isinstance(value, int | float) or not 0 < value <= MOST_PIXELS or value != int(value):
        raise Error(f"{where}, image {number!r}: a side of {str(value)[:40]} pixels", code="data.labels")
    return int(value)


def add_object(
    rows: ObjectRows, row: Mapping[str, Any], numbers: Mapping[int, int], file: str, place: str
) -> None:
    """Add one annotation."""
    mark = f"{file}, annotation {row.get('id')!r}"
    where = f"{place}, {mark}"
    category: Any = row.get("category_id")
    if not is_int(category) or category not in numbers:
        raise Error(
            f"{where}: the category_id {str(category)[:40]!r} is that of no category; expected one of "
            f"{some([str(number) for number in numbers])}",
            code="data.labels",
        )
    crowd = row.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise Error(f"{where}: iscrowd is {str(crowd)[:40]!r}; expected 0 or 1", code="data.labels")
    shape = read_shape(row.get("segmentation"), where)
    box, drawn = read_box(row.get("bbox"), shape, where)
    area = row.get("area")
    if area is not None and (not isinstance(area, int | float) or not 0 <= area < 1e15):
        raise Error(f"{where}: the area {str(area)[:40]!r}; expected a number of pixels", code="data.labels")
    number = rows.add(mark, box, numbers[category], crowd=bool(crowd), area=float(area) if area else drawn)
    if isinstance(shape, tuple):
        rows.runs[number] = shape
    elif shape:
        rows.polygons[number] = shape


def read_box(box: Any, shape: Any, where: str) -> tuple[tuple[float, ...], float]:
    """The corners of bbox [x, y, width, height] or, without it, of the shape; and the area of a shape."""
    if box is None and isinstance(shape, list) and shape:
        return box_around(shape), sum(map(polygon_area, shape))
    if box is None and isinstance(shape, tuple):
        height, width, counts = shape
        runs = parse_counts(counts, where) if isinstance(counts, str) else counts
        y, x = np.nonzero(mask_of(runs, (height, width), where))
        corners = (x.min(), y.min(), x.max() + 1, y.max() + 1) if len(x) else (0, 0, 0, 0)
        return tuple(map(float, corners)), float(len(x))
    if not isinstance(box, list) or len(box) != 4:
        raise Error(
            f"{where}: the bbox {str(box)[:60]}; expected [x, y, width, height] in pixels", code="data.labels"
        )
    x0, y0, w, h = (coordinate(value, where) for value in box)
    return (x0, y0, x0 + w, y0 + h), math.nan


def read_shape(shape: Any, where: str) -> Any:
    """Polygons as a list of (N, 2), run lengths as (height, width, counts); None without a segmentation."""
    if shape is None or shape == []:
        return None
    if isinstance(shape, list):
        if not all(isinstance(part, list) for part in shape):
            raise Error(f"{where}: a segmentation that is no list of polygons", code="data.labels")
        return [check_points(part, where) for part in shape]
    size: Any = shape.get("size") if isinstance(shape, dict) else None
    counts: Any = shape.get("counts") if isinstance(shape, dict) else None
    sides = isinstance(size, list) and len(size) == 2 and all(is_int(n) and n > 0 for n in size)
    if not sides or size[0] * size[1] > MOST_PIXELS:
        raise Error(
            f"{where}: a mask of the size {str(size)[:60]}; expected [height, width] of the image",
            code="data.labels",
        )
    listed = isinstance(counts, list) and all(is_int(n) and 0 <= n <= MOST_PIXELS for n in counts)
    if not listed and not (isinstance(counts, str) and counts):
        raise Error(
            f"{where}: run lengths of the kind {type(counts).__name__}; expected a list of numbers or text",
            code="data.labels",
        )
    return size[0], size[1], counts if isinstance(counts, str) else np.array(counts, np.int32)


def unlisted_images(tree: Tree, split: str) -> set[str]:
    """The images that are in the folders of this split."""
    return {name for name in tree.images if split in ("all", split_in(name))}


def odd_ids(annotations: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Annotation ids with which other programs go wrong: 0, missing, repeated, or text."""
    seen: set[Any] = set()
    odd: list[str] = []
    for row in annotations:
        number = row.get("id")
        if not is_int(number) or number == 0 or number in seen:
            odd.append(str(number)[:40])
        seen.add(number if isinstance(number, int | str) else None)
    return tuple(odd)
