"""B4: full disks, under checkpoints, whole runs, shards and reports."""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import cold, command, outcome, scaled
from PIL import Image
from saving import NEW, OLD, elsewhere, loaded, save, write_in_place
from test_cli import run

from vitkit.data.sources.index import INDEX
from vitkit.data.sources.shard_folders import verify
from vitkit.datasets.opening import shard
from vitkit.training import checkpoint
from vitkit.training.checkpoint import CheckpointError

pytestmark = pytest.mark.faults
WIDTH = 512  # of a state of 3 MB
LEVELS = np.linspace(0, 1.1, scaled(8, 20)).tolist()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("lies", [False, True], ids=["known", "found-out"])
def test_B4_at_any_level_of_a_full_disk_the_last_checkpoint_loads(lies, small_disk, monkeypatch, tally):
    """found-out: another program takes the space after we have asked how much there is."""
    disk = small_disk(16 * 2**20)
    runs = disk / "checkpoints"
    save(runs, OLD, WIDTH)
    size = size_of(runs)
    if lies:
        usage = shutil.disk_usage(disk)._replace(free=10**12)
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    saved = 0
    for level in LEVELS:
        leave(disk, int(level * size))
        try:
            save(runs, NEW, WIDTH)
            saved += 1
        except CheckpointError as error:
            told = str(error)
            assert str(runs) in told and ("No space left" in told if lies else " bytes and " in told)
            assert loaded(runs, WIDTH) == OLD
        assert loaded(runs, WIDTH) in (OLD, NEW) and not list(runs.glob("*.partial"))
        shutil.rmtree(runs / f"step-{NEW:08d}", ignore_errors=True)
        if not (runs / f"step-{OLD:08d}").exists():
            (disk / "ballast").unlink()
            save(runs, OLD, WIDTH)
    assert saved < len(LEVELS) and (saved > 0) is lies, (
        "room for one and a twentieth, and a megabyte, is wanted"
    )
    tally(levels=len(LEVELS))


