"""Data that is not as it should be: one line that names the file, the row and the value, no traceback."""

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from test_cli import run
from test_sources import labelled, picture, write

from vitkit.data.splits import same_classes
from vitkit.datasets.opening import open_data, shard
from vitkit.errors import Error


def rejected(place: object, capfd) -> str:
    """What `vitkit doctor` says of data that cannot be opened: one line, exit code 2."""
    capfd.readouterr()
    assert run("doctor", place, "--quick") == 2
    output = capfd.readouterr().err.strip()
    assert output.startswith("vitkit: ") and len(output.splitlines()) == 1 and "Traceback" not in output
    with pytest.raises(Error) as caught:
        open_data(place)
    assert caught.value.code.partition(".")[0] in ("data", "file"), caught.value.code
    return output


# folders

SPLIT = ["train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png"]


@pytest.mark.parametrize("stray", ["extra/5.png", "extra/cat/5.png", "unlabelled/5.png", "tset/cat/5.png"])
def test_a_stray_folder_beside_splits_is_named(tmp_path, capfd, stray):
    write(tmp_path / "data", [*SPLIT, stray])
    output = rejected(tmp_path / "data", capfd)
    assert repr(stray.split("/")[0]) in output and "'train'" in output and "rename" in output


@pytest.mark.parametrize(
    "harmless",
    ["extra/notes.txt", ".ipynb_checkpoints/5.png", "__MACOSX/cat/5.png", ".cache/cat/5.png", "empty/"],
)
def test_folders_without_images_and_hidden_ones_are_passed_over(tmp_path, harmless):
    write(tmp_path, SPLIT)
    place = tmp_path / harmless
    place.parent.mkdir(exist_ok=True, parents=True)
    place.mkdir() if harmless.endswith("/") else place.write_bytes(picture(1))
    result = open_data(tmp_path)
    assert {name: part.classes for name, part in result.items()} == dict.fromkeys(
        ("train", "val"), ("cat", "dog")
    )


@pytest.mark.parametrize(
    "pair", [("val", "valid"), ("validation", "dev"), ("Train", "train"), ("test", "testing")]
)
def test_two_names_of_one_split_are_refused(tmp_path, capfd, pair):
    write(tmp_path / "data", ["train/cat/1.png", *(f"{name}/cat/{i}.png" for i, name in enumerate(pair, 2))])
    output = rejected(tmp_path / "data", capfd)
    assert all(repr(name) in output for name in pair)


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    write(tmp_path, ["train/1.png", "plane/2.png", "test/3.png"])
    assert open_data(tmp_path)["all"].classes == ("plane", "test", "train")


def test_classes_that_differ_in_unicode_form_are_shown_as_they_are_written(tmp_path):
    write(tmp_path, ["train/caf\u00e9/1.png", "val/cafe\u0301/2.png"])
    result = open_data(tmp_path)
    with refused("data.classes", r"'cafe\u0301'", r"'caf\xe9'"):
        same_classes(result["val"], result["train"].classes)


@pytest.mark.parametrize("name", ["", "   "])
def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch, capfd, name):
    write(tmp_path, ["cat/1.png", "dog/2.png"])
    monkeypatch.chdir(tmp_path)
    with refused("request.value", repr(name)):
        open_data(name)
    model = ("--model", "ViT-Ti/4", "--image-size", 8)
    out = tmp_path / "run"
    for words in (
        ("finetune", name, *model, "--out", out),
        ("pretrain", name, *model, "--recipe", "masked", "--out", out),
        ("shard", name, tmp_path),
    ):
        capfd.readouterr()
        assert run(*words) == 2 and repr(name) in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat", "dog"]


# tables


