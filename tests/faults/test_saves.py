"""B2, B3, B5, B6, B13: checkpoints that die, fail, are damaged or are written beside the training."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Event, Lock

import pytest
import saving
from harness import operations, scaled
from saving import NEW, OLD, change, count, elsewhere, loaded, save, state_at

from vitkit.io.files import sha256
from vitkit.training import checkpoint
from vitkit.training.checkpoint import MANIFEST, CheckpointError, Saver, complete, latest

pytestmark = pytest.mark.faults


@pytest.fixture
def folder(tmp_path):
    """Two sound checkpoints, as a run has them."""
    for step in (OLD - 1, OLD):
        save(tmp_path, step)
    return tmp_path


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    for step in (OLD - 1, OLD):
        save(root, step)
    return root


def left_by_deaths(sound: Path, tmp_path: Path, kinds: list[str], proof: Path | None = None) -> list[int]:
    """What can be loaded after a save that died at each of its operations."""
    result = []
    for number, kind in enumerate(kinds, start=1):
        for torn in (False, True) if kind == "write" else (False,):
            folder = shutil.copytree(sound, tmp_path / f"{number}-{torn}")
            assert elsewhere(saving.die_saving, folder, number, torn, proof) == -9
            result.append(loaded(folder))
    return result


def test_B2_a_save_that_dies_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(
    sound, tmp_path, tally
):
    kinds = count(shutil.copytree(sound, tmp_path / "counted"))
    assert {"write", "fsync", "rename", "remove", "mkdir"} == set(kinds) and len(kinds) >= 15
    (runs := tmp_path / "runs").mkdir()
    result = left_by_deaths(sound, runs, kinds)
    assert result == sorted(result), "first the old one, from the rename on the new"
    assert set(result) == {OLD, NEW}
    for folder in runs.iterdir():
        save(folder, NEW + 1)  # and the next one is none the worse for it
        assert loaded(folder) == NEW + 1 and not list(folder.glob("*.partial"))
    tally(points=len(result))


@pytest.mark.control("vitkit.training.checkpoint.begin", "vitkit.training.checkpoint.publish")
def test_B2_control_a_checkpoint_written_over_the_old_one_is_lost(sound, tmp_path, switched_off):
    for target, instead in saving.IN_PLACE.items():
        switched_off(target, instead)
    folder = shutil.copytree(sound, tmp_path / "counted")
    kinds = count(folder)
    assert loaded(folder) == NEW, "a save that nobody kills is none the worse"
    result = left_by_deaths(sound, tmp_path, kinds, switched_off.proof)
    assert result.count(OLD - 1) > 5, "neither the old one nor the new"


def traced(folder: Path, *words: Path, inject: str = "") -> subprocess.CompletedProcess:
    """A cold process that saves, under strace: what it says goes to a file."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    calls = "fsync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
    filters = [f"-einject={inject}"] if inject else []
    done = subprocess.run(
        ["strace", "-f", "-y", "-o", str(folder / "trace.txt"), f"-etrace={calls}", *filters,
         sys.executable, saving.__file__, str(folder), *map(str, words)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("strace may not look at processes here")
    return done


CALLS = scaled(
    {"fsync": (1, 5), "renameat": (2,)},
    {"fsync": range(1, 6), "renameat": (1, 2), "unlinkat": range(1, 6), "mkdirat": (1,)},
)


X86 = {  # has other names for some of the same calls
    ("renameat", 1): ("rename", 1), ("renameat", 2): ("rename", 2), ("mkdirat", 1): ("mkdir", 1),
    ("unlinkat", 1): ("unlink", 1), ("unlinkat", 5): ("rmdir", 1),
    **{("unlinkat", n): ("unlinkat", n - 1) for n in (2, 3, 4)},
}  # fmt: skip


@pytest.mark.parametrize("call", [(kind, n) for kind, times in CALLS.items() for n in times], ids=str)
def test_B2_the_kernel_kills_a_save_at_its_system_calls(call, folder, tally):
    """The same from outside: strace sends the signal as the call is made."""
    kind, number = X86.get(call, call) if os.uname().machine in ("x86_64", "AMD64") else call
    done = traced(folder, inject=f"{kind}:signal=KILL:when={number}")
    assert done.returncode in (-9, 137), f"{done.returncode}: {done.stderr[-500:]}"
    assert loaded(folder) in (OLD, NEW)
    tally(kernel_points=1)


def ordered(events: list[tuple[str, str]]) -> bool:
    """Whether each file and its folder were flushed before the folder had its name, and the parent after."""
    names = [place for kind, place in events if kind == "rename" and place.endswith(".partial")]
    if not names:
        return False
    at = events.index(("rename", names[0]))
    flushed = {place for kind, place in events[:at] if kind == "fsync"}
    needed = {f"{names[0]}{end}" for end in ("", "/facts.json", f"/{MANIFEST}", "/state-00000.safetensors")}
    return needed <= flushed and ("fsync", str(Path(names[0]).parent)) in events[at + 1 :]


def heard(folder: Path) -> list[tuple[str, str]]:
    """What a save flushes and renames, in this process."""
    events: list[tuple[str, str]] = []

    def note(kind, call, arguments):
        if kind == "fsync":
            events.append((kind, os.readlink(f"/proc/self/fd/{arguments[0]}")))
        elif kind == "rename":
            events.append((kind, str(arguments[0])))

    with operations(note):
        save(folder, NEW)
    return events


def test_B3_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, tally):
    for number in range(scaled(5, 20)):
        assert ordered(heard(tmp_path / str(number)))
        tally(saves=1)


@pytest.mark.control("vitkit.training.checkpoint.flush")
def test_B3_control_without_flushing_the_order_is_not_kept(tmp_path, switched_off):
    switched_off("vitkit.training.checkpoint.flush", lambda path: None)
    assert not ordered(heard(tmp_path))


FLUSHED = [True, pytest.param(False, marks=pytest.mark.control("vitkit.training.checkpoint.flush"))]


@pytest.mark.parametrize("flushed", FLUSHED, ids=["on", "control"])
def test_B3_the_kernel_sees_the_same_order(flushed, folder, switched_off, tally):
    assert traced(folder, *(() if flushed else (switched_off.proof,))).returncode == 0
    text = (folder / "trace.txt").read_text()
    result = re.findall(r"(fsync)\(\d+<([^>]+)>|(rename)\w*\((?:AT_FDCWD[^,]*, )?\"([^\"]+)\"", text)
    assert ordered([(a or c, b or d) for a, b, c, d in result]) is flushed
    tally(kernel_traces=1)


ERRORS = (errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC)


def failing(kind: str, error: int, which: int = 1):
    seen = 0

    def act(what, call, arguments):
        nonlocal seen
        seen += what == kind
        if what == kind and seen == which:
            raise OSError(error, os.strerror(error))

    return act


@pytest.mark.parametrize("kind", ["write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: errno.errorcode[e])
def test_B5_an_io_error_is_told_and_the_last_checkpoint_stays(kind, error, folder, tally):
    times = count(shutil.copytree(folder, folder / "counted")).count(kind)
    shutil.rmtree(folder / "counted")
    first = times if kind == "mkdir" else 1  # the folders above are there already
    for which in range(first, times + 1):
        told_and_kept(folder, kind, error, which, last=which == times)
        tally(errors=1)
    tally(cases=1)


def told_and_kept(folder: Path, kind: str, error: int, which: int, last: bool = False) -> None:
    with operations(failing(kind, error, which)), pytest.raises(CheckpointError) as caught:
        save(folder, NEW)
    assert f"step-{NEW:08d}" in str(caught.value) and os.strerror(error) in str(caught.value)
    after_name = kind == "fsync" and last  # only the folder's entry was not flushed
    assert loaded(folder) == (NEW if after_name else OLD) and not list(folder.glob("*.partial"))


@pytest.mark.control("vitkit.training.checkpoint.Saver.failed")
@pytest.mark.parametrize("kind", ["write", "fsync", "rename"])
def test_B5_control_an_error_that_is_swallowed_is_not_told(kind, folder, switched_off):
    switched_off("vitkit.training.checkpoint.Saver.failed", lambda self, partial, error: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        told_and_kept(folder, kind, errno.EIO, 1)
    assert list(folder.glob("*.partial")), "and its remains stay"


def hurt(folder: Path, number: int, flips: int) -> str:
    """A bit of some file turned, or a file cut off; the name of what was done."""
    newest = complete(folder)[-1]
    files = sorted(newest.iterdir())
    path = files[number % len(files)]
    data = bytearray(path.read_bytes())
    if number < flips:
        at = (number * 7919) % (8 * len(data))
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        return f"bit {at} of {path.name}"
    path.write_bytes(data[: (number * 7919) % len(data)])
    return f"{path.name} cut at {path.stat().st_size}"


def test_B6_every_flipped_bit_and_every_cut_is_noticed_and_the_one_before_counts(sound, tmp_path, tally):
    flips, cuts = scaled((100, 20), (500, 50))
    for number in range(flips + cuts):
        folder = shutil.copytree(sound, tmp_path / "run")
        what = hurt(folder, number, flips)
        result, damaged = latest(folder)
        assert damaged == [f"step-{OLD:08d}"] and result == folder / f"step-{OLD - 1:08d}", what
        assert number % 25 or loaded(folder) == OLD - 1
        shutil.rmtree(folder)
    tally(flips=flips, cuts=cuts)


def part(newest: Path) -> Path:
    return newest / "state-00000.safetensors"


SWAPS = {
    "missing part": lambda newest, other: part(newest).unlink(),
    "missing facts": lambda newest, other: (newest / "facts.json").unlink(),
    "missing manifest": lambda newest, other: (newest / MANIFEST).unlink(),
    "empty manifest": lambda newest, other: (newest / MANIFEST).write_text(""),
    "manifest of nothing": lambda newest, other: (newest / MANIFEST).write_text("{}"),
    "manifest that is a list": lambda newest, other: (newest / MANIFEST).write_text("[1, 2]"),
    "manifest without the part": lambda newest, other: (newest / MANIFEST).write_text(
        json.dumps({"facts.json": sha256(newest / "facts.json")})
    ),
    "extra part": lambda newest, other: shutil.copy(part(other), newest / "state-00001.safetensors"),
    "part of another step": lambda newest, other: shutil.copy(part(other), part(newest)),
    "facts of another step": lambda newest, other: shutil.copy(other / "facts.json", newest),
    "manifest of another step": lambda newest, other: shutil.copy(other / MANIFEST, newest),
    "part is a folder": lambda newest, other: (part(newest).unlink(), part(newest).mkdir()),
    "a file in its place": lambda newest, other: (shutil.rmtree(newest), newest.write_text("no folder")),
}


@pytest.mark.parametrize("what", SWAPS)
def test_B6_missing_extra_and_swapped_files_are_noticed(what, folder, tally):
    newest, other = reversed(complete(folder))
    SWAPS[what](newest, other)
    result, damaged = latest(folder)
    assert result == other and damaged == ([] if what == "a file in its place" else [newest.name])
    assert loaded(folder) == OLD - 1
    tally(swaps=1)


@pytest.mark.control("vitkit.training.checkpoint.verifies")
def test_B6_control_without_the_hashes_damage_is_not_noticed(folder, switched_off):
    newest = complete(folder)[-1]
    data = bytearray(part(newest).read_bytes())
    data[-2] ^= 64
    part(newest).write_bytes(data)
    switched_off("vitkit.training.checkpoint.verifies", lambda path: (path / MANIFEST).exists())
    assert latest(folder) == (newest, [])
    with pytest.raises(AssertionError):
        loaded(folder)


COPIED = [True, pytest.param(False, marks=pytest.mark.control("vitkit.training.checkpoint.Piece.copied"))]


@pytest.mark.parametrize("protected", COPIED, ids=["on", "control"])
def test_B13_what_is_written_aside_is_what_was_there_when_it_was_asked_for(
    protected, tmp_path, monkeypatch, switched_off, tally
):
    if not protected:
        switched_off("vitkit.training.checkpoint.Piece.copied", lambda piece: piece)
    write, turn, changed = checkpoint.write_part, Lock(), Event()

    def late(*args):
        assert turn.acquire(blocking=False), "two at a time"
        assert changed.wait(60), "the weights did not change"
        write(*args)
        turn.release()

    monkeypatch.setattr(checkpoint, "write_part", late)
    saver, state, right = Saver(tmp_path, aside=True), state_at(0), 0
    for step in range(1, 21):
        change(state, step)
        saver.save(state, {"best": step})
        with_new_weights = step + 0.5
        for parameter in state.model.parameters():
            parameter.data.fill_(with_new_weights)
        changed.set()
        saver.finish()
        changed.clear()
        try:
            right += loaded(tmp_path) == step
        except AssertionError:
            assert not protected
    assert right == (20 if protected else 0)
    tally(saves=20 if protected else 0)


@pytest.mark.parametrize("point", ["write_part", "await_parts", "close", "publish"])
def test_B13_a_process_killed_while_one_is_in_flight_leaves_the_one_before(point, folder, tally):
    assert elsewhere(saving.die_saving_aside, folder, point) == -9
    assert loaded(folder) == OLD
    tally(kills=1)
