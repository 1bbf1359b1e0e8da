"""COCO's numbers beside pycocotools and beside printed ones, VOC's, the confusion, and kinds of errors."""

import contextlib
import io
import json
from dataclasses import dataclass

import numpy as np
import pytest

from vitkit.data.targets import Target
from vitkit.errors import Error
from vitkit.metrics.detection import DetectionMetrics, detection_confusion, detection_metrics
from vitkit.metrics.detection_errors import KINDS, detection_errors
from vitkit.metrics.overlaps import Detections, Overlap, overlap
from vitkit.metrics.voc_precision import voc_ap50

STATS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar_1", "ar_10", "ar_100", "ar_small",
         "ar_medium", "ar_large")  # fmt: skip


@dataclass(frozen=True)
class Annotated:
    """As data.targets.Target, in float64."""

    boxes: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    instances: np.ndarray | None = None


Images = list[tuple[Detections, Annotated]]


def xyxy(boxes) -> np.ndarray:
    boxes = np.array(boxes, float).reshape(-1, 4)
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)


def annotated(boxes, labels, crowd=None) -> Annotated:
    boxes = np.array(boxes, float).reshape(-1, 4)
    crowd = np.zeros(len(boxes), bool) if crowd is None else np.array(crowd, bool)
    return Annotated(xyxy(boxes), np.array(labels, int), crowd, boxes[:, 2] * boxes[:, 3])


def detected(boxes, classes, scores) -> Detections:
    return Detections(xyxy(boxes), np.array(scores, float), np.array(classes, int))


def metrics_of(images: Images, classes: int) -> DetectionMetrics:
    return detection_metrics([overlap(*image) for image in images], classes)


def stats(metrics: DetectionMetrics) -> np.ndarray:
    values = [getattr(metrics, name) for name in STATS]
    return np.array([-1 if value is None else value for value in values])


def reference(images: Images, classes: int, kind: str = "bbox"):
    """pycocotools on the same boxes or masks."""
    tools = pytest.importorskip("pycocotools.coco")
    from pycocotools import mask as rle
    from pycocotools.cocoeval import COCOeval

    def shape(boxes, masks, row) -> dict:
        if kind == "segm":
            return {"segmentation": rle.encode(np.asfortranarray(masks[row].astype(np.uint8)))}
        x0, y0, x1, y1 = boxes[row]
        return {"bbox": [x0, y0, x1 - x0, y1 - y0]}

    annotations, results = [], []
    for i, (shown, real) in enumerate(images):
        for row in range(len(real.labels)):
            annotations.append({"id": len(annotations) + 1, "image_id": i,
                                "category_id": int(real.labels[row]), "area": real.areas[row],
                                "iscrowd": int(real.crowd[row]),
                                **shape(real.boxes, real.instances, row)})  # fmt: skip
        for row in range(len(shown.scores)):
            results.append({"image_id": i, "category_id": int(shown.classes[row]),
                            "score": shown.scores[row], **shape(shown.boxes, shown.masks, row)})  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        coco = tools.COCO()
        sizes = [{"id": i, "height": 60, "width": 70} for i in range(len(images))]
        categories = [{"id": k} for k in range(classes)]
        coco.dataset = {"info": {}, "images": sizes, "categories": categories, "annotations": annotations}
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def random_images(rng, number: int, classes: int, detections: int, tied: bool = False) -> Images:
    """Objects of all sizes, the last class without any; some detections near them, the others anywhere."""
    images = []
    for _ in range(number):
        count = int(rng.integers(0, 12))
        size, place = np.exp(rng.uniform(1.5, 5.5, (count, 2))), rng.random((count, 2)) * 400
        boxes = np.concatenate([place, place + size], 1)
        labels, crowd = rng.integers(0, max(1, classes - 1), count), rng.random(count) < 0.1
        areas = size.prod(1) * rng.uniform(0.5, 1, count)  # of the shape in the box
        areas[rng.random(count) < 0.1] = 32**2  # on the border of two ranges
        of = rng.integers(0, count, detections if count else 0)
        near = boxes[of] + np.tile(size[of], 2) * rng.normal(0, 0.06, (len(of), 4))
        place, size = rng.random((detections, 2)) * 400, np.exp(rng.uniform(1.5, 5.5, (detections, 2)))
        far = np.concatenate([place, place + size], 1)
        take = (rng.random(detections) < 0.3)[:, None] if count else np.zeros((detections, 1), bool)
        chosen = np.where(take, near if count else far, far)
        guess = rng.integers(0, classes, detections)
        own = take[:, 0] & (rng.random(detections) < 0.8)
        guess[own] = labels[of[own]] if count else 0
        scores = rng.random(detections) ** np.where(take[:, 0], 0.5, 3)
        images.append((Detections(chosen, scores.round(1) if tied else scores, guess),
                       Annotated(boxes, labels, crowd, areas)))  # fmt: skip
    return images


