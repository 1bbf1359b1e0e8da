"""The doctor finds each fault of masks and boxes by its kind and files, counts classes and draws samples."""

import json

import numpy as np
import pytest
from annotated_data import coco, one_image, random_mask, voc_xml, write_coco, write_mask, write_photo
from refusals import refused

from vitkit.commands.doctor import doctor
from vitkit.data.doctor import examine, usable
from vitkit.data.sources.source import digits
from vitkit.data.target_checks import check_kind, read_checked
from vitkit.datasets.opening import open_all, open_data, shard
from vitkit.errors import Error
from vitkit.report.target_overlay import class_colour, draw_boxes, draw_mask

SMALL = {"tiny", "few-in-all"}


def kinds(report) -> dict[str, tuple[str, ...]]:
    """The files of each finding on annotations."""
    return {finding.kind: finding.files for finding in report.findings if finding.kind not in SMALL}


def examined(folder, **options):
    return examine(open_data(folder), workers=2, **options)


def masks(folder, count=3, classes="sky\nroad\nvoid\n"):
    for split in ("train", "val"):
        for n in range(count):
            seed = n if split == "train" else 100 + n
            write_photo(folder / f"images/{split}/{n}.png", seed)
            write_mask(folder / f"masks/{split}/{n}.png", random_mask(seed, 3))
    (folder / "classes.txt").write_text(classes, "utf-8")
    return folder


def objects(folder, boxes, count=4):
    """Photographs of 512 x 400, each with these boxes, some x, y, w, h of category 1 or 4."""
    for n in range(count):
        write_photo(folder / f"images/train/{n}.png", n, 400, 512)
    listed = [{"id": n, "file_name": f"{n}.png", "width": 512, "height": 400} for n in range(count)]
    rows = [{"id": 1000 * n + i + 1, "image_id": n, "category_id": 1} | row
            for n in range(count) for i, row in enumerate(boxes)]  # fmt: skip
    write_coco(folder / "annotations/train.json", coco(listed, rows))
    return folder


GOOD = [{"bbox": [10, 10, 100, 80]}, {"bbox": [200, 100, 120, 90], "category_id": 4}]
ALL = tuple(f"images/train/{n}.png" for n in range(4))


def test_good_data_has_no_findings_and_its_classes_are_counted(tmp_path):
    report = examined(objects(tmp_path, GOOD))
    assert report.ok and kinds(report) == {} and report.splits["train"]["per_class"]["min"] == 4
    (facts,) = report.targets.values()
    assert (facts["images"], facts["objects"], facts["crowd"], facts["most"], facts["empty"]) == (
        4,
        8,
        0,
        2,
        0,
    )
    cat = facts["classes"]["cat"]
    assert cat == {"images": 4, "objects": 4, "side": pytest.approx(8000**0.5), "aspect": pytest.approx(1.25)}


def test_masks_are_counted_by_pixel(tmp_path):
    report = examined(masks(tmp_path))
    assert report.ok and kinds(report) == {}
    every = np.stack([random_mask(n, 3) for n in range(3)])
    facts = report.targets["train"]
    assert facts["ignored"] == pytest.approx((every == 2).mean())
    assert {name: row["pixels"] for name, row in facts["classes"].items()} == {
        "sky": pytest.approx((every == 0).mean()), "road": pytest.approx((every == 1).mean())
    }  # fmt: skip
    assert "targets" not in examine({}, workers=1).to_json()


