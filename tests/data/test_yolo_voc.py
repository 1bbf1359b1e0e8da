"""YOLO and Pascal VOC annotations are read with their variants; four formats of the same boxes agree."""

import pickle
import shutil

import numpy as np
import pytest
from annotated_data import coco, voc_xml, write_coco, write_photo

from vitkit.data.sources.small_yaml import read_yaml
from vitkit.datasets.opening import open_data
from vitkit.errors import Error

YAML = "path: .\ntrain: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]\n"


def yolo(
    folder, lines="0 0.5 0.5 0.2 0.4\n", config=YAML, labels="labels/{}/{}.txt", images="images/{}/{}.jpg"
):
    """One image of 60 x 40 in train and val."""
    for n, split in enumerate(("train", "val")):
        write_photo(folder / images.format(split, "a"), n)
        path = folder / labels.format(split, "a")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines, "utf-8")
    if config:
        (folder / "data.yaml").write_text(config, "utf-8")
    return folder


ROBOFLOW = (
    "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\nnames: ['cat', 'dog']\n"
)


@pytest.mark.parametrize(
    ("config", "images", "labels"),
    [
        (YAML, "images/{}/{}.jpg", "labels/{}/{}.txt"),
        (ROBOFLOW.replace("valid", "val"), "{}/images/{}.jpg", "{}/labels/{}.txt"),
        ("names:\n  0: cat\n  1: dog\npath: /content/pack\ntrain: images/train\nval: [images/val]\n",
         "images/{}/{}.jpg", "labels/{}/{}.txt"),
        ("names:\n- cat # a comment\n- 'dog'\ntrain:\n  - train\nval: val\nroboflow:\n  version: [1\n",
         "{}/{}.jpg", "{}/{}.txt"),
        ('names: {0: cat, 1: "dog"}\r\ntrain: train.txt\r\nval: val.txt\r\n',
         "images/{}/{}.jpg", "labels/{}/{}.txt"),
    ],
)  # fmt: skip
def test_configurations_are_understood(tmp_path, config, images, labels):
    yolo(tmp_path, config=config, images=images, labels=labels)
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text(f"./{images.format(split, 'a')}\n", "utf-8")
    splits = open_data(tmp_path)
    assert set(splits) == {"train", "val"}
    for split, source in splits.items():
        source = pickle.loads(pickle.dumps(source))
        assert source.classes == ("cat", "dog") and list(source.keys) == [images.format(split, "a")]
        target = source.targets.read(0)
        assert np.allclose(target.boxes, [[24, 12, 36, 28]]) and target.labels.tolist() == [0]
        assert np.allclose(target.areas, 12 * 16) and target.instances is None


def test_classes_without_a_yaml_and_darknet(tmp_path):
    yolo(tmp_path / "a", config="")
    (tmp_path / "a/classes.txt").write_text("cat\ndog\n", "utf-8")
    assert set(open_data(tmp_path / "a")) == {"train", "val"}

    darknet = yolo(tmp_path / "b", config="", images="obj_{}_data/{}.jpg", labels="obj_{}_data/{}.txt")
    shutil.move(darknet / "obj_val_data", darknet / "obj_valid_data")
    (darknet / "obj.names").write_text("cat\ndog\n", "utf-8")
    (darknet / "obj.data").write_text("classes = 2\n", "utf-8")
    assert {k: list(v.keys) for k, v in open_data(darknet).items()} == {
        "train": ["obj_train_data/a.jpg"], "val": ["obj_valid_data/a.jpg"]
    }  # fmt: skip

    (tmp_path / "a/classes.txt").unlink()
    with pytest.raises(Error) as caught:
        open_data(tmp_path / "a")
    assert caught.value.code == "data.classes"


def test_polygons_are_masks_and_boxes(tmp_path):
    source = open_data(yolo(tmp_path, "1 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5\n"))["train"]
    target = source.targets.read(0)
    assert source.targets.kinds == {"boxes", "instances"} and np.allclose(target.boxes, [[6, 4, 30, 20]])
    expected = np.zeros((40, 60), bool)
    expected[4:20, 6:30] = True
    assert (target.instances[0] == expected).all() and np.allclose(target.areas, 24 * 16)


