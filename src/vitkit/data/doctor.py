"""Data set checks before training: unusable files, duplicates, leakage and imbalance, with remedies."""

import hashlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitkit.data.decode import FORMATS, OPENERS, BadImage, _orientation, decode
from vitkit.data.findings import Finding, find, some
from vitkit.data.loader import BadFiles, TooManyBad
from vitkit.data.names import SUFFIXES, folded
from vitkit.data.sources.source import Lazy, Source
from vitkit.data.target_checks import (
    annotation_notes,
    check_kind,
    examine_targets,
    nothing_annotated,
    single_class,
)
from vitkit.errors import Error

REFUSED_AS = {"nothing-to-test": "data.empty", "nothing-annotated": "data.labels"}
FEW, FEW_IN_ALL = 5, 20  # training images of a class, and of all classes
IMBALANCE = 10  # size ratio of the largest class to the smallest
MANY = 1_000_000  # larger data sets are not checked before training
NAMED = 100_000  # images up to which all names are compared
PART = 1 << 20  # labels that are counted at once
TINY, ENORMOUS, LONG = 32, 20_000_000, 5  # shorter side; pixels; ratio of the longer side to the shorter
NEAR, FLAT = 3, 8  # bits in which near-duplicates may differ; range of gray levels too flat to hash
COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of a hash: each half gets one of the margins, which are often flat
LEVELS = 64  # most colours of a mask, one for each class of a street scene
MASKLIKE = {"mode-bilevel", "mode-gray", "mode-palette"}
FOLDERS = {  # typical of data sets whose labels are in files, not in folder names
    "train", "training", "val", "valid", "validation", "test", "testing", "images", "image", "imgs", "img",
    "jpg", "jpeg", "jpegimages", "png", "annotations", "annotation", "labels", "label", "masks", "mask",
    "trimaps", "segmentation", "segmentations", "ground_truth", "gt", "bboxes", "data", "dataset",
}  # fmt: skip
MODES = {"1": "bilevel", "L": "gray", "LA": "gray", "I;16": "gray", "I;16B": "gray", "I": "32-bit",
         "F": "float", "CMYK": "cmyk", "P": "palette", "RGB": "", "RGBA": "", "RGBX": ""}  # fmt: skip


UNLABELLED = re.compile(r"\.parquet:\d+$")  # a row whose image has no label


@dataclass(frozen=True)
class Report:
    """The statistics and findings of a data set; `sizes` and `modes` are empty if no image was read."""

    splits: dict[str, dict[str, Any]]
    sizes: dict[str, Any]
    modes: dict[str, int]
    findings: tuple[Finding, ...]  # errors first
    targets: dict[str, dict[str, Any]] | None = None  # the annotations by split, of data with masks or boxes

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        fields = {"ok": self.ok} | asdict(self)
        return {key: value for key, value in fields.items() if key != "targets" or value is not None}


class ImageCheck(NamedTuple):
    """The result of checking one image."""

    split: str
    name: str
    label: str  # empty for multi-label data, and for images with masks or boxes
    size: tuple[int, int] | None = None  # width, height; None for an unusable image
    tags: tuple[str, ...] = ()  # "tiny", "mode-gray", "unusable-truncated" ...
    detail: str = ""  # follows the name in messages
    digest: bytes = b""  # of the pixels
    hash: bytes = b""  # perceptual; empty if it would not be distinctive
    mask: bool = False  # whether it has one channel or a palette, and few colours


