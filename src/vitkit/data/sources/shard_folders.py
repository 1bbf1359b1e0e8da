"""Tar shards as they are found: those that others wrote for WebDataset indexed in place, any verified."""

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.content import content_hash
from vitkit.data.names import MOST_CLASSES, SPLITS, SUFFIXES, check_stray
from vitkit.data.sources.archives import MAX_MEMBER, Positioned, walk_tar
from vitkit.data.sources.index import (
    INDEX,
    ROW,
    Index,
    Shard,
    check_columns,
    check_file,
    local_shards,
    make_columns,
    open_index,
    write_index,
)
from vitkit.data.sources.sparse_labels import SparseLabels
from vitkit.errors import Error
from vitkit.io.files import replaced

CODE = ("pkl", "pickle", "pyd", "pt", "pth")  # what WebDataset would unpickle; here it is not opened
Advance = Callable[[int], None]
Label = int | list[int]
Scanned = tuple[Shard, list[tuple[Any, ...]], list[str], list[Label]]  # rows of ROW, keys, labels


def index_shards(
    folder: Path, *, classes: Sequence[str] = (), advance: Advance = lambda count: None
) -> dict[str, str]:
    """Write the index of shards of <key>.<image> and <key>.cls or .json; what was left out, and why.

    A shard belongs to the split that a word of its name says. Without names, classes are numbers.
    """
    if (folder / INDEX).exists():
        raise Error(f"{folder / INDEX} exists already; remove it to write a new one", code="file.exists")
    groups: dict[str, list[Scanned]] = {}
    left_out: dict[str, str] = {}
    for path in sorted(folder.glob("*.tar")):
        words = [SPLITS[word] for word in re.split(r"[^a-z]+", path.stem.lower()) if word in SPLITS]
        scanned = scan_shard(path, left_out)
        groups.setdefault(words[0] if words else "all", []).append(scanned)
        advance(scanned[0].samples)
    check_stray(str(folder), {split: [part[0].file for part in parts] for split, parts in groups.items()})
    labels = [label for parts in groups.values() for part in parts for label in part[3]]
    several = {isinstance(label, list) for label in labels}
    if len(several) != 1:
        raise Error(
            f"{folder}: {'some images have several labels, others one' if labels else 'no labelled image'}",
            code="data.labels",
        )
    top = max(max(label, default=-1) if isinstance(label, list) else label for label in labels)
    names = tuple(classes) or tuple(str(n) for n in range(top + 1))
    if top >= len(names):
        raise Error(f"{folder}: label {top} has no name among {len(names)} classes", code="data.labels")
    splits = {split: joined(parts, len(names), several == {True}) for split, parts in groups.items()}
    with replaced(folder / INDEX) as file:
        write_index(file, names, splits, {"left_out": left_out})
    return left_out


def joined(parts: list[Scanned], classes: int, several: bool) -> tuple[list[Shard], dict[str, np.ndarray]]:
    """The shards of a split and its columns."""
    rows = np.concatenate([np.array(part[1], ROW) for part in parts])
    rows["shard"] = np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])
    labels: list[Any] = [label for part in parts for label in part[3]]
    table = SparseLabels.from_lists(labels, classes) if several else np.array(labels, np.int64)
    return [part[0] for part in parts], make_columns(rows, (key for part in parts for key in part[2]), table)


