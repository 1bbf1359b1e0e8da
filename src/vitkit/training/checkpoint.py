"""Sharded, crash-safe checkpoints of the whole training state.

A checkpoint is written into a temporary folder, hashed, flushed and renamed; a run resumes from the newest
one whose hashes match. Each process with tensors, or shards of them, writes one file. A shard is a range of
rows, so that any number of processes can load what any other number has saved.
"""

import errno
import json
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
from vitkit.io.system import rename_over
from vitkit.runtime.runtime import Runtime, local_shard
from vitkit.training.step import TrainState

MANIFEST = "MANIFEST.json"
KEEP = 2  # checkpoints
PARTS_TIMEOUT = 540.0  # seconds for which rank 0 waits for the files of the others; they wait for it longer
ABORT_TIMEOUT = 10.0  # the same after the run has failed
Rows = dict[str, list[int]]  # of one file: tensor -> [first row, *full shape]


class CheckpointError(Error):
    """A checkpoint cannot be written, or does not fit the model."""

    code = "file.not-writable"


@dataclass(frozen=True)
class Piece:
    """The rows of a tensor from `start` on that one process holds."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]  # of the full tensor

    def copied(self) -> "Piece":
        """A copy on the CPU, which training does not overwrite."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


# --- saving


class Saver:
    """Writes checkpoints into a folder, one at a time; with `aside` in a background thread."""

    def __init__(self, folder: Path, runtime: Runtime = Runtime(), *, aside: bool = False):
        self.folder, self.runtime, self.aside = folder, runtime, aside
        self.thread: Thread | None = None
        self.error: CheckpointError | None = None
        self.deadline = float("inf")  # for the files of the other processes

    def save(self, state: TrainState, extra: dict[str, Any]) -> None:
        """Write folder/step-N atomically, then remove all but the last two checkpoints."""
        self.finish()
        mine = pieces(state, self.runtime)
        facts = {"step": state.step, "remember": dict(extra), "torch": torch.__version__}
        partial = self.runtime.on_main_first(lambda: begin(self.folder, state.step))
        if self.aside:
            mine = {name: piece.copied() for name, piece in mine.items()}
            self.thread = Thread(target=self.attempt, args=(partial, mine, facts))
            self.thread.start()
        else:
            self.attempt(partial, mine, facts)
            self.finish()

    def attempt(self, partial: Path, mine: dict[str, Piece], facts: dict[str, Any]) -> None:
        """Write this process's file; rank 0 waits for all files and publishes the checkpoint."""
        rank, sharded = self.runtime.rank, self.runtime.is_sharded
        try:
            if self.runtime.is_main or sharded:  # a process without rows writes an empty file
                write_part(partial, rank, mine)
            if self.runtime.is_main:
                world = self.runtime.world if sharded else 1
                await_parts(partial, world, lambda: time.monotonic() > self.deadline)
                close(partial, facts)
        except (CheckpointError, OSError, safetensors.SafetensorError) as error:
            self.failed(partial, error)

    def failed(self, partial: Path, error: Exception) -> None:
        """Keep the error for `finish` to raise, and clean up the unfinished checkpoint."""
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"cannot write {partial.with_suffix('')}: {error}; earlier checkpoints are intact",
                code="disk.full" if getattr(error, "errno", 0) == errno.ENOSPC else "",
            )
        self.error = error
        if self.runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                (partial / f"part-{self.runtime.rank:05d}.failed").touch()

    def finish(self) -> None:
        """Wait for the checkpoint in progress; an error in one process is raised in all of them."""
        self.join()
        error, self.error = self.error, None
        gathered = self.runtime.all_gather_object(error and (str(error), error.code))
        if errors := [item for item in gathered if item]:
            message, code = errors[0]
            raise CheckpointError(message, code=code)

    def leave(self) -> None:
        """Wait briefly after training has failed: the other processes may be gone."""
        self.deadline = time.monotonic() + ABORT_TIMEOUT
        self.join()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def begin(folder: Path, step: int) -> Path:
    """Create the temporary folder of a checkpoint, and remove those that were never finished."""
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
    """Write the tensors of one process, then a JSON file with their rows, which marks them as complete."""
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
    part = {"sha256": sha256(path), "rows": {name: [p.start, *p.shape] for name, p in mine.items()}}
    temporary = partial / f"part-{rank:05d}.json.new"
    temporary.write_text(json.dumps(part), encoding="utf-8")
    rename_over(temporary, partial / f"part-{rank:05d}.json")