def examine(splits: Mapping[str, Source], *, deep: bool = True, workers: int = 4,
            advance: Callable[[int], None] = lambda count: None) -> Report:  # fmt: skip
    """Check names and labels and, if `deep`, decode every image once; `advance` gets the progress.

    A file is named by its key, prefixed by its split ("test:000001") if several splits have that key.
    """
    splits, names = ordered(splits), file_names(splits)
    checks: list[ImageCheck] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about files that are reported here
        for split, source in splits.items() if deep else ():
            results: list[ImageCheck] = []
            while len(results) < len(source):  # in parts, since a million queued tasks would fill the memory
                part = range(len(results), min(len(results) + 32 * workers, len(source)))
                for check in pool.map(
                    lambda i, s=split, src=source: check_image(src, i, s, names[s][i]), part
                ):
                    results.append(check)
                    advance(1)
            checks += sorted(results, key=lambda check: check[:3])
    counts = {split: class_counts(source) for split, source in splits.items()}
    targets, wrong = examine_targets(splits, names, deep=deep, workers=workers)
    findings = [*structure(splits, names, counts), *wrong, *masks(checks), *copies(checks)]
    for tag in sorted({tag for check in checks for tag in check.tags}):
        tagged = [check for check in checks if tag in check.tags]
        first = f"{tagged[0].name!r}{tagged[0].detail}"
        findings.append(find(tag, [check.name for check in tagged], first=first))
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    per = class_sizes(counts, targets)
    classes = {s: () if deep or targets is None else part.classes for s, part in splits.items()}
    numbers = {
        s: {"images": len(splits[s]), "classes": len(n or classes[s]), "per_class": summary(n)}
        for s, n in per.items()
    }
    sizes = [check.size for check in checks if check.size]
    sides = {"width": summary([w for w, _ in sizes]), "height": summary([h for _, h in sizes])}
    share = {"non_square": sum(w != h for w, h in sizes) / max(len(sizes), 1)}
    modes = Counter(tag.removeprefix("mode-") for c in checks for tag in c.tags if tag.startswith("mode-"))
    shapes = sides | share if sizes else {}
    return Report(numbers, shapes, dict(sorted(modes.items())), tuple(findings), targets)


def class_sizes(
    counts: Mapping[str, Mapping[str, int]], targets: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, list[int]]:
    """The numbers of images of the classes that have any, by split."""
    if targets is None:
        return {split: [n for n in per_class.values() if n] for split, per_class in counts.items()}
    rows = {split: facts["classes"].values() for split, facts in targets.items()}
    return {split: [row["images"] for row in values if row["images"]] for split, values in rows.items()}


def ordered(splits: Mapping[str, Source]) -> dict[str, Source]:
    usual = ("train", "all", "val", "test")
    return {s: splits[s] for s in sorted(splits, key=lambda s: (usual.index(s) if s in usual else 4, s))}


def file_names(splits: Mapping[str, Source]) -> dict[str, Sequence[str]]:
    """The name of each file in findings: its key, prefixed by its split if several splits have that key.

    Above `NAMED` images, all names of several splits are prefixed, and each is made when it is asked for.
    """
    if len(splits) == 1:
        return {split: source.keys for split, source in splits.items()}
    if sum(map(len, splits.values())) > NAMED:
        return {s: Lazy(len(source), partial(prefixed, s, source.keys)) for s, source in splits.items()}
    uses = Counter(key for source in splits.values() for key in set(source.keys))
    return {s: [f"{s}:{k}" if uses[k] > 1 else k for k in source.keys] for s, source in splits.items()}


def prefixed(split: str, keys: Sequence[str], index: int) -> str:
    return f"{split}:{keys[index]}"


def usable(splits: Mapping[str, Source], place: str, targets: str = "") -> list[Finding]:
    """The findings from names and labels; findings that are errors are raised.

    targets: the annotations that the task needs, "mask", "boxes" or "instances"; "" if it needs labels.

    Every training run checks its data this way first, so that it accepts what the doctor accepts. Data sets
    of more than a million images are not checked, since that takes long.
    """
    check_kind(splits, targets, place)
    if sum(map(len, splits.values())) > MANY:
        return []
    splits = ordered(splits)
    counts = {split: class_counts(source) for split, source in splits.items()}
    findings = list(structure(splits, file_names(splits), counts))
    if errors := [finding for finding in findings if finding.severity == "error"]:
        code = REFUSED_AS.get(errors[0].kind, "data.classes")
        message = " ".join(f"{finding.text} {finding.remedy}" for finding in errors)
        raise Error(f"{place}: {message}", code=code)
    return findings


