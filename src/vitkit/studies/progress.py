"""The progress of a study: each result, failure and duration is recorded as soon as a trial ends."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from vitkit.metrics.intervals import percent
from vitkit.report.terminal import duration
from vitkit.studies.executor import Job, Outcome
from vitkit.studies.folder import is_finished, read_failed, table_rows, write_failed, write_table
from vitkit.studies.prepare import Stopwatch
from vitkit.studies.study import Plan
from vitkit.studies.time_limit import TimeLimit, expected_seconds, trial_work
from vitkit.studies.time_use import append, read, trial_seconds


class Progress:
    """Records the trials of one session, and expects the seconds of the others from theirs.

    names: the trials to run. Until one has finished, those of earlier sessions count for what is expected;
    later not, since another machine may have run them.
    """

    def __init__(
        self, plan: Plan, out: Path, limit: TimeLimit, names: Sequence[str], log: Callable[[str], None]
    ):
        self.plan, self.out, self.limit, self.total, self.log = plan, out, limit, len(names), log
        self.failed = {name: error for name, error in read_failed(out).items() if name not in names}
        write_failed(out, self.failed)
        self.clock, self.ended = Stopwatch(), 0
        self.work = {} if math.isinf(limit.stop_after) else trial_work(plan)
        self.seconds: dict[str, float] = {}
        done = {trial.name for trial in plan.trials if is_finished(out, trial)}
        earlier = {name: value for name, value in trial_seconds(read(out)).items() if name in done}
        limit.expected = expected_seconds(self.work, earlier)

    def on_end(self, job: Job, outcome: Outcome) -> None:
        word = "stopped" if outcome.stopped else "failed" if outcome.error else "finished"
        append(self.out, {"trial": job.name, "seconds": round(outcome.seconds, 3), "ended": word})
        if outcome.stopped:
            self.log(f"{job.name}: stopped before its end")
            return
        self.ended += 1
        if outcome.error:
            self.failed[job.name] = {"error": outcome.error, "trace": outcome.trace}
            write_failed(self.out, self.failed)
        else:
            write_table(self.out, table_rows(self.out, self.plan))
            self.seconds[job.name] = outcome.seconds
            self.limit.expected = expected_seconds(self.work, self.seconds)
        remaining = self.clock() / self.ended * (self.total - self.ended)
        line = f"{self.ended}/{self.total} {job.name}: {outcome_line(outcome)}"
        self.log(f"{line}; about {duration(remaining)} left")

    def close(self) -> None:
        if left := self.total - self.ended:
            self.log(f"the time is used up; {left} trials are left, repeat the command to run them")


def outcome_line(outcome: Outcome) -> str:
    if outcome.error:
        return f"FAILED: {outcome.error.splitlines()[0][:200]}"
    test = outcome.value["test"]
    fewshot = ""
    if "fewshot_mean" in test:
        fewshot = f", few-shot {percent(test['fewshot_mean'], test['fewshot_images'])}"
    return f"{percent(test['top1'], test['images'])}{fewshot}, {outcome.seconds:.0f} s"
