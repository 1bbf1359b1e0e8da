"""COCO annotations are read with all their variants, masks as pycocotools draws them; damage is refused."""

import json
import pickle
import shutil

import numpy as np
import pytest
from annotated_data import coco, one_image, write_coco, write_photo
from PIL import Image

from vitkit.data.decode import decode
from vitkit.data.run_lengths import (
    class_counts,
    compress_counts,
    counts_of,
    mask_of,
    parse_counts,
    polygon_mask,
)
from vitkit.datasets.opening import open_data
from vitkit.errors import Error


def images_of(split: str, count: int, prefix: str = "") -> list[dict]:
    return [
        {"id": n, "file_name": f"{prefix}{split}{n}.jpg", "width": 60, "height": 40} for n in range(count)
    ]


def boxes_of(count: int) -> list[dict]:
    return [
        {"id": n + 1, "image_id": n, "category_id": (1, 4)[n % 2], "bbox": [2 * n, 3, 10, 5.5], "area": 40,
         "iscrowd": 0} for n in range(count)
    ]  # fmt: skip


LAYOUTS = {
    "annotations": ("images/{split}/", "annotations/{split}.json", ""),
    "instances": ("{split}2017/", "annotations/instances_{split}2017.json", ""),
    "beside": ("{split}/", "{split}.json", ""),
    "roboflow": ("{split}/", "{split}/_annotations.coco.json", ""),
    "inner": ("pack/{split}/images/", "pack/{split}/annotations.json", "images/"),
    "paths": ("data/images/{split}/", "data/annotations/{split}.json", "C:\\work\\images\\{split}\\"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_recognised(tmp_path, layout):
    folder, file, prefix = LAYOUTS[layout]
    for n, split in enumerate(("train", "valid", "test")):
        for i in range(2):
            write_photo(tmp_path / folder.format(split=split) / f"{split}{i}.jpg", 10 * n + i)
        write_coco(
            tmp_path / file.format(split=split),
            coco(images_of(split, 2, prefix.format(split=split)), boxes_of(2)),
        )
    splits = open_data(tmp_path)
    assert set(splits) == {"train", "val", "test"}
    source = pickle.loads(pickle.dumps(splits["val"]))
    assert source.classes == ("cat", "dog") and source.targets.kinds == {"boxes"} and source.targets.most == 1
    assert [key.rpartition("/")[2] for key in source.keys] == ["valid0.jpg", "valid1.jpg"]
    target = source.take(np.array([1])).targets.read(0)
    assert target.size == (40, 60) and target.boxes.tolist() == [[2, 3, 12, 8.5]] and target.instances is None
    assert (
        target.labels.tolist() == [1] and target.areas.tolist() == [40] and target.crowd.tolist() == [False]
    )


def test_an_archive_is_read_in_place(tmp_path):
    one_image(tmp_path / "pack", [{"bbox": [1, 2, 3, 4]}])
    for kind in ("zip", "tar"):
        source = open_data(shutil.make_archive(str(tmp_path / "pack"), kind, tmp_path, "pack"))["train"]
        assert pickle.loads(pickle.dumps(source)).targets.read(0).boxes.tolist() == [[1, 2, 4, 6]]


def test_the_same_name_in_two_splits_is_the_image_of_the_split(tmp_path):
    for n, split in enumerate(("train", "val")):
        write_photo(tmp_path / f"images/{split}/1.jpg", n)
        listed = [{"id": 1, "file_name": "1.jpg", "width": 60, "height": 40}]
        write_coco(tmp_path / f"annotations/{split}.json", coco(listed, []))
    splits = open_data(tmp_path)
    assert {split: list(source.keys) for split, source in splits.items()} == {
        "train": ["images/train/1.jpg"], "val": ["images/val/1.jpg"]
    }  # fmt: skip
    (tmp_path / "images/val/1.jpg").unlink()
    write_photo(tmp_path / "images/val/2.jpg", 5)
    with pytest.raises(Error) as caught:  # not that of train
        open_data(tmp_path)
    assert caught.value.code == "data.labels" and "1.jpg" in str(caught.value)


def test_boxes_are_clipped_or_dropped_and_counted(tmp_path):
    boxes = [
        [-5, -5, 10, 10],
        [0, 0, 0, 5],
        [3, 3, -2, 5],
        [70, 3, 5, 5],
        [50, 30, 10.05, 10],
        [55, 35, 20, 2.5],
    ]
    source = open_data(one_image(tmp_path, [{"bbox": box} for box in boxes]))["train"]
    target, problems = source.targets.read.checked(0)
    expected = np.float32([[0, 0, 5, 5], [50, 30, 60, 40], [55, 35, 60, 37.5]])
    assert (target.boxes == expected).all() and target.areas.tolist() == [25, 100, 12.5]
    assert sorted(problems) == ["box-clipped"] * 2 + ["box-empty"] * 2 + ["box-outside"]


def test_a_missing_box_is_that_of_the_shape_and_missing_fields_have_values(tmp_path):
    shape = {"segmentation": [[1, 1, 5, 1, 5, 4, 1, 4]]}
    runs = {"segmentation": {"size": [40, 60], "counts": [81, 3, 37, 3, 2276]}, "iscrowd": 1}
    source = open_data(one_image(tmp_path, [shape, runs]))["train"]
    target = source.targets.read(0)
    assert source.targets.kinds == {"boxes", "instances"}
    assert target.boxes.tolist() == [[1, 1, 5, 4], [2, 1, 4, 4]] and target.areas.tolist() == [12, 6]
    assert target.crowd.tolist() == [False, True] and target.instances.sum((1, 2)).tolist() == [12, 6]


def test_masks_are_given_only_if_every_object_has_one(tmp_path):
    rows = [{"bbox": [1, 1, 4, 3], "segmentation": [[1, 1, 5, 1, 5, 4, 1, 4]]}, {"bbox": [1, 1, 4, 3]}]
    source = open_data(one_image(tmp_path, rows))["train"]
    assert source.targets.kinds == {"boxes"} and source.targets.read(0).instances is None


def test_an_image_without_objects_stays(tmp_path):
    target = open_data(one_image(tmp_path, []))["train"].targets.read(0)
    assert target.boxes.shape == (0, 4) and target.labels.shape == (0,) and target.areas.shape == (0,)


def test_ids_with_gaps_and_the_unused_root_of_roboflow(tmp_path):
    one_image(tmp_path, [{"bbox": [1, 1, 2, 2], "category_id": 90}])
    path = tmp_path / "annotations/train.json"
    data = json.loads(path.read_text("utf-8"))
    data["categories"] = [
        {"id": 90, "name": "b", "supercategory": "cells"}, {"id": 0, "name": "cells", "supercategory": "x"},
        {"id": 3, "name": "c", "supercategory": "cells"},
    ]  # fmt: skip
    write_coco(path, data)
    source = open_data(tmp_path)["train"]
    assert source.classes == ("c", "b") and source.targets.read(0).labels.tolist() == [1]
    assert ("unused-root", ("cells",)) in source.targets.read.notes
    data["annotations"][0]["category_id"] = 0  # then it is a class like others
    write_coco(path, data)
    assert open_data(tmp_path)["train"].classes == ("cells", "c", "b")


def test_notes_on_ids_and_images_that_are_not_listed(tmp_path):
    one_image(tmp_path, [{"bbox": [1, 1, 2, 2], "id": n} for n in (0, 5, 5, "x", 6)])
    write_photo(tmp_path / "images/train/other.jpg", 2)
    notes = dict(open_data(tmp_path)["train"].targets.read.notes)
    assert notes == {"odd-ids": ("0", "5", "x"), "unlisted-images": ("images/train/other.jpg",)}


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_annotations_of_the_stored_picture_are_turned_with_it(tmp_path, orientation):
    """A white rectangle in the picture is where its box and its mask are."""
    rows = [{"bbox": [8, 8, 16, 8], "segmentation": [[8, 8, 24, 8, 24, 16, 8, 16]]}]
    one_image(tmp_path, rows)
    picture = np.zeros((40, 60, 3), np.uint8)
    picture[8:16, 8:24] = 255
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(picture).save(tmp_path / "images/train/a.jpg", exif=exif, quality=95)
    source = open_data(tmp_path)["train"]
    target, problems = source.targets.read.checked(0)
    white = decode(source.fetch(0))[..., 0] > 127
    if orientation > 4:
        y, x = np.nonzero(white)
        assert target.boxes.tolist() == [[x.min(), y.min(), x.max() + 1, y.max() + 1]]
        assert (target.instances[0] == white).all() and problems == ("exif-turned",)
    else:
        assert target.boxes.tolist() == [[8, 8, 24, 16]]
        assert problems == (("exif-unclear",) if orientation > 1 else ())


def test_annotations_of_another_size_are_refused(tmp_path):
    source = open_data(one_image(tmp_path, [], width=61))["train"]
    with pytest.raises(Error) as caught:
        source.targets.read(0)
    assert caught.value.code == "data.labels"
    assert all(word in str(caught.value) for word in ("a.jpg", "61 x 40", "60 x 40"))


BAD_ROWS = [
    {"bbox": [1, 2, 3]}, {"bbox": [1, 2, 3, "4"]}, {"bbox": [1, 2, 1e300, 4]}, {"bbox": [True, 2, 3, 4]}, {},
    {"bbox": [1, 2, 3, 4], "category_id": []},
    {"bbox": [1, 2, 3, 4], "category_id": 2}, {"bbox": [1, 2, 3, 4], "category_id": "1"},
    {"bbox": [1, 2, 3, 4], "image_id": 8}, {"bbox": [1, 2, 3, 4], "image_id": "7"},
    {"bbox": [1, 2, 3, 4], "image_id": [7]}, {"bbox": [1, 2, 3, 4], "iscrowd": 2},
    {"bbox": [1, 2, 3, 4], "area": -1}, {"bbox": [1, 2, 3, 4], "segmentation": [[1, 1, 2, 2]]},
    {"bbox": [1, 2, 3, 4], "segmentation": [[1, 1, 2, 2, 3, 3, 4]]},
    {"bbox": [1, 2, 3, 4], "segmentation": [1, 1, 2, 2, 3, 3]},
    {"bbox": [1, 2, 3, 4], "segmentation": {"size": [10**6, 10**6], "counts": "04"}},
    {"bbox": [1, 2, 3, 4], "segmentation": {"size": [40, 60], "counts": [-1, 2401]}},
    {"segmentation": {"size": [40, 60], "counts": [1, 2]}},
    {"segmentation": {"size": [40, 60], "counts": "~~~"}},
]  # fmt: skip


@pytest.mark.parametrize("row", BAD_ROWS, ids=str)
def test_damaged_annotations_are_refused_with_their_id(tmp_path, row):
    one_image(tmp_path, [{"bbox": [1, 2, 3, 4]}, {"id": 77} | row])
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == "data.labels" and "train.json" in str(caught.value)
    assert "77" in str(caught.value)


@pytest.mark.parametrize("counts", ["0", "d", "P" * 50, "ooooooooooo0", [1, 2]])
def test_damaged_run_lengths_are_refused_when_they_are_read(tmp_path, counts):
    row = {"bbox": [1, 2, 3, 4], "segmentation": {"size": [40, 60], "counts": counts}}
    source = open_data(one_image(tmp_path, [row]))["train"]
    with pytest.raises(Error) as caught:
        source.targets.read(0)
    assert caught.value.code == "data.labels"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"images": [], "annotations": {}, "categories": []}', '{"images": [], "annotations": []}',
     '{"images": [], "annotations": [1], "categories": []}', '{"images": [], "annotations": ' + "[" * 100_000,
     '{"images": [], "annotations": [{"bbox": [NaN]}], "categories": []}'],
    ids=range(7),
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path, text):
    one_image(tmp_path, [])
    marks = '{"images": 1, "annotations": 2}'  # as a file in annotations/ it must look like COCO
    (tmp_path / "annotations/train.json").write_text(text if "images" in text else text + marks, "utf-8")
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == "data.labels" and "train.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data["images"].append(data["images"][0]), "data.labels"),
        (lambda data: data["images"].append(data["images"][0] | {"id": 8}), "data.labels"),
        (lambda data: data["images"].append({"id": 8, "file_name": "gone.jpg"}), "data.labels"),
        (lambda data: data["images"].append({"id": 8, "file_name": "../../../etc/passwd"}), "data.labels"),
        (lambda data: data["images"].append({"id": 8}), "data.labels"),
        (lambda data: data["images"][0].update(width=1e30), "data.labels"),
        (lambda data: data["categories"].append({"id": 1, "name": "x"}), "data.classes"),
        (lambda data: data["categories"].append({"id": 9, "name": "cat"}), "data.classes"),
        (lambda data: data["categories"].append({"id": "9", "name": "x"}), "data.classes"),
        (lambda data: data["categories"].clear(), "data.classes"),
        (lambda data: data["categories"][0].update(supercategory=[], name=None), "data.classes"),
    ],
)
def test_lists_that_contradict_themselves_are_refused(tmp_path, change, code):
    path = one_image(tmp_path, []) / "annotations/train.json"
    data = json.loads(path.read_text("utf-8"))
    change(data)
    write_coco(path, data)
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == code


