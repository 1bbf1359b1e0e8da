"""Engines: the fastest that agrees is taken and remembered, none that disagrees ever is."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from refusals import refused

from vitkit.commands import predict as use
from vitkit.inference import builders, engines
from vitkit.inference.agreement import clouds, generated, sample_images, select_images
from vitkit.inference.bf16 import FusedDense, fuse_dense_layers, has_fused_dense
from vitkit.inference.builders import ENGINES, available
from vitkit.inference.engine_cache import SUMS, EngineCache, checksums
from vitkit.inference.engines import choose_engine
from vitkit.inference.predict import logits, predict_many


class Clock:
    """The time that engines are told: what each is said to take, whatever else this machine does."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    output = Clock()
    monkeypatch.setattr(engines, "time", output)
    return output


def made_of(monkeypatch, runs: dict):
    """Only these engines there are; each is what the model says, changed, and takes so long."""
    built: list[str] = []

    def build(name, model, batch, calibrate, cache):
        built.append(name)
        change, delay = runs[name]

        def run(images):
            engines.time.now += delay
            return change(logits(model, images))

        return run

    monkeypatch.setattr(engines, "build_engine", build)
    monkeypatch.setattr(
        engines, "available", lambda name, calibrated, cpu=True: "" if name in runs else "not here"
    )
    return built


def slowed(monkeypatch, seconds: float):
    real = logits

    def slow(model, images):
        engines.time.now += seconds
        return real(model, images)

    monkeypatch.setattr(engines, "logits", slow)


def same(values):
    return values


def turned(values):
    return values.flip(-1)


def one_turned(values):
    """One image's two likeliest labels change places, by less than int8 is allowed."""
    best = values.topk(2).indices[0]
    values = values.clone()
    values[0, best[1]] = values[0, best[0]] + 1e-4
    return values


def test_the_fastest_that_agrees_is_taken_and_remembered(small, tmp_path, monkeypatch):
    slowed(monkeypatch, 0.03)
    built = made_of(
        monkeypatch, {"onnxruntime": (same, 0.01), "openvino": (same, 0.0), "openvino-fp16": (turned, 0.0)}
    )
    output: list[str] = []
    model = small()
    engine = choose_engine(model, batch=4, folder=tmp_path, log=output.append)
    assert engine.name == "openvino" and engine.seconds < 0.03
    assert any("openvino-fp16: not used" in line for line in output)
    images = sample_images(model, 3)
    assert torch.equal(engine(images), logits(model, images))
    built.clear()
    assert choose_engine(model, batch=4, folder=tmp_path).name == "openvino" and built == ["openvino"]
    choose_engine(model, batch=5, folder=tmp_path)
    assert set(built) > {"openvino"}, "another batch is another question"


def test_other_weights_are_another_question(small, tmp_path):
    first = small()
    second, copy = deepcopy(first), deepcopy(first)
    with torch.no_grad():
        second.head.bias.add_(1e-3)

    def file(model, batch):
        return EngineCache(model, batch, folder=tmp_path).choice_file

    assert file(first, 4) != file(second, 4)
    assert file(first, 4) == file(copy, 4)
    assert file(first, 8) != file(first, 4)


def test_a_choice_that_no_longer_agrees_is_measured_again(small, tmp_path, monkeypatch):
    slowed(monkeypatch, 0.02)
    made_of(monkeypatch, {"onnxruntime": (same, 0.0)})
    model = small()
    assert choose_engine(model, batch=2, folder=tmp_path).name == "onnxruntime"
    made_of(monkeypatch, {"onnxruntime": (turned, 0.0)})
    assert choose_engine(model, batch=2, folder=tmp_path).name == "torch"
    assert EngineCache(model, 2, folder=tmp_path).load_choice() == "torch"


def test_torch_stays_where_nothing_is_clearly_faster(small, tmp_path, monkeypatch):
    made_of(monkeypatch, {"onnxruntime": (same, 0.05)})
    assert choose_engine(small(), batch=2, folder=tmp_path).name == "torch"


@pytest.mark.parametrize("kind", ["openvino-int8", "onnxruntime-8bit"])
@pytest.mark.parametrize("change, stays", [(same, True), (one_turned, False)])
def test_auto_takes_eight_bits_only_if_every_top1_stays(small, tmp_path, monkeypatch, kind, change, stays):
    slowed(monkeypatch, 0.03)
    made_of(monkeypatch, {kind: (change, 0.0)})
    model = small()
    engine = choose_engine(model, batch=2, folder=tmp_path, calibrate=sample_images(model, 4))
    assert engine.name == (kind if stays else "torch")


