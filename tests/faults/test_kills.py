"""B1, B7, B14: runs of the command that are killed, asked to stop, or started twice."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import cold, command, outcome, rows, scaled, until

from vitkit.training.checkpoint import complete, latest

pytestmark = pytest.mark.faults
Kill = tuple[Any, ...]  # a function of inside.py with its words, or ("timer", rows to wait for)


def chains() -> Iterator[tuple[str, list[Kill]]]:
    """Each is one run folder: killed as often as listed, begun again each time, then left alone.

    24 steps, of which 6 are an epoch and end with an evaluation.
    """
    for n in range(scaled(3, 10)):  # twice in one epoch, each time in the midst of a save
        yield f"saves-{n}", [("die_in_save", 8, 1 + n, True), ("die_in_save", 10, 1 + (n + 6) % 13, False)]
    for n in range(scaled(2, 5)):
        yield (
            f"rest-{n}",
            [("die_in_evaluation", 1 + n % 2), ("die_in_resume", 5 + 9 * n), ("die_at_step", 13 + n)],
        )
    for n in range(scaled(1, 5)):
        at_end_of_epoch = 6 * (1 + n % 2)
        save = ("die_in_save", at_end_of_epoch + 6, 2 + 2 * n, True)
        yield f"ends-{n}", [("die_at_step", at_end_of_epoch), save, ("timer", at_end_of_epoch + 8)]


CHAINS = dict(chains())


def killed(out: Path, told: Path, kill: Kill, rng: random.Random) -> None:
    run = cold(command(out), told, fault=() if kill[0] == "timer" else kill)
    if kill[0] == "timer":
        until(lambda: len(rows_so_far(out)) >= kill[1] or run.poll() is not None)
        time.sleep(rng.uniform(0, 0.2))
        run.kill()
    assert run.wait(120) == -signal.SIGKILL, told.read_text()[-2000:]


def rows_so_far(out: Path) -> list[str]:
    path = out / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", CHAINS)
def test_B1_a_killed_run_ends_like_one_that_nobody_touched(name, straight, tmp_path, tally):
    out, told, rng = tmp_path / "run", tmp_path / "told.txt", random.Random(name)
    for kill in CHAINS[name]:
        killed(out, told, kill, rng)
    run = cold(command(out), told)
    assert run.wait(180) == 0, told.read_text()[-2000:]
    assert outcome(out) == straight
    kinds = [kill[0] for kill in CHAINS[name]]
    tally(kills=len(kinds), in_saves=kinds.count("die_in_save"), in_resumes=kinds.count("die_in_resume"))
    tally(in_evaluations=kinds.count("die_in_evaluation"), runs=1)


FORGETFUL = [
    pytest.param("start_over", marks=pytest.mark.control("vitkit.runs.run.training_batches")),
    pytest.param("other_dropout", marks=pytest.mark.control("vitkit.runs.run.seed_step")),
]


@pytest.mark.parametrize("off", FORGETFUL)
def test_B1_control_without_its_place_in_the_data_or_its_seeds_a_resumed_run_differs(
    off, straight, tmp_path, switched_off
):
    out, told = tmp_path / "run", tmp_path / "told.txt"
    killed(out, told, ("die_at_step", 9), random.Random(0))
    fault = (off, str(switched_off.proof))
    assert cold(command(out), told, fault=fault).wait(180) == 0, told.read_text()[-2000:]
    with pytest.raises(AssertionError):
        assert outcome(out) == straight


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
MOMENTS = (("loader", 0), ("step", 5), ("evaluation", 12), ("save", 15))


def asked_to_stop(run: subprocess.Popen, number: int, folder: Path) -> int:
    """A signal to the whole group of a run that waits at some moment -> its exit code."""
    until(lambda: (folder / "there").exists() or run.poll() is not None)
    os.killpg(run.pid, number)
    (folder / "go").touch()
    return run.wait(60)


@pytest.mark.parametrize("turn", range(scaled(2, 5)))
def test_B7_a_signal_to_the_group_saves_and_the_run_goes_on_bit_for_bit(turn, straight, tmp_path, tally):
    out, told = tmp_path / "run", tmp_path / "told.txt"
    for place, (what, step) in enumerate(MOMENTS):
        number, folder = SIGNALS[(turn + place) % 3], tmp_path / f"{what}"
        folder.mkdir()
        workers = 2 * ((turn + place) % 2)
        run = cold(command(out, workers=workers), told, save=0.0 if what == "save" else 300.0,
                   fault=("hold_in", what, step, str(folder)))  # fmt: skip
        assert asked_to_stop(run, number, folder) == 128 + number, told.read_text()[-2000:]
        result, damaged = latest(out / "checkpoints")
        assert not damaged and int(result.name[5:]) == rows(out)[-1]["step"] <= step + 2, "within one step"
    assert cold(command(out, workers=2), told).wait(180) == 0, told.read_text()[-2000:]
    assert outcome(out) == straight
    assert told.read_text().count("the same command resumes there") == len(MOMENTS)
    tally(signals=len(MOMENTS))


def test_B7_a_second_interrupt_ends_at_once_and_nothing_is_lost(straight, tmp_path):
    out, told, folder = tmp_path / "run", tmp_path / "told.txt", tmp_path
    run = cold(command(out), told, fault=("hold_in", "step", 9, str(folder)))
    until(lambda: (folder / "there").exists())
    os.killpg(run.pid, signal.SIGINT)
    until(lambda: (folder / "heard").exists())  # or both would count as one
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(20) == 130 and "Traceback" not in told.read_text()
    assert cold(command(out), told).wait(180) == 0
    assert outcome(out) == straight


DEAF = [True, pytest.param(False, marks=pytest.mark.control("vitkit.data.loader.ignore_signals"))]


@pytest.mark.parametrize("protected", DEAF, ids=["on", "control"])
def test_B7_workers_that_answer_signals_themselves_lose_the_save(protected, tmp_path, switched_off):
    """The loop waits for the data of step 2 when the signal comes, so it hears of its workers first."""
    out, told = tmp_path / "run", tmp_path / "told.txt"
    fault = ("hold_data", 2, str(tmp_path), *(() if protected else (str(switched_off.proof),)))
    run = cold(command(out, workers=2), told, save=300.0, fault=fault)
    until(lambda: (len(rows_so_far(out)) == 2 and (tmp_path / "there").exists()) or run.poll() is not None)
    os.killpg(run.pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    code = run.wait(60)
    saved = complete(out / "checkpoints") if (out / "checkpoints").exists() else []
    assert (code == 143 and len(saved) == 1) is protected, told.read_text()[-2000:]
    assert "Traceback" not in told.read_text()


LOCKED = [True, pytest.param(False, marks=pytest.mark.control("vitkit.runs.folder.locked"))]


@pytest.mark.parametrize("protected", LOCKED, ids=["on", "control"])
def test_B14_a_folder_belongs_to_one_process_and_a_dead_ones_lock_to_nobody(
    protected, straight, tmp_path, switched_off
):
    out, told, folder = tmp_path / "run", tmp_path / "told.txt", tmp_path
    first = cold(command(out), tmp_path / "first.txt", fault=("hold_in", "step", 5, str(folder)))
    try:
        until(lambda: (folder / "there").exists())
        second = cold(command(out), told, fault=() if protected else ("no_lock", str(switched_off.proof)))
        refused = second.wait(120) == 2 and f"is in use by process {first.pid} on " in told.read_text()
        assert refused is protected
    finally:
        first.kill()
        first.wait()
    if protected:
        assert (out / ".lock").read_text().startswith(str(first.pid)), "the lock of the dead is still there"
        assert cold(command(out), told).wait(180) == 0
        assert outcome(out) == straight
