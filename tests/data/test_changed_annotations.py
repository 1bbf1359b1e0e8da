"""A run that goes on with other masks or boxes of the same images: refused with the name of the image."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from annotated_data import coco, random_mask, voc_xml, write_coco, write_mask, write_photo
from PIL import Image
from refusals import refused
from test_cli import run

from vitkit.data.sources.shapes import shapes
from vitkit.data.splits import join, target_fingerprints
from vitkit.datasets.opening import open_data
from vitkit.runs.provenance.fingerprint import FILE, check_data
from vitkit.runtime.runtime import Runtime

NAMES = ("a", "b", "c")
OUTLINE = [10, 10, 30, 10, 30, 30]
WORDS = [
    "--task", "segment", "--model", "ViT-Ti/8", "--image-size", "16", "--batch", "2", "--workers", "0",
    "--steps", "1", "--lr", "0.001", "--device", "cpu", "--set", "evaluations=0",
    "model_options=width=32,depth=1,heads=2,hidden=32",
]  # fmt: skip


def masks(folder: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(NAMES):
            write_photo(folder / f"images/{split}/{name}.jpg", number + 10 * (split == "test"))
            write_mask(folder / f"masks/{split}/{name}.png", random_mask(number, 2))
    (folder / "classes.txt").write_text("road\nsky\n")


def boxes(folder: Path) -> None:
    for split in ("train", "test"):
        images, rows = [], []
        for number, name in enumerate(NAMES, 1):
            write_photo(folder / f"images/{split}/{name}.jpg", number + 10 * (split == "test"))
            images.append({"id": number, "file_name": f"{name}.jpg", "width": 60, "height": 40})
            rows.append({"id": number, "image_id": number, "category_id": 1, "bbox": [5, 5, 30, 30],
                         "area": 900, "iscrowd": 0, "segmentation": [OUTLINE]})  # fmt: skip
        write_coco(folder / f"annotations/{split}.json", coco(images, rows))


def voc(folder: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(NAMES):
            write_photo(folder / f"{split}/{name}.jpg", number + 10 * (split == "test"))
            objects = [("cat", (5, 5, 30, 30), 0), ("dog", (1, 1, 20, 20), 0)]
            (folder / f"{split}/{name}.xml").write_text(voc_xml(f"{name}.jpg", (40, 60), objects))


def edit_pixel(folder: Path) -> None:
    path = folder / "masks/train/b.png"
    mask = np.array(Image.open(path))
    mask[7, 9] = 1 - mask[7, 9]
    write_mask(path, mask)


def edit_coco(**changes):
    def edit(folder: Path) -> None:
        path = folder / "annotations/train.json"
        content = json.loads(path.read_text())
        content["annotations"][1] |= changes
        path.write_text(json.dumps(content))

    return edit


def edit_voc(folder: Path) -> None:
    path = folder / "train/b.xml"
    path.write_text(path.read_text().replace("<difficult>0", "<difficult>1", 1))


CASES = {
    "mask": (masks, edit_pixel),
    "box": (boxes, edit_coco(bbox=[5, 5, 30, 31])),
    "class": (boxes, edit_coco(category_id=4)),
    "crowd": (boxes, edit_coco(iscrowd=1)),
    "polygon": (boxes, edit_coco(segmentation=[[*OUTLINE[:5], 31]])),
    "runs": (boxes, edit_coco(segmentation={"size": [40, 60], "counts": [0, 40, 2360]})),
    "difficult": (voc, edit_voc),
}


def trained(data: Path, out: Path) -> None:
    """A folder as a run leaves it that has learned from this data."""
    check(data, out)
    (out / "checkpoints/step-00000001").mkdir(parents=True)


def check(data: Path, out: Path, accept: bool | None = False) -> bool:
    return check_data(open_data(data), out, Runtime(), accept=accept, labelled=True, say=lambda text: None)[1]


@pytest.mark.parametrize("case", CASES)
def test_an_edited_annotation_is_refused_with_the_name_of_its_image(case, tmp_path):
    make, edit = CASES[case]
    data, out = tmp_path / "data", tmp_path / "run"
    make(data)
    out.mkdir()
    trained(data, out)
    assert check(data, out) is False, "the same data"
    before = (out / FILE).read_bytes()
    edit(data)
    with refused("data.changed", "1 image with other masks or boxes", "train/b.jpg", "--accept-changed-data"):
        check(data, out)
    assert (out / FILE).read_bytes() == before
    assert check(data, out, accept=True) is True and check(data, out) is False


def test_a_fingerprint_without_annotations_still_resumes_and_is_completed(tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    masks(data)
    out.mkdir()
    trained(data, out)
    content = (out / FILE).read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(content).splitlines()]
    for row in (*lines[0]["splits"].values(), *lines[1].values()):
        del row["targets"]
    (out / FILE).write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert check(data, out) is False
    completed = [json.loads(line) for line in gzip.decompress((out / FILE).read_bytes()).splitlines()]
    first = [json.loads(line) for line in gzip.decompress(content).splitlines()]
    assert completed[0]["splits"] == first[0]["splits"] and completed[1] == first[1]
    edit_pixel(data)
    with refused("data.changed", "train/b.jpg"):
        check(data, out)


def test_digests_follow_the_images_of_a_subset_and_of_two_sources():
    splits = shapes()
    first, second = splits["val"].take(np.arange(3)), splits["test"].take(np.array([4, 2]))
    known = [target_fingerprints(part) for part in (first, second)]
    assert len({one.tobytes() for one in np.concatenate(known)}) == 5
    both = target_fingerprints(join(first, second))
    assert both.tolist() == np.concatenate(known).tolist()
    assert target_fingerprints(join(first, second).take(np.array([3]))).tobytes() == known[1][0].tobytes()


def test_the_command_names_the_image_and_continues_with_the_flag(tmp_path, monkeypatch, capsys):
    masks(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    command = ("finetune", "data", "--out", "run", *WORDS)
    assert run(*command) == 0 and run(*command) == 0
    edit_pixel(tmp_path / "data")
    capsys.readouterr()
    assert run(*command) == 2
    assert "b.jpg" in capsys.readouterr().err
    assert run(*command, "--accept-changed-data") == 0
