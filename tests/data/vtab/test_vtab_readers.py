"""The published formats: pixels, keys and labels are what small files made in them say."""

import gzip
import pickle
import struct
import sys
import tracemalloc
import zlib
from types import SimpleNamespace

import formats
import numpy as np
import pytest
from formats import picture, put
from refusals import refused

from vitkit.data.decode import BadImage, decode
from vitkit.datasets.image_files import (
    caltech101,
    clevr,
    count,
    dtd,
    eurosat,
    kitti,
    nearest,
    pets,
    resisc45,
    retinopathy,
    sun397,
)
from vitkit.datasets.matlab import flowers102, read_mat, svhn
from vitkit.datasets.pixel_files import (
    NORB_FILES,
    SPRITES,
    camelyon,
    cifar100,
    dsprites,
    numbered,
    read_norb,
    smallnorb,
    stored,
)
from vitkit.datasets.tfrecord import dmlab, masked_crc
from vitkit.datasets.vtab import TASKS
from vitkit.errors import Error


def names(source) -> list[str]:
    return [source.classes[label] for label in source.labels]


def gray(source, index: int) -> int:
    return int(decode(source.fetch(index))[0, 0, 0])


def cut(path, by: int = 7) -> None:
    path.write_bytes(path.read_bytes()[:-by])


# --- files in folders and lists


def test_caltech_takes_thirty_of_each_class_whatever_they_are_called(tmp_path):
    for label in ("BACKGROUND_Google", "ant"):
        for i in range(33):
            put(
                tmp_path / "101_ObjectCategories" / label / f"image_{i:04d}.jpg",
                picture(i + len(label), "JPEG"),
            )
    put(tmp_path / "101_ObjectCategories" / "BACKGROUND_Google" / "tmp", b"not an image")
    found = caltech101(tmp_path)
    assert {split: len(part) for split, part in found.items()} == {"train": 60, "test": 6}
    assert found["train"].classes == ("ant", "background_google")
    before = {found["test"].fetch(i) for i in range(6)}
    folder = tmp_path / "101_ObjectCategories" / "ant"
    for i, file in enumerate(sorted(folder.iterdir(), reverse=True)):
        file.rename(folder / f"new_{i}.jpg")
    again = caltech101(tmp_path)
    assert {again["test"].fetch(i) for i in range(6)} == before
    for file in list(folder.iterdir())[:5]:
        file.unlink()
    with refused("data.empty", 28, "'ant'", 30):
        caltech101(tmp_path)


def test_dtd_is_split_by_the_lists_of_the_first_fold(tmp_path):
    lists = {
        "train1": ["banded/banded_0002.jpg", "dotted/dotted_0001.jpg"],
        "val1": ["dotted/dotted_0009.jpg"],
        "test1": ["banded/banded_0005.jpg"],
    }
    for i, (word, files) in enumerate(lists.items()):
        put(tmp_path / "dtd" / "labels" / f"{word}.txt", "\n".join(files) + "\n")
        for file in files:
            put(tmp_path / "dtd" / "images" / file, picture(10 * i))
    found = dtd(tmp_path)
    assert list(found["train"].keys) == [f"train/{name}" for name in lists["train1"]]
    assert names(found["train"]) == ["banded", "dotted"] and names(found["validation"]) == ["dotted"]
    assert gray(found["validation"], 0) == 10 and found["test"].classes == ("banded", "dotted")
    put(tmp_path / "dtd" / "labels" / "val1.txt", b"\xff\xfe\x00")
    with refused("data.layout", "val1.txt"):
        dtd(tmp_path)


