"""Folders of tar shards: opened by their index, verified, and WebDataset shards indexed in place."""

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    ReadShard,
    Shard,
    check_columns,
    check_file,
    local_shards,
    make_columns,
    open_index,
    write_index,
)
from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import Lazy, Source
from vitkit.data.sources.sparse_labels import SparseLabels
from vitkit.errors import Error
from vitkit.io.files import replaced

CODE = ("pkl", "pickle", "pyd", "pt", "pth")  # what WebDataset would unpickle; never opened here
Advance = Callable[[int], None]
Label = int | list[int]
Scanned = tuple[Shard, list[tuple[Any, ...]], list[str], list[Label]]  # rows of ROW, keys, labels


def index_shards(
    folder: Path, *, classes: Sequence[str] = (), advance: Advance = lambda count: None
) -> dict[str, str]:
    """Write the index of shards of <key>.<image> and <key>.cls or .json; returns the skipped samples and why.

    The split of a shard is the first split name among the words of its file name. Without class names, the
    classes are numbers.
    """
    if (folder / INDEX).exists():
        raise Error(f"{folder / INDEX} already exists; remove it to write a new one", code="file.exists")
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
            f"{folder}: {'some images have several labels, others one' if labels else 'no labelled images'}",
            code="data.labels",
        )
    top = max(max(label, default=-1) if isinstance(label, list) else label for label in labels)
    names = tuple(classes) or tuple(str(n) for n in range(top + 1))
    if top >= len(names):
        raise Error(f"{folder}: label {top} is out of range for {len(names)} class names", code="data.labels")
    splits = {split: join_shards(parts, len(names), several == {True}) for split, parts in groups.items()}
    with replaced(folder / INDEX) as file:
        write_index(file, names, splits, {"left_out": left_out})
    return left_out


def join_shards(
    parts: list[Scanned], classes: int, several: bool
) -> tuple[list[Shard], dict[str, np.ndarray]]:
    """The shards of a split and its index columns."""
    rows = np.concatenate([np.array(part[1], ROW) for part in parts])
    rows["shard"] = np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])
    labels: list[Any] = [label for part in parts for label in part[3]]
    table = SparseLabels.from_lists(labels, classes) if several else np.array(labels, np.int64)
    return [part[0] for part in parts], make_columns(rows, (key for part in parts for key in part[2]), table)


def scan_shard(path: Path, left_out: dict[str, str]) -> Scanned:
    """The samples of a shard, each with a label and one image."""
    rows: list[tuple[Any, ...]] = []
    keys, labels = [], []
    with Positioned(path) as file:
        for key, members in samples(path).items():
            images = [name for name in members if f".{name.rpartition('.')[2]}" in SUFFIXES]
            label = read_label(f"{path.name}!{key}", file, members)
            if len(images) > 1:
                raise Error(
                    f"{path}!{key}: {len(images)} images in one sample; expected one", code="data.layout"
                )
            code = [name for name in members if name.rpartition(".")[2] in CODE]
            left_out |= {f"{path.name}!{key}.{name}": "not opened: it may contain code" for name in code}
            if not images or label is None:
                left_out[f"{path.name}!{key}"] = "no image" if not images else "no label"
                continue
            start, size = members[images[0]]
            content = file.read_at(start, size)
            digest = content_hash(content)
            rows.append((0, 0, start, size, zlib.crc32(content), digest[:16], digest[16:]))
            keys.append(key)
            labels.append(label)
        sha256 = hashlib.file_digest(io.BufferedReader(file), "sha256").hexdigest()
        return Shard(path.name, file.size, sha256, len(rows)), rows, keys, labels


def samples(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Offset and size of the members of each sample, by key and extension; all must be regular files."""
    spans: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        for member in walk_tar(path):
            if member.isdir():
                continue
            where = f"{path}!{member.name}"
            check_member(where, member)
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            stem, _, ending = name.partition(".")
            members = spans.setdefault(f"{folder}/{stem}" if folder else stem, {})
            if ending.lower() in members:
                raise Error(f"{where}: appears twice in the archive", code="data.layout")
            members[ending.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise Error(
            f"{path}: truncated, damaged or not an uncompressed tar file ({error})", code="data.corrupt"
        ) from None
    return spans


def check_member(where: str, member: tarfile.TarInfo) -> None:
    if not member.isreg() or member.issparse():
        raise Error(
            f"{where}: a link, device or sparse file; shards may contain regular files only",
            code="data.unsafe",
        )
    if member.size > MAX_MEMBER:
        raise Error(f"{where}: claims {member.size} bytes; the limit is {MAX_MEMBER}", code="data.too-large")


def read_label(where: str, file: Positioned, members: dict[str, tuple[int, int]]) -> Label | None:
    """The class number in .cls, or `label` (a number) or `labels` (a list) of the JSON object in .json."""
    for ending in ("cls", "json"):
        if ending not in members:
            continue
        start, size = members[ending]
        text = file.read_at(start, min(size, 2**20))
        try:
            value = int(text) if ending == "cls" else json.loads(text)
            label = value if isinstance(value, int) else value.get("labels", value.get("label"))
        except (ValueError, AttributeError, RecursionError):
            raise Error(f"{where}.{ending}: no label: {text[:40]!r}", code="data.labels") from None
        if label is None:
            continue
        several = label if isinstance(label, list) else [label]
        if not all(type(n) is int and 0 <= n < MOST_CLASSES for n in several):
            raise Error(f"{where}.{ending}: not a class number from 0: {text[:40]!r}", code="data.labels")
        return label
    return None


def open_shards(name: str, path: Path, read: ReadShard | None = None) -> dict[str, Source]:
    """The splits of an index; without `read`, its shards are the files beside it."""
    classes, splits = open_index(path)
    read_shard = read or local_shards(path.parent, splits)

    def source(part: Index) -> Source:
        keys, labels = Lazy(len(part), part.key), part.labels(len(classes))
        return Source(
            name, classes, keys, labels, partial(part.fetch, read=read_shard), digest=part.digest,
            digests=part.digests, identity=part.identity,
        )  # fmt: skip

    return {split: source(part) for split, part in splits.items()}


OPENER = Opener(
    description="a folder of shards",
    matches=lambda place: os.path.isfile(os.path.join(place, INDEX)),
    open=lambda place, cache: open_shards(Path(place).name, Path(place) / INDEX),
)


def verify(folder: Path, *, workers: int = 4, advance: Advance = lambda count: None) -> list[str]:
    """Read every byte of the shards and their index; returns a message for each error."""
    check_columns(folder / INDEX)
    messages: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        for index in open_index(folder / INDEX)[1].values():
            work = ((folder, index, number) for number in range(len(index.shards)))
            for shard, errors in zip(index.shards, pool.map(lambda job: faults(*job), work), strict=True):
                messages += errors
                advance(shard.samples)
    return messages


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
    messages = [f"{folder / shard.file}: SHA-256 {digest}, but its index says {shard.sha256}"]
    read = local_shards(folder, {})
    for row in np.flatnonzero(index.columns["shard"] == number).tolist():
        try:
            index.fetch(row, read)
        except ValueError as error:  # includes BadImage
            messages.append(str(error))
    return messages
