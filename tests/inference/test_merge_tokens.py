"""--merge-tokens: the same answers from Python, the commands, tables and exported files, and its refusals."""

import csv
import json

import numpy as np
import pytest
from labelled_photos import paths, save_model_and_photos
from refusals import refused
from test_cli import run as command

import vitkit
from vitkit.inference.engine_cache import EngineCache
from vitkit.inference.export import describe_export
from vitkit.inference.predict import with_merging
from vitkit.models.adapt import adapt
from vitkit.models.variants import build

COUNT = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return save_model_and_photos(tmp_path_factory.mktemp("merging"))


def test_all_ways_to_merge_tokens_agree(made, tmp_path, capsys):
    place, data = str(made / "m.safetensors"), str(made / "photos")
    model = vitkit.load(place)
    expected = vitkit.predict(adapt(model, merge_tokens=COUNT), paths(made), top=2)
    assert vitkit.predict(model, paths(made), top=2, merge_tokens=COUNT) == expected
    assert vitkit.predict(model, paths(made), top=2) != expected
    assert model.config.merge_tokens == 0  # the model itself is not changed

    flags = ("--merge-tokens", str(COUNT), "--top", "2")
    assert command("predict", place, *paths(made), *flags, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in rows] == [answer[0][0] for answer in expected]
    assert [row["probability"] for row in rows] == pytest.approx([answer[0][1] for answer in expected])

    table = tmp_path / "t.csv"
    assert command("predict", place, *paths(made), *flags, "--out", str(table), "--workers", "0") == 0
    with open(table, newline="") as file:
        written = [float(row["probability"]) for row in csv.DictReader(file)]
    assert written == pytest.approx([answer[0][1] for answer in expected], rel=1e-4)

    metrics = vitkit.evaluate(model, data, split="all", merge_tokens=COUNT, workers=0)
    names = [path.split("/")[-2] for path in paths(made)]
    correct = [name == answer[0][0] for name, answer in zip(names, expected, strict=True)]
    assert metrics["top1"] == pytest.approx(np.mean(correct))


def test_features_are_of_the_merged_model(made, tmp_path):
    model = vitkit.load(made / "m.safetensors")
    expected = vitkit.embed(adapt(model, merge_tokens=COUNT), paths(made))
    assert np.array_equal(vitkit.embed(model, paths(made), merge_tokens=COUNT), expected)
    assert np.abs(vitkit.embed(model, paths(made)) - expected).max() > 1e-3
    done = vitkit.embed(
        made / "m.safetensors", made / "photos", out=tmp_path / "f.npz", merge_tokens=COUNT, workers=0
    )
    assert np.allclose(np.load(done.path)["embedding"], expected, atol=1e-5)
    with refused("model.unsupported", "merge_tokens"):
        vitkit.embed(model, made / "photos", out=tmp_path / "g.npz", merge_tokens=COUNT, pool="mean")


@pytest.mark.slow
def test_an_exported_file_merges_as_the_model_does(made, tmp_path):
    pytest.importorskip("onnxruntime")
    model, file = vitkit.load(made / "m.safetensors"), tmp_path / "m.onnx"
    vitkit.export(model, file, merge_tokens=COUNT)
    assert describe_export(file).card.config.merge_tokens == COUNT
    for ours, theirs in zip(
        vitkit.predict(model, paths(made), top=2, merge_tokens=COUNT),
        vitkit.predict(file, paths(made), top=2),
        strict=True,
    ):
        assert [label for label, _ in ours] == [label for label, _ in theirs]
        assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)
    with refused("model.unsupported", "merge_tokens"):
        vitkit.predict(file, paths(made)[0], merge_tokens=COUNT)
    with refused("export.unsupported", "merge_tokens"):
        vitkit.export(model, tmp_path / "any.onnx", merge_tokens=COUNT, any_size=True)


def test_engines_of_both_models_are_cached_apart(made):
    model = vitkit.load(made / "m.safetensors")
    merging = with_merging(model, COUNT)
    assert EngineCache(model, 2).folder != EngineCache(merging, 2).folder


def test_merging_almost_all_patches_is_refused(made):
    model = vitkit.load(made / "m.safetensors")
    most = (model.config.tokens - model.config.prefix) // model.config.depth
    assert with_merging(model, most).config.merge_tokens == most
    with refused("request.value", f"merge_tokens={most + 1}", most):
        with_merging(model, most + 1)


def test_what_has_no_tokens_is_refused(made, tmp_path, capsys):
    resnet = build("BiT-R50x1", blocks=(1,), width=32, classes=3, image_size=64)
    with refused("model.unsupported", "merge_tokens=4"):
        vitkit.predict(resnet, paths(made)[0], merge_tokens=4)
    with refused("model.config", "merge_tokens", -1):
        vitkit.predict(vitkit.load(made / "m.safetensors"), paths(made)[0], merge_tokens=-1)
    assert command("predict", str(made / "m.safetensors"), paths(made)[0], "--merge-tokens", "-1") == 2
