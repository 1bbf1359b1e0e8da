"""Shards: the images and order of the data they came from, whole or not at all, or an error by name."""

import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from vitkit.data.content import END, content_hash, file_hash
from vitkit.data.decode import BadImage, decode
from vitkit.data.loader import train_batches
from vitkit.data.order import Order
from vitkit.data.sources.index import INDEX, MAGIC, check_columns, open_index, read_header
from vitkit.data.sources.shard_folders import index_shards, verify
from vitkit.data.sources.shards import write_shards
from vitkit.data.sources.source import Source, digits, from_rows
from vitkit.data.splits import complete, fingerprints, split
from vitkit.data.views import View
from vitkit.datasets.opening import open_data, shard
from vitkit.errors import CODES, Error


def picture(number: int, kind: str = "JPEG", size: tuple[int, int] = (30, 41)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path):
    """60 images of 5 classes in train and test, of three formats, and one broken file."""
    root = tmp_path / "data"
    for i in range(60):
        kind = ("JPEG", "PNG", "WEBP")[i % 3]
        place = root / ("test" if i % 6 == 5 else "train") / f"class {i % 5}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.a.{kind.lower()}").write_bytes(picture(i, kind))
    return root


def batches(source: Source, **options) -> list[dict[str, torch.Tensor]]:
    view = View(size=(24, 20), crop="inception", flip=True)
    return list(islice(train_batches(source, view, Order(len(source), 8, seed=3), **options), 9))


