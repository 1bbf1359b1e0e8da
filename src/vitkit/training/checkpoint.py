"""The whole training state on disk: written beside, hashed, flushed, renamed; the newest sound one counts."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from vitkit.training.loop import TrainState
from vitkit.weights.save import flush

MANIFEST = "MANIFEST.json"
KEEP = 2


class CheckpointError(ValueError):
    """A checkpoint could not be written or does not fit; the message says what is needed."""


def save_checkpoint(folder: Path, state: TrainState, remember: dict[str, Any]) -> Path:
    """folder/step-N, whole or not at all; older ones beyond the last two are removed after it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:08d}"
    partial = folder / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    arrays = state_arrays(state)
    needed = sum(t.numel() * t.element_size() for t in arrays.values())
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed + 2**20:
        raise CheckpointError(f"{folder}: a checkpoint needs {needed:,} bytes and {free:,} are free")
    try:
        partial.mkdir()
        safetensors.torch.save_file(arrays, partial / "state.safetensors")
        facts = {"step": state.step, "remember": remember, "torch": torch.__version__}
        (partial / "facts.json").write_text(json.dumps(facts))
        hashes = {p.name: digest(p) for p in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps(hashes))
        for path in (*partial.iterdir(), partial):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        flush(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {final}: {error}; the checkpoints before it are untouched"
        ) from None
    for old in complete(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def state_arrays(state: TrainState) -> dict[str, Tensor]:
    """Model, average and optimizer as one flat table of tensors."""
    arrays = {f"model.{n}": t.detach() for n, t in state.model.state_dict().items()}
    arrays |= {f"average.{n}": t for n, t in state.average.items()}
    for number, slots in state.optimizer.state_dict()["state"].items():
        for name, value in slots.items():
            if value is not None:
                arrays[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
    return {name: t.contiguous().cpu() for name, t in arrays.items()}


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
    try:
        hashes = json.loads((path / MANIFEST).read_text())
        return bool(hashes) and all(digest(path / Path(name).name) == value for name, value in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


def load_checkpoint(path: Path, state: TrainState) -> dict[str, Any]:
    """Put a verified checkpoint into the state; return what was remembered beside it."""
    facts = json.loads((path / "facts.json").read_text())
    arrays = safetensors.torch.load_file(path / "state.safetensors")
    model = {n.removeprefix("model."): t for n, t in arrays.items() if n.startswith("model.")}
    wanted = {n: tuple(t.shape) for n, t in state.model.state_dict().items()}
    if {n: tuple(t.shape) for n, t in model.items()} != wanted:
        raise CheckpointError(f"{path}: is of another model; give another --out, or delete it")
    state.model.load_state_dict(model)
    with torch.no_grad():
        for name, tensor in state.average.items():
            tensor.copy_(arrays[f"average.{name}"])
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in arrays.items():
        if name.startswith("optimizer."):
            _, number, slot = name.split(".", 2)
            slots.setdefault(int(number), {})[slot] = tensor
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": slots, "param_groups": groups})
    state.step = int(facts["step"])
    return facts["remember"]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