def test_missing_and_empty_files_are_background(tmp_path):
    yolo(tmp_path)
    write_photo(tmp_path / "images/train/b.jpg", 5)
    write_photo(tmp_path / "images/train/c.jpg", 6)
    (tmp_path / "labels/train/b.txt").write_text("\n", "utf-8")
    (tmp_path / "labels/train/gone.txt").write_text("0 .5 .5 .1 .1\n", "utf-8")
    (tmp_path / "labels/classes.txt").write_text("cat\ndog\n", "utf-8")
    source = open_data(tmp_path)["train"]
    assert [len(source.targets.read(i).boxes) for i in range(3)] == [1, 0, 0]
    assert dict(source.targets.read.notes) == {
        "no-file": ("images/train/c.jpg",), "stray-annotations": ("labels/train/gone.txt",)
    }  # fmt: skip


def test_a_byte_order_mark_and_line_ends(tmp_path):
    target = open_data(yolo(tmp_path, "\ufeff1 0.5 0.5 0.2 0.4\r\n\r\n"))["train"].targets.read(0)
    assert target.labels.tolist() == [1]


@pytest.mark.parametrize(
    "line",
    ["0 30 20 12 16", "2 .5 .5 .1 .1", "-1 .5 .5 .1 .1", "0.5 .5 .5 .1 .1", "0,.5,.5,.1,.1", "0 .5 .5 .1",
     "0 .5 .5 .1 .1 .9", "0 nan .5 .1 .1", "0 inf .5 .1 .1", "0 .5 .5 .1 x", "0 .1 .1 .2 .2 .3 .3 .4",
     "0 .5 -.2 .1 .1", "1e400 .5 .5 .1 .1"],
)  # fmt: skip
def test_damaged_lines_are_refused_with_their_number(tmp_path, line):
    yolo(tmp_path, f"0 0.5 0.5 0.2 0.4\n{line}\n")
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == "data.labels" and "labels/train/a.txt, line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ("train: images/train\nnames: [cat, cat]\n", "data.classes"),
        ("train: images/train\nnames: [cat]\nnc: 2\n", "data.classes"),
        ("train: images/train\nnames: {1: cat, 2: dog}\n", "data.classes"),
        ("train: elsewhere\nnames: [cat, dog]\n", "data.layout"),
        ("val: images/val\nvalid: images/val\ntrain: images/train\nnames: [cat, dog]\n", "data.layout"),
        ("train: images/train\nnames: *anchor\n", "data.labels"),
        ("train: images/train\nnames: !!python/name:os.system\n", "data.labels"),
        ("train: images/train\nnames: [cat, dog\nval: x\n", "data.labels"),
        ("train: images/train\nnames: [cat]\nnames: [dog]\n", "data.labels"),
        ("train: images/train\nnames: [cat, dog]\nkpt_shape: [4, 2]\n", "data.labels"),
    ],
)
def test_configurations_that_are_wrong_are_refused(tmp_path, config, code):
    with pytest.raises(Error) as caught:
        open_data(yolo(tmp_path, config=config))
    assert caught.value.code == code


def test_paths_never_lead_out_of_the_data(tmp_path):
    write_photo(tmp_path / "secret/a.jpg", 3)
    config = f"train: images/train\nval: {tmp_path}/secret\nnames: [cat, dog]\n"
    splits = open_data(yolo(tmp_path / "pack", config=config))
    assert set(splits) == {"train"}
    assert ("absent-split", ("val",)) in splits["train"].targets.read.notes


def test_the_small_yaml():
    text = "---\n# c\na: 1 # x\n'b': \"x # y\"\nc: [1, 'p, q', \"r\"]\nd:\n  0: u\n  1: 'it''s'\n"
    text += "e:\n- s\n- t\nf:\n"
    assert read_yaml(text, "x", "abcdef") == {
        "a": "1", "b": "x # y", "c": ["1", "p, q", "r"], "d": {"0": "u", "1": "it's"},
        "e": ["s", "t"], "f": ""
    }  # fmt: skip
    assert read_yaml("a: &x [1]\nb: 2\n", "x", "b") == {"b": "2"}  # other keys are not read


