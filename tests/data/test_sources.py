"""Folders, manifests, archives and arrays become the same Source, and bad shapes are refused by name."""

import csv
import io
import os
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from torch.utils.data import DataLoader

from vitkit.data.decode import BadImage, decode
from vitkit.data.sources.source import digits, from_arrays
from vitkit.data.splits import complete, fingerprints, same_classes, split, subset, with_noise
from vitkit.datasets.opening import open_data


def picture(number: int) -> bytes:
    pixels = np.full((6, 8, 3), number % 256, np.uint8)
    pixels[0, 0] = (number // 256, 7, 9)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write(root, names) -> None:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(i))


NAMES = ["cat/a.png", "cat/b.PNG", "dog/a.png", "bird/heron/x.png", "bird/owl/x.png"]
CLASSES = ("bird/heron", "bird/owl", "cat", "dog")


def labelled(source) -> dict[str, str]:
    return {key: source.classes[label] for key, label in zip(source.keys, source.labels, strict=True)}


def test_a_folder_of_nested_classes(tmp_path):
    write(tmp_path, [*NAMES, ".hidden/x.png", "cat/.DS_Store.png", "cat/notes.txt"])
    result = open_data(tmp_path)["all"]
    assert result.classes == CLASSES and result.skipped == ("cat/notes.txt",)
    assert labelled(result) == {name: name.rpartition("/")[0] for name in NAMES}
    for i, key in enumerate(result.keys):
        assert decode(result.fetch(i))[1, 1, 0] == NAMES.index(key)


def test_splits_are_known_by_their_usual_names(tmp_path):
    write(tmp_path, ["Train/cat/1.png", "Train/dog/1.png", "validation/cat/2.png", "TEST/dog/3.png"])
    result = open_data(tmp_path)
    assert {name: list(part.keys) for name, part in result.items()} == {
        "train": ["Train/cat/1.png", "Train/dog/1.png"],
        "val": ["validation/cat/2.png"], "test": ["TEST/dog/3.png"],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("prefix", ["", "pets/", "EuroSAT/2750/"])
def test_an_archive_of_a_folder_is_read_in_place(tmp_path, kind, prefix):
    path = tmp_path / f"pets.{kind}"
    contents = {f"{prefix}{name}": picture(i) for i, name in enumerate(NAMES)} | {f"{prefix}.DS_Store": b"x"}
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w") as archive:
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    result = open_data(path)["all"]
    assert result.classes == CLASSES and len(result) == 5
    assert sorted(result.fetch(i) for i in range(5)) == sorted(picture(i) for i in range(5))
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_links_and_devices_in_a_tar_are_left_out(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, kind in (("cat/a.png", tarfile.SYMTYPE), ("cat/b.png", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/hostname"
            archive.addfile(member)
        member = tarfile.TarInfo("cat/c.png")
        member.size = len(picture(1))
        archive.addfile(member, io.BytesIO(picture(1)))
    result = open_data(tmp_path / "x.tar")["all"]
    assert list(result.keys) == ["cat/c.png"] and result.skipped == ("cat/a.png", "cat/b.png")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        link = zipfile.ZipInfo("cat/a.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/hostname")
        archive.writestr("cat/c.png", picture(1))
    result = open_data(tmp_path / "x.zip")["all"]
    assert list(result.keys) == ["cat/c.png"] and result.skipped == ("cat/a.png",)


def test_a_file_that_a_tar_stores_once_under_two_names_is_two_images(tmp_path):
    write(tmp_path / "x", ["cat/a.png", "dog/b.png"])
    os.link(tmp_path / "x" / "cat" / "a.png", tmp_path / "x" / "cat" / "z.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x", ".")
        assert [m.name for m in archive.getmembers() if m.islnk()] in (["./cat/z.png"], ["./cat/a.png"])
    result = open_data(tmp_path / "x.tar")["all"]
    assert list(result.keys) == ["cat/a.png", "cat/z.png", "dog/b.png"] and result.skipped == ()
    assert result.fetch(0) == result.fetch(1) == picture(0)


def test_an_encrypted_zip_is_refused_and_a_damaged_member_is_named_as_such(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/a.png", picture(1))
        archive.writestr("dog/b.png", picture(2))
    content = (tmp_path / "x.zip").read_bytes()
    at = content.index(b"cat/a.png") + len(b"cat/a.png") + 4
    (tmp_path / "y.zip").write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
    with pytest.raises(BadImage) as caught:
        open_data(tmp_path / "y.zip")["all"].fetch(0)
    assert caught.value.reason == "damaged"
    flags = content.index(b"PK\1\2") + 8  # of the first member in the central directory
    (tmp_path / "z.zip").write_bytes(content[:flags] + b"\1" + content[flags + 1 :])
    with refused("data.layout", "z.zip!cat/a.png", "password"):
        open_data(tmp_path / "z.zip")


@pytest.mark.parametrize("name", ["../cat/a.png", "/cat/a.png", "cat/../../a.png"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_that_lead_out_of_an_archive_are_refused(tmp_path, name, kind):
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(name, picture(1))
    else:
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(picture(1))
            archive.addfile(member, io.BytesIO(picture(1)))
    with refused("data.unsafe", f"x.{kind}!{name}"):
        open_data(tmp_path / f"x.{kind}")


def test_a_damaged_header_in_a_tar_does_not_end_it_silently(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("cat/a.png", "cat/b.png", "cat/c.png"):
            member = tarfile.TarInfo(name)
            member.size = len(picture(1))
            archive.addfile(member, io.BytesIO(picture(1)))
    content = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(content.replace(b"cat/b.png", b"cat/d.png"))  # the checksum is another's
    with refused("data.corrupt", "x.tar", "byte 1024"):
        open_data(tmp_path / "x.tar")


def test_a_member_that_claims_ten_gigabytes_is_not_made_room_for(tmp_path):
    member = tarfile.TarInfo("cat/a.png")
    member.size = 10 * 2**30
    (tmp_path / "x.tar").write_bytes(member.tobuf() + bytes(4096))
    with pytest.raises(BadImage, match=r"x\.tar!cat/a\.png: claims 10737418240 bytes"):
        open_data(tmp_path / "x.tar")["all"].fetch(0)


def test_processes_that_share_a_zip_do_not_move_each_other(tmp_path):
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(300):
            archive.writestr(f"cat/{i:03d}.png", rng.bytes(20_000))
    source = open_data(tmp_path / "x.zip")["all"]
    whole = [source.fetch(i) for i in range(300)]
    loader = DataLoader(
        list(range(300)), 10, num_workers=4, multiprocessing_context="fork",
        collate_fn=lambda numbers: [source.fetch(i) == whole[i] for i in numbers],
    )  # fmt: skip
    assert all(right for part in loader for right in part)


def test_a_tar_cut_off_names_its_last_member(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        member = tarfile.TarInfo("cat/c.png")
        member.size = len(picture(1))
        archive.addfile(member, io.BytesIO(picture(1)))
    (tmp_path / "x.tar").write_bytes((tmp_path / "x.tar").read_bytes()[:550])
    with pytest.raises(BadImage, match=r"cat/c\.png"):
        open_data(tmp_path / "x.tar")["all"].fetch(0)


def manifest(path, rows) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_a_manifest_with_splits_and_several_labels(tmp_path):
    write(tmp_path, ["1.png", "2.png", "3.png"])
    rows = [
        ("path", "label", "split"),
        ("1.png", "cat", "train"),
        ("2.png", "dog; cat", "train"),
        ("3.png", "dog", "val"),
    ]
    manifest(tmp_path / "m.csv", rows)
    result = open_data(tmp_path / "m.csv")
    train = result["train"]
    assert train.multilabel and train.classes == ("cat", "dog") and train.labels.tolist() == [[1, 0], [1, 1]]
    assert result["val"].multilabel  # as train is, though none of its images has several
    assert result["val"].classes == ("dog",) and decode(train.fetch(1)).shape == (6, 8, 3)


@pytest.mark.parametrize(
    ("rows", "code", "values"),
    [
        ([("file", "label"), ("1.png", "cat")], "data.layout", ("path and label", "file, label")),
        ([("path", "label"), ("1.png", "")], "data.labels", ("line 2",)),
        ([("path", "label")], "data.empty", ()),
    ],
)
def test_manifests_that_say_too_little_are_refused(tmp_path, rows, code, values):
    manifest(tmp_path / "m.csv", rows)
    with refused(code, "m.csv", *values):
        open_data(tmp_path / "m.csv")


def test_arrays_with_and_without_splits(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (6, 4, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([0, 1, 2, 0, 1, 2]))
    result = open_data(tmp_path / "a.npz")["all"]
    assert result.classes == ("0", "1", "2") and np.array_equal(result.fetch(3), images[3])
    names = np.array(["x", "y"])
    train = {"x_train": images[:4, :, :, 0], "y_train": np.array([0, 1, 1, 0])}
    np.savez(tmp_path / "b.npz", **train, x_test=images[4:], y_test=np.array([1, 0]), classes=names)
    parts = open_data(tmp_path / "b.npz")
    assert set(parts) == {"train", "test"} and parts["train"].classes == ("x", "y")
    assert parts["train"].fetch(0).shape == (4, 5, 3)


@pytest.mark.parametrize(
    ("images", "labels", "code", "values"),
    [
        (np.zeros((2, 4, 4), np.float32), np.zeros(2, int), "data.layout", ("uint8", "float32")),
        (np.zeros((2, 4, 4, 2), np.uint8), np.zeros(2, int), "data.layout", ("uint8", (2, 4, 4, 2))),
        (np.zeros((2, 4, 4), np.uint8), np.zeros(3, int), "data.labels", ("2 class numbers", (3,))),
        (np.zeros((2, 4, 4), np.uint8), np.array([0, -1]), "data.labels", ("row 1", -1)),
    ],
)
def test_arrays_of_another_kind_are_refused(images, labels, code, values):
    with refused(code, *values):
        from_arrays("x", images, labels)


def test_the_embedded_digits_are_the_1797_known_ones():
    source = digits()
    assert len(source) == 1797 and source.classes == tuple("0123456789")
    assert np.bincount(source.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source.fetch(0).shape == (8, 8, 3) and source.fetch(0).max() == 239


@pytest.mark.parametrize(
    ("names", "code", "values"),
    [
        ([], "data.empty", ("0 other files",)),
        (["a.txt"], "data.empty", ("1 other files",)),
        (["a.png", "cat/b.png"], "data.layout", ("1 images", "'a.png'")),
    ],
)
def test_folders_without_classes_or_images_are_refused(tmp_path, names, code, values):
    write(tmp_path, names)
    with refused(code, tmp_path.name, *values):
        open_data(tmp_path)


def test_what_is_not_there_or_not_data_is_refused(tmp_path):
    with refused("data.not-found", "nowhere", "digits"):
        open_data(tmp_path / "nowhere")
    (tmp_path / "x.mp4").write_bytes(b"")
    with refused("data.layout", "x.mp4", ".parquet"):
        open_data(tmp_path / "x.mp4")


def test_links_in_a_circle_do_not_go_round(tmp_path):
    write(tmp_path, ["cat/a.png"])
    os.symlink(tmp_path, tmp_path / "cat" / "again")
    os.symlink(tmp_path / "nothing.png", tmp_path / "cat" / "broken.png")
    result = open_data(tmp_path)["all"]
    assert sorted(result.keys) == ["cat/a.png", "cat/broken.png"]
    with pytest.raises(BadImage):
        result.fetch(list(result.keys).index("cat/broken.png"))


def test_a_folder_with_a_second_name_is_read_under_both(tmp_path):
    write(tmp_path, ["train/cat/a.png", "train/dog/b.png", "test/cat/c.png", "test/dog/d.png"])
    (tmp_path / "val").symlink_to("test")
    (tmp_path / "train" / "mog").symlink_to("cat")
    found = {name: list(part.keys) for name, part in open_data(tmp_path).items()}
    assert found["val"] == ["val/cat/c.png", "val/dog/d.png"]
    assert found["test"] == ["test/cat/c.png", "test/dog/d.png"]
    assert found["train"] == ["train/cat/a.png", "train/dog/b.png", "train/mog/a.png"]


def test_folders_that_link_to_each_other_are_read_in_bounded_time(tmp_path):
    names = [f"{i:02d}" for i in range(12)]
    write(tmp_path, [f"{name}/a.png" for name in names])
    for name in names:
        for other in names:
            (tmp_path / name / f"to {other}").symlink_to(tmp_path / other)
    keys = open_data(tmp_path)["all"].keys
    assert {f"{name}/a.png" for name in names} <= set(keys) and len(keys) == 12 * 12


def test_run_folders_in_the_data_are_no_classes(tmp_path):
    runs = ["runs/photos/training-batch.jpg", "runs/photos/recipe.json", "runs/photos/environment.json"]
    write(tmp_path, ["cat/a.png", "cat/recipe.json", "dog/a.png", "dog/sub/b.png", *runs])
    result = open_data(tmp_path)["all"]
    assert result.classes == ("cat", "dog", "dog/sub")
    assert result.empty == () and result.skipped == ("cat/recipe.json",)


def test_odd_names_stay_as_they_are(tmp_path):
    names = [
        "a;b/x.png",
        "a b/x.png",
        "<img onerror>/x.png",
        "-rf/x.png",
        "émoji 🦉/x.png",
        "10/x.png",
        "2/x.png",
    ]
    write(tmp_path, names)
    assert open_data(tmp_path)["all"].classes == tuple(sorted(n.split("/")[0] for n in names))


def test_a_split_depends_on_content_not_on_names_or_order(tmp_path):
    source = digits()
    rest, part = split(source, 0.2)
    assert len(rest) + len(part) == 1797 and not set(rest.keys) & set(part.keys)
    shares = np.bincount(part.labels) / np.bincount(source.labels)
    assert shares.min() > 0.19 and shares.max() < 0.21
    mirror = source.take(np.arange(1797)[::-1])
    assert set(split(mirror, 0.2)[1].keys) == set(part.keys)


def test_copies_of_an_image_stay_on_one_side(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (40, 4, 4), dtype=np.uint8)
    twice = from_arrays("x", np.concatenate([images, images]), np.arange(80) % 2)
    rest, part = split(twice, 0.3)
    assert not set(fingerprints(rest)) & set(fingerprints(part)) and len(part) == 24


def test_subsets_are_nested():
    source = digits()
    small, large = subset(source, count=50, seed=1), subset(source, fraction=0.5, seed=1)
    assert len(small) == 50 and len(large) == 898 and set(small.keys) < set(large.keys)
    few, more = subset(source, per_class=3), subset(source, per_class=10)
    assert np.bincount(few.labels).tolist() == [3] * 10 and set(few.keys) < set(more.keys)
    many, tail = subset(source, imbalance=10), subset(source, imbalance=100)
    assert set(tail.keys) < set(many.keys) and np.bincount(tail.labels)[[0, -1]].tolist() == [178, 2]
    counts = np.bincount(many.labels)  # 183 of the largest class, times 10 ** (-n / 9)
    assert counts.tolist() == [178, 142, 110, 85, 66, 51, 39, 31, 24, 18]
    with refused("request.conflict", "count, fraction, per_class and imbalance"):
        subset(source, count=3, per_class=1)
    with refused("request.value", 2000, 1797):
        subset(source, count=2000)


def test_label_noise_replaces_a_share_of_the_labels_by_other_classes():
    source = digits()
    noisy = with_noise(source, 0.2, seed=1)
    wrong = noisy.labels != source.labels
    assert wrong.sum() == 359 and set(noisy.labels) == set(range(10)) and noisy.keys == source.keys
    assert (with_noise(source, 0.2, seed=1).labels == noisy.labels).all()
    assert (with_noise(source, 0.2, seed=2).labels != noisy.labels).any()
    assert replace(source, identity="x").identity != with_noise(replace(source, identity="x"), 0.2).identity
    several = replace(source, labels=np.eye(10, dtype=np.uint8)[source.labels])
    with refused("request.conflict", "label_noise"):
        with_noise(several, 0.2)


def test_missing_splits_are_made_and_given_ones_kept(tmp_path):
    parts = complete({"all": digits()})
    assert {name: len(part) for name, part in parts.items()} == {"train": 1458, "val": 160, "test": 179}
    rest, val = split(digits(), 0.1)
    parts = complete({"train": rest, "val": val})
    assert set(parts["test"].keys) == set(val.keys) and len(parts["train"]) + len(parts["val"]) == len(rest)


def test_other_classes_are_an_error_by_name_and_a_part_of_them_is_renumbered(tmp_path):
    source = digits()
    odd = source.take(np.flatnonzero(source.labels % 2 == 1))
    odd = same_classes(odd, source.classes)
    write(tmp_path, ["7/a.png", "3/a.png"])
    part = same_classes(open_data(tmp_path)["all"], source.classes, "val")
    assert sorted(part.labels.tolist()) == [3, 7] and part.classes == source.classes
    write(tmp_path, ["eleven/a.png"])
    with refused("data.classes", "val", "'eleven'"):
        same_classes(open_data(tmp_path)["all"], source.classes, "val")
