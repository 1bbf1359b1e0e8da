"""Folders of images beside folders of class masks in PNG files."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vitkit.data.content import content_hash
from vitkit.data.findings import some
from vitkit.data.image_frames import Frames, needs_turn, turn_mask
from vitkit.data.mask_files import ClassMasks, values_text
from vitkit.data.names import SPLITS, SUFFIXES
from vitkit.data.sources.annotation_tree import SPLIT, Note, Tree, split_in, split_names
from vitkit.data.sources.class_lists import (
    ADE20K,
    CITYSCAPES,
    CITYSCAPES_IDS,
    VOC_NAMES,
    ClassList,
    find_list,
    lines_of,
)
from vitkit.data.sources.source import Source
from vitkit.data.targets import IGNORE, Target, Targets, digest_of
from vitkit.errors import Error

IMAGE_FOLDERS = {"images", "image", "imgs", "img", "jpegimages", "leftimg8bit"}
MASK_FOLDERS = {
    "masks", "mask", "labels", "label", "annotations", "annotation", "segmentationclass", "segmentation",
    "segmentations", "gtfine", "gt", "ground_truth",
}  # fmt: skip
SPLIT_MASKS = re.compile(rf"({'|'.join(SPLITS)})[-_]?(annot|annotations?|masks?|labels?|gt)", re.IGNORECASE)
ENDINGS = (
    "_gtFine_labelTrainIds",
    "_gtFine_labelIds",
    "_labelTrainIds",
    "_labelIds",
    "_mask",
    "_label",
    "_gt",
)
NOT_CLASSES = ("_color", "_instanceIds")  # other pictures of Cityscapes
IMAGE_ENDINGS = ("_leftImg8bit",)
PAIRED = "_mask"  # of a mask that lies beside its image
MOST_CLASSES = IGNORE  # class numbers that a mask can hold


class Place(NamedTuple):
    """What the folders of a file say of it."""

    role: str  # "image", "mask" or ""
    split: str
    inner: str  # the other folders, such as the city in Cityscapes
    stem: str


def place_of(name: str) -> Place:
    """The role and split of a file, by its folders."""
    *folders, file = name.split("/")
    role, inner, split = "", [], split_in(name)
    for folder in folders:
        lower = folder.lower()
        if match := SPLIT_MASKS.fullmatch(folder):
            role, split = "mask", SPLITS[match[1].lower()]
        elif lower in MASK_FOLDERS:
            role = "mask"
        elif lower in IMAGE_FOLDERS:
            role = "image"
        elif not SPLIT.fullmatch(folder):
            inner.append(lower)
    return Place(role, split, "/".join(inner), file.rpartition(".")[0])


def has_masks(names: Iterable[str], listed: bool) -> bool:
    """Whether files are laid out as images and masks; listed: whether there is a list of classes."""
    images = [name for name in names if name.lower().endswith(SUFFIXES)]
    places = [place_of(name) for name in images]
    roles = {place.role for place in places}
    if "mask" in roles and "image" in roles:
        return True
    if "mask" in roles and {p.split for p in places if p.role == "mask"} & {
        p.split for p in places if not p.role and p.split != "all"
    }:
        return True
    stems = {name.rpartition(".")[0] for name in images}
    return listed and any(stem.endswith(PAIRED) and stem.removesuffix(PAIRED) in stems for stem in stems)


@dataclass(frozen=True)
class Pairs:
    """The images of one split, their masks, and what does not belong together."""

    images: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    unpaired: list[str] = field(default_factory=list)  # images without a mask
    stray: list[str] = field(default_factory=list)  # masks without an image


def open_masks(tree: Tree) -> dict[str, Source]:
    """The splits of a folder of images and masks."""
    pairs = pair_up(tree)
    masks = [mask for part in pairs.values() for mask in part.masks]
    if not masks:
        raise Error(
            f"{tree.place}: no image has a mask; expected images/[train/]x.jpg beside masks/[train/]x.png",
            code="data.layout",
        )
    classes, numbers = classes_and_numbers(tree, masks)
    sources = {}
    for split, part in pairs.items():
        if split == "test" and (not part.masks or is_cityscapes(masks)):
            continue  # the annotations of this test split are not published
        if part.unpaired:
            raise Error(
                f"{tree.place}: {len(part.unpaired)} images of {split} have no mask: {some(part.unpaired)}; "
                "add a PNG of the same name for each, or move these images elsewhere",
                code="data.labels",
            )
        notes = [Note("stray-annotations", tuple(part.stray))] if part.stray else []
        reader = MaskReader(tree, part.images, part.masks, numbers, tuple(notes))
        targets = Targets(reader, frozenset({"mask"}), digest=reader.digest)
        sources[split] = tree.source(part.images, classes.names, targets)
    return sources


def pair_up(tree: Tree) -> dict[str, Pairs]:
    """The images and masks of each split by name, sorted."""
    images, masks = roles_of(tree)
    split_names(tree.place, [*images, *masks])
    lists = split_lists(tree, "ImageSets/Segmentation/")
    by_key: dict[tuple[str, str, str], str] = {}
    for name in masks:
        _, split, inner, stem = place_of(name)
        ending = next((end for end in ENDINGS if stem.endswith(end)), "")
        for key in {(split, inner, stem), (split, inner, stem.removesuffix(ending))}:
            if by_key.setdefault(key, name) != name and key[2] == stem:
                by_key[key] = name  # the whole name counts more
    parts: dict[str, Pairs] = {}
    used: dict[str, str] = {}
    for name in images:
        _, split, inner, stem = place_of(name)
        ending = next((end for end in IMAGE_ENDINGS if stem.endswith(end)), "")
        keys = [(split, inner, stem), (split, inner, stem.removesuffix(ending))]
        mask = next((by_key[key] for key in keys if key in by_key), "")
        if lists and split == "all":
            split = lists.get(stem, "")
            if not split:
                continue
        part = parts.setdefault(split, Pairs())
        if mask and used.setdefault(mask, name) != name:
            raise Error(
                f"{tree.place}: {used[mask]} and {name} have the same mask, {mask}; give each image a name "
                "of its own",
                code="data.labels",
            )
        (part.images if mask else part.unpaired).append(name)
        if mask:
            part.masks.append(mask)
    for name in masks:
        if name not in used and not lists:
            parts.setdefault(place_of(name).split, Pairs()).stray.append(name)
    return {split: part for split, part in parts.items() if part.images or part.unpaired}


def roles_of(tree: Tree) -> tuple[list[str], list[str]]:
    """The images and the masks of a tree."""
    by_role: dict[str, list[str]] = {"image": [], "mask": [], "": []}
    for name in tree.images:
        by_role[place_of(name).role].append(name)
    masks = by_role["mask"]
    if not masks:
        stems = {name.rpartition(".")[0] for name in by_role[""] + by_role["image"]}
        for role in ("", "image"):
            for name in list(by_role[role]):
                stem = name.rpartition(".")[0]
                if stem.endswith(PAIRED) and stem.removesuffix(PAIRED) in stems:
                    by_role[role].remove(name)
                    masks.append(name)
    masks = [name for name in masks if not name.rpartition(".")[0].endswith(NOT_CLASSES)]
    for ending in ENDINGS[:2]:  # of Cityscapes: those for training, if they are there
        only = [name for name in masks if name.rpartition(".")[0].endswith(ending)]
        if only:
            masks = only
            break
    for name in masks:
        if not name.lower().endswith(".png"):
            raise Error(
                f"{tree.place}, {name}: masks must be PNG, since JPEG changes the numbers at every edge; "
                "export them again as PNG",
                code="data.labels",
            )
    return by_role["image"] or by_role[""], masks


def split_lists(tree: Tree, folder: str) -> dict[str, str]:
    """The split of each image by name, from lists such as ImageSets/Segmentation/train.txt."""
    lists: dict[str, list[str]] = {}
    for name in tree.names:
        above, _, file = name.rpartition("/")
        if f"/{above}/".endswith(f"/{folder}") and file.endswith(".txt"):
            lists[file.removesuffix(".txt").lower()] = [
                line.split()[0] for _, line in lines_of(tree.text(name))
            ]
    if "trainval" in lists and "train" not in lists:
        lists["train"] = [stem for stem in lists["trainval"] if stem not in set(lists.get("val", ()))]
    splits: dict[str, str] = {}
    for split, stems in lists.items():
        if split not in SPLITS:
            continue
        for stem in stems:
            if splits.setdefault(stem, SPLITS[split]) != SPLITS[split]:
                raise Error(
                    f"{tree.place}, {folder}: {stem!r} is in the lists of {splits[stem]} and "
                    f"{SPLITS[split]}; keep it in one of them",
                    code="data.labels",
                )
    return splits


def is_cityscapes(masks: Sequence[str]) -> bool:
    return all("_gtFine_label" in name for name in masks)


def is_ade20k(masks: Sequence[str]) -> bool:
    return all(name.rpartition("/")[2].startswith(("ADE_train_", "ADE_val_")) for name in masks)


def classes_and_numbers(tree: Tree, masks: Sequence[str]) -> tuple[ClassList, ClassMasks]:
    """The classes, and the class number of each value or colour that a mask may hold; -1: not allowed."""
    listed = find_list(tree)
    if is_cityscapes(masks) and listed is None:
        classes = ClassList("Cityscapes", tuple(CITYSCAPES))
        ids = np.full(2**16, -1, np.int16)
        if masks[0].rpartition(".")[0].endswith("_labelIds"):
            ids[:34] = IGNORE
            ids[list(CITYSCAPES_IDS)] = np.arange(len(CITYSCAPES_IDS))
            ids[IGNORE] = IGNORE
            return classes, ClassMasks(ids, (), classes.names)
    elif is_ade20k(masks):
        classes = ClassList("ADE20K", ade20k_names(tree, listed))
        ids = np.full(2**16, -1, np.int16)
        ids[[0, IGNORE]] = IGNORE
        ids[1 : len(classes.names) + 1] = np.arange(len(classes.names))
        return classes, ClassMasks(ids, (), classes.names)
    elif listed is None and any("SegmentationClass/" in name for name in masks[:1]):
        classes = ClassList("Pascal VOC", tuple(VOC_NAMES))
    elif listed is None:
        raise Error(
            f"{tree.place}: masks without a list of classes; write {tree.place}/classes.txt with one name "
            f"per line, in the order of the numbers in masks ({masks[0]} has "
            f"{values_text(tree, masks[0])}; {IGNORE}, or a last class called void, is ignored)",
            code="data.classes",
        )
    else:
        classes = listed
    count = len(classes.names)
    if count > MOST_CLASSES:
        raise Error(f"{classes.file}: {count} classes; masks can have {MOST_CLASSES}", code="data.classes")
    ids = np.full(2**16, -1, np.int16)
    ids[:count] = np.arange(count)
    if classes.void:
        ids[count] = IGNORE
    ids[IGNORE] = IGNORE
    return classes, ClassMasks(ids, classes.colours, classes.names)


def ade20k_names(tree: Tree, listed: ClassList | None) -> tuple[str, ...]:
    """The 150 names of classes.txt or objectInfo150.txt; otherwise their numbers."""
    if listed is not None:
        return listed.names
    info = next((name for name in tree.names if name.endswith("objectInfo150.txt")), None)
    if info is None:
        return tuple(f"{number:03d}" for number in range(1, ADE20K + 1))
    rows = [line.split("\t") for _, line in lines_of(tree.text(info))][1:]
    return tuple(f"{row[-1].partition(',')[0]} ({n})" for n, row in enumerate(rows, 1))


class MaskReader:
    """The class masks of the images of one split."""

    def __init__(
        self, tree: Tree, images: Sequence[str], masks: Sequence[str], numbers: ClassMasks,
        notes: tuple[Note, ...] = (),
    ):  # fmt: skip
        self.tree_place, self.masks, self.numbers, self.notes = tree.place, masks, numbers, notes
        self.read_mask, self.hash_mask = tree.read, tree.digest
        self.values = digest_of((numbers.numbers, np.array(numbers.colours, np.int64)))
        self.frames = Frames(tree.read, images)

    def __call__(self, index: int) -> Target:
        return self.checked(index)[0]

    def digest(self, index: int) -> bytes:
        """A digest of the mask file of an image, and of how its values become classes."""
        name = self.masks[index]
        content = self.hash_mask(name) if self.hash_mask else content_hash(self.read_mask(name))
        return hashlib.blake2b(self.values + content, digest_size=16).digest()

    def checked(self, index: int) -> tuple[Target, tuple[str, ...]]:
        """The target of an image, and the kinds of findings about it."""
        where = f"{self.tree_place}, {self.masks[index]}"
        frame = self.frames(index)
        mask = self.numbers.read(self.read_mask(self.masks[index]), where)
        problems: tuple[str, ...] = ()
        if needs_turn(mask.shape, frame, where):
            mask, problems = turn_mask(mask, frame), ("exif-turned",)
        elif frame.orientation > 1 and frame.size == frame.stored:
            problems = ("exif-unclear",)
        return Target(frame.size, mask=mask), problems