def test_pets_come_from_annotations_in_the_order_of_their_numbers(tmp_path):
    put(tmp_path / "annotations/trainval.txt", "# comment\nbeagle_10 2 2 1\nAbyssinian_100 1 1 1\n")
    put(tmp_path / "annotations/test.txt", "beagle_7 2 2 1\n")
    put(tmp_path / "images/beagle_7.jpg", picture(77))
    found = pets(tmp_path)
    assert found["train"].classes == ("Abyssinian", "beagle") and names(found["train"]) == [
        "beagle",
        "Abyssinian",
    ]
    assert list(found["train"].keys) == ["train/beagle_10.jpg", "train/Abyssinian_100.jpg"]
    assert gray(found["test"], 0) == 77
    with pytest.raises(BadImage, match="cannot be opened"):
        found["train"].fetch(0)
    put(tmp_path / "annotations/test.txt", "beagle_7 two 2 1\n")
    with refused("data.layout", "test.txt, line 1", "beagle_7 two 2 1"):
        pets(tmp_path)


def test_sun_scenes_have_their_folders_as_class(tmp_path):
    for word, name in (
        ("tr", "/a/abbey/sun_1.jpg"),
        ("va", "/c/cabin/indoor/sun_2.jpg"),
        ("te", "/a/abbey/sun_3.jpg"),
    ):
        put(tmp_path / f"sun397_tfds_{word}.txt", name + "\n")
        put(tmp_path / "SUN397" / name[1:], picture(5))
    found = sun397(tmp_path)
    assert found["train"].classes == ("/a/abbey", "/c/cabin/indoor") and names(found["test"]) == ["/a/abbey"]
    assert (
        found["validation"].keys[0] == "validation//c/cabin/indoor/sun_2.jpg" and gray(found["test"], 0) == 5
    )
    (tmp_path / "sun397_tfds_va.txt").unlink()
    with refused("file.not-found", "sun397_tfds_va.txt", "docs/research/vtab.md"):
        sun397(tmp_path)


@pytest.mark.parametrize(("read", "inner"), [(eurosat, "2750"), (resisc45, "NWPU-RESISC45"), (resisc45, ".")])
def test_satellite_images_lie_in_folders_by_class(tmp_path, read, inner):
    for label in ("River", "Forest"):
        put(tmp_path / inner / label / f"{label}_1.jpg", picture(3, "JPEG"))
        put(tmp_path / inner / label / "notes.txt", "no image")
    (source,) = read(tmp_path).values()
    assert list(source.keys) == ["train/Forest_Forest_1.jpg", "train/River_River_1.jpg"]
    assert source.classes == ("Forest", "River") and gray(source, 1) == 3


def test_eyes_come_from_tables_whose_public_rows_are_to_validate_on(tmp_path):
    put(tmp_path / "trainLabels.csv", "image,level\n10_left,0\n10_right,4\n")
    put(tmp_path / "retinopathy_solution.csv", "image,level,Usage\n1_left,2,Public\n1_right,3,Private\n")
    put(tmp_path / "train/10_right.jpeg", picture(9, "JPEG"))
    (tmp_path / "test").mkdir()
    found = retinopathy(tmp_path)
    assert names(found["train"]) == ["0", "4"] and found["train"].keys[1] == "train/10_right"
    assert (
        names(found["validation"]) == ["2"] and names(found["test"]) == ["3"] and gray(found["train"], 1) == 9
    )
    put(tmp_path / "trainLabels.csv", "image,level\n10_left,5\n")
    with refused("data.labels", "trainLabels.csv, line 2", "0 to 4"):
        retinopathy(tmp_path)
    put(tmp_path / "trainLabels.csv", "name,level\n10_left,5\n")
    with refused("data.layout", "trainLabels.csv", "image and level", "name, level"):
        retinopathy(tmp_path)


# --- pixels in one file