def equal(a, b) -> bool:
    return all(
        torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in ("image", "label", "index")
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_folder_bit_for_bit(folder, tmp_path, workers):
    seen = []
    output = shard(str(folder), tmp_path / "out", images=7, seed=5, advance=seen.append)
    assert (
        sum(seen) == 60
        and output["splits"] == {"test": 10, "train": 50}
        and output["shards"] == 8 + 2
        and not output["left_out"]
    )
    plain, packed = complete(open_data(folder)), complete(open_data(tmp_path / "out"))
    for name in ("train", "val", "test"):  # val is split off by content: by the stored digests, the same one
        assert (
            list(packed[name].keys) == list(plain[name].keys) and packed[name].classes == plain[name].classes
        )
        assert equal(batches(packed[name], workers=workers), batches(plain[name]))
    assert verify(tmp_path / "out") == []


def test_pixels_in_memory_come_back_to_the_bit(tmp_path):
    source = digits()
    output = shard("digits", tmp_path, images=1000)
    assert output["images"] == 1797 and output["bytes"] == sum(
        p.stat().st_size for p in tmp_path.glob("*.tar")
    )
    packed = open_data(tmp_path)["all"]
    for i in range(0, 1797, 100):
        assert (
            np.array_equal(decode(packed.fetch(i)), source.fetch(i)) and packed.labels[i] == source.labels[i]
        )


def test_several_labels(tmp_path):
    rows = [
        ("path", "label", "split"),
        ("0.jpg", "cat", "train"),
        ("1.jpg", "dog; cat", "train"),
        ("2.jpg", "dog", "val"),
    ]
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(picture(i))
    with (tmp_path / "m.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    shard(str(tmp_path / "m.csv"), tmp_path / "out")
    result = open_data(tmp_path / "out")
    assert result["train"].multilabel and result["train"].labels.tolist() == [[1, 0], [1, 1]]
    assert result["val"].labels.tolist() == [[0, 1]] and result["val"].classes == ("cat", "dog")
    assert result["train"].labels.dtype == open_data(tmp_path / "m.csv")["train"].labels.dtype
    with tarfile.open(tmp_path / "out" / "val-000000.tar") as archive:
        assert archive.getnames() == ["000000000.jpg", "000000000.json"]
        output = json.load(archive.extractfile("000000000.json"))
    assert output == {"labels": [1], "names": ["dog"]}
    (tmp_path / "out" / INDEX).unlink()
    index_shards(tmp_path / "out", classes=("cat", "dog"))
    assert open_data(tmp_path / "out")["val"].labels.tolist() == [[0, 1]]


def test_webdataset_reads_them(folder, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    shard(str(folder), tmp_path / "out", images=20, seed=1)
    source, names = open_data(folder)["train"], sorted(map(str, (tmp_path / "out").glob("train-*.tar")))
    result = list(webdataset.WebDataset(names, shardshuffle=False))
    assert len(result) == 50 and sorted(s["__key__"] for s in result) == [f"{i:09d}" for i in range(50)]
    for sample in result:
        number = int(sample["__key__"])
        image = next(sample[kind] for kind in ("jpg", "png", "webp") if kind in sample)
        assert image == source.fetch(number) and int(sample["cls"]) == source.labels[number]


def test_a_shard_is_a_random_sample_and_the_seed_decides(folder, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        shard(str(folder), tmp_path / name, images=25, seed=seed)
    a, b, c = ((tmp_path / name / "train-000000.tar").read_bytes() for name in "abc")
    assert a == b != c
    part = open_index(tmp_path / "a" / INDEX)[1]["train"]
    assert len(set(part.columns["label"][part.columns["shard"] == 0].tolist())) == 5
    assert (tmp_path / "a" / INDEX).read_bytes() == (tmp_path / "b" / INDEX).read_bytes()


def test_unusable_files_are_named_and_left_out(folder, tmp_path):
    (folder / "train" / "class 1" / "bad.jpg").write_bytes(picture(1)[:200])
    (folder / "train" / "class 1" / "no.png").write_bytes(b"text")
    output = shard(str(folder), tmp_path / "out", images=7)
    assert set(output["left_out"]) == {"train/class 1/bad.jpg", "train/class 1/no.png"}
    assert output["left_out"]["train/class 1/no.png"].startswith("not-an-image")
    assert shard(str(folder), tmp_path / "out", images=7)["left_out"] == output["left_out"]
    assert len(open_data(tmp_path / "out")["train"]) == 50
    nothing = from_rows("x", [("a.jpg", "cat")], lambda key: b"no")
    with refused("data.empty", "1 images"):
        write_shards({"all": nothing}, tmp_path / "none")
    assert not (tmp_path / "none" / INDEX).exists()


def test_a_class_that_training_does_not_know_is_an_error_by_name(folder, tmp_path):
    (folder / "test" / "class 9").mkdir()
    (folder / "test" / "class 9" / "x.jpg").write_bytes(picture(1))
    with refused("data.classes", "test", "'class 9'"):
        shard(str(folder), tmp_path / "out")


def test_a_run_again_makes_what_is_missing_or_says_what_differs(folder, tmp_path):
    out = tmp_path / "out"
    shard(str(folder), out, images=7)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "train-000003.tar").unlink()
    with refused("file.not-found", "train-000003.tar"):
        open_data(out)
    shard(str(folder), out, images=7)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    with refused("file.exists", out, "seed"):
        shard(str(folder), out, images=7, seed=1)
    with refused("file.exists", "test: images a shard, train: images a shard"):
        shard(str(folder), out, images=8)
    os.truncate(out / "train-000002.tar", 1000)
    with refused("data.corrupt", "train-000002.tar", "1000 bytes"):
        shard(str(folder), out, images=7)
    (out / "train-000002.tar").unlink()
    for path in (folder / "train" / "class 1").iterdir():
        path.write_bytes(picture(7))
    with refused("data.changed", "train-000002.tar"):
        shard(str(folder), out, images=7)
    assert not (out / "train-000002.tar").exists()
    (folder / "train" / "class 1" / "new.jpg").write_bytes(picture(8))
    with refused("file.exists", "train: images, train: names, train: labels"):
        shard(str(folder), out, images=7)


def test_a_folder_with_other_shards_is_left_alone(folder, tmp_path):
    (tmp_path / "x.tar").write_bytes(b"")
    with refused("file.exists", tmp_path):
        shard(str(folder), tmp_path)


KILLED = """
import sys, threading
from pathlib import Path
from vitkit.data.sources import shards
from vitkit.datasets.opening import shard
real, (folder, out, after) = shards.read_image, sys.argv[1:]
def read_image(*of):
    if len(list(Path(out).glob("*.tar"))) >= int(after):
        print("there", flush=True)
        threading.Event().wait()
    return real(*of)
shards.read_image = read_image
shard(folder, Path(out), images=5, workers=1)
"""


@pytest.mark.parametrize("after", [2, 6, 10])
def test_killed_at_any_time_it_goes_on_and_ends_with_the_same_bytes(folder, tmp_path, after):
    whole, out = tmp_path / "whole", tmp_path / "out"
    shard(str(folder), whole, images=5)
    words = [sys.executable, "-c", KILLED, str(folder), str(out), str(after)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"there\n"  # in the midst of the next shard
        run.kill()
    assert not (out / INDEX).exists()
    for path in out.glob("*.tar"):  # whole, or not there
        assert path.read_bytes() == (whole / path.name).read_bytes()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(before) >= after
    shard(str(folder), out, images=5)
    assert all((out / name).stat().st_mtime_ns == when for name, when in before.items())
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


@pytest.fixture
def packed(folder, tmp_path):
    shard(str(folder), tmp_path / "out", images=7)
    return tmp_path / "out"


def test_a_shard_replaced_by_one_of_the_same_size_is_noticed_image_by_image(packed, tmp_path):
    name = "train-000001.tar"
    content = bytearray((packed / name).read_bytes())
    part = open_index(packed / INDEX)[1]["train"]
    row = int(np.flatnonzero(part.columns["shard"] == 1)[2])
    content[int(part.columns["offset"][row]) + 20] ^= 1
    (packed / name).write_bytes(content)
    source = open_data(packed)["train"]
    with pytest.raises(BadImage, match=rf"{name}!.*CRC.*index says.*damaged or from another") as error:
        source.fetch(row)
    assert error.value.reason == "changed" and source.keys[row] in str(error.value)
    source.fetch(row - 1 if part.columns["shard"][row - 1] != 1 else row + 1)
    wrong = verify(packed)
    assert len(wrong) == 2 and f"{name}: SHA-256" in wrong[0] and source.keys[row] in wrong[1]


@pytest.mark.parametrize(("size", "why"), [(5000, "truncated"), (10**6, "replaced")])
def test_a_shard_of_another_size_is_noticed_when_it_is_opened(packed, size, why):
    os.truncate(packed / "train-000001.tar", size)
    with refused("data.corrupt", "train-000001.tar", f"{size} bytes", why):
        open_data(packed)
    assert "train-000001.tar" in verify(packed)[0]


def test_a_shard_that_goes_away_is_an_error_and_not_a_bad_image(packed, monkeypatch):
    monkeypatch.setattr("vitkit.data.sources.index.PROBES", 1)  # else all are open
    source = open_data(packed)["train"]
    numbers = open_index(packed / INDEX)[1]["train"].columns["shard"]
    row = int(np.flatnonzero(numbers != numbers[0])[0])
    (packed / f"train-{numbers[row]:06d}.tar").unlink()
    with refused("file.not-found", f"train-{numbers[row]:06d}.tar") as error:
        source.fetch(row)
    assert not isinstance(error.value, BadImage)


def test_two_data_sets_mixed_are_noticed(packed, tmp_path):
    other = from_rows("x", [(f"{i}", "c") for i in range(14)], lambda key: picture(100 + int(key)))
    write_shards({"train": other}, tmp_path / "other", images=7)
    (tmp_path / "other" / "train-000000.tar").replace(packed / "train-000000.tar")
    with refused("data.corrupt", "train-000000.tar"):  # by size or by a sample
        open_data(packed)
    with refused("data.corrupt", "train-000000.tar"):
        open_data(packed)["train"].fetch(0)


def rewritten(path, change) -> None:
    """An index whose header says something else, with its checksum set right."""
    header, base = read_header(path)
    columns = path.read_bytes()[base:]
    change(header)
    text = json.dumps(header).encode()
    line = b"%b 1 %d %b\n" % (MAGIC, len(text), hashlib.sha256(text).hexdigest().encode())
    path.write_bytes((line + text).ljust(-(-(len(line) + len(text)) // 64) * 64) + columns)


def shard_named(name):
    """A change of the header: the first shard gets another name."""
    return lambda header: header["splits"]["train"]["shards"][0].__setitem__(0, name)


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (lambda h: h["classes"].pop(), "data.labels", ("label 4", "0..3")),
        (
            lambda h: h["splits"]["train"]["shards"][0].__setitem__(3, 9),
            "data.corrupt",
            ("train-000000.tar", "9 samples", "7 are listed"),
        ),
        (lambda h: h["splits"]["train"]["shards"].pop(), "data.corrupt", ("shard 7 of 7",)),
        (shard_named("../x.tar"), "data.unsafe", ("'../x.tar'",)),
        (shard_named("/etc/passwd"), "data.unsafe", ("'/etc/passwd'",)),
        (shard_named("pipe:cat x"), "data.unsafe", ("'pipe:cat x'",)),
        (lambda h: h["splits"]["train"].update(count=10**12), "data.corrupt", ("a column of",)),
        (
            lambda h: h["splits"]["train"]["columns"]["offset"].__setitem__(0, 10**12),
            "data.corrupt",
            (f"at {10**12}",),
        ),
        (lambda h: h["splits"]["train"]["columns"].pop("crc"), "data.corrupt", ("'crc'",)),
        (lambda h: h["splits"].update(train=7), "data.corrupt", ()),
        (lambda h: h.update(bytes=5), "data.corrupt", ("bytes, not",)),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(packed, change, code, values):
    rewritten(packed / INDEX, change)
    with refused(code, INDEX, *values):
        open_data(packed)


def test_a_damaged_or_newer_index_is_refused(packed):
    path = packed / INDEX
    good = path.read_bytes()
    line, rest = good.split(b"\n", 1)
    header, base = read_header(path)
    label = base + header["splits"]["train"]["columns"]["label"][0]
    length = b" %d " % len(json.dumps(header))
    other = b"\1" if good[label] != 1 else b"\2"
    cases = (
        (good.replace(b"vitkit-shards 1 ", b"vitkit-shards 7 ", 1), "data.layout", "version 7"),
        (b"PK" + good, "data.corrupt", ""),
        (line.replace(length, b" 99999999999 ") + b"\n" + rest, "data.too-large", 99999999999),
        (line.replace(length, b" 99999999 ") + b"\n" + rest, "data.corrupt", "claims 99999999"),
        (good.replace(b"class 3", b"class 8", 1), "data.corrupt", "header"),
        (good[:-1], "data.corrupt", f"{len(good) - 1} bytes"),
        (good[:label] + other + good[label + 1 :], "data.corrupt", "checksum"),
    )
    for content, code, value in cases:
        path.write_bytes(content)
        with refused(code, INDEX, value):
            open_data(packed)
    rng = np.random.default_rng(0)
    for cut in rng.integers(0, len(good), 40).tolist():
        path.write_bytes(good[:cut])
        with refused("data.corrupt", INDEX):
            open_data(packed)


def test_a_column_longer_than_the_index_is_not_read(packed):
    """One that nothing here uses: it is met when all are compared with their checksums."""
    rewritten(packed / INDEX, lambda h: h["splits"]["train"]["columns"].update(more=[0, 2**60, 0]))
    with refused("data.corrupt", 2**60):
        check_columns(packed / INDEX)


def test_a_size_that_cannot_be_is_not_made_room_for(packed):
    path = packed / INDEX
    header, base = read_header(path)
    start, _, _ = header["splits"]["train"]["columns"]["length"]
    content = bytearray(path.read_bytes())
    content[base + start : base + start + 4] = b"\xff" * 4
    path.write_bytes(content)
    with refused("data.corrupt", ".tar!", 2**32 - 1):
        open_data(packed)


def test_a_flipped_bit_in_the_index_is_noticed(packed):
    """At once in the header, labels and shard numbers, by verify anywhere."""
    path = packed / INDEX
    good = path.read_bytes()
    header, base = read_header(path)
    places = [p for s in header["splits"].values() for p in s["columns"].values()]
    for start, size, _ in places:
        bad = bytearray(good)
        bad[base + start + size // 2] ^= 16
        path.write_bytes(bad)
        with pytest.raises(Error) as caught:
            verify(packed)
        assert caught.value.code in ("data.corrupt", "data.labels")


def tar(path, members) -> None:
    """Members of (name, content or a TarInfo's other fields)."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, dict):
                for field, value in content.items():
                    setattr(member, field, value)
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


CODE = b"cos\nsystem\n(S'touch owned'\ntR."


def test_shards_of_others_are_indexed_in_place(tmp_path):
    for number in range(3):
        split = ("train", "train", "val")[number]
        members = [(f"{number}/x.jpg", picture(1)), (f"{number}/y.cls", b"1"), (f"{number}/y.pkl", CODE)]
        for i in range(4):
            members.append((f"./{number}/{i}.cls", b"%d" % (i % 3)))
            members.append((f"./{number}/{i}.JPG", picture(10 * number + i)))
            members.append((f"./{number}/{i}.txt", b"a caption"))
        tar(tmp_path / f"set-{split}-{number}.tar", members)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    output = shard(str(tmp_path), tmp_path)
    assert output["splits"] == {"train": 8, "val": 4} and output["shards"] == 3
    assert (
        output["left_out"]["set-train-0.tar!0/x"] == "no label"
        and output["left_out"]["set-val-2.tar!2/y"] == "no image"
    )
    assert "contain code" in output["left_out"]["set-val-2.tar!2/y.pkl"]
    train = open_data(tmp_path)["train"]
    assert train.classes == ("0", "1", "2") and train.labels.tolist() == [0, 1, 2, 0] * 2
    assert train.keys[5] == "1/1" and train.fetch(5) == picture(11) and verify(tmp_path) == []
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.tar")} == before
    with refused("file.exists", tmp_path / INDEX):
        index_shards(tmp_path)


GOOD = [("a.jpg", picture(1)), ("a.cls", b"0")]


@pytest.mark.parametrize(
    ("members", "code", "named"),
    [
        ([("../a.jpg", b"x")], "data.unsafe", "x.tar!../a.jpg"),
        ([("/etc/a.jpg", b"x")], "data.unsafe", "x.tar!/etc/a.jpg"),
        ([("b/../../a.jpg", b"x")], "data.unsafe", "x.tar!b/../../a.jpg"),
        ([("a.jpg", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})], "data.unsafe", "x.tar!a.jpg"),
        ([("a.jpg", {"type": tarfile.LNKTYPE, "linkname": "b.jpg"})], "data.unsafe", "x.tar!a.jpg"),
        ([("a.jpg", {"type": tarfile.FIFOTYPE})], "data.unsafe", "x.tar!a.jpg"),
        ([("a.jpg", {"type": tarfile.GNUTYPE_SPARSE})], "data.unsafe", "x.tar!a.jpg"),
        ([("a.jpg", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5})], "data.unsafe", "x.tar!a.jpg"),
        ([("a.jpg", b"x"), ("a.jpg", b"y")], "data.layout", "x.tar!a.jpg"),
        ([("a.jpg", b"x"), ("a.png", b"y"), ("a.cls", b"0")], "data.layout", "x.tar!a: 2 images"),
        ([("a.jpg", b"x"), ("a.cls", b"-3")], "data.labels", "x.tar!a.cls"),
        ([("a.jpg", b"x"), ("a.cls", b"2000000000")], "data.labels", "x.tar!a.cls"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], "data.labels", "x.tar!a.cls: no label: b'cat'"),
        ([("a.jpg", b"x"), ("a.json", b"[" * 9999)], "data.labels", "x.tar!a.json"),
        ([("a.jpg", b"x"), ("a.json", b'{"labels": [true, "x"]}')], "data.labels", "x.tar!a.json"),
        ([("a.jpg", b"x"), ("a.pkl", CODE)], "data.labels", ""),
        (
            [("a.jpg", b"x"), ("a.cls", b"1"), ("b.jpg", b"x"), ("b.json", b'{"labels": [1]}')],
            "data.labels",
            "",
        ),
    ],
)
def test_tars_that_are_not_as_they_should_be_are_refused_by_member(tmp_path, members, code, named):
    tar(tmp_path / "x.tar", members)
    with refused(code, named):
        index_shards(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"] and not os.path.exists("owned")


def test_tars_cut_off_damaged_or_with_impossible_sizes_are_refused(tmp_path):
    path = tmp_path / "x.tar"
    tar(path, [("a.jpg", picture(1)), ("a.cls", b"0"), ("b.jpg", picture(2)), ("b.cls", b"0")])
    good = path.read_bytes()
    second = good.index(b"b.jpg")
    huge = tarfile.TarInfo("a.jpg")
    huge.size = 10 * 2**30
    cases = (
        (good[: second + 700], "data.corrupt", ""),
        (good[:second] + b"Z" + good[second + 1 :], "data.corrupt", f"byte {second}"),  # a wrong checksum
        (huge.tobuf() + bytes(2048), "data.too-large", f"a.jpg: claims {huge.size} bytes"),
        (b"\x1f\x8b" + good, "data.corrupt", ""),
    )
    for content, code, value in cases:
        path.write_bytes(content)
        with refused(code, "x.tar", value):
            index_shards(tmp_path)


def test_mutants_of_a_tar_raise_one_kind_of_error(tmp_path):
    path = tmp_path / "x.tar"
    tar(path, [*GOOD, ("é" * 90 + ".jpg", picture(2)), ("b" * 120 + ".cls", b"0")])
    good, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(good)
        for at in rng.integers(0, len(good), 3):
            bad[at] = rng.integers(256)
        path.write_bytes(bad)
        try:
            index_shards(tmp_path)
            open_data(tmp_path)["all"].fetch(0)
        except Error as error:
            assert error.code in CODES
        (tmp_path / INDEX).unlink(missing_ok=True)


@pytest.mark.slow
def test_a_hundred_thousand_empty_members(tmp_path):
    header = bytearray(tarfile.TarInfo("000000.txt").tobuf())
    with (tmp_path / "x.tar").open("wb") as file:
        for number in range(100_000):
            header[:6] = b"%06d" % number
            header[148:156] = b" " * 8
            header[148:155] = b"%06o\0" % sum(header[:512])
            file.write(header)
        file.write(bytes(1024))
    with refused("data.labels", tmp_path):
        index_shards(tmp_path)


def test_no_address_runs_a_command(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    codes = {"pipe:touch owned": "data.not-found", "pipe://touch owned": "request.value",
             f"file://{tmp_path}": "data.empty", "s3://bucket/x": "request.extra-missing"}  # fmt: skip
    for place, code in codes.items():
        with refused(code, place):
            open_data(place)
    assert not os.path.exists("owned")


def test_a_split_by_stored_digests_reads_no_image(packed, folder):
    packed_train, plain = open_data(packed)["train"], open_data(folder)["train"]
    assert np.array_equal(fingerprints(packed_train), fingerprints(plain))
    for path in packed.glob("*.tar"):
        path.unlink()
    rest, part = split(packed_train, 0.2)
    assert set(part.keys) == set(split(plain, 0.2)[1].keys) and len(rest) + len(part) == 50


@pytest.mark.parametrize("size", [0, 10, 2 * END - 1, 2 * END, 2 * END + 1, 100_000])
def test_the_mark_of_a_file_is_that_of_its_bytes(tmp_path, size):
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "x").write_bytes(content)
    assert file_hash(tmp_path / "x") == content_hash(content)
    if size <= 2 * END:
        assert content_hash(content)[:16] == hashlib.blake2b(content, digest_size=16).digest()
    else:
        assert content_hash(content) != content_hash(content[:-1] + b"!") and content_hash(
            content
        ) != content_hash(b"!" + content[1:])


def test_a_taken_part_holds_numbers_and_no_names(packed):
    source = open_data(packed)["train"]
    part = source.take(np.arange(49, -1, -7)).take(np.array([2, 0]))
    assert list(part.keys) == [source.keys[35], source.keys[49]] and part.keys[-1] == source.keys[49]
    assert part.keys[:1] == [source.keys[35]] and part.fetch(1) == source.fetch(49)
    assert part.digest(0) == source.digest(35) and part.labels.tolist() == source.labels[[35, 49]].tolist()
    with pytest.raises(IndexError):
        part.keys[2]
    assert not re.search("list|tuple", type(part.keys).__name__)


def test_the_length_of_an_index_is_compared_before_its_header_is_read(packed):
    path = packed / INDEX
    good = path.read_bytes()
    cut = good[: good.index(b"\n") + 20]
    path.write_bytes(cut)
    with refused("data.corrupt", INDEX, f"{len(cut)} bytes"):
        open_data(packed)
