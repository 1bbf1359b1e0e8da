"""Boxes: conversions, IoU, and suppression beside the loop that everyone writes, also after export."""

import numpy as np
import pytest
import torch

from vitkit.ops.boxes import box_area, box_iou, centres, corners, generalized_iou, nms, paired_generalized_iou
from vitkit.ops.fused import exporting


def loop_iou(a: np.ndarray, b: np.ndarray) -> np.float32:
    width = np.maximum(np.minimum(a[2], b[2]) - np.maximum(a[0], b[0]), np.float32(0))
    height = np.maximum(np.minimum(a[3], b[3]) - np.maximum(a[1], b[1]), np.float32(0))
    areas = [np.maximum(x[2] - x[0], np.float32(0)) * np.maximum(x[3] - x[1], np.float32(0)) for x in (a, b)]
    union = areas[0] + areas[1] - width * height
    return width * height / union if union > 0 else np.float32(0)


def greedy(boxes, scores, threshold, most, classes=None) -> list[int]:
    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):  # sorted is stable
        same = [j for j in kept if classes is None or classes[i] == classes[j]]
        if all(loop_iou(boxes[i], boxes[j]) <= np.float32(threshold) for j in same):
            kept.append(i)
    return kept[:most]


def random_boxes(rng, number: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    low = rng.random((number, 2)) * 3
    boxes = np.concatenate([low, low + rng.random((number, 2)) * 2], 1)
    scores = rng.random(number)
    if kind == "tied":
        scores = scores.round(1)
    elif kind == "identical":
        boxes = boxes[rng.integers(0, 4, number)]
    elif kind == "no area":
        flat = rng.random(number) < 0.5
        boxes[flat, 2:] = boxes[flat, :2]
    elif kind == "chain":  # each box suppresses only its neighbours: as many turns as boxes
        start = np.arange(number)[:, None] * 0.2
        boxes = np.concatenate([start, 0 * start, start + 1, 0 * start + 1], 1)
        scores = np.linspace(1, 0, number)
    elif kind == "whole numbers":  # IoUs of exactly the threshold
        boxes = np.concatenate([low.round(), low.round() + rng.integers(1, 3, (number, 2))], 1)
    return boxes.astype(np.float32), scores.astype(np.float32)


@pytest.mark.parametrize("kind", ["random", "tied", "identical", "no area", "chain", "whole numbers"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_suppression_equals_the_greedy_loop(kind, threshold):
    rng = np.random.default_rng(0)
    for most in (1, 7, 60):
        images = [random_boxes(rng, 40, kind) for _ in range(3)]
        classes = rng.integers(0, 3, (3, 40))
        boxes, scores = (torch.from_numpy(np.stack(x)) for x in zip(*images, strict=True))
        for chosen in (None, torch.from_numpy(classes)):
            rows, exists = nms(boxes, scores, threshold, most, chosen)
            assert rows.shape == exists.shape == (3, most)
            for b, image in enumerate(images):
                expected = greedy(*image, threshold, most, None if chosen is None else classes[b])
                assert rows[b, exists[b]].tolist() == expected
                assert exists[b].tolist() == [True] * len(expected) + [False] * (most - len(expected))
                assert not rows[b, ~exists[b]].any()


def test_missing_boxes_are_left_out():
    boxes = torch.tensor([[[0.0, 0, 1, 1], [0, 0, 1, 1], [5, 5, 6, 6]]])
    rows, exists = nms(boxes, torch.tensor([[-float("inf"), 0.5, 0.9]]), 0.5, 3)
    assert rows.tolist() == [[2, 1, 0]] and exists.tolist() == [[True, True, False]]


@pytest.mark.slow
def test_the_exported_graph_gives_the_same():
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")

    class Suppression(torch.nn.Module):
        def forward(self, boxes, scores, classes):
            return nms(boxes, scores, 0.5, 100, classes)

    rng = np.random.default_rng(1)
    batch = torch.export.Dim("batch")
    shape = {0: batch}
    boxes, scores = (torch.from_numpy(np.stack(x)) for x in zip(
        *(random_boxes(rng, 20, kind) for kind in ("tied", "identical")), strict=True))  # fmt: skip
    example = boxes, scores, torch.zeros(2, 20, dtype=torch.int64)
    with exporting():
        traced = torch.export.export(
            Suppression().eval(), example, dynamic_shapes=(shape, shape, shape), strict=True
        )
    program = torch.onnx.export(traced, dynamo=True, verbose=False)
    kinds = [node.op_type for node in program.model_proto.graph.node]
    assert not {"NonMaxSuppression", "NonZero"} & set(kinds)
    assert kinds.count("Loop") == 1 and len(kinds) < 100, "a hundred turns in a row take a minute to export"
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    for kinds in (("tied",), ("identical", "chain", "whole numbers")):
        images = [random_boxes(rng, 20, kind) for kind in kinds]
        boxes, scores = (np.stack(x) for x in zip(*images, strict=True))
        classes = rng.integers(0, 2, scores.shape)
        names = [i.name for i in session.get_inputs()]
        rows, exists = session.run(None, dict(zip(names, (boxes, scores, classes), strict=True)))
        for b in range(len(images)):
            assert rows[b, exists[b]].tolist() == greedy(boxes[b], scores[b], 0.5, 100, classes[b])


def test_conversions_are_inverse():
    boxes = torch.tensor([[1.0, 2, 5, 10]])
    assert centres(boxes).tolist() == [[3, 6, 4, 8]] and torch.equal(corners(centres(boxes)), boxes)
    assert box_area(boxes).tolist() == [32] and box_area(boxes.flip(-1)).tolist() == [0]


def test_iou_by_hand():
    iou = box_iou(torch.tensor([[0.0, 0, 2, 2], [3, 3, 3, 3]]), torch.tensor([[1.0, 0, 3, 2], [3, 3, 3, 3]]))
    torch.testing.assert_close(iou, torch.tensor([[1 / 3, 0], [0, 0]]))


def test_generalized_iou_of_the_printed_example():
    predicted = torch.tensor(
        [[0.3, 0.3, 0.2, 0.2], [0.7, 0.7, 0.4, 0.4], [0.5, 0.5, 1, 1], [0.25, 0.3, 0.2, 0.3]]
    )
    targets = torch.tensor([[0.3, 0.3, 0.2, 0.3], [0.6, 0.7, 0.4, 0.4]])
    values = generalized_iou(corners(predicted), corners(targets))
    expected = torch.tensor([[0.666667, -0.523810], [-0.580952, 0.6], [0.06, 0.16], [0.6, -0.548718]])
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)
    paired = paired_generalized_iou(corners(predicted[:2]), corners(targets))
    torch.testing.assert_close(paired, values.diagonal())


def test_gradients_are_finite_for_boxes_without_area():
    boxes = torch.tensor([[1.0, 1, 1, 1], [0, 0, 2, 2]], requires_grad=True)
    (box_iou(boxes, boxes).sum() + generalized_iou(boxes, boxes).sum()).backward()
    assert boxes.grad.isfinite().all()
