"""The one training loop. Two seams: the objective (batch to loss) and `watch` (logs, evaluates and saves)."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Batch, Objective
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Metrics, PendingStep, Stepper, TrainState


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
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Advance the state to step `until`, or until `watch` returns True.

    due     whether `watch` needs the model exactly as it is after this many steps. Where it does not, the
            next step may already be running when `watch` is called, so that a GPU never waits: the model may
            be one step ahead of the state that `watch` receives
    call    the model as it is called (compiled, wrapped by DDP), if not `state.model` itself
    before  runs ahead of each step: it seeds the random generators for that step
    log     receives messages, of smaller micro-batches for example
    """
    stepper = Stepper(state, objective, config, state.model if call is None else call, runtime, log)
    pending: PendingStep | None = None
    while state.step < until:
        before(state.step)
        if not state.model.training:  # after an evaluation
            state.model.train()
        launched = stepper.begin(next(batches), rate(state.step))
        state.step += 1
        if pending is not None:
            watch(replace(state, step=pending.step + 1), stepper.finish(pending))
        wait = due(state.step) or state.step == until or not launched.replayed
        pending = None if wait else launched
        if wait and watch(state, stepper.finish(launched)):
            return
