"""data.json.gz: the data that a run is trained on, written before the first step and compared on resume.

A gzip file of two JSON lines. The first is short: classes and, for each split, its number of images and
digests. The second lists the images by name and content: it names differences, keeps images in their split
when others are added, and tells an evaluation which images the model was trained on. It is read only for
that. The file is not part of the checkpoints because it may be large and does not change during a run.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import SIZE
from vitkit.data.sources.source import Source
from vitkit.data.sources.sparse_labels import SparseLabels, blocks
from vitkit.data.splits import TARGET, fingerprints, same_classes, target_fingerprints
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
READ = 200_000  # images up to which all are read for their content hashes
CHUNK = 65_536  # names that are hashed at once
Splits = dict[str, Source]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """The current data compared with the data that a run was trained on."""

    current: dict[str, Any]  # the summary of the current data
    trained: bool  # whether the run has trained on anything yet
    changes: list[str]  # a phrase for each kind of change
    order: list[str] | None  # the run's order of the classes, where that of the data differs
    same_classes: bool = True  # apart from their names
    recorded: bool = True  # whether data.json.gz is complete
    older: bool = False  # whether the run has no data.json.gz


def check_data(
    splits: Splits, out: Path, runtime: Runtime, *, accept: bool | None, labelled: bool, say: Say
) -> tuple[Splits, bool]:
    """The splits with the class order of the run, and whether the data has changed; collective.

    accept: whether to use changed data with the same or renamed classes; None: no, and the command has no
    flag for it. labelled: whether classes are learned.
    """
    splits = with_sizes(with_hashes(splits))
    current = summary(splits)
    for rank, other in enumerate(runtime.all_gather_object(current)):
        if other != current:
            raise Error(
                f"processes {runtime.rank} and {rank} see different data; all of them need the same files",
                code="data.changed",
            )
    order, changed = runtime.on_main_first(
        lambda: accepted(compare(splits, current, out, labelled), splits, out, accept, say)
    )
    if order:
        splits = {name: same_classes(part, tuple(order)) for name, part in splits.items()}
    return splits, changed


def compare(splits: Splits, current: dict[str, Any], out: Path, labelled: bool) -> Comparison:
    """Compare the data, with its summary `current`, with what the run was trained on; writes nothing."""
    old = read(out / FILE, 1)
    recorded = old[0] if old else {}
    if old and is_same(recorded, current):
        complete = all(
            recorded["splits"][name].keys() >= row.keys() for name, row in current["splits"].items()
        )
        return Comparison(current, True, [], recorded.get("order"), recorded=complete)
    if not has_learned(out):
        return Comparison(current, False, [], None, recorded=False)
    if old:
        before, after = listing(read(out / FILE, 2) or old), listing([current, details(splits)])
        renamed, order = renamed_classes(before, after), recorded.get("order") or recorded["classes"]
        changes, order = differences(before, after), [renamed.get(name, name) for name in order]
    else:
        changes, order = older_differences(out, splits)
    run_order = order if labelled and order != current["classes"] else None
    same = not labelled or set(order) == set(current["classes"])
    return Comparison(current, True, changes, run_order, same, recorded=False, older=not old)


def accepted(
    data: Comparison, splits: Splits, out: Path, accept: bool | None, say: Say
) -> tuple[list[str] | None, bool]:
    """The run's order of the classes, and whether the data has changed; raises if that is not accepted."""
    if data.older:
        say(f"{out}: no readable {FILE} (older versions wrote none): only counts of images and classes from "
            "its other files were compared; the file is written now")  # fmt: skip
    changed = f"{changed_since(out)} {'; '.join(data.changes)}."
    if not data.same_classes:
        raise Error(
            f"{changed} A run cannot resume with other classes: restore them, or use another --out",
            code="data.changed",
        )
    if data.changes and not accept:
        flag = "" if accept is None else ", or --accept-changed-data to resume with the data as it is now"
        raise Error(f"{changed} Restore the data, or use another --out{flag}", code="data.changed")
    if not data.recorded:
        if data.changes:
            keep_previous(out / FILE)
            say(f"resuming with changed data: {'; '.join(data.changes)}")
            (out / "doctor.json").unlink(missing_ok=True)  # of the old data
        write(out / FILE, splits, data.current | ({"order": data.order} if data.trained else {}))
    return data.order, bool(data.changes)


def changed_since(out: Path) -> str:
    return f"the data has changed since the run in {out} was trained:"