def test_cifars_binary_version_is_read_and_its_pickle_refused(tmp_path):
    formats.cifar100(tmp_path, 250, 3)
    put(tmp_path / "fine_label_names.txt", "\n".join(f"thing{i}" for i in range(100)))
    found = cifar100(tmp_path)
    assert len(found["train"]) == 250 and names(found["train"])[101] == "thing1"
    assert found["train"].fetch(60)[31, 31].tolist() == [60, 110, 160] and found["test"].keys[2] == "test/2"
    cut(tmp_path / "test.bin")
    with refused("data.corrupt", "test.bin", 9215):
        cifar100(tmp_path)
    put(tmp_path / "other" / "cifar-100-python" / "train", b"\x80\x02")
    with refused("data.unsafe", "pickle", "cifar-100-binary.tar.gz"):
        cifar100(tmp_path / "other")


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_is_read_without_scipy_and_its_tens_are_zeros(tmp_path, compressed):
    formats.svhn(tmp_path, 40, 12, compressed)
    found = svhn(tmp_path)
    assert names(found["train"])[:11] == ["1", "2", "3", "4", "5", "6", "7", "8", "9", "0", "1"]
    assert found["train"].fetch(33)[1, 2].tolist() == [33, 33, 33] and found["train"].fetch(33)[2, 1, 0] == 0
    assert found["test"].keys[11] == "test/11" and found["test"].fetch(0).flags["C_CONTIGUOUS"]


def test_the_matlab_reader_agrees_with_scipy(tmp_path):
    from scipy.io import loadmat, savemat

    rng = np.random.default_rng(0)
    kinds = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f8", "i8", "u8")
    output = {f"x{kind}": rng.integers(0, 99, (3, 1, 4)).astype(kind) for kind in kinds}
    output |= {"small": np.array([[7.0]]), "words": "text", "table": {"a": 1}, "turned": 1j * np.ones((2, 2))}
    for compressed in (True, False):
        savemat(tmp_path / "x.mat", output, do_compression=compressed)
        expected, found = loadmat(tmp_path / "x.mat"), read_mat(tmp_path / "x.mat")
        assert set(found) == {*(f"x{kind}" for kind in kinds), "small"}
        assert all(
            np.array_equal(found[k], expected[k]) and found[k].dtype == expected[k].dtype for k in found
        )


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_files_that_are_cut_off_or_no_such_files_are_refused(tmp_path, compressed):
    formats.svhn(tmp_path, 20, 5, compressed)
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    for end in (140, 200, len(whole) // 2, len(whole) - 20):
        put(tmp_path / "train_32x32.mat", whole[:end])
        with pytest.raises(Error) as caught:
            svhn(tmp_path)
        assert caught.value.code in ("data.corrupt", "data.layout")  # damaged, or the arrays are not there
        assert "train_32x32.mat" in str(caught.value)
    for content, why in (
        (b"", "not a MATLAB 5 file"),
        (b"MATLAB 7.3 MAT-file" + bytes(200), "which is HDF5"),
    ):
        put(tmp_path / "x.mat", content)
        with refused("data.layout", tmp_path / "x.mat", why):
            read_mat(tmp_path / "x.mat")
    rng = np.random.default_rng(0)
    for _ in range(60):  # any bytes may be wrong: either it is read or an error says why
        damaged = bytearray(whole)
        for place in rng.integers(0, min(len(whole), 400), 3):
            damaged[place] = rng.integers(256)
        put(tmp_path / "x.mat", bytes(damaged))
        try:
            read_mat(tmp_path / "x.mat")
        except Error as error:
            assert "x.mat" in str(error)


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def variable(kind: int, shape: tuple[int, int], content: bytes) -> bytes:
    """A MATLAB array of a kind, which says of itself that it has this shape."""
    start = (
        element(6, struct.pack("<II", kind, 0)) + element(5, struct.pack("<ii", *shape)) + element(1, b"x")
    )
    return element(14, start + content)


def nested(depth: int) -> bytes:
    """A cell in a cell in a cell ...; longer by 56 bytes each, written from the inside."""
    inner, heads = variable(6, (1, 1), element(9, bytes(8))), []
    size, start = len(inner), variable(1, (1, 1), b"")[8:]
    for _ in range(depth):
        size += len(start)
        heads.append(struct.pack("<II", 14, size) + start)
        size += 8
    return b"".join(reversed(heads)) + inner


@pytest.mark.parametrize(
    "content",
    [
        nested(20_000),  # with scipy.io the process would end here
        variable(6, (2**31 - 1, 2**31 - 1), element(9, bytes(16))),
        variable(6, (2, 1), struct.pack("<II", 9, 2**31) + bytes(16)),
        variable(2, (2**14, 2**13), struct.pack("<HHI", 5, 4, 32) + element(1, b"a".ljust(31, b"\0"))),
        struct.pack("<II", 15, 2**31) + bytes(16),
    ],
    ids=["nesting", "shape", "length", "fields", "compressed"],
)
def test_matlab_files_that_claim_too_much_are_refused(tmp_path, content):
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    path = put(tmp_path / "x.mat", head + content)
    tracemalloc.start()
    with refused("data.corrupt", path):
        read_mat(path)
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


def test_a_matlab_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vitkit.datasets.matlab.MOST", 2**20)
    packed = zlib.compress(variable(9, (1, 2**22), element(2, bytes(2**22))))
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    path = put(tmp_path / "x.mat", head + struct.pack("<II", 15, len(packed)) + packed)
    with refused("data.corrupt", path):
        read_mat(path)


def test_svhn_with_other_counts_of_images_and_labels_is_refused(tmp_path):
    from scipy.io import savemat

    formats.svhn(tmp_path, 20, 5)
    savemat(tmp_path / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones((5, 1))})
    with refused("data.layout", "test_32x32.mat", (32, 32, 3, 4), (5, 1)):
        svhn(tmp_path)


