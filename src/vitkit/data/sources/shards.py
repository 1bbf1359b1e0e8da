"""Convert data sets to tar shards with an index: atomic, resumable, and readable by WebDataset."""

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

SIZE = 256 * 2**20  # approximate bytes of a shard
SAMPLED = 256  # images from whose size the number of images per shard is estimated
CHUNK = 256  # images in memory at a time
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
    """The images of a split that go into one shard, in order."""

    source: Source
    split: str
    number: int
    numbers: np.ndarray

    @property
    def file(self) -> str:
        return f"{self.split}-{self.number:06d}.tar"


class Written(NamedTuple):
    """A shard on disk, the rows of its samples, and the images that were left out, with the reason."""

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
    """Write tar shards of about 256 MiB, or of `images` images; returns the images left out and why.

    Each shard is a random sample. Run again, it writes what is missing, or fails and names what differs. The
    index keeps the order of the source, so training on shards sees the same sequence of images.
    """
    lead = splits.get("train") or splits.get("all") or next(iter(splits.values()))
    splits = {split: same_classes(part, lead.classes, split) for split, part in splits.items()}
    counts = {split: images or images_of(part, seed) for split, part in splits.items()}
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), ThreadPoolExecutor(workers) as pool:
        claim(out, plan(splits, seed, counts))
        old = open_index(out / INDEX)[1] if (out / INDEX).exists() else {}
        written: dict[str, list[Written]] = {split: [] for split in splits}
        for split, source in splits.items():
            order = np.random.default_rng(seed).permutation(len(source))
            indexed = iter(old[split].shards if old else ())
            for number, start in enumerate(range(0, len(order), counts[split])):
                part = Part(source, split, number, order[start : start + counts[split]])
                written[split].append(ensure_shard(part, out, next(indexed, None), pool, advance))
        if not old:
            left_out = {
                key: why for parts in written.values() for part in parts for key, why in part.left_out.items()
            }
            columns = {split: assemble(splits[split], parts) for split, parts in written.items()}
            with replaced(out / INDEX) as file:
                write_index(file, lead.classes, columns, {"left_out": left_out})
        for path in out.glob("*.tar.rows"):
            path.unlink()
    return read_header(out / INDEX)[0]["left_out"]


def assemble(source: Source, parts: list[Written]) -> tuple[list[Shard], dict[str, np.ndarray]]:
    """The shards of a split and its index columns, in the order of the source."""
    for number, part in enumerate(parts):
        part.rows["shard"] = number
    rows = np.concatenate([part.rows for part in parts])
    if not len(rows):
        raise Error(f"{source.name}: none of its {len(source)} images can be used", code="data.empty")
    rows = rows[np.argsort(rows["number"])]
    keys = (source.keys[number] for number in rows["number"].tolist())
    return [part.shard for part in parts], make_columns(rows, keys, source.labels[rows["number"]])


