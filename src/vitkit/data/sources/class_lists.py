"""Lists of class names beside masks and boxes, with the colours of colour-coded masks."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vitkit.data.names import folded
from vitkit.data.sources.annotation_tree import Tree
from vitkit.data.targets import IGNORE
from vitkit.errors import Error

LISTS = ("_classes.csv", "class_dict.csv", "labelmap.txt", "classes.txt", "class_names.txt", "obj.names")
VOID = {"void", "unlabelled", "unlabeled", "ignore", "ignored"}
MOST_NAMES = 100_000
NUMBERED = re.compile(r"(\d+)[\s,:]+(.*?\S)(?:[\s,]+(\d+)[\s,]+(\d+)[\s,]+(\d+))?")
COLOURED = re.compile(r"(.*?\S)[\s,]+(\d+)[\s,]+(\d+)[\s,]+(\d+)")
VOC_TEXT = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike "
    "person pottedplant sheep sofa train tvmonitor"
)
VOC_NAMES = VOC_TEXT.split()
CITYSCAPES_NAMES = (
    "road sidewalk building wall fence pole,traffic light,traffic sign,vegetation terrain sky person rider "
    "car truck bus train motorcycle bicycle"
)
CITYSCAPES = [name for part in CITYSCAPES_NAMES.split(",") for name in (
    [part] if part.startswith("traffic") else part.split())]  # fmt: skip
CITYSCAPES_IDS = (
    7,
    8,
    11,
    12,
    13,
    17,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    28,
    31,
    32,
    33,
)  # of those classes
ADE20K = 150  # classes, numbered from 1


@dataclass(frozen=True)
class ClassList:
    """The names of classes; `values` are the numbers that masks hold for them."""

    file: str
    names: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...] = ()  # of each name, and of the void class if there is one
    void: bool = False  # whether a class after the others is left out: its pixels are ignored

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for name in self.names:
            if not name:
                raise Error(f"{self.file}: an empty class name; write one name per line", code="data.classes")
            if seen.setdefault(folded(name), name) is not name:
                raise Error(
                    f"{self.file}: the class {name!r} is listed twice; keep one of the lines, and check the "
                    "numbers of those after it",
                    code="data.classes",
                )
        if not self.names or len(self.names) > MOST_NAMES:
            raise Error(
                f"{self.file}: {len(self.names)} class names; expected 1 to {MOST_NAMES}", code="data.classes"
            )


def find_list(tree: Tree, kinds: Sequence[str] = LISTS) -> ClassList | None:
    """The list of classes in the root of a data set, in its folders of annotations or in those of splits."""
    found_lists: list[ClassList] = []
    for kind in kinds:
        names = [n for n in tree.names if n.rpartition("/")[2].lower() == kind and n.count("/") <= 2]
        found_lists = [read_list(tree, name) for name in names]
        if found_lists:
            break
    for one, other in pairwise(found_lists):
        if one.names != other.names or one.colours != other.colours:
            raise Error(
                f"{tree.place}: {one.file} and {other.file} list different classes; keep one list, in the "
                "order that the annotations use",
                code="data.classes",
            )
    return found_lists[0] if found_lists else None


def read_list(tree: Tree, file: str) -> ClassList:
    """One list of classes: classes.txt, labelmap.txt of CVAT, _classes.csv of Roboflow, class_dict.csv."""
    text = tree.text(file, 2**20)
    where = f"{tree.place}, {file}"
    if file.lower().endswith(".csv"):
        rows = csv_rows(text, where)
    elif file.lower().endswith("labelmap.txt"):
        rows = [labelmap_row(line, where, n) for n, line in lines_of(text)]
    else:
        rows = class_rows([line for _, line in lines_of(text)], where)
    names = [name for name, _ in rows]
    colours = [colour for _, colour in rows if colour is not None]
    if (colours and len(colours) < len(rows)) or len(set(colours)) < len(colours):
        raise Error(f"{where}: every class needs a colour of its own, or none has one", code="data.classes")
    if any(max(colour) > 255 for colour in colours):
        raise Error(f"{where}: a colour has three numbers from 0 to 255", code="data.classes")
    void = len(names) > 1 and folded(names[-1]) in VOID
    return ClassList(where, tuple(names[:-1] if void else names), tuple(colours), void)


Row = tuple[str, tuple[int, int, int] | None]


def lines_of(text: str) -> list[tuple[int, str]]:
    """The numbered lines of a list that are neither empty nor comments."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, line) for n, line in lines if line and not line.startswith("#")]


def class_rows(lines: Sequence[str], where: str) -> list[Row]:
    """`name`, `name R G B`, `index name` or `index name R G B` on every line."""
    numbered = [NUMBERED.fullmatch(line) for line in lines]
    if lines and all(numbered):
        values = [int(match[1][:9]) for match in numbered if match]
        if values != list(range(len(values))):
            raise Error(
                f"{where}: the numbers of classes must be 0, 1, 2, ... in this order, not "
                f"{', '.join(map(str, values[:8]))}; number them so, in the masks too ({IGNORE} is ignored)",
                code="data.classes",
            )
        return [(match[2], colour_of(match.groups()[2:])) for match in numbered if match]
    rows: list[Row] = []
    for line in lines:
        coloured = COLOURED.fullmatch(line)
        rows.append((coloured[1], colour_of(coloured.groups()[1:])) if coloured else (line, None))
    return rows


def colour_of(parts: Sequence[str | None]) -> tuple[int, int, int] | None:
    red, green, blue = (min(int(part[:9]), 256) if part else -1 for part in parts)
    return None if red < 0 else (red, green, blue)


def labelmap_row(line: str, where: str, number: int) -> Row:
    """name:r,g,b:parts:actions."""
    name, _, rest = line.partition(":")
    channels = rest.partition(":")[0].split(",")
    if not name or (rest and not all(part.strip().isdigit() for part in channels)):
        raise Error(f"{where}, line {number}: expected name:r,g,b:parts:actions, not {line[:60]!r}",
                    code="data.classes")  # fmt: skip
    if not rest.partition(":")[0]:
        return name, None
    if len(channels) != 3:
        raise Error(f"{where}, line {number}: a colour has three numbers, not {line[:60]!r}",
                    code="data.classes")  # fmt: skip
    return name, colour_of(channels)


def csv_rows(text: str, where: str) -> list[Row]:
    """`Pixel Value, Class` of Roboflow or `name,r,g,b`."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]
    header = [cell.lower() for cell in rows[0]] if rows else []
    if header[:2] == ["pixel value", "class"] and all(len(row) == 2 for row in rows):
        return class_rows([" ".join(row) for row in rows[1:]], where)
    numbers = all(len(row) == 4 and all(cell.isdigit() for cell in row[1:]) for row in rows[1:])
    if len(header) == 4 and header[0] in ("name", "class", "class_name") and numbers:
        return [(row[0], colour_of(row[1:])) for row in rows[1:]]
    raise Error(
        f"{where}: expected the columns 'Pixel Value, Class' or 'name, r, g, b', not {header[:8]}",
        code="data.classes",
    )
