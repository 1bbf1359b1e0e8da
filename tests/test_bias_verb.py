"""vitkit inspect --bias: several models on the same permuted and shifted images."""

import json

import numpy as np
import pytest
from PIL import Image
from test_cli import run

import vitkit

LABELS = ("a", "b", "c", "d", "e")


@pytest.fixture
def photos(tmp_path):
    for i in range(30):
        folder = tmp_path / "photos" / "test" / LABELS[i % 5]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).resize((40, 36), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def models(small, small_resnet, tmp_path):
    made = {
        "bag": small(positions="none", head="gap"),
        "vit": small(),
        "resnet": small_resnet(image_size=(32, 32)),
    }
    for name, model in made.items():
        model.labels = LABELS
        vitkit.save(model, tmp_path / f"{name}.safetensors")
    return [tmp_path / f"{name}.safetensors" for name in made]


def test_models_are_compared_on_the_same_changes(models, photos, tmp_path, capsys):
    words = ["inspect", *models, "--bias", photos, "--device", "cpu"]
    assert run(*words, "--out", tmp_path / "a", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    bag, vit, resnet = facts["models"]
    assert facts["images"] == 30 and facts["cells"] == [2, 4, 8] and facts["shifts"] == [1, 2, 4, 8]
    assert [row["kind"] for row in facts["models"]] == ["ViT", "ViT", "ResNet"]
    assert bag["shuffled"]["4"] == bag["shuffled"]["2"] == bag["accuracy"], "a bag of patches has no order"
    assert set(vit["shuffled"]) == set(resnet["shuffled"]) == {"2", "4", "8"}
    assert all(
        0 <= row["interval"][0] <= row["accuracy"] <= row["interval"][1] <= 1 for row in facts["models"]
    )
    assert run("evaluate", models[1], photos, "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(vit["accuracy"])
    assert Image.open(tmp_path / "a" / "bias.png").size[0] > 800 and (tmp_path / "a" / "bias.svg").exists()
    assert run(*words, "--out", tmp_path / "b", "--cells", 4, "--shifts", 3, "--images", 10) == 0
    output = capsys.readouterr().out
    assert "4x4" in output and "3 px" in output and "2x2" not in output and "10 images" in output
    again = json.loads((tmp_path / "b" / "bias.json").read_text())
    assert again["images"] == 10 and list(again["models"][0]["shifted"]) == ["3"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--cells", "3"], "--cells 3"),
        (["--shifts", "32"], "--shifts 32"),
        (["--images", "0"], "--images 0"),
        (["--image-size", "64"], "--image-size"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_written(models, photos, tmp_path, capsys, words, said):
    assert run("inspect", *models, "--bias", photos, *words, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_its_words_need_it(models, capsys):
    assert run("inspect", models[1], "--cells", "4") == 2
    assert "--bias" in capsys.readouterr().err