def test_equal_to_pycocotools_on_500_images():
    images = random_images(np.random.default_rng(0), 500, 4, 30)
    metrics, evaluation = metrics_of(images, 4), reference(images, 4)
    assert np.abs(stats(metrics) - evaluation.stats).max() < 1e-9
    precision = evaluation.eval["precision"][:, :, :, 0, 2]  # (T, R, K)
    assert metrics.class_ap[:3] == pytest.approx(precision.mean((0, 1))[:3], abs=1e-9)
    assert metrics.class_ap50[:3] == pytest.approx(precision[0].mean(0)[:3], abs=1e-9)
    assert np.isnan(metrics.class_ap[3]) and (precision[:, :, 3] == -1).all()
    assert metrics.objects.sum() == sum(np.count_nonzero(~real.crowd) for _, real in images)


@pytest.mark.parametrize(("classes", "detections", "tied"), [(1, 150, True), (3, 250, False), (4, 40, True)])
def test_equal_with_equal_scores_and_more_than_100_detections(classes, detections, tied):
    images = random_images(np.random.default_rng(classes), 20, classes, detections, tied)
    assert np.abs(stats(metrics_of(images, classes)) - reference(images, classes).stats).max() < 1e-9


def test_masks_equal_pycocotools():
    rng, images = np.random.default_rng(5), []
    for detections, real in random_images(rng, 30, 3, 12):
        rows, columns = np.mgrid[:60, :70]

        def ellipses(boxes, rows=rows, columns=columns):
            x0, y0, x1, y1 = boxes.T[:, :, None, None] / 8
            width, height = np.maximum(x1 - x0, 1), np.maximum(y1 - y0, 1)
            return ((columns - x0) / width - 0.5) ** 2 + ((rows - y0) / height - 0.5) ** 2 < 0.25

        instances = ellipses(real.boxes)
        images.append((
            Detections(detections.boxes, detections.scores, detections.classes, ellipses(detections.boxes)),
            Annotated(real.boxes, real.labels, real.crowd, instances.sum((1, 2)) * 1.0, instances),
        ))  # fmt: skip
    metrics = metrics_of(images, 3)
    assert metrics.ap > 0.05
    assert np.abs(stats(metrics) - reference(images, 3, "segm").stats).max() < 1e-9


def example_of_one_class(scores=None, order=slice(None), ahead: int = 0) -> Images:
    """Five objects, and seven detections: right, wrong, right, right, wrong, wrong, right."""
    real = annotated([[100 * i, 0, 50, 50] for i in range(5)], [0] * 5)
    rows = [[0, 0, 50, 50], [600, 60, 30, 30], [100, 0, 50, 50], [200, 0, 50, 50], [650, 60, 30, 30],
            [700, 60, 30, 30], [300, 0, 50, 50]]  # fmt: skip
    values = [0.9 - 0.1 * i for i in range(7)] if scores is None else scores
    rows = [[600, 60, 30, 30]] * ahead + rows[order]
    return [(detected(rows, [0] * len(rows), [0.9] * ahead + values), real)]


def test_the_printed_example_of_one_class():
    metrics = metrics_of(example_of_one_class(), 1)
    assert (metrics.ap, metrics.ap50, metrics.ap75) == pytest.approx((0.618105,) * 3, abs=5e-7)
    assert metrics.ar_100 == pytest.approx(0.8)
    curve = metrics.curves[0]
    assert curve.recall.tolist() == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6, 0.6, 0.8])
    assert curve.precision.tolist() == pytest.approx([1, 0.5, 2 / 3, 0.75, 0.6, 0.5, 4 / 7])
    assert curve.best == pytest.approx((0.6, 2 / 3)), "that of the last one is the same"
    assert voc_ap50(example_of_one_class(), 1)[0] == pytest.approx(0.614286, abs=5e-7)
    assert voc_ap50(example_of_one_class(), 1, points=11)[0] == pytest.approx(0.649351, abs=5e-7)


def test_equal_scores_keep_their_order_and_only_100_detections_count():
    level = [0.5] * 7
    assert metrics_of(example_of_one_class(level), 1).ap == pytest.approx(0.618105, abs=5e-7)
    assert metrics_of(example_of_one_class(level, slice(None, None, -1)), 1).ap == pytest.approx(
        0.558699, abs=5e-7
    )
    assert metrics_of(example_of_one_class(ahead=100), 1).ap == 0
    perfect = [
        (detected([[100 * i, 0, 50, 50] for i in range(5)], [0] * 5, [0.5] * 5), example_of_one_class()[0][1])
    ]
    metrics = metrics_of(perfect, 1)
    assert (metrics.ap, metrics.ar_100, metrics.ar_1) == pytest.approx((1, 1, 0.2)), "the object 0 is one too"


