"""The one training loop. Two seams: the objective (batch to loss) and watch (what happens beside)."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from vitkit.training.objectives import Batch, Objective
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.runtime import Runtime
from vitkit.training.step import Begun, Metrics, Stepper, TrainState


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

    due     whether `watch` wants the model as it is after so many steps. Where it does not, the next step may
            have begun when `watch` hears of this one, so that a GPU need not wait: the model may be a step
            further than the state that it is given says
    call    the model as it is to be called (compiled, or spread over processes), if not as it is
    before  runs ahead of each step: the seed of that step is set there
    tell    hears of smaller pieces
    """
    steps = Stepper(state, objective, config, state.model if call is None else call, runtime, tell)
    behind: Begun | None = None
    while state.step < until:
        before(state.step)
        if not state.model.training:  # an evaluation was between
            state.model.train()
        begun = steps.begin(next(batches), rate(state.step))
        state.step += 1
        if behind is not None:
            watch(replace(state, step=behind.step + 1), steps.finish(behind))
        wanted = due(state.step) or state.step == until or not begun.played
        behind = None if wanted else begun
        if wanted and watch(state, steps.finish(begun)):
            return