def table(path: Path, text: str | bytes) -> Path:
    write(path.parent, ["1.png", "2.png"])
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("value", "meant"),
    [("tset", "test"), ("train ", "train"), ("vaild", "valid"), ("tranning", "training"), ("1", None)],
)
def test_an_unknown_split_is_named_with_its_line_and_the_nearest_known(tmp_path, capfd, value, meant):
    rows = f"path,label,split\n1.png,cat,train\n2.png,dog,{value}\n"
    output = rejected(table(tmp_path / "m.csv", rows), capfd)
    assert "m.csv, line 3" in output and repr(value) in output
    assert f"did you mean {meant}?" in output if meant else "did you mean" not in output


def test_two_names_of_one_split_in_a_table_are_refused(tmp_path, capfd):
    output = rejected(table(tmp_path / "m.csv", "path,label,split\n1.png,cat,val\n2.png,dog,valid\n"), capfd)
    assert "'val'" in output and "'valid'" in output
    result = open_data(table(tmp_path / "n.csv", "path,label,split\n1.png,cat,Train\n2.png,dog,train\n"))
    assert len(result["train"]) == 2  # one name, written in two ways


def test_a_row_without_a_split_among_others_is_named(tmp_path, capfd):
    output = rejected(table(tmp_path / "m.csv", "path,label,split\n1.png,cat,train\n2.png,dog\n"), capfd)
    assert "line 3" in output
    assert set(open_data(table(tmp_path / "n.csv", "path,label,split\n1.png,cat,\n2.png,dog,\n"))) == {"all"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_in_encodings_that_name_themselves_are_read(tmp_path, encoding):
    path = table(tmp_path / "m.csv", "path,label\r\n1.png,café\r\n2.png,猫\r\n".encode(encoding))
    assert labelled(open_data(path)["all"]) == {"1.png": "café", "2.png": "猫"}
    big = b"\xfe\xff" + "path,label\n1.png,café\n".encode("utf-16-be")
    assert open_data(table(tmp_path / "b.csv", big))["all"].classes == ("café",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("path,label\n1.png,cat\n2.png,café\n".encode("latin-1"), ("line 3", "0xe9", "UTF-8")),
        ("path,label\n1.png,cat\n".encode("utf-16-le"), ("line 1", "UTF-8")),
        (b"\xff\xfepath", ("m.csv",)),
        (b"path,label\n1.png,c\0t\n", ("line 2", "NUL")),
        ("path,label\n1.png,cat\n2.png," + "x" * 140_000 + "\n", ("line 3", "131072")),
        ('path,label\n1.png,"cat\n' + "2.png,dog\n" * 20_000, ("line 2", "quote")),
        ("path,label\n1.png,cat\n2,000.png,dog\n", ("line 3", "quotes")),
        ("path,label,label\n1.png,cat,dog\n", ("'label'",)),
        ("x" * 200_000, ("line 1", "131072")),
        (b"\x89PNG\r\n\x1a\n\0\0", ("0x89",)),
        ("", ("path and label",)),
        ("path,label\n,cat\n", ("line 2",)),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_read_are_refused_by_line(tmp_path, capfd, content, words):
    output = rejected(table(tmp_path / "m.csv", content), capfd)
    assert "m.csv" in output and all(word in output for word in words) and len(output) < 500


# arrays

IMAGES, LABELS = np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 1, 1])


@pytest.mark.parametrize(
    ("labels", "row", "value"),
    [
        (np.array([0, 2**40, 1]), 1, 2**40),
        (np.array([0, 1, 10**6]), 2, 10**6),
        (np.array([0, 1, 2**64 - 1], np.uint64), 2, 2**64 - 1),
        (np.array([0, -3, 1]), 1, -3),
        (np.array([0, 1, 1.5]), 2, 1.5),
        (np.array([0, np.nan, 1]), 1, "nan"),
        (np.array([1.0, 0.0, 1.0]), 0, 1.0),
        (np.array([True, False, True]), 0, True),
        (np.array(["cat", "dog", "cat"]), 0, "cat"),
    ],
)
def test_labels_that_are_no_class_numbers_are_named(tmp_path, capfd, labels, row, value):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=labels)
    output = rejected(tmp_path / "a.npz", capfd)
    assert f"a.npz, row {row}: the label {value} " in output