def keep_previous(path: Path) -> None:
    """Rename the old data.json.gz to data-1.json.gz, data-2.json.gz and so on."""
    if path.exists():
        before = previous_files(path.parent)
        number = 1 + (number_of(before[-1]) if before else 0)
        os.replace(path, path.with_name(f"data-{number}.json.gz"))


def previous_files(out: Path) -> list[Path]:
    """The renamed files, oldest first."""
    named = re.compile(r"data-[0-9]{1,9}\.json\.gz")
    return sorted((path for path in out.glob("data-*") if named.fullmatch(path.name)), key=number_of)


def number_of(path: Path) -> int:
    return int(path.name.removeprefix("data-").removesuffix(".json.gz"))


def is_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two summaries agree in every field that both have."""
    before, after = old["splits"], new["splits"]
    return old["classes"] == new["classes"] and before.keys() == after.keys() and all(
        before[name].get(field, value) == value for name, row in after.items() for field, value in row.items()
    )  # fmt: skip


def with_hashes(splits: Splits) -> Splits:
    """The splits with hashes of images and annotations, unless there are too many images to read."""
    if sum(map(len, splits.values())) > READ:
        return splits
    return {
        name: replace(part, hashes=fingerprints(part), target_hashes=target_fingerprints(part))
        for name, part in splits.items()
    }


def with_sizes(splits: Splits) -> Splits:
    """The splits with the file sizes that are compared, read once."""
    known = {name: dict(enumerated_sizes(part)) for name, part in splits.items() if part.size}
    return {n: replace(p, size=known[n].__getitem__) if n in known else p for n, p in splits.items()}


def remembered_splits(out: Path) -> dict[bytes | str, str]:
    """The split of each image of a run, by content hash and by name.

    Names are for runs of older versions, and for edited images. Empty if the run has saved nothing, or lists
    no images.
    """
    placed: dict[bytes | str, str] = {}
    for path in (*previous_files(out), out / FILE) if has_learned(out) else ():  # the newest file wins
        for split, row in (read(path, 2) or [{}, {}])[1].items():
            with suppress(ValueError, TypeError):  # a truncated row
                raw = base64.b64decode(row.get("marks", ""))
                placed |= {raw[start : start + SIZE]: split for start in range(0, len(raw), SIZE)}
                placed |= dict.fromkeys(row.get("keys", ()), split)
    return placed


def summary(splits: Splits) -> dict[str, Any]:
    """What is compared on every resume: cheap for any number of images."""
    rows = {
        name: {
            "images": len(part),
            "digest": digest(part),
            "sizes": hashlib.sha256(sizes(part).data).hexdigest(),
        }
        | ({} if part.hashes is None else {"content": hashlib.sha256(raw_hashes(part).data).hexdigest()})
        | (
            {}
            if part.target_hashes is None
            else {"targets": hashlib.sha256(part.target_hashes.tobytes()).hexdigest()}
        )
        for name, part in splits.items()
    }
    return {"classes": list(splits["train"].classes), "splits": rows}


def raw_hashes(source: Source) -> np.ndarray:
    """The content hashes of all images, 32 bytes each, as uint8."""
    assert source.hashes is not None
    return np.ascontiguousarray(source.hashes, dtype=f"S{SIZE}").view(np.uint8)


def digest(source: Source) -> str:
    """A digest of names and labels in order; an index of shards already has checksums of all names."""
    hasher = hashlib.blake2b(source.identity.encode(), digest_size=20)
    for start in range(0, 0 if source.identity else len(source), CHUNK):
        names = "\0".join(source.keys[start : start + CHUNK]) + "\0"
        hasher.update(names.encode("utf-8", "surrogateescape"))
    for part in blocks(source.labels):
        hasher.update(part)
    return hasher.hexdigest()


def sizes(source: Source) -> np.ndarray:
    """The sizes of some files, -1 for a missing one: they distinguish classes with equal file names."""
    return np.array([size for _, size in enumerated_sizes(source)], dtype=np.int64)


def enumerated_sizes(source: Source) -> Iterator[tuple[int, int]]:
    """The index and the size of each file whose size is compared; empty if sizes are unknown."""
    for index in sampled(len(source), SIZED).tolist() if source.size else ():
        try:
            yield index, source.size(index)  # type: ignore[misc]
        except OSError:
            yield index, -1


def details(splits: Splits) -> dict[str, Any]:
    """The second line: images by name and content; shards and very large data are listed by class only."""
    few = sum(map(len, splits.values())) <= LISTED
    named = few and not any(part.identity for part in splits.values())
    return {name: detail(part, named, few) for name, part in splits.items()}


def detail(source: Source, named: bool, marked: bool) -> dict[str, Any]:
    names, numbers, counts = label_sets(source, named)
    row: dict[str, Any] = {"kinds": names, "counts": counts.tolist()}
    if marked and source.hashes is not None:
        row["marks"] = base64.b64encode(raw_hashes(source).data).decode()
    if marked and source.target_hashes is not None:
        row["targets"] = base64.b64encode(source.target_hashes.tobytes()).decode()
    return row | ({"labels": numbers.tolist(), "keys": list(source.keys),
                   "sizes": sizes(source).tolist()} if named else {})  # fmt: skip


def label_sets(source: Source, named: bool) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The distinct label sets as names, joined where a set has several labels; the set of each image, if they
    are listed by name; and how many images each set has.

    With several labels an image and no list of images, each label counts by itself.
    """
    labels, classes = source.labels, source.classes
    if isinstance(labels, SparseLabels) and named:
        sets, numbers = labels.distinct()
        names = [";".join(classes[i] for i in labels) for labels in sets]
        return names, numbers, np.bincount(numbers, minlength=len(names))
    if isinstance(labels, SparseLabels):
        return list(classes), labels.numbers, np.bincount(labels.numbers, minlength=len(classes))
    parts = (labels[start : start + CHUNK] for start in range(0, len(labels), CHUNK))
    counts = sum((np.bincount(part + 1, minlength=len(classes) + 1) for part in parts), np.zeros(1, int))
    kinds = np.flatnonzero(counts) - 1  # -1: without a label
    numbers = np.searchsorted(kinds, labels) if named else labels
    return [classes[kind] for kind in kinds], numbers, counts[kinds + 1]