def scan_shard(path: Path, left_out: dict[str, str]) -> Scanned:
    """The samples of a shard: a label and one image each."""
    rows: list[tuple[Any, ...]] = []
    keys, labels = [], []
    with Positioned(path) as file:
        for key, members in samples(path).items():
            images = [name for name in members if f".{name.rpartition('.')[2]}" in SUFFIXES]
            label = read_label(f"{path.name}!{key}", file, members)
            if len(images) > 1:
                raise Error(
                    f"{path}!{key}: {len(images)} images in one sample; one is read", code="data.layout"
                )
            code = [name for name in members if name.rpartition(".")[2] in CODE]
            left_out |= {f"{path.name}!{key}.{name}": "not opened: it may hold code" for name in code}
            if not images or label is None:
                left_out[f"{path.name}!{key}"] = "no image" if not images else "no label"
                continue
            start, size = members[images[0]]
            content = os.pread(file.number, size, start)
            both = content_hash(content)
            rows.append((0, 0, start, size, zlib.crc32(content), both[:16], both[16:]))
            keys.append(key)
            labels.append(label)
        digest = hashlib.file_digest(io.BufferedReader(file), "sha256").hexdigest()
        return Shard(path.name, file.size, digest, len(rows)), rows, keys, labels


def samples(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """By key and ending, where the members lie; only ordinary files of a size that can be."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        for member in walk_tar(path):
            if member.isdir():
                continue
            where = f"{path}!{member.name}"
            check_member(where, member)
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            stem, _, ending = name.partition(".")
            members = found.setdefault(f"{folder}/{stem}" if folder else stem, {})
            if ending.lower() in members:
                raise Error(f"{where}: is in the archive twice", code="data.layout")
            members[ending.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise Error(
            f"{path}: cut off, damaged or not a plain tar file ({error})", code="data.corrupt"
        ) from None
    return found


def check_member(where: str, member: tarfile.TarInfo) -> None:
    if not member.isreg() or member.issparse():
        raise Error(
            f"{where}: a link, device or sparse file; shards hold ordinary files only", code="data.unsafe"
        )
    if member.size > MAX_MEMBER:
        raise Error(
            f"{where}: claims {member.size} bytes; at most {MAX_MEMBER} are read", code="data.too-large"
        )


def read_label(where: str, file: Positioned, members: dict[str, tuple[int, int]]) -> Label | None:
    """A class number in .cls, or a JSON table with a number `label` or a list of them, `labels`."""
    for ending in ("cls", "json"):
        if ending not in members:
            continue
        start, size = members[ending]
        text = os.pread(file.number, min(size, 2**20), start)
        try:
            told = int(text) if ending == "cls" else json.loads(text)
            label = told if isinstance(told, int) else told.get("labels", told.get("label"))
        except (ValueError, AttributeError, RecursionError):
            raise Error(f"{where}.{ending}: no label: {text[:40]!r}", code="data.labels") from None
        if label is None:
            continue
        several = label if isinstance(label, list) else [label]
        if not all(type(n) is int and 0 <= n < MOST_CLASSES for n in several):
            raise Error(f"{where}.{ending}: not a class number from 0: {text[:40]!r}", code="data.labels")
        return label
    return None


def verify(folder: Path, *, workers: int = 4, advance: Advance = lambda count: None) -> list[str]:
    """What is wrong with shards or their index, every byte of which is read; nothing: an empty list."""
    check_columns(folder / INDEX)
    wrong: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        for index in open_index(folder / INDEX)[1].values():
            work = ((folder, index, number) for number in range(len(index.shards)))
            for shard, found in zip(index.shards, pool.map(lambda job: faults(*job), work), strict=True):
                wrong += found
                advance(shard.samples)
    return wrong


def faults(folder: Path, index: Index, number: int) -> list[str]:
    shard = index.shards[number]
    try:
        check_file(folder, shard)
        with Positioned(folder / shard.file) as file:
            digest = hashlib.file_digest(io.BufferedReader(file), "sha256").hexdigest()
    except (OSError, ValueError) as error:
        return [str(error)]
    if digest == shard.sha256:
        return []
    wrong = [f"{folder / shard.file}: SHA-256 {digest}, its index says {shard.sha256}"]
    read = local_shards(folder, {})
    for row in np.flatnonzero(index.columns["shard"] == number).tolist():
        try:
            index.fetch(row, read)
        except ValueError as error:  # BadImage is one
            wrong.append(str(error))
    return wrong
