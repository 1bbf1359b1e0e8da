"""The whole training state on disk: written beside, hashed, flushed, renamed; the newest sound one counts.

Each process that has tensors, or parts of them, writes one file. A part is some rows of a tensor, and any
number of processes can read what any other number has written.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import safetensors.torch
import torch

from vitkit.errors import Error
from vitkit.io.atomic import flush
from vitkit.io.hashing import sha256
from vitkit.training.parts import Piece, pieces, put_pieces
from vitkit.training.runtime import Runtime
from vitkit.training.step import TrainState

MANIFEST = "MANIFEST.json"
KEEP = 2
PATIENCE = 540.0  # seconds that the main process waits for the parts of the others; they wait for it longer
LEAVING = 10.0  # and where the run has failed


class CheckpointError(Error):
    """A checkpoint could not be written or does not fit; the message says what is needed."""

    code = "file.not-writable"


class Saver:
    """Writes checkpoints into a folder, one at a time: at once, or beside the training (`aside`)."""

    def __init__(self, folder: Path, runtime: Runtime = Runtime(), *, aside: bool = False):
        self.folder, self.runtime, self.aside = folder, runtime, aside
        self.thread: Thread | None = None
        self.error: CheckpointError | None = None
        self.end = float("inf")  # of waiting for the others

    def save(self, state: TrainState, remember: dict[str, Any]) -> None:
        """folder/step-N, whole or not at all; older ones beyond the last two are removed after it stands."""
        self.finish()
        mine = pieces(state, self.runtime)
        facts = {"step": state.step, "remember": dict(remember), "torch": torch.__version__}
        partial = self.runtime.first(lambda: begin(self.folder, state.step))
        if self.aside:
            mine = {name: piece.copied() for name, piece in mine.items()}
            self.thread = Thread(target=self.attempt, args=(partial, mine, facts))
            self.thread.start()
        else:
            self.attempt(partial, mine, facts)
            self.finish()

    def attempt(self, partial: Path, mine: dict[str, Piece], facts: dict[str, Any]) -> None:
        rank, cut = self.runtime.rank, self.runtime.cut
        try:
            if self.runtime.main or cut:  # a process of many may have no rows, and says so
                write_part(partial, rank, mine)
            if self.runtime.main:
                await_parts(partial, self.runtime.world if cut else 1, lambda: time.monotonic() > self.end)
                close(partial, facts)
        except (CheckpointError, OSError, safetensors.SafetensorError) as error:
            self.failed(partial, error)

    def failed(self, partial: Path, error: Exception) -> None:
        """Keep the error for `finish` to raise; nothing stays of what was being written."""
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"cannot write {partial.with_suffix('')}: {error}; the checkpoints before it are untouched",
                code="disk.full" if getattr(error, "errno", 0) == errno.ENOSPC else "",
            )
        self.error = error
        if self.runtime.main:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                (partial / f"part-{self.runtime.rank:05d}.failed").touch()

    def finish(self) -> None:
        """Wait for what is being written; what went wrong with it anywhere is an error everywhere."""
        self.join()
        error, self.error = self.error, None
        if failed := [one for one in self.runtime.everyones(error and (str(error), error.code)) if one]:
            raise CheckpointError(failed[0][0], code=failed[0][1])

    def leave(self) -> None:
        """The same where the training has failed, and the other processes may be gone."""
        self.end = time.monotonic() + LEAVING
        self.join()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def begin(folder: Path, step: int) -> Path:
    """An empty folder beside the checkpoints, and no remains of those that were never finished."""
    partial = folder / f"step-{step:08d}.partial"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        for old in partial.parent.glob("step-*.partial"):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write {partial.with_suffix('')}: {error}") from None
    return partial


def write_part(partial: Path, rank: int, mine: dict[str, Piece]) -> None:
    """The tensors of one process, and beside them what they are; the latter last."""
    needed = sum(piece.tensor.nbytes for piece in mine.values())
    free = shutil.disk_usage(partial).free
    if free < 1.05 * needed + 2**20:
        raise CheckpointError(
            f"{partial.parent}: a checkpoint needs {needed:,} bytes and {free:,} are free", code="disk.full"
        )
    path = partial / f"state-{rank:05d}.safetensors"
    arrays = {name: piece.tensor.detach().contiguous().cpu() for name, piece in mine.items()}
    safetensors.torch.save_file(arrays, path)
    flush(path)
    told = {"sha256": sha256(path), "rows": {name: [p.start, *p.shape] for name, p in mine.items()}}
    beside = partial / f"part-{rank:05d}.json.new"
    beside.write_text(json.dumps(told))
    os.replace(beside, partial / f"part-{rank:05d}.json")


def await_parts(partial: Path, parts: int, late: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while missing := [r for r in range(parts) if not (partial / f"part-{r:05d}.json").exists()]:
        listed = ", ".join(map(str, missing))
        if any((partial / f"part-{rank:05d}.failed").exists() for rank in missing):
            raise CheckpointError(f"{partial}: process {listed} could not write its part")
        if late() or time.monotonic() - begun > PATIENCE:
            raise CheckpointError(f"{partial}: the part of process {listed} did not come")
        time.sleep(0.01)


def close(partial: Path, facts: dict[str, Any]) -> None:
    """When all parts are there: the manifest, the name, and away with the oldest."""
    names = sorted(path.name for path in partial.glob("part-*.json"))
    told = [json.loads((partial / name).read_text()) for name in names]
    (partial / "facts.json").write_text(json.dumps(facts | {"parts": [one["rows"] for one in told]}))
    hashes = {f"state-{rank:05d}.safetensors": one["sha256"] for rank, one in enumerate(told)}
    hashes["facts.json"] = sha256(partial / "facts.json")
    for name in names:
        (partial / name).unlink()
    (partial / MANIFEST).write_text(json.dumps(hashes))
    for path in (partial / "facts.json", partial / MANIFEST, partial):
        flush(path)
    final = publish(partial)
    others = [path for path in complete(final.parent) if path != final]
    before = [path for path in others if path < final]
    newer = [path for path in others if path > final]  # damaged, or the run would have gone on from there
    for old in before[: len(before) - KEEP + 1] + newer:
        shutil.rmtree(old, ignore_errors=True)


def publish(partial: Path) -> Path:
    """Give a whole checkpoint its name, by which it counts from then on."""
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    flush(final.parent)
    return final


def complete(folder: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and p.suffix != ".partial")


def latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose hashes are right, and the names of newer ones that are damaged."""
    damaged: list[str] = []
    for path in reversed(complete(folder)):
        if verifies(path):
            return path, damaged
        damaged.append(path.name)
    return None, damaged


def verifies(path: Path) -> bool:
    """Whether all parts, and no others, are there and as they were written."""
    try:
        hashes = json.loads((path / MANIFEST).read_text())
        if set(hashes) != {"facts.json", *(part.name for part in path.glob("*.safetensors"))}:
            return False
        return all(sha256(path / name) == value for name, value in hashes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def load_checkpoint(path: Path, state: TrainState) -> dict[str, Any]:
    """Put a verified checkpoint into the state; return what was remembered beside it."""
    facts = json.loads((path / "facts.json").read_text())
    files = [path / f"state-{rank:05d}.safetensors" for rank in range(len(facts["parts"]))]
    try:
        put_pieces(state, files, facts["parts"])
    except (Error, KeyError) as error:
        raise CheckpointError(
            f"{path}: is of another model ({error.args[0]}); give another --out, or delete it",
            code="checkpoint.mismatch",
        ) from None
    state.step = int(facts["step"])
    return facts["remember"]