def leave(disk: Path, free: int) -> None:
    """Fill a disk but for so many bytes."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    status = os.statvfs(disk)
    with ballast.open("wb") as file:
        file.write(bytes(max(0, status.f_bavail * status.f_frsize - free)))


def limited(folder: Path, most: int, proof: Path | None = None) -> None:
    """A save in a process whose files may not be larger; with `proof` it is written over the old one."""
    write_in_place(proof)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        save(folder, NEW, WIDTH)
    except CheckpointError as error:
        sys.exit(5 if "File too large" in str(error) and f"{folder}/step-" in str(error) else 6)


@pytest.mark.parametrize("level", LEVELS[:: scaled(4, 2)])
def test_B4_the_same_by_a_limit_on_files_where_nothing_can_be_mounted(level, tmp_path, tally):
    assert left(tmp_path, level) == (OLD if level < 1 else NEW) and not list(tmp_path.glob("*.partial"))
    tally(limits=1)


def left(folder: Path, level: float, proof: Path | None = None) -> int | None:
    """What can be loaded after a save for which there is only such a part of the room that it needs."""
    save(folder, OLD, WIDTH)
    code = elsewhere(limited, folder, int(level * size_of(folder)), proof)
    assert code == (5 if level < 1 else 0)
    return loaded(folder, WIDTH)


@pytest.mark.control("vitkit.training.checkpoint.begin", "vitkit.training.checkpoint.publish")
def test_B4_control_a_checkpoint_written_over_the_old_one_is_lost(tmp_path, switched_off):
    assert left(tmp_path / "room", 1.1, switched_off.proof) == NEW
    assert left(tmp_path / "no room", 0.5, switched_off.proof) is None, "neither the old one nor the new"


@pytest.mark.parametrize("kilobytes", scaled([0, 1100], [0, 60, 600, 1100, 1400]))
def test_B4_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(
    kilobytes, straight, small_disk, tmp_path, tally
):
    """0: not even a row of metrics can be written; more: the first checkpoint, or a later one, cannot."""
    disk, told = small_disk(24 * 2**20), tmp_path / "told.txt"
    out = disk / "run"
    assert cold(command(out), told, fault=("die_at_step", 5)).wait(120) == -9
    leave(disk, kilobytes * 1024)
    assert cold(command(out), told).wait(120) in (1, 2), told.read_text()[-1000:]
    text = told.read_text()
    assert "Traceback" not in text and str(out) in text.splitlines()[-1], text[-2000:]
    assert "No space left" in text.splitlines()[-1] or "are free" in text.splitlines()[-1]
    (disk / "ballast").unlink()
    assert cold(command(out), told).wait(180) == 0, told.read_text()[-2000:]
    assert outcome(out) == straight
    tally(runs=1)


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(60):
        place = tmp_path / "photos" / f"class {i % 3}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (60, 70, 3), dtype=np.uint8)).save(place)
    return tmp_path / "photos"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("level", scaled([0.0, 0.5, 0.99], [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99]))
def test_B4_shards_on_a_full_disk_are_whole_or_not_there_and_completed_later(
    level, photos, small_disk, tmp_path, monkeypatch, capfd, tally
):
    monkeypatch.setattr("vitkit.data.sources.shards.SIZE", 150_000)  # some ten shards
    shard(str(photos), tmp_path / "whole")
    whole, disk = content(tmp_path / "whole"), small_disk(8 * 2**20)
    assert len(whole) > 5
    out = disk / "shards"
    out.mkdir()
    leave(disk, int(level * size_of(tmp_path / "whole")))
    assert run("shard", photos, out) == 1
    told = capfd.readouterr().err.splitlines()[-1]
    assert "No space left on device" in told and str(out) in told
    assert not (out / INDEX).exists() and not list(out.glob(".*.partial"))
    assert all(data == whole[name] for name, data in content(out).items() if name.endswith(".tar"))
    (disk / "ballast").unlink()
    assert run("shard", photos, out) == 0
    assert content(out) == whole and verify(out) == []
    tally(shard_levels=1)


@pytest.mark.control("vitkit.data.sources.shards.replaced")
def test_B4_control_shards_written_under_their_own_names_are_cut_off(
    photos, small_disk, tmp_path, monkeypatch, switched_off
):
    from contextlib import contextmanager

    @contextmanager
    def careless(path):
        with path.open("w+b") as file:
            yield file

    monkeypatch.setattr("vitkit.data.sources.shards.SIZE", 150_000)
    shard(str(photos), tmp_path / "whole")
    disk = small_disk(8 * 2**20)
    (out := disk / "shards").mkdir()
    switched_off("vitkit.data.sources.shards.replaced", careless)
    leave(disk, size_of(tmp_path / "whole") // 2)
    assert run("shard", photos, out) == 1
    whole = content(tmp_path / "whole")
    assert any(data != whole[name] for name, data in content(out).items() if name.endswith(".tar"))


def test_B4_a_run_whose_report_does_not_fit_is_a_finished_run(small_disk, monkeypatch, capfd, tally):
    """From the moment when the result stands, nothing more can be written."""
    from test_experiment import tiny

    from vitkit.runs import artifacts
    from vitkit.runs.folder import RunOptions
    from vitkit.runs.run import run as train
    from vitkit.runtime.runtime import Runtime

    disk, finish = small_disk(24 * 2**20), artifacts.finish

    def full(*args):
        leave(disk, 0)
        finish(*args)

    monkeypatch.setattr(artifacts, "finish", full)
    result = train(tiny(), disk / "run", Runtime(), RunOptions(workers=0))
    told = capfd.readouterr().err
    for name in ("unusable.json", "mistakes.json", "report.html"):
        assert f"{name} could not be written: " in told and "No space left" in told
        assert not (disk / "run" / name).exists()
    assert json.loads((disk / "run" / "result.json").read_text()) == json.loads(json.dumps(result.to_json()))
    assert not list((disk / "run").glob(".*.partial"))
    tally(reports=3)


@pytest.mark.control("vitkit.runs.artifacts.warn_on_error")
def test_B4_control_an_error_in_a_report_that_is_not_held_back_ends_the_run(
    tmp_path, monkeypatch, switched_off
):
    from contextlib import nullcontext

    from test_experiment import tiny

    from vitkit.runs import artifacts
    from vitkit.runs.folder import RunOptions
    from vitkit.runs.run import run as train
    from vitkit.runtime.runtime import Runtime

    def full(path, content):
        raise OSError(28, "No space left on device")

    switched_off("vitkit.runs.artifacts.warn_on_error", lambda what, say: nullcontext())
    monkeypatch.setattr(artifacts, "keep", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny(), tmp_path, Runtime(), RunOptions(workers=0, quiet=True))