def await_parts(partial: Path, parts: int, expired: Callable[[], bool]) -> None:
    """Wait until every process has written its part."""
    start = time.monotonic()
    while missing := [r for r in range(parts) if not (partial / f"part-{r:05d}.json").exists()]:
        ranks = ", ".join(map(str, missing))
        if any((partial / f"part-{rank:05d}.failed").exists() for rank in missing):
            raise CheckpointError(f"{partial}: process {ranks} could not write its part")
        if expired() or time.monotonic() - start > PARTS_TIMEOUT:
            raise CheckpointError(f"{partial}: timed out waiting for the part of process {ranks}")
        time.sleep(0.01)


def close(partial: Path, facts: dict[str, Any]) -> None:
    """Write facts and manifest once all parts are there, publish the checkpoint and remove old ones."""
    names = sorted(path.name for path in partial.glob("part-*.json"))
    parts = [json.loads((partial / name).read_text(encoding="utf-8")) for name in names]
    (partial / "facts.json").write_text(
        json.dumps(facts | {"parts": [part["rows"] for part in parts]}), encoding="utf-8"
    )
    hashes = {f"state-{rank:05d}.safetensors": part["sha256"] for rank, part in enumerate(parts)}
    hashes["facts.json"] = sha256(partial / "facts.json")
    for name in names:
        (partial / name).unlink()
    (partial / MANIFEST).write_text(json.dumps(hashes), encoding="utf-8")
    for path in (partial / "facts.json", partial / MANIFEST, partial):
        flush(path)
    final = publish(partial)
    others = [path for path in complete(final.parent) if path != final]
    older = [path for path in others if path < final]
    newer = [path for path in others if path > final]  # damaged, or the run would have resumed from there
    for old in older[: len(older) - KEEP + 1] + newer:
        shutil.rmtree(old, ignore_errors=True)


def publish(partial: Path) -> Path:
    """Rename a finished checkpoint to its final name, atomically."""
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    rename_over(partial, final)
    flush(final.parent)
    return final


# --- loading


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and p.suffix != ".partial")


def latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose hashes match, and the names of newer, damaged ones."""
    damaged: list[str] = []
    for path in reversed(complete(folder)):
        if verifies(path):
            return path, damaged
        damaged.append(path.name)
    return None, damaged


def verifies(path: Path) -> bool:
    """Whether a checkpoint has exactly the files of its manifest, with matching hashes."""
    try:
        hashes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if set(hashes) != {"facts.json", *(part.name for part in path.glob("*.safetensors"))}:
            return False
        return all(sha256(path / name) == value for name, value in hashes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def load_checkpoint(path: Path, state: TrainState) -> dict[str, Any]:
    """Load a verified checkpoint into the state; returns the `extra` that was saved with it."""
    facts = json.loads((path / "facts.json").read_text(encoding="utf-8"))
    files = [path / f"state-{rank:05d}.safetensors" for rank in range(len(facts["parts"]))]
    try:
        load_pieces(state, ShardReader(files, facts["parts"]))
    except (Error, KeyError) as error:
        raise CheckpointError(
            f"{path}: belongs to another model ({error.args[0]}); give another --out, or delete it",
            code="checkpoint.mismatch",
        ) from None
    state.step = int(facts["step"])
    return facts["remember"]


# --- shards


def pieces(state: TrainState, runtime: Runtime) -> dict[str, Piece]:
    """What this process saves: its rows of every sharded tensor, and on rank 0 all other tensors."""
    mine = {}
    for name, tensor in named_tensors(state).items():
        if hasattr(tensor, "to_local"):
            rows = local_shard(tensor)
            if len(rows):
                mine[name] = Piece(rows, first_row(tensor), tuple(tensor.shape))
        elif runtime.is_main:
            mine[name] = Piece(tensor, 0, tuple(tensor.shape))
    return mine


def named_tensors(state: TrainState) -> dict[str, Tensor]:
    """Model, weight average and optimizer as one flat table of tensors."""
    table = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    table |= {f"average.{name}": tensor for name, tensor in state.average.items()}
    for number, slots in state.optimizer.state_dict()["state"].items():
        for name, value in slots.items():
            if value is not None:
                table[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
    return table


def first_row(tensor: Any) -> int:
    """The first row of this process's shard: shards are equal, but the last ones may be shorter or empty."""
    rows_per_process = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.shape[0], tensor.device_mesh.get_local_rank() * rows_per_process)


