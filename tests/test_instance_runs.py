"""Instance segmentation from files with polygons and run lengths to a model, whose AP is pycocotools'."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, same
from together import losses

import vitkit
from vitkit.data.run_lengths import compress_counts, counts_of
from vitkit.data.sources.shapes import CLASSES, shapes
from vitkit.datasets.opening import open_data
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe
from vitkit.runs.folder import Interrupted
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration

SIDE = 48
TINY = ("width=32", "depth=2", "heads=2", "hidden=32")


def training(data, **changes) -> Recipe:
    base = replace(
        recipe("instances"), data=str(data), model="ViT-Ti/8", model_options=TINY, image_size=(SIDE, SIDE),
        batch=4, length=Duration(steps=4), evaluations=0, auto=(), stochastic_depth=0.1, color_jitter=1.0,
        task_options={"instances.queries": 6, "instances.joint": 1, "instances.points": 100},
    )  # fmt: skip
    return replace(base, schedule=replace(base.schedule, rate=2e-3, warmup=1), **changes)


def rectangles(number):
    """A picture of two rectangles of different classes, and their corners (x0, y0, x1, y1)."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 90, (40, 48, 3)).astype(np.uint8)
    corners = []
    for k, left in enumerate((2, 26)):
        x, y, w, h = left, int(rng.integers(2, 12)), int(rng.integers(8, 18)), int(rng.integers(8, 24))
        pixels[y : y + h, x : x + w] = (200, 60, 160) if k else (60, 220, 90)
        corners.append((x, y, x + w, y + h))
    return pixels, corners


def write_yolo(folder):
    for split, count in (("train", 8), ("test", 3)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            pixels, corners = rectangles(number)
            Image.fromarray(pixels).save(folder / "images" / split / f"{split}{number}.png")
            lines = []
            for k, (x0, y0, x1, y1) in enumerate(corners):
                points = np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)]) / (48, 40)
                lines.append(" ".join(map(str, [k, *points.ravel().tolist()])))
            (folder / "labels" / split / f"{split}{number}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("train: images/train\ntest: images/test\nnames: [one, two]\n")


def write_coco(folder):
    """The first object of each image as a polygon, the second as run lengths."""
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train", 8), ("test", 3)):
        (folder / "images" / split).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            pixels, corners = rectangles(number)
            name = f"{split}{number}.png"
            Image.fromarray(pixels).save(folder / "images" / split / name)
            images.append({"id": number + 1, "file_name": name, "width": 48, "height": 40})
            for k, (x0, y0, x1, y1) in enumerate(corners):
                mask = np.zeros((40, 48), bool)
                mask[y0:y1, x0:x1] = True
                runs = {"size": [40, 48], "counts": counts_of(mask).tolist()}
                polygon = [[x0, y0, x1, y0, x1, y1, x0, y1]]
                annotations.append({
                    "id": len(annotations) + 1, "image_id": number + 1, "category_id": k + 1, "iscrowd": 0,
                    "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0),
                    "segmentation": runs if k else polygon,
                })  # fmt: skip
        categories = [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module", params=[write_yolo, write_coco], ids=["yolo", "coco"])
def data(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "objects"
    request.param(folder)
    return folder


def test_a_stopped_run_on_polygons_ends_like_the_straight_one(data, tmp_path):
    for index in range(3):
        _, corners = rectangles(index)
        masks = open_data(data)["test"].targets.read(index).instances
        assert [int(mask.sum()) for mask in masks] == [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in corners]
    go(tmp_path / "straight", training(data))
    with sigterm_at(2), pytest.raises(Interrupted, match="SIGTERM at step"):
        go(tmp_path / "stopped", training(data))
    go(tmp_path / "stopped", training(data))
    one, other = tmp_path / "straight", tmp_path / "stopped"
    assert same(one, other) and losses(one) == losses(other) and len(losses(one)) == 4
    last = [complete(at / "checkpoints")[-1] / "state-00000.safetensors" for at in (one, other)]
    assert last[0].read_bytes() == last[1].read_bytes()
    tests = [json.loads((at / "result.json").read_text())["test"] for at in (one, other)]
    assert tests[0] == tests[1] and tests[0]["images"] == 3 and 0 <= tests[0]["ap"] <= 1
    go(tmp_path / "seed", training(data, seed=1))  # a control
    assert not same(one, tmp_path / "seed")
    assert "AP" in (one / "report.html").read_text() and "Worst images" in (one / "report.html").read_text()


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run on drawn shapes from scratch."""
    larger = ("width=64", "depth=4", "heads=4", "hidden=128")
    options = {"instances.queries": 10, "instances.joint": 2, "instances.points": 400,
               "instances.scale": (1.0, 1.0)}  # fmt: skip
    wanted = training("shapes", model_options=larger, image_size=(96, 96), batch=16, stochastic_depth=0.0,
                      length=Duration(steps=150), task_options=options, color_jitter=0.0)  # fmt: skip
    scratch = replace(wanted.optimizer, layer_decay=1.0)
    schedule = replace(wanted.schedule, rate=1e-3, warmup=15)
    out = tmp_path_factory.mktemp("learned") / "run"
    go(out, replace(wanted, optimizer=scratch, schedule=schedule))
    return out


@pytest.mark.slow
def test_drawn_shapes_are_learned(learned):
    test = json.loads((learned / "result.json").read_text())["test"]
    assert test["ap50"] > 0.3 and test["ap"] > 0.15  # of untrained models below 0.01
    assert torch.isfinite(vitkit.load(learned).queries).all()


@pytest.mark.slow
def test_the_ap_of_a_run_is_that_of_pycocotools_for_its_predictions(learned, tmp_path, capsys):
    coco = pytest.importorskip("pycocotools.coco")
    from pycocotools.cocoeval import COCOeval

    drawn, pictures = shapes()["test"], tmp_path / "pictures"
    pictures.mkdir()
    images, annotations = [], []
    for number in range(len(drawn)):
        Image.fromarray(drawn.fetch(number)).save(pictures / f"{number:03d}.png")
        target = drawn.targets.read(number)
        images.append({"id": number + 1, "width": 96, "height": 96})
        for mask, label, box in zip(target.instances, target.labels, target.boxes, strict=True):
            x0, y0, x1, y1 = box.tolist()
            runs = {"size": [96, 96], "counts": compress_counts(counts_of(mask))}
            annotations.append({
                "id": len(annotations) + 1, "image_id": number + 1, "category_id": int(label) + 1,
                "bbox": [x0, y0, x1 - x0, y1 - y0], "area": int(mask.sum()), "iscrowd": 0,
                "segmentation": runs,
            })  # fmt: skip
    truth = {"images": images, "annotations": annotations,
             "categories": [{"id": k + 1, "name": name} for k, name in enumerate(CLASSES)]}  # fmt: skip
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    words = ["predict", learned, pictures, "--device", "cpu", "--coco", tmp_path / "objects.json"]
    assert run(*words, "--json") == 0
    capsys.readouterr()
    api = coco.COCO(str(tmp_path / "truth.json"))
    evaluation = COCOeval(api, api.loadRes(str(tmp_path / "objects.json")), "segm")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    test = json.loads((learned / "result.json").read_text())["test"]
    ours = [test[name] for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium")]
    assert ours == pytest.approx(evaluation.stats[:5].tolist(), abs=2e-3)
