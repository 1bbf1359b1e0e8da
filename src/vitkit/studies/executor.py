"""Jobs on this machine: worker processes, several on one GPU by NVIDIA MPS, failures kept."""

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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
from vitkit.studies.trial import Place

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


class Executor(Protocol):
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


def drive(jobs: Sequence[Job], crew: Executor, log: Tell = lambda job, outcome: None) -> dict[str, Outcome]:
    """Run all jobs, each after the one that it needs, if that is among them and does not fail."""
    named = {job.name: job for job in jobs}
    waiting, found = list(jobs), dict[str, Outcome]()
    running: set[str] = set()

    def end(name: str, outcome: Outcome) -> None:
        found[name] = outcome
        log(named[name], outcome)

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


CONTROL = "nvidia-cuda-mps-control"
KNOWN = "/usr/bin:/usr/local/nvidia/bin"  # where it may be when it is not on the path
PIPE, LOG, VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
MOST = 48  # processes that it takes for one GPU
MPS_PATIENCE = 30.0
TRY = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
well = cuda.cuInit(0) == 0
for number in map(int, sys.argv[1:]):
    well = well and cuda.cuDeviceGet(ctypes.byref(device), number) == 0
    well = well and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
raise SystemExit(not well)
"""


@contextmanager
def together(devices: Sequence[str]) -> Iterator[bool]:
    """Inside, processes that begin share a GPU's time, if several are for one; whether they do.

    devices: of each process. Whoever has an MPS of their own, by its variables, keeps it.
    """
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=KNOWN)
    if not shared(devices) or control is None or not {PIPE, LOG}.isdisjoint(os.environ):
        yield False
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        here = {PIPE: folder, LOG: folder}
        try:
            works = begun(control, devices, os.environ | here)
            os.environ.update(here if works else {})
            yield works
        finally:
            for name in here:
                os.environ.pop(name, None)
            with suppress(OSError, subprocess.SubprocessError):
                ask([control], os.environ | here, "quit -t 5\n")


def shared(devices: Sequence[str]) -> bool:
    """Whether several processes are for one GPU, and GPUs are to be seen at all."""
    hidden = os.environ.get(VISIBLE, "all").strip() in ("", "-1")
    cuda = all(device.startswith("cuda") for device in devices)
    return cuda and not hidden and 1 < max(Counter(devices).values(), default=0) <= MOST


def begun(control: str, devices: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Start it; whether a process can then use the GPUs, and does so through it.

    It sees all GPUs: those that it is shown have other numbers for the processes. A process that does not
    reach it uses the GPU alone without a word, so it is asked whether somebody came.
    """
    numbers = sorted({device.partition(":")[2] or "0" for device in devices})
    try:
        ask([control, "-d"], {name: value for name, value in environment.items() if name != VISIBLE})
        ask([sys.executable, "-c", TRY, *numbers], environment)
        return bool(ask([control], environment, "get_server_list\n", subprocess.PIPE).strip())
    except (OSError, subprocess.SubprocessError):
        return False


def ask(
    command: Sequence[str], environment: Mapping[str, str], words: str = "", answer: int = subprocess.DEVNULL
) -> str:
    """Its answer, if that is wanted; in a session of its own, which Ctrl-C does not reach."""
    done = subprocess.run(  # noqa: S603  # a fixed program, and our own Python
        command, env=environment, input=words, text=True, stdout=answer, stderr=subprocess.DEVNULL,
        timeout=MPS_PATIENCE, check=True, start_new_session=True,
    )  # fmt: skip
    return done.stdout or ""


SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
PATIENCE = 120.0  # seconds that a process may take to save its trial
A_GPU = 4  # processes that share one, if nobody says how many: small models leave much of it free