def test_splits_with_different_categories_are_refused(tmp_path):
    one_image(tmp_path, [])
    write_photo(tmp_path / "images/val/b.jpg", 2)
    listed = [{"id": 1, "file_name": "b.jpg", "width": 60, "height": 40}]
    write_coco(tmp_path / "annotations/val.json", coco(listed, [], ("dog", "cat")))
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == "data.classes"


def test_a_json_of_another_kind_beside_folders_of_classes(tmp_path):
    for n, name in enumerate(("train/cat/1.png", "train/dog/2.png")):
        write_photo(tmp_path / name, n)
    (tmp_path / "train.json").write_text('{"epochs": 3}', "utf-8")
    assert open_data(tmp_path)["train"].classes == ("cat", "dog")


def test_known_masks():
    """Computed with pycocotools 2.0.11."""
    box = np.array([[1, 1], [5, 1], [5, 4], [1, 4]])
    mask = polygon_mask(box, (6, 8))
    expected = np.zeros((6, 8), bool)
    expected[1:4, 1:5] = True
    assert (mask == expected).all() and (polygon_mask(box - 0.5, (6, 8)) == expected).all()
    assert compress_counts(counts_of(mask)) == "73300000a0"
    triangle = polygon_mask(np.array([[1, 1], [6, 1], [1, 5]]), (6, 8))
    assert triangle.sum(1).tolist() == [0, 4, 3, 2, 1, 0]
    small = np.zeros((3, 4), bool)
    small[[1, 2, 0], [1, 1, 2]] = True
    assert counts_of(small).tolist() == [4, 3, 5] and compress_counts(counts_of(small)) == "435"
    assert counts_of(np.ones((2, 2), bool)).tolist() == [0, 4]
    assert compress_counts(np.array([0, 4])) == "04"


