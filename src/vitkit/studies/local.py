"""Processes of this machine that run job after job: imports, devices and caches are had once by each."""

import contextlib
import gc
import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from vitkit.errors import Error
from vitkit.studies.drive import Job, Outcome, Stopwatch
from vitkit.studies.work import Place
from vitkit.training.runtime import cores

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
PATIENCE = 120.0  # seconds that a process may take to save its trial
A_GPU = 4  # processes that share one, if nobody says how many: small models leave much of it free


def places(device: str, processes: int | None, precision: str = "auto", compile: bool = False) -> list[Place]:
    """A place for each process: devices in turn, cores and data workers shared out evenly."""
    devices = devices_of(device)
    cuda = devices[0].startswith("cuda")
    count = processes or (min(A_GPU * len(devices), max(1, cores() // 2)) if cuda else max(1, cores() // 2))
    if count < 1:
        raise Error(f"--processes must be at least 1, not {count}")
    share = max(1, cores() // count)
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
class Hand:
    """A process that works, and the way to it."""

    place: Place
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    clock: Stopwatch | None = None


class Local:
    """As many processes as there are places; one that dies is replaced, and only its job is lost."""

    def __init__(self, places: Sequence[Place]):
        self.hands = [hire(place) for place in places]

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


def hire(place: Place) -> Hand:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(there, place))
    process.start()
    there.close()  # so that its end is noticed
    return Hand(place, process, here)


def replaced(hand: Hand) -> Hand:
    hand.pipe.close()
    hand.process.join()
    return hire(hand.place)


def answer(hand: Hand) -> Outcome | None:
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
