"""One step of training: a batch to gradients to moved weights, in as many pieces as memory asks for."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitkit.training.halves import Halved
from vitkit.training.objectives import Batch, Objective
from vitkit.training.optimizer import (
    OptimizerConfig,
    clip_gradients,
    make_optimizer,
    move,
    moves_unseen,
    set_rate,
    swap_average,
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

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights, if there are any; afterwards it has its own, bit for bit."""
        swap_average(self.average, self.model)
        try:
            yield
        finally:
            swap_average(self.average, self.model)


@dataclass(frozen=True)
class Begun:
    """A step that the device has been asked for, and may not have done."""

    step: int  # that many were before it
    images: int
    rate: float
    names: list[str]
    numbers: Tensor  # by name
    played: bool = False  # its numbers are on their way to the host, so that the next step may begin
    arrived: torch.cuda.Event | None = None


def update(
    state: TrainState,
    micro_batches: list[Batch],
    objective: Objective,
    rate: float,
    config: OptimizerConfig,
    call: nn.Module,
    runtime: Runtime = Runtime(),
) -> Metrics:
    """A single optimizer step over the micro-batches of one batch."""
    return Stepper(state, objective, config, call, runtime)(micro_batches, rate)


@dataclass
class Stepper:
    """Makes the steps of a run, one after the other."""

    state: TrainState
    objective: Objective
    config: OptimizerConfig
    call: nn.Module  # the model as it is to be called: compiled, or spread over processes
    runtime: Runtime = Runtime()
    tell: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.runtime, self.state.optimizer, self.tell)
        self.room = Room(self.tell, self.recorder.forget)
        bare = getattr(self.call, "_orig_mod", self.call)
        self.halved = bare if isinstance(bare, Halved) else None

    def __call__(self, micro_batches: list[Batch], rate: float) -> Metrics:
        return self.finish(self.begin(micro_batches, rate))

    def begin(self, micro_batches: list[Batch], rate: float) -> Begun:
        """Ask for an optimizer step over the micro-batches of one batch; each counts by its number of images.

        The images of all processes count alike, also where unusable files have left one with fewer.
        """
        step = self.state.step
        set_rate(self.state.optimizer, rate)
        count = torch.tensor(sum(len(batch["image"]) for batch in micro_batches))
        images = int(self.runtime.total(count))
        if not images:
            raise ValueError(f"step {step}: not one image of its batch is usable")
        played = None
        if self.room.pieces == 1 and self.recorder.takes(micro_batches):
            played = self.recorder.play(
                lambda batch: self.judged(self.backward([batch], images)), micro_batches[0]
            )
        if played is None:
            return Begun(step, images, rate, *self.judged(self.gradients(micro_batches, images)))
        self.moved(step)
        names, numbers = played
        held = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        held.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event() if numbers.is_cuda else None
        if arrived:
            arrived.record()
        return Begun(step, images, rate, names, held, True, arrived)

    def finish(self, begun: Begun) -> Metrics:
        """The numbers of a step, waited for. One that is no number is an error, and has moved nothing."""
        if begun.arrived:
            begun.arrived.synchronize()
        told = dict(zip(begun.names, begun.numbers.tolist(), strict=True))
        if not is_sound(told):
            self.state.optimizer.zero_grad()
            text = f"step {begun.step}: loss {told['loss']}, norm of the gradient {told['gradient_norm']}"
            raise Diverged(text, begun.step)
        if not begun.played:
            if not moves_unseen(self.state.optimizer):
                self.state.optimizer.step()
            self.moved(begun.step)
        return {**told, "rate": begun.rate, "images": float(begun.images)}

    def moved(self, step: int) -> None:
        """What follows a move of the model; `step` many were before it."""
        self.state.optimizer.zero_grad()
        if self.config.average:
            update_average(self.state.average, self.state.model, self.config.average, step + 1)

    def judged(self, results: dict[str, Tensor]) -> Found:
        """The numbers of a step, its gradients clipped; and the move, where it needs no look at them."""
        total = self.runtime.total(torch.stack([*results.values()]))
        norm = clip_gradients(self.state.model.parameters(), self.config.clip)
        numbers = torch.cat([total, norm.to(total)[None]])
        if moves_unseen(self.state.optimizer):
            move(self.state.optimizer, sound=numbers.isfinite().all())
        return [*results, "gradient_norm"], numbers

    def gradients(self, micro_batches: list[Batch], images: int) -> dict[str, Tensor]:
        """Backward through all micro-batches, in smaller pieces where memory does not suffice.

        One process may try again at any step. Several must agree before their gradients meet, so they do it
        in their first steps, where those meet in a pass of their own; a model that is cut has no such place.
        """
        state, runtime, room = self.state, self.runtime, self.room
        careful = runtime.world > 1 and not runtime.cut and room.steps < CAREFUL
        while True:
            pieces, short, results = room.cut(micro_batches), False, {}
            try:
                results = self.backward(pieces, images, apart=careful)
            except torch.OutOfMemoryError as error:
                if not self.may_cut(careful):
                    raise OutOfMemory(
                        f"step {state.step}: process {runtime.rank} is out of memory ({error}); the same "
                        "command goes on from the last checkpoint with --set micro_batch=N, of fewer images "
                        "than now"
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
            self.backward([blank(pieces[0])], images, count=0)
        room.steps += 1
        return results

    def may_cut(self, careful: bool) -> bool:
        """Whether a lack of memory is answered by smaller pieces."""
        return careful or self.runtime.world == 1

    def backward(
        self, pieces: list[Batch], images: int, *, apart: bool = False, count: int | None = None
    ) -> dict[str, Tensor]:
        """Gradients added up piece by piece; `apart`, each process keeps its own; `count`: images of each."""
        results: dict[str, Tensor] = {}
        if self.halved:
            self.halved.renew()
        for number, batch in enumerate(pieces, start=1):
            share = (len(batch["image"]) if count is None else count) / images
            with self.runtime.accumulating(self.call, more=apart or number < len(pieces)):
                with self.runtime.computing():  # anew for each pass: autocast keeps its copies of the weights
                    found = self.objective(self.call, batch if len(batch["image"]) else blank(batch))
                (found["loss"] * (share * self.runtime.world)).backward()  # which the processes average
            if self.halved:
                self.halved.give()
            for name, value in found.items():
                results[name] = results.get(name, torch.zeros_like(value)) + value.detach() * share
        return results


def is_sound(metrics: Metrics) -> bool:
    return math.isfinite(metrics["gradient_norm"]) and math.isfinite(metrics["loss"])


def blank(batch: Batch) -> Batch:
    """One black image in the place of none: it counts nothing, but all call the model equally often."""
    return {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
