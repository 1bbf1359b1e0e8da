"""Exported files as models: predict gives the model's own answers, and says what a file lacks."""

import json

import numpy as np
import onnx
import pytest
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.commands.export import export
from vitkit.inference.export import describe_export
from vitkit.inference.exported import open_exported

LABELS = ("tabby, tabby cat", "tiger cat", "=dog", "bird", "fish")


def labelled(model):
    model.labels = LABELS
    return model


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with five photographs and one that cannot be read."""
    room, rng = tmp_path_factory.mktemp("exported"), np.random.default_rng(0)
    (room / "photos").mkdir()
    for n in range(5):
        pixels = rng.integers(0, 255, (40 + n, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(room / "photos" / f"{n}.png")
    (room / "photos" / "broken.png").write_bytes(b"nothing")
    return room


@pytest.fixture
def files(room, small):
    """The same with a model whose images are not square, and as an ONNX file, which is made once."""
    exported(room, small, "m.onnx")
    return room


def exported(room, small, name):
    model = labelled(small(image_size=(32, 48)))
    if not (room / name).exists():
        vitkit.save(model, room / "m.safetensors")
        export(model, room / name, pixels=name.startswith("pixels"))
    return room / name


def answers(capsys, *words):
    code = run("predict", *words, "--json")
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    [
        "m.onnx",
        pytest.param("m.xml", marks=pytest.mark.slow),
        pytest.param("pixels.onnx", marks=pytest.mark.slow),
    ],
)
def test_predict_takes_an_exported_file_and_answers_as_the_model(room, small, name, capsys):
    files = exported(room, small, name).parent
    code, want = answers(capsys, files / "m.safetensors", files / "photos", "--device", "cpu")
    assert code == 1 and sum("error" in one for one in want) == 1
    code, got = answers(capsys, files / name, files / "photos")
    assert code == 1 and [one["image"] for one in got] == [one["image"] for one in want]
    for ours, theirs in zip(want, got, strict=True):
        assert ours.get("error") == theirs.get("error")
        expected = {one["label"]: pytest.approx(one["probability"], abs=1e-4) for one in ours.get("top", ())}
        assert {one["label"]: one["probability"] for one in theirs.get("top", ())} == expected
    python = vitkit.predict(files / name, files / "photos" / "0.png")
    assert [label for label, _ in python] == [one["label"] for one in got[0]["top"]]
    assert "32x48" in repr(open_exported(files / name)) and len(repr(open_exported(files / name))) < 300


@pytest.mark.slow
def test_several_labels_at_once_come_out_of_pixels_as_of_the_model(small, tmp_path):
    model = labelled(small())
    model.multilabel = True
    export(model, tmp_path / "m.onnx", pixels=True)
    picture = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    want = dict(vitkit.predict(model, picture))
    assert dict(vitkit.predict(tmp_path / "m.onnx", picture)) == pytest.approx(want, abs=1e-4)
    assert sum(want.values()) != pytest.approx(1, abs=1e-2)


def changed(files, tmp_path, change):
    model = onnx.load(files / "m.onnx")
    change(model)
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def without_card(model):
    del model.metadata_props[:]


def other_size(model):
    for entry in model.metadata_props:
        entry.value = entry.value.replace("[32, 48]", "[32, 32]")


def fewer_labels(model):
    for entry in model.metadata_props:
        entry.value = entry.value.replace('"bird", ', "")


@pytest.mark.parametrize(
    "change, words",
    [
        (without_card, "labels, preprocessing and image size"),
        (other_size, "32x32"),
        (fewer_labels, "4 labels for 5"),
    ],
)
def test_a_file_that_lacks_what_is_needed_is_named_with_what_to_do(files, tmp_path, change, words, capsys):
    path = changed(files, tmp_path, change)
    assert run("predict", path, files / "photos") == 2
    message = capsys.readouterr()
    assert words in message.err and f"vitkit export MODEL {path}" in message.err
    assert message.err.count("\n") == 1 and not message.out


def test_files_that_do_not_run_are_named_in_a_line(files, tmp_path, capsys):
    (tmp_path / "cut.onnx").write_bytes((files / "m.onnx").read_bytes()[:3000])
    (tmp_path / "alone.xml").write_text("<net/>")
    (tmp_path / "m.pt2").write_bytes(b"")
    for name, words in (("cut.onnx", "cut.onnx"), ("alone.xml", "alone.bin"), ("m.pt2", ".onnx and .xml"),
                        ("none.onnx", "no file")):  # fmt: skip
        assert run("predict", tmp_path / name, files / "photos") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err and str(tmp_path / name) in err


def test_a_file_that_the_runtime_cannot_open_is_an_engine_that_failed(files, tmp_path):
    (tmp_path / "cut.onnx").write_bytes((files / "m.onnx").read_bytes()[:3000])
    with refused("engine.failed", tmp_path / "cut.onnx", "vitkit export"):
        open_exported(tmp_path / "cut.onnx")


def out_of_bounds(model):
    """The graph opens, and fails on every image: it asks for classes far after the last."""
    graph = model.graph
    graph.node[-1].output[0] = "all"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([10**6] * 5), "place"))
    name = graph.output[0].name
    graph.node.append(onnx.helper.make_node("Gather", ["all", "place"], [name], axis=1))


def test_a_file_that_opens_and_fails_on_images_is_named_with_what_to_do(files, tmp_path):
    path = changed(files, tmp_path, out_of_bounds)
    with refused("engine.failed", path, "vitkit export"):
        vitkit.predict(path, files / "photos" / "0.png")


@pytest.mark.parametrize("words", [["--device", "cuda"], ["--engine", "torch"]])
def test_what_an_exported_file_has_no_choice_of_is_refused(files, words, capsys):
    assert run("predict", files / "m.onnx", files / "photos", *words) == 2
    assert " ".join(words) in capsys.readouterr().err


def test_other_verbs_name_what_they_need_instead(files, capsys):
    assert run("evaluate", files / "m.onnx", "digits") == 2
    err = capsys.readouterr().err
    assert "m.onnx" in err and "run folder" in err and err.count("\n") == 1


def test_show_describes_an_exported_file(files, capsys):
    assert run("show", files / "m.onnx", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "ONNX" and facts["input"] == "images" and facts["image_size"] == [32, 48]
    assert run("show", files / "m.onnx") == 0
    out = capsys.readouterr().out
    assert "32 x 48" in out and "tabby, tabby cat" in out and "{" not in out
    (files / "damaged.onnx").write_bytes(b"\xff" * 100)
    with refused("weights.format", "damaged.onnx"):
        describe_export(files / "damaged.onnx")