def preflight(source: Source, bad: BadFiles, *, sample: int = 1000, workers: int = 4) -> None:
    """Decode up to `sample` images before training, so that data with too many bad files fails early.

    In a larger source, more than the allowed share of the sample must be bad by three standard deviations,
    so that a source within the limit is hardly ever rejected by chance.
    """
    count = min(sample, len(source))
    chosen = np.sort(np.random.default_rng(0).choice(len(source), count, replace=False, shuffle=False))
    unusable, last = 0, None
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for index, error in zip(
            chosen, pool.map(lambda i: decode_error(source, int(i)), chosen), strict=True
        ):
            if error:
                unusable, last = unusable + 1, error
                bad.add(source, int(index), error)
    chance = 3 * math.sqrt(count * bad.allowed * max(0.0, 1 - bad.allowed))
    if count < len(source) and unusable > count * bad.allowed + chance:
        raise TooManyBad(
            f"{source.name}: {unusable} of {count} sampled images are unusable, and {bad.allowed:.0%} are "
            f"allowed; the first: {some(list(bad.reasons))}. The last: {last}. Repair them (vitkit doctor "
            "lists all), or allow more with --max-bad of finetune and pretrain"
        )


def decode_error(source: Source, index: int) -> BadImage | None:
    """The error of an image that cannot be decoded."""
    try:
        content = source.fetch(index)
        if isinstance(content, bytes):
            decode(content, shorter=TINY)  # reads a JPEG to its end, but decodes it at reduced size
    except BadImage as error:
        return error
    return None


def summary(values: Sequence[int]) -> dict[str, float]:
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)} if values else {}


def class_counts(source: Source) -> dict[str, int]:
    """The number of images of each class, by its name."""
    numbers = source.labels.pairs()[1] if source.multilabel else source.labels
    counts = np.zeros(len(source.classes), np.int64)
    for start in range(0, len(numbers), PART):
        counts += np.bincount(numbers[start : start + PART], minlength=len(counts))
    return dict(sorted(zip(source.classes, counts.tolist(), strict=True)))