def test_flowers_are_split_by_numbers_from_one(tmp_path):
    formats.flowers102(tmp_path)
    found = flowers102(tmp_path)
    assert found["train"].keys[0] == "train/image_00001.jpg" and names(found["train"])[:3] == [
        "001",
        "002",
        "003",
    ]
    assert {split: len(part) for split, part in found.items()} == {"train": 10, "validation": 10, "test": 10}
    assert gray(found["test"], 0) == 21
    formats.flowers102(tmp_path / "b", 25)
    (tmp_path / "b" / "setid.mat").write_bytes((tmp_path / "setid.mat").read_bytes())
    with refused("data.labels", "tstid", "setid.mat", "imagelabels.mat"):
        flowers102(tmp_path / "b")


@pytest.mark.parametrize("zipped", [False, True])
def test_norb_is_read_from_its_own_format_and_the_first_camera(tmp_path, zipped):
    formats.smallnorb(tmp_path, 40, 20, zipped)
    azimuth, elevation = smallnorb(tmp_path, "azimuth"), smallnorb(tmp_path, "elevation")
    assert azimuth["train"].labels[:20].tolist() == [*range(18), 0, 1] and len(azimuth["train"].classes) == 18
    assert elevation["test"].labels[:10].tolist() == [*range(9), 0] and len(elevation["test"].classes) == 9
    assert azimuth["train"].fetch(21).shape == (96, 96, 3) and (azimuth["train"].fetch(21) == 21).all()


@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_norb_files_are_refused(tmp_path, zipped):
    formats.smallnorb(tmp_path, 5, 5, zipped)
    path = tmp_path / (f"{NORB_FILES['test']}-dat.mat" + ".gz" * zipped)
    cut(path, 20)
    with refused("data.corrupt", "testing-dat"):
        smallnorb(tmp_path, "azimuth")
    for content in (b"", b"\0" * 40, formats.matrix(np.zeros((3, 2), np.uint8))[:10]):
        put(path, gzip.compress(content) if zipped else content)
        with refused("data.corrupt", "testing-dat"):
            smallnorb(tmp_path, "elevation")
    put(path, gzip.compress(formats.matrix(np.zeros((4, 2, 96, 96), np.uint8))) if zipped
        else formats.matrix(np.zeros((4, 2, 96, 96), np.uint8)))  # fmt: skip
    with refused("data.layout", (4, 2, 96, 96), (5, 4)):
        smallnorb(tmp_path, "elevation")