def savez(path: Path, **arrays: object) -> bytes:
    np.savez(path, **arrays)
    return path.read_bytes()


def claiming(header: str, size: int | None = None) -> bytes:
    """An .npz whose images claim a header, over a few bytes."""
    out = io.BytesIO()
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + bytes(100)
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("images.npy", npy)
        labels = io.BytesIO()
        np.save(labels, LABELS)
        archive.writestr("labels.npy", labels.getvalue())
    content = out.getvalue()
    if size is not None:  # in the directory, where the first entry's sizes stand
        at = content.index(b"PK\x01\x02") + 20
        content = content[:at] + struct.pack("<II", size, size) + content[at + 8 :]
    return content


HUGE = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000000, 3), }"
ODD_ARRAYS = {
    "not a zip": (lambda p: b"hello", "zip"),
    "empty": (lambda p: b"", "zip"),
    "an array alone": (lambda p: io_save(IMAGES), "zip"),
    "truncated": (lambda p: savez(p, images=IMAGES, labels=LABELS)[:-40], "zip"),
    "a flipped bit": (lambda p: flipped(savez(p, images=IMAGES, labels=LABELS)), "CRC"),
    "objects": (lambda p: savez(p, images=np.array([None] * 3), labels=LABELS), "objects"),
    "no labels": (lambda p: savez(p, images=IMAGES), "needs images and labels"),
    "no y_train": (lambda p: savez(p, x_train=IMAGES, y_test=LABELS), "'y_train'"),
    "unknown split": (lambda p: savez(p, x_tset=IMAGES, y_tset=LABELS), "'x_tset'"),
    "two names": (lambda p: savez(p, x_val=IMAGES, y_val=LABELS, x_dev=IMAGES, y_dev=LABELS), "'dev' and"),
    "both kinds": (lambda p: savez(p, images=IMAGES, labels=LABELS, x_train=IMAGES), "'x_train'"),
    "no images": (lambda p: savez(p, images=IMAGES[:0], labels=LABELS[:0]), "no images"),
    "no pixels": (lambda p: savez(p, images=IMAGES[:, :0], labels=LABELS), "no images"),
    "float images": (lambda p: savez(p, images=IMAGES / 255, labels=LABELS), "float64"),
    "four channels": (lambda p: savez(p, images=np.zeros((3, 4, 4, 4), np.uint8), labels=LABELS), "4, 4, 4)"),
    "flat": (lambda p: savez(p, images=np.zeros(48, np.uint8), labels=LABELS), "(48,)"),
    "too few labels": (lambda p: savez(p, images=IMAGES, labels=LABELS[:2]), "(2,)"),
    "labels of two sides": (lambda p: savez(p, images=IMAGES, labels=LABELS[:, None]), "(3, 1)"),
    "classes of two sides": (lambda p: savez(p, images=IMAGES, labels=LABELS, classes=[["a"]]), "classes"),
    "a class twice": (lambda p: savez(p, images=IMAGES, labels=LABELS, classes=["a", "a"]), "'a' twice"),
    "too few classes": (lambda p: savez(p, images=IMAGES, labels=LABELS, classes=["a"]), "row 1: label 1"),
    "a huge shape": (lambda p: claiming(HUGE), "images.npy claims"),
    "a huge size": (lambda p: claiming(HUGE, 4_000_000_000), "images.npy claims 4000000000 bytes"),
    "a header of code": (lambda p: claiming("__import__('os').mkdir('owned')"), "usable"),
    "an unfinished header": (lambda p: claiming("{'descr': ("), "usable"),
    "twice": (lambda p: doubled(savez(p, images=IMAGES, labels=LABELS)), "same name"),
}  # fmt: skip