def files_of(source: Source, names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """The names of the images of some classes, class by class."""
    rows, labels = source.labels.pairs() if source.multilabel else (None, source.labels)
    numbers = {name: number for number, name in enumerate(source.classes)}
    place = np.full(len(source.classes), -1)
    place[[numbers[name] for name in classes]] = np.arange(len(classes))
    members = np.flatnonzero(place[labels] >= 0)
    images = members if rows is None else rows[members]
    pairs = zip(place[labels[members]].tolist(), (names[i] for i in images.tolist()), strict=True)
    return [name for _, name in sorted(pairs)]


def left_out(splits: Mapping[str, Source]) -> Iterator[Finding]:
    """The findings about files that are no images of the data set."""
    kinds: dict[str, list[str]] = {"links": [], "unlabelled": [], "other-files": []}
    for name in sorted({name for source in splits.values() for name in source.skipped}):
        link = name.lower().endswith(SUFFIXES)
        kinds["links" if link else "unlabelled" if UNLABELLED.search(name) else "other-files"].append(name)
    yield from (find(kind, files) for kind, files in kinds.items() if files)


def structure(
    splits: Mapping[str, Source], names: Mapping[str, Sequence[str]], counts: Mapping[str, Mapping[str, int]]
) -> Iterator[Finding]:
    """The findings from names and labels, without reading images; counts: images of each class by split."""
    yield from left_out(splits)
    if any(source.targets for source in splits.values()):  # their images have no label of their own
        yield from annotation_notes(splits)
        yield from nothing_annotated(splits)
        yield from single_class(splits)
        return
    alike: dict[str, list[str]] = {}
    classes = sorted(set(chain(*counts.values())))
    for name in classes:
        alike.setdefault(folded(name), []).append(name)
    for twins in alike.values():
        if len(twins) > 1:  # ascii(), since NFC and NFD look the same
            yield find("similar-classes", classes=twins, twins=", ".join(map(ascii, twins)))
    generic = [name for name in classes if FOLDERS & set(name.lower().split("/"))]
    if generic:
        yield find("folder-name", classes=generic)
    train_split = next((split for split in ("train", "all") if split in splits), None)
    if train_split is None:  # data to evaluate on
        return
    train = "the data" if train_split == "all" else train_split
    present = {name: count for name, count in counts[train_split].items() if count}
    yield from too_few(splits[train_split], train, present, alone=len(splits) == 1)
    for split, parts in counts.items():
        unknown = [name for name in parts if parts[name] and name not in present]
        absent = [name for name in present if not parts.get(name)]
        if unknown:
            files = files_of(splits[split], names[split], unknown)
            yield find("class-not-in-train", files, classes=unknown, split=split, train=train)
        if absent:
            yield find("class-not-in-split", classes=absent, split=split, train=train)
    train_files = partial(files_of, splits[train_split], names[train_split])
    single = [name for name, count in present.items() if count == 1]
    if single:
        yield find("one-image", train_files(single), classes=single, train=train)
    few = [name for name, count in present.items() if 1 < count < FEW]
    if few:
        listed = some([f"{name}: {present[name]}" for name in few])
        yield find("few-images", train_files(few), classes=few, train=train, listed=listed)
    if present and max(present.values()) > IMBALANCE * min(present.values()):
        ends = [max(present, key=present.__getitem__), min(present, key=present.__getitem__)]
        large, small = (f"{name!r} has {present[name]} images" for name in ends)
        yield find("imbalance", classes=ends, train=train, large=large, small=small)


def too_few(source: Source, train: str, present: Mapping[str, int], *, alone: bool) -> Iterator[Finding]:
    """Findings on missing classes and images; `present` has the number of training images of each class.

    alone: whether the data has no other split, so that test images are split off.
    """
    total = len(source)
    absent = [*source.empty, *(name for name in sorted(source.classes) if name not in present)]
    if len(present) < 2 and not source.multilabel:
        beside = f"; no image in {some(absent)}" if absent else ""
        yield find("one-class", classes=present, train=train, beside=beside)
    elif absent:
        yield find("empty-class", classes=absent, train=train)
    if alone and len(present) > 1 and max(present.values()) == 1 and not source.multilabel:
        yield find("nothing-to-test", classes=present, train=train, count=str(total))
    elif total < FEW_IN_ALL:
        yield find("few-in-all", train=train, count=str(total))


def check_image(source: Source, index: int, split: str, name: str) -> ImageCheck:
    """Decode one image and collect what findings are based on."""
    label = "" if source.multilabel or source.targets else source.classes[source.labels[index]]
    try:
        content = source.fetch(index)
        pixels = decode(content) if isinstance(content, bytes) else np.ascontiguousarray(content)
    except BadImage as error:
        return ImageCheck(split, name, label, tags=(f"unusable-{error.reason}",), detail=f": {error}")
    size = width, height = pixels.shape[1], pixels.shape[0]
    short, long = sorted(size)
    shape = {"tiny": short < TINY, "enormous": short * long > ENORMOUS, "long": long > LONG * short}
    tags = tuple(tag for tag in shape if shape[tag]) + (header(content) if isinstance(content, bytes) else ())
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=b"%d %d" % (width, height)).digest()
    mask = bool(MASKLIKE & set(tags)) and Image.fromarray(pixels).getcolors(LEVELS) is not None
    detail = f" of {width} x {height}"
    return ImageCheck(split, name, label, size, tags, detail, digest, difference_hash(pixels), mask)


def masks(checks: list[ImageCheck]) -> Iterator[Finding]:
    """Classes with nothing but masks beside classes of photographs; if all are masks, they are drawings."""
    by_label: dict[str, list[ImageCheck]] = {}
    for check in (check for check in checks if check.label and check.size):
        by_label.setdefault(check.label, []).append(check)
    flat = [label for label in sorted(by_label) if all(check.mask for check in by_label[label])]
    if flat and len(flat) < len(by_label):
        yield find("masks", [check.name for label in flat for check in by_label[label]], classes=flat)


def header(data: bytes) -> tuple[str, ...]:
    """Tags for unusual properties in the header of a file that was decoded."""
    try:
        image = Image.open(
            BytesIO(data), formats=[kind for kind in FORMATS if kind in OPENERS or kind == "JPEG"]
        )
        turn = getattr(image, "tag_v2", {}).get(274) or _orientation(image.info.get("exif", b""))
        raw = str(image.tile[0].args) if image.tile and image.format in ("PNG", "TIFF") else ""
        modes = {MODES.get(image.mode, "other-colours"): True, "alpha": image.has_transparency_data,
                 "16-bit": ";16" in raw, "exif-rotated": turn in range(2, 9),
                 "animated": getattr(image, "is_animated", False)}  # fmt: skip
        return tuple(f"mode-{mode}" for mode, present in modes.items() if mode and present)
    except Exception:  # Pillow raises almost any type, and the pixels are known to be good
        return ()


