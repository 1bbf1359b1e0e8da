"""What a run writes down: rows, events that can be read, trackers where they are installed, failures."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from vitkit.training import logging as trackers
from vitkit.training.logging import TRACKERS, Journal, check_trackers

ABOUT = {"batch": 4, "schedule.rate": 0.1, "model": "ViT-Ti/16", "randaugment": (2, 10), "mixup": None}


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder / "events"), size_guidance={"scalars": 0})
    result.Reload()
    return result


def curve(folder: Path, name: str) -> dict[int, float]:
    scalars = events(folder).Scalars(name)
    values = {scalar.step: pytest.approx(scalar.value) for scalar in scalars}
    assert len(values) == len(scalars), "a step stands twice"
    return values


def test_rows_after_the_step_are_forgotten_and_half_a_row_too(tmp_path):
    with Journal(tmp_path) as journal:
        for step in range(1, 11):
            journal.write(step, loss=1 / step, note="text stays in the rows")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with Journal(tmp_path, 5) as journal:
        journal.write(6, loss=6.0)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert rows(tmp_path)[-1] == {"step": 6, "loss": 6.0} and "note" in rows(tmp_path)[0]
    Journal(tmp_path).close()
    assert rows(tmp_path) == []


def test_a_row_that_was_cut_off_is_not_read(tmp_path):
    with Journal(tmp_path) as journal:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{')
        assert journal.lines() == ['{"step": 1}']


def test_events_hold_the_numbers_and_after_a_resume_none_beyond_the_step(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(
        event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0)
    )  # 99 and 100 would be read in the wrong order
    with Journal(tmp_path) as journal:
        for step in range(1, 11):
            journal.write(step, loss=1 / step, images=8, note="text")
        journal.write(10, val_top1=0.75)
    assert curve(tmp_path, "loss") == {step: 1 / step for step in range(1, 11)}
    assert curve(tmp_path, "images")[3] == 8 and curve(tmp_path, "val_top1") == {10: 0.75}
    assert set(events(tmp_path).Tags()["scalars"]) == {"loss", "images", "val_top1"}
    Journal(tmp_path, 5).close()
    assert curve(tmp_path, "loss") == {step: 1 / step for step in range(1, 6)}
    with Journal(tmp_path, 5) as journal:
        journal.write(6, loss=6.0)
    assert curve(tmp_path, "loss") == {step: 1 / step for step in range(1, 6)} | {6: 6.0}
    Journal(tmp_path).close()
    assert curve(tmp_path, "loss") == {}


def test_events_hold_the_recipe_and_whether_the_run_came_to_its_end(tmp_path):
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    Journal(tmp_path, about=ABOUT).close(failed=True)
    assert "_hparams_/session_end_info" not in events(tmp_path).summary_metadata
    Journal(tmp_path, 3, about=ABOUT).close()
    result = events(tmp_path).summary_metadata
    assert "_hparams_/session_end_info" in result
    content = result["_hparams_/session_start_info"].plugin_data.content
    values = parse_session_start_info_plugin_data(content).hparams
    assert values["batch"].number_value == 4 and values["randaugment"].string_value == "(2, 10)"


def test_without_tensorboard_a_run_says_so_once_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    messages: list[str] = []
    with Journal(tmp_path, say=messages.append) as journal:
        journal.write(1, loss=1.0)
        journal.write(2, loss=1.0)
    assert len(messages) == 1 and messages[0].startswith("tensorboard failed") and len(rows(tmp_path)) == 2


def test_unknown_and_missing_trackers_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tracker 'comet'; known: wandb, mlflow, trackio"):
        check_trackers(["comet"])
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            ValueError, match=rf'tracker {name} is not installed: pip install "vitkit\[{name}\]"'
        ):
            Journal(tmp_path, trackers=[name])
    assert not list(tmp_path.iterdir())


def test_a_folder_of_that_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "nosuchtracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, "nosuchtracker", print)
    with pytest.raises(ValueError, match="not installed"):
        check_trackers(["nosuchtracker"])


class Fake:
    """A tracker that keeps what it gets, and fails or hangs where it is told to."""

    def __init__(self, at: str, how: str):
        self.at, self.how, self.location = at, how, "here"
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed: list[bool] = []
        self.free = threading.Event()
        self.trouble("start")

    def trouble(self, at: str) -> None:
        if not at or at != self.at:
            return
        if self.how == "hang":
            self.free.wait(10)
        else:
            raise {"error": ConnectionError("network down\nlong story"), "exit": SystemExit(1)}[self.how]

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.trouble("log" if step == 3 else "")
        self.got.append((step, numbers))

    def close(self, failed: bool = False) -> None:
        self.trouble("close")
        self.closed.append(failed)


@pytest.fixture
def fake(monkeypatch):
    """A tracker "mlflow" that is installed and behaves as told; the list of those that were made."""

    def install(at: str = "", how: str = "") -> list[Fake]:
        made: list[Fake] = []
        module = types.ModuleType("mlflow")
        module.__spec__ = ModuleSpec("mlflow", None, origin="here")
        monkeypatch.setitem(sys.modules, "mlflow", module)
        monkeypatch.setitem(TRACKERS, "mlflow", lambda folder, about: made.append(Fake(at, how)) or made[-1])
        monkeypatch.setattr(trackers, "START_SECONDS", 1.0)
        monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1.0)
        return made

    return install


@pytest.mark.parametrize("how", ["error", "exit", "hang"])
@pytest.mark.parametrize("at", ["start", "log", "close"])
def test_a_tracker_that_fails_or_hangs_does_not_end_the_run(tmp_path, fake, at, how):
    fake(at, how)
    messages: list[str] = []
    with Journal(tmp_path, trackers=["mlflow"], say=messages.append) as journal:
        for step in range(1, 7):
            journal.write(step, loss=1 / step)
    failures = [text for text in messages if "mlflow failed" in text]
    assert len(failures) == 1 and "long story" not in failures[0]
    assert ("network down" in failures[0]) == (how == "error")
    assert len(rows(tmp_path)) == 6 and curve(tmp_path, "loss") == {s: 1 / s for s in range(1, 7)}


def test_a_tracker_that_cannot_keep_up_is_given_up(tmp_path, fake, monkeypatch):
    fake("log", "hang")
    monkeypatch.setattr(trackers, "WAITING_ROWS", 3)
    messages: list[str] = []
    with Journal(tmp_path, trackers=["mlflow"], say=messages.append) as journal:
        for step in range(3, 20):
            journal.write(step, loss=1.0)
    assert messages == [
        "mlflow: here",
        "mlflow failed and is disabled for the rest of the run: 3 rows are still unsent",
    ]


def test_trackers_get_every_number_and_how_the_run_ended(tmp_path, fake, capsys):
    made = fake()
    with Journal(tmp_path / ".", trackers=["mlflow", "mlflow"]) as journal:
        journal.write(1, loss=0.5, right=3, note="text")
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path, 1, trackers=["mlflow"]) as journal:
        raise KeyboardInterrupt
    journal.close()  # a second time
    assert [one.got for one in made] == [[(1, {"loss": 0.5, "right": 3.0})], []]
    assert [one.closed for one in made] == [[False], [True]]
    assert "vitkit: mlflow: here" in capsys.readouterr().err


RUN = """
import json, sys
from pathlib import Path
from torch.utils.data import DataLoader
from vitkit.training.logging import Journal

