"""Which data a run learns from: written into its folder before the first step, compared when it goes on.

A gzip file of two JSON lines. The first is short: classes and, for each split, its number of images and
digests. The second lists the images by name and content, so that a difference can be named, images stay in
the split they were in when others are added, and an evaluation knows the images that a model was trained on;
it is read only then. It lies beside the checkpoints and not in them because it may be large and never changes
as the run goes on.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import SIZE
from vitkit.data.sources.source import Source
from vitkit.data.sources.sparse_labels import SparseLabels, blocks
from vitkit.data.splits import fingerprints, same_classes
from vitkit.errors import Error, WeightsError
from vitkit.io.files import replace_file
from vitkit.runs.folder import has_learned
from vitkit.runs.provenance.changes import Listing, differences, renamed_classes, sampled
from vitkit.runtime.runtime import Runtime
from vitkit.weights.card import from_json
from vitkit.weights.untrusted import open_arrays

FILE = "data.json.gz"
LISTED = 2_000_000  # images up to which each is listed by name
SIZED = 16_384  # files of a split whose sizes are compared
READ = 200_000  # images up to which all are read for their contents, where their split did not need that
CHUNK = 65_536  # names that are hashed at a time
Splits = dict[str, Source]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """The data as it is now beside the data that a run has learned from."""

    found: dict[str, Any]  # the summary of the data as it is now
    known: bool  # whether the run has learned from anything yet
    changes: list[str]  # a phrase for each kind of change
    order: list[str] | None  # the classes in the order that the run has learned, where the data has another
    same_classes: bool = True  # apart from their names
    recorded: bool = True  # whether the file holds all that is known of the data
    older: bool = False  # whether the run has no such file


def check_data(
    splits: Splits, out: Path, runtime: Runtime, *, accept: bool | None, labelled: bool, say: Say
) -> tuple[Splits, bool]:
    """The splits, with classes numbered as the run has learned them; all processes ask at the same time.

    accept: whether changed data is used, if its classes are those of the run or renamed ones; None: no, and
    there is no flag to say so. labelled: whether classes are learned. Also returned: whether it has changed.
    """
    splits = with_marks(splits)
    found = summary(splits)
    for rank, other in enumerate(runtime.all_gather_object(found)):
        if other != found:
            raise Error(
                f"processes {runtime.rank} and {rank} do not see the same data: give the same files to each "
                "of them",
                code="data.changed",
            )
    order, changed = runtime.on_main_first(
        lambda: accepted(compare(splits, found, out, labelled), splits, out, accept, say)
    )
    if order:
        splits = {name: same_classes(part, tuple(order)) for name, part in splits.items()}
    return splits, changed


def compare(splits: Splits, found: dict[str, Any], out: Path, labelled: bool) -> Comparison:
    """How the data differs from what the run in the folder has learned from; nothing is written.

    found: its summary.
    """
    old = read(out / FILE, 1)
    known = old[0] if old else {}
    if old and is_same(known, found):
        return Comparison(
            found, True, [], known.get("order"), recorded=has_content(known) >= has_content(found)
        )
    if not has_learned(out):
        return Comparison(found, False, [], None, recorded=False)
    if old:
        before, after = listing(read(out / FILE, 2) or old), listing([found, details(splits)])
        renamed, order = renamed_classes(before, after), known.get("order") or known["classes"]
        changes, order = differences(before, after), [renamed.get(name, name) for name in order]
    else:
        changes, order = older_differences(out, splits)
    kept = order if labelled and order != found["classes"] else None
    same = not labelled or set(order) == set(found["classes"])
    return Comparison(found, True, changes, kept, same, recorded=False, older=not old)


def accepted(
    data: Comparison, splits: Splits, out: Path, accept: bool | None, say: Say
) -> tuple[list[str] | None, bool]:
    """The order of classes that the run has learned, and whether the data changed; that may be an error."""
    if data.older:
        say(f"{out}: no readable {FILE}, as in runs of older versions: only the numbers of images and the "
            "classes, as far as its other files hold them, could be compared; it is written now")  # fmt: skip
    changed = f"{changed_since(out)} {'; '.join(data.changes)}."
    if not data.same_classes:
        raise Error(
            f"{changed} It cannot go on with other classes: put them back, or give another --out",
            code="data.changed",
        )
    if data.changes and not accept:
        flag = "" if accept is None else ", or --accept-changed-data to go on with the data as it is now"
        raise Error(f"{changed} Put the data back, or give another --out{flag}", code="data.changed")
    if not data.recorded:
        if data.changes:
            put_aside(out / FILE)
            say(f"goes on with changed data: {'; '.join(data.changes)}")
            (out / "doctor.json").unlink(missing_ok=True)  # of the data as it was
        write(out / FILE, splits, data.found | ({"order": data.order} if data.known else {}))
    return data.order, bool(data.changes)


def changed_since(out: Path) -> str:
    return f"the run in {out} was trained on other data than is there now:"


def put_aside(path: Path) -> None:
    """Keep what a run has learned from so far as data-1.json.gz, data-2.json.gz and so on."""
    if path.exists():
        before = put_aside_before(path.parent)
        number = 1 + (number_of(before[-1]) if before else 0)
        os.replace(path, path.with_name(f"data-{number}.json.gz"))


def put_aside_before(out: Path) -> list[Path]:
    """Those files, oldest first."""
    named = re.compile(r"data-[0-9]{1,9}\.json\.gz")
    return sorted((path for path in out.glob("data-*") if named.fullmatch(path.name)), key=number_of)


def number_of(path: Path) -> int:
    return int(path.name.removeprefix("data-").removesuffix(".json.gz"))


def is_same(known: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether two summaries are of the same data, as far as both tell."""
    before, after = known["splits"], found["splits"]
    return known["classes"] == found["classes"] and before.keys() == after.keys() and all(
        before[name].get(field, value) == value for name, row in after.items() for field, value in row.items()
    )  # fmt: skip


