"""Reports of segmentation and detection: tables, predictions beside the truth, and names that are escaped."""

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import run

from vitkit.data.targets import Target
from vitkit.metrics.detection import detection_metrics
from vitkit.metrics.detection_analysis import analysed_detections, envelope, outcomes
from vitkit.metrics.overlaps import Detections, overlap
from vitkit.report.target_overlay import background, class_colour, mask_over
from vitkit.report.target_pictures import DASH, box_pair, legend, training_picture
from vitkit.report.task_table import TaskTable
from vitkit.runs.page import write_run_page

SMALL = (
    "--model", "ViT-Ti/8", "--image-size", "96x96", "--batch", "8", "--steps", "2", "--subset", "24",
    "--workers", "0", "--set", "model.width=32", "model.depth=1", "model.heads=2", "model.hidden=32",
)  # fmt: skip
HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(
    scope="module", params=["segment", "detect", pytest.param("instances", marks=pytest.mark.slow)]
)
def done(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / request.param
    assert run("finetune", "shapes", "--task", request.param, "--out", out, *SMALL, "--json") == 0
    return out


def kept(folder: Path, name: str):
    return json.loads((folder / f"{name}.json").read_text())


def picture(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_report_has_tables_examples_and_the_first_batch(done):
    page, task, test = (done / "report.html").read_text(), kept(done, "task"), kept(done, "result")["test"]
    for title in ("Classes", "Worst images", "Confusion matrix", "Training batch"):
        assert f"<h2>{title}</h2>" in page
    of_objects = ("Sizes of objects", "Kinds of errors")
    for title in {"segment": (), "detect": of_objects, "instances": of_objects}[task["name"]]:
        assert f"<h2>{title}</h2>" in page
    for name in ("circle", "square", "triangle"):
        assert f'<bdi class="name">{name}</bdi>' in page
    assert task["headline"][0] in page and test["images"] > 0
    table = TaskTable.from_json(task["tables"][0])
    assert {row["class"] for row in table.rows} == set(test["per_class"])


def test_the_worst_images_come_first_with_truth_and_prediction(done):
    groups = {group["title"]: group["images"] for group in kept(done, "samples")["groups"]}
    assert len(groups["Worst images"]) == 12
    keys = [one["key"] for group in groups.values() for one in group]
    assert len(set(keys)) == len(keys)
    for one in groups["Worst images"][:2]:
        sizes = {picture(one[name]).size for name in ("truth", "predicted")}
        assert sizes == {(288, 288)}, "96 pixels, enlarged by a whole number"


def test_the_training_batch_is_drawn_with_its_targets(done):
    batch = kept(done, "training-batch")
    assert [name for name, _ in batch["legend"]] == ["circle", "square", "triangle"]
    assert len(batch["images"]) == 8 and picture(batch["images"][0]["image"]).size == (192, 192)


def test_names_of_classes_are_escaped(done, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("checkpoints", "events", "report.html"))
    for name in ("task", "result", "samples", "training-batch"):
        path = folder / f"{name}.json"
        path.write_text(path.read_text().replace('"circle"', json.dumps(HOSTILE)))
    page = write_run_page(folder).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


# pictures


def test_wrong_boxes_are_dashed_and_right_ones_are_not():
    pixels = np.full((120, 200, 3), 128, np.uint8)
    boxes, labels = np.array([[20.0, 20, 100, 100]]), np.array([2])
    part = {"boxes": boxes, "labels": labels, "right": np.array([True])}
    right, wrong = box_pair(pixels, part, part | {"right": np.array([False])})
    assert right.shape == wrong.shape == pixels.shape
    along = [(row == class_colour(2)).all(-1) for row in (right[21, 25:95], wrong[21, 25:95])]
    assert along[0].all() and 0 < along[1].sum() < 70 and along[1][:1].all() == (DASH > 25 - 21)
    assert (right[60, 60] == 128).all() and (right[10, 10] == 128).all()


@pytest.mark.parametrize("box", [(0, 0, 1, 1), (-5, -5, 3, 300), (199, 119, 200, 120), (50, 50, 50, 50)])
def test_boxes_of_any_size_and_place_are_drawn(box):
    pixels, part = np.zeros((120, 200, 3), np.uint8), {"labels": np.array([0]), "right": np.array([True])}
    drawn, none = box_pair(
        pixels, part | {"boxes": np.array([box], float)},
        {"boxes": np.zeros((0, 4)), "labels": np.zeros(0, int), "right": np.zeros(0, bool)},
    )  # fmt: skip
    assert drawn.shape == pixels.shape and not none.any()


def test_the_background_is_left_clear():
    pixels, mask = np.full((4, 4, 3), 100, np.uint8), np.zeros((4, 4), np.uint8)
    mask[2:] = 1
    drawn = mask_over(pixels, mask, background(("Background", "cat")))
    assert (drawn[:2] == 100).all() and (drawn[2:] != 100).any()
    assert background(("sky", "road")) == -1 and [name for name, _ in legend(("background", "cat"))] == [
        "cat"
    ]


def test_padding_rows_of_a_batch_are_not_drawn():
    pixels = np.zeros((32, 48, 3), np.uint8)
    targets = {"boxes": np.full((3, 4), -1, np.float32), "classes": np.full(3, -1)}
    assert not training_picture(pixels, targets, 96).any()


# what explains a detector


def objects(*rows: tuple[float, float, float, float, int], crowd=()) -> Target:
    values = np.array(rows, np.float32).reshape(-1, 5)
    flags = np.array([row in crowd for row in range(len(rows))], bool)
    areas = (values[:, 2] - values[:, 0]) * (values[:, 3] - values[:, 1])
    return Target((100, 100), values[:, :4], values[:, 4].astype(np.int64), flags, areas)


def detected(*rows: tuple[float, float, float, float, float, int]) -> Detections:
    values = np.array(rows, np.float64).reshape(-1, 6)
    return Detections(values[:, :4], values[:, 4], values[:, 5].astype(np.int64))


TWO = objects((0, 0, 40, 40, 0), (50, 50, 90, 90, 1))
FOUND = detected(
    (0, 0, 40, 40, 0.9, 0), (0, 0, 40, 40, 0.6, 1), (50, 50, 90, 90, 0.7, 1), (60, 0, 90, 30, 0.1, 0)
)


def test_an_image_by_hand():
    metrics = analysed_detections([overlap(FOUND, TWO), overlap(detected(), TWO)], 2, 0.5, np.array([7, 3]))
    assert metrics.threshold == 0.7 and metrics.best_score[1] == pytest.approx(2 * 2 / (2 + 4))
    assert metrics.by_image.tolist() == [[2, 0, 0], [0, 0, 2]]
    assert metrics.confusion.tolist() == [[1, 0, 1], [0, 1, 1], [0, 0, 0]]
    assert metrics.errors.counts["missed"] == 2 and metrics.ignored == 0
    facts = metrics.to_json(("cat", "dog"))
    json.dumps(facts, allow_nan=False)
    assert facts["confusion"] == metrics.confusion.tolist() and "kinds" in facts["errors"]
    same = detection_metrics(metrics.overlaps, 2, 0.5).to_json(("cat", "dog"))
    assert {key: facts[key] for key in same} == same


def test_without_detections_there_is_no_threshold():
    metrics = analysed_detections([overlap(detected(), TWO)], 2)
    assert metrics.best_score == (0.0, 0.0) and metrics.by_image.tolist() == [[0, 0, 2]]
    assert all(envelope(curve) == [] for curve in metrics.curves)


def test_which_boxes_are_right_and_which_objects_seen():
    right, seen = outcomes(FOUND, TWO, 2)
    assert right.tolist() == [True, False, True, False] and seen.tolist() == [True, True]
    right, seen = outcomes(detected((50, 50, 90, 90, 0.5, 1)), objects((50, 50, 90, 90, 1), crowd=(0,)), 2)
    assert right.tolist() == [True] and seen.tolist() == [True], "a crowd is nobody's error"


def test_the_envelope_falls_and_ends_where_recall_does():
    rows = [(0, 0, 40, 40, 0.9, 0), (60, 0, 90, 30, 0.8, 0)]
    points = envelope(
        analysed_detections(
            [overlap(detected(*rows), objects((0, 0, 40, 40, 0), (50, 50, 90, 90, 0)))], 1
        ).curves[0]
    )
    assert points[0] == (0.0, 1.0) and points[-1] == (0.5, 1.0) and len(points) == 51