def test_engines_of_a_gpu_are_refused_on_the_cpu(small, tmp_path):
    with refused("engine.failed", "graph", "--device cuda"):
        choose_engine(small(), "graph", folder=tmp_path)
    assert "give --device cpu" in available("onnxruntime", False, cpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vit", "hybrid"])
@pytest.mark.parametrize("name", ["graph", "graph-compiled"])
def test_a_recorded_model_says_the_same_for_any_number_of_images(small, small_hybrid, tmp_path, name, kind):
    model = (small if kind == "vit" else small_hybrid)().cuda()
    engine = choose_engine(model, name, batch=4, folder=tmp_path)
    images = sample_images(model, 7)
    torch.testing.assert_close(engine(images), engines.torch_engine(model)(images), rtol=0.1, atol=0.1)


def test_int8_is_never_had_without_images_to_calibrate_on(small, tmp_path):
    assert "--calibrate" in available("openvino-int8", False)
    with refused("engine.failed", "openvino-int8", "--calibrate"):
        choose_engine(small(), "openvino-int8", folder=tmp_path)


def test_an_engine_that_was_asked_for_and_disagrees_is_refused(small, tmp_path, monkeypatch):
    made_of(monkeypatch, {"openvino": (turned, 0.0)})
    with refused("engine.failed", "openvino", "largest difference", "--engine torch"):
        choose_engine(small(), "openvino", folder=tmp_path)


def test_an_engine_that_was_asked_for_and_fails_is_named(small, tmp_path, monkeypatch):
    def fails(logits):
        raise RuntimeError("could not create a primitive\n  descriptor")

    made_of(monkeypatch, {"torch-bf16": (fails, 0.0)})
    with refused("engine.failed", "torch-bf16", "primitive descriptor", "--engine torch"):
        choose_engine(small(), "torch-bf16", folder=tmp_path)


def cut_graph(cache: EngineCache) -> Path:
    """A graph that is cut short although its checksum is right, as one that was damaged while written."""
    path = cache.file("model.onnx", lambda path: builders.write_onnx(cache.model, path))
    path.write_bytes(path.read_bytes()[:3000])
    (path.parent / SUMS).write_text(json.dumps(checksums(path.parent)))
    return path


@pytest.mark.slow
def test_a_graph_that_the_runtime_cannot_read_is_named_with_what_to_do(small, tmp_path):
    pytest.importorskip("onnxruntime")
    cache = EngineCache(small(), 4, folder=tmp_path)
    cut_graph(cache)
    with refused("engine.failed", "onnxruntime", cache.folder, "--engine torch"):
        choose_engine(cache.model, "onnxruntime", batch=4, folder=tmp_path)


@pytest.mark.slow
def test_auto_does_without_a_choice_whose_graph_cannot_be_read(small, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(engines, "ENGINES", {"torch": "fp32", "onnxruntime": "fp32"})
    cache = EngineCache(small(), 4, folder=tmp_path)
    cache.folder.mkdir(parents=True)
    cache.save_choice("onnxruntime", 0.1)
    cut = cut_graph(cache)
    size = cut.stat().st_size
    assert choose_engine(cache.model, batch=4, folder=tmp_path).name in ("torch", "onnxruntime")
    assert cut.stat().st_size > size, "it is made again"


def test_unknown_names_and_batches(small, tmp_path):
    with refused("engine.unknown", "tensorrt", "auto, torch"):
        choose_engine(small(), "tensorrt", folder=tmp_path)
    with refused("request.value", "batch", "not 0"):
        choose_engine(small(), batch=0, folder=tmp_path)


def test_little_work_is_begun_at_once(small, tmp_path, monkeypatch):
    built = made_of(monkeypatch, dict.fromkeys(ENGINES, (same, 0.0)))
    engine = choose_engine(small(), work=50, folder=tmp_path)
    assert engine.name == "torch" and not built and not list(tmp_path.iterdir())


def test_compiling_waits_for_long_work(small, tmp_path, monkeypatch):
    slowed(monkeypatch, 0.02)
    built = made_of(monkeypatch, {"compile": (same, 0.0)})
    model = small()
    choose_engine(model, batch=2, folder=tmp_path)
    assert built == []
    assert choose_engine(model, batch=3, work=10**7, folder=tmp_path).name == "compile"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_in_bf16_a_model_says_nearly_the_same_and_stays_as_it_is(small, small_hybrid):
    for model in (small(), small_hybrid()):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        images = sample_images(model, 3)
        result = builders.torch_bf16(builders.Request(model, 3, None, None))(images)
        want = engines.torch_engine(model)(images)
        assert result.dtype == torch.float32 and not torch.equal(result, want)
        torch.testing.assert_close(result, want, rtol=0.1, atol=0.1)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.skipif(not has_fused_dense(torch.float32), reason="oneDNN is not in this PyTorch")
@pytest.mark.parametrize(
    "options", [{}, {"gelu": "erf"}, {"head": "gap"}, {"head": "map"}, {"qkv_bias": False}]
)
@torch.inference_mode()
def test_dense_layers_in_one_product_say_the_same(small, options):
    model = small(**options)
    images, whole = torch.randn(3, 3, *model.config.image_size), deepcopy(model)
    fuse_dense_layers(whole)
    kinds = {type(part) for part in whole.modules()}
    assert FusedDense in kinds and torch.nn.Linear not in kinds
    torch.testing.assert_close(whole(images), model(images))


def test_a_processor_without_bf16_is_not_asked_for_it(monkeypatch):
    monkeypatch.setattr(builders, "fast_bf16", lambda: False)
    assert "bf16" in available("torch-bf16", False) and "bf16" in available("compile-bf16", False)


def test_a_missing_library_is_named(monkeypatch):
    real = builders.importlib.util.find_spec
    monkeypatch.setattr(
        builders.importlib.util,
        "find_spec",
        lambda name: None if name in ("onnx", "openvino") else real(name),
    )
    assert "vitkit[export]" in available("onnxruntime", False)
    assert "vitkit[openvino]" in available("openvino", False)


def test_a_graph_is_written_once_and_a_cache_that_cannot_be_written_is_done_without(small, tmp_path):
    calls: list[Path] = []

    def write(path):
        calls.append(path)
        path.write_text("graph")

    cache = EngineCache(small(), 4, folder=tmp_path / "cache")
    first, second = cache.file("model.onnx", write), cache.file("model.onnx", write)
    assert first == second and first.read_text() == "graph" and len(calls) == 1
    (tmp_path / "file").write_text("")
    shut = EngineCache(small(), 4, folder=tmp_path / "file")
    assert shut.file("model.onnx", write).read_text() == "graph"
    shut.save_choice("torch", 1.0)
    assert shut.load_choice() is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"engine"', "\x00"])
def test_a_damaged_note_is_no_choice(small, tmp_path, content):
    cache = EngineCache(small(), 4, folder=tmp_path)
    cache.save_choice("torch", 1.0)
    assert cache.load_choice() == "torch" and json.loads(cache.choice_file.read_text())["batch"] == 4
    cache.choice_file.write_text(content)
    assert cache.load_choice() is None


def test_samples_are_like_pictures_and_spread_over_the_data(small, tmp_path):
    assert len(generated(8)) == 8 and clouds(0).shape == (256, 256, 3)
    assert clouds(0).std() > 20 and not (clouds(0) == clouds(1)).all()
    assert sample_images(small(), 5).shape == (5, 3, 32, 32)
    assert sample_images(small(), 3, size=(40, 24)).shape == (3, 3, 40, 24)
    assert len(select_images(("digits",), 10)) == 10
    with refused("data.empty", tmp_path):
        sample_images(small(), places=(str(tmp_path),))


def test_predict_asks_for_an_engine_only_for_many_images(small, tmp_path, monkeypatch, capsys):
    model = small()
    assert use.engine_for(model, "auto", 3, ()) is None and use.engine_for(model, "torch", 10**6, ()) is None
    engine = use.engine_for(model, "auto", 100, ())
    assert engine.name == "torch" and "engine: torch" in capsys.readouterr().err
    paths = []
    for n in range(2):
        from PIL import Image

        paths.append(str(tmp_path / f"{n}.png"))
        Image.fromarray(clouds(n)).save(paths[-1])
    messages = [p.top for p in predict_many(model, paths, engine=engine)]
    assert messages == [p.top for p in predict_many(model, paths)]
    assert [
        p.top for p in predict_many(model, paths, engine=lambda images: torch.zeros(len(images), 5))
    ] != messages


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "onnxruntime",
        "onnxruntime-8bit",
        "onnxruntime-int8",
        "openvino",
        "openvino-fp16",
        "openvino-int8",
        "compile",
    ],
)
def test_the_real_engines_agree_at_any_batch(small, tmp_path, name):
    model = small()
    calibrate = sample_images(model, 16)
    if reason := available(name, True):
        pytest.skip(reason)
    engine = choose_engine(model, name, batch=4, folder=tmp_path, calibrate=calibrate)
    tolerance = {"fp32": 1e-4, "fp16": 2e-2, "8bit": 0.1, "int8": 0.3}[ENGINES[name]]
    for count in (1, 4, 6):
        images = sample_images(model, count)
        assert engine(images).dtype == torch.float32
        assert torch.allclose(engine(images), logits(model, images), atol=tolerance)


@pytest.mark.slow
def test_auto_on_this_machine_says_what_torch_says(small, tmp_path):
    model = small()
    model.labels = tuple("abcde")
    engine = choose_engine(model, batch=4, folder=tmp_path)
    again = choose_engine(model, batch=4, folder=tmp_path)
    assert engine.name == again.name
    images = sample_images(model, 6)
    want = logits(model, images)
    assert torch.equal(engine(images).argmax(-1), want.argmax(-1))
