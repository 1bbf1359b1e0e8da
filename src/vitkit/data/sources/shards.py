"""Data sets as tar shards with an index: written whole or not at all, read by WebDataset too, verified."""

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitkit.data.content import content_hash
from vitkit.data.decode import BadImage, decode
from vitkit.data.sources.archives import MAX_MEMBER
from vitkit.data.sources.index import INDEX, ROW, Shard, make_columns, open_index, read_header, write_index
from vitkit.data.sources.source import Source
from vitkit.data.sources.sparse_labels import blocks
from vitkit.data.splits import same_classes
from vitkit.errors import Error
from vitkit.io.files import locked, replaced

SIZE = 256 * 2**20  # bytes of a shard, about
TASTED = 256  # images whose sizes tell how many go into a shard
CHUNK = 256  # images in memory
PLAN = "plan.json"
ENDINGS = {
    b"\xff\xd8": "jpg",
    b"\x89P": "png",
    b"RI": "webp",
    b"GI": "gif",
    b"BM": "bmp",
    b"II": "tif",
    b"MM": "tif",
}
NONE = np.empty(0, ROW)
Advance = Callable[[int], None]


class Part(NamedTuple):
    """One shard's share of a split: which images of the source, in which order."""

    source: Source
    split: str
    number: int
    numbers: np.ndarray

    @property
    def file(self) -> str:
        return f"{self.split}-{self.number:06d}.tar"


class Made(NamedTuple):
    """A shard that was written, where its samples lie, and what was left out and why."""

    shard: Shard
    rows: np.ndarray
    left_out: dict[str, str]


def write_shards(
    splits: Mapping[str, Source],
    out: Path,
    *,
    seed: int = 0,
    images: int | None = None,
    workers: int = 4,
    advance: Advance = lambda count: None,
) -> dict[str, str]:
    """Tar shards of about 256 MiB, or of so many images, each a random sample; what was left out, and why.

    Done again, it makes what is missing, or refuses with what differs. The index keeps the order of the
    source, so that an order over the shards is one over the source, image for image.
    """
    lead = splits.get("train") or splits.get("all") or next(iter(splits.values()))
    splits = {split: same_classes(part, lead.classes, split) for split, part in splits.items()}
    counts = {split: images or images_of(part, seed) for split, part in splits.items()}
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), ThreadPoolExecutor(workers) as pool:
        claim(out, plan(splits, seed, counts))
        old = open_index(out / INDEX)[1] if (out / INDEX).exists() else {}
        made: dict[str, list[Made]] = {split: [] for split in splits}
        for split, source in splits.items():
            order = np.random.default_rng(seed).permutation(len(source))
            known = iter(old[split].shards if old else ())
            for number, at in enumerate(range(0, len(order), counts[split])):
                part = Part(source, split, number, order[at : at + counts[split]])
                made[split].append(have(part, out, next(known, None), pool, advance))
        if not old:
            left_out = {
                key: why for parts in made.values() for one in parts for key, why in one.left_out.items()
            }
            columns = {split: assemble(splits[split], parts) for split, parts in made.items()}
            with replaced(out / INDEX) as file:
                write_index(file, lead.classes, columns, {"left_out": left_out})
        for path in out.glob("*.tar.rows"):
            path.unlink()
    return read_header(out / INDEX)[0]["left_out"]


def assemble(source: Source, parts: list[Made]) -> tuple[list[Shard], dict[str, np.ndarray]]:
    """The shards of a split and its columns, in the order of the source."""
    for number, part in enumerate(parts):
        part.rows["shard"] = number
    rows = np.concatenate([part.rows for part in parts])
    if not len(rows):
        raise Error(f"{source.name}: not one of its {len(source)} images can be used", code="data.empty")
    rows = rows[np.argsort(rows["number"])]
    keys = (source.keys[number] for number in rows["number"].tolist())
    return [part.shard for part in parts], make_columns(rows, keys, source.labels[rows["number"]])


def images_of(source: Source, seed: int) -> int:
    """How many images make a shard, judged by some of them."""
    some = np.random.default_rng(seed).permutation(len(source))[:TASTED]
    sizes = []
    for index in some.tolist():
        with suppress(BadImage):
            sizes.append(len(encoded(source.fetch(index))))
    return max(
        1, SIZE // (int(np.mean(sizes or [1])) + 2048)
    )  # tar's own blocks: a header and padding for each


def plan(splits: Mapping[str, Source], seed: int, counts: dict[str, int]) -> dict[str, Any]:
    """What decides every byte of the shards, but the images themselves."""
    told: dict[str, Any] = {"seed": seed}
    for split, source in splits.items():
        names = hashlib.sha256()
        for key in source.keys:
            names.update(key.encode("utf-8", "surrogateescape") + b"\n")
        labels = hashlib.sha256()
        for part in blocks(source.labels):
            labels.update(part)
        told[f"{split}: images"], told[f"{split}: images a shard"] = len(source), counts[split]
        told[f"{split}: classes"], told[f"{split}: names"] = list(source.classes), names.hexdigest()
        told[f"{split}: labels"] = labels.hexdigest()
    return told


