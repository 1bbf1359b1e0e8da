"""Trials to whoever runs them: in the order of what they need, failures kept, stopped when asked."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vitkit.experiment.folder import signals

POLL = 0.25  # seconds between two looks at signals


@dataclass(frozen=True)
class Job:
    """A call with its arguments; the place where it runs is added as the last one."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    value: Any = None
    error: str = ""  # empty: done
    trace: str = ""
    seconds: float = 0.0
    tried: bool = True  # not if what it needs failed


class Crew(Protocol):
    """Whoever runs jobs: processes of this machine, Ray, SLURM."""

    def room(self) -> int:
        """How many more jobs it takes now."""

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        """Those that have ended, as soon as there are some, or none after that time."""

    def stop(self) -> None:
        """All save what they have and end."""


class Stopped(KeyboardInterrupt):
    """A signal asked the study to stop; its trials have saved what they had."""

    def __init__(self, number: int, finished: int, total: int):
        super().__init__(
            f"stopped with {finished} of {total} trials finished; the same command goes on from there"
        )
        self.number = number


Tell = Callable[[Job, Outcome], None]


def drive(jobs: Sequence[Job], crew: Crew, tell: Tell = lambda job, outcome: None) -> dict[str, Outcome]:
    """Run all jobs, each after the one that it needs, if that is among them and does not fail."""
    named = {job.name: job for job in jobs}
    waiting, found = list(jobs), dict[str, Outcome]()
    running: set[str] = set()

    def end(name: str, outcome: Outcome) -> None:
        found[name] = outcome
        tell(named[name], outcome)

    with signals() as asked:
        while waiting or running:
            if asked:
                crew.stop()
                raise Stopped(asked[0], len(found), len(jobs))
            for job in [job for job in waiting if job.needs in found and found[job.needs].error]:
                waiting.remove(job)
                end(job.name, Outcome(error=f"not run: {job.needs} failed", tried=False))
            ready = [job for job in waiting if job.needs not in named or job.needs in found][: crew.room()]
            if ready:
                crew.submit(ready)
                running |= {job.name for job in ready}
                waiting = [job for job in waiting if job not in ready]
            for name, outcome in crew.wait(POLL) if running else ():
                running.discard(name)
                end(name, outcome)
    return found


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.begun = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.begun
