"""Jobs in worker processes on this machine, with NVIDIA MPS where several share a GPU."""

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from vitkit.errors import Error
from vitkit.runs.folder import signals
from vitkit.runtime.runtime import cpu_cores
from vitkit.studies.prepare import Stopwatch
from vitkit.studies.time_limit import TimeLimit
from vitkit.studies.trial import WorkerConfig

POLL = 0.25  # seconds between checks for signals


@dataclass(frozen=True)
class Job:
    """A function call; the executor appends the worker's configuration as the last argument."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: str = ""  # name of the job that must succeed first


@dataclass(frozen=True)
class Outcome:
    """The result of a job, or its error."""

    value: Any = None
    error: str = ""  # empty if the job succeeded
    trace: str = ""
    seconds: float = 0.0
    stopped: bool = False  # before its end; it has saved a checkpoint


class Executor(Protocol):
    """Runs jobs: worker processes of this machine, Ray, or Slurm."""

    def free_slots(self) -> int:
        """How many more jobs can be submitted now."""

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        """Wait up to `seconds` for jobs to end; return their names and outcomes."""

    def stop(self) -> None:
        """Stop all running jobs; training runs save a checkpoint first."""


class Stopped(KeyboardInterrupt):
    """A signal stopped the study; its running trials have saved checkpoints."""

    def __init__(self, number: int, finished: int, total: int):
        super().__init__(f"stopped with {finished} of {total} trials finished; repeat the command to resume")
        self.number = number


OnEnd = Callable[[Job, Outcome], None]


def run_jobs(
    jobs: Sequence[Job],
    executor: Executor,
    on_end: OnEnd = lambda job, outcome: None,
    limit: TimeLimit | None = None,
) -> dict[str, Outcome]:
    """Run all jobs; each starts after the job that it needs, and is skipped if that one fails.

    limit: which jobs may still start, and when all stop; those that have not ended have no outcome.
    """
    by_name = {job.name: job for job in jobs}
    waiting, outcomes = list(jobs), dict[str, Outcome]()
    limit = limit or TimeLimit()
    running: dict[str, Stopwatch] = {}

    def finish(name: str, outcome: Outcome) -> None:
        outcomes[name] = outcome
        on_end(by_name[name], outcome)

    try:
        with signals() as received:
            while waiting or running:
                if received or limit.is_up():
                    executor.stop()
                    break
                for job in [job for job in waiting if job.needs in outcomes and outcomes[job.needs].error]:
                    waiting.remove(job)
                    finish(job.name, Outcome(error=f"not run: {job.needs} failed"))
                ready = [job for job in waiting if job.needs not in by_name or job.needs in outcomes]
                ready = [job for job in ready if limit.allows(job.name)][: executor.free_slots()]
                if not (ready or running):  # no time is left for those that wait, or all have ended
                    break
                waiting = [job for job in waiting if job not in ready]
                running |= {job.name: Stopwatch() for job in ready}
                if ready:
                    executor.submit(ready)
                for name, outcome in executor.wait(POLL):
                    running.pop(name)
                    finish(name, outcome)
    finally:
        for name, clock in running.items():
            on_end(by_name[name], Outcome(seconds=clock(), stopped=True))
    if received:
        raise Stopped(received[0], len(outcomes), len(jobs))
    return outcomes


CONTROL = "nvidia-cuda-mps-control"
CONTROL_PATHS = "/usr/bin:/usr/local/nvidia/bin"  # searched after PATH
PIPE, LOG, VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
MAX_CLIENTS = 48  # processes per GPU that MPS supports
MPS_TIMEOUT = 30.0  # seconds
PROBE = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
ok = cuda.cuInit(0) == 0
for number in map(int, sys.argv[1:]):
    ok = ok and cuda.cuDeviceGet(ctypes.byref(device), number) == 0
    ok = ok and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
raise SystemExit(not ok)
"""


