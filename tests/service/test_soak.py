"""Ten minutes of all kinds of requests leave no memory, thread or file behind.

That long with VITKIT_FAULTS=full or VITKIT_FULL=1, else twenty seconds and a wider limit.
"""

import asyncio
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
from launch import HOST, Service, picture, post, service, tiny
from malformed import requests
from test_load import for_a_while, settled

from vitkit.service.desk import Desk
from vitkit.weights.save import save

FULL = os.environ.get("VITKIT_FAULTS") == "full" or bool(os.environ.get("VITKIT_FULL"))
WARM, SECONDS = (60, 600) if FULL else (10, 20)
MOST = 1.0 if FULL else 30.0  # megabytes a minute: a short look sees single megabytes come and go
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

    def look(self, found: Service) -> None:
        with suppress(psutil.Error):  # a decoder that goes while it is looked at
            decoders = sum(p.memory_info().rss for p in found.decoders()) / 1e6
            self.times.append(time.monotonic() / 60)
            self.memory.append(found.memory())
            self.decoders.append(decoders)
            self.threads.add(psutil.Process(found.process.pid).num_threads())


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


def soaked(found: Service, seconds: float) -> Soak:
    told, mixed = Soak(), mixture()

    async def look() -> None:
        for _ in range(int(seconds / LOOK)):
            told.look(found)
            await asyncio.sleep(LOOK)

    async def all_of_it() -> None:
        leavers = [leave(found.port, seconds, random.Random(n)) for n in range(LEAVERS)]
        work = for_a_while(found.port, CLIENTS, seconds, lambda: next(mixed), told.note)
        told.left = sum((await asyncio.gather(look(), work, *leavers))[2:])

    asyncio.run(all_of_it())
    return told


def at_rest(found: Service) -> int:
    """Open files when nobody is there any more."""
    assert settled(lambda: found.gauge("vitkit_in_flight_requests") == 1)
    seen = []
    for _ in range(10):
        seen.append(found.files())
        time.sleep(0.2)
    return min(seen)


@pytest.fixture
def model_file(tmp_path):
    save(tiny(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_d11_nothing_grows(model_file, tally):
    with service(model_file, "--workers", "2") as found:
        soaked(found, WARM)
        files = at_rest(found)
        told = soaked(found, SECONDS)
        after = at_rest(found)
        held, log = found.gauge("vitkit_held_bytes"), found.log.read_text()
    growth = slope(told.times, told.memory), slope(told.times, told.decoders)
    print(
        f"\nD11: {told.asked} requests in {SECONDS} s and {told.left} clients that left; not as expected: "
        f"{dict(told.wrong) or 0}; memory {told.memory[0]:.0f} -> {told.memory[-1]:.0f} MB, "
        f"{growth[0]:+.2f} MB a minute, decoders {growth[1]:+.2f}; threads {told.threads}; "
        f"files {files} -> {after}"
    )
    assert not told.wrong and not held and "Traceback" not in log
    assert max(growth) <= MOST and len(told.threads) == 1 and after == files
    tally(minutes=SECONDS / 60, requests=told.asked, clients_that_left=told.left)


def keep_something() -> None:
    """A fault: 200 kB of each request are kept for ever."""
    ask, kept = Desk.ask, []

    async def leaking(self: Desk, *args: Any) -> list[Any]:
        kept.append(b"x" * (200_000 + len(kept)))
        return await ask(self, *args)

    Desk.ask = leaking


def test_d11_control_a_leak_is_noticed(model_file):
    with altered(model_file, keep_something) as found:
        soaked(found, 4)
        told = soaked(found, 6)
    assert not told.wrong and slope(told.times, told.memory) > MOST
