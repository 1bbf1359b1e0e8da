"""Marks of content: every byte counts, unchanged files are read once, and splits stay as they were."""

import hashlib
import multiprocessing
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from vitkit.data import content, splits
from vitkit.data.content import END, HASH_CACHE, content_hash, file_hash
from vitkit.data.sources.index import INDEX, read_header, write_index
from vitkit.data.sources.source import Source, from_arrays
from vitkit.data.splits import fingerprints, join, split
from vitkit.datasets.opening import open_data, shard

BMP = b"BM" + (54 + 3 * 160 * 160).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
BMP += (40).to_bytes(4, "little") + (160).to_bytes(4, "little") * 2 + b"\1\0\x18\0" + bytes(24)


def bitmap(shade: int, rest: int = 0) -> bytes:
    """A file of 77 kB with a shade in its middle alone: the ends of all of them are the same."""
    pixels = np.full((160, 160, 3), rest, np.uint8)
    pixels[60:100] = shade
    return BMP + pixels.tobytes()


def fill(root: Path, shades: range = range(20)) -> Path:
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
        for shade in shades:
            (root / label / f"{shade:03d}.bmp").write_bytes(bitmap(shade + 100 * (label == "dog")))
    return root


@pytest.fixture
def remembering(tmp_path, monkeypatch):
    """A cache folder of its own, in which files count as old enough; the files that are read, by name."""
    read: list[str] = []
    real = content.hash_file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "FRESH", -(10**10))
    monkeypatch.setattr(content, "hash_file", lambda path: read.append(path.name) or real(path))
    HASH_CACHE.save()
    return read


def test_files_that_differ_in_the_middle_alone_are_told_apart():
    one, other = bitmap(1), bitmap(2)
    assert one[:END] == other[:END] and one[-END:] == other[-END:] and len(one) == len(other) > 2 * END
    assert content_hash(one) != content_hash(other) and content_hash(one)[:16] == content_hash(other)[:16]
    assert content_hash(one)[16:] == hashlib.sha256(one).digest()[:16]


def test_pixels_of_another_shape_are_told_apart():
    images = np.arange(2 * 4 * 6 * 3, dtype=np.uint8)
    shapes = [(2, 4, 6, 3), (2, 6, 4, 3)]
    one, other = (from_arrays("x", images.reshape(shape), np.zeros(2, int)) for shape in shapes)
    assert not set(fingerprints(one)) & set(fingerprints(other))


def test_alike_files_are_split_image_by_image(tmp_path):
    rest, part = split(open_data(fill(tmp_path / "data"))["all"], 0.2)
    assert np.bincount(part.labels).tolist() == [4, 4] and np.bincount(rest.labels).tolist() == [16, 16]


def test_a_split_is_the_one_of_older_versions_where_the_ends_of_files_differ(tmp_path):
    """Runs keep no list of their split: it is made again when they are resumed, maybe by a newer version."""
    for i in range(30):
        (tmp_path / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "ab"[i % 2] / f"{i}.bmp").write_bytes(bitmap(i, rest=i))
    source = open_data(tmp_path / "data")["all"]

    def first_version(data: bytes) -> bytes:
        return hashlib.blake2b(data[:END] + data[-END:], digest_size=16, key=b"%d" % len(data)).digest()

    old = np.array([first_version(source.fetch(i)) for i in range(30)], dtype="S16")
    chosen = [
        i
        for label in (0, 1)
        for i in sorted(np.flatnonzero(source.labels == label), key=lambda i: old[i])[:3]
    ]
    assert set(split(source, 0.2)[1].keys) == {source.keys[i] for i in chosen}


def test_an_unchanged_file_is_not_read_again(tmp_path, remembering):
    root = fill(tmp_path / "data")
    first = fingerprints(open_data(root)["all"])
    assert len(remembering) == 40
    assert np.array_equal(fingerprints(open_data(root)["all"]), first) and len(remembering) == 40
    both = join(open_data(root)["all"], open_data(root)["all"])
    assert np.array_equal(fingerprints(both), np.tile(first, 2)) and len(remembering) == 40


@pytest.mark.parametrize("kept", ["mtime", "nothing"])
def test_an_edit_in_the_middle_is_noticed(tmp_path, remembering, kept):
    path = fill(tmp_path / "data") / "cat" / "003.bmp"
    before, status = fingerprints(open_data(tmp_path / "data")["all"]), path.stat()
    with path.open("r+b") as file:
        file.seek(len(bitmap(0)) // 2)
        file.write(b"!")
    if kept == "mtime":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert path.stat().st_ino == status.st_ino and path.stat().st_size == status.st_size
    remembering.clear()
    after = fingerprints(open_data(tmp_path / "data")["all"])
    assert remembering == ["003.bmp"] and np.flatnonzero(before != after).tolist() == [3]


def test_a_file_that_was_just_written_is_not_remembered(tmp_path, remembering, monkeypatch):
    monkeypatch.setattr(content, "FRESH", 10**12)
    root = fill(tmp_path / "data", range(2))
    for _ in range(2):
        fingerprints(open_data(root)["all"])
    assert len(remembering) == 8 and not HASH_CACHE.path.exists()


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "a folder", "removed"])
def test_a_damaged_memory_only_costs_time(tmp_path, remembering, damage):
    root = fill(tmp_path / "data", range(3))
    first, path = fingerprints(open_data(root)["all"]), HASH_CACHE.path
    whole = path.read_bytes()
    assert len(whole) == 6 * 48 + 32
    flipped = whole[:30] + bytes([whole[30] ^ 1]) + whole[31:]
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "removed":
        path.write_bytes({"a bit": flipped, "cut": whole[:-7], "empty": b""}[damage])
    remembering.clear()
    assert np.array_equal(fingerprints(open_data(root)["all"]), first) and len(remembering) == 6
    if damage != "a folder":
        assert len(path.read_bytes()) == len(whole)


