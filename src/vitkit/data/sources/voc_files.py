"""Pascal VOC annotations: one .xml file for each image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat  # document types, and so all entities, are refused

from vitkit.data.findings import some
from vitkit.data.sources.annotation_tree import Note, Tree, basenames, locate, split_in, split_names
from vitkit.data.sources.box_tables import FARTHEST, ObjectRows, box_source
from vitkit.data.sources.class_lists import find_list
from vitkit.data.sources.mask_folders import split_lists
from vitkit.data.sources.source import Source
from vitkit.errors import Error, code_of

MOST_BYTES = 16 * 2**20  # of one file
DEEPEST = 16  # nested elements
LONGEST = 1000  # characters of a name or number
CORNERS = ("xmin", "ymin", "xmax", "ymax")


@dataclass
class Element:
    """An element of a file, with the elements in it."""

    tag: str
    text: str = ""
    inner: list["Element"] = field(default_factory=list)

    def first(self, tag: str) -> "Element | None":
        return next((element for element in self.inner if element.tag == tag), None)

    def value(self, tag: str) -> str:
        """The text of the first element of this name, "" if there is none."""
        element = self.first(tag)
        return element.text.strip() if element else ""


class Builder:
    """The handlers of the parser, which keep a short stack instead of calling themselves."""

    def __init__(self) -> None:
        self.root = Element("")
        self.stack = [self.root]

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if len(self.stack) > DEEPEST:
            raise Error(f"elements nested more than {DEEPEST} deep", code="data.labels")
        element = Element(tag)
        self.stack[-1].inner.append(element)
        self.stack.append(element)

    def end(self, tag: str) -> None:
        self.stack.pop()

    def add_text(self, text: str) -> None:
        element = self.stack[-1]
        if len(element.text) < LONGEST:
            element.text += text[:LONGEST]

    def refuse(self, *details: Any) -> None:
        raise Error("a document type, which may define entities, is not read", code="data.unsafe")


def parse_xml(data: bytes, where: str) -> Element:
    """The <annotation> of a file."""
    builder = Builder()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = builder.refuse
    parser.EntityDeclHandler = builder.refuse
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler = builder.add_text
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise Error(
            f"{where}: not readable as Pascal VOC XML ({error}); export it again",
            code=code_of(error, "data.labels"),
        ) from None
    annotation = builder.root.first("annotation")
    if annotation is None:
        raise Error(f"{where}: no <annotation> in the file", code="data.labels")
    return annotation


@dataclass(frozen=True)
class Objects:
    """What one file says."""

    file: str
    size: tuple[int, int]  # height and width; 0 if not given
    filename: str
    names: list[str]
    boxes: list[tuple[float, ...]]
    difficult: list[bool]


def read_objects(tree: Tree, file: str) -> Objects:
    """The objects of one file."""
    where = f"{tree.place}, {file}"
    root = parse_xml(tree.bytes_of(file, MOST_BYTES), where)
    size = root.first("size") or Element("size")
    height, width = (int(number(size.value(tag) or "0", f"{where}, <{tag}>")) for tag in ("height", "width"))
    objects = [element for element in root.inner if element.tag == "object"]
    names, boxes, difficult = [], [], []
    for n, item in enumerate(objects, 1):
        mark = f"{where}, object {n}"
        if not (name := item.value("name")):
            raise Error(f"{mark}: no <name>; name its class", code="data.labels")
        box = item.first("bndbox")  # not that of a <part> of the object
        if box is None:
            raise Error(f"{mark}: no <bndbox>; draw its box, or delete the object", code="data.labels")
        boxes.append(tuple(number(box.value(tag), f"{mark}, <{tag}>") for tag in CORNERS))
        flag = item.value("difficult") or "0"
        if flag not in ("0", "1"):
            raise Error(f"{mark}: <difficult> is {flag[:40]!r}; expected 0 or 1", code="data.labels")
        names.append(name)
        difficult.append(flag == "1")
    return Objects(file, (max(height, 0), max(width, 0)), root.value("filename"), names, boxes, difficult)


def number(text: str, where: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) <= FARTHEST:
        raise Error(f"{where}: {text[:40]!r}; expected a number of pixels", code="data.labels")
    return value


def open_voc(tree: Tree, files: Sequence[str]) -> dict[str, Source]:
    """The splits of a data set with these .xml files."""
    split_names(tree.place, tree.images)
    parsed = [read_objects(tree, file) for file in files]
    corners = [value for item in parsed for box in item.boxes for value in box[:2]]
    from_one = bool(corners) and min(corners) >= 1  # no box starts at 0: pixels are numbered from 1
    shift = (-1.0, -1.0, 0.0, 0.0) if from_one else (0.0, 0.0, 0.0, 0.0)
    used = sorted({name for item in parsed for name in item.names})
    listed = find_list(tree, ("classes.txt", "labelmap.txt"))
    classes = [name for name in listed.names if name != "background"] if listed else used
    if unknown := [name for name in used if name not in classes]:
        file = next(item.file for item in parsed if unknown[0] in item.names)
        raise Error(
            f"{tree.place}, {file}: the class {unknown[0]!r} is not in {listed.file if listed else ''}; add "
            "it there, or correct the annotation",
            code="data.classes",
        )
    if not classes:
        raise Error(f"{tree.place}: {len(files)} .xml files without objects", code="data.classes")
    lists = split_lists(tree, "ImageSets/Main/")
    images, stray = pair_images(tree, parsed, lists)
    numbers = {name: i for i, name in enumerate(classes)}
    return {
        split: read_split(tree, split, pairs, classes, numbers, shift, stray if n == 0 else ())
        for n, (split, pairs) in enumerate(sorted(images.items()))
    }


Pairs = dict[str, Objects | None]  # of an image; None without a file


def pair_images(
    tree: Tree, parsed: Sequence[Objects], lists: Mapping[str, str]
) -> tuple[dict[str, Pairs], tuple[str, ...]]:
    """The images of each split and their files, and the files without an image."""
    by_stem: dict[str, list[str]] = {}
    for name, paths in basenames(tree.images).items():
        by_stem.setdefault(name.rpartition(".")[0], []).extend(paths)
    owners: dict[str, Objects] = {}
    stray = []
    for item in parsed:
        stem = item.file.rpartition("/")[2].removesuffix(".xml")
        near = item.file.rpartition("/")[0]
        try:
            key = locate(stem, {stem: by_stem.get(stem, [])}, f"{near}/" if near else "", split_in(item.file))
        except Error as error:
            raise Error(f"{tree.place}, {item.file}: {error}", code="data.labels") from None
        if not key:
            stray.append(item.file)
        elif owners.setdefault(key, item) is not item:
            raise Error(
                f"{tree.place}: {owners[key].file} and {item.file} annotate the same image, {key}; keep one",
                code="data.labels",
            )
    if not owners:
        raise Error(
            f"{tree.place}: none of the .xml files belongs to an image: {some(stray)}; an image and its file "
            "have the same name, such as images/1.jpg and annotations/1.xml",
            code="data.layout",
        )
    splits: dict[str, Pairs] = {}
    for key in tree.images:
        split = split_in(key)
        if split == "all" and key in owners:
            split = split_in(owners[key].file)
        if split == "all" and lists:
            split = lists.get(key.rpartition("/")[2].rpartition(".")[0], "")
        if split:
            splits.setdefault(split, {})[key] = owners.get(key)
    return splits, tuple(stray)


def read_split(
    tree: Tree, split: str, pairs: Pairs, classes: Sequence[str], numbers: Mapping[str, int],
    shift: tuple[float, ...], stray: Sequence[str],
) -> Source:  # fmt: skip
    """The images of one split."""
    rows = ObjectRows()
    for item in pairs.values():
        for n, (name, box) in enumerate(zip(item.names, item.boxes, strict=True), 1) if item else ():
            assert item is not None
            rows.add(f"{item.file}, object {n}", box, numbers[name], crowd=item.difficult[n - 1])
        rows.end_image(item.size if item else (0, 0))
    unpaired = tuple(key for key, item in pairs.items() if item is None)
    notes = [Note("no-file", unpaired)] if unpaired else []
    notes += [Note("stray-annotations", tuple(stray))] if stray else []
    return box_source(tree, list(pairs), classes, rows, notes=notes, shift=shift)
