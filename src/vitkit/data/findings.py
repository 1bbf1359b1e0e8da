"""What the doctor can find: each kind with its severity, its words, and what a newcomer is to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

LISTED = "`vitkit doctor DATA --json` lists all"
KINDS = {  # severity, text, remedy; a remedy stays one line
    "unusable": ("error", "Files that cannot be used ({of}): {n}, as {first}",
        "{mend}, or delete them. " + LISTED + "; training leaves them out while they are 5 % of the images "
        "or fewer (finetune --max-bad 0.1 allows 10 %)"),
    "label-conflict": ("error", "Images with different labels: {g}, as {first}",
        "Choose which label is right and delete the copies in the other classes, or their lines of a table; "
        + LISTED + ", the copies of one image as one group"),
    "leakage": ("error", "Images in {place} alike: {g}, as {first}",
        "Delete the copies in {here}, or their lines of the table, so that nothing is tested on what was "
        "learned; " + LISTED),
    "class-not-in-train": ("error", "Classes of {split} without an image in {train}: {classes}",
        "Look for another spelling in {train} (case and spaces count); else move images of them there, or "
        "delete these classes from {split}"),
    "one-class": ("error", "Classes with images in {train}: only {classes}{beside}",
        "A classifier needs two or more. Put the images of each class in a folder of its own, as "
        "DATA/cat/1.jpg and DATA/dog/2.jpg, or write a .csv with the columns path and label"),
    "nothing-to-test": ("error", "Images in {train}: {count}, one of each class",
        "Add images: a class needs two different ones at least, one to learn from and one to test on, and 50 "
        "or more for a result that means something"),
    "empty-class": ("warning", "Classes without an image in {train}: {classes}",
        "Add images of them, or delete the empty folders: a folder without an image that can be read makes "
        "no class, and a class without one is never predicted"),
    "few-in-all": ("warning", "Images in {train}: only {count} in all",
        "Add images, 50 or more of each class if you can: so few teach little, and the result on the few "
        "that are held out says little"),
    "duplicates": ("warning", "Images more than once in {place}: {g}, as {first}",
        "Delete all but one of each group, or leave them if they count double on purpose; " + LISTED),
    "near-duplicates": ("warning", "Images that look alike in {place}: {g} groups, as {first}",
        "Open the files of a group side by side and, if they are copies, delete all but one; " + LISTED),
    "near-leakage": ("warning", "Images that look alike across {place}: {g} groups, as {first}",
        "Open the files of a group side by side and, if they are copies or frames of one scene, delete those "
        "in {here}, or the result comes out too good; " + LISTED),
    "class-not-in-split": ("warning", "Classes of {train} without an image in {split}: {classes}",
        "Move a tenth of their images from {train} to {split}; until then its result says nothing of them"),
    "one-image": ("warning", "Classes with one image in {train}: {classes}",
        "Add images of them: the only one is either learned from or tested on, never both; else join them to "
        "another class, or delete them"),
    "few-images": ("warning", "Classes with under 5 images in {train}: {listed}",
        "Add images of them, 50 or more each if you can; else join them to another class, or delete them"),
    "imbalance": ("warning", "In {train}, {large} and {small}",
        "Add images of the small classes, and read the accuracy of each class (`vitkit evaluate RUN DATA`), "
        "for the overall one hides them"),
    "similar-classes": ("warning", "Classes that differ by case, spaces or Unicode form only: {twins}",
        "If they are one class, move all images into one folder, or write one name in the table, and look "
        "again: `vitkit doctor DATA --quick`"),
    "masks": ("warning", "Classes whose images have one channel and few values, as masks have: {classes}",
        "Move masks and label images out of DATA, so that only photographs are left in class folders; the "
        "published layouts that are read as they are stand in docs/data.md"),
    "folder-name": ("warning", "Classes named like a part of a data set, not like a class: {classes}",
        "If the folder is no class, give the folder above or below it that holds class folders, or a .csv "
        "with the columns path and label; the layouts that are read are in docs/data.md"),
    "tiny": ("note", "Images with a side under 32 pixels: {n}, as {first}",
        "If most are so small, use small patches on small images: finetune --model ViT-Ti/4 --image-size 32"),
    "enormous": ("note", "Images of more than 20 million pixels: {n}, as {first}",
        "Nothing must be done; copies of about 1000 pixels a side are read many times as fast"),
    "long": ("note", "Images longer than 5:1: {n}, as {first}",
        "They are squashed to the model's shape: crop them to what matters, or keep proportions and lose the "
        "ends by finetune --set evaluation_crop=centre"),
    "mode": ("note", "Images of the kind {of}: {n}, as {first}",
        "Nothing must be done: all are read as upright 8-bit RGB, the first frame, transparency as white"),
    "other-files": ("note", "Files without an image's suffix: {n}, as {files}",
        "Nothing must be done if they are no images; else rename them to end in .jpg, .png, .webp, .gif, "
        ".bmp, .tif, .avif or .heic, as the case may be"),
}  # fmt: skip
AGAIN = "Copy or download them again from where they came"
MEND = {  # by the reason for which a file is not used
    "empty": AGAIN, "truncated": AGAIN, "damaged": AGAIN,
    "not-an-image": "Open one in a text editor: a web page or an error message in place of an image must be "
                    "downloaded again; move other files out of the data",
    "unsupported-format": "Install what reads them where the message names it (HEIC: pip install "
                          "'vitkit[heif]'), or save them as JPEG or PNG with any image program",
    "too-many-pixels": "Scale them down to 50 million pixels or fewer with any image program",
    "too-large": "Save them under 200 MB, as JPEG or PNG, with any image program",
    "zero-size": "Save them again with at least one pixel from where they came",
    "unreadable": "Allow reading them (`chmod u+r FILE`), and put back what a link or a table names in vain",
    "not-a-file": "Rename the folder, pipe or device that is named like an image",
    "float-out-of-range": "Scale the values to 0..1, or save them as 8-bit PNG",
    "int-out-of-range": "Scale the values to 0..65535, or save them as 8-bit PNG",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing to know about a data set, and what to do about it."""

    kind: str  # a stable code: one of KINDS; behind unusable- and mode- stands which
    severity: str
    text: str
    remedy: str
    files: tuple[str, ...] = ()  # all of them
    groups: tuple[tuple[str, ...], ...] = ()  # the same files, copies of one image together
    classes: tuple[str, ...] = ()  # all of them

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find(kind: str, files: Iterable[str] = (), *, groups: Iterable[Iterable[str]] = (),
         classes: Iterable[str] = (), **values: str) -> Finding:  # fmt: skip
    """A finding of this kind, its words filled in."""
    named = tuple(tuple(group) for group in groups)
    files, classes = tuple(files) or tuple(chain(*named)), tuple(classes)
    rule, _, of = (kind, "", "") if kind in KINDS else kind.partition("-")
    known = {"n": str(len(files)), "g": str(len(named)), "of": of, "first": some(named[0]) if named else ""}
    known |= {"files": some(files), "classes": some(classes), "mend": MEND.get(of, "Mend them")} | values
    severity, text, remedy = KINDS[rule]
    text, remedy = (sentence.format(**known) + "." for sentence in (text, remedy))
    return Finding(kind, severity, text, remedy, files, named, classes)


def some(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