def claim(out: Path, told: dict[str, Any]) -> None:
    """The folder belongs to one plan."""
    if (out / PLAN).exists():
        old = json.loads((out / PLAN).read_text())
        other = [name for name in {**old, **told} if old.get(name) != told.get(name)]
        if other:
            raise Error(
                f"{out} holds shards of another plan: {', '.join(other)} differ; give another folder",
                code="file.exists",
            )
        return
    if any(out.glob("*.tar")) or (out / INDEX).exists():
        raise Error(f"{out} holds other shards; give another folder", code="file.exists")
    with replaced(out / PLAN) as file:
        file.write(json.dumps(told, indent=1).encode())


def have(part: Part, out: Path, known: Shard | None, pool: ThreadPoolExecutor, advance: Advance) -> Made:
    """A shard, written unless it is there; as in the index, where there is one."""
    path, aside = out / part.file, out / f"{part.file}.rows"
    again = "remove it to write it again"
    if path.exists():
        if not known and not aside.exists():
            raise Error(f"{path}: not a shard of this plan; {again}", code="file.exists")
        made = Made(known, NONE, {}) if known else recall(aside)
        if path.stat().st_size != made.shard.bytes:
            size = path.stat().st_size
            raise Error(
                f"{path}: {size} bytes, {made.shard.bytes} were written; {again}", code="data.corrupt"
            )
        advance(len(part.numbers))
        return made
    with replaced(path) as file:
        rows, left_out = fill(part, file, pool, advance)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        shard = Shard(part.file, size, hashlib.file_digest(file, "sha256").hexdigest(), len(rows))
        if known and shard != known:
            raise Error(f"{path}: the images have changed: {shard} instead of {known}", code="data.changed")
        with replaced(aside) as beside:  # first, so that a shard that is there has its rows
            facts = json.dumps([shard, left_out]).encode()
            np.savez(beside, rows=rows, facts=np.frombuffer(facts, np.uint8))
    return Made(shard, rows, left_out)


def recall(aside: Path) -> Made:
    with np.load(aside, allow_pickle=False) as arrays:
        shard, left_out = json.loads(arrays["facts"].tobytes())
        rows = arrays["rows"]
    if rows.dtype != ROW:
        raise Error(
            f"{aside}: written by another version of vitkit; remove it and its .tar to write both again",
            code="file.unreadable",
        )
    return Made(Shard(*shard), rows, left_out)


def fill(
    part: Part, file: io.BufferedRandom, pool: ThreadPoolExecutor, advance: Advance
) -> tuple[np.ndarray, dict[str, str]]:
    """Write the members, the same bytes for the same images; where they lie, and what was left out."""
    rows: list[tuple[Any, ...]] = []
    left_out: dict[str, str] = {}
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for at in range(0, len(part.numbers), CHUNK):
            some = part.numbers[at : at + CHUNK].tolist()
            for number, found in zip(some, pool.map(lambda i: checked(part.source, i), some), strict=True):
                if isinstance(found, BadImage):
                    left_out[part.source.keys[number]] = f"{found.reason}: {found}"
                    continue
                content, ending, digest = found
                start = archive.offset + tarfile.BLOCKSIZE
                add(archive, f"{number:09d}.{ending}", content)
                add(archive, *label_member(part.source, number))
                rows.append((number, 0, start, len(content), zlib.crc32(content), digest[:16], digest[16:]))
            advance(len(some))
    return np.array(rows, ROW), left_out


def checked(source: Source, index: int) -> tuple[bytes, str, bytes] | BadImage:
    """An image that can be decoded, as it is, the ending of its kind, and the mark that splits know it by."""
    try:
        if not source.multilabel and source.labels[index] < 0:
            raise BadImage("unlabelled", "it has no label")
        found = source.fetch(index)
        content = encoded(found)
        if len(content) > MAX_MEMBER:
            raise BadImage("too-large", f"{len(content)} bytes; at most {MAX_MEMBER} are read")
        decode(content)
        return content, ENDINGS[content[:2]], content_hash(found)
    except BadImage as error:
        return error


def encoded(content: bytes | np.ndarray) -> bytes:
    """Bytes as they are; pixels as a PNG, which keeps them."""
    if isinstance(content, bytes):
        return content
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(content)).save(out, "PNG")
    return out.getvalue()


def label_member(source: Source, number: int) -> tuple[str, bytes]:
    if not source.multilabel:
        return f"{number:09d}.cls", b"%d" % source.labels[number]
    labels = source.labels.of(number).tolist()
    told = {"labels": labels, "names": [source.classes[label] for label in labels]}
    return f"{number:09d}.json", json.dumps(told).encode()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
