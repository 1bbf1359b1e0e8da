"""The whole training state on disk: written beside, hashed, flushed, renamed; the newest sound one counts.

Each process that has tensors, or parts of them, writes one file. A part is some rows of a tensor, and any
number of processes can read what any other number has written.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.io.files import flush, sha256
from vitkit.runtime.runtime import Runtime, local_shard
from vitkit.training.step import TrainState

Rows = dict[str, list[int]]  # of one file: tensor -> [first row, *whole shape]


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor: those from `start` on."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]  # of the whole

    def copied(self) -> "Piece":
        """The same rows in memory that the training does not touch."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


def pieces(state: TrainState, runtime: Runtime) -> dict[str, Piece]:
    """What this process has to save: its rows of every cut tensor, and the main process all the others."""
    found = {}
    for name, tensor in named(state).items():
        if hasattr(tensor, "to_local"):
            rows = local_shard(tensor)
            if len(rows):
                found[name] = Piece(rows, first_row(tensor), tuple(tensor.shape))
        elif runtime.is_main:
            found[name] = Piece(tensor, 0, tuple(tensor.shape))
    return found


def named(state: TrainState) -> dict[str, Tensor]:
    """Model, average and optimizer as one flat table of tensors."""
    table = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    table |= {f"average.{name}": tensor for name, tensor in state.average.items()}
    for number, slots in state.optimizer.state_dict()["state"].items():
        for name, value in slots.items():
            if value is not None:
                table[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
    return table


def first_row(tensor: Any) -> int:
    """Where this process's rows begin: a cut is even, and the last processes may have fewer rows, or none."""
    each = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.shape[0], tensor.device_mesh.get_local_rank() * each)


@torch.no_grad()
def fill(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Whole tensors into a model, of which each process may hold its rows only."""
    for name, tensor in model.state_dict().items():
        rows = local_shard(tensor)
        start = first_row(tensor) if rows is not tensor else 0
        rows.copy_(state[name][start : start + len(rows)])


def put_pieces(state: TrainState, files: Sequence[Path], parts: Sequence[Rows]) -> None:
    """Fill a state from files; a KeyError names what does not fit."""
    opened = [safe_open(file, "pt") for file in files]

    def read(name: str, start: int, stop: int | None) -> Tensor:
        """Rows of a tensor, out of whichever files have them; a None for the end means all of it."""
        found = []
        for file, rows in zip(opened, parts, strict=True):
            if name in rows:
                if stop is None:
                    return file.get_tensor(name)
                first, cut = rows[name][0], file.get_slice(name)
                begin, end = max(start, first) - first, min(stop, first + cut.get_shape()[0]) - first
                if begin < end:
                    found.append(cut[begin:end])
        if not found:
            raise Error(f"{name} is missing", code="checkpoint.mismatch")
        return torch.cat(found)

    shapes = {name: tuple(told[1:]) for rows in parts for name, told in rows.items()}
    stored = {name for name in shapes if name.startswith("model.")}
    wanted = named(state)
    strange = stored.symmetric_difference(name for name in wanted if name.startswith("model."))
    if strange:
        raise Error(f"{sorted(strange)[0].removeprefix('model.')} is not in both", code="checkpoint.mismatch")
    for name, tensor in wanted.items():
        if name.startswith(("model.", "average.")):
            if shapes.get(name) != tuple(tensor.shape):
                raise Error(
                    f"{name} has the shape {shapes.get(name)}, not {tuple(tensor.shape)}",
                    code="checkpoint.mismatch",
                )
            with torch.no_grad():
                copy_rows(read, name, tensor)
    put_optimizer(state.optimizer, read, shapes)


def copy_rows(read: Any, name: str, tensor: Tensor) -> None:
    if not hasattr(tensor, "to_local"):
        tensor.copy_(read(name, 0, None) if not tensor.ndim else read(name, 0, tensor.shape[0]))
    elif len(rows := local_shard(tensor)):
        start = first_row(tensor)
        rows.copy_(read(name, start, start + len(rows)))


def put_optimizer(optimizer: torch.optim.Optimizer, read: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Slots are made like their parameters, and cut as those are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        if name.startswith("optimizer."):
            _, number, slot = name.split(".", 2)
            if int(number) >= len(parameters):
                raise Error(
                    f"the optimizer has {len(parameters)} parameters, not {int(number) + 1}",
                    code="checkpoint.mismatch",
                )
            like = parameters[int(number)]
            if shape == tuple(like.shape):
                made = torch.empty_like(like, requires_grad=False)
                copy_rows(read, name, made)
            else:
                made = read(name, 0, None)
            slots.setdefault(int(number), {})[slot] = made
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": slots, "param_groups": groups})


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
        partial = self.runtime.on_main_first(lambda: begin(self.folder, state.step))
        if self.aside:
            mine = {name: piece.copied() for name, piece in mine.items()}
            self.thread = Thread(target=self.attempt, args=(partial, mine, facts))
            self.thread.start()
        else:
            self.attempt(partial, mine, facts)
            self.finish()

    def attempt(self, partial: Path, mine: dict[str, Piece], facts: dict[str, Any]) -> None:
        rank, cut = self.runtime.rank, self.runtime.is_sharded
        try:
            if self.runtime.is_main or cut:  # a process of many may have no rows, and says so
                write_part(partial, rank, mine)
            if self.runtime.is_main:
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
        if self.runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                (partial / f"part-{self.runtime.rank:05d}.failed").touch()

    def finish(self) -> None:
        """Wait for what is being written; what went wrong with it anywhere is an error everywhere."""
        self.join()
        error, self.error = self.error, None
        if failed := [
            one for one in self.runtime.all_gather_object(error and (str(error), error.code)) if one
        ]:
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
