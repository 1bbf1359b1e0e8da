"""What is known before the first step is said before the first step: splits, devices, stops, odd files."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import run
from test_tasks import TINY

from vitkit.planning import plan as planning
from vitkit.runs.folder import resume_hint


def draw(place: Path, count: int, seed: int = 0) -> None:
    """So many different pictures in a folder."""
    place.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, *place.name.encode()])
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(place / f"{i}.png")


@pytest.fixture
def no_model(monkeypatch):
    """No model may be built."""

    def forbidden(*_):
        raise AssertionError("a model was built")

    monkeypatch.setattr(planning, "build_model", forbidden)


@pytest.mark.parametrize(
    "folders, phrases",
    [
        ({"only": 9, "empty": 0}, ["only 'only'", "'empty'"]),
        ({"train/only": 9, "test/only": 3}, ["only 'only'"]),
        ({"a": 1, "b": 1, "c": 1}, ["3, one of each class"]),
        ({"train/a": 9, "train/b": 9, "test/a": 0}, []),
    ],
    ids=["one class", "one class in splits", "one image each", "no test folder"],
)
def test_splits_that_cannot_be_used_are_refused_before_a_model_is_built(
    folders, phrases, tmp_path, no_model, capsys
):
    for name, count in folders.items():
        draw(tmp_path / "data" / name, count)
    command = ("finetune", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    if not phrases:
        with pytest.raises(AssertionError, match="a model was built"):
            run(*command)
        return
    assert run(*command) == 2
    message = capsys.readouterr().err
    assert (
        all(phrase in message for phrase in (*phrases, str(tmp_path / "data"))) and message.count("\n") == 1
    )
    assert not (tmp_path / "run").exists()


def test_early_stopping_needs_an_image_in_val(tmp_path, no_model, capsys):
    draw(tmp_path / "data/a", 2)
    draw(tmp_path / "data/b", 2)
    assert run("finetune", tmp_path / "data", "--out", tmp_path / "run", *TINY, "patience=1") == 2
    message = capsys.readouterr().err
    assert "patience=1 needs validation images" in message and "only one" in message


def test_few_images_are_trained_on_with_a_line_for_each_shortage(tmp_path, capsys):
    draw(tmp_path / "data/a", 2)
    draw(tmp_path / "data/b", 2)
    draw(tmp_path / "data/single", 1)
    options = [word for word in TINY if not word.startswith("evaluations")]
    assert run("finetune", tmp_path / "data", "--out", tmp_path / "run", *options) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("no validation images" in line for line in lines)
    assert any(line.startswith("warning: ") and "only 5 in total" in line for line in lines)
    assert any("warning: " in line and "with one image" in line and "'single'" in line for line in lines)
    assert any("fewer than 5 images" in line and "'a: 2', 'b: 2'" in line for line in lines)
    assert any("1 of 3 classes have no test image: 'single'" in line for line in lines)


def test_classes_without_a_training_image_are_named(tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8), dtype=np.uint8)
    names = np.array(["a", "b", "never"])
    np.savez(tmp_path / "d.npz", images=images, labels=np.arange(40) % 2, classes=names)
    assert run("finetune", tmp_path / "d.npz", "--out", tmp_path / "run", *TINY, "--plan") == 0
    assert "without an image in the data: 'never'" in capsys.readouterr().err
    np.savez(tmp_path / "d.npz", images=images, labels=np.ones(40, int), classes=names)
    assert run("finetune", tmp_path / "d.npz", "--out", tmp_path / "run", *TINY, "--plan") == 2
    assert "only 'b'; no image in 'a', 'never'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "folders",
    [
        {"only": 30},
        {"only": 30, "empty": 0},
        {"a": 30, "b": 30, "empty": 0},
        {"a": 5, "b": 5},
        {"a": 30, "b": 1},
        {"a": 30, "b": 2, "c": 30},
        {"a": 1, "b": 1},
        {"a": 12, "b": 140},
        {"a": 20, "b": 20},
    ],
    ids=str,
)
def test_finetune_refuses_and_warns_as_the_doctor_does(folders, tmp_path, capsys):
    for name, count in folders.items():
        draw(tmp_path / "data" / name, count)
    code = run("doctor", tmp_path / "data", "--quick", "--json")
    findings = json.loads(capsys.readouterr().out)["findings"]
    got = run("finetune", tmp_path / "data", "--out", tmp_path / "run", *TINY, "--plan")
    message = capsys.readouterr().err
    assert (code, got) in ((0, 0), (1, 2))
    shown = "error" if code else "warning"
    wanted = [f"{one['text']} {one['remedy']}" for one in findings if one["severity"] == shown]
    assert all(text in message for text in wanted) and message.count("warning: ") == (
        0 if code else len(wanted)
    )
    assert (folders == {"a": 20, "b": 20}) == (not findings)
    if code:
        assert message.count("\n") == 1 and str(tmp_path / "data") in message


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_before_anything_was_kept_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitkit.runs.run.preflight", interrupted)
    assert run("finetune", "digits", "--out", tmp_path / "run", *TINY) == 128 + signal.SIGINT
    message = capsys.readouterr().err
    assert "nothing was saved" in message and "resumes" not in message


def test_ctrl_c_after_a_checkpoint_names_its_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitkit.runs.run.finish_run", interrupted)
    assert run("finetune", "digits", "--out", tmp_path / "run", *TINY) == 128 + signal.SIGINT
    assert "resumes at step 6" in capsys.readouterr().err
    assert "continues with what was saved" in resume_hint(tmp_path), "as in the folder of a protocol"


def test_ctrl_c_while_data_is_opened_is_answered_by_the_command(tmp_path):
    for name in "ab":
        draw(tmp_path / "data" / name, 20)
    code = (
        "import signal, time, vitkit.runs.build as s\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def slow(*a, **k): print('here', flush=True); time.sleep(60)\n"
        "s.complete = slow\nfrom vitkit.cli import main; main()"
    )
    words = ["finetune", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *TINY]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130 and "nothing was saved" in message and "Traceback" not in message
