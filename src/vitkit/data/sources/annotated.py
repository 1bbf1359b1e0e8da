"""Images with masks or boxes: folders and archives in the layouts of masks, COCO, YOLO and Pascal VOC."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from vitkit.data.decode import BadImage
from vitkit.data.names import SUFFIXES, hidden
from vitkit.data.sources.annotation_tree import Tree, common_root, rooted, tree_of_folder
from vitkit.data.sources.archives import ARCHIVE_READERS, Members
from vitkit.data.sources.class_lists import LISTS
from vitkit.data.sources.coco_files import SNIFFED, is_coco, is_coco_name, open_coco
from vitkit.data.sources.mask_folders import PAIRED, has_masks, open_masks
from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import Source
from vitkit.data.sources.voc_files import open_voc
from vitkit.data.sources.yolo_files import CONFIGS, config_of, is_label, label_files, open_yolo

MOST_FOLDERS, MOST_FILES = 100, 50  # that are looked at to recognise a layout; deeper ones than 4 are not
DEEPEST = 4
BESIDE = (  # names that show a layout, looked for among thousands of images
    "_annotations.coco.json", "annotations.json", "_classes.csv", "classes.txt", "labelmap.txt", "obj.names",
    *CONFIGS,
)  # fmt: skip
PARTNERS = 3  # masks of a folder whose image beside them is looked for
SMALL = 2**16  # bytes of a text that shows a layout
Head = Callable[[str], bytes]  # the beginning and end of a file


def layout_of(names: Sequence[str], head: Head) -> str:
    """The layout of these files: "coco", "voc", "yolo", "masks" or ""."""
    if not any(name.lower().endswith(SUFFIXES) for name in names):
        return ""
    if any(is_coco(head(name)) for name in names if is_coco_name(name)):
        return "coco"
    listed = any(name.rpartition("/")[2].lower() in LISTS and name.count("/") <= 2 for name in names)
    masks = has_masks(names, listed)
    xml = [name for name in names if name.lower().endswith(".xml")]
    if xml and not masks and re.search(rb"<annotation[\s/>]", head(xml[0])):
        return "voc"
    texts = label_files(names)
    config = config_of(names)
    if config and not masks and b"names" in head(config) and b"train" in head(config):
        return "yolo"
    beside = listed or any("labels" in name.split("/")[:-1] for name in texts)
    samples = [head(name).decode("utf-8-sig", "replace") for name in texts[:20]] if beside else []
    if texts and not masks and any(map(is_label, samples)):
        return "yolo"
    return "masks" if masks else ""


def open_layout(tree: Tree, layout: str) -> dict[str, Source]:
    """The splits of a data set in this layout."""
    if layout == "coco":
        candidates = [name for name in tree.names if is_coco_name(name)]
        return open_coco(tree, [n for n in candidates if is_coco(ends(tree.bytes_of(n)))])
    if layout == "voc":
        return open_voc(tree, [name for name in tree.names if name.lower().endswith(".xml")])
    return open_yolo(tree) if layout == "yolo" else open_masks(tree)


def ends(content: bytes) -> bytes:
    return content[:SNIFFED] + content[-SNIFFED:]


def peek(folder: Path) -> list[str]:
    """Some names of the files in and below a folder, enough to recognise a layout without listing it all."""
    names: list[str] = []
    pending = [("", 0)]
    for _ in range(MOST_FOLDERS):
        if not pending:
            break
        prefix, depth = pending.pop(0)
        try:
            with os.scandir(folder / prefix) as entries:
                for entry in islice(entries, MOST_FILES):
                    if hidden(entry.name):
                        continue
                    if entry.is_dir():
                        pending += [(f"{prefix}{entry.name}/", depth + 1)] if depth < DEEPEST else []
                    else:
                        names.append(prefix + entry.name)
        except OSError:  # reported by what opens the folder
            continue
        stems = [n.rpartition(".")[0].removesuffix(PAIRED) for n in names if n.endswith(f"{PAIRED}.png")]
        partners = [f"{stem}{end}" for stem in stems[-PARTNERS:] for end in SUFFIXES]
        names += [n for n in [*(prefix + name for name in BESIDE), *partners] if os.path.isfile(folder / n)]
    return sorted(set(names))


def layout_of_folder(folder: Path) -> str:
    """The layout of a folder, from a few of its files."""
    names = peek(folder)
    prefix = common_root(names)

    def head(name: str) -> bytes:
        try:
            with open(folder / f"{prefix}{name}", "rb") as file:
                start = file.read(SNIFFED)
                file.seek(max(os.fstat(file.fileno()).st_size - SNIFFED, 0))
                return start + file.read(SNIFFED)
        except OSError:
            return b""

    return layout_of([name.removeprefix(prefix) for name in names], head)


def open_annotated(place: str) -> dict[str, Source]:
    """The splits of a folder of images with masks or boxes."""
    return open_layout(tree_of_folder(Path(place)), layout_of_folder(Path(place)))


def open_archived(path: Path, members: Members) -> dict[str, Source] | None:
    """The splits of an archive of images with masks or boxes; None for another."""
    names, fetch, _, size = members
    tree = rooted(Tree(str(path), names, fetch, size))

    def head(name: str) -> bytes:
        try:
            return ends(tree.read(name))
        except BadImage:
            return b""

    layout = layout_of(tree.names, head)
    return open_layout(tree, layout) if layout else None


def without_labels(splits: dict[str, Source]) -> dict[str, Source]:
    """The same images for what needs none: they have no label of their own."""
    return {
        split: replace(part, classes=(), labels=np.full(len(part), -1, np.int64))
        for split, part in splits.items()
    }


ARCHIVE_READERS.append(open_archived)
OPENER = Opener(
    description="images with masks or boxes (classes.txt and masks/, COCO, YOLO, Pascal VOC)",
    matches=lambda place: os.path.isdir(place) and bool(layout_of_folder(Path(place))),
    open=lambda place, cache: open_annotated(place),
    open_all=lambda place, cache: without_labels(open_annotated(place)),
    order=85,  # after published data sets, some of which have masks too; before folders of classes
)