@pytest.mark.parametrize(
    ("row", "kind", "severity"),
    [
        ({"bbox": [5, 5, 0, 9]}, "box-empty", "warning"),
        ({"bbox": [600, 5, 9, 9]}, "box-outside", "warning"),
        ({"bbox": [-40, 300, 90, 90]}, "box-clipped", "warning"),
        ({"bbox": [10, 10, 100, 80]}, "box-copies", "warning"),
        ({"bbox": [10, 10, 101, 80]}, "box-near-copies", "warning"),
        ({"bbox": [300, 300, 3, 30]}, "box-small", "warning"),
        ({"bbox": [0, 0, 512, 399]}, "box-whole", "note"),
        ({"bbox": [300, 20, 90, 90], "iscrowd": 1}, "crowd", "note"),
        ({"bbox": [300, 20, 90, 90], "id": 0}, "odd-ids", "note"),
    ],
)
def test_each_fault_of_a_box_is_a_finding(tmp_path, row, kind, severity):
    report = examined(objects(tmp_path, [*GOOD, row]))
    (finding,) = [f for f in report.findings if f.kind not in SMALL]
    assert (finding.kind, finding.severity) == (kind, severity) and report.ok
    assert finding.files == (("0",) if kind == "odd-ids" else ALL)
    assert kind == "odd-ids" or f"{4}" in finding.text


def test_a_box_of_another_class_is_no_copy(tmp_path):
    assert kinds(examined(objects(tmp_path, [*GOOD, {"bbox": [10, 10, 100, 80], "category_id": 4}]))) == {}