def io_save(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def flipped(content: bytes) -> bytes:
    at = content.index(b"\x93NUMPY") + 140
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def doubled(content: bytes) -> bytes:
    out = io.BytesIO(content)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(out, "a") as archive:
        archive.writestr("images.npy", io_save(IMAGES + 1))
    return out.getvalue()


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_an_odd_npz_is_one_line(tmp_path, capfd, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, words = ODD_ARRAYS[name]
    content = make(tmp_path / "made.npz")
    (tmp_path / "a.npz").write_bytes(content)
    output = rejected(tmp_path / "a.npz", capfd)
    assert "a.npz" in output and words in output and not (tmp_path / "owned").exists()


def test_any_byte_of_an_npz_may_be_damaged(tmp_path):
    whole, rng = (
        savez(tmp_path / "w.npz", images=IMAGES, labels=LABELS, classes=["a", "b"]),
        np.random.default_rng(0),
    )
    for _ in range(400):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        (tmp_path / "a.npz").write_bytes(content)
        try:
            result = open_data(tmp_path / "a.npz")["all"]
        except ValueError as error:
            assert "a.npz" in str(error)
        else:
            assert np.array_equal([result.fetch(i) for i in range(3)], IMAGES)


def test_compressed_arrays_are_read_and_other_arrays_passed_over(tmp_path):
    arrays = {"classes": np.array([b"cat", b"dog"]), "x_mean": np.zeros(3), "notes": np.array([None])}
    np.savez_compressed(tmp_path / "a.npz", images=IMAGES, labels=LABELS.astype(np.uint8), **arrays)
    result = open_data(tmp_path / "a.npz")["all"]
    assert len(result) == 3 and result.classes == ("cat", "dog") and result.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("shape", [(3000, 64, 64, 3), (3000, 64, 64)])
def test_what_savez_compressed_writes_is_what_savez_writes(tmp_path, shape):
    """Photographs hardly get smaller, and blank images a thousand times: both are read."""
    images = np.zeros(shape, np.uint8)
    images[:10] = np.random.default_rng(0).integers(0, 256, (10, *shape[1:]))
    arrays = {
        "x_train": images,
        "y_train": np.arange(3000) % 7,
        "x_test": images[:9],
        "y_test": np.arange(9) % 7,
    }
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    assert (tmp_path / "b.npz").stat().st_size < images.nbytes / 50
    plain, packed = open_data(tmp_path / "a.npz"), open_data(tmp_path / "b.npz")
    for split in ("train", "test"):
        assert np.array_equal(plain[split].labels, packed[split].labels)
        for i in (0, 5, -1):
            assert np.array_equal(plain[split].fetch(i), packed[split].fetch(i))


def blank_npz(method: int, megabytes: int = 0) -> bytes:
    """images.npy of so many megabytes of zeros, compressed in one of zip's ways."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("images.npy", io_save(np.zeros((megabytes * 16 + 1, 256, 256, 1), np.uint8)))
        archive.writestr("labels.npy", io_save(np.zeros(megabytes * 16 + 1, np.int64)))
    return out.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_ways_of_compression_that_inflate_without_a_bound_are_refused(tmp_path, capfd, method):
    (tmp_path / "a.npz").write_bytes(blank_npz(method))
    output = rejected(tmp_path / "a.npz", capfd)
    assert "images.npy" in output and f"zip method {method}" in output


def test_a_bomb_is_refused_before_it_takes_memory(tmp_path, monkeypatch):
    """Each array would fit, and the two together do not: nothing is inflated."""
    (tmp_path / "a.npz").write_bytes(blank_npz(zipfile.ZIP_DEFLATED, megabytes=64))
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    monkeypatch.setattr("vitkit.data.sources.arrays.total_memory", lambda: 1025 * 2**16 + 4000)
    tracemalloc.start()
    with refused("data.too-large", "a.npz", "images.npy"):
        open_data(tmp_path / "a.npz")
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


# Parquet


def parquet_file(place: Path, **columns: object) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), place)
    return place


@pytest.mark.parametrize(
    ("labels", "row", "value"),
    [
        ([0, 2**40], 1, 2**40),
        ([0, -2], 1, -2),
        ([True, False], 0, True),
        ([0.0, 1.5], 0, 0.0),
        ([[1], [2]], 0, [1]),
    ],
)
def test_labels_of_a_parquet_file_that_are_no_class_numbers_are_named(tmp_path, capfd, labels, row, value):
    output = rejected(
        parquet_file(tmp_path / "x.parquet", image=[picture(1), picture(2)], label=labels), capfd
    )
    assert f"x.parquet, row {row}" in output and str(value) in output


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"path": ["1.png", "2.png"], "label": ["a", "b"], "split": ["train", "tset"]},
            ("row 1", "'tset'", "did you mean test?"),
        ),
        ({"path": ["1.png", "2.png"], "label": [1.0, float("nan")]}, ("row 1", "nan")),
        ({"path": ["1.png", "2.png"], "label": [1.0, 2.5]}, ("row 1", "2.5")),
        ({"path": ["1.png", "2.png"], "label": [True, False]}, ("row 0", "True")),
        ({"path": [b"1.png", b"2.png"], "label": ["a", "b"]}, ("row 0", "path", "bytes")),
        ({"path": ["1.png", None], "label": ["a", "b"]}, ("row 1", "path and label")),
        ({"path": [], "label": []}, ("no rows",)),
    ],
)
def test_odd_tables_of_paths_are_refused_by_row(tmp_path, capfd, columns, words):
    output = rejected(parquet_file(tmp_path / "x.parquet", **columns), capfd)
    assert "x.parquet" in output and all(word in output for word in words)


def test_damage_in_a_parquet_file_is_named(tmp_path):
    path = parquet_file(
        tmp_path / "x.parquet", path=[f"{i}.png" for i in range(99)], label=["a", "b", "c"] * 33
    )
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        content = bytearray(whole)
        for at in rng.integers(len(content), size=8):
            content[at] ^= 0xFF
        path.write_bytes(content)
        try:
            open_data(path)
        except ValueError as error:
            assert "x.parquet" in str(error)


def test_a_stray_parquet_file_beside_splits_is_named(tmp_path, capfd):
    for name in ("train-0", "test-0", "more"):
        parquet_file(tmp_path / f"{name}.parquet", image=[picture(1), picture(2)], label=[0, 1])
    assert "'more.parquet'" in rejected(tmp_path, capfd)
    (tmp_path / "more.parquet").rename(tmp_path / ".more.parquet")
    assert set(open_data(tmp_path)) == {"train", "test"}


# archives


def zipped(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for i, name in enumerate(names):
            archive.writestr(name, picture(i))
    return path


def test_backslashes_of_windows_are_folders(tmp_path):
    path = zipped(tmp_path / "x.zip", r"train\cat\1.png", r"train\dog\2.png", r"val\cat\3.png")
    result = open_data(path)
    assert labelled(result["train"]) == {"train/cat/1.png": "cat", "train/dog/2.png": "dog"}
    assert result["val"].fetch(0) == picture(2)


@pytest.mark.parametrize("name", [r"..\cat\1.png", r"\cat\1.png", r"C:\cat\1.png", "C:/cat/1.png"])
def test_backslashes_lead_out_of_no_archive(tmp_path, capfd, name):
    assert name.replace("\\", "/") in rejected(zipped(tmp_path / "x.zip", name, "dog/2.png"), capfd)


@pytest.mark.parametrize("second", ["cat/1.png", r"cat\1.png"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name_are_refused(tmp_path, capfd, second):
    output = rejected(zipped(tmp_path / "x.zip", "cat/1.png", "dog/2.png", second), capfd)
    assert "x.zip!cat/1.png" in output


def test_a_stray_tar_beside_shards_of_splits_is_named(tmp_path):
    write(tmp_path / "data", SPLIT)
    shard(str(tmp_path / "data"), tmp_path / "shards")
    folder = tmp_path / "shards"
    (folder / "index.vitkit").unlink()
    (folder / "more.tar").write_bytes(next(folder.glob("train*.tar")).read_bytes())
    with refused("data.layout", "'more.tar'"):
        shard(str(folder), folder)
