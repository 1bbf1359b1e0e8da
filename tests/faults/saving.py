"""A training state small enough to save a thousand times, and saves of it in a process that may die."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

if __name__ == "__main__":  # under strace
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch
from harness import dying, operations
from switches import switch_off
from together import forks

from vitkit.training import checkpoint
from vitkit.training.checkpoint import Saver, complete, latest, load_checkpoint
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState

OLD, NEW = 3, 4  # steps of the checkpoint that is there and of the one that is being written
IN_PLACE: dict[str, Callable[..., Any]] = {  # protection off: a checkpoint is written over the newest one
    "vitkit.training.checkpoint.begin": lambda folder, step: complete(folder)[-1],
    "vitkit.training.checkpoint.publish": lambda partial: partial,
}


def state_at(step: int, width: int = 8) -> TrainState:
    """Every number of it is the step."""
    state = TrainState.start(torch.nn.Linear(width, width), OptimizerConfig(average=0.9))
    for parameter in state.model.parameters():
        state.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    change(state, step)
    return state


def numbers(state: TrainState) -> list[torch.Tensor]:
    slots = [one["momentum_buffer"] for one in state.optimizer.state.values()]
    return [*state.model.parameters(), *state.average.values(), *slots]


@torch.no_grad()
def change(state: TrainState, step: int) -> None:
    for tensor in numbers(state):
        tensor.fill_(step)
    state.step = step


def save(folder: Path, step: int, width: int = 8) -> None:
    Saver(folder).save(state_at(step, width), {"best": step})


def loaded(folder: Path, width: int = 8) -> int | None:
    """The step of the checkpoint that a run would go on from, every number of which is looked at."""
    result, _ = latest(folder)
    if result is None:
        return None
    state = state_at(0, width)
    remembered = load_checkpoint(result, state)
    values = torch.cat([tensor.detach().flatten() for tensor in numbers(state)])
    assert values.unique().tolist() == [state.step] and remembered["best"] == state.step
    return state.step


def elsewhere(act: Callable[..., Any], *args: Any) -> int:
    """The exit code of a process that does something."""
    process = forks.Process(target=act, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "came to no end"
    return process.exitcode


def count(folder: Path) -> list[str]:
    """The operations of a save, in their order."""
    kinds: list[str] = []
    with operations(lambda kind, call, arguments: kinds.append(kind)):
        save(folder, NEW)
    return kinds


def write_in_place(proof: Path | None) -> None:
    """In a process of its own; None: the protection stays on."""
    for target, instead in IN_PLACE.items() if proof else ():
        switch_off(target, instead, proof)


def die_saving(folder: Path, number: int, torn: bool, proof: Path | None = None) -> None:
    write_in_place(proof)
    with operations(dying(number, torn=torn)):
        save(folder, NEW)


def die_saving_aside(folder: Path, point: str) -> None:
    """kill -9 as the thread beside the training comes to that function of its work."""
    there = Event()

    def held(*args: Any) -> None:
        there.set()
        Event().wait()

    setattr(checkpoint, point, held)
    Saver(folder, aside=True).save(state_at(NEW), {"best": NEW})
    assert there.wait(60)
    os.kill(os.getpid(), 9)


if __name__ == "__main__":
    folder, *proof = map(Path, sys.argv[1:])
    if proof:  # protection off
        switch_off("vitkit.training.checkpoint.flush", lambda path: None, proof[0])
    save(folder, NEW)
