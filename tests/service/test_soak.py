"""Ten minutes of all kinds of requests leave no memory, thread or file behind.

That long with VITKIT_FAULTS=full or VITKIT_FULL=1, else half a minute, by the same limit. Resident memory
comes and goes by megabytes, so a short look goes by the bytes that are in use when nobody asks, and by what
is added in most rounds of requests: what happens for the first time costs something once.
"""

import asyncio
import ctypes
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import psutil
import pytest
from altered import altered
from launch import HOST, Service, picture, post, tiny
from malformed import requests
from prometheus_client import Gauge
from test_load import for_a_while, settled

from vitkit.server.admission import AdmissionControl
from vitkit.server.monitoring import Metrics
from vitkit.weights.save import save

FULL = os.environ.get("VITKIT_FAULTS") == "full" or bool(os.environ.get("VITKIT_FULL"))
WARM, SECONDS = (60, 600) if FULL else (15, 30)
ROUNDS = 8  # of requests, with a look at the bytes in use after each
MOST, LEAK = 1.0, 1.75  # megabytes a minute: what is promised, and what the control keeps
CLIENTS, LEAVERS = 4, 2  # at most four may wait for attention
LOOK = 0.5  # seconds
pytestmark = pytest.mark.slow


@dataclass
class Soak:
    """What was sent, what was wrong, and what was seen of the service meanwhile."""

    asked: int = 0
    left: int = 0
    wrong: Counter = field(default_factory=Counter)  # by the status that it should have been, and was
    times: list[float] = field(default_factory=list)  # minutes
    memory: list[float] = field(default_factory=list)  # megabytes of the service
    decoders: list[float] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def note(self, request, status, headers, body, seconds) -> None:
        self.asked += 1
        self.wrong.update([(request[1], status)] if status != request[1] else [])

    def add(self, other: "Soak") -> None:
        self.asked += other.asked
        self.left += other.left
        self.wrong += other.wrong
        self.threads |= other.threads
        for mine, theirs in (
            (self.times, other.times), (self.memory, other.memory), (self.decoders, other.decoders)
        ):  # fmt: skip
            mine += theirs

    def look(self, result: Service) -> None:
        with suppress(psutil.Error):  # a decoder that goes while it is looked at
            decoders = sum(p.memory_info().rss for p in result.decoders()) / 1e6
            self.times.append(time.monotonic() / 60)
            self.memory.append(result.memory())
            self.decoders.append(decoders)
            self.threads.add(psutil.Process(result.process.pid).num_threads())


def slope(minutes: list[float], megabytes: list[float]) -> float:
    """Megabytes a minute, by the line that lies nearest to all."""
    return float(np.polyfit(np.array(minutes) - minutes[0], megabytes, 1)[0])