def places(device: str, processes: int | None, precision: str = "auto", compile: bool = False) -> list[Place]:
    """A place for each process: devices in turn, cores and data workers shared out evenly."""
    devices = devices_of(device)
    cuda = devices[0].startswith("cuda")
    count = processes or (
        min(A_GPU * len(devices), max(1, cpu_cores() // 2)) if cuda else max(1, cpu_cores() // 2)
    )
    if count < 1:
        raise Error(f"--processes must be at least 1, not {count}")
    share = max(1, cpu_cores() // count)
    base = Place(
        precision=precision, workers=max(1, share - 1) if cuda else 0, threads=1 if cuda else share,
        keeps=True, compile=compile,
    )  # fmt: skip
    return [replace(base, device=devices[i % len(devices)]) for i in range(count)]


def devices_of(device: str) -> list[str]:
    """All GPUs for auto and cuda, or the one device that is named."""
    import torch

    if device in ("auto", "cuda") and torch.cuda.is_available():
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu" if device == "auto" else device]


@dataclass
class Worker:
    """A process that works, and the way to it."""

    place: Place
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    clock: Stopwatch | None = None


class Local:
    """As many processes as there are places; one that dies is replaced, and only its job is lost."""

    def __init__(self, places: Sequence[Place]):
        self.hands = [spawn_worker(place) for place in places]

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def room(self) -> int:
        return sum(hand.job is None for hand in self.hands)

    def submit(self, jobs: Sequence[Job]) -> None:
        free = [i for i, hand in enumerate(self.hands) if hand.job is None]
        for i, job in zip(free, jobs, strict=False):
            hand = self.hands[i]
            if not hand.process.is_alive():
                hand = self.hands[i] = replaced(hand)
            hand.job, hand.clock = job, Stopwatch()
            with contextlib.suppress(BrokenPipeError):  # it has just died, which is noticed below
                hand.pipe.send((job.call, job.arguments))

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        busy = [(i, hand) for i, hand in enumerate(self.hands) if hand.job]
        ready = wait([x for _, hand in busy for x in (hand.pipe, hand.process.sentinel)], seconds)
        ended = []
        for i, hand in busy:
            if hand.pipe not in ready and hand.process.sentinel not in ready:
                continue
            assert hand.job and hand.clock
            outcome = answer(hand)
            if outcome is None:
                outcome = Outcome(error=how_it_died(hand.process))
                self.hands[i] = replaced(hand)
            ended.append((hand.job.name, replace(outcome, seconds=hand.clock())))
            hand.job = None
        return ended

    def stop(self) -> None:
        """Those that work save what they have; the others leave."""
        for hand in self.hands:
            if hand.job and hand.process.is_alive():
                hand.process.terminate()
            hand.pipe.close()
        clock = Stopwatch()
        for hand in self.hands:
            hand.process.join(max(0.1, PATIENCE - clock()))
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join()


def spawn_worker(place: Place) -> Worker:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(there, place))
    process.start()
    there.close()  # so that its end is noticed
    return Worker(place, process, here)


def replaced(hand: Worker) -> Worker:
    hand.pipe.close()
    hand.process.join()
    return spawn_worker(hand.place)


def answer(hand: Worker) -> Outcome | None:
    """What a process has sent, or nothing if it died instead."""
    try:
        return hand.pipe.recv() if hand.pipe.poll() else None
    except (EOFError, ConnectionResetError):
        return None


def how_it_died(process: SpawnProcess) -> str:
    process.join()
    code = process.exitcode or 0
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}; was there enough memory?"
    return f"its process ended with code {code}"


def serve(pipe: Connection, place: Place) -> None:
    """One job after the other, until nobody asks any more.

    Ctrl-C goes to all processes of a terminal, and is the first one's to answer: it then asks for an end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            call, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            told = attempt(call, arguments, place)
        except KeyboardInterrupt:  # it has saved what it had
            return
        with contextlib.suppress(BrokenPipeError):
            pipe.send(told)


def attempt(call: Any, arguments: tuple[Any, ...], place: Place) -> Outcome:
    """What comes of a call; an error of any kind is its outcome, and ends nothing else."""
    try:
        return Outcome(call(*arguments, place))
    except Exception as error:
        kind = error.code if isinstance(error, Error) else type(error).__name__
        return Outcome(error=f"{kind}: {error}", trace=traceback.format_exc())
    finally:
        tidy(place)


def tidy(place: Place) -> None:
    """What a job held of a device goes back to the others that share it."""
    if place.device.startswith("cuda"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()
