"""One way to open a model: every verb and the service read a Hugging Face folder as transformers does."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.inference.predict import load_model
from vitkit.server.served_model import copy_model, file_stamps, open_served
from vitkit.server.settings import Settings

MEAN, STD = [0.1, 0.3, 0.6], [0.9, 0.4, 0.2]
NAMES = ["heron", "kingfisher", "owl"]


def answer(capsys, *arguments):
    """What a command prints as JSON."""
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def theirs():
    """A classifier of transformers in which every setting is unusual, and its processor."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=40, image_size=24,
        patch_size=8, layer_norm_eps=0.3, hidden_act="gelu_new", id2label=dict(enumerate(NAMES)),
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    processor = ViTImageProcessor(
        image_mean=MEAN, image_std=STD, resample=3, size={"height": 24, "width": 24}
    )
    return model, processor


@pytest.fixture
def folder(theirs, tmp_path) -> Path:
    for part in theirs:
        part.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def photos(tmp_path) -> Path:
    """Images of the model's own size, so that nothing is resized; each class has its folder."""
    rng = np.random.default_rng(0)
    for name in NAMES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def expected(theirs, paths: list[Path]) -> torch.Tensor:
    """Probabilities as transformers computes them, from files to the end."""
    model, processor = theirs
    inputs = processor([Image.open(path).convert("RGB") for path in paths], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits.softmax(-1)


def check(model, theirs) -> None:
    images = torch.rand(2, 3, 24, 24)
    with torch.no_grad():
        assert (model(images) - theirs[0](images).logits).abs().max() <= 1e-5
    assert (model.config.heads, model.config.norm_eps, model.config.gelu) == (8, 0.3, "tanh")
    assert model.labels == tuple(NAMES) and model.config.image_size == (24, 24)
    shown = model.preprocessing
    assert (list(shown.mean), list(shown.std), shown.interpolation) == (MEAN, STD, "bicubic")


def test_every_way_to_open_a_folder_gives_the_model_of_transformers(folder, theirs, tmp_path):
    check(vitkit.load(folder), theirs)
    check(load_model(str(folder), "cpu"), theirs)
    settings = Settings(model=str(folder), device="cpu", precision="fp32", engine="torch")
    for revision in (1, 2):  # the second is loaded from a copy
        check(open_served(settings, revision).model, theirs)
    check(vitkit.load(folder / "model.safetensors"), theirs)  # the settings lie beside it
    from_inside = Settings(model=str(folder / "model.safetensors"), device="cpu", engine="torch")
    check(open_served(from_inside, 2).model, theirs)


def test_shards_and_pickled_weights_are_opened_with_the_same_settings(folder, theirs, tmp_path):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for kind in ("safetensors", "bin"):
        place = shutil.copytree(folder, tmp_path / kind)
        (place / "model.safetensors").unlink()
        stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
        where = {name: f"part-{i % 2}.{kind}" for i, name in enumerate(state)}
        for part in set(where.values()):
            some = {name: state[name] for name in state if where[name] == part}
            if kind == "safetensors":
                safetensors.torch.save_file(some, place / part)
            else:
                torch.save(some, place / part)
        (place / f"{stem}.index.json").write_text(json.dumps({"weight_map": where}))
        check(vitkit.load(place), theirs)
        settings = Settings(model=str(place), device="cpu", engine="torch")
        check(open_served(settings, 2).model, theirs)
        assert {f"part-{i}.{kind}" for i in range(2)} <= {mark[0] for mark in file_stamps(str(place))}
    whole = shutil.copytree(folder, tmp_path / "whole")
    (whole / "model.safetensors").unlink()
    torch.save(state, whole / "pytorch_model.bin")
    check(vitkit.load(whole), theirs)


def test_predict_and_evaluate_answer_as_transformers_do(folder, theirs, photos, capsys):
    paths = sorted(photos.rglob("*.png"))
    want = expected(theirs, paths)
    output = answer(capsys, "predict", folder, photos, "--device", "cpu", "--top", 3)
    assert [one["image"] for one in output] == [str(path) for path in paths]
    for one, row in zip(output, want, strict=True):
        for place in one["top"]:
            assert place["probability"] == pytest.approx(float(row[NAMES.index(place["label"])]), abs=1e-4)
    right = [NAMES[int(row.argmax())] == path.parent.name for row, path in zip(want, paths, strict=True)]
    output = answer(capsys, "evaluate", folder, photos, "--device", "cpu", "--workers", 0)
    assert output["top1"] == pytest.approx(np.mean(right)) and output["images"] == len(paths)


@pytest.mark.slow
def test_inspect_show_fewshot_and_export_open_the_same_model(folder, theirs, photos, tmp_path, capsys):
    facts = answer(capsys, "inspect", folder, photos, "--device", "cpu", "--out", tmp_path / "looked")
    assert facts["heads"] == 8
    facts = answer(capsys, "show", folder)
    assert facts["heads"] == 8 and facts["labels"] == NAMES and facts["preprocessing"]["mean"] == MEAN
    cache = tmp_path / "features"
    answer(capsys, "fewshot", folder, photos, "--device", "cpu", "--workers", 0, "--shots", 1, "--seeds", 1,
           "--knn", 1, "--cache", cache)  # fmt: skip
    assert run("convert", folder, tmp_path / "own.safetensors") == 0
    kept = {path.name for path in cache.iterdir()}
    answer(capsys, "fewshot", tmp_path / "own.safetensors", photos, "--device", "cpu", "--workers", 0,
           "--shots", 1, "--seeds", 1, "--knn", 1, "--cache", cache)  # fmt: skip
    assert {path.name for path in cache.iterdir()} == kept, "the features are those of the same model"
    pytest.importorskip("onnxscript")
    import onnxruntime

    assert run("export", folder, tmp_path / "m.onnx", "--device", "cpu") == 0
    images = torch.rand(2, 3, 24, 24)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (result,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        assert (torch.from_numpy(result) - theirs[0](images).logits).abs().max() <= 1e-4


def test_the_service_watches_the_settings_of_a_folder_too(folder, small, tmp_path):
    before = file_stamps(str(folder))
    assert {mark[0] for mark in before} == {"model.safetensors", "config.json", "preprocessor_config.json"}
    output = json.loads((folder / "config.json").read_text()) | {"layer_norm_eps": 0.25}
    (folder / "config.json").write_text(json.dumps(output))
    assert file_stamps(str(folder)) != before and file_stamps(
        str(folder / "model.safetensors")
    ) == file_stamps(str(folder))
    settings = Settings(model=str(folder), device="cpu", precision="fp32", engine="torch")
    assert open_served(settings, 2).model.config.norm_eps == 0.25
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "recipe.json").write_text("{}")
    (run_folder / "metrics.jsonl").write_text("")
    vitkit.save(small(), run_folder / "model.safetensors")
    assert [mark[0] for mark in file_stamps(str(run_folder))] == ["model.safetensors"]
    assert file_stamps("ViT-B/16.augreg-i21k") == () and file_stamps(str(tmp_path / "nothing")) == ()


def test_a_run_folder_is_read_by_its_model_whatever_lies_beside_it(small, tmp_path):
    model = small(heads=4)
    (tmp_path / "recipe.json").write_text("{}")
    with refused("weights.not-found", tmp_path, "model.safetensors"):
        vitkit.load(tmp_path)
    vitkit.save(model, tmp_path / "real.safetensors")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "real.safetensors")
    (tmp_path / "config.json").write_text("{ not JSON")
    assert vitkit.load(tmp_path).config == model.config