@pytest.mark.parametrize("place", ["a file in the way", "no home"])
def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path, remembering, monkeypatch, place):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place != "no home" else "")
    if place == "no home":  # as of a user without an entry in /etc/passwd
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    root = fill(tmp_path / "data", range(2))
    assert len(set(fingerprints(open_data(root)["all"]))) == 4


def test_the_memory_is_bounded_and_what_came_first_goes_first(tmp_path, remembering, monkeypatch):
    monkeypatch.setattr(content, "MOST", 5)
    old, new = fill(tmp_path / "old", range(2)), fill(tmp_path / "new", range(2))
    for root in (old, new):
        fingerprints(open_data(root)["all"])
    assert HASH_CACHE.path.stat().st_size == 5 * 48 + 32
    remembering.clear()
    fingerprints(open_data(new)["all"])
    assert not remembering


def test_processes_that_write_at_once_lose_nothing(tmp_path, remembering):
    roots = [fill(tmp_path / str(i), range(5)) for i in range(4)]
    forks = multiprocessing.get_context("fork")
    crew = [forks.Process(target=lambda r=r: fingerprints(open_data(r)["all"])) for r in roots]
    for process in crew:
        process.start()
    for process in crew:
        process.join(60)
    assert [process.exitcode for process in crew] == [0] * 4
    for root in roots:
        fingerprints(open_data(root)["all"])
    assert not remembering  # the lists of the other processes are theirs


def test_a_file_read_by_parts_has_the_mark_of_its_bytes(tmp_path, monkeypatch):
    (tmp_path / "x.bmp").write_bytes(bitmap(7))
    monkeypatch.setattr(content, "IN_MEMORY", 40_000)
    assert file_hash(tmp_path / "x.bmp") == content_hash(bitmap(7))


def test_a_file_too_large_to_be_an_image_is_not_read_whole(tmp_path, remembering):
    with (tmp_path / "x.png").open("wb") as file:
        file.truncate(2**40)
    assert file_hash(tmp_path / "x.png")[16:] == bytes(16)


def old_index(folder: Path) -> None:
    """The index as it was written before it held the second half of a mark."""
    header, _ = read_header(folder / INDEX)
    parts = open_index_columns(folder)
    for _, columns in parts.values():
        del columns["content"]
    with (folder / INDEX).open("wb") as file:
        write_index(file, header["classes"], parts, {"left_out": {}})


def open_index_columns(folder: Path) -> dict:
    from vitkit.data.sources.index import open_index

    _, splits = open_index(folder / INDEX)
    order = list(read_header(folder / INDEX)[0]["splits"]["all"]["columns"])
    return {
        name: (list(part.shards), {column: np.array(part.columns[column]) for column in order})
        for name, part in splits.items()
    }


def names(source: Source) -> set[str]:
    return {Path(key).name for key in source.keys}


def test_shards_know_the_marks_of_the_folder_and_older_ones_use_their_checksums(tmp_path, monkeypatch):
    plain = open_data(fill(tmp_path / "data"))["all"]
    shard(str(tmp_path / "data"), tmp_path / "shards")
    packed = open_data(tmp_path / "shards")["all"]
    assert np.array_equal(fingerprints(packed), fingerprints(plain))
    assert names(split(packed, 0.2)[1]) == names(split(plain, 0.2)[1])
    monkeypatch.setattr(splits, "MANY", 7)  # in several parts
    rest, part = split(packed, 0.2)
    assert names(part) == names(split(plain, 0.2)[1]) and part.digests and rest.digests
    assert part.digests(np.array([3, 0])).tolist() == [part.digest(3), part.digest(0)]
    placed = {part.digest(i): "test" for i in range(len(part))} | {rest.digest(0): "val"}
    again, same = split(packed, 0.1, placed=placed)
    assert names(same) == names(part) and rest.keys[0] in again.keys
    old_index(tmp_path / "shards")
    older = open_data(tmp_path / "shards")["all"]
    checksums = [zlib.crc32(plain.fetch(i)).to_bytes(4, "little") for i in range(40)]
    assert [older.digest(i)[16:20] for i in range(40)] == checksums and len(set(fingerprints(older))) == 40
    assert [len(part) for part in split(older, 0.2)] == [32, 8]
