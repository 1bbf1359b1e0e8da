"""Test-time augmentation: the mean of the probabilities over the views, written out, on every way to it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled_photos import paths, save_model_and_photos
from refusals import refused
from test_cli import run as command

import vitkit
from vitkit.inference.predict import evaluation_view, logits, pixels
from vitkit.inference.tta import augmented, size_before
from vitkit.models.card import Preprocessing


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return save_model_and_photos(tmp_path_factory.mktemp("tta"))


def by_hand(model, path: str, tta: str) -> torch.Tensor:
    """The mean probabilities of an image: the mirror, or five crops and their mirrors, one by one."""
    h, w = model.config.image_size
    image = pixels(Path(path).read_bytes(), model, tta)
    views = [image]
    if tta == "crops":
        big_h, big_w = round(h * 256 / 224), round(w * 256 / 224)
        assert image.shape == (3, big_h, big_w) and big_h > h
        y, x = big_h - h, big_w - w
        views = [
            image[:, :h, :w], image[:, :h, x:], image[:, y:, :w], image[:, y:, x:],
            image[:, y // 2 : y // 2 + h, x // 2 : x // 2 + w],
        ]  # fmt: skip
    views += [torch.flip(view, [2]) for view in views]
    return torch.stack([logits(model, view[None])[0].softmax(0) for view in views]).mean(0)


@pytest.mark.parametrize("tta", ["flip", "crops"])
def test_the_probabilities_are_the_mean_over_the_views(made, tta):
    model = vitkit.load(made / "m.safetensors")
    answers = vitkit.predict(model, paths(made), top=model.config.classes, tta=tta)
    single = vitkit.predict(model, paths(made)[0], top=3, tta=tta)
    assert single == [(name, pytest.approx(p, abs=1e-6)) for name, p in answers[0][:3]]
    for path, answer in zip(paths(made), answers, strict=True):
        expected = by_hand(model, path, tta)
        got = torch.tensor([dict(answer)[name] for name in model.labels])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    plain = vitkit.predict(model, paths(made), top=1)
    assert any(abs(a[0][1] - b[0][1]) > 1e-3 for a, b in zip(plain, answers, strict=True))


def test_the_same_in_evaluate_in_the_command_and_in_a_table(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, place = vitkit.load(made / "m.safetensors"), str(made / "m.safetensors")
    expected = {path: by_hand(model, path, "crops") for path in paths(made)}
    truth = {path: model.labels.index(path.split("/")[-2]) for path in expected}
    metrics = vitkit.evaluate(model, str(made / "photos"), split="all", tta="crops", workers=0)
    assert metrics["top1"] == np.mean([int(expected[p].argmax()) == truth[p] for p in expected])
    loss = np.mean([-float(expected[p][truth[p]].log()) for p in expected])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert command("predict", place, *expected, "--tta", "crops", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["probability"] for row in rows] == [
        pytest.approx(float(p.max()), abs=1e-5) for p in expected.values()
    ]
    assert command("predict", place, *expected, "--tta", "crops", "--out", "t.csv", "--workers", "0") == 0
    table = list(csv.DictReader(Path("t.csv").read_text().splitlines()))
    assert [row["label"] for row in table] == [row["label"] for row in rows]
    assert [float(row["probability"]) for row in table] == [
        pytest.approx(row["probability"], abs=1e-6) for row in rows
    ]


@pytest.mark.slow
def test_exported_files_and_several_labels_have_it_too(made, tmp_path):
    pytest.importorskip("onnxruntime")
    model = vitkit.load(made / "m.safetensors")
    vitkit.export(model, tmp_path / "m.onnx")
    for mine, other in zip(
        vitkit.predict(model, paths(made), top=2, tta="flip"),
        vitkit.predict(tmp_path / "m.onnx", paths(made), top=2, tta="flip"),
        strict=True,
    ):
        assert [p for _, p in mine] == [pytest.approx(p, abs=1e-4) for _, p in other]
    model.task = "multilabel"
    image = pixels(Path(paths(made)[0]).read_bytes(), model)
    each = torch.stack([logits(model, v[None])[0].sigmoid() for v in (image, image.flip(2))]).mean(0)
    result = augmented(lambda images: logits(model, images), model, "flip")(image[None])[0]
    torch.testing.assert_close(result.sigmoid(), each, atol=1e-6, rtol=1e-5)
    sure = augmented(lambda images: torch.full((1, 3), 1e4), model, "flip")(image[None])
    assert sure.isfinite().all()


def test_the_view_has_room_for_crops_and_other_values_are_refused(made):
    assert size_before((224, 160), "crops") == (256, 183) and size_before((224, 160), "flip") == (224, 160)
    usual = Preprocessing(resize="crop", crop=0.875)
    assert evaluation_view(usual, (224, 224), "crops").resized == 256
    assert evaluation_view(Preprocessing(resize="crop", crop=0.7), (224, 224), "crops").resized == 320
    assert evaluation_view(Preprocessing(resize="crop"), (224, 224), "crops").resized == 256
    assert evaluation_view(usual, (224, 224)) == evaluation_view(usual, (224, 224), "flip")
    with refused("request.value", "tta"):
        vitkit.predict(made / "m.safetensors", paths(made)[0], tta="rotate")
    with refused("request.value", "tta"):
        vitkit.evaluate(made / "m.safetensors", str(made / "photos"), tta="rotate")