def example_of_three_classes() -> Images:
    """Categories 3, 7 and 9 are classes 0, 1 and 2; the last has no object."""
    real = [
        annotated([[10, 10, 20, 20], [100, 100, 50, 40], [0, 0, 120, 100]], [0, 0, 1]),
        annotated([[20, 30, 60, 60], [50, 50, 30, 30], [120, 0, 80, 200]], [0, 1, 0], [0, 0, 1]),
        annotated([[10, 10, 100, 100]], [1]),
        annotated([], []),
    ]
    shown = [
        detected([[10, 10, 20, 22], [105, 100, 50, 40], [100, 104, 50, 40], [0, 0, 100, 100]], [0, 0, 0, 1],
                 [0.9, 0.8, 0.7, 0.6]),
        detected([[26, 30, 60, 60], [130, 20, 40, 60], [130, 120, 40, 60], [60, 50, 30, 30]], [0, 0, 0, 1],
                 [0.95, 0.85, 0.5, 0.4]),
        detected([[10, 10, 100, 70], [150, 150, 20, 20]], [1, 1], [0.3, 0.65]),
        detected([[0, 0, 50, 50]], [0], [0.2]),
    ]  # fmt: skip
    return list(zip(shown, real, strict=True))


def test_the_printed_example_of_three_classes():
    metrics = metrics_of(example_of_three_classes(), 3)
    expected = [0.4875, 0.875, 0.584158, 0.475, 0.7, 0.60099, 0.4, 0.6, 0.6, 0.5, 0.7, 0.6]
    assert stats(metrics) == pytest.approx(expected, abs=5e-7)
    assert metrics.class_ap[:2] == pytest.approx([0.733663, 0.241337], abs=5e-7)
    assert metrics.class_ap50[:2] == pytest.approx([1, 0.75]) and np.isnan(metrics.class_ap[2])
    assert (metrics.objects.tolist(), metrics.class_images.tolist()) == ([3, 3, 0], [2, 3, 0])
    assert voc_ap50(example_of_three_classes(), 3)[:2] == pytest.approx([0.916667, 0.75], abs=5e-7)
    assert voc_ap50(example_of_three_classes(), 3, points=11)[:2] == pytest.approx([0.909091, 0.75], abs=5e-7)


def test_json_has_no_nan_and_names_the_classes():
    json_ = metrics_of(example_of_three_classes(), 3).to_json(("a", "b", "c"))
    del json_["loss"]
    json.dumps(json_, allow_nan=False)
    assert set(STATS) | {"images", "per_class"} == json_.keys()
    assert json_["per_class"]["c"] == {
        "ap": None,
        "ap50": None,
        "objects": 0,
        "images": 0,
        "f1": 0.0,
        "threshold": None,
    }
    assert json_["per_class"]["a"]["threshold"] == 0.8  # the rest are false or on the crowd
    assert json_["per_class"]["a"]["f1"] == 1.0


def test_without_objects_or_detections():
    nothing, box = detected([], [], []), annotated([[0, 0, 9, 9]], [1])
    assert (stats(metrics_of([(nothing, annotated([], []))], 2)) == -1).all()
    assert (stats(metrics_of([(detected([[0, 0, 9, 9]], [0], [0.5]), annotated([], []))], 2)) == -1).all()
    metrics = metrics_of([(nothing, box)], 2)
    assert (metrics.ap, metrics.ar_100, metrics.ap_large) == (0, 0, None) and metrics.class_ap[1] == 0
    assert (stats(metrics_of([(nothing, annotated([[0, 0, 9, 9]], [1], [1]))], 2)) == -1).all()
    target = Target(
        (20, 20), np.array([[0, 0, 9, 9]], np.float32), np.array([1]), np.array([False]), np.array([81.0])
    )
    assert metrics_of([(detected([[0, 0, 9, 9]], [1], [0.5]), target)], 2).ap == pytest.approx(1)


@pytest.mark.parametrize(("images", "code"), [
    ([], "data.empty"),
    ([(detected([[0, 0, 9, 9]], [2], [0.5]), annotated([], []))], "evaluation.classes"),
    ([(detected([], [], []), annotated([[0, 0, 9, 9]], [-1]))], "data.labels"),
])  # fmt: skip
def test_refusals(images, code):
    with pytest.raises(Error) as refusal:
        metrics_of(images, 2)
    assert refusal.value.code == code


def test_masks_of_another_size_are_refused():
    masks = np.ones((1, 4, 4), bool)
    with pytest.raises(Error) as refusal:
        overlap(
            Detections(np.zeros((1, 4)), np.ones(1), np.zeros(1, int), masks), annotated([[0, 0, 4, 4]], [0])
        )
    assert refusal.value.code == "evaluation.unsupported"