def listing(lines: Sequence[Mapping[str, Any]]) -> Listing:
    """The lines of the file as a Listing."""
    classes, rows = lines[0]["classes"], lines[1] if len(lines) > 1 else {}
    counts = {split: dict(zip(row["kinds"], row["counts"], strict=True)) for split, row in rows.items()}
    if not rows or any("keys" not in row for row in rows.values()):
        return Listing(classes, counts)
    keys = {split: (row["keys"], [row["kinds"][i] for i in row["labels"]]) for split, row in rows.items()}
    sizes = {split: row["sizes"] for split, row in rows.items()}
    return Listing(
        classes, counts, keys, sizes, hashes_of(rows, "marks", SIZE), hashes_of(rows, "targets", TARGET)
    )


def hashes_of(rows: Mapping[str, Any], name: str, size: int) -> dict[str, list[str]] | None:
    """The hashes of a field by split, of `size` bytes each, in hex; None if a split has none."""
    raw = {split: base64.b64decode(row[name]).hex() for split, row in rows.items() if name in row}
    if len(raw) < len(rows):
        return None
    return {
        split: [text[start : start + 2 * size] for start in range(0, len(text), 2 * size)]
        for split, text in raw.items()
    }


def write(path: Path, splits: Splits, current: dict[str, Any]) -> None:
    """Write the file atomically; in ASCII, so that names that are not valid Unicode survive."""

    def write_lines(beside: Path) -> None:
        with beside.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            file.write(json.dumps(current).encode())
            file.write(b"\n")
            file.write(json.dumps(details(splits)).encode())

    replace_file(path, write_lines)


def read(path: Path, lines: int) -> list[dict[str, Any]] | None:
    """The first lines of the file; None if it is missing, truncated or something else."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            content = [json.loads(file.readline()) for _ in range(lines)]
        listing(content)
        dict(content[0]["splits"])
        return content
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, zlib.error):
        return None


def older_differences(out: Path, splits: Splits) -> tuple[list[str], list[str]]:
    """Changes and the order of classes by the other files of a run of an older version."""
    changes, order = [], list(splits["train"].classes)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data = json.loads((out / "environment.json").read_text(encoding="utf-8"))["data"]
        now = {name: len(part) for name, part in splits.items()}
        changes = [f"{name}: {n} images -> {now.get(name, 0)}" for name, n in data["images"].items()
                   if n != now.get(name, 0)]  # fmt: skip
        if data["classes"] != len(splits["train"].classes):
            changes.append(f"{data['classes']} classes -> {len(splits['train'].classes)}")
    for name in ("best.safetensors", "model.safetensors"):
        with suppress(OSError, WeightsError):
            labels = list(from_json(open_arrays(out / name).card).labels)
            if labels and labels != order:
                return changes + differences(Listing(labels, {}), Listing(order, {})), labels
    return changes, order