@contextmanager
def share_gpus(devices: Sequence[str]) -> Iterator[bool]:
    """Run an MPS server, so that processes started inside compute on one GPU at the same time.

    devices: the device of each process. Yields whether the server works. An MPS server that the user has
    configured through its environment variables is left alone.
    """
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=CONTROL_PATHS)
    if not has_shared_gpu(devices) or control is None or not {PIPE, LOG}.isdisjoint(os.environ):
        yield False
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {PIPE: folder, LOG: folder}
        try:
            works = start_mps(control, devices, os.environ | variables)
            os.environ.update(variables if works else {})
            yield works
        finally:
            for name in variables:
                os.environ.pop(name, None)
            with suppress(OSError, subprocess.SubprocessError):
                run_command([control], os.environ | variables, "quit -t 5\n")


def has_shared_gpu(devices: Sequence[str]) -> bool:
    """Whether several processes use one GPU, and GPUs are visible at all."""
    hidden = os.environ.get(VISIBLE, "all").strip() in ("", "-1")
    cuda = all(device.startswith("cuda") for device in devices)
    return cuda and not hidden and 1 < max(Counter(devices).values(), default=0) <= MAX_CLIENTS


def start_mps(control: str, devices: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Start the MPS server; return whether a process can use the GPUs through it.

    The server gets all GPUs, because a restricted set would be renumbered for its clients. A process that
    cannot connect silently uses the GPU without MPS, so the server is asked whether the probe connected.
    """
    numbers = sorted({device.partition(":")[2] or "0" for device in devices})
    try:
        run_command([control, "-d"], {name: value for name, value in environment.items() if name != VISIBLE})
        run_command([sys.executable, "-c", PROBE, *numbers], environment)
        return bool(run_command([control], environment, "get_server_list\n", subprocess.PIPE).strip())
    except (OSError, subprocess.SubprocessError):
        return False


def run_command(
    command: Sequence[str], environment: Mapping[str, str], text: str = "", stdout: int = subprocess.DEVNULL
) -> str:
    """Run a command in its own session, which Ctrl-C does not reach; return its output if it is captured."""
    result = subprocess.run(  # noqa: S603  # a fixed program, and our own Python
        command, env=environment, input=text, text=True, stdout=stdout, stderr=subprocess.DEVNULL,
        timeout=MPS_TIMEOUT, check=True, start_new_session=True,
    )  # fmt: skip
    return result.stdout or ""


SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
STOP_TIMEOUT = 120.0  # seconds that a worker may take to save its trial
PER_GPU = 4  # default number of processes per GPU, as small models leave much of it idle


def worker_configs(
    device: str, processes: int | None, precision: str = "auto", compile: bool = False
) -> list[WorkerConfig]:
    """The configuration of each worker process: devices in turn, CPU cores divided evenly."""
    devices = devices_of(device)
    cuda = devices[0].startswith("cuda")
    count = processes or (
        min(PER_GPU * len(devices), max(1, cpu_cores() // 2)) if cuda else max(1, cpu_cores() // 2)
    )
    if count < 1:
        raise Error(f"--processes must be at least 1, not {count}")
    share = max(1, cpu_cores() // count)
    base = WorkerConfig(
        precision=precision, workers=max(1, share - 1) if cuda else 0, threads=1 if cuda else share,
        cache_batches=True, compile=compile,
    )  # fmt: skip
    return [replace(base, device=devices[i % len(devices)]) for i in range(count)]


def devices_of(device: str) -> list[str]:
    """All GPUs for auto and cuda, otherwise the given device."""
    import torch

    if device in ("auto", "cuda") and torch.cuda.is_available():
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu" if device == "auto" else device]


@dataclass
class Worker:
    """A worker process, the pipe to it, and its current job."""

    config: WorkerConfig
    process: SpawnProcess
    pipe: Any  # a Connection
    job: Job | None = None
    clock: Stopwatch | None = None


class LocalExecutor:
    """A pool of worker processes; a worker that dies loses only its job and is respawned."""

    def __init__(self, configs: Sequence[WorkerConfig]):
        self.workers = [spawn_worker(config) for config in configs]

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def free_slots(self) -> int:
        return sum(worker.job is None for worker in self.workers)

    def submit(self, jobs: Sequence[Job]) -> None:
        idle = [i for i, worker in enumerate(self.workers) if worker.job is None]
        for i, job in zip(idle, jobs, strict=False):
            worker = self.workers[i]
            if not worker.process.is_alive():
                worker = self.workers[i] = respawn(worker)
            worker.job, worker.clock = job, Stopwatch()
            with contextlib.suppress(BrokenPipeError):  # it has just died; `wait` reports that
                worker.pipe.send((job.call, job.arguments))

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        busy = [(i, worker) for i, worker in enumerate(self.workers) if worker.job]
        ready = wait([x for _, worker in busy for x in (worker.pipe, worker.process.sentinel)], seconds)
        ended = []
        for i, worker in busy:
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            assert worker.job and worker.clock
            outcome = receive(worker)
            if outcome is None:
                outcome = Outcome(error=death_message(worker.process))
                self.workers[i] = respawn(worker)
            ended.append((worker.job.name, replace(outcome, seconds=worker.clock())))
            worker.job = None
        return ended

    def stop(self) -> None:
        """Terminate busy workers, which save a checkpoint first; idle ones exit when their pipe closes."""
        for worker in self.workers:
            if worker.job and worker.process.is_alive():
                worker.process.terminate()
            worker.pipe.close()
        clock = Stopwatch()
        for worker in self.workers:
            worker.process.join(max(0.1, STOP_TIMEOUT - clock()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


class InlineExecutor:
    """Runs jobs in this process, one at a time, so that nothing has to be opened or imported again."""

    def __init__(self, config: WorkerConfig):
        self.config = config
        self.ended: list[tuple[str, Outcome]] = []

    def free_slots(self) -> int:
        return 1

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            clock = Stopwatch()
            try:
                outcome = run_job(job.call, job.arguments, self.config)
            except KeyboardInterrupt:  # the run has saved a checkpoint
                if time.monotonic() < self.config.stop_at:
                    raise
                return  # the limit of the study is up, too
            self.ended.append((job.name, replace(outcome, seconds=clock())))

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        ended, self.ended = self.ended, []
        return ended

    def stop(self) -> None:
        """A signal has already stopped the only job."""


def spawn_worker(config: WorkerConfig) -> Worker:
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=worker_loop, args=(child, config))
    process.start()
    child.close()  # so that the parent sees EOF when the worker dies
    return Worker(config, process, parent)


def respawn(worker: Worker) -> Worker:
    worker.pipe.close()
    worker.process.join()
    return spawn_worker(worker.config)


def receive(worker: Worker) -> Outcome | None:
    """The outcome that a worker has sent, or None if it died."""
    try:
        return worker.pipe.recv() if worker.pipe.poll() else None
    except (EOFError, ConnectionResetError):
        return None


def death_message(process: SpawnProcess) -> str:
    """The error message for a dead worker."""
    process.join()
    code = process.exitcode or 0
    if code < 0:
        return f"its worker process was killed by {signal.Signals(-code).name}; it may have run out of memory"
    return f"its worker process exited with code {code}"


def worker_loop(pipe: Connection, config: WorkerConfig) -> None:
    """Run jobs from the pipe until it closes.

    Ctrl-C reaches all processes of a terminal; workers ignore it, and the main process terminates them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            call, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            outcome = run_job(call, arguments, config)
        except KeyboardInterrupt:  # the run has saved a checkpoint
            return
        with contextlib.suppress(BrokenPipeError):
            pipe.send(outcome)


def run_job(call: Any, arguments: tuple[Any, ...], config: WorkerConfig) -> Outcome:
    """Call a function and return its outcome; an exception becomes the outcome and ends nothing else."""
    try:
        return Outcome(call(*arguments, config))
    except Exception as error:
        code = error.code if isinstance(error, Error) else type(error).__name__
        return Outcome(error=f"{code}: {error}", trace=traceback.format_exc())
    finally:
        release_memory(config)


def release_memory(config: WorkerConfig) -> None:
    """Return cached GPU memory to the other processes on the GPU."""
    if config.device.startswith("cuda"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()