def test_findings_on_classes_images_and_counts(tmp_path):
    small = [{"bbox": [20 * n % 480, 10 + 20 * (n // 24), 15, 15]} for n in range(101)]
    report = examined(objects(tmp_path, small))
    assert set(kinds(report)) == {"many-objects", "class-unannotated", "class-small"}
    (absent,) = [f for f in report.findings if f.kind == "class-unannotated"]
    assert absent.classes == ("dog",)
    write_photo(tmp_path / "images/train/9.png", 99)
    assert kinds(examined(tmp_path))["unlisted-images"] == ("images/train/9.png",)


def test_images_without_objects(tmp_path):
    objects(tmp_path, GOOD)
    path = tmp_path / "annotations/train.json"
    data = json.loads(path.read_text("utf-8"))
    data["annotations"] = [row for row in data["annotations"] if row["image_id"] != 2]
    write_coco(path, data)
    report = examined(tmp_path)
    assert kinds(report) == {"no-objects": ("images/train/2.png",)}
    assert report.targets["train"]["empty"] == 1


def test_a_split_without_any_object_is_refused_before_training(tmp_path):
    objects(tmp_path, GOOD)
    for n in range(2):
        write_photo(tmp_path / f"images/val/{n}.png", 50 + n, 400, 512)
    listed = [{"id": n, "file_name": f"{n}.png", "width": 512, "height": 400} for n in range(2)]
    one = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [10, 10, 100, 80]}
    write_coco(tmp_path / "annotations/val.json", coco(listed, [one]))
    assert not usable(open_data(tmp_path), "x", "boxes")
    write_coco(tmp_path / "annotations/val.json", coco(listed, []))
    report = examined(tmp_path, deep=False)
    assert not report.ok and "nothing-annotated" in kinds(report)
    with refused("data.labels", "val", "2"):
        usable(open_data(tmp_path), "x", "boxes")


def test_orientation_and_sizes(tmp_path):
    one_image(tmp_path / "turned", [{"bbox": [1, 1, 20, 20]}])
    write_photo(tmp_path / "turned/images/train/a.jpg", 1, orientation=6)
    assert kinds(examined(tmp_path / "turned"))["exif-turned"] == ("images/train/a.jpg",)
    write_photo(tmp_path / "turned/images/train/a.jpg", 1, orientation=3)
    assert kinds(examined(tmp_path / "turned"))["exif-unclear"] == ("images/train/a.jpg",)
    write_photo(tmp_path / "turned/images/train/a.jpg", 1, 41)
    report = examined(tmp_path / "turned")
    (finding,) = [f for f in report.findings if f.kind == "bad-annotation"]
    assert not report.ok and finding.files == ("images/train/a.jpg",) and "60 x 41" in finding.text


def test_faults_of_masks(tmp_path):
    masks(tmp_path)
    write_mask(tmp_path / "masks/train/0.png", np.full((40, 60), 9, np.uint8))
    write_mask(tmp_path / "masks/train/1.png", np.full((40, 60), 255, np.uint8))
    write_mask(tmp_path / "masks/val/1.png", random_mask(1, 2, 20, 20))
    for n in (0, 2):
        write_mask(tmp_path / f"masks/val/{n}.png", np.zeros((40, 60), np.uint8))
    report = examined(tmp_path)
    assert not report.ok and kinds(report) == {
        "bad-annotation": ("images/train/0.png", "images/val/1.png"), "mask-ignored": ("images/train/1.png",),
        "mask-one-class": (), "class-unannotated": (),
    }  # fmt: skip


def test_masks_in_black_and_white(tmp_path):
    for n in range(3):
        write_photo(tmp_path / f"images/{n}.png", n)
        write_mask(tmp_path / f"masks/{n}.png", random_mask(n, 2) * 255)
    (tmp_path / "classes.txt").write_text("background\ncell\n", "utf-8")
    report = examined(tmp_path)
    assert "mask-white" in kinds(report) and not report.ok


@pytest.mark.parametrize("value", [1, 255])
def test_masks_of_a_single_class_are_refused_before_training(tmp_path, value):
    for n in range(3):
        write_photo(tmp_path / f"images/{n}.png", n)
        write_mask(tmp_path / f"masks/{n}.png", random_mask(n, 2) * value)
    (tmp_path / "classes.txt").write_text("cell\n", "utf-8")
    report = examined(tmp_path, deep=False)
    assert "mask-alone" in kinds(report) and not report.ok
    with refused("data.classes", "cell"):
        usable(open_data(tmp_path), "x", "mask")
    (tmp_path / "classes.txt").write_text("background\ncell\n", "utf-8")
    assert "mask-alone" not in kinds(examined(tmp_path, deep=False))


def test_quick_looks_at_no_image_and_training_accepts_what_the_doctor_accepts(tmp_path):
    folder = masks(tmp_path)
    write_mask(folder / "masks/train/stray.png", random_mask(1, 2))
    write_mask(folder / "masks/train/0.png", random_mask(1, 2, 9, 9))
    report = examined(folder, deep=False)
    assert report.ok and kinds(report) == {"stray-annotations": ("masks/train/stray.png",)}
    assert report.splits["train"] == {"images": 3, "classes": 2, "per_class": {}}
    assert [finding.kind for finding in usable(open_data(folder), "x", "mask")] == ["stray-annotations"]


def test_the_kind_of_annotation_that_a_task_needs(tmp_path):
    splits = open_data(masks(tmp_path))
    check_kind(splits, "mask", "x")
    for kind in ("boxes", "instances", ""):
        with pytest.raises(Error) as caught:
            usable(splits, "x", kind)
        assert caught.value.code == "data.labels"
    with pytest.raises(Error) as caught:
        usable({"all": digits()}, "digits", "mask")
    assert caught.value.code == "data.labels"


def test_images_to_predict_have_no_label_and_masks_are_not_among_them(tmp_path):
    splits = open_all(masks(tmp_path))
    assert {split: (len(part), part.classes) for split, part in splits.items()} == {
        "train": (3, ()), "val": (3, ())
    }  # fmt: skip
    assert set(splits["train"].labels.tolist()) == {-1}


def test_shards_would_lose_masks_and_are_refused(tmp_path):
    with pytest.raises(Error) as caught:
        shard(str(masks(tmp_path / "a")), tmp_path / "out")
    assert caught.value.code == "data.layout" and not (tmp_path / "out").exists()


def test_what_a_part_of_a_source_says_of_an_image(tmp_path):
    source = open_data(objects(tmp_path, [*GOOD, {"bbox": [5, 5, 0, 9]}]))["train"]
    part = source.take(np.array([3, 1])).take(np.array([1]))
    target, problems = read_checked(part, 0)
    assert len(target.boxes) == 2 and problems == ("box-empty",)


def test_the_verb_prints_json_and_writes_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = objects(tmp_path / "cells", [*GOOD, {"bbox": [300, 20, 90, 90], "segmentation": []}], count=14)
    said = []
    assert doctor(str(folder), emit=said.append, workers=1)
    page = (tmp_path / said[0]["samples"]).read_text("utf-8")
    assert page.count("data:image/jpeg;base64,") == 12 and "cat" in page
    assert json.loads(json.dumps(said[0]))["targets"]["train"]["objects"] == 42
    assert doctor(str(folder), workers=1, out=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere/targets.html").exists() and "28" in capsys.readouterr().out
    assert doctor(str(folder), quick=True, emit=said.append) and "samples" not in said[1]
    assert doctor(str(folder), quick=True)


def test_the_verb_on_masks_and_on_masks_of_objects(tmp_path):
    assert doctor(str(masks(tmp_path / "a")), out=tmp_path / "out", workers=1)
    rows = [{"segmentation": [[10, 10, 50, 10, 50, 30]]}]
    assert doctor(str(one_image(tmp_path / "b", rows)), out=tmp_path / "out2", workers=1)
    assert (tmp_path / "out/targets.html").exists() and (tmp_path / "out2/targets.html").exists()


def test_the_verb_on_pascal_voc(tmp_path):
    write_photo(tmp_path / "a/1.jpg", 1)
    (tmp_path / "a/1.xml").write_text(voc_xml("1.jpg", (40, 60), [("cat", (1, 1, 60, 40), 1)]), "utf-8")
    said = []
    assert doctor(str(tmp_path / "a"), out=tmp_path / "out", emit=said.append, workers=1)
    assert {"crowd", "box-whole"} <= {row["kind"] for row in said[0]["findings"]}


def test_boxes_are_drawn_at_their_edges_small_ones_on_top():
    pixels = np.zeros((100, 120, 3), np.uint8)
    boxes = np.array([[30, 30, 60, 60], [10, 20, 110, 90]], np.float32)
    drawn = draw_boxes(pixels, boxes, np.array([1, 0]), ("cat", "dog"), scores=np.array([0.9, 0.5]))
    assert drawn.shape == pixels.shape and drawn.dtype == np.uint8 and not pixels.any()
    assert tuple(drawn[60, 10]) == tuple(drawn[60, 109]) == tuple(drawn[89, 60]) == class_colour(0)
    assert tuple(drawn[45, 30]) == tuple(drawn[45, 59]) == tuple(drawn[59, 45]) == class_colour(1)
    assert not drawn[75, 50].any() and not drawn[60, 111].any() and not drawn[91].any()
    filled = draw_boxes(pixels, boxes[:1], np.array([1]), ("cat", "dog"), masks=np.ones((1, 100, 120), bool))
    assert filled[95, 100].any()
    empty = draw_boxes(pixels, np.zeros((0, 4)), np.zeros(0, int), ())
    assert (empty == pixels).all()
    with pytest.raises(Error):
        draw_boxes(pixels, boxes, np.array([1]), ())


def test_odd_boxes_and_names_are_drawn():
    boxes = np.array([[-50, -50, 900, 900], [0, 0, 0, 0], [119.5, 99.5, 120, 100]])
    names = ("Ω" * 100, "\u202e\x00", "a")
    assert draw_boxes(np.zeros((100, 120, 3), np.uint8), boxes, np.array([0, 1, 7]), names).shape == (
        100,
        120,
        3,
    )


def test_a_mask_is_drawn_with_a_legend():
    pixels = np.full((60, 80, 3), 100, np.uint8)
    mask = np.zeros((60, 80), np.uint8)
    mask[:, 40:], mask[:10] = 3, 255
    drawn = draw_mask(pixels, mask, ("a", "b", "c", "d"))
    assert drawn.shape[0] > 60 and drawn.shape[1:] == (80, 3) and drawn.dtype == np.uint8
    assert len(np.unique(drawn[20:60, :40].reshape(-1, 3), axis=0)) == 1
    assert (drawn[30, 10] != drawn[30, 60]).any() and drawn[:10].reshape(-1, 3).max() <= 160
    legend = {tuple(colour) for colour in drawn[60:].reshape(-1, 3).tolist()}
    assert {class_colour(0), class_colour(3)} <= legend and class_colour(1) not in legend


def test_the_first_hundred_colours_differ():
    assert len({class_colour(n) for n in range(255)}) == 255
