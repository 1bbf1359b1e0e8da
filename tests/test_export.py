"""Exported files: they give the model's answers, carry its card, and appear only when that was seen."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from refusals import refused

import vitkit
from vitkit.cli.verbs import main
from vitkit.commands import export as exporting
from vitkit.commands.export import export
from vitkit.data.views import normalise
from vitkit.inference import builders, runtimes
from vitkit.inference import export as files
from vitkit.inference.agreement import agreement, sample_images
from vitkit.inference.export import describe_export
from vitkit.inference.graphs import AnyGrid, Form, check_form, resize_matrix, to_onnx, to_openvino, trace
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.positions import RESIZE, Positions, resize_positions

GRIDS = [
    ((4, 4), (4, 4)),
    ((4, 4), (1, 1)),
    ((14, 14), (24, 20)),
    ((3, 7), (5, 2)),
    ((1, 5), (9, 1)),
    ((8, 8), (3, 30)),
]
HOSTILE = [
    *(
        '"',
        "'",
        "<a b='1'>",
        "</rt_info>",
        "&amp;",
        "&",
        "]]>",
        "<!--",
        "\\",
        "\\n",
        "\n",
        "\r\n",
        "\t",
        "\x00",
    ),
    *(
        "\x01",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufffe",
        "\ud800",
        "é",
        "e\u0301",
        "日本",
        "🦜",
        " a ",
        "",
        "{}",
        "[",
    ),
    *("null", "a" * 5000),
]


@pytest.mark.parametrize("method", RESIZE)
@pytest.mark.parametrize("old, new", GRIDS)
def test_positions_by_matrices_are_those_of_the_model(method, old, new):
    positions = Positions("1d", "stem", grid=old, width=8, depth=1, lead=1, resize=method)
    torch.nn.init.normal_(positions.table)
    want = resize_positions(positions.table, old, new, method)
    assert torch.allclose(AnyGrid(positions).at(new, 0), want, atol=2e-5)


@pytest.mark.parametrize("method", RESIZE)
@pytest.mark.parametrize("kind", ["2d", "sincos2d"])
@pytest.mark.parametrize("lead", [0, 1])
def test_other_positions_by_matrices_are_those_of_the_model(method, kind, lead):
    positions = Positions(kind, "stem", grid=(4, 6), width=8, depth=1, lead=lead, resize=method)
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    for grid in ((4, 6), (1, 1), (9, 5), (4, 20)):
        assert torch.allclose(AnyGrid(positions).at(grid, 0), positions.at(grid).float(), atol=2e-5)


def test_each_row_of_a_resize_matrix_shares_out_one():
    for method in RESIZE:
        assert torch.allclose(resize_matrix(14, 37, method).sum(1), torch.ones(37), atol=1e-5)


def test_agreement_forgives_a_tie_and_nothing_else():
    want = torch.tensor([[1.0, 0.0], [0.5, 0.49]])
    assert agreement(want, want).ok and agreement(want, want).same_top1 == 1
    tie = torch.tensor([[1.0, 0.0], [0.49, 0.5]])
    assert agreement(want, tie, "fp16").ok and agreement(want, tie, "fp16").same_top1 == 0.5
    assert not agreement(want, tie, "fp32").ok
    turned = torch.tensor([[0.8, 0.81], [0.5, 0.49]])
    assert not agreement(want * 4, turned * 4, "int8").ok
    assert not agreement(want, want * float("nan")).ok
    with refused("export.disagrees", "(1, 2)", "(2, 2)"):
        agreement(want, want[:1])


def named(model):
    """A model with everything that a card holds."""
    model.labels = tuple(HOSTILE)
    model.multilabel = True
    model.preprocessing = Preprocessing(
        resize="crop", crop=0.9, interpolation="bicubic", mean=(0.1, 0.2, 0.3)
    )
    model.origin = Origin(source="a place", licence="CC0", notes=("one", "two"))
    return model


def same_card(path, model, **facts):
    message = describe_export(path)
    assert message.card.labels == model.labels and message.card.config == model.config
    assert message.card.preprocessing == model.preprocessing and message.card.origin == model.origin
    assert message.card.multilabel == model.multilabel
    assert message.facts["vitkit"] == vitkit.__version__
    assert {key: message.facts[key] for key in facts} == facts


def test_a_program_runs_in_any_batch_and_carries_its_card(small, tmp_path):
    model = named(small(classes=30))
    done = export(model, tmp_path / "m.pt2")
    assert [one.batch for one in done.compared] == [1, 16] and os.listdir(tmp_path) == ["m.pt2"]
    same_card(tmp_path / "m.pt2", model, input_shape=["batch", 3, 32, 32], output="logits", precision="fp32")
    program = torch.export.load(tmp_path / "m.pt2").module()
    images = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-6)
    content = (tmp_path / "m.pt2").read_bytes()
    assert b"site-packages" not in content and str(Path(vitkit.__file__).parent).encode() not in content


def disturbed(model, form):
    """The graph of a model with another head."""
    other = vitkit.adapt(model)
    with torch.no_grad():
        other.head.weight.normal_()
    return trace(other.eval(), form)


def test_a_file_that_disagrees_is_not_written_and_the_old_one_stays(small, tmp_path, monkeypatch, capsys):
    vitkit.save(small(), tmp_path / "m.safetensors")
    out = tmp_path / "m.pt2"
    out.write_bytes(b"old")
    monkeypatch.setattr(files, "trace", disturbed)
    with pytest.raises(SystemExit) as stop:
        main(
            ["export", str(tmp_path / "m.safetensors"), str(out), "--overwrite", "--device", "cpu", "--json"]
        )
    printed = capsys.readouterr()
    assert stop.value.code == 2 and "largest difference" in printed.err
    assert json.loads(printed.out)["error"]["code"] == "export.disagrees"
    assert out.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["m.pt2", "m.safetensors"]


def test_two_files_appear_together_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "made"
    folder.mkdir()
    for place, text in ((folder, "new"), (tmp_path, "old")):
        for ending in (".xml", ".bin"):
            (place / f"m{ending}").write_text(text)
    real = os.rename

    def fails(source, target):
        if Path(target) == tmp_path / "m.xml" and Path(source).parent == folder:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(ValueError, match="No space left"):
        exporting.publish(folder, tmp_path / "m.xml")
    assert [(tmp_path / name).read_text() for name in ("m.xml", "m.bin")] == ["old", "old"]
    monkeypatch.setattr(os, "rename", real)
    (folder / "before").rmdir()
    (folder / "m.bin").write_text("new")
    assert [path.name for path in exporting.publish(folder, tmp_path / "m.xml")] == ["m.xml", "m.bin"]
    assert [(tmp_path / name).read_text() for name in ("m.xml", "m.bin")] == ["new", "new"]


def test_an_existing_file_is_replaced_only_when_that_is_asked_for(small, tmp_path, capsys):
    vitkit.save(small(), tmp_path / "m.safetensors")
    words = ["export", str(tmp_path / "m.safetensors"), str(tmp_path / "m.pt2"), "--device", "cpu", "--json"]
    (tmp_path / "m.pt2").write_bytes(b"old")
    with pytest.raises(SystemExit) as stop:
        main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and str(tmp_path / "m.pt2") in err and "--overwrite" in err
    assert err.count("\n") == 1 and (tmp_path / "m.pt2").read_bytes() == b"old"
    main([*words, "--overwrite"])
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "m.pt2").stat().st_size > 3
    (tmp_path / "n.bin").write_bytes(b"old")  # the second file alone would be lost as well
    with pytest.raises(ValueError, match=r"n\.bin already exists"):
        export(small(), tmp_path / "n.xml")


@pytest.mark.parametrize("bad, code", [(2, 0), (6, 2)])
def test_images_that_cannot_be_read_are_left_out_and_counted(small, tmp_path, capsys, bad, code):
    vitkit.save(small(), tmp_path / "m.safetensors")
    (tmp_path / "photos").mkdir()
    for n in range(6):
        Image.fromarray(np.full((40, 40, 3), 40 * n, np.uint8)).save(tmp_path / "photos" / f"{n}.png")
    for n in range(bad):
        (tmp_path / "photos" / f"{n}.png").write_bytes(b"nothing")
    words = ["--images", str(tmp_path / "photos"), "--device", "cpu", "--json"]
    try:
        main(["export", str(tmp_path / "m.safetensors"), str(tmp_path / "m.pt2"), *words])
    except SystemExit as stop:
        assert stop.code == code
    message = capsys.readouterr()
    assert (
        message.err.count("\n") == 1
        and "0.png" in message.err
        and (tmp_path / "m.pt2").exists() == (code == 0)
    )
    if code == 0:
        assert "2 of 6 images" in message.err
        done = json.loads(message.out)
        assert done["unread"] == 2 and done["compared"][1]["batch"] == 4
    else:
        assert "none of 6 images" in message.err


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("m.tflite", {}, "the file ending"),
        ("m", {}, "the file ending"),
        ("m.onnx", {"precision": "int8"}, "--calibrate"),
        ("m.onnx", {"calibrate": ("digits",)}, "--calibrate"),
        ("m.onnx", {"precision": "int4"}, "unknown precision 'int4'"),
        ("m.onnx", {"precision": "bf16"}, "no bf16"),
        ("m.xml", {"precision": "bf16"}, "INFERENCE_PRECISION_HINT"),
        ("m.pt2", {"precision": "int8", "calibrate": ("digits",)}, "use .onnx or .xml"),
        ("m.onnx", {"compiled": True}, "writes a .pt2"),
        ("none/m.onnx", {}, "none does not exist"),
        ("m.pt2", {"image_size": (33, 32), "strict_size": True}, "does not fit patches"),
        ("m.pt2", {"images": ("none.png",)}, "none.png"),
        (".", {}, "the file ending"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(small, tmp_path, name, options, words):
    with pytest.raises(ValueError, match=words):
        export(small(), tmp_path / name, **options)
    assert os.listdir(tmp_path) == []


def test_forms_that_a_model_has_not(small, tmp_path):
    with refused("export.unsupported", "--any-size", "relative", "(4, 4)"):
        check_form(small(positions="relative"), Form(any_size=True))
    with refused("export.unsupported", "--pixels", "head"):
        export(small(classes=0), tmp_path / "m.onnx", pixels=True)
    with pytest.raises(ValueError, match="channels"):
        export(small(channels=1), tmp_path / "m.onnx")


@pytest.mark.parametrize("name, library", [("m.onnx", "onnx"), ("m.xml", "openvino")])
def test_a_missing_library_is_named_with_what_installs_it(small, tmp_path, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    extra = {"onnx": "export"}.get(library, library)
    with refused("request.extra-missing", library, f"pip install 'vitkit[{extra}]'"):
        export(small(), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_openvino_reports_nothing_to_its_maker():
    code = "from vitkit.inference.graphs import needs; needs('openvino'); import sys; import threading; "
    code += "print(sys.modules['openvino_telemetry'], threading.active_count())"
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert message.split() == ["None", "1"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_to(small):
    with pytest.raises(ValueError, match="cannot write"):
        export(small(), "/proc/m.pt2")


def test_a_file_without_a_card_is_said_to_have_none(tmp_path):
    for name in ("a.pt2", "b.onnx"):
        (tmp_path / name).write_bytes(b"")
        with refused("weights.format", name):
            describe_export(tmp_path / name)
    with refused("file.not-found", "none.onnx"):
        describe_export(tmp_path / "none.onnx")


KINDS = {
    "token": {},
    "average": {"head": "gap", "final_norm": "pooled"},
    "attention pooling": {"head": "map", "representation": 12},
    "2d in every layer": {"positions": "2d", "injection": "every"},
    "sines": {"positions": "sincos2d", "injection": "shared"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none", "qkv_bias": False},
    "axial": {"attention": "axial", "head": "gap"},
    "timm's resize": {"position_resize": "timm", "gelu": "erf"},
    "dinov2's resize": {"position_resize": "dinov2", "layer_scale": True, "mask_token": True},
    "hybrid": {},
    "resnet": {},
}


@pytest.fixture
def kind(request, small, small_hybrid, small_resnet):
    makers = {"hybrid": small_hybrid, "resnet": small_resnet}
    return makers.get(request.param, small)(**KINDS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_every_kind_gives_the_same_answer_in_every_runtime(kind, any_size):
    if any_size and getattr(kind.config, "positions", "") == "relative":
        pytest.skip("refused: see above")
    form = Form(any_size=any_size)
    program = trace(kind, form)
    run = {
        "torch.export": program.module(),
        "onnx": runtimes.onnx_runtime(to_onnx(program, form, "logits").SerializeToString()),
        "openvino": runtimes.openvino(to_openvino(program, form, "logits")),
    }
    height, width = kind.config.image_size
    step = getattr(kind.config, "stride", 32)
    sizes = [(1, height, width), (5, height, width)]
    sizes += [(2, height + step, width + 3 * step), (1, 2 * step, 3 * step)] if any_size else []
    for batch, h, w in sizes:
        images = torch.randn(batch, 3, max(h, 64 if kind.config.image_size == (64, 64) else 1), w)
        with torch.no_grad():
            want = kind(images)
        for name, answer in run.items():
            got = answer(images if name == "torch.export" else images.numpy())
            result = agreement(want, got)
            assert result.ok, (name, images.shape, result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.onnx", "m.xml", "m.pt2"])
def test_pixels_in_are_the_probabilities_of_predict(small, tmp_path, name):
    model = small(image_size=(32, 48))
    model.labels = tuple("abcde")
    model.preprocessing = replace(model.preprocessing, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (32, 48, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    done = export(model, tmp_path / name, pixels=True, any_size=True, images=(str(tmp_path / "a.png"),))
    assert [one.size for one in done.compared] == [(32, 48), (32, 48), (40, 64)]
    same_card(tmp_path / name, model, input="pixels", input_type="uint8", any_size=True)
    pixels = np.asarray(Image.open(tmp_path / "a.png"))[None]
    if name.endswith(".pt2"):
        got = torch.export.load(tmp_path / name).module()(torch.from_numpy(pixels.copy()))
    else:
        runtime = runtimes.onnx_runtime if name.endswith(".onnx") else runtimes.openvino
        got = runtime(tmp_path / name)(pixels)
    message = dict(zip(model.labels, got[0].tolist(), strict=True))
    assert dict(vitkit.predict(model, tmp_path / "a.png")) == pytest.approx(message, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.onnx", "m.xml"])
def test_labels_of_any_kind_come_back_in_their_order(small, tmp_path, name):
    model = named(small(classes=30))
    export(model, tmp_path / name, pixels=True)
    same_card(tmp_path / name, model, output="probabilities")
    if name == "m.onnx":
        onnx.checker.check_model(str(tmp_path / name))
        assert b"site-packages" not in (tmp_path / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.onnx", "m.xml", "m.pt2"])
def test_half_precision_halves_the_file(small, tmp_path, name):
    model = small(width=192, hidden=768, heads=4)
    whole, half = (export(model, tmp_path / name, precision=p, overwrite=True) for p in ("fp32", "fp16"))
    assert half.bytes < 0.7 * whole.bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.onnx", "m.xml"])
def test_int8_is_calibrated_and_compared_on_other_images(small, tmp_path, name, capsys):
    vitkit.save(small(), tmp_path / "m.safetensors")
    main(["export", str(tmp_path / "m.safetensors"), str(tmp_path / name), "--precision", "int8",
          "--calibrate", "digits", "--device", "cpu", "--json"])  # fmt: skip
    message = json.loads(capsys.readouterr().out)
    assert message["precision"] == "int8" and message["compared"][1]["batch"] == 16
    assert 0 < message["compared"][1]["largest"] <= message["compared"][1]["tolerance"]


@pytest.mark.slow
def test_a_compiled_program_is_a_package_with_a_card(small, tmp_path):
    if not builders.compiler():
        pytest.skip("no C++ compiler")
    model = small()
    assert "AOTInductor" in export(model, tmp_path / "m.pt2", compiled=True).format
    same_card(tmp_path / "m.pt2", model)


def test_without_a_compiler_it_is_said(small, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    with refused("export.unsupported", "--compiled", "C++ compiler"):
        export(small(), tmp_path / "m.pt2", compiled=True)


@pytest.mark.slow
def test_zeros_before_a_max_pooling_stay_zeros_in_onnx_runtime(small_resnet):
    """ONNX Runtime folds the Pad into the MaxPool, which pads with minus infinity, unless kept from it."""
    model = small_resnet()
    made = to_onnx(trace(model, Form()), Form(), "logits")
    images = normalise(sample_images(model, 4), (0.5,) * 3, (0.5,) * 3)
    want = model(images).detach()
    assert agreement(want, runtimes.onnx_runtime(made.SerializeToString())(images.numpy())).ok
    assert [node.op_type for node in made.graph.node].count("Max") == 1