def has_content(told: Mapping[str, Any]) -> bool:
    return all("content" in row for row in told["splits"].values())


def with_marks(splits: Splits) -> Splits:
    """The splits with the marks of their images, unless there are too many to read them."""
    if sum(map(len, splits.values())) > READ:
        return splits
    return {name: replace(part, hashes=fingerprints(part)) for name, part in splits.items()}


def remembered_splits(out: Path) -> dict[bytes | str, str]:
    """The split of each image that a run has learned from, by its mark and by its name.

    Names are for older runs, and for images that were edited. Empty where the run has learned nothing, or
    remembers no images.
    """
    placed: dict[bytes | str, str] = {}
    for path in (*put_aside_before(out), out / FILE) if has_learned(out) else ():  # the newest counts
        for split, row in (read(path, 2) or [{}, {}])[1].items():
            with suppress(ValueError, TypeError):  # a row that was cut off
                raw = base64.b64decode(row.get("marks", ""))
                placed |= {raw[at : at + SIZE]: split for at in range(0, len(raw), SIZE)}
                placed |= dict.fromkeys(row.get("keys", ()), split)
    return placed


def summary(splits: Splits) -> dict[str, Any]:
    """What is compared whenever a run goes on: cheap for any number of images."""
    told = {
        name: {
            "images": len(part),
            "digest": digest(part),
            "sizes": hashlib.sha256(sizes(part).data).hexdigest(),
        }
        | ({} if part.hashes is None else {"content": hashlib.sha256(raw_marks(part)).hexdigest()})
        for name, part in splits.items()
    }
    return {"classes": list(splits["train"].classes), "splits": told}


def raw_marks(source: Source) -> bytes:
    """The marks of all images in a row, 32 bytes each."""
    assert source.hashes is not None
    return source.hashes.astype(f"S{SIZE}").tobytes()


def digest(source: Source) -> str:
    """Of names and labels in their order. An index of shards has checksums of all names already."""
    found = hashlib.blake2b(source.identity.encode(), digest_size=20)
    for at in range(0, 0 if source.identity else len(source), CHUNK):
        names = "\0".join(source.keys[at : at + CHUNK]) + "\0"
        found.update(names.encode("utf-8", "surrogateescape"))
    for part in blocks(source.labels):
        found.update(part)
    return found.hexdigest()