@torch.no_grad()
def fill(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy full tensors into a model that may be sharded."""
    for name, tensor in model.state_dict().items():
        rows = local_shard(tensor)
        start = first_row(tensor) if rows is not tensor else 0
        rows.copy_(state[name][start : start + len(rows)])


class ShardReader:
    """Reads any rows of a tensor from the files of a checkpoint."""

    def __init__(self, files: Sequence[Path], parts: Sequence[Rows]):
        self.files = list(zip([safe_open(file, "pt") for file in files], parts, strict=True))
        self.shapes = {name: tuple(row[1:]) for rows in parts for name, row in rows.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, from whichever files hold them; without `stop` an unsharded tensor as a whole."""
        chunks = []
        for file, rows in self.files:
            if name in rows:
                if stop is None:
                    return file.get_tensor(name)
                first, stored = rows[name][0], file.get_slice(name)
                begin, end = max(start, first) - first, min(stop, first + stored.get_shape()[0]) - first
                if begin < end:
                    chunks.append(stored[begin:end])
        if not chunks:
            raise Error(f"{name} is missing", code="checkpoint.mismatch")
        return torch.cat(chunks)


def load_pieces(state: TrainState, reader: ShardReader) -> None:
    """Fill a state from a checkpoint; the error for a mismatch names the tensor."""
    tensors = named_tensors(state)
    stored = {name for name in reader.shapes if name.startswith("model.")}
    unmatched = stored.symmetric_difference(name for name in tensors if name.startswith("model."))
    if unmatched:
        name = min(unmatched).removeprefix("model.")
        raise Error(f"only one of model and checkpoint has {name}", code="checkpoint.mismatch")
    for name, tensor in tensors.items():
        if name.startswith(("model.", "average.")):
            if reader.shapes.get(name) != tuple(tensor.shape):
                raise Error(
                    f"{name} has the shape {reader.shapes.get(name)}, not {tuple(tensor.shape)}",
                    code="checkpoint.mismatch",
                )
            with torch.no_grad():
                copy_rows(reader, name, tensor)
    load_optimizer(state.optimizer, reader)


def copy_rows(reader: ShardReader, name: str, tensor: Tensor) -> None:
    """Copy a stored tensor, or this process's rows of it, into `tensor`."""
    if not hasattr(tensor, "to_local"):
        tensor.copy_(reader.read(name, 0, tensor.shape[0]) if tensor.ndim else reader.read(name))
    elif len(rows := local_shard(tensor)):
        start = first_row(tensor)
        rows.copy_(reader.read(name, start, start + len(rows)))


def load_optimizer(optimizer: torch.optim.Optimizer, reader: ShardReader) -> None:
    """Load the optimizer state; tensors of a parameter's shape are sharded like the parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for name, shape in reader.shapes.items():
        if name.startswith("optimizer."):
            _, number, slot = name.split(".", 2)
            if int(number) >= len(parameters):
                raise Error(
                    f"the optimizer has {len(parameters)} parameters, not {int(number) + 1}",
                    code="checkpoint.mismatch",
                )
            parameter = parameters[int(number)]
            if shape == tuple(parameter.shape):
                tensor = torch.empty_like(parameter, requires_grad=False)
                copy_rows(reader, name, tensor)
            else:
                tensor = reader.read(name)
            slots.setdefault(int(number), {})[slot] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": slots, "param_groups": groups})