def difference_hash(pixels: np.ndarray) -> bytes:
    """The difference hash of 9 x 8 gray levels, one byte per column; empty if it is not distinctive."""
    if min(pixels.shape[:2]) < TINY:  # small drawings share most of their bits
        return b""
    small = np.array(Image.fromarray(pixels).convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = small[:, 1:] > small[:, :-1]
    if np.ptp(small) < FLAT or not NEAR < bits.sum() < 64 - NEAR:  # all smooth gradients are alike
        return b""
    return np.packbits(bits[:, COLUMNS], axis=0).tobytes()


def copies(checks: list[ImageCheck]) -> Iterator[Finding]:
    """Findings on exact and near-duplicates; for the latter, one image represents its exact copies."""
    by_digest: dict[bytes, list[ImageCheck]] = {}
    for check in (check for check in checks if check.digest):
        by_digest.setdefault(check.digest, []).append(check)
    exact = [group for group in by_digest.values() if len(group) > 1]
    conflicts = [group for group in exact if len({check.label for check in group if check.label}) > 1]
    if conflicts:
        first = some([f"{check.name} ({check.label})" for check in conflicts[0]])
        yield find("label-conflict", groups=names_of(conflicts), first=first)
    close = near_groups([group[0] for group in by_digest.values() if group[0].hash])
    kinds = ("duplicates", "leakage", exact), ("near-duplicates", "near-leakage", close)
    for within, across, groups in kinds:
        by_splits: dict[tuple[str, ...], list[list[ImageCheck]]] = {}
        for group in groups:
            splits = tuple(dict.fromkeys(check.split for check in group))
            for subset in {splits, *((split,) for split in splits)}:
                part = [check for check in group if check.split in subset]
                if len(part) > 1:
                    by_splits.setdefault(subset, []).append(part)
        for subset in sorted(by_splits):
            kind, place = within if len(subset) == 1 else across, " and ".join(subset)
            yield find(kind, groups=names_of(by_splits[subset]), place=place, here=subset[0])


def names_of(groups: list[list[ImageCheck]]) -> Iterator[list[str]]:
    return ([check.name for check in group] for group in groups)


def near_groups(checks: list[ImageCheck]) -> list[list[ImageCheck]]:
    """Groups of images that look alike, directly or through others in the group."""
    hashes, inverse = np.unique(
        np.frombuffer(b"".join(check.hash for check in checks), np.uint64), return_inverse=True
    )
    group = np.arange(len(hashes))
    for pairs in near_pairs(hashes.view(np.uint8).reshape(-1, 8)):
        for a, b in pairs[group[pairs[:, 0]] != group[pairs[:, 1]]]:
            if group[a] != group[b]:
                group[group == group[b]] = group[a]
    groups: dict[int, list[ImageCheck]] = {}
    for check, number in zip(checks, group[inverse].tolist(), strict=True):
        groups.setdefault(number, []).append(check)
    return [members for members in groups.values() if len(members) > 1]


def near_pairs(columns: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs (P, 2) of rows (N, 8) that differ in at most 3 bits: three bytes of one half must be equal."""
    for three in [*combinations(range(4), 3), *combinations(range(4, 8), 3)]:
        key = columns[:, three].astype(np.int64) @ (1, 256, 65536)
        order = np.argsort(key, kind="stable")
        key, rows, step = key[order], np.arange(len(key)), 0
        while len(rows):
            step += 1
            rows = rows[: np.searchsorted(rows, len(key) - step)]
            rows = rows[key[rows + step] == key[rows]]
            pairs = order[np.stack([rows, rows + step], axis=1)]
            yield pairs[np.unpackbits(np.bitwise_xor(*columns[pairs.T]), axis=1).sum(1) <= NEAR]
