"""The one training loop. Two seams: the objective (batch to loss) and watch (what happens beside)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitkit.training.objectives import Batch, Objective
from vitkit.training.optimizer import OptimizerConfig, clip_gradients, make_optimizer, update_average
from vitkit.training.runtime import Runtime

Metrics = dict[str, Tensor | float]


class Diverged(ValueError):
    """The loss or the gradient is not a number; the model was not moved by it."""


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
) -> None:
    """Advance the state to step `until`, or until `watch` (which logs, evaluates and saves) says stop.

    `call` is the model as it is to be called (compiled, or spread over processes), if not as it is;
    `before` runs ahead of each step: the seed of that step is set there.
    """
    while state.step < until:
        before(state.step)
        state.model.train()
        metrics = update(
            state,
            next(batches),
            objective,
            rate(state.step),
            config,
            state.model if call is None else call,
            runtime,
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
) -> Metrics:
    """One optimizer step over the micro-batches of one batch; each counts by its number of images.

    The images of all processes count alike, also where unusable files have left one with fewer.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = rate * group["rate_share"]
    images = int(runtime.total(torch.tensor(sum(len(batch["image"]) for batch in micro_batches))))
    if not images:
        raise ValueError(f"step {state.step}: not one image of its batch is usable")
    results: dict[str, Tensor] = {}
    for number, batch in enumerate(micro_batches, start=1):
        share = len(batch["image"]) / images
        with runtime.accumulating(call, more=number < len(micro_batches)):
            with runtime.computing():  # anew for each pass: autocast keeps its copies of the weights
                found = objective(call, batch if share else blank(batch))
            (found["loss"] * (share * runtime.world)).backward()  # the processes' gradients are averaged
        for name, value in found.items():
            results[name] = results.get(name, torch.zeros_like(value)) + value.detach() * share
    results = dict(zip(results, runtime.total(torch.stack([*results.values()])).unbind(), strict=True))
    norm = clip_gradients(state.model.parameters(), config.clip)
    if not torch.isfinite(norm) or not torch.isfinite(results["loss"]):
        state.optimizer.zero_grad()
        raise Diverged(
            f"step {state.step}: loss {float(results['loss'])}, norm of the gradient {float(norm)}"
        )
    state.optimizer.step()
    state.optimizer.zero_grad()
    if config.average:
        update_average(state.average, state.model, config.average)
    return {**results, "gradient_norm": norm, "rate": rate, "images": float(images)}


def blank(batch: Batch) -> Batch:
    """One black image in the place of none: it counts nothing, but all call the model equally often."""
    return {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
