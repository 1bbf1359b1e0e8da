"""Checkpoints: only whole ones count, and only the last two stay."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from vitkit.runtime.runtime import Runtime
from vitkit.training.checkpoint import (
    MANIFEST,
    CheckpointError,
    Saver,
    complete,
    latest,
    load_checkpoint,
    pieces,
    write_part,
)
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState


def state_at(step: int) -> TrainState:
    state = TrainState.start(torch.nn.Linear(2, 2), OptimizerConfig(average=0.9))
    state.step = step
    with torch.no_grad():
        state.model.weight.fill_(step)
    return state


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2, 3):
        Saver(tmp_path).save(state_at(step), {"best": step})
    return tmp_path


def test_the_last_two_stay_and_the_newest_is_read(folder):
    assert [path.name for path in complete(folder)] == ["step-00000002", "step-00000003"]
    state = state_at(0)
    assert load_checkpoint(latest(folder)[0], state) == {"best": 3} and state.step == 3
    assert (state.model.weight == 3).all()


def strange_part(path):
    shutil.copy(path / "state-00000.safetensors", path / "state-00001.safetensors")


def lost_part(path):
    (path / "state-00000.safetensors").unlink()


def other_facts(path):
    facts = json.loads((path / "facts.json").read_text())
    (path / "facts.json").write_text(json.dumps(facts | {"step": 4}))


def lost_manifest(path):
    (path / MANIFEST).unlink()


@pytest.mark.parametrize("damage", [strange_part, lost_part, other_facts, lost_manifest])
def test_what_is_not_as_it_was_written_is_passed_over(folder, damage):
    damage(folder / "step-00000003")
    result, damaged = latest(folder)
    assert result.name == "step-00000002" and damaged == ["step-00000003"]


def test_half_a_checkpoint_and_a_file_are_none(folder):
    (folder / "step-00000009.partial").mkdir()
    (folder / "step-00000008").write_text("")
    assert latest(folder)[0].name == "step-00000003" and latest(folder)[1] == []
    Saver(folder).save(state_at(4), {})
    assert not (folder / "step-00000009.partial").exists()


def test_a_checkpoint_that_would_not_fit_is_not_begun(tmp_path, monkeypatch):
    state = TrainState.start(torch.nn.Linear(1024, 1024), OptimizerConfig())
    mine = pieces(state, Runtime())
    needed = sum(piece.tensor.nbytes for piece in mine.values())
    assert needed > 2**22
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed + 2**20))
    with pytest.raises(CheckpointError, match=f"{needed:,} bytes"):
        write_part(tmp_path, 0, mine)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=round(1.06 * needed) + 2**20))
    write_part(tmp_path, 0, mine)
    assert (tmp_path / "part-00000.json").exists()
