"""A training state as named tensors, each whole or as the rows that a process holds, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.training.runtime import Runtime, local
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
            rows = local(tensor)
            if len(rows):
                found[name] = Piece(rows, first_row(tensor), tuple(tensor.shape))
        elif runtime.main:
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
        rows = local(tensor)
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
    elif len(rows := local(tensor)):
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