def mixture() -> Iterator[tuple[bytes, int]]:
    """Requests without end, and what each must be answered; every fifth is wrong, each in its own way."""
    paths = ("/v1/predict", "/v1/predict", "/v1/embed", "/v1/attention")
    good = [post(picture(n, (40 + n, 60), ("JPEG", "PNG", "WEBP")[n % 3]), paths[n % 4]) for n in range(24)]
    facts = [f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode() for path in ("/v1/model", "/metrics")]
    bad = list(requests().values())
    for n in count():
        if n % 5 == 4:
            yield bad[n // 5 % len(bad)]
        else:
            yield (facts[n % 2] if n % 20 < 2 else good[n % len(good)]), 200


async def leave(port: int, seconds: float, rng: random.Random) -> int:
    """Requests that are cut off anywhere, or sent whole and not waited for -> how many."""
    request, end, left = post(picture(1, (600, 800))), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(request[: rng.choice([len(request), rng.randrange(1, len(request))])])
        await asyncio.sleep(rng.choice([0, 0.005, 0.05]))
        (writer.transport.abort if rng.random() < 0.5 else writer.close)()
        left += 1
        await asyncio.sleep(0.1)
    return left


def soaked(result: Service, seconds: float, mixed: Iterator[tuple[bytes, int]]) -> Soak:
    told = Soak()

    async def look() -> None:
        for _ in range(int(seconds / LOOK)):
            told.look(result)
            await asyncio.sleep(LOOK)

    async def all_of_it() -> None:
        leavers = [leave(result.port, seconds, random.Random(n)) for n in range(LEAVERS)]
        work = for_a_while(result.port, CLIENTS, seconds, lambda: next(mixed), told.note)
        told.left = sum((await asyncio.gather(look(), work, *leavers))[2:])

    asyncio.run(all_of_it())
    return told


def at_rest(result: Service) -> int:
    """Open files when nobody is there any more."""
    assert settled(lambda: result.gauge("vitkit_in_flight_requests") == 1)
    seen = []
    for _ in range(10):
        seen.append(result.files())
        time.sleep(0.2)
    return min(seen)


@pytest.fixture
def model_file(tmp_path):
    save(tiny(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


class Malloc(ctypes.Structure):
    """What glibc counts, of all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "mapped",
            "usmblks",
            "fsmblks",
            "used",
            "free",
            "top",
        )
    ]


def bytes_in_use() -> int:
    """Of this process, after a collection; exact where Python's own pools and glibc's caches are off."""
    gc.collect()
    count = ctypes.CDLL(None).mallinfo2
    count.restype = Malloc
    now = count()
    return now.used + now.mapped


def counted() -> None:
    """No fault: the service also says how many bytes it uses."""
    as_ever = Metrics.__init__

    def with_bytes(self: Metrics) -> None:
        as_ever(self)
        Gauge("bytes_in_use", "for this test", registry=self.registry).set_function(bytes_in_use)

    Metrics.__init__ = with_bytes


def keep_something() -> None:
    """A fault: a little more of the requests is kept than may be, whatever their number."""
    counted()
    ask, kept, last = AdmissionControl.infer, [], time.monotonic()

    async def leaking(self: AdmissionControl, *args: Any) -> list[Any]:
        nonlocal last
        now = time.monotonic()
        kept.append(b"x" * int(LEAK * 1e6 * (now - last) / 60))
        last = now
        return await ask(self, *args)

    AdmissionControl.infer = leaking


@pytest.fixture
def exact(monkeypatch):
    """For processes that are started: all memory is of malloc, and freed memory is not kept back."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("bytes in use are counted by glibc 2.33 or newer")
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")


def warmed(result: Service, seconds: float) -> Iterator[tuple[bytes, int]]:
    """The requests that go on after each kind of them has come, however slow the machine."""
    mixed, asked, until = mixture(), 0, time.monotonic() + seconds
    while asked < 5 * len(requests()) or time.monotonic() < until:
        asked += soaked(result, 5, mixed).asked
    return mixed


def growth(result: Service, seconds: float, mixed: Iterator[tuple[bytes, int]]) -> tuple[float, Soak]:
    """Megabytes in use a minute, by looks at rest between rounds of requests, and what was seen in them."""
    told, minutes, used = Soak(), [], []
    for number in range(ROUNDS + 1):
        if number:
            told.add(soaked(result, seconds / ROUNDS, mixed))
        assert settled(lambda: result.gauge("vitkit_in_flight_requests") == 1)
        minutes.append(time.monotonic() / 60)
        used.append(min(result.gauge("bytes_in_use") for _ in range(3)) / 1e6)
    print("\nD11: megabytes in use", [round(one, 3) for one in used])
    added = np.median(np.diff(used) / np.diff(minutes))
    return float(max(added, slope(minutes, used)) if FULL else added), told


def test_d11_nothing_grows(model_file, tally, exact):
    with altered(model_file, counted) as result:
        mixed = warmed(result, WARM)
        files = at_rest(result)
        kept, told = growth(result, SECONDS, mixed)
        after = at_rest(result)
        held, log = result.gauge("vitkit_held_bytes"), result.log.read_text()
    resident = slope(told.times, told.memory), slope(told.times, told.decoders)
    print(
        f"\nD11: {told.asked} requests in {SECONDS} s and {told.left} clients that left; not as expected: "
        f"{dict(told.wrong) or 0}; in use {kept:+.2f} MB a minute; memory {told.memory[0]:.0f} -> "
        f"{told.memory[-1]:.0f} MB, {resident[0]:+.2f} MB a minute, decoders {resident[1]:+.2f}; threads "
        f"{told.threads}; files {files} -> {after}"
    )
    assert not told.wrong and not held and "Traceback" not in log
    assert kept <= MOST and len(told.threads) == 1 and after == files
    assert not FULL or max(resident) <= MOST
    tally(minutes=SECONDS / 60, requests=told.asked, clients_that_left=told.left)


def test_d11_control_a_leak_is_noticed(model_file, exact):
    with altered(model_file, keep_something) as result:
        kept, told = growth(result, 30, warmed(result, 5))
    print(f"\nD11: a leak of {LEAK} MB a minute is seen as {kept:.2f}")
    assert not told.wrong and MOST < kept < 1.5 * LEAK