def test_a_norb_matrix_that_claims_more_than_there_can_be_is_refused(tmp_path):
    huge = formats.matrix(np.zeros((1, 1, 1), np.uint8))[:8] + (2**31 - 1).to_bytes(4, "little") * 3
    with refused("data.corrupt", "x.mat", (2**31 - 1,) * 3):
        read_norb(put(tmp_path / "x.mat", huge))


def test_sprites_are_grouped_by_sixteen_and_their_pickle_is_not_read(tmp_path):
    trap = tmp_path / "sprung"
    formats.dsprites(tmp_path, 1280, trap)
    (place,), (turn,) = (dsprites(tmp_path, rule).values() for rule in ("location", "orientation"))
    assert place.labels[:32].tolist() == [i // 2 for i in range(32)]  # 32 places, two to a class
    assert turn.labels[:40].tolist() == [int(i / 2.5) for i in range(40)]  # 40 turns: 3, 2, 3, 2, ...
    assert np.bincount(turn.labels[:40], minlength=16).tolist() == [3, 2] * 8
    pixels = place.fetch(130)
    assert pixels.shape == (64, 64, 3) and pixels[2, 2].tolist() == [255] * 3 and pixels.sum() == 3 * 255
    assert pixels.dtype == np.uint8 and not trap.exists()


def test_damaged_sprites_are_refused(tmp_path):
    formats.dsprites(tmp_path, 64)
    cut(tmp_path / SPRITES)
    with refused("data.corrupt", SPRITES):
        dsprites(tmp_path, "location")
    black, six = np.zeros((3, 4, 4), np.uint8), np.zeros((3, 6))
    for arrays, code, values in (
        ({"imgs": black, "latents_classes": six[:2]}, "data.layout", ("3 images", (2, 6))),
        ({"imgs": black.astype(float), "latents_classes": six}, "data.layout", ("uint8", "float64")),
        ({"imgs": black + np.uint8(2), "latents_classes": six}, "data.corrupt", ("0 and 1",)),
        ({"imgs": black, "latents_classes": six + 40}, "data.labels", (40, 31)),
        ({"imgs": black}, "data.corrupt", ("latents_classes",)),
    ):
        np.savez(tmp_path / SPRITES, **arrays)
        with refused(code, SPRITES, *values):
            dsprites(tmp_path, "location")


def test_camelyon_needs_h5py_and_says_so(tmp_path, monkeypatch):
    for word in ("train", "valid", "test"):
        for axis in "xy":
            put(tmp_path / f"camelyonpatch_level_2_split_{word}_{axis}.h5", b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with refused("request.extra-missing", "h5py", "pip install 'vitkit[vtab]'"):
        camelyon(tmp_path)


@pytest.mark.parametrize("real", [False, True])
def test_camelyon_is_read(tmp_path, monkeypatch, real):
    """With the library where it is installed, and by its interface where not."""
    images = {w: np.full((4, 96, 96, 3), n, np.uint8) for n, w in enumerate(("train", "valid", "test"))}
    labels = np.array([0, 1, 1, 0], np.uint8).reshape(4, 1, 1, 1)
    held = {}
    h5py = pytest.importorskip("h5py") if real else SimpleNamespace(File=lambda path, mode: held[path])
    monkeypatch.setitem(sys.modules, "h5py", h5py)
    for word in images:
        for axis, values in (("x", images[word]), ("y", labels)):
            path = tmp_path / f"camelyonpatch_level_2_split_{word}_{axis}.h5"
            held[path] = {axis: values}
            if real:
                with h5py.File(path, "w") as file:
                    file[axis] = values
            else:
                put(path, b"")
    found = camelyon(tmp_path)
    assert list(found["validation"].keys) == [f"validation/valid_{i}" for i in range(4)]
    assert names(found["test"]) == ["normal", "tumour", "tumour", "normal"]
    assert (found["test"].fetch(1) == 2).all() and found["test"].fetch(1).shape == (96, 96, 3)


def test_labels_beyond_the_classes_are_refused():
    assert len(stored("x", "train", np.array([0, 9]), numbered(10), None)) == 2
    assert len(stored("x", "train", np.array([], np.int64), numbered(10), None)) == 0
    for labels in ([-1, 3], [0, 10]):
        with refused("data.labels", "x, train", f"from {min(labels)} to {max(labels)}", "10 classes"):
            stored("x", "train", np.array(labels), numbered(10), None)


# --- scenes and records


def test_clevr_counts_from_three_and_bins_the_nearest_depth(tmp_path):
    depths = [[7.9, 30, 40], [8.0] * 4, [8.01] * 5, [8.5] * 6, [8.6, 20, 9] + [10] * 4, [9.4] * 8, [9.6] * 9,
              [10.0] * 10, [10.1, 11, 12]]  # fmt: skip
    formats.clevr(tmp_path, {"train": depths, "val": [[20.0, 12, 15]]})
    counted, binned = clevr(tmp_path, count), clevr(tmp_path, nearest)
    assert (
        counted["train"].labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0] and len(counted["train"].classes) == 8
    )
    assert binned["train"].labels.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5]  # a bound belongs to the bin below
    assert binned["validation"].labels.tolist() == [5] and len(binned["validation"].classes) == 6
    assert counted["train"].keys[3] == "train/CLEVR_train_000003.png" and gray(counted["train"], 3) == 3


