"""The one training loop. Two seams: the objective (batch to loss) and watch (what happens beside)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vitkit.training.objectives import Batch, Objective
from vitkit.training.optimizer import (
    OptimizerConfig,
    clip_gradients,
    make_optimizer,
    move,
    moves_unseen,
    set_rate,
    update_average,
)
from vitkit.training.recorder import Found, Recorder
from vitkit.training.room import CAREFUL, OutOfMemory, Room
from vitkit.training.runtime import Runtime

Metrics = dict[str, float]


class Diverged(ValueError):
    """The loss or the gradient is not a number; the model was not moved by it."""

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step  # that many were before it


@dataclass
class TrainState:
    """All that a run remembers: bare modules and tensors, so no wrapper's name reaches a file."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    average: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, model: nn.Module, config: OptimizerConfig) -> "TrainState":
        optimizer = make_optimizer(model, config)
        average = {n: p.detach().clone() for n, p in model.named_parameters()} if config.average else {}
        return cls(model, optimizer, 0, average)


@dataclass(frozen=True)
class Begun:
    """A step that the device has been asked for, and may not have done."""

    step: int  # that many were before it
    images: int
    rate: float
    names: list[str]
    numbers: Tensor  # by name, on the device
    held: Tensor | None = None  # the same on their way to the host, where the next step would overwrite them
    arrived: torch.cuda.Event | None = None

    @property
    def played(self) -> bool:
        """Whether the next step may begin before this one's numbers are looked at."""
        return self.held is not None


