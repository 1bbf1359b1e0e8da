"""Public data sets as their publishers pack them: known by their files, official splits, classes in order."""

import tarfile
import zipfile

import formats
import numpy as np
import pytest
from formats import picture, put
from refusals import refused

from vitkit.datasets.opening import open_data
from vitkit.datasets.vtab import TASKS


def facts(place):
    """Images and class numbers by split."""
    return {split: (list(part.keys), part.labels.tolist()) for split, part in open_data(place).items()}


def oxford_pets(root):
    """As images.tar.gz and annotations.tar.gz unpack: the numbers of the lists are not the alphabet's."""
    rows = {"trainval": ["Abyssinian_1 1 1 1", "american_bulldog_2 2 2 1", "Birman_3 3 1 2"],
            "test": ["american_bulldog_7 2 2 1", "Abyssinian_8 1 1 1"]}  # fmt: skip
    for name, lines in rows.items():
        put(root / f"annotations/{name}.txt", "\n".join(lines) + "\n")
        for line in lines:
            stem = line.split()[0]
            put(root / f"images/{stem}.jpg", picture(int(stem[-1]), "JPEG"))
            put(root / f"annotations/trimaps/{stem}.png", picture(2))
            put(root / f"annotations/xmls/{stem}.xml", "<annotation/>")
    put(root / "annotations/list.txt", "#Image CLASS-ID SPECIES BREED ID\n")
    put(root / "images/Abyssinian_100.mat", b"as published")


@pytest.mark.parametrize("outer", ["", "oxford-iiit-pet"])
def test_pets_are_37_breeds_and_not_images_and_trimaps(tmp_path, outer):
    oxford_pets(tmp_path / outer)
    splits = open_data(tmp_path)
    assert splits["train"].classes == ("Abyssinian", "american_bulldog", "Birman")  # numbers from 1 to 37
    names = ["images/Abyssinian_1.jpg", "images/american_bulldog_2.jpg", "images/Birman_3.jpg"]
    assert facts(tmp_path)["train"] == (names, [0, 1, 2])
    assert facts(tmp_path)["test"] == (["images/american_bulldog_7.jpg", "images/Abyssinian_8.jpg"], [1, 0])
    assert splits["test"].fetch(1) == (tmp_path / outer / "images/Abyssinian_8.jpg").read_bytes()
    assert TASKS["pets"].images == {"train": 3_680, "test": 3_669} and TASKS["pets"].classes == 37


def test_pets_without_their_lists_are_refused(tmp_path):
    oxford_pets(tmp_path)
    (tmp_path / "annotations/trainval.txt").unlink()
    with refused("file.not-found", "annotations/trainval.txt"):
        open_data(tmp_path)


def test_flowers_have_three_splits_and_classes_from_one(tmp_path):
    pytest.importorskip("scipy")
    formats.flowers102(tmp_path)
    splits = open_data(tmp_path)
    assert {split: len(part) for split, part in splits.items()} == {"train": 10, "val": 10, "test": 10}
    assert splits["train"].classes == ("001", "002", "003", "004", "005")
    assert splits["val"].keys[0] == "jpg/image_00011.jpg" and splits["val"].labels.tolist()[:3] == [0, 1, 2]
    (tmp_path / "setid.mat").unlink()
    with refused("file.not-found", "setid.mat"):
        open_data(tmp_path)
    (tmp_path / "imagelabels.mat").unlink()
    with refused("file.not-found", "imagelabels.mat"):  # and not the one class "jpg"
        open_data(tmp_path)
    assert TASKS["flowers102"].images == {"train": 1_020, "validation": 1_020, "test": 6_149}