def mixed_image() -> list[Overlap]:
    """One detection of each kind of error; class 0 unless it says otherwise."""
    real = annotated([[0, 0, 10, 10], [20, 0, 10, 10], [40, 0, 10, 10], [60, 0, 10, 10], [80, 0, 20, 20]],
                     [0, 0, 1, 1, 0], [0, 0, 0, 0, 1])  # fmt: skip
    shown = detected(
        [
            [0, 0, 10, 10],
            [0, 0, 10, 9],
            [20, 0, 10, 4],
            [40, 0, 10, 10],
            [60, 0, 10, 4],
            [200, 0, 10, 10],
            [82, 2, 10, 10],
        ],
        [0, 0, 0, 0, 0, 0, 0],
        [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
    )  # right, duplicate, location, class, both, background, on the crowd
    return [overlap(shown, real)]


def test_every_kind_of_error_once():
    errors = detection_errors(mixed_image(), 2)
    kinds = [None if k < 0 else KINDS[k] for k in errors.kinds]
    assert kinds == [None, "duplicate", "location", "class", "both", "background", None]
    assert errors.missed.tolist() == [False, False, False, True, False]
    assert errors.counts == dict.fromkeys(KINDS, 1)


def envelope(hits: str, objects: int) -> float:
    """AP of a class from its detections in order, R for right and W for wrong, as a literal loop."""
    total = 0.0
    for step in range(101):
        precisions = [hits[: i + 1].count("R") / (i + 1) for i in range(len(hits))
                      if hits[: i + 1].count("R") / objects >= step / 100]  # fmt: skip
        total += max(precisions, default=0)
    return total / 101


def test_the_importance_of_each_kind():
    errors = detection_errors(mixed_image(), 2)
    base = envelope("RWWWWW", 2) / 2  # class 1 has two objects and no detection
    assert errors.ap50 == pytest.approx(base)
    expected = {
        "duplicate": envelope("RWWWW", 2) / 2, "location": envelope("RWRWWW", 2) / 2,
        "class": (envelope("RWWWW", 2) + envelope("R", 2)) / 2, "both": base, "background": base,
        "missed": base,
    }  # fmt: skip
    assert errors.importance == pytest.approx({k: expected[k] - base for k in KINDS})
    assert errors.false_positives == pytest.approx(envelope("R", 2) / 2 - base)
    assert errors.false_negatives == pytest.approx(1 - base), "class 1 is then empty and left out"
    json.dumps(errors.to_json(), allow_nan=False)


def test_only_the_best_of_several_errors_is_corrected():
    real = annotated([[0, 0, 10, 10]], [0])
    shown = detected([[0, 0, 10, 4], [0, 0, 10, 10], [0, 0, 10, 3]], [0, 1, 0], [0.9, 0.8, 0.7])
    errors = detection_errors([overlap(shown, real)], 2)
    assert [KINDS[k] for k in errors.kinds] == ["location", "class", "location"]
    assert errors.counts["missed"] == 0 and errors.ap50 == 0
    assert errors.importance["location"] == pytest.approx(1), "the second one vanishes"
    assert errors.importance["class"] == 0, "the object is the first one's"


def test_errors_of_random_images_add_up():
    images = random_images(np.random.default_rng(2), 60, 4, 60)
    overlaps = [overlap(*image) for image in images]
    errors, metrics = detection_errors(overlaps, 4), detection_metrics(overlaps, 4)
    assert errors.ap50 == pytest.approx(metrics.ap50, abs=1e-12)
    assert set(np.unique(errors.kinds)) == {-1, 0, 1, 2, 3, 4} and errors.counts["missed"] > 0
    assert all(value >= 0 for value in errors.importance.values())
    best = max(errors.importance[k] for k in ("duplicate", "background", "both"))
    assert errors.false_positives >= best > 0


def test_the_confusion_has_a_background():
    confusion = detection_confusion(mixed_image(), 2, 0.0)
    # class 1 is detected as class 0 once and missed once; of class 0 one is right and one is missed; the
    # duplicate, the two bad boxes and the one in the background are false, the one on the crowd is not
    assert confusion.tolist() == [[1, 0, 1], [1, 0, 1], [4, 0, 0]]
    assert detection_confusion(mixed_image(), 2, 0.65).tolist() == [[1, 0, 1], [0, 0, 2], [2, 0, 0]]
    overlaps = [overlap(*image) for image in random_images(np.random.default_rng(4), 40, 3, 40)]
    confusion = detection_confusion(overlaps, 3, 0.0)
    assert confusion[:3].sum(1).tolist() == detection_metrics(overlaps, 3).objects.tolist()
