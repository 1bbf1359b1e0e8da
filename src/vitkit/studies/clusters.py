"""The same trials on many machines: on Ray, or as SLURM array jobs through submitit.

Every machine must see the study folder and the data under the same paths: trials leave their run folders
there, and start from the models that others have left.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.runtime.runtime import cpu_cores
from vitkit.studies.executor import Job, Outcome, attempt, devices_of
from vitkit.studies.prepare import Stopwatch
from vitkit.studies.trial import Place

WITHOUT = "--on {} needs {}: pip install 'vitkit[{}]'"
MANY = 1000  # jobs that are handed over at once; who runs when is the cluster's to say


@dataclass(frozen=True)
class Share:
    """What a trial is given of a machine, which is known only there."""

    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    cores: int = 0  # 0: all that it may use

    def place(self) -> Place:
        device, each = devices_of(self.device)[0], self.cores or cpu_cores()
        cuda = device.startswith("cuda")
        workers, threads = (each, 1) if cuda else (0, each)
        return Place(device, self.precision, workers=workers, threads=threads, compile=self.compile)


def remote(job: Job, share: Share) -> Outcome:
    """What a machine of the cluster does with a job."""
    return attempt(job.call, job.arguments, share.place())


class Ray:
    """A Ray cluster: the one at RAY_ADDRESS, or one on this machine for as long as the study takes."""

    def __init__(self, share: Share, processes: int | None = None):
        try:
            import ray
        except ImportError:
            raise Error(WITHOUT.format("ray", "Ray", "ray"), code="request.extra-missing") from None
        self.ray = ray
        self.began = not ray.is_initialized()
        if self.began:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        there = ray.cluster_resources()
        each = max(1, int(there.get("CPU", 1)) // processes) if processes else 1
        gpus = 0.0 if share.device == "cpu" else there.get("GPU", 0.0)
        self.share = replace(share, cores=each)
        part = min(1.0, gpus / processes) if processes else min(1.0, gpus)
        self.call = ray.remote(remote).options(num_cpus=each, num_gpus=part, max_retries=0)
        self.running: dict[Any, tuple[str, Stopwatch]] = {}

    def __enter__(self) -> "Ray":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self.began:
            self.ray.shutdown()

    def room(self) -> int:
        return MANY - len(self.running)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.running[self.call.remote(job, self.share)] = (job.name, Stopwatch())

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        ended = []
        for one in ready:
            name, clock = self.running.pop(one)
            try:
                outcome = self.ray.get(one)
            except self.ray.exceptions.RayError as error:
                outcome = Outcome(error=f"its process died: {error}")
            ended.append((name, Outcome(outcome.value, outcome.error, outcome.trace, clock())))
        return ended

    def stop(self) -> None:
        for one in self.running:
            self.ray.cancel(one)  # as Ctrl-C in that process: it saves and ends
        if self.running:
            self.ray.wait(list(self.running), num_returns=len(self.running), timeout=60)
        self.running.clear()


@dataclass
class Task:
    """A job as submitit sends it; when SLURM takes the machine away, it is queued again and goes on."""

    job: Job
    share: Share

    def __call__(self) -> Outcome:
        return remote(self.job, self.share)

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass
class Slurm:
    """SLURM: all trials that may begin are one array job."""

    share: Share
    logs: Path
    options: Mapping[str, Any] = field(default_factory=dict)  # of sbatch, by their names in submitit
    cluster: str = "slurm"  # or local: processes of this machine, as submitit starts them

    def __post_init__(self) -> None:
        try:
            import submitit
        except ImportError:
            raise Error(WITHOUT.format("slurm", "submitit", "slurm"), code="request.extra-missing") from None
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise Error(
                "--on slurm: there is no sbatch on this machine; run the command where jobs are submitted",
                code="request.missing",
            )
        self.executor = submitit.AutoExecutor(folder=self.logs, cluster=self.cluster)
        self.executor.update_parameters(**({"timeout_min": 24 * 60, "name": "vitkit"} | dict(self.options)))
        self.running: dict[str, tuple[Any, Stopwatch]] = {}

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def room(self) -> int:
        return MANY - len(self.running)

    def submit(self, jobs: Sequence[Job]) -> None:
        with self.executor.batch():
            sent = [self.executor.submit(Task(job, self.share)) for job in jobs]
        for job, one in zip(jobs, sent, strict=True):
            self.running[job.name] = (one, Stopwatch())

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        ended = [(name, outcome_of(one, clock)) for name, (one, clock) in self.running.items() if one.done()]
        if not ended:
            time.sleep(seconds)
        for name, _ in ended:
            del self.running[name]
        return ended

    def stop(self) -> None:
        for one, _ in self.running.values():
            one.cancel()  # SIGTERM: a run saves and ends
        self.running.clear()


def outcome_of(one: Any, clock: Stopwatch) -> Outcome:
    error = one.exception()
    if error is not None:
        return Outcome(error=f"its job failed: {str(error).strip().splitlines()[-1]}", trace=str(error))
    found = one.result()
    return Outcome(found.value, found.error, found.trace, clock())


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """'slurm_partition=gpu', 'gpus_per_node=1': whole numbers are numbers."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise Error(f"--cluster {word!r}: give name=value, as in slurm_partition=gpu")
        options[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return options