def cifar10(root, each=4):
    """Image i of all is of class i % 10, its red is i, its green i + 50, its blue i + 100."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for part, name in enumerate(names):
        i = np.arange(each)[:, None] + part * each
        rows = np.hstack([i % 10, np.repeat((i + [0, 50, 100]) % 256, 1024, axis=1)]).astype(np.uint8)
        put(root / f"{name}.bin", rows.tobytes())
    put(root / "batches.meta.txt", "\n".join(CIFAR10) + "\n\n")


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10s_five_binary_files_are_one_split(tmp_path, inner):
    cifar10(tmp_path / inner)
    put(tmp_path / "cifar-10-batches-py/data_batch_1", b"\x80\x04")  # beside it, as torchvision leaves it
    splits = open_data(tmp_path)
    assert splits["train"].classes == CIFAR10
    assert splits["train"].labels.tolist() == [i % 10 for i in range(20)]
    assert splits["test"].labels.tolist() == [0, 1, 2, 3]
    for i in (0, 3, 4, 19):  # the last and the first of a file
        image = splits["train"].fetch(i)
        assert image.shape == (32, 32, 3) and image[31, 5].tolist() == [i, i + 50, i + 100]


def test_a_cifar_file_that_is_cut_off_or_missing_is_named(tmp_path):
    cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with refused("data.corrupt", "data_batch_3.bin", 3073):
        open_data(tmp_path)
    path.unlink()
    with refused("file.not-found", "data_batch_3.bin"):
        open_data(tmp_path)


@pytest.mark.parametrize("inner", ["", "cifar-100-binary"])
def test_cifar100s_binary_version_is_understood(tmp_path, inner):
    formats.cifar100(tmp_path / inner, train=200, test=40)
    put(tmp_path / inner / "fine_label_names.txt", "\n".join(f"name {i}" for i in range(100)))
    splits = open_data(tmp_path)
    assert splits["train"].classes[:2] == ("name 0", "name 1")
    assert splits["train"].labels.tolist() == [i % 100 for i in range(200)] and len(splits["test"]) == 40


@pytest.mark.parametrize("names, binary", [
    (("cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/batches.meta"), "cifar-10-binary.tar.gz"),
    (("data_batch_1", "batches.meta"), "cifar-10-binary.tar.gz"),
    (("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"), "cifar-100-binary.tar.gz"),
    (("train", "test", "meta"), "cifar-100-binary.tar.gz"),
])  # fmt: skip
def test_pickled_cifars_are_refused_with_the_file_to_get(tmp_path, names, binary):
    for name in names:
        put(tmp_path / name, b"\x80\x04cos\nsystem\n")
    with refused("data.unsafe", binary):
        open_data(tmp_path)


def test_food101_is_split_by_its_lists(tmp_path):
    rows = {"train": ["apple_pie/1", "waffles/2", "baby_back_ribs/3"], "test": ["waffles/4"]}
    for split, names in rows.items():
        put(tmp_path / f"food-101/meta/{split}.txt", "\n".join(names))
        for name in names:
            put(tmp_path / f"food-101/images/{name}.jpg", picture(int(name[-1]), "JPEG"))
    splits = open_data(tmp_path)
    assert splits["train"].classes == ("apple_pie", "baby_back_ribs", "waffles")
    assert facts(tmp_path)["train"] == ([f"images/{name}.jpg" for name in rows["train"]], [0, 2, 1])
    assert facts(tmp_path)["test"] == (["images/waffles/4.jpg"], [2])
    put(tmp_path / "food-101/meta/test.txt", "waffles/4\nwaffles")
    with refused("data.layout", "test.txt, line 2", "waffles"):
        open_data(tmp_path)


def stanford_cars(root, labelled="cars_test_annos_withlabels.mat", compressed=True):
    """Structures as the devkit's: the box, the class from 1 and the file's name."""
    from scipy.io import savemat

    def annotations(name, rows):
        fields = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname"]
        table = np.zeros((1, len(rows)), dtype=[(field, object) for field in fields])
        for i, (label, file) in enumerate(rows):
            table[0, i] = (
                np.uint8([[3]]),
                np.uint8([[1]]),
                np.uint16([[600]]),
                2.0,
                np.uint8([[label]]),
                file,
            )
        put(root / name, b"")
        savemat(root / name, {"annotations": table}, do_compression=compressed)

    cells = np.empty((1, 3), dtype=object)
    cells[0] = ["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012", "Audi TT Hatchback 2011"]
    put(root / "devkit/cars_meta.mat", b"")
    savemat(root / "devkit/cars_meta.mat", {"class_names": cells}, do_compression=compressed)
    annotations("devkit/cars_train_annos.mat", [(2, "00001.jpg"), (1, "00002.jpg"), (3, "00003.jpg")])
    annotations(labelled, [(3, "00001.jpg")])
    for split, count in (("train", 3), ("test", 1)):
        for i in range(1, count + 1):
            put(root / f"cars_{split}/{i:05d}.jpg", picture(i, "JPEG"))


@pytest.mark.parametrize("compressed", [True, False])
def test_cars_are_read_from_the_structures_of_the_devkit(tmp_path, compressed):
    pytest.importorskip("scipy")
    stanford_cars(tmp_path, compressed=compressed)
    splits = open_data(tmp_path)
    assert splits["train"].classes == (  # in the order of the devkit, not of the alphabet
        "AM General Hummer SUV 2000", "Ram C-V Cargo Van Minivan 2012", "Audi TT Hatchback 2011",
    )  # fmt: skip
    assert facts(tmp_path) == {
        "train": ([f"cars_train/0000{i}.jpg" for i in (1, 2, 3)], [1, 0, 2]),
        "test": (["cars_test/00001.jpg"], [2]),
    }
    (tmp_path / "cars_test_annos_withlabels.mat").unlink()
    with refused("file.not-found", "cars_test_annos_withlabels.mat"):
        open_data(tmp_path)


def test_cars_files_that_are_cut_off_or_of_other_classes_are_refused(tmp_path):
    pytest.importorskip("scipy")
    stanford_cars(tmp_path, compressed=False)
    path = tmp_path / "devkit/cars_train_annos.mat"
    whole = path.read_bytes()
    for cut in range(130, len(whole) - 8, 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cars_train_annos\.mat"):
            open_data(tmp_path)
    path.unlink()
    path.write_bytes((tmp_path / "devkit/cars_meta.mat").read_bytes())
    with refused("data.empty", "train"):
        open_data(tmp_path)
    (tmp_path / "devkit/cars_meta.mat").write_bytes(whole)
    with pytest.raises(ValueError, match=r"cars_meta\.mat.*class_names"):
        open_data(tmp_path)


def test_dtd_takes_the_first_of_its_ten_splits(tmp_path):
    for split, number in (("train", 1), ("val", 2), ("test", 3)):
        put(
            tmp_path / f"labels/{split}1.txt",
            f"banded/banded_000{number}.jpg\nzigzagged/zigzagged_000{number}.jpg",
        )
        put(tmp_path / f"labels/{split}2.txt", f"zigzagged/zigzagged_000{number % 3 + 1}.jpg")
        for label in ("banded", "zigzagged"):
            put(tmp_path / f"images/{label}/{label}_000{number}.jpg", picture(number, "JPEG"))
    put(tmp_path / "imdb/imdb.mat", b"as published")
    splits = open_data(tmp_path)
    assert list(splits) == ["train", "val", "test"] and splits["val"].classes == ("banded", "zigzagged")
    assert facts(tmp_path)["val"] == ([f"images/{c}/{c}_0002.jpg" for c in ("banded", "zigzagged")], [0, 1])
    assert TASKS["dtd"].images == {"train": 1_880, "validation": 1_880, "test": 1_880}


@pytest.mark.parametrize("inner", ["", "2750", "EuroSAT_RGB"])
def test_eurosat_is_class_folders_without_an_official_split(tmp_path, inner):
    for label in ("AnnualCrop", "SeaLake"):
        for i in (1, 2):
            put(tmp_path / inner / label / f"{label}_{i}.jpg", picture(i, "JPEG"))
    (source,) = open_data(tmp_path).values()
    assert source.classes == ("AnnualCrop", "SeaLake") and source.labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_of_a_published_folder_is_to_be_unpacked(tmp_path, kind):
    oxford_pets(tmp_path / "pets")
    path = tmp_path / f"pets.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in (tmp_path / "pets").rglob("*.*"):
                archive.write(file, file.relative_to(tmp_path))
    else:
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "pets", "pets")
    with refused("data.layout", "Oxford-IIIT Pets", path, "unzip" if kind == "zip" else "tar -xf"):
        open_data(path)


def test_folders_that_only_share_names_are_what_they_were(tmp_path):
    for name in ("train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "meta/notes.txt"):
        put(tmp_path / "a" / name, picture(1) if name.endswith("png") else "notes")
    assert set(open_data(tmp_path / "a")) == {"train", "test"}
    for name in ("images/cat/1.png", "images/dog/2.png", "labels/cat.txt"):
        put(tmp_path / "b" / name, picture(1) if name.endswith("png") else "notes")
    assert open_data(tmp_path / "b")["all"].classes == ("cat", "dog")
