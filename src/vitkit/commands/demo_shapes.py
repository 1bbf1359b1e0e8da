"""`vitkit demo shapes`: train a detector and a segmenter on drawn shapes, and draw what they predict."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.commands import finetune
from vitkit.commands.demo import ignore, step
from vitkit.commands.evaluate import EvaluateOptions, evaluate
from vitkit.commands.predict import predict as predict_verb
from vitkit.data.sources.shapes import CLASSES, SIDE, shapes
from vitkit.data.sources.source import Source
from vitkit.inference.predict import predict
from vitkit.options import Training
from vitkit.report.target_overlay import draw_boxes, draw_mask
from vitkit.report.terminal import say
from vitkit.tasks.task import task_class
from vitkit.weights.load import load

OUT = Path("runs/demo-shapes")
MIN_AP50, MIN_MIOU = 0.7, 0.5  # chance is 0, and 0.22 for a mask of background alone
MODEL = ["model=ViT-Ti/8", "model_options=width=64,depth=4,heads=4,hidden=128"]
TRAIN = [
    f"image_size={SIDE}", "batch=8", "evaluations=2",
    "optimizer.layer_decay=1", "optimizer.weight_decay=0.01",
    "stochastic_depth=0", "color_jitter=0",
]  # fmt: skip
DETECT = ["schedule.rate=0.001", "detect.scale=0.9,1.1", "detect.channels=48"]
SEGMENT = ["schedule.rate=0.002", "segment.scale=0.9,1.1", "segment.dice=1"]
STEPS = {"detect": 600, "segment": 600}
PICTURES, LARGER = 6, 3  # test images that are drawn, and how many times as large
GAP = 12  # pixels between pictures


def run_shapes(emit: Callable[[Any], None] | None = None, out: Path = OUT) -> bool:
    """Train both models, evaluate them and draw predictions; returns whether both are accurate enough."""
    start_time, log = time.monotonic(), ignore if emit else say
    out.mkdir(parents=True, exist_ok=True)
    log("vitkit demo shapes: find circles, squares and triangles in drawn images, in five steps.\n")
    step(
        log,
        1,
        "Train a detector from scratch: boxes",
        f"vitkit finetune shapes --task detect --out {out}/detect ...",
    )
    train("detect", out, [*MODEL, *DETECT], quiet=bool(emit))

    weights = f"weights={out}/detect"
    step(log, 2, "Train a segmenter from its ViT: a class for each pixel",
         f"vitkit finetune shapes --task segment --weights {out}/detect --out {out}/segment ...")  # fmt: skip
    train("segment", out, [weights, *SEGMENT], quiet=bool(emit))

    step(log, 3, "Evaluate both on the test images", f"vitkit evaluate {out}/segment shapes")
    metrics = {task: measured(out / task, log) for task in STEPS}

    picture = write_picture(out / "picture.png", shapes()["test"])
    step(log, 4, "Predict the objects of a picture", f"vitkit predict {out}/detect {picture}")
    predict_verb(str(out / "detect"), (str(picture),), 3, "auto", csv=False, emit=ignore if emit else None)

    log("\n5. Draw truth and prediction side by side")
    write_overlays(out, shapes()["test"])

    ap50, miou = metrics["detect"]["ap50"], metrics["segment"]["miou"]
    log(f"\nAP50 {ap50:.3f} and mean IoU {miou:.3f} on {len(shapes()['test'])} test images, after "
        f"{time.monotonic() - start_time:.0f} s.\nTruth beside prediction: {out}/boxes.png, {out}/masks.png\n"
        f"Training reports: {out}/detect/report.html, {out}/segment/report.html")  # fmt: skip
    ok = ap50 >= MIN_AP50 and miou >= MIN_MIOU
    if emit:
        emit({"detect": metrics["detect"], "segment": metrics["segment"], "ok": ok})
    return ok


def train(task: str, out: Path, changes: Sequence[str], *, quiet: bool) -> dict[str, Any]:
    """Train one of the models; the result of a finished run is reused."""
    options = Training(
        out=out / task, task=task, seed=0, steps=STEPS[task], max_bad=0.0, keep="last", workers=0,
        set=(*TRAIN, *changes),
    )  # fmt: skip
    finetune.finetune("shapes", options, emit=ignore if quiet else None)
    return json.loads((out / task / "result.json").read_text(encoding="utf-8"))


def measured(run: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """The metrics of a run on the test images."""
    metrics: dict[str, Any] = {}
    evaluate(str(run), "shapes", EvaluateOptions(split="test", batch=50), emit=metrics.update)
    log(f"   {run.name}: {task_class(run.name)().summary(metrics, 'test images')}")
    return metrics


def write_picture(path: Path, source: Source) -> Path:
    Image.fromarray(np.asarray(source.fetch(0))).save(path)
    return path


def write_overlays(out: Path, source: Source) -> None:
    """boxes.png and masks.png: some test images in rows, truth at the left and prediction at the right."""
    assert source.targets is not None
    detector, segmenter = load(out / "detect"), load(out / "segment")
    boxes, masks = [], []
    for number in range(PICTURES):
        pixels, target = np.asarray(source.fetch(number)), source.targets.read(number)
        large = enlarged(pixels)
        detections = predict(detector, pixels)
        predicted = draw_boxes(
            large,
            LARGER * np.array([one["box"] for one in detections]).reshape(-1, 4),
            np.array([CLASSES.index(one["label"]) for one in detections], np.int64),
            CLASSES,
            np.array([one["score"] for one in detections]),
        )
        boxes.append((draw_boxes(large, LARGER * target.boxes, target.labels, CLASSES), predicted))
        assert target.mask is not None
        pair = (target.mask, np.asarray(predict(segmenter, pixels)).astype(np.uint8))
        masks.append(tuple(draw_mask(large, enlarged(mask), CLASSES) for mask in pair))
    save_rows(boxes, out / "boxes.png")
    save_rows(masks, out / "masks.png")


def enlarged(pixels: np.ndarray) -> np.ndarray:
    """An image or a mask some times as large, pixel by pixel."""
    return pixels.repeat(LARGER, axis=0).repeat(LARGER, axis=1)


def save_rows(rows: Sequence[Sequence[np.ndarray]], path: Path) -> None:
    """Pictures in rows and columns on white."""
    height = max(picture.shape[0] for row in rows for picture in row)
    width = max(picture.shape[1] for row in rows for picture in row)
    page = np.full((len(rows) * (height + GAP) - GAP, len(rows[0]) * (width + GAP) - GAP, 3), 255, np.uint8)
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            top, left = i * (height + GAP), j * (width + GAP)
            page[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    Image.fromarray(page).save(path)