@pytest.mark.parametrize("number, edge", list(enumerate([8.0, 8.5, 9.0, 9.5, 10.0])))
def test_every_edge_of_clevrs_distances_is_as_published(tmp_path, number, edge):
    formats.clevr(tmp_path, {"train": [[edge] * 3, [edge + 0.01] * 3], "val": [[edge - 0.01] * 3]})
    binned = clevr(tmp_path, nearest)
    assert binned["train"].labels.tolist() == [number, number + 1]
    assert binned["validation"].labels.tolist() == [number]


def test_scenes_out_of_range_or_cut_off_are_refused(tmp_path):
    formats.clevr(tmp_path, {"train": [[9.0] * 2], "val": [[9.0] * 3]})
    with refused("data.labels", "'CLEVR_train_000000.png'", "0..7"):
        clevr(tmp_path, count)
    cut(tmp_path / "scenes/CLEVR_train_scenes.json")
    with refused("data.corrupt", "CLEVR_train_scenes.json"):
        clevr(tmp_path, nearest)


def test_kitti_bins_the_nearest_vehicle_and_splits_by_video(tmp_path):
    kinds: list = [
        [("Car", 7.9)], [("Van", 8.0), ("Pedestrian", 1.0)], [("Truck", 8.1)], [("Car", 20.01), ("Van", 60)],
        [("Cyclist", 3.0), ("DontCare", -1000)], [], [("Car", -2.0)], [("Tram", 4), ("Car", 20)],
    ]  # fmt: skip
    expected = [0, 0, 1, 2, 3, 3, 0, 1]
    formats.kitti(tmp_path, [kinds[i % 8] for i in range(80)], videos=20)
    found = kitti(tmp_path)
    images = {split: [int(key.rpartition("/")[2][:6]) for key in part.keys] for split, part in found.items()}
    assert sorted(i for part in images.values() for i in part) == list(range(80))
    assert {split: len(part) for split, part in images.items()} == {"train": 64, "validation": 8, "test": 8}
    videos = {split: {i % 20 for i in part} for split, part in images.items()}
    assert not videos["train"] & (videos["validation"] | videos["test"]) and len(videos["test"]) == 2
    for split, part in found.items():
        assert part.labels.tolist() == [expected[i % 8] for i in images[split]]
    assert found["train"].keys[0] == f"train/{images['train'][0]:06d}.png"


