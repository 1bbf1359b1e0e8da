"""The engines' folder: the models that were not used for the longest time go where it becomes too large."""

import os
import time
from pathlib import Path

import pytest
import torch

from vitkit.serving import remembered
from vitkit.serving.remembered import Memory


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder with room for the graphs of two models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remembered, "LIMIT", 2500)
    return tmp_path / "vitkit" / "engines"


def models(small, count: int) -> list:
    """The same but for one number."""
    made = [small() for _ in range(count)]
    for number, model in enumerate(made):
        torch.nn.init.constant_(model.head.bias, float(number))
    return made


def write(path: Path) -> None:
    path.write_bytes(bytes(1000))


def age(memory: Memory, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(memory.folder, (then, then))


def test_the_model_not_used_for_the_longest_time_makes_room(small, home):
    first, second, third = (Memory(model, 4) for model in models(small, 3))
    for hours, memory in ((5, first), (3, second)):
        memory.file("model.onnx", write)
        memory.keep("onnxruntime", 1.0)
        age(memory, hours)
    assert third.file("model.onnx", write).stat().st_size == 1000
    assert {path.name for path in home.iterdir()} == {second.folder.name, third.folder.name}
    assert first.choice() is None and second.choice() == "onnxruntime"
    assert first.file("model.onnx", write).exists(), "it is made again"


@pytest.mark.parametrize("use", [Memory.choice, lambda memory: memory.file("model.onnx", write)])
def test_a_model_that_is_used_becomes_young(small, home, use):
    first, second, third = (Memory(model, 4) for model in models(small, 3))
    for hours, memory in ((5, first), (3, second)):
        memory.file("model.onnx", write)
        age(memory, hours)
    use(first)
    third.file("model.onnx", write)
    assert {path.name for path in home.iterdir()} == {first.folder.name, third.folder.name}


def test_all_graphs_of_the_model_in_use_stay(small, home, monkeypatch):
    monkeypatch.setattr(remembered, "LIMIT", 0)
    first, second = (Memory(model, 4) for model in models(small, 2))
    first.file("model.onnx", write)
    paths = [second.file(name, write) for name in ("model.onnx", "model.xml")]
    assert all(path.exists() for path in paths) and list(home.iterdir()) == [second.folder]


def test_a_model_whose_graph_another_process_is_writing_stays(small, home, monkeypatch):
    monkeypatch.setattr(remembered, "LIMIT", 0)
    first, second = (Memory(model, 4) for model in models(small, 2))

    def slowly(path):
        age(first, 5)
        second.file("model.onnx", write)
        write(path)

    assert first.file("model.onnx", slowly).exists()


def test_nothing_is_removed_from_a_folder_that_was_given(small, home, tmp_path):
    for model in models(small, 4):
        Memory(model, 4, folder=tmp_path / "own").file("model.onnx", write)
    assert len(list((tmp_path / "own").iterdir())) == 4


def test_a_graph_that_could_not_be_written_leaves_nothing(small, home):
    def fail(path):
        write(path)
        raise RuntimeError("not this operator")

    memory = Memory(small(), 4)
    with pytest.raises(RuntimeError, match="not this operator"):
        memory.file("model.onnx", fail)
    assert not list(memory.folder.iterdir())
