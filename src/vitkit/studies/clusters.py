"""Trials on a cluster: with Ray, or as Slurm array jobs through submitit.

All machines need the study folder and the data under the same paths: trials write their run folders there and
start from the models of other trials.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.runtime.runtime import cpu_cores
from vitkit.studies.executor import Job, Outcome, devices_of, run_job
from vitkit.studies.prepare import Stopwatch
from vitkit.studies.trial import WorkerConfig

MISSING = "--on {} needs {}; install it with pip install 'vitkit[{}]'"
MAX_SUBMITTED = 1000  # jobs at a time; the cluster schedules them


@dataclass(frozen=True)
class Resources:
    """The resources of one trial; the machine that runs it resolves them to a worker configuration."""

    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    cores: int = 0  # CPU cores; 0: all available

    def worker_config(self) -> WorkerConfig:
        device, cores = devices_of(self.device)[0], self.cores or cpu_cores()
        cuda = device.startswith("cuda")
        workers, threads = (cores, 1) if cuda else (0, cores)
        return WorkerConfig(device, self.precision, workers=workers, threads=threads, compile=self.compile)


def run_remotely(job: Job, resources: Resources) -> Outcome:
    """Run a job on a machine of the cluster."""
    return run_job(job.call, job.arguments, resources.worker_config())


class RayExecutor:
    """A Ray cluster: the one at RAY_ADDRESS, or a local one for the duration of the study."""

    def __init__(self, resources: Resources, processes: int | None = None):
        try:
            import ray
        except ImportError:
            raise Error(MISSING.format("ray", "Ray", "ray"), code="request.extra-missing") from None
        self.ray = ray
        self.owns_cluster = not ray.is_initialized()
        if self.owns_cluster:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        total = ray.cluster_resources()
        cores = max(1, int(total.get("CPU", 1)) // processes) if processes else 1
        gpus = 0.0 if resources.device == "cpu" else total.get("GPU", 0.0)
        self.resources = replace(resources, cores=cores)
        gpu_share = min(1.0, gpus / processes) if processes else min(1.0, gpus)
        self.call = ray.remote(run_remotely).options(num_cpus=cores, num_gpus=gpu_share, max_retries=0)
        self.running: dict[Any, tuple[str, Stopwatch]] = {}

    def __enter__(self) -> "RayExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self.owns_cluster:
            self.ray.shutdown()

    def free_slots(self) -> int:
        return MAX_SUBMITTED - len(self.running)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.running[self.call.remote(job, self.resources)] = (job.name, Stopwatch())

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        ended = []
        for future in ready:
            name, clock = self.running.pop(future)
            try:
                outcome = self.ray.get(future)
            except self.ray.exceptions.RayError as error:
                outcome = Outcome(error=f"its worker process died: {error}")
            ended.append((name, replace(outcome, seconds=clock())))
        return ended

    def stop(self) -> None:
        for future in self.running:
            self.ray.cancel(future)  # raises KeyboardInterrupt there, so the run saves a checkpoint
        if self.running:
            self.ray.wait(list(self.running), num_returns=len(self.running), timeout=60)
        self.running.clear()


@dataclass
class SlurmJob:
    """A job for submitit; if Slurm preempts it, it is requeued and resumes."""

    job: Job
    resources: Resources

    def __call__(self) -> Outcome:
        return run_remotely(self.job, self.resources)

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass
class SlurmExecutor:
    """Slurm: all trials that are ready form one array job."""

    resources: Resources
    logs: Path
    options: Mapping[str, Any] = field(default_factory=dict)  # sbatch options by their submitit names
    cluster: str = "slurm"  # or local: submitit starts processes on this machine

    def __post_init__(self) -> None:
        try:
            import submitit
        except ImportError:
            raise Error(MISSING.format("slurm", "submitit", "slurm"), code="request.extra-missing") from None
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise Error(
                "--on slurm: sbatch was not found; run the command on a login node of the cluster",
                code="request.missing",
            )
        self.executor = submitit.AutoExecutor(folder=self.logs, cluster=self.cluster)
        self.executor.update_parameters(**({"timeout_min": 24 * 60, "name": "vitkit"} | dict(self.options)))
        self.running: dict[str, tuple[Any, Stopwatch]] = {}

    def __enter__(self) -> "SlurmExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def free_slots(self) -> int:
        return MAX_SUBMITTED - len(self.running)

    def submit(self, jobs: Sequence[Job]) -> None:
        with self.executor.batch():
            submitted = [self.executor.submit(SlurmJob(job, self.resources)) for job in jobs]
        for job, future in zip(jobs, submitted, strict=True):
            self.running[job.name] = (future, Stopwatch())

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        ended = [
            (name, outcome_of(future, clock))
            for name, (future, clock) in self.running.items()
            if future.done()
        ]
        if not ended:
            time.sleep(seconds)
        for name, _ in ended:
            del self.running[name]
        return ended

    def stop(self) -> None:
        for future, _ in self.running.values():
            future.cancel()  # sends SIGTERM, so the run saves a checkpoint
        self.running.clear()


def outcome_of(future: Any, clock: Stopwatch) -> Outcome:
    error = future.exception()
    if error is not None:
        message = f"its Slurm job failed: {str(error).strip().splitlines()[-1]}"
        return Outcome(error=message, trace=str(error))
    return replace(future.result(), seconds=clock())


def parse_options(options_text: Sequence[str]) -> dict[str, Any]:
    """Parse name=value options such as 'slurm_partition=gpu' and 'gpus_per_node=1'."""
    options: dict[str, Any] = {}
    for text in options_text:
        name, equals, value = text.partition("=")
        if not equals:
            raise Error(f"--cluster {text!r}: expected name=value, as in slurm_partition=gpu")
        options[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return options
