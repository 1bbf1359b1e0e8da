"""The kinds of findings that the doctor reports, each with its severity, its text and a remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

LISTED = "`vitkit doctor DATA --json` lists all"
KINDS = {  # severity, text, remedy; a remedy is one line
    "unusable": ("error", "Unusable files ({of}): {n}, e.g. {first}",
        "{mend}, or delete them. " + LISTED + "; training skips them as long as they are at most 5 % of the "
        "images (finetune --max-bad 0.1 allows 10 %)"),
    "label-conflict": ("error", "Images with conflicting labels: {g}, e.g. {first}",
        "Choose the right label and delete the copies in the other classes, or their rows of the table; "
        + LISTED + ", the copies of one image as one group"),
    "leakage": ("error", "Identical images in {place}: {g}, e.g. {first}",
        "Delete the copies in {here}, or their rows of the table, so that the model is not tested on its "
        "training images; " + LISTED),
    "class-not-in-train": ("error", "Classes of {split} without an image in {train}: {classes}",
        "Check {train} for another spelling (case and spaces count); otherwise move images of them there, or "
        "delete these classes from {split}"),
    "one-class": ("error", "Classes with images in {train}: only {classes}{beside}",
        "A classifier needs at least two. Put the images of each class in a folder of its own, such as "
        "DATA/cat/1.jpg and DATA/dog/2.jpg, or write a .csv with the columns path and label"),
    "nothing-to-test": ("error", "Images in {train}: {count}, one of each class",
        "Add images: a class needs at least two different ones, one to train and one to test on, and 50 or "
        "more for a meaningful result"),
    "nothing-annotated": ("error", "Images of {split}: {count}, none with an annotated object",
        "Annotate objects in some of them, check that the annotations name these images; if val or test is "
        "left out, a part of train takes its place"),
    "empty-class": ("warning", "Classes without an image in {train}: {classes}",
        "Add images of them, or delete the empty folders: a folder without a readable image is not a class, "
        "and a class without images is never predicted"),
    "few-in-all": ("warning", "Images in {train}: only {count} in total",
        "Add images, if possible 50 or more per class: a model learns little from so few, and the few that "
        "are held out measure it poorly"),
    "duplicates": ("warning", "Duplicate images in {place}: {g}, e.g. {first}",
        "Delete all but one of each group, unless they are repeated on purpose; " + LISTED),
    "near-duplicates": ("warning", "Near-duplicate images in {place}: {g} groups, e.g. {first}",
        "Compare the files of a group and, if they are copies, delete all but one; " + LISTED),
    "near-leakage": ("warning", "Near-duplicate images across {place}: {g} groups, e.g. {first}",
        "Compare the files of a group and, if they are copies or frames of one scene, delete those in "
        "{here}, or the test result will be too good; " + LISTED),
    "wrong-labels": ("warning", "Labels that are likely wrong: {n} of {count}, e.g. {listed}",
        "Look at them in {page}, write relabel or exclude in the column action of {table}, and train with "
        "finetune --corrections {table}"),
    "similar-across": ("warning", "Nearly the same image for the model in {place}: {g} groups, e.g. {first}",
        "Look at them in {page} and, if they are copies or frames of one scene, write exclude in the column "
        "action of {table}, and train with finetune --corrections {table}"),
    "similar": ("warning", "Nearly the same image for the model within {place}: {g} groups, e.g. {first}",
        "Look at them in {page} and, if they are copies, write exclude in the column action of {table}, and "
        "train with finetune --corrections {table}"),
    "class-not-in-split": ("warning", "Classes of {train} without an image in {split}: {classes}",
        "Move a tenth of their images from {train} to {split}; without them, {split} does not measure these "
        "classes"),
    "one-image": ("warning", "Classes with one image in {train}: {classes}",
        "Add images of them, since a single image cannot be used for both training and testing; otherwise "
        "merge them with another class, or delete them"),
    "few-images": ("warning", "Classes with fewer than 5 images in {train}: {listed}",
        "Add images of them, if possible 50 or more each; otherwise merge them with another class, or delete "
        "them"),
    "imbalance": ("warning", "In {train}, {large} and {small}",
        "Add images of the small classes, and check the accuracy per class (`vitkit evaluate RUN DATA`), "
        "which the overall accuracy hides"),
    "bad-annotation": ("error", "Images whose mask or boxes cannot be used: {n}, e.g. {first}",
        "Correct the annotation, or delete it with its image; " + LISTED),
    "mask-alone": ("error", "Classes of the masks of {split}: only {classes}",
        "List the background too, as the first class if its pixels are 0: a model that knows one class "
        "predicts it everywhere, and pixels of 255 are ignored, so they teach nothing"),
    "mask-white": ("error", "Masks of {split}: only the numbers 0 and 255, and 255 is ignored",
        "Save the foreground as 1, the number of the second class: numpy.where(mask == 255, 1, 0)"),
    "exif-unclear": ("warning", "Images that EXIF turns, with annotations of either picture: {n}, e.g. "
        "{files}",
        "Look at them in the page of samples; where masks or boxes are beside their objects, save the image "
        "turned and without its EXIF orientation"),
    "box-empty": ("warning", "Boxes without area, in {n} images: {count}, e.g. in {files}",
        "They are left out: draw them again, or delete them; " + LISTED),
    "box-outside": ("warning", "Boxes wholly outside of their image, in {n} images: {count}, e.g. in {files}",
        "They are left out: check whether the image was cropped or resized afterwards; " + LISTED),
    "box-clipped": ("warning", "Boxes partly outside of their image, in {n} images: {count}, e.g. in {files}",
        "They are clipped at its edge: look at some, since corners that were written as centres and images "
        "that were resized look like this; " + LISTED),
    "box-copies": ("warning", "Boxes that repeat another of the same class, in {n} images: {count}, e.g. in "
        "{files}", "Delete the copies, since each counts as an object that is missed; " + LISTED),
    "box-near-copies": ("warning", "Boxes that cover another of the same class by more than 95 %, in {n} "
        "images: {count}, e.g. in {files}",
        "Look at them, and delete one of two boxes around an object; " + LISTED),
    "box-small": ("warning", "Objects with a side under {least} pixels once the image has {size}, in {n} "
        "images: {count}, e.g. in {files}",
        "They will hardly be detected: give vitkit finetune a larger --image-size, or cut the images"),
    "class-small": ("warning", "Classes whose objects are mostly smaller than two patches once the image has "
        "{size} pixels: {listed}",
        "Give vitkit finetune a larger --image-size, take smaller patches, or cut the images into tiles"),
    "class-unannotated": ("warning", "Classes without an annotation in {split}: {classes}",
        "Annotate images of them, or delete them from the list of classes; {split} says nothing about them"),
    "mask-ignored": ("warning", "Masks of which more than half is ignored: {n}, e.g. {files}",
        "Check the number of the ignored class, which is 255 or a last class called void; " + LISTED),
    "mask-one-class": ("warning", "Masks of {split}: only the class {classes}",
        "Check the masks: a model learns nothing from a single class; smoothing and gray colours change "
        "numbers"),
    "stray-annotations": ("warning", "Annotations without an image: {n}, e.g. {files}",
        "Copy their images into the data, under the same names, or delete them; " + LISTED),
    "unlisted-images": ("warning", "Images that the annotations do not list: {n}, e.g. {files}",
        "They are not used: list them, also those without an object, or move them elsewhere; " + LISTED),
    "absent-split": ("note", "Splits that data.yaml names and that have no images: {files}",
        "No action needed if they are not there on purpose; missing splits are taken from the others"),
    "no-file": ("note", "Images without a file of annotations: {n}, e.g. {files}",
        "No action needed if nothing is to be seen in them: they are background; otherwise annotate them"),
    "no-objects": ("note", "Images without an object: {n} of {count}, e.g. {files}",
        "No action needed if nothing is to be seen in them; detections in them count as errors"),
    "crowd": ("note", "Objects marked as crowd or difficult, in {n} images: {count}, e.g. in {files}",
        "They neither train nor count; if they are single objects, as some tools mark all that were drawn by "
        "brush, set iscrowd to 0"),
    "exif-turned": ("note", "Images that EXIF turns after they were annotated: {n}, e.g. {files}",
        "No action needed: their masks and boxes are turned with them"),
    "box-whole": ("note", "Boxes that cover more than 95 % of their image: {n} images, e.g. {files}",
        "No action needed if the objects are that large; some tools write such a box by default"),
    "many-objects": ("note", "Images with more than {most} objects: {n}, e.g. {files}",
        "A detector with a fixed number of answers misses the others: check its number, or use tiles"),
    "odd-ids": ("note", "Annotations whose id is 0, missing, repeated or text: {n}",
        "No action needed here; other programs lose such objects: number the annotations from 1"),
    "unused-root": ("note", "Categories without objects that only group others: {files}",
        "No action needed: they are left out of the classes, as the tools that write them intend"),
    "similar-classes": ("warning", "Classes that differ only in case, spaces or Unicode form: {twins}",
        "If they are one class, move all images into one folder, or use one name in the table, and check "
        "again: `vitkit doctor DATA --quick`"),
    "masks": ("warning", "Classes whose images look like masks, with one channel and few values: {classes}",
        "Move masks and label images out of DATA, so that class folders contain only photographs; "
        "docs/guides/data.md lists the published layouts that are supported"),
    "folder-name": ("warning", "Classes named like a part of a data set, not like a class: {classes}",
        "If the folder is not a class, use the folder above or below it that contains the class folders, or "
        "a .csv with the columns path and label; docs/guides/data.md lists the supported layouts"),
    "outliers": ("note", "Images unlike all others for the model: {n}, e.g. {files}",
        "Look at them in {page}; write exclude in the column action of {table} if they do not belong to the "
        "data, and train with finetune --corrections {table}"),
    "tiny": ("note", "Images with a side under 32 pixels: {n}, e.g. {first}",
        "If most are this small, use small patches and images: finetune --model ViT-Ti/4 --image-size 32"),
    "enormous": ("note", "Images of more than 20 million pixels: {n}, e.g. {first}",
        "No action needed; copies with sides of about 1000 pixels load many times faster"),
    "long": ("note", "Images with an aspect ratio above 5:1: {n}, e.g. {first}",
        "A classifier squashes them to the shape of its input: crop them to what matters, or keep the aspect "
        "ratio and lose the ends with finetune --set evaluation_crop=centre"),
    "mode": ("note", "Images of the kind {of}: {n}, e.g. {first}",
        "No action needed: all are read as upright 8-bit RGB, first frame, transparency on white"),
    "links": ("warning", "Links in the archive, which are not followed: {n}, e.g. {files}",
        "Pack the files instead of links to them (`tar -h`), or use the unpacked folder"),
    "unlabelled": ("note", "Images without a label, which are not used: {n}, e.g. {files}",
        "No action needed; to use them, write their class numbers into the column of labels"),
    "other-files": ("note", "Files without an image suffix: {n}, e.g. {files}",
        "No action needed if they are not images; otherwise rename them to end in .jpg, .png, .webp, .gif, "
        ".bmp, .tif, .avif or .heic, according to their format"),
}  # fmt: skip
AGAIN = "Copy or download them again from the original source"
MEND = {  # by the reason for which a file is unusable
    "empty": AGAIN, "truncated": AGAIN, "damaged": AGAIN,
    "not-an-image": "Open one in a text editor: if it is a web page or an error message, download the image "
                    "again; move other files out of the data",
    "unsupported-format": 'Install the decoder if the message names one (HEIC: pip install "vitkit[heif]"), '
                          "or convert them to JPEG or PNG with any image program",
    "too-many-pixels": "Scale them down to at most 50 million pixels with any image program",
    "too-large": "Save them with less than 200 MB, as JPEG or PNG, with any image program",
    "zero-size": "Save them again from the original source with at least one pixel",
    "unreadable": "Make them readable (`chmod u+r FILE`), and restore missing targets of links and tables",
    "not-a-file": "Rename the folder, pipe or device that is named like an image",
    "float-out-of-range": "Scale the values to 0..1, or save them as 8-bit PNG",
    "int-out-of-range": "Scale the values to 0..65535, or save them as 8-bit PNG",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One finding about a data set, and its remedy."""

    kind: str  # a stable code: one of KINDS; unusable- and mode- are followed by the reason or mode
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
    """A finding of this kind, with its text and remedy filled in."""
    copies = tuple(tuple(group) for group in groups)
    files, classes = tuple(files) or tuple(chain(*copies)), tuple(classes)
    rule, _, of = (kind, "", "") if kind in KINDS else kind.partition("-")
    fields = {"n": str(len(files)), "g": str(len(copies)), "of": of}
    fields |= {"first": some(copies[0]) if copies else "", "files": some(files), "classes": some(classes)}
    fields |= {"mend": MEND.get(of, "Repair them")} | values
    severity, text, remedy = KINDS[rule]
    text, remedy = (sentence.format(**fields) + "." for sentence in (text, remedy))
    return Finding(kind, severity, text, remedy, files, copies, classes)


def some(names: Sequence[str]) -> str:
    """The first five names, and the number of the others."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