def voc(folder, objects, size=(40, 60), image="JPEGImages/a.jpg", file="Annotations/a.xml", text=""):
    write_photo(folder / image, 1)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text or voc_xml("other.jpg", size, objects), "utf-8")
    return folder


def test_pixels_are_numbered_from_one_unless_a_box_begins_at_zero(tmp_path):
    objects = [("dog", (1, 1, 10, 20), 0), ("cat", (5, 6, 60, 40), 1)]
    source = open_data(voc(tmp_path / "one", objects))["all"]
    target = pickle.loads(pickle.dumps(source)).targets.read(0)
    assert source.classes == ("cat", "dog") and target.labels.tolist() == [1, 0]
    assert target.boxes.tolist() == [[0, 0, 10, 20], [4, 5, 60, 40]] and target.crowd.tolist() == [
        False,
        True,
    ]
    assert source.targets.most == 2 and target.areas.tolist() == [200, 56 * 35]

    zero = voc(tmp_path / "zero", objects)
    voc(zero, [("dog", (3, 0, 10, 20), 0)], image="JPEGImages/b.jpg", file="Annotations/b.xml")
    assert open_data(zero)["all"].targets.read(0).boxes.tolist() == [[1, 1, 10, 20], [5, 6, 60, 40]]


def test_splits_of_pascal_voc(tmp_path):
    for stem in "abc":
        voc(
            tmp_path,
            [("cat", (1, 2, 3, 4), 0)],
            image=f"JPEGImages/{stem}.jpg",
            file=f"Annotations/{stem}.xml",
        )
    lists = tmp_path / "ImageSets/Main"
    lists.mkdir(parents=True)
    for split, stems in {"train": "a", "val": "b", "trainval": "ab", "cat_train": "abc"}.items():
        (lists / f"{split}.txt").write_text("".join(f"{stem}  1\n" for stem in stems), "utf-8")
    assert {k: list(v.keys) for k, v in open_data(tmp_path).items()} == {
        "train": ["JPEGImages/a.jpg"], "val": ["JPEGImages/b.jpg"]
    }  # fmt: skip
    for split in ("train", "valid"):
        voc(tmp_path / "beside", [("cat", (1, 2, 3, 4), 0)], image=f"{split}/a.jpg", file=f"{split}/a.xml")
    assert set(open_data(tmp_path / "beside")) == {"train", "val"}


def test_parts_are_not_objects_and_missing_sizes_are_allowed(tmp_path):
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    box = "<bndbox><xmin>2.5</xmin><ymin>3</ymin><xmax>8</xmax><ymax>9</ymax></bndbox>"
    text = (
        f"<annotation><size><width>0</width></size><object>{part}<name>cat</name>{box}</object></annotation>"
    )
    target = open_data(voc(tmp_path, [], text=text))["all"].targets.read(0)
    assert target.boxes.tolist() == [[1.5, 2, 8, 9]]


BOMB = '<!DOCTYPE a [<!ENTITY b "' + "x" * 1000 + '"><!ENTITY c "&b;&b;&b;">]><annotation>&c;</annotation>'
OUTSIDE = '<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>'
OBJECT = "<annotation><object><name>cat</name><bndbox>{}</bndbox></object></annotation>"
CORNERS = "<xmin>1</xmin><ymin>1</ymin><xmax>{}</xmax><ymax>4</ymax>"


@pytest.mark.parametrize(
    "text",
    [BOMB, OUTSIDE, "<annotation>", "<annotation>" + "<a>" * 50 + "</a>" * 50 + "</annotation>",
     "<annotation><object><name>cat</name></object></annotation>", OBJECT.format("<xmin>1</xmin>"),
     OBJECT.format(CORNERS.format("nan")), OBJECT.format(CORNERS.format("1e99")),
     OBJECT.format(CORNERS.format("x")),
     "<annotation><object><bndbox/></object></annotation>"],
    ids=range(10),
)  # fmt: skip
def test_damaged_and_dangerous_files_are_refused(tmp_path, text):
    with pytest.raises(Error) as caught:
        open_data(voc(tmp_path, [], text=text))
    assert caught.value.code == ("data.unsafe" if "DOCTYPE" in text else "data.labels")
    assert "Annotations/a.xml" in str(caught.value)