def test_three_videos_of_kittis_are_one_for_each_split_and_two_are_too_few(tmp_path):
    formats.kitti(tmp_path / "three", [[("Car", 7.9)]] * 6, videos=3)
    assert {split: len(part) for split, part in kitti(tmp_path / "three").items()} == {
        "train": 2, "validation": 2, "test": 2,
    }  # fmt: skip
    formats.kitti(tmp_path / "two", [[("Car", 7.9)]] * 6, videos=2)
    with refused("data.empty", "2 videos"):
        kitti(tmp_path / "two")


def test_kittis_files_must_be_in_order(tmp_path):
    formats.kitti(tmp_path, [[("Car", 5.0)]] * 20, videos=10)
    put(tmp_path / "training/label_2/000003.txt", "Car 0.00 0\n")
    with refused("data.layout", "000003.txt, line 1", "Car 0.00 0"):
        kitti(tmp_path)
    put(tmp_path / "mapping/train_rand.txt", "1,2,99")
    with refused("data.layout", "train_rand.txt", "train_mapping.txt"):
        kitti(tmp_path)


def test_the_checksum_is_crc_32c():
    crc = 0xE3069283  # of these nine digits, by its definition
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_dmlab_is_read_from_records_in_several_files(tmp_path):
    formats.dmlab(tmp_path)
    found = dmlab(tmp_path)
    assert {split: len(part) for split, part in found.items()} == {"train": 20, "validation": 6, "test": 6}
    assert found["train"].labels.tolist() == [i % 6 for i in range(20)]
    assert found["train"].keys[15] == "train/00015.jpg" and gray(found["train"], 15) == 15


def test_damaged_records_are_refused_or_left_out(tmp_path):
    formats.dmlab(tmp_path)
    path = tmp_path / "dmlab-test.tfrecord-00000-of-00001"
    whole = path.read_bytes()
    for end in (5, 14, len(whole) - 3):
        put(path, whole[:end])
        with refused("data.corrupt", path):
            dmlab(tmp_path)
    put(path, b"\xff" * 20 + whole)
    with refused("data.corrupt", path, "byte 0"):
        dmlab(tmp_path)
    put(path, formats.record(formats.example(label=1)))
    with refused("data.layout", path, "'filename'"):
        dmlab(tmp_path)
    put(path, formats.record(b"\x0a\xff\xff"))
    with refused("data.corrupt", path):
        dmlab(tmp_path)
    put(path, formats.record(formats.example(image=b"", filename=b"a", label=6)))
    with refused("data.labels", "label 6", "6 classes"):
        dmlab(tmp_path)
    place = whole.index(b"\xff\xda") + 4  # inside the pixels of the first image
    put(path, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    found = dmlab(tmp_path)["test"]
    with pytest.raises(BadImage, match="wrong checksum at byte"):
        found.fetch(0)
    assert gray(found, 1) == 1


def test_records_need_a_library_and_say_so(tmp_path, monkeypatch):
    formats.dmlab(tmp_path)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with refused("request.extra-missing", "google-crc32c", "pip install 'vitkit[vtab]'"):
        dmlab(tmp_path)


def test_a_folder_without_the_files_is_told_what_is_missing(tmp_path):
    (tmp_path / "x").mkdir()
    for task in TASKS.values():
        with pytest.raises(ValueError, match=r"has no |no images for"):
            task.read(tmp_path / "x")


READERS = {
    "cifar100": cifar100, "svhn": svhn, "flowers102": flowers102, "dmlab": dmlab,
    "smallnorb": lambda root: smallnorb(root, rule="azimuth"),
    "dsprites": lambda root: dsprites(root, rule="location"),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_source_is_the_same_in_a_process_that_was_not_forked(tmp_path, name):
    getattr(formats, name)(tmp_path)
    for source in READERS[name](tmp_path).values():
        source.fetch(0)
        copy = pickle.loads(pickle.dumps(source))
        assert copy.keys[1] == source.keys[1] and (copy.labels == source.labels).all()
        for index in (0, 1, len(source) - 1):
            assert np.array_equal(copy.fetch(index), source.fetch(index))
