"""The engines' folder: the models that were not used for the longest time go where it becomes too large."""

import os
import time
from pathlib import Path

import pytest
import torch

from vitkit.inference import engine_cache
from vitkit.inference.engine_cache import EngineCache


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder with room for the graphs of two models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_cache, "LIMIT", 2500)
    return tmp_path / "vitkit" / "engines"


def models(small, count: int) -> list:
    """The same but for one number."""
    made = [small() for _ in range(count)]
    for number, model in enumerate(made):
        torch.nn.init.constant_(model.head.bias, float(number))
    return made


def write(path: Path) -> None:
    path.write_bytes(bytes(1000))


def age(cache: EngineCache, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(cache.folder, (then, then))


def test_the_model_not_used_for_the_longest_time_makes_room(small, home):
    first, second, third = (EngineCache(model, 4) for model in models(small, 3))
    for hours, cache in ((5, first), (3, second)):
        cache.file("model.onnx", write)
        cache.save_choice("onnxruntime", 1.0)
        age(cache, hours)
    assert third.file("model.onnx", write).stat().st_size == 1000
    assert {path.name for path in home.iterdir()} == {second.folder.name, third.folder.name}
    assert first.load_choice() is None and second.load_choice() == "onnxruntime"
    assert first.file("model.onnx", write).exists(), "it is made again"


@pytest.mark.parametrize("use", [EngineCache.load_choice, lambda cache: cache.file("model.onnx", write)])
def test_a_model_that_is_used_becomes_young(small, home, use):
    first, second, third = (EngineCache(model, 4) for model in models(small, 3))
    for hours, cache in ((5, first), (3, second)):
        cache.file("model.onnx", write)
        age(cache, hours)
    use(first)
    third.file("model.onnx", write)
    assert {path.name for path in home.iterdir()} == {first.folder.name, third.folder.name}


def test_all_graphs_of_the_model_in_use_stay(small, home, monkeypatch):
    monkeypatch.setattr(engine_cache, "LIMIT", 0)
    first, second = (EngineCache(model, 4) for model in models(small, 2))
    first.file("model.onnx", write)
    paths = [second.file(name, write) for name in ("model.onnx", "model.xml")]
    assert all(path.exists() for path in paths) and list(home.iterdir()) == [second.folder]


def test_a_model_whose_graph_another_process_is_writing_stays(small, home, monkeypatch):
    monkeypatch.setattr(engine_cache, "LIMIT", 0)
    first, second = (EngineCache(model, 4) for model in models(small, 2))

    def slowly(path):
        age(first, 5)
        second.file("model.onnx", write)
        write(path)

    assert first.file("model.onnx", slowly).exists()


def test_nothing_is_removed_from_a_folder_that_was_given(small, home, tmp_path):
    for model in models(small, 4):
        EngineCache(model, 4, folder=tmp_path / "own").file("model.onnx", write)
    assert len(list((tmp_path / "own").iterdir())) == 4


def test_a_graph_that_could_not_be_written_leaves_nothing(small, home):
    def fail(path):
        write(path)
        raise RuntimeError("not this operator")

    cache = EngineCache(small(), 4)
    with pytest.raises(RuntimeError, match="not this operator"):
        cache.file("model.onnx", fail)
    assert not list(cache.folder.iterdir())


def break_graph(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "changed":  # the last weights become zero: a graph that runs and answers wrongly
        path.write_bytes(content[:-400] + bytes(400))
    elif how == "unsigned":
        (path.parent / engine_cache.SUMS).unlink()
    elif how == "junk":
        (path.parent / engine_cache.SUMS).write_text("[1")


@pytest.mark.parametrize(
    "how",
    ["changed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "empty", "unsigned", "junk"))],
)
def test_a_damaged_cached_graph_is_made_again_with_one_line(small, tmp_path, how):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from vitkit.inference.engines import choose_engine

    model, said = small(), []
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    want = choose_engine(model, "onnxruntime", batch=2, folder=tmp_path / "kept")(images)
    path = next((tmp_path / "kept").rglob("model.onnx"))
    break_graph(path, how)
    again = choose_engine(model, "onnxruntime", batch=2, folder=tmp_path / "kept", log=said.append)
    assert torch.allclose(again(images), want, atol=1e-5)
    assert len(said) == 1 and "model.onnx" in said[0] and "rebuilding" in said[0]
    said.clear()
    choose_engine(model, "onnxruntime", batch=2, folder=tmp_path / "kept", log=said.append)
    assert not said, "the new graph is sound"


@pytest.mark.slow
def test_a_damaged_graph_behind_a_remembered_choice_is_made_again(small, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from vitkit.inference.engines import choose_engine

    model, said = small(), []
    choose_engine(model, "onnxruntime", batch=2, folder=tmp_path)
    EngineCache(model, 2, folder=tmp_path).save_choice("onnxruntime", 1.0)
    break_graph(next(tmp_path.rglob("model.onnx")), "cut")
    engine = choose_engine(model, "auto", batch=2, folder=tmp_path, log=said.append)
    assert engine.name == "onnxruntime" and len(said) == 1 and "rebuilding" in said[0]
