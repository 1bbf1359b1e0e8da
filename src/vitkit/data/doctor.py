"""A data set looked at before any training: what is broken, doubled, leaking or lopsided, and what to do."""

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitkit.data.decode import FORMATS, OPENERS, BadImage, _orientation, decode
from vitkit.data.findings import Finding, find, some
from vitkit.data.loader import BadFiles, TooManyBad
from vitkit.data.names import folded
from vitkit.data.sources.source import Source
from vitkit.errors import Error

FEW, FEW_IN_ALL = 5, 20  # images of a class, and of all classes, to learn from
IMBALANCE = 10  # the largest class to the smallest
MANY = 1_000_000  # images up to which a training goes through all names first
TINY, ENORMOUS, LONG = 32, 20_000_000, 5  # shorter side; pixels; longer side to shorter
NEAR, FLAT = 3, 8  # bits in which near-duplicates differ at most; grey levels that show nothing to hash
COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of a hash: each half gets one of the margins, which are often flat
LEVELS = 64  # values of a mask, at most: one for each kind of thing in a street scene
MASKLIKE = {"mode-bilevel", "mode-gray", "mode-palette"}
FOLDERS = {  # of data sets whose labels are in files, not in the names of folders
    "train", "training", "val", "valid", "validation", "test", "testing", "images", "image", "imgs", "img",
    "jpg", "jpeg", "jpegimages", "png", "annotations", "annotation", "labels", "label", "masks", "mask",
    "trimaps", "segmentation", "segmentations", "ground_truth", "gt", "bboxes", "data", "dataset",
}  # fmt: skip
MODES = {"1": "bilevel", "L": "gray", "LA": "gray", "I;16": "gray", "I;16B": "gray", "I": "32-bit",
         "F": "float", "CMYK": "cmyk", "P": "palette", "RGB": "", "RGBA": "", "RGBX": ""}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was counted, and what was found; `sizes` and `modes` are empty where no image was read."""

    splits: dict[str, dict[str, Any]]
    sizes: dict[str, Any]
    modes: dict[str, int]
    findings: tuple[Finding, ...]  # errors first

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok} | asdict(self)


class Look(NamedTuple):
    """What one image showed."""

    split: str
    name: str
    label: str  # empty where an image may have several
    size: tuple[int, int] | None = None  # width, height; None where it cannot be used
    tags: tuple[str, ...] = ()  # "tiny", "mode-gray", "unusable-truncated" ...
    told: str = ""  # to be said behind the name
    digest: bytes = b""  # of the pixels
    hash: bytes = b""  # of how they look; empty where that would say nothing
    mask: bool = False  # whether it has one channel or a palette, and few colours


def examine(splits: Mapping[str, Source], *, deep: bool = True, workers: int = 4,
            advance: Callable[[int], None] = lambda count: None) -> Report:  # fmt: skip
    """Names and labels and, if `deep`, every image, read and decoded once; `advance` is told how many more.

    A file is named by its key, after its split ("test:000001") where several splits have that key.
    """
    splits, names = ordered(splits), file_names(splits)
    looks: list[Look] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.simplefilter("ignore")  # Pillow's, about what is told of the same file here
        for split, source in splits.items() if deep else ():
            found: list[Look] = []
            while len(found) < len(source):  # by parts, for a million waiting tasks would fill the memory
                part = range(len(found), min(len(found) + 32 * workers, len(source)))
                for one in pool.map(lambda i, s=split, src=source: look(src, i, s, names[s][i]), part):
                    found.append(one)
                    advance(1)
            looks += sorted(found, key=lambda one: one[:3])
    files = {split: files_by_class(source, names[split]) for split, source in splits.items()}
    findings = [*structure(splits, files), *masks(looks), *copies(looks)]
    for tag in sorted({tag for one in looks for tag in one.tags}):
        those = [one for one in looks if tag in one.tags]
        findings.append(find(tag, [one.name for one in those], first=f"{those[0].name!r}{those[0].told}"))
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    per = {split: [len(those) for those in files[split].values() if those] for split in splits}
    numbers = {
        s: {"images": len(splits[s]), "classes": len(n), "per_class": spread(n)} for s, n in per.items()
    }
    sizes = [one.size for one in looks if one.size]
    sides = {"width": spread([w for w, _ in sizes]), "height": spread([h for _, h in sizes])}
    share = {"non_square": sum(w != h for w, h in sizes) / max(len(sizes), 1)}
    modes = Counter(tag.removeprefix("mode-") for one in looks for tag in one.tags if tag.startswith("mode-"))
    return Report(numbers, sides | share if sizes else {}, dict(sorted(modes.items())), tuple(findings))


def ordered(splits: Mapping[str, Source]) -> dict[str, Source]:
    usual = ("train", "all", "val", "test")
    return {s: splits[s] for s in sorted(splits, key=lambda s: (usual.index(s) if s in usual else 4, s))}


def file_names(splits: Mapping[str, Source]) -> dict[str, list[str]]:
    """What a finding calls each file: its key, after its split where several splits have that key."""
    held = Counter(key for source in splits.values() for key in set(source.keys))
    return {s: [f"{s}:{k}" if held[k] > 1 else k for k in source.keys] for s, source in splits.items()}


def usable(splits: Mapping[str, Source], place: str) -> list[Finding]:
    """What names and labels show, as the doctor reports it; an error among it is raised.

    Every training asks this of its data before anything else, so that it accepts what the doctor accepts.
    Of more than a million images it is not asked: that takes long, and they are no beginner's folder.
    """
    if sum(map(len, splits.values())) > MANY:
        return []
    names = file_names(splits)
    files = {split: files_by_class(source, names[split]) for split, source in ordered(splits).items()}
    findings = list(structure(ordered(splits), files))
    if errors := [finding for finding in findings if finding.severity == "error"]:
        code = "data.empty" if errors[0].kind == "nothing-to-test" else "data.classes"
        raise Error(f"{place}: " + " ".join(f"{one.text} {one.remedy}" for one in errors), code=code)
    return findings


def preflight(source: Source, bad: BadFiles, *, sample: int = 1000, workers: int = 4) -> None:
    """Decode some images before a training, so that data with too many bad files is refused at once.

    Up to `sample` images, all of them where there are no more. Of a larger source they stand for the whole:
    it is refused when by chance alone so many would hardly be found (three standard deviations).
    """
    count = min(sample, len(source))
    chosen = np.sort(np.random.default_rng(0).choice(len(source), count, replace=False, shuffle=False))
    found, last = 0, None
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for index, error in zip(chosen, pool.map(lambda i: refusal(source, int(i)), chosen), strict=True):
            if error:
                found, last = found + 1, error
                bad.add(source, int(index), error)
    chance = 3 * math.sqrt(count * bad.allowed * max(0.0, 1 - bad.allowed))
    if count < len(source) and found > count * bad.allowed + chance:
        raise TooManyBad(
            f"{source.name}: of {count} images looked at, {found} are unusable, and {bad.allowed:.0%} are "
            f"allowed; the first: {some(list(bad.found))}. The last: {last}. Repair them (vitkit doctor "
            "lists all), or allow more with --max-bad of finetune and pretrain"
        )


def refusal(source: Source, index: int) -> BadImage | None:
    try:
        content = source.fetch(index)
        if isinstance(content, bytes):
            decode(content, shorter=TINY)  # a JPEG is read to its end, but not made large
    except BadImage as error:
        return error
    return None


def spread(values: Sequence[int]) -> dict[str, float]:
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)} if values else {}


def files_by_class(source: Source, names: list[str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {name: [] for name in sorted(source.classes)}
    rows = source.labels.pairs() if source.multilabel else (np.arange(len(source)), source.labels)
    for i, label in zip(*(part.tolist() for part in rows), strict=True):
        files[source.classes[label]].append(names[i])
    return {name: sorted(those) for name, those in files.items()}


def structure(splits: Mapping[str, Source], files: dict[str, dict[str, list[str]]]) -> Iterator[Finding]:
    """What names and labels tell."""
    skipped = sorted({name for source in splits.values() for name in source.skipped})
    if skipped:
        yield find("other-files", skipped)
    alike: dict[str, list[str]] = {}
    for name in sorted(set(chain(*files.values()))):
        alike.setdefault(folded(name), []).append(name)
    for twins in alike.values():
        if len(twins) > 1:  # ascii, for NFC and NFD look the same
            yield find("similar-classes", classes=twins, twins=", ".join(map(ascii, twins)))
    odd = [name for name in sorted(set(chain(*files.values()))) if FOLDERS & set(name.lower().split("/"))]
    if odd:
        yield find("folder-name", classes=odd)
    where = next((split for split in ("train", "all") if split in splits), None)
    if where is None:  # data to evaluate on
        return
    train = "the data" if where == "all" else where
    mine = files[where]
    present = {name: len(those) for name, those in mine.items() if those}
    yield from too_few(splits[where], train, present, alone=len(splits) == 1)
    for split, parts in files.items():
        strange = [name for name in parts if parts[name] and name not in present]
        absent = [name for name in present if not parts.get(name)]
        if strange:
            those = chain(*(parts[name] for name in strange))
            yield find("class-not-in-train", those, classes=strange, split=split, train=train)
        if absent:
            yield find("class-not-in-split", classes=absent, split=split, train=train)
    single = [name for name, count in present.items() if count == 1]
    if single:
        yield find("one-image", chain(*(mine[name] for name in single)), classes=single, train=train)
    few = [name for name, count in present.items() if 1 < count < FEW]
    if few:
        listed = some([f"{name}: {present[name]}" for name in few])
        those = chain(*(mine[name] for name in few))
        yield find("few-images", those, classes=few, train=train, listed=listed)
    if present and max(present.values()) > IMBALANCE * min(present.values()):
        ends = [max(present, key=present.__getitem__), min(present, key=present.__getitem__)]
        large, small = (f"{name!r} has {present[name]} images" for name in ends)
        yield find("imbalance", classes=ends, train=train, large=large, small=small)


def too_few(source: Source, train: str, present: Mapping[str, int], *, alone: bool) -> Iterator[Finding]:
    """Classes or images that are missing altogether; `present` are the images of each class to train on.

    alone: whether the data has no other split, so that images to test on are split off.
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