def sizes(source: Source) -> np.ndarray:
    """The bytes of some files, -1 where one is missing: they tell classes with equal file names apart."""

    def size(index: int) -> int:
        try:
            return source.size(index) if source.size else -1
        except OSError:
            return -1

    return np.array([size(i) for i in sampled(len(source), SIZED)] if source.size else [], dtype=np.int64)


def details(splits: Splits) -> dict[str, Any]:
    """What a difference is named by. Shards, and very many images, are listed by class only."""
    few = sum(map(len, splits.values())) <= LISTED
    named = few and not any(part.identity for part in splits.values())
    return {name: detail(part, named, few) for name, part in splits.items()}


def detail(source: Source, named: bool, marked: bool) -> dict[str, Any]:
    names, numbers = label_sets(source, named)
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    row: dict[str, Any] = {"kinds": names, "counts": counts}
    if marked and source.hashes is not None:
        row["marks"] = base64.b64encode(raw_marks(source)).decode()
    return row | ({"labels": numbers.tolist(), "keys": list(source.keys),
                   "sizes": sizes(source).tolist()} if named else {})  # fmt: skip


def label_sets(source: Source, named: bool) -> tuple[list[str], np.ndarray]:
    """The classes of images, joined where an image has several, and the number of those of each image.

    Where several labels an image are not listed image by image, each label counts by itself.
    """
    labels = source.labels
    if not isinstance(labels, SparseLabels):
        kinds, numbers = np.unique(labels, return_inverse=True)
        return [source.classes[kind] for kind in kinds], numbers
    if not named:
        return list(source.classes), labels.numbers
    sets, numbers = labels.distinct()
    return [";".join(source.classes[i] for i in one) for one in sets], numbers


def listing(lines: Sequence[Mapping[str, Any]]) -> Listing:
    """The two lines of the file as what two states are compared by."""
    classes, rows = lines[0]["classes"], lines[1] if len(lines) > 1 else {}
    counts = {split: dict(zip(row["kinds"], row["counts"], strict=True)) for split, row in rows.items()}
    if not rows or any("keys" not in row for row in rows.values()):
        return Listing(classes, counts)
    keys = {split: (row["keys"], [row["kinds"][i] for i in row["labels"]]) for split, row in rows.items()}
    marks = {split: listed_marks(row["marks"]) for split, row in rows.items() if "marks" in row}
    sizes = {split: row["sizes"] for split, row in rows.items()}
    return Listing(classes, counts, keys, sizes, marks if len(marks) == len(rows) else None)


def listed_marks(text: str) -> list[str]:
    """One text for each image."""
    raw = base64.b64decode(text).hex()
    return [raw[at : at + 2 * SIZE] for at in range(0, len(raw), 2 * SIZE)]


def write(path: Path, splits: Splits, found: dict[str, Any]) -> None:
    """Whole or not at all; ASCII, so that names which are no Unicode survive."""
    lines = (json.dumps(found), json.dumps(details(splits)))
    content = gzip.compress("\n".join(lines).encode(), 6, mtime=0)
    replace_file(path, lambda beside: beside.write_bytes(content))


def read(path: Path, lines: int) -> list[dict[str, Any]] | None:
    """The first lines of the file; None where it is missing, cut off or something else."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            told = [json.loads(file.readline()) for _ in range(lines)]
        listing(told)
        dict(told[0]["splits"])
        return told
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, zlib.error):
        return None


def older_differences(out: Path, splits: Splits) -> tuple[list[str], list[str]]:
    """By the other files of a run: its numbers of images, and its classes in their order if they are kept."""
    told, order = [], list(splits["train"].classes)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data = json.loads((out / "environment.json").read_text())["data"]
        now = {name: len(part) for name, part in splits.items()}
        told = [f"{name}: {n} images -> {now.get(name, 0)}" for name, n in data["images"].items()
                if n != now.get(name, 0)]  # fmt: skip
        if data["classes"] != len(splits["train"].classes):
            told.append(f"{data['classes']} classes -> {len(splits['train'].classes)}")
    for name in ("best.safetensors", "model.safetensors"):
        with suppress(OSError, WeightsError):
            labels = list(from_json(open_arrays(out / name).card).labels)
            if labels and labels != order:
                return told + differences(Listing(labels, {}), Listing(order, {})), labels
    return told, order
