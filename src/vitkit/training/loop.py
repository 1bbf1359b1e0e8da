"""The one training loop. Two seams: the objective (batch to loss) and watch (what happens beside)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from vitkit.training.runtime import Runtime

Metrics = dict[str, float]
CAREFUL = 2  # first steps of a process, after which what fitted into memory is taken to fit for good


class Diverged(ValueError):
    """The loss or the gradient is not a number; the model was not moved by it."""


class OutOfMemory(ValueError):
    """Images do not fit into memory, even where they are cut into smaller pieces; the remedy is told."""


@dataclass
class Room:
    """Into how many pieces each micro-batch is cut so that it fits into memory: as many on every process."""

    tell: Callable[[str], None] = lambda text: None
    release: Callable[[], bool] = lambda: (
        False
    )  # gives back what is only kept for speed; whether there was any
    pieces: int = 1
    steps: int = 0  # that have fitted

    def cut(self, micro_batches: list[Batch]) -> list[Batch]:
        if self.pieces == 1:
            return micro_batches
        cuts = [
            {name: tensor.tensor_split(self.pieces) for name, tensor in batch.items()}
            for batch in micro_batches
        ]
        return [{name: parts[i] for name, parts in cut.items()} for cut in cuts for i in range(self.pieces)]

    def shrink(self, step: int, images: int) -> None:
        """Twice as many pieces, of which the largest has had so many images."""
        if images <= 1:
            raise OutOfMemory(
                f"step {step}: not even one image at a time fits into memory; give --recompute, a smaller "
                "--image-size or a smaller --model"
            )
        self.pieces *= 2
        left = -(-images // 2)
        self.tell(
            f"step {step}: out of memory; from here on {left} images at a time, the same batch in all "
            f"(--set micro_batch={left} saves the attempt)"
        )


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


def train(
    state: TrainState,
    batches: Iterator[list[Batch]],
    objective: Objective,
    *,
    until: int,
    rate: Callable[[int], float],
    config: OptimizerConfig,
    watch: Callable[[TrainState, Metrics], bool],
    call: nn.Module | None = None,
    before: Callable[[int], None] = lambda step: None,
    runtime: Runtime = Runtime(),
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Advance the state to step `until`, or until `watch` (which logs, evaluates and saves) says stop.

    `call` is the model as it is to be called (compiled, or spread over processes), if not as it is;
    `before` runs ahead of each step: the seed of that step is set there; `tell` hears of smaller pieces.
    """
    recorder = Recorder(runtime, state.optimizer, tell)
    room = Room(tell, recorder.forget)
    while state.step < until:
        before(state.step)
        if not state.model.training:  # an evaluation was between
            state.model.train()
        metrics = update(
            state,
            next(batches),
            objective,
            rate(state.step),
            config,
            state.model if call is None else call,
            runtime,
            room,
            recorder,
        )
        state.step += 1
        if watch(state, metrics):
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
    """One optimizer step over the micro-batches of one batch; each counts by its number of images.

    The images of all processes count alike, also where unusable files have left one with fewer.
    """
    set_rate(state.optimizer, rate)
    images = int(runtime.total(torch.tensor(sum(len(batch["image"]) for batch in micro_batches))))
    if not images:
        raise ValueError(f"step {state.step}: not one image of its batch is usable")
    room = room or Room()

    def whole(batch: Batch) -> Found:
        return judged(state, backward([batch], images, objective, call, runtime), config, runtime)

    found = None
    if recorder and room.pieces == 1 and recorder.takes(micro_batches):
        state.optimizer.zero_grad()
        found = recorder.play(whole, micro_batches[0])
    if found is None:
        results = gradients(state, micro_batches, images, objective, call, runtime, room)
        found = judged(state, results, config, runtime)
    told = dict(zip(found[0], found[1].tolist(), strict=True))  # here the device is waited for
    if not (math.isfinite(told["gradient_norm"]) and math.isfinite(told["loss"])):
        state.optimizer.zero_grad()
        raise Diverged(
            f"step {state.step}: loss {told['loss']}, norm of the gradient {told['gradient_norm']}"
        )
    if not moves_unseen(state.optimizer):
        state.optimizer.step()
    state.optimizer.zero_grad()
    if config.average:
        update_average(state.average, state.model, config.average)
    return {**told, "rate": rate, "images": float(images)}


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