def test_run_lengths_and_polygons_are_those_of_pycocotools():
    oracle = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for case in range(300):
        height, width = map(int, rng.integers(1, 70, 2))
        mask = rng.random((height, width)) < rng.random()
        text = oracle.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
        assert compress_counts(counts_of(mask)) == text
        assert (mask_of(parse_counts(text, ""), (height, width)) == mask).all()
        points = rng.uniform(-0.2, 1.2, (int(rng.integers(3, 12)), 2)) * [width, height]
        points = np.round(points) if case % 3 == 0 else points
        runs = oracle.frPyObjects([points.ravel().tolist()], height, width)
        assert (polygon_mask(points, (height, width)) == oracle.decode(runs)[..., 0]).all()


def test_a_polygon_that_is_far_too_long_to_draw_is_refused():
    points = np.tile([[0.0, 0.0], [5000.0, 5000.0]], (5000, 1))
    with pytest.raises(Error) as caught:
        polygon_mask(points, (5000, 5000))
    assert caught.value.code == "data.labels"


def test_the_runs_of_all_classes_at_once_are_those_of_each_mask():
    rng = np.random.default_rng(3)
    for size in ((1, 1), (3, 5), (40, 30), (7, 64)):
        for classes in (1, 2, 5):
            mask = rng.integers(0, classes, size, dtype=np.uint8)
            runs = class_counts(mask)
            assert list(runs) == np.unique(mask).tolist()
            for number, counts in runs.items():
                assert counts.tolist() == counts_of(mask == number).tolist()
                assert parse_counts(compress_counts(counts), "").tolist() == counts.tolist()
    large = np.array([0, 2**31, 5, 2**20, 7, 1])
    assert parse_counts(compress_counts(large), "").tolist() == large.tolist()