def look(source: Source, index: int, split: str, name: str) -> Look:
    label = "" if source.multilabel else source.classes[source.labels[index]]
    try:
        content = source.fetch(index)
        pixels = decode(content) if isinstance(content, bytes) else np.ascontiguousarray(content)
    except BadImage as error:
        return Look(split, name, label, tags=(f"unusable-{error.reason}",), told=f": {error}")
    size = width, height = pixels.shape[1], pixels.shape[0]
    short, long = sorted(size)
    shape = {"tiny": short < TINY, "enormous": short * long > ENORMOUS, "long": long > LONG * short}
    tags = tuple(tag for tag in shape if shape[tag]) + (header(content) if isinstance(content, bytes) else ())
    digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=b"%d %d" % (width, height)).digest()
    mask = bool(MASKLIKE & set(tags)) and Image.fromarray(pixels).getcolors(LEVELS) is not None
    told = f" of {width} x {height}"
    return Look(split, name, label, size, tags, told, digest, difference_hash(pixels), mask)


def masks(looks: list[Look]) -> Iterator[Finding]:
    """Classes of nothing but masks beside classes of photographs; where all are so, they are drawings."""
    by_label: dict[str, list[Look]] = {}
    for one in (one for one in looks if one.label and one.size):
        by_label.setdefault(one.label, []).append(one)
    flat = [label for label in sorted(by_label) if all(one.mask for one in by_label[label])]
    if flat and len(flat) < len(by_label):
        yield find("masks", [one.name for label in flat for one in by_label[label]], classes=flat)


