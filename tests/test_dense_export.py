"""Exported detectors and segmenters: the same boxes and masks from the file, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_models import NAMES, detector, instance_segmenter, model_of, photograph, segmenter, vit
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.commands.export import at_size, export
from vitkit.inference.agreement import agreement
from vitkit.inference.export import describe_export, runner
from vitkit.inference.exported import open_exported
from vitkit.inference.graphs import Form
from vitkit.models.dense.eomt import EomtConfig
from vitkit.tasks.detect import Detect
from vitkit.tasks.segment import Segment

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
SLOW = pytest.mark.slow


def alike(model, path, seeds=range(2)):
    """Whether the answers from a file are those of the model, for pictures of several sizes."""
    for seed in seeds:
        image = photograph(40 + 30 * seed, 90 - 20 * seed, seed)
        ours, theirs = vitkit.predict(model, image), vitkit.predict(path, image)
        if model.task == "segment":
            assert theirs.shape == ours.shape and (ours == theirs).mean() > 0.999
            continue
        assert [one["label"] for one in ours] == [one["label"] for one in theirs] != []
        for one, other in zip(ours, theirs, strict=True):
            assert one["box"] == pytest.approx(other["box"], abs=0.05)
            assert one["score"] == pytest.approx(other["score"], abs=1e-4)


@pytest.mark.parametrize(
    "make, ending, pixels",
    [
        pytest.param(lambda: detector(detections=3, levels=1), ".onnx", False, marks=SLOW),
        pytest.param(segmenter, ".onnx", True, marks=SLOW),
        pytest.param(detector, ".onnx", True, marks=SLOW),
        pytest.param(segmenter, ".onnx", False, marks=SLOW),
        pytest.param(detector, ".xml", False, marks=SLOW),
        pytest.param(segmenter, ".xml", True, marks=SLOW),
        pytest.param(lambda: detector(kind="yolos"), ".onnx", False, marks=SLOW),
        pytest.param(lambda: segmenter(window=16), ".onnx", False, marks=SLOW),
        pytest.param(instance_segmenter, ".onnx", False, marks=SLOW),
        pytest.param(instance_segmenter, ".onnx", True, marks=SLOW),
    ],
)
def test_a_file_gives_the_same_answers(make, ending, pixels, tmp_path, capsys):
    if ending == ".xml":
        pytest.importorskip("openvino")
    model, path = make(), tmp_path / f"model{ending}"
    made = export(model, path, pixels=pixels)
    assert [one.batch for one in made.compared] == [1, 16] and all(one.result.ok for one in made.compared)
    names = {("detect", False): "detections", ("detect", True): "detections", ("segment", False): "logits",
             ("segment", True): "probabilities", ("instances", False): "objects",
             ("instances", True): "objects"}  # fmt: skip
    assert made.output == names[model.task, pixels]
    described = describe_export(path)
    assert described.card.task == model.task and described.card.labels == NAMES
    alike(model, path)
    vitkit.save(model, tmp_path / "m.safetensors")
    Image.fromarray(photograph(50, 70)).save(tmp_path / "a.png")
    answers = []
    for name in (path.name, "m.safetensors"):
        assert run("predict", tmp_path / name, tmp_path / "a.png", "--json") == 0
        answers.append(json.loads(capsys.readouterr().out)[0])
    if model.task != "segment":
        for one, other in zip(*(answer["detections"] for answer in answers), strict=True):
            assert one["box"] == pytest.approx(other["box"], abs=0.05) and one["label"] == other["label"]
    else:
        shares = [{one["label"]: one["share"] for one in answer["classes"]} for answer in answers]
        assert shares[0] == pytest.approx(shares[1], abs=1e-3)
    outputs = open_exported(path).run
    assert outputs is not None and "32x48" in repr(open_exported(path))


@pytest.mark.slow
@pytest.mark.parametrize("make", [detector, segmenter])
def test_a_program_of_torch_and_another_image_size(make, tmp_path):
    model = make()
    made = export(model, tmp_path / "m.pt2", image_size=(48, 64))
    assert made.compared[0].size == (48, 64) and made.compared[0].result.largest < 1e-5
    images = torch.randint(0, 256, (3, 3, 48, 64), dtype=torch.uint8)
    assert len(runner(model, Form(), tmp_path / "m.pt2")(images)) == 3


@pytest.mark.parametrize(
    "make",
    [
        detector,
        lambda: detector(kind="yolos"),
        lambda: segmenter(upscale=0, norm="batch", window=16),
        lambda: model_of(EomtConfig(vit=vit(), classes=len(NAMES), queries=5, joint=1, upscale=2)),
        instance_segmenter,
    ],
)
def test_another_image_size_changes_nothing_but_the_positions_of_patches(make):
    model = make()
    images = torch.rand(1, 3, 32, 48)
    assert torch.equal(at_size(model, (32, 48))(images), model(images))
    other = at_size(model, (48, 64))
    assert other.config == replace(model.config, vit=replace(model.config.vit, image_size=(48, 64)))
    assert (other.labels, other.task) == (model.labels, model.task)
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "vit.positions.table"}
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("make", [detector, segmenter])
def test_forms_that_are_not_supported_are_refused(make, tmp_path):
    out = tmp_path / "m.onnx"
    with refused("export.unsupported"):
        export(make(), out, any_size=True)
    pytest.importorskip("nncf")
    with refused("export.unsupported"):
        export(make(), out, precision="int8", calibrate=["digits"])
    with refused("model.unsupported"):
        export(make(), out, merge_tokens=1)
    assert not list(tmp_path.iterdir())


def detections(seed=0, count=20):
    rng = np.random.default_rng(seed)
    corner, side = rng.uniform(0, 0.5, (count, 2)), rng.uniform(0.1, 0.5, (count, 2))
    scores = np.sort(rng.uniform(0.1, 1, count))[::-1]
    parts = [corner, corner + side, scores[:, None], rng.integers(0, 3, count)[:, None]]
    return torch.from_numpy(np.concatenate(parts, 1))[None].float()


def test_detections_agree_in_any_order_of_equal_scores_but_not_with_another_box_score_or_class():
    want, task = detections(), Detect()
    assert agreement(want, want, task=task).ok and agreement(want, want, task=task).same_top1 == 1
    swapped = want.clone()
    swapped[:, [3, 4]] = swapped[:, [4, 3]]
    assert agreement(want, swapped, task=task).ok
    for column, change in ((0, 0.01), (4, -0.01), (5, 1)):
        changed = want.clone()
        changed[0, 2, column] += change
        assert not agreement(want, changed, task=task).ok
    missing = want.clone()
    missing[0, 5:] = 0
    assert not agreement(want, missing, task=task).ok and not agreement(missing, want, task=task).ok
    assert not agreement(want, want * float("nan"), task=task).ok
    nothing = torch.zeros_like(want)
    assert agreement(nothing, nothing, task=task).ok and not agreement(nothing, want, task=task).ok


def test_masks_agree_by_the_class_of_each_cell():
    want = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    task = Segment()
    assert agreement(want, want, task=task).ok
    other = want.clone()
    other[0, :, 1, 2] = other[0, :, 1, 2].flip(0) + torch.tensor([5.0, 0, 0])
    assert not agreement(want, other, task=task).ok
    assert agreement(want, other, task=task).same_top1 <= 1 - 1 / 40 + 1e-9 or want[0, :, 1, 2].argmax() == 0


@pytest.mark.slow
def test_a_graph_of_another_shape_is_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    export(segmenter(), path)
    model = onnx.load(path)
    entry = next(one for one in model.metadata_props if one.key == "vitkit")
    entry.value = entry.value.replace('"upscale": 1', '"upscale": 0')
    onnx.save(model, path)
    with refused("weights.format", path):
        open_exported(path)
