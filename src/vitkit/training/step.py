"""One optimizer step: a batch to gradients to new weights, in smaller micro-batches where memory is short."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.ops.low_precision import LowPrecisionCopy
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Batch, Objective, SummedObjective
from vitkit.training.optimizer import (
    OptimizerConfig,
    clip_gradients,
    make_optimizer,
    set_rate,
    step_if_finite,
    supports_found_inf,
    swap_average,
    update_average,
)
from vitkit.training.step_graph import StepGraph, StepNumbers

Metrics = dict[str, float]
BACKOFF_STEPS = 2  # first steps in which several processes may shrink their micro-batches together


class OutOfMemory(Error):
    """Not even the smallest micro-batch fits into memory, or several processes cannot shrink it any more."""

    code = "training.out-of-memory"


class Diverged(Error):
    """The loss or the gradient is not finite; the weights were not changed by it."""

    code = "training.diverged"

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step  # steps before it

    def __reduce__(self) -> tuple[type["Diverged"], tuple[str, int]]:
        return type(self), (str(self), self.step)  # with its step, so that another process can raise it


@dataclass
class OomBackoff:
    """Halves micro-batches until they fit into memory, alike on every process."""

    log: Callable[[str], None] = lambda text: None
    release: Callable[[], bool] = lambda: False  # frees what is only kept for speed; whether there was any
    pieces: int = 1  # into which each micro-batch is split
    steps: int = 0  # that have fitted

    def split(self, micro_batches: list[Batch]) -> list[Batch]:
        if self.pieces == 1:
            return micro_batches
        splits = [
            {name: tensor.tensor_split(self.pieces) for name, tensor in batch.items()}
            for batch in micro_batches
        ]
        return [{name: parts[i] for name, parts in one.items()} for one in splits for i in range(self.pieces)]

    def shrink(self, step: int, images: int) -> None:
        """Twice as many pieces; `images`: in the largest one so far."""
        if images <= 1:
            raise OutOfMemory(
                f"step {step}: not even one image at a time fits into memory; give a smaller "
                "--image-size or a smaller model; finetune and pretrain also have --recompute"
            )
        self.pieces *= 2
        left = -(-images // 2)
        self.log(
            f"step {step}: out of memory; from here on micro-batches of {left} images, the batch stays the "
            f"same (--set micro_batch={left} saves the attempt)"
        )


@dataclass
class TrainState:
    """All that a run has to remember: the unwrapped model, so that no wrapper's name reaches a file."""

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
class PendingStep:
    """A step that was launched and may still be running on the device."""

    step: int  # steps before it
    images: int
    rate: float
    names: list[str]
    numbers: Tensor  # in the order of the names
    replayed: bool = False  # its numbers are being copied to the host, so the next step may begin
    copied: torch.cuda.Event | None = None


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
    """Makes the optimizer steps of a run, one after the other."""

    state: TrainState
    objective: Objective
    config: OptimizerConfig
    call: nn.Module  # the model as it is called: compiled, or wrapped by DDP
    runtime: Runtime = Runtime()
    log: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.graph = StepGraph(self.runtime, self.state.optimizer, self.log)
        self.backoff = OomBackoff(self.log, self.graph.release)
        inner = getattr(self.call, "_orig_mod", self.call)
        self.copy = inner if isinstance(inner, LowPrecisionCopy) else None

    def __call__(self, micro_batches: list[Batch], rate: float) -> Metrics:
        return self.finish(self.begin(micro_batches, rate))

    def begin(self, micro_batches: list[Batch], rate: float) -> PendingStep:
        """Launch an optimizer step over the micro-batches of one batch, each weighted by its images.

        All images count alike, also where unreadable files leave a process with fewer of them.
        """
        step = self.state.step
        set_rate(self.state.optimizer, rate)
        count = torch.tensor(sum(len(batch["image"]) for batch in micro_batches))
        images = int(self.runtime.all_reduce_sum(count))
        if not images:
            raise Error(f"step {step}: not one image of its batch can be read", code="image.unreadable")
        replayed = None
        if self.backoff.pieces == 1 and self.graph.can_replay(micro_batches):
            replayed = self.graph.replay(
                lambda batch: self.clip_and_check(self.backward([batch], images)), micro_batches[0]
            )
        if replayed is None:
            numbers = self.clip_and_check(self.gradients(micro_batches, images))
            return PendingStep(step, images, rate, *numbers)
        self.after_step(step)
        names, values = replayed
        on_host = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event() if values.is_cuda else None
        if copied:
            copied.record()
        return PendingStep(step, images, rate, names, on_host, True, copied)

    def finish(self, pending: PendingStep) -> Metrics:
        """Wait for the numbers of a step. If they are not finite, the weights were not changed: an error."""
        if pending.copied:
            pending.copied.synchronize()
        metrics = dict(zip(pending.names, pending.numbers.tolist(), strict=True))
        if not is_finite(metrics):
            self.state.optimizer.zero_grad()
            raise Diverged(
                f"step {pending.step}: loss {metrics['loss']}, gradient norm {metrics['gradient_norm']}",
                pending.step,
            )
        if not pending.replayed:
            if not supports_found_inf(self.state.optimizer):
                self.state.optimizer.step()
            self.after_step(pending.step)
        return {**metrics, "rate": pending.rate, "images": float(pending.images)}

    def after_step(self, step: int) -> None:
        """Clear gradients and update the average after the optimizer's step; `step` steps were before it."""
        self.state.optimizer.zero_grad()
        if self.config.average:
            update_average(self.state.average, self.state.model, self.config.average, step + 1)

    def clip_and_check(self, results: dict[str, Tensor]) -> StepNumbers:
        """Clip the gradients, and step at once if the optimizer itself skips numbers that are not finite."""
        total = self.runtime.all_reduce_sum(torch.stack([*results.values()]))
        norm = clip_gradients(self.state.model.parameters(), self.config.clip)
        numbers = torch.cat([total, norm.to(total)[None]])
        if supports_found_inf(self.state.optimizer):
            step_if_finite(self.state.optimizer, finite=numbers.isfinite().all())
        return [*results, "gradient_norm"], numbers

    def gradients(self, micro_batches: list[Batch], images: int) -> dict[str, Tensor]:
        """Backward through all micro-batches, in smaller ones where they do not fit into memory.

        One process may retry at any step. Several must agree before they synchronize gradients, so they retry
        in their first steps only, where the synchronization is a pass of its own; with FSDP never.
        """
        state, runtime, backoff = self.state, self.runtime, self.backoff
        counts = self.counts(micro_batches)
        separate_sync = runtime.world > 1 and not runtime.is_sharded and backoff.steps < BACKOFF_STEPS
        while True:
            pieces, failed = backoff.split(micro_batches), 0
            results: dict[str, Tensor] = {}
            try:
                results = self.backward(pieces, images, counts, sync=not separate_sync)
            except torch.OutOfMemoryError as error:
                if not self.may_shrink(separate_sync):
                    raise OutOfMemory(
                        f"step {state.step}: process {runtime.rank} is out of memory ({error}); the same "
                        "command goes on from the last checkpoint with --set micro_batch=N, of fewer images "
                        "than now"
                    ) from None
                failed = 1
            largest = max(len(piece["image"]) for piece in pieces)
            if separate_sync:
                failed, largest = map(int, runtime.all_reduce_max(failed, largest))  # on any process
            if not failed:
                break
            state.optimizer.zero_grad()
            released = backoff.release()
            runtime.empty_cache()  # here, since an exception that is being handled keeps its tensors alive
            if not released:
                backoff.shrink(state.step, largest)
        if separate_sync:
            self.backward([blank(pieces[0])], images, counts, weightless=True)
        backoff.steps += 1
        return results

    def may_shrink(self, separate_sync: bool) -> bool:
        """Whether smaller micro-batches are tried when memory is short."""
        return separate_sync or self.runtime.world == 1

    def counts(self, micro_batches: list[Batch]) -> dict[str, Tensor] | None:
        """What the objective counts in the batches of all processes; None if it counts nothing."""
        if not isinstance(self.objective, SummedObjective):
            return None
        counts = [self.objective.counts(batch) for batch in micro_batches]
        own = torch.stack([torch.stack([*each.values()]).float() for each in counts]).sum(0)
        return dict(zip(counts[0], self.runtime.all_reduce_sum(own).unbind(), strict=True))

    def losses(
        self, batch: Batch, images: int, counts: dict[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], float]:
        """The losses of a micro-batch, and the weight with which they count in those of the step."""
        given = batch if len(batch["image"]) else blank(batch)
        with self.runtime.autocast():  # one for each pass: autocast caches its copies of the weights
            if isinstance(self.objective, SummedObjective):
                return self.objective(self.call, given, counts), float(given is batch)
            return self.objective(self.call, given), len(batch["image"]) / images

    def backward(
        self, pieces: list[Batch], images: int, counts: dict[str, Tensor] | None = None, *,
        sync: bool = True, weightless: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Accumulate gradients piece by piece; sync: over all processes; weightless: gradients of 0."""
        results: dict[str, Tensor] = {}
        if self.copy:
            self.copy.refresh()
        for number, batch in enumerate(pieces, start=1):
            with self.runtime.gradient_sync(self.call, enabled=sync and number == len(pieces)):
                losses, share = self.losses(batch, images, counts)
                share = 0.0 if weightless else share
                (losses["loss"] * (share * self.runtime.world)).backward()  # the processes take the mean
            if self.copy:
                self.copy.accumulate_grads()
            for name, value in losses.items():
                results[name] = results.get(name, torch.zeros_like(value)) + value.detach() * share
        return results


def is_finite(metrics: Metrics) -> bool:
    return math.isfinite(metrics["gradient_norm"]) and math.isfinite(metrics["loss"])


def blank(batch: Batch) -> Batch:
    """One black image instead of none: it has no weight, but every process calls the model equally often."""
    return {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
