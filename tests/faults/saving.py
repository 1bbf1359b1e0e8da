"""A training state small enough to save a thousand times, and saves of it in a process that may die."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # under strace
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch
from crew import forks
from harness import dying, operations

from vitkit.training import checkpoint
from vitkit.training.checkpoint import Saver, latest, load_checkpoint
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState

OLD, NEW = 3, 4  # steps of the checkpoint that is there and of the one that is being written


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
    found, _ = latest(folder)
    if found is None:
        return None
    state = state_at(0, width)
    remembered = load_checkpoint(found, state)
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


def die_saving(folder: Path, number: int, torn: bool) -> None:
    with operations(dying(number, torn=torn)):
        save(folder, NEW)


def die_saving_in_place(folder: Path, number: int, torn: bool) -> None:
    """Protection off: one file, written over the old one."""
    with operations(dying(number, torn=torn)):
        (folder / "last.json").write_text(json.dumps(dict.fromkeys("abcdef", NEW)))


def die_saving_aside(folder: Path, seconds: float) -> None:
    """kill -9 while the thread beside the training writes."""
    write = checkpoint.write_part

    def slow(*args: Any) -> None:
        write(*args)
        time.sleep(1.0)

    checkpoint.write_part = slow
    Saver(folder, aside=True).save(state_at(NEW), {"best": NEW})
    time.sleep(seconds)
    os.kill(os.getpid(), 9)


if __name__ == "__main__":
    if "no-flush" in sys.argv:  # protection off
        checkpoint.flush = lambda path: None
    save(Path(sys.argv[1]), NEW)