def test_a_folder_that_vitkit_wrote_follows_its_json_when_that_was_edited(small, tmp_path):
    from dataclasses import replace

    model = small(heads=4)
    model.labels = ("a", "b", "c", "d", "e")
    model.preprocessing = replace(model.preprocessing, resize="crop", crop=0.875)
    vitkit.save(model, tmp_path / "hf")
    again = vitkit.load(tmp_path / "hf")
    assert (again.config, again.labels, again.preprocessing) == (
        model.config, model.labels, model.preprocessing,
    )  # fmt: skip
    for name, change in (
        ("config.json", {"num_attention_heads": 2, "id2label": {str(i): f"class {i}" for i in range(5)}}),
        ("preprocessor_config.json", {"image_mean": MEAN}),
    ):
        path = tmp_path / "hf" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    edited = vitkit.load(tmp_path / "hf")
    assert edited.config.heads == 2 and edited.labels[0] == "class 0"
    assert list(edited.preprocessing.mean) == MEAN and edited.preprocessing.crop == 0.875


@pytest.mark.parametrize(
    ("change", "mean", "std"),
    [
        ({"do_normalize": False}, 0.0, 1.0),
        ({"do_rescale": False}, 0.1 / 255, 0.9 / 255),
        ({"rescale_factor": 1 / 127.5}, 0.05, 0.45),
    ],
)
def test_rescaling_and_normalising_are_followed(folder, photos, theirs, change, mean, std):
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    from transformers import ViTImageProcessor

    from vitkit.data.decode import read
    from vitkit.inference.predict import pixels, prepare_batch

    model = vitkit.load(folder)
    assert model.preprocessing.mean[0] == pytest.approx(mean) and model.preprocessing.std[0] == pytest.approx(
        std
    )
    photo = photos / "owl" / "0.png"
    want = ViTImageProcessor.from_pretrained(folder)(Image.open(photo), return_tensors="pt")["pixel_values"]
    result = prepare_batch(model, pixels(read(photo), model)[None])
    assert torch.allclose(result, want, rtol=1e-4, atol=1e-4)