def header(data: bytes) -> tuple[str, ...]:
    """What is unusual about a file that was decoded, as far as its header tells."""
    try:
        image = Image.open(
            BytesIO(data), formats=[kind for kind in FORMATS if kind in OPENERS or kind == "JPEG"]
        )
        turn = getattr(image, "tag_v2", {}).get(274) or _orientation(image.info.get("exif", b""))
        raw = str(image.tile[0].args) if image.tile and image.format in ("PNG", "TIFF") else ""
        found = {MODES.get(image.mode, "other-colours"): True, "alpha": image.has_transparency_data,
                 "16-bit": ";16" in raw, "exif-rotated": turn in range(2, 9),
                 "animated": getattr(image, "is_animated", False)}  # fmt: skip
        return tuple(f"mode-{mode}" for mode, there in found.items() if mode and there)
    except Exception:  # Pillow raises nearly every kind there is, and the pixels are known to be good
        return ()


def difference_hash(pixels: np.ndarray) -> bytes:
    """Of 9 x 8 grey levels, which are brighter than their left neighbours: a byte for each column."""
    if min(pixels.shape[:2]) < TINY:  # small drawings share most of their bits
        return b""
    small = np.array(Image.fromarray(pixels).convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = small[:, 1:] > small[:, :-1]
    if np.ptp(small) < FLAT or not NEAR < bits.sum() < 64 - NEAR:  # a smooth ramp is like any other
        return b""
    return np.packbits(bits[:, COLUMNS], axis=0).tobytes()


def copies(looks: list[Look]) -> Iterator[Finding]:
    """The same pixels, and the same looks: for the latter, the first of exact copies stands for all."""
    by_digest: dict[bytes, list[Look]] = {}
    for one in (one for one in looks if one.digest):
        by_digest.setdefault(one.digest, []).append(one)
    exact = [group for group in by_digest.values() if len(group) > 1]
    torn = [group for group in exact if len({one.label for one in group if one.label}) > 1]
    if torn:
        first = some([f"{one.name} ({one.label})" for one in torn[0]])
        yield find("label-conflict", groups=names(torn), first=first)
    close = near_groups([group[0] for group in by_digest.values() if group[0].hash])
    kinds = ("duplicates", "leakage", exact), ("near-duplicates", "near-leakage", close)
    for within, across, groups in kinds:
        places: dict[tuple[str, ...], list[list[Look]]] = {}
        for group in groups:
            splits = tuple(dict.fromkeys(one.split for one in group))
            for place in {splits, *((split,) for split in splits)}:
                part = [one for one in group if one.split in place]
                if len(part) > 1:
                    places.setdefault(place, []).append(part)
        for place in sorted(places):
            kind, where = within if len(place) == 1 else across, " and ".join(place)
            yield find(kind, groups=names(places[place]), place=where, here=place[0])


def names(groups: list[list[Look]]) -> Iterator[list[str]]:
    return ([one.name for one in group] for group in groups)


def near_groups(looks: list[Look]) -> list[list[Look]]:
    """Those that look the same, be it by way of others."""
    hashes, at = np.unique(np.frombuffer(b"".join(one.hash for one in looks), np.uint64), return_inverse=True)
    group = np.arange(len(hashes))
    for pairs in near_pairs(hashes.view(np.uint8).reshape(-1, 8)):
        for a, b in pairs[group[pairs[:, 0]] != group[pairs[:, 1]]]:
            if group[a] != group[b]:
                group[group == group[b]] = group[a]
    joined: dict[int, list[Look]] = {}
    for one, number in zip(looks, group[at].tolist(), strict=True):
        joined.setdefault(number, []).append(one)
    return [those for those in joined.values() if len(those) > 1]


def near_pairs(columns: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs (P, 2) of rows (N, 8) that differ in at most 3 bits, so that in one half 3 bytes are equal."""
    for three in [*combinations(range(4), 3), *combinations(range(4, 8), 3)]:
        key = columns[:, three].astype(np.int64) @ (1, 256, 65536)
        order = np.argsort(key, kind="stable")
        key, at, step = key[order], np.arange(len(key)), 0
        while len(at):
            step += 1
            at = at[: np.searchsorted(at, len(key) - step)]
            at = at[key[at + step] == key[at]]
            pairs = order[np.stack([at, at + step], axis=1)]
            yield pairs[np.unpackbits(np.bitwise_xor(*columns[pairs.T]), axis=1).sum(1) <= NEAR]
