"""Segmentation of large images in windows: the written-out mean, any batch size, and every way to it."""

import json
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from dense_models import detector, model_of, photograph, segmenter, vit
from PIL import Image
from refusals import refused
from test_dense_runs import training
from test_experiment import go

import vitkit
from vitkit.commands.export import export
from vitkit.data.sources.shapes import shapes
from vitkit.data.sources.source import Source
from vitkit.data.targets import Target, Targets
from vitkit.data.views import resize
from vitkit.inference.predict import load_model, logits, predict_many, prepared
from vitkit.models.dense.eomt import EomtConfig
from vitkit.runs.evaluation import evaluate
from vitkit.tasks.segment import Segment
from vitkit.tasks.shared.image_windows import covering, in_image_windows
from vitkit.tasks.task import task_of

SIZE = (32, 48)


def eomt():
    return model_of(EomtConfig(vit=vit(SIZE), classes=3, queries=5, joint=1, upscale=1))


def in_windows(make):
    model = make()
    model.preprocessing = replace(model.preprocessing, resize="windows")
    return model


def written_out(model, image):
    """The class of each pixel by loops over windows and pixels' cells, without any helper of vitkit."""
    height, width = image.shape[:2]
    scale = max(32 / height, 48 / width)
    h, w = max(32, round(height * scale / 8) * 8), max(48, round(width * scale / 8) * 8)
    small = torch.from_numpy(np.ascontiguousarray(resize(image, (h, w)).transpose(2, 0, 1)))
    total, count = torch.zeros(3, h // 4, w // 4), torch.zeros(h // 4, w // 4)
    tops = sorted({min(top, h - 32) for top in range(0, max(1, h), 16) if top < h - 16 or not top})
    lefts = sorted({min(left, w - 48) for left in range(0, max(1, w), 32) if left < w - 16 or not left})
    for top in tops:
        for left in lefts:
            values = logits(model, small[None, :, top : top + 32, left : left + 48])[0]
            values = values.exp() if isinstance(model.config, EomtConfig) else values
            total[:, top // 4 : top // 4 + 8, left // 4 : left // 4 + 12] += values
            count[top // 4 : top // 4 + 8, left // 4 : left // 4 + 12] += 1
    mean = total / count
    values = mean.log() if isinstance(model.config, EomtConfig) else mean
    large = torch.nn.functional.interpolate(values[None], size=(height, width), mode="bilinear")
    return large[0].argmax(0).numpy(), len(tops) * len(lefts)


@pytest.mark.parametrize("make", [segmenter, eomt])
@pytest.mark.parametrize("size, windows", [((40, 150), 4), ((97, 60), 4), ((32, 100), 3)])
def test_answers_are_the_mean_of_overlapping_windows(make, size, windows):
    model, image = in_windows(make), photograph(*size, seed=2)
    expected, count = written_out(model, image)
    answer = vitkit.predict(model, image)
    assert answer.shape == size and count == windows
    assert (answer == expected).mean() > 0.999
    model.preprocessing = replace(model.preprocessing, resize="fit")
    assert (vitkit.predict(model, image) != expected).any(), "an image that is made smaller has other answers"


@pytest.mark.parametrize("make", [segmenter, eomt])
def test_an_image_of_the_models_size_gives_exactly_the_plain_outputs(make):
    model, image = in_windows(make), photograph(*SIZE)
    pixels = prepared(image, model).pixels
    one = in_image_windows(lambda images: logits(model, images), pixels, model.config)
    assert torch.equal(one, logits(model, pixels[None])[0])
    answer = vitkit.predict(model, image)
    model.preprocessing = replace(model.preprocessing, resize="fit")
    assert (answer == vitkit.predict(model, image)).all()


def test_other_images_of_a_batch_change_nothing(tmp_path):
    model, names = in_windows(segmenter), []
    for number, size in enumerate(((40, 150), (97, 60), (32, 48), (300, 31))):
        names.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(photograph(*size, seed=number)).save(names[-1])
    rows = [[one.answer.value for one in predict_many(model, names, batch=batch)] for batch in (1, 3)]
    for name, first, second in zip(names, *rows, strict=True):
        assert (first == second).all() and first.shape == np.asarray(Image.open(name)).shape[:2]


def test_evaluation_counts_the_pixels_of_the_same_answers(tmp_path):
    model = in_windows(segmenter)
    images = [photograph(40, 150, 1), photograph(97, 60, 2), photograph(32, 48, 3)]
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, 3, image.shape[:2], dtype=np.uint8) for image in images]
    contents = []
    for image in images:
        file = BytesIO()
        Image.fromarray(image).save(file, "PNG")
        contents.append(file.getvalue())
    targets = Targets(lambda i: Target(masks[i].shape, mask=masks[i]), frozenset({"mask"}))
    source = Source(
        "few", model.labels, list("abc"), np.zeros(3, np.int64), contents.__getitem__, targets=targets
    )
    right = sum(
        (vitkit.predict(model, image) == mask).sum() for image, mask in zip(images, masks, strict=True)
    )
    expected = right / sum(mask.size for mask in masks)
    found = [evaluate(Segment(), model, source, batch=batch, workers=0) for batch in (1, 3)]
    assert [one.pixel_accuracy for one in found] == pytest.approx([expected, expected])
    assert found[0].loss == found[1].loss


def test_views_and_options_that_do_not_fit_are_refused(tmp_path):
    for make in (segmenter, detector):
        model = make()
        vitkit.save(model, tmp_path / "m.safetensors")
        if make is segmenter:
            assert load_model(tmp_path / "m.safetensors", "cpu", "windows").preprocessing.resize == "windows"
        else:
            with refused("request.conflict", "windows"):
                load_model(tmp_path / "m.safetensors", "cpu", "windows")
    with refused("recipe.value", "inference"):
        Segment(inference="tiles")
    odd = segmenter(size=(30, 48))
    with refused("model.unsupported", "whole patches"):
        in_image_windows(
            lambda images: logits(odd, images), torch.zeros(3, 60, 48, dtype=torch.uint8), odd.config
        )


def test_the_file_of_a_model_keeps_its_windows(tmp_path):
    model = in_windows(segmenter)
    vitkit.save(model, tmp_path / "m.safetensors")
    again = vitkit.load(tmp_path / "m.safetensors")
    image = photograph(40, 150)
    assert again.preprocessing.resize == "windows" and task_of(again).name == "segment"
    assert (vitkit.predict(again, image) == vitkit.predict(model, image)).all()


def test_an_image_covers_the_window_in_whole_patches():
    rng = np.random.default_rng(1)
    for _ in range(200):
        size, window = rng.integers(1, 900, 2).tolist(), (rng.integers(1, 9, 2) * 16).tolist()
        whole = covering(tuple(size), tuple(window), 16)
        assert all(side >= own and side % 16 == 0 for side, own in zip(whole, window, strict=True))
        assert min(side - own for side, own in zip(whole, window, strict=True)) == 0


@pytest.mark.slow
def test_a_run_is_evaluated_in_windows_and_its_exported_file_answers_alike(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    recipe = training("linear", 4, image_size=(48, 64), evaluations=1)
    go(tmp_path / "run", replace(recipe, task_options={"segment.inference": "windows"}))
    model, source = vitkit.load(tmp_path / "run"), shapes()["test"]
    right = [
        (vitkit.predict(model, source.fetch(i)) == source.targets.read(i).mask).mean() for i in range(100)
    ]
    result = json.loads((tmp_path / "run/result.json").read_text())["test"]
    assert result["pixel_accuracy"] == pytest.approx(np.mean(right))
    export(model, tmp_path / "m.onnx")
    image = np.concatenate([source.fetch(0)] * 3, axis=1)
    same = vitkit.predict(tmp_path / "m.onnx", image) == vitkit.predict(model, image)
    assert same.shape == (96, 288) and same.mean() > 0.999