def train(
    state: TrainState,
    batches: Iterator[list[Batch]],
    objective: Objective,
    *,
    until: int,
    rate: Callable[[int], float],
    config: OptimizerConfig,
    watch: Callable[[TrainState, Metrics], bool],
    due: Callable[[int], bool] = lambda step: True,
    call: nn.Module | None = None,
    before: Callable[[int], None] = lambda step: None,
    runtime: Runtime = Runtime(),
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Advance the state to step `until`, or until `watch` (which logs, evaluates and saves) says stop.

    `due` says, after so many steps, whether `watch` wants the model as it then is. Where it does not, the
    next step may have begun when `watch` hears of this one, so that a GPU need not wait: the model may be a
    step further than the state says. `call` is the model as it is to be called (compiled, or spread over
    processes), if not as it is; `before` runs ahead of each step: the seed of that step is set there; `tell`
    hears of smaller pieces.
    """
    recorder = Recorder(runtime, state.optimizer, tell)
    room = Room(tell, recorder.forget)
    called = state.model if call is None else call
    behind: Begun | None = None
    while state.step < until:
        before(state.step)
        if not state.model.training:  # an evaluation was between
            state.model.train()
        begun = begin(
            state, next(batches), objective, rate(state.step), config, called, runtime, room, recorder
        )
        state.step += 1
        if behind is not None:
            watch(replace(state, step=behind.step + 1), finish(state, behind, config))
        wanted = due(state.step) or state.step == until or not begun.played
        behind = None if wanted else begun
        if wanted and watch(state, finish(state, begun, config)):
            return


def update(
    state: TrainState,
    micro_batches: list[Batch],
    objective: Objective,
    rate: float,
    config: OptimizerConfig,
    call: nn.Module,
    runtime: Runtime = Runtime(),
    room: Room | None = None,
    recorder: Recorder | None = None,
) -> Metrics:
    """One optimizer step over the micro-batches of one batch, done and looked at."""
    begun = begin(state, micro_batches, objective, rate, config, call, runtime, room, recorder)
    return finish(state, begun, config)


def begin(
    state: TrainState,
    micro_batches: list[Batch],
    objective: Objective,
    rate: float,
    config: OptimizerConfig,
    call: nn.Module,
    runtime: Runtime = Runtime(),
    room: Room | None = None,
    recorder: Recorder | None = None,
) -> Begun:
    """Ask for one optimizer step over the micro-batches of one batch; each counts by its number of images.

    The images of all processes count alike, also where unusable files have left one with fewer.
    """
    set_rate(state.optimizer, rate)
    images = int(runtime.total(torch.tensor(sum(len(batch["image"]) for batch in micro_batches))))
    if not images:
        raise ValueError(f"step {state.step}: not one image of its batch is usable")
    room = room or Room()

    def whole(batch: Batch) -> Found:
        return judged(state, backward([batch], images, objective, call, runtime), config, runtime)

    played = None
    if recorder and room.pieces == 1 and recorder.takes(micro_batches):
        played = recorder.play(whole, micro_batches[0])
    if played is None:
        state.optimizer.zero_grad()  # what a recording may have left that failed
        results = gradients(state, micro_batches, images, objective, call, runtime, room)
        names, numbers = judged(state, results, config, runtime)
        return Begun(state.step, images, rate, names, numbers)
    moved(state, config)
    names, numbers = played
    held = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
    held.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event() if numbers.is_cuda else None
    if arrived:
        arrived.record()
    return Begun(state.step, images, rate, names, numbers, held, arrived)


def finish(state: TrainState, begun: Begun, config: OptimizerConfig) -> Metrics:
    """The numbers of a step, waited for. One that is no number is an error, and has moved nothing."""
    if begun.arrived:
        begun.arrived.synchronize()
    numbers = begun.numbers if begun.held is None else begun.held
    told = dict(zip(begun.names, numbers.tolist(), strict=True))
    if not (math.isfinite(told["gradient_norm"]) and math.isfinite(told["loss"])):
        state.optimizer.zero_grad()
        text = f"step {begun.step}: loss {told['loss']}, norm of the gradient {told['gradient_norm']}"
        raise Diverged(text, begun.step)
    if not begun.played:
        if not moves_unseen(state.optimizer):
            state.optimizer.step()
        moved(state, config)
    return {**told, "rate": begun.rate, "images": float(begun.images)}


def moved(state: TrainState, config: OptimizerConfig) -> None:
    """What follows a move of the model."""
    state.optimizer.zero_grad()
    if config.average:
        update_average(state.average, state.model, config.average)


def judged(state: TrainState, results: dict[str, Tensor], config: OptimizerConfig, runtime: Runtime) -> Found:
    """The numbers of a step, its gradients clipped; and the move itself, where it needs no look at them."""
    total = runtime.total(torch.stack([*results.values()]))
    norm = clip_gradients(state.model.parameters(), config.clip)
    numbers = torch.cat([total, norm.to(total)[None]])
    if moves_unseen(state.optimizer):
        move(state.optimizer, sound=numbers.isfinite().all())
    return [*results, "gradient_norm"], numbers


def gradients(
    state: TrainState,
    micro_batches: list[Batch],
    images: int,
    objective: Objective,
    call: nn.Module,
    runtime: Runtime,
    room: Room,
) -> dict[str, Tensor]:
    """Backward through all micro-batches, in smaller pieces where memory does not suffice.

    One process may try again at any step. Several must agree before their gradients meet, so they do it in
    their first steps, where those meet in a pass of their own; a model that is cut has no such place.
    """
    careful = runtime.world > 1 and not runtime.cut and room.steps < CAREFUL
    while True:
        pieces, short, results = room.cut(micro_batches), False, {}
        try:
            results = backward(pieces, images, objective, call, runtime, apart=careful)
        except torch.OutOfMemoryError as error:
            if runtime.world > 1 and not careful:
                raise OutOfMemory(
                    f"step {state.step}: process {runtime.rank} is out of memory ({error}); the same command "
                    "goes on from the last checkpoint with --set micro_batch=N, of fewer images than now"
                ) from None
            short = True
        largest = max(len(piece["image"]) for piece in pieces)
        anywhere, largest = map(int, runtime.most(short, largest) if careful else (short, largest))
        if not anywhere:
            break
        state.optimizer.zero_grad()
        released = room.release()
        runtime.free()  # here, since an error that is being handled holds on to its tensors
        if not released:
            room.shrink(state.step, largest)
    if careful:
        backward([blank(pieces[0])], images, objective, call, runtime, count=0)
    room.steps += 1
    return results


def backward(
    pieces: list[Batch],
    images: int,
    objective: Objective,
    call: nn.Module,
    runtime: Runtime,
    *,
    apart: bool = False,
    count: int | None = None,
) -> dict[str, Tensor]:
    """Gradients are added up piece by piece; `apart`, each process keeps its own; `count`: images of each."""
    results: dict[str, Tensor] = {}
    for number, batch in enumerate(pieces, start=1):
        share = (len(batch["image"]) if count is None else count) / images
        with runtime.accumulating(call, more=apart or number < len(pieces)):
            with runtime.computing():  # anew for each pass: autocast keeps its copies of the weights
                found = objective(call, batch if len(batch["image"]) else blank(batch))
            (found["loss"] * (share * runtime.world)).backward()  # the processes' gradients are averaged
        for name, value in found.items():
            results[name] = results.get(name, torch.zeros_like(value)) + value.detach() * share
    return results


def blank(batch: Batch) -> Batch:
    """One black image in the place of none: it counts nothing, but all call the model equally often."""
    return {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
