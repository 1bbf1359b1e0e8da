"""The task detect: views, adapting models, boxes in pixels of the original image, and evaluation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import vitkit
from vitkit.data.sources.source import Source
from vitkit.data.targets import Target, Targets
from vitkit.data.views import View
from vitkit.errors import Error
from vitkit.models.card import Preprocessing
from vitkit.models.dense.pyramid_detector import FcosConfig
from vitkit.models.dense.rf_detr import RfDetrConfig
from vitkit.models.dense.yolos import YolosConfig
from vitkit.models.variants import build, fresh
from vitkit.models.vit import ViTConfig
from vitkit.tasks.detect import Detect, padded_objects, placed
from vitkit.tasks.task import Evaluation, task_of

VIT = {"width": 48, "depth": 2, "heads": 3, "hidden": 96, "patch": 8, "image_size": (64, 64)}
FIT = Preprocessing(resize="fit")


def target(height=50, width=100, crowd=False):
    boxes = np.array([[10, 5, 30, 25], [50, 10, 98, 50]], np.float32)
    return Target(
        size=(height, width), boxes=boxes, labels=np.array([0, 1]), crowd=np.array([False, crowd]),
        areas=np.array([400.0, 1920.0], np.float32),
    )  # fmt: skip


def source(*targets, kinds=("boxes",)):
    images = [np.zeros((*t.size, 3), np.uint8) for t in targets]
    return Source(
        name="drawn", keys=[f"{i}.png" for i in range(len(targets))], classes=("cell", "dot"),
        labels=np.zeros(len(targets), np.int64), fetch=images.__getitem__,
        targets=Targets(targets.__getitem__, frozenset(kinds), 2),
    )  # fmt: skip


def detector(task=None, classes=("cell", "dot"), size=(64, 64)):
    task = task or Detect()
    vit = build("ViT-Ti/8", seed=1, **(VIT | {"classes": 7}))
    model = task.adapt(vit, classes, size, 0)
    model.labels, model.task, model.preprocessing = classes, "detect", FIT
    return model.eval()


def test_a_classifier_becomes_a_detector():
    vit = build("ViT-Ti/8", seed=1, **(VIT | {"classes": 7}))
    model = Detect().adapt(vit, ("cell", "dot"), (48, 80), 0)
    assert isinstance(model.config, FcosConfig) and model.config.classes == 2
    assert model.config.image_size == (48, 80) and all(p.requires_grad for p in model.parameters())
    assert torch.equal(model.vit.encoder.blocks[1].mlp.up.weight, vit.encoder.blocks[1].mlp.up.weight)
    assert model(torch.zeros(1, 3, 48, 80)).shape == (1, 100, 6)
    queries = Detect(head="rf-detr").adapt(vit, ("cell", "dot"), (64, 64), 0)
    assert isinstance(queries.config, RfDetrConfig) and queries.config.windows == 2
    assert queries.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 300, 6)
    other = Detect(head="yolos", detections=5).adapt(vit, ("cell", "dot"), (64, 64), 0)
    assert isinstance(other.config, YolosConfig)
    assert other.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5, 6)


@pytest.mark.parametrize("head", ["fcos", "yolos", "rf-detr"])
def test_a_detector_with_other_classes_keeps_all_but_the_class_layer(head):
    old = detector(Detect(head=head, detections=9))
    new = Detect().adapt(old, ("cell", "dot", "line"), (64, 80), 3)  # auto: the model's own head
    assert new.config.kind == old.config.kind and new.config.classes == 3
    before, after = old.state_dict(), new.state_dict()
    changed = {n for n in after if before[n].shape != after[n].shape or not torch.equal(before[n], after[n])}
    last = {"fcos": ["head.classify"], "yolos": ["class_head.layers.2"]}.get(
        head, ["classify", *(f"proposal_classes.{group}" for group in range(13))]
    )
    of_classes = {f"{name}.{part}" for name in last for part in ("weight", "bias")}
    assert changed == {*of_classes, "vit.positions.table"}
    same = Detect().adapt(old, ("cell", "dot"), (64, 64), 3)
    assert all(torch.equal(before[n], t) for n, t in same.state_dict().items())


def test_what_the_task_sets_is_changed_in_fcos():
    own = detector(Detect(overlap=0.4))
    assert Detect().adapt(own, own.labels, (64, 64), 0).config == own.config
    new = Detect(detections=7, overlap=0.5).adapt(own, own.labels, (64, 64), 0)
    assert new.config == replace(own.config, detections=7, overlap=0.5)
    kept = own.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in new.state_dict().items())
    assert Detect(channels=16).adapt(own, own.labels, (64, 64), 0).config.head_width == 16


def test_yolos_keeps_its_middle_positions_at_another_size():
    vit = ViTConfig(**VIT, classes=0)
    old = fresh(YolosConfig(vit=vit, classes=4, detections=6, middle_size=(64, 64)), seed=0)
    old.labels = tuple("abcd")
    new = Detect().adapt(old, ("cell", "dot"), (48, 80), 0)
    assert new.config.middle_size == (64, 64) and new.config.detections == 6
    assert torch.equal(new.middle_positions, old.middle_positions)
    assert new.eval()(torch.zeros(1, 3, 48, 80)).shape == (1, 6, 6)


def test_boxes_are_mapped_to_the_original_image_and_back():
    rows = np.array([[0.0, 0.0, 1.0, 0.5], [0.25, 0.125, 0.5, 0.9]])
    boxes = placed(rows, (50, 100), (64, 64), FIT)  # 100 x 50 pixels cover the upper 32 rows
    assert boxes.tolist() == [[0, 0, 100, 50], [25, 12.5, 50, 50]]
    squashed = placed(rows, (50, 100), (64, 64), Preprocessing(resize="squash"))
    assert squashed.tolist() == [[0, 0, 100, 25], [25, 6.25, 50, 45]]
    with pytest.raises(Error) as error:
        placed(rows, (50, 100), (64, 64), Preprocessing(resize="crop"))
    assert error.value.code == "request.conflict"
    padded = padded_objects([target(), target(crowd=True)], (64, 64), FIT)
    assert padded["classes"].tolist() == [[0, 1], [0, -1]]
    back = placed(padded["boxes"][0].numpy() / 64, (50, 100), (64, 64), FIT)
    assert back == pytest.approx(target().boxes, abs=1e-4)


def test_answers_are_boxes_above_the_threshold():
    model = detector()
    values = torch.zeros(2, 100, 6)
    values[0, 0] = torch.tensor([0.1, 0.05, 0.3, 0.25, 0.9, 1])
    values[0, 1] = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.1, 0])
    first, second = task_of(model).answers(model, values, 1, [(50, 100), (64, 64)])
    assert first.to_json() == {
        "detections": [{"label": "dot", "score": pytest.approx(0.9), "box": [10.0, 5.0, 30.0, 25.0]}]
    }
    assert first.best == ("dot", pytest.approx(0.9)) and second.best is None and second.value == []
    assert [one.label for one in first.reject(0.05).detections] == ["dot", "cell"]
    assert first.reject(0.95).value == [] and first.cells() == [("dot", pytest.approx(0.9), 10, 5, 30, 25)]
    assert first.coco(7, {"cell": 3, "dot": 8}) == [
        {"image_id": 7, "category_id": 8, "bbox": [10, 5, 20, 20], "score": pytest.approx(0.9)}
    ]
    assert "1 dot" in first.text("a.png") and "no objects" in second.text("b.png", alone=True)


@pytest.mark.parametrize(
    "threshold, shown, own",
    [(0.3, [0.9], 0), (0.05, [0.9, 0.1], 0.05), (0.95, [], 0.95), (0, [0.9, 0.1], 1e-9)],
)
def test_a_model_keeps_the_threshold_of_its_training(threshold, shown, own, tmp_path):
    vitkit.save(Detect(threshold=threshold).build(detector()), tmp_path / "m.safetensors")
    model, values = vitkit.load(tmp_path / "m.safetensors"), torch.zeros(1, 100, 6)
    values[0, :2, 2:5] = torch.tensor([[1, 1, 0.9], [1, 1, 0.1]])
    (answer,) = task_of(model).answers(model, values, 1)
    assert model.reject_below == own
    assert [one.score for one in answer.detections] == pytest.approx(shown)


def evaluation(model, data, rows):
    """Evaluate a model whose detections of all images are `rows`."""
    batch = {"image": torch.zeros(len(data), 3, 64, 64, dtype=torch.uint8), "index": torch.arange(len(data))}
    context = Evaluation(forward=lambda model, images: rows, source=data)
    return Detect().evaluate(model, [batch], context)


def test_right_boxes_have_an_ap_of_1_in_pixels_of_the_original_image():
    model, data = detector(), source(target(), target(crowd=True))
    rows = torch.zeros(2, 100, 6)
    for image in range(2):
        boxes = torch.from_numpy(target().boxes) / 100  # the view has 100 x 50 pixels in 64 x 32
        rows[image, :2] = torch.cat([boxes, torch.tensor([[0.9, 0], [0.8, 1]])], 1)
    metrics = evaluation(model, data, rows)
    assert metrics.ap == metrics.ap50 == 1 and metrics.images == 2 and metrics.loss > 0
    rows[:, 0, 5] = 1  # the other class
    assert evaluation(model, data, rows).ap == pytest.approx((0 + 1 / 3) / 2)
    test = metrics.to_json(("cell", "dot"))
    assert "1.000" in Detect().summary(test, "test images")


def test_images_without_any_object_have_no_ap():
    empty = Target(size=(50, 100))
    with pytest.raises(Error) as error:
        evaluation(detector(), source(empty), torch.zeros(1, 100, 6))
    assert error.value.code == "data.empty"


@pytest.mark.parametrize("head", ["fcos", "yolos", "rf-detr"])
def test_a_step_of_training_has_a_finite_loss_and_gradients(head):
    task = Detect(head=head, detections=9)
    model, data = detector(task).train(), source(target(), target())
    view = task.target_view(View(size=(64, 64), crop="squash", flip=True), data)
    made = [view(data.fetch(i), data.targets.read(i), np.random.default_rng(i)) for i in range(2)]
    batch = {"image": torch.stack([torch.from_numpy(image.transpose(2, 0, 1).copy()) for image, _ in made])}
    batch |= {
        n: torch.stack([torch.from_numpy(arrays[n]) for _, arrays in made]) for n in ("boxes", "classes")
    }
    losses = task.objective(model)(model, batch)
    losses["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.vit.encoder.parameters())
    blank = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
    assert task.objective(model)(model, blank)["loss"].isfinite()


def test_wrong_settings_and_data_are_refused():
    for settings in ({"head": "detr"}, {"threshold": 2.0}, {"scale": (0.0, 1.0)}):
        with pytest.raises(Error) as error:
            Detect(**settings)
        assert error.value.code == "recipe.value"
    with pytest.raises(Error) as error:
        Detect().check_source(source(target(), kinds=("mask",)))
    assert error.value.code == "data.labels"
    with pytest.raises(Error):
        Detect().configure(build("AxialResNet-50", image_size=(64, 64)).config)
    assert replace(Detect(), threshold=0.5).threshold == 0.5