def images_of(source: Source, seed: int) -> int:
    """The number of images per shard, estimated from the size of some of them."""
    sample = np.random.default_rng(seed).permutation(len(source))[:SAMPLED]
    sizes = []
    for index in sample.tolist():
        with suppress(BadImage):
            sizes.append(len(encoded(source.fetch(index))))
    overhead = 2048  # tar headers and padding of an image and its label
    return max(1, SIZE // (int(np.mean(sizes or [1])) + overhead))


def plan(splits: Mapping[str, Source], seed: int, counts: dict[str, int]) -> dict[str, Any]:
    """All that determines the bytes of the shards, except the contents of the images."""
    settings: dict[str, Any] = {"seed": seed}
    for split, source in splits.items():
        names = hashlib.sha256()
        for key in source.keys:
            names.update(key.encode("utf-8", "surrogateescape") + b"\n")
        labels = hashlib.sha256()
        for part in blocks(source.labels):
            labels.update(part)
        settings[f"{split}: images"], settings[f"{split}: images a shard"] = len(source), counts[split]
        settings[f"{split}: classes"], settings[f"{split}: names"] = list(source.classes), names.hexdigest()
        settings[f"{split}: labels"] = labels.hexdigest()
    return settings


def claim(out: Path, settings: dict[str, Any]) -> None:
    """Store the plan in the folder; a folder with another plan is an error."""
    if (out / PLAN).exists():
        old = json.loads((out / PLAN).read_text(encoding="utf-8"))
        different = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
        if different:
            raise Error(
                f"{out} contains shards of another plan: {', '.join(different)} differ; use another folder",
                code="file.exists",
            )
        return
    if any(out.glob("*.tar")) or (out / INDEX).exists():
        raise Error(f"{out} contains other shards; use another folder", code="file.exists")
    with replaced(out / PLAN) as file:
        file.write(json.dumps(settings, indent=1).encode())


def ensure_shard(
    part: Part, out: Path, indexed: Shard | None, pool: ThreadPoolExecutor, advance: Advance
) -> Written:
    """Write a shard unless it exists; it must match the index, if there is one."""
    path, rows_path = out / part.file, out / f"{part.file}.rows"
    remedy = "remove it to write it again"
    if path.exists():
        if not indexed and not rows_path.exists():
            raise Error(f"{path}: not a shard of this plan; {remedy}", code="file.exists")
        written = Written(indexed, NONE, {}) if indexed else read_rows(rows_path)
        if path.stat().st_size != written.shard.bytes:
            raise Error(
                f"{path}: {path.stat().st_size} bytes, but {written.shard.bytes} were written; {remedy}",
                code="data.corrupt",
            )
        advance(len(part.numbers))
        return written
    with replaced(path) as file:
        rows, left_out = fill(part, file, pool, advance)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        shard = Shard(part.file, size, hashlib.file_digest(file, "sha256").hexdigest(), len(rows))
        if indexed and shard != indexed:
            raise Error(f"{path}: the images have changed: {shard} instead of {indexed}", code="data.changed")
        with replaced(rows_path) as rows_file:  # before the shard appears, so that every shard has its rows
            facts = json.dumps([shard, left_out]).encode()
            np.savez(rows_file, rows=rows, facts=np.frombuffer(facts, np.uint8))
    return Written(shard, rows, left_out)


def read_rows(path: Path) -> Written:
    """The rows of a shard that was written before an interruption."""
    with np.load(path, allow_pickle=False) as arrays:
        shard, left_out = json.loads(arrays["facts"].tobytes())
        rows = arrays["rows"]
    if rows.dtype != ROW:
        raise Error(
            f"{path}: written by another version of vitkit; remove it and its .tar to write both again",
            code="file.unreadable",
        )
    return Written(Shard(*shard), rows, left_out)


def fill(
    part: Part, file: io.BufferedRandom, pool: ThreadPoolExecutor, advance: Advance
) -> tuple[np.ndarray, dict[str, str]]:
    """Write the members, deterministically; returns their rows, and the images left out with the reason."""
    rows: list[tuple[Any, ...]] = []
    left_out: dict[str, str] = {}
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for offset in range(0, len(part.numbers), CHUNK):
            numbers = part.numbers[offset : offset + CHUNK].tolist()
            results = pool.map(lambda i: read_image(part.source, i), numbers)
            for number, result in zip(numbers, results, strict=True):
                if isinstance(result, BadImage):
                    left_out[part.source.keys[number]] = f"{result.reason}: {result}"
                    continue
                content, ending, digest = result
                start = archive.offset + tarfile.BLOCKSIZE
                add(archive, f"{number:09d}.{ending}", content)
                add(archive, *label_member(part.source, number))
                rows.append((number, 0, start, len(content), zlib.crc32(content), digest[:16], digest[16:]))
            advance(len(numbers))
    return np.array(rows, ROW), left_out


def read_image(source: Source, index: int) -> tuple[bytes, str, bytes] | BadImage:
    """The encoded image, its file extension and its content hash; or why it cannot be decoded."""
    try:
        if not source.multilabel and source.labels[index] < 0:
            raise BadImage("unlabelled", "it has no label")
        image = source.fetch(index)
        content = encoded(image)
        if len(content) > MAX_MEMBER:
            raise BadImage("too-large", f"{len(content)} bytes; the limit is {MAX_MEMBER}")
        decode(content)
        return content, ENDINGS[content[:2]], content_hash(image)
    except BadImage as error:
        return error


def encoded(content: bytes | np.ndarray) -> bytes:
    """Encoded bytes unchanged; pixels as a PNG, which is lossless."""
    if isinstance(content, bytes):
        return content
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(content)).save(out, "PNG")
    return out.getvalue()


def label_member(source: Source, number: int) -> tuple[str, bytes]:
    if not source.multilabel:
        return f"{number:09d}.cls", b"%d" % source.labels[number]
    labels = source.labels.of(number).tolist()
    content = {"labels": labels, "names": [source.classes[label] for label in labels]}
    return f"{number:09d}.json", json.dumps(content).encode()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
