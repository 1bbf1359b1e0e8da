"""The view of an evaluation: asked for by name, kept in cards, and that of a published file's accuracy."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
from PIL import Image
from refusals import refused

import vitkit
from vitkit.cli.verbs import main
from vitkit.inference.predict import evaluation_view
from vitkit.models.card import Preprocessing, with_view
from vitkit.options import parse_view
from vitkit.weights.published import PUBLISHED, published_view
from vitkit.weights.save import save

AUGREG = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"


def answered(capsys, *words):
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        assert not stop.code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_dinov2_states_the_resolution_of_its_accuracy():
    """Its positions are those of 518 pixels, its top-1 was measured with a crop of 224."""
    names = [name for name in PUBLISHED if name.startswith("DINOv2") and ".eomt-" not in name]
    weights = [PUBLISHED[name] for name in names]
    assert len(weights) == 16
    for weight in weights:
        assert weight.pixels == 518 and weight.top1 and "224" in weight.evaluation, weight.name
        assert (weight.preprocessing.resize, weight.preprocessing.crop) == ("crop", 224 / 256)


@pytest.mark.parametrize("text, size, crop, resized", [
    ("squash", (224, 224), "squash", None), ("centre", (224, 224), "centre", 256),
    ("center", (384, 384), "centre", 439), ("centre:448", (384, 384), "centre", 448),
    ("centre:256", (224, 192), "centre", 256), ("centre:24", (24, 24), "centre", 24),
])  # fmt: skip
def test_a_view_by_its_name(text, size, crop, resized):
    shown = with_view(Preprocessing(interpolation="bicubic", mean=(0.1,) * 3), size, *parse_view(text))
    view = evaluation_view(shown, size)
    assert (view.crop, view.resize) == (crop, resized)
    assert view.interpolation == "bicubic" and shown.mean == (0.1,) * 3


def test_the_models_own_view_is_left_alone():
    own = Preprocessing(resize="crop", crop=0.9, interpolation="bicubic")
    assert with_view(own, (224, 224), *parse_view("model")) == own


@pytest.mark.parametrize(
    "text", ["", "crop", "squash:256", "centre:", "centre:0", "centre:x", "model:3", "Squash"]
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"--view .*expected model"):
        parse_view(text)


def test_a_crop_larger_than_the_image_is_refused():
    with refused("request.value", "centre:200", "224x224"):
        with_view(Preprocessing(), (224, 224), "centre", 200)


def test_published_weights_have_the_view_of_their_accuracy():
    views = {name: weight.view for name, weight in PUBLISHED.items()}
    assert views["ViT-Ti/16.augreg-i21k"] == views["ViT-B/8.augreg-i21k-i1k-224"] == "centre:256"
    assert views["R50+ViT-L/32.augreg-i21k-i1k-384"] == "centre:448"
    others = {view for name, view in views.items() if "augreg" not in name}
    assert others == {"squash", ""}  # vit_jax and BiT resize straight to the model's size
    assert all(PUBLISHED[name].preprocessing for name, view in views.items() if not view)


def test_a_licence_that_forbids_commercial_use_is_a_note(small, tmp_path):
    import vitkit

    model = small(gelu="erf")
    for name, count in (("mae_pretrain_vit_base.pth", 1), ("dinov2_vits14_pretrain.pth", 0), ("mine.pth", 0)):
        vitkit.save(model, tmp_path / name, "timm")
        back = vitkit.load(tmp_path / name, heads=2)
        assert sum("commercial" in note for note in back.origin.notes) == count
        assert (back.preprocessing.mean[0] == 0.485) == (name != "mine.pth")


@pytest.mark.parametrize(
    ("licence", "forbids"),
    [
        ("cc-by-nc-4.0", True), ("cc-by-nc-sa-4.0", True), ("apple-amlr", True), ("CC-BY-NC-4.0", True),
        ("apache-2.0", False), ("cc-by-4.0", False), ("DINOv3 License", False), ("", False),
    ],
)  # fmt: skip
def test_licences_of_the_hub_are_known_by_their_tags(licence, forbids):
    from vitkit.models.card import Origin
    from vitkit.weights.published import licence_note

    notes = licence_note(Origin(source="hf:me/model@main", licence=licence))
    assert bool(notes) == forbids


def test_weights_behind_a_form_say_what_to_do(tmp_path, monkeypatch):
    from refusals import refused

    import vitkit

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with refused("weights.gated", "DINOv3-S/16.lvd1689m", "ai.meta.com"):
        vitkit.load("DINOv3-S/16.lvd1689m-original")


@pytest.mark.parametrize("source, view", [
    (f"{AUGREG}.npz", "centre:256"),
    (f"https://storage.googleapis.com/vit_models/augreg/{AUGREG}.npz", "centre:256"),
    (f"{AUGREG}--cifar100-steps_2500-lr_0.003-res_224.npz", "centre:256"),
    (f"{AUGREG}--imagenet2012-steps_20k-lr_0.03-res_384.npz", "centre:448"),
    ("ViT-B_16.npz", "squash"), ("BiT-M-R50x1-ILSVRC2012.npz", "squash"),
    ("Ti_16-augreg-in1k-224.npz", ""), ("mine.npz", ""), ("B_16.npz", ""), ("", ""),
])  # fmt: skip
def test_a_file_is_known_by_its_published_name(source, view):
    assert published_view(source) == view


def test_a_published_files_view_travels_in_its_card(small, tmp_path, capsys):
    save(small(), tmp_path / "own.npz")
    with np.load(tmp_path / "own.npz") as arrays:
        np.savez(tmp_path / f"{AUGREG}.npz", **arrays)  # as published: without a card
    shutil.copy(tmp_path / f"{AUGREG}.npz", tmp_path / "other.npz")
    model = vitkit.load(tmp_path / f"{AUGREG}.npz")
    assert model.preprocessing == Preprocessing(resize="crop", crop=32 / 256)
    assert any("centre:256" in note for note in model.origin.notes)
    assert vitkit.load(tmp_path / "other.npz").preprocessing == Preprocessing()  # no published name
    kept = Preprocessing(interpolation="bicubic")
    assert vitkit.load(tmp_path / f"{AUGREG}.npz", preprocessing=kept).preprocessing == kept
    answered(capsys, "convert", tmp_path / f"{AUGREG}.npz", tmp_path / "card.safetensors", "--json")
    assert vitkit.load(tmp_path / "card.safetensors").preprocessing == model.preprocessing
    words = [tmp_path / "other.npz", tmp_path / "said.safetensors", "--view", "centre:40", "--json"]
    answered(capsys, "convert", *words)
    assert vitkit.load(tmp_path / "said.safetensors").preprocessing == Preprocessing(resize="crop", crop=0.8)


@pytest.fixture
def sides(small, tmp_path):
    """A model that tells how bright an image is, and wide images that are bright at their ends only."""
    model = small(classes=2)
    model.labels = ("bright", "dark")
    place = tmp_path / "m.safetensors"
    save(model, place)
    for name in model.labels:
        (tmp_path / "data" / name).mkdir(parents=True)
        pixels = np.zeros((32, 96, 3), np.uint8)
        pixels[:, :32] = pixels[:, 64:] = 255 if name == "bright" else 40
        for number in range(2):
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    return place, tmp_path / "data"


def test_evaluate_and_predict_take_the_view_that_is_asked_for(sides, capsys):
    model, data = sides
    output = {view: answered(capsys, "evaluate", model, data, "--view", view, "--json")
            for view in ("model", "squash", "centre", "centre:32")}  # fmt: skip
    assert output["model"]["loss"] == output["squash"]["loss"] != output["centre:32"]["loss"]
    assert "squashed to 32x32" in output["model"]["view"] and "shorter side to 37" in output["centre"]["view"]
    images = sorted(data.rglob("0.png"))
    seen = {view: answered(capsys, "predict", model, *images, "--view", view, "--json")
            for view in ("squash", "centre:32")}  # fmt: skip
    chances = {view: [row["probability"] for row in rows] for view, rows in seen.items()}
    assert chances["centre:32"][0] == chances["centre:32"][1]  # their middle is equally dark
    assert chances["squash"][0] != chances["squash"][1]


def test_fewshot_takes_it_too(sides, tmp_path, capsys):
    model, _ = sides
    for number, (split, name) in enumerate(product(("train", "test"), ("bright", "dark"))):
        folder = tmp_path / "split" / split / name
        folder.mkdir(parents=True)
        Image.fromarray(np.full((32, 96, 3), 9 * number, np.uint8)).save(folder / "0.png")
    for view in ("squash", "centre:32", "official"):
        words = ["--view", view, "--shots", "1", "--seeds", "1", "--cache", tmp_path / "cache", "--json"]
        answered(capsys, "fewshot", model, tmp_path / "split", *words)
    assert len(list((tmp_path / "cache").iterdir())) == 6  # train and test of three views