folder, name, step, about = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with Journal(folder, step, trackers=[name], about=about) as journal:
    workers = iter(DataLoader(range(100), num_workers=2, multiprocessing_context="fork"))
    for at in range(step + 1, step + 5):
        next(workers)
        journal.write(at, loss=1 / (7 * at))
    if not step:
        raise SystemExit(3)  # the first process leaves in the middle, with workers running
    journal.write(at, val_top1=0.625)
"""


def twice(folder: Path, name: str, **env: str) -> list[str]:
    """Two processes with forked workers: steps 1 to 4, then resumed at 2, steps 3 to 6. What they said."""
    folder.mkdir(parents=True)
    messages = []
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    keep |= {"HOME": str(folder.parent), "PYTHONPATH": os.pathsep.join(sys.path)} | env
    for step in (0, 2):
        done = subprocess.run(
            [sys.executable, "-c", RUN, folder, name, str(step), json.dumps(ABOUT)], env=keep,
            cwd=folder.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == (0 if step else 3), done.stderr
        assert f"{name} failed" not in done.stderr and not done.stdout
        messages.append(done.stderr)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 6]
    return messages


@pytest.mark.slow
def test_wandb_offline_is_one_run_and_does_not_ask(tmp_path):
    pytest.importorskip("wandb")
    messages = twice(tmp_path / "first", "wandb")
    assert all("offline, no API key" in text for text in messages)
    files = sorted((tmp_path / "first" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    first, second = (file.read_bytes() for file in files)  # records as plain bytes in a log
    assert b"first" in first and b"schedule.rate" in first and b"ViT-Ti/16" in first
    for step in range(1, 7):
        assert (str(1 / (7 * step)).encode() in first) == (step <= 4)
        assert (str(1 / (7 * step)).encode() in second) == (step >= 3)
    assert b"0.625" in second


@pytest.mark.slow
def test_mlflow_without_a_server_is_one_run(tmp_path):
    pytest.importorskip("mlflow")
    twice(tmp_path / "first", "mlflow", MLFLOW_DISABLE_TELEMETRY="true")
    with sqlite3.connect(tmp_path / "first" / "mlflow" / "mlflow.db") as store:
        assert store.execute("select name, status from runs").fetchall() == [("first", "FINISHED")]
        assert dict(store.execute("select key, value from params"))["schedule.rate"] == "0.1"
        result = store.execute("select step, value from metrics where key = 'loss' order by timestamp, step")
        steps = [(step, pytest.approx(value)) for step, value in result]
        assert sorted(step for step, _ in steps) == [1, 2, 3, 3, 4, 4, 5, 6]
        assert all(value == 1 / (7 * step) for step, value in steps)
        assert dict(store.execute("select key, value from latest_metrics"))["val_top1"] == 0.625
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
def test_trackio_is_one_run_for_a_folder_whatever_its_name(tmp_path):
    pytest.importorskip("trackio")
    twice(tmp_path / "a" / "same", "trackio", TRACKIO_DIR=str(tmp_path / "store"))
    twice(tmp_path / "b" / "same", "trackio", TRACKIO_DIR=str(tmp_path / "store"))
    with sqlite3.connect(tmp_path / "store" / "vitkit.db") as store:
        result = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = [json.loads(text) for (text,) in store.execute("select config from configs")]
    names = list(dict.fromkeys(name for name, _, _ in result))
    assert len(names) == 2 and names[0] == "same" and names[1].startswith("same-")
    assert [config["schedule.rate"] for config in configs] == [0.1, 0.1]
    for name in names:
        steps = [step for run, step, _ in result if run == name]
        assert steps == [1, 2, 3, 4, 3, 4, 5, 6, 6]
    assert all(json.loads(m)["loss"] == 1 / (7 * step) for _, step, m in result if "loss" in json.loads(m))


def test_of_passing_rows_trackers_hear_one_a_second_and_the_record_holds_all(tmp_path):
    with Journal(tmp_path) as journal:
        for step in range(1, 6):
            journal.write(step, passing=True, loss=float(step))
        journal.write(5, val_top1=0.5)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 5]
    result = events(tmp_path)
    assert [s.step for s in result.Scalars("loss")] == [1] and [
        s.step for s in result.Scalars("val_top1")
    ] == [5]