def test_utf_16_hides_no_entity(tmp_path):
    voc(tmp_path, [])
    head = "<?xml version='1.0' encoding='utf-16'?>"
    write_photo(tmp_path / "JPEGImages/b.jpg", 2)
    (tmp_path / "Annotations/b.xml").write_bytes((head + BOMB).encode("utf-16"))
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == "data.unsafe"


def test_an_image_without_a_file_is_background_and_is_noted(tmp_path):
    write_photo(voc(tmp_path, [("cat", (1, 1, 3, 4), 0)]) / "JPEGImages/z.jpg", 4)
    (tmp_path / "Annotations/gone.xml").write_text(voc_xml("x", (40, 60), []), "utf-8")
    source = open_data(tmp_path)["all"]
    assert len(source.targets.read(1).boxes) == 0
    assert dict(source.targets.read.notes) == {
        "no-file": ("JPEGImages/z.jpg",), "stray-annotations": ("Annotations/gone.xml",)
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_four_formats_of_the_same_boxes_are_equal(tmp_path, seed):
    """COCO, COCO of Roboflow, YOLO and Pascal VOC; some boxes touch the edges."""
    rng = np.random.default_rng(seed)
    names, size = ("cat", "dog", "emu"), (int(rng.integers(20, 80)), int(rng.integers(20, 80)))
    height, width = size
    boxes = {}
    for n in range(4):
        count = 0 if n == 3 else int(rng.integers(1, 6))
        low = rng.integers(0, [width - 1, height - 1], (count, 2))
        high = rng.integers(low + 1, [width + 1, height + 1])
        boxes[n] = [
            (int(rng.integers(3)), (*a, *b)) for a, b in zip(low.tolist(), high.tolist(), strict=True)
        ]
    boxes[0] += [(label, (0, 0, width, height)) for label in range(3)]  # all classes, and both corners

    images = [{"id": n, "file_name": f"{n}.png", "width": width, "height": height} for n in boxes]
    rows = [{"image_id": n, "category_id": 3 * label + 1, "bbox": [x0, y0, x1 - x0, y1 - y0]}
            for n, part in boxes.items() for label, (x0, y0, x1, y1) in part]  # fmt: skip
    for n, part in boxes.items():
        for folder in ("coco/train", "roboflow/train", "yolo/images/train", "voc/train"):
            write_photo(tmp_path / folder / f"{n}.png", n, *size)
        shares = [
            f"{label} {(x0 + x1) / 2 / width!r} {(y0 + y1) / 2 / height!r} "
            f"{(x1 - x0) / width!r} {(y1 - y0) / height!r}"
            for label, (x0, y0, x1, y1) in part
        ]
        (tmp_path / "yolo/labels/train").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"yolo/labels/train/{n}.txt").write_text("\n".join(shares), "utf-8")
        objects = [(names[label], (x0 + 1, y0 + 1, x1, y1), 0) for label, (x0, y0, x1, y1) in part]
        (tmp_path / f"voc/train/{n}.xml").write_text(voc_xml(f"{n}.png", size, objects), "utf-8")
    (tmp_path / "yolo/data.yaml").write_text("train: images/train\nnames: [cat, dog, emu]\n", "utf-8")
    write_coco(tmp_path / "coco/train.json", coco(images, rows, names))
    write_coco(tmp_path / "roboflow/train/_annotations.coco.json", coco(images, rows, names))

    sources = [open_data(tmp_path / kind)["train"] for kind in ("coco", "roboflow", "yolo", "voc")]
    for source in sources:
        assert source.classes == names and source.targets.most == max(map(len, boxes.values()))
        for n, part in boxes.items():
            target = source.targets.read(n)
            assert target.size == size and target.labels.tolist() == [label for label, _ in part]
            assert target.boxes.dtype == target.areas.dtype == np.float32
            expected = np.array([box for _, box in part], np.float32).reshape(-1, 4)
            np.testing.assert_allclose(target.boxes, expected, atol=1e-5)
            np.testing.assert_allclose(
                target.areas, np.prod(expected[:, 2:] - expected[:, :2], axis=1), rtol=1e-5
            )
            assert not target.crowd.any() and target.mask is None and target.instances is None