def test_a_central_crop_is_followed_and_what_cannot_be_is_named(folder):
    path = folder / "preprocessor_config.json"
    output = json.loads(path.read_text())
    crop = {"do_center_crop": True, "crop_size": {"height": 24, "width": 24}}
    path.write_text(json.dumps(output | crop | {"size": {"shortest_edge": 32}}))
    shown = vitkit.load(folder).preprocessing
    assert (shown.resize, shown.crop) == ("crop", 0.75)
    path.write_text(json.dumps(output | {"size": {"height": 48, "width": 48}}))
    assert any("48 x 48" in note and "24 x 24" in note for note in vitkit.load(folder).origin.notes)
    for change, words in ((crop, "do_center_crop"), ({"resample": 1}, "resample is 1")):
        path.write_text(json.dumps(output | change))
        with refused("weights.format", folder, "preprocessor_config.json", words):
            vitkit.load(folder)


def test_a_timm_folder_says_how_its_images_are_shown(small, tmp_path):
    model = small(gelu="erf", heads=4)
    folder = tmp_path / "timm"
    folder.mkdir()
    vitkit.save(model, folder / "model.pth", format="timm")
    state = torch.load(folder / "model.pth", weights_only=True)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    output = {"mean": MEAN, "std": STD, "crop_pct": 0.95, "interpolation": "bilinear", "crop_mode": "center"}
    config = {"architecture": "vit_x", "pretrained_cfg": output, "model_args": {"num_heads": 4}}
    (folder / "config.json").write_text(json.dumps(config | {"label_names": list("abcde")}))
    result = vitkit.load(folder)
    assert result.config.heads == 4
    assert result.labels == tuple("abcde") and result.preprocessing.crop == 0.95
    assert list(result.preprocessing.mean) == MEAN and result.preprocessing.interpolation == "bilinear"
    images = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(result(images), model(images), atol=1e-5)


def test_a_folder_of_neither_kind_names_what_it_lacks(tmp_path, capsys):
    for verb in (["predict", tmp_path, "x.png"], ["show", tmp_path], ["evaluate", tmp_path, "digits"]):
        assert run(*verb) == 2
        messages = capsys.readouterr().err
        assert str(tmp_path) in messages and "model.safetensors" in messages and messages.count("\n") == 1


def test_a_link_out_of_a_folder_is_not_copied_for_a_reload(folder, tmp_path):
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "copy").mkdir()
    with refused("weights.untrusted", folder, "model.safetensors"):
        copy_model(str(folder), tmp_path / "copy")
