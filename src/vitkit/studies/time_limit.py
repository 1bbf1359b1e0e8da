"""When a study stops: trials that would not end in time are not started, and running ones save and stop."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from vitkit.studies.prepare import Stopwatch, trial_flops
from vitkit.studies.scale import study as named_study
from vitkit.studies.study import Plan, Trial


@dataclass
class TimeLimit:
    """The time that the trials of a study have in one session.

    start_by: seconds after which no trial starts. stop_after: seconds after which running ones save and stop.
    expected: seconds of each trial, where they can be estimated. Trials that would not end in time are not
    started, except for those that would not fit into any session of this length.
    """

    clock: Callable[[], float] = time.monotonic
    start_by: float = math.inf
    stop_after: float = math.inf
    expected: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.longest = self.stop_after - self.clock()  # time for trials in this session

    def is_up(self) -> bool:
        return self.clock() >= self.stop_after

    def rest(self) -> "TimeLimit":
        """What is left of it, on a clock that starts now."""
        spent = self.clock()
        return TimeLimit(Stopwatch(), self.start_by - spent, self.stop_after - spent, self.expected)

    def allows(self, name: str) -> bool:
        """Whether a trial may start now."""
        now, seconds = self.clock(), self.expected.get(name, 0.0)
        if now >= min(self.start_by, self.stop_after):
            return False
        return now + seconds <= self.stop_after or seconds > self.longest


def expected_seconds(work: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """The expected seconds of each trial from its work (see `trial_work`) and those that others took."""
    rates = [value / work[name] for name, value in seconds.items() if work.get(name)]
    return {name: median(rates) * value for name, value in work.items()} if rates else {}


def trial_work(plan: Plan) -> dict[str, float]:
    """A number in proportion to the compute of each trial."""
    if named_study(plan.study).base:  # one model, so the pixels that it sees
        return {trial.name: pixels_seen(trial) for trial in plan.trials}
    by_name, images = {trial.name: trial for trial in plan.trials}, plan.chosen["train_images"]
    return {trial.name: trial_flops(trial, by_name, images) for trial in plan.trials}


def pixels_seen(trial: Trial) -> float:
    recipe = trial.recipe
    return recipe.length.in_steps(0, recipe.batch) * recipe.batch * math.prod(recipe.image_size)
