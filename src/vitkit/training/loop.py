"""The one training loop. Two seams: the objective (batch to loss) and watch (what happens beside)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitkit.training.objectives import Batch, Objective
from vitkit.training.optimizer import OptimizerConfig, clip_gradients, make_optimizer, update_average

Metrics = dict[str, Tensor | float]
Computing = Callable[[], AbstractContextManager]


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
    computing: Computing = nullcontext,
) -> None:
    """Advance the state to step `until`, or until `watch` (which logs, evaluates and saves) says stop.

    `call` is the model as it is to be called (compiled, or spread over processes), if not as it is;
    `before` runs ahead of each step: the runtime sets the seed of that step there. `computing` is entered
    anew for each forward pass: autocast keeps its copies of the weights until it is left.
    """
    while state.step < until:
        before(state.step)
        state.model.train()
        metrics = update(
            state, next(batches), objective, rate(state.step), config, call or state.model, computing
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
    computing: Computing = nullcontext,
) -> Metrics:
    """One optimizer step over the micro-batches of one batch; each counts by its number of images."""
    for group in state.optimizer.param_groups:
        group["lr"] = rate * group["rate_share"]
    images = sum(len(batch["image"]) for batch in micro_batches)
    results: dict[str, Tensor] = {}
    for batch in micro_batches:
        share = len(batch["image"]) / images
        with computing():
            found = objective(call, batch)
        (found["loss"] * share).backward()
        for name, value in found.items():
            results[name] = results.get(name, torch.zeros_like(value)) + value.detach() * share
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
