"""Decoders that are killed under load are replaced, and nobody who asks notices."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from altered import altered
from launch import Client, Service, picture, post, service, tiny
from switches import switch_off
from test_load import as_long_as, settled

from vitkit.weights.save import save

pytestmark = pytest.mark.slow
KILLS = 10
READY = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def model_file(tmp_path):
    save(tiny(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def keep_the_dead(proof: Path) -> None:
    """Protection off: a decoder that died is asked again and again."""
    switch_off("vitkit.server.decoder.Decoder.replaced", lambda self, helper: helper, proof)


@dataclass
class Siege:
    """What clients were told while processes were killed."""

    killed: set[int] = field(default_factory=set)
    statuses: Counter = field(default_factory=Counter)
    ready: Counter = field(default_factory=Counter)
    slowest: float = 0.0

    def note(self, request, status, headers, body, seconds) -> None:
        self.statuses[status] += 1
        self.slowest = max(self.slowest, seconds)


def besieged(found: Service, victims: Callable[[], list[psutil.Process]], turns: int = KILLS) -> Siege:
    """Eight clients and a probe, while twice a second somebody is killed who was not before.

    On a slow machine it takes longer until there is such a one, so there is twice the time for it.
    """
    told, good = Siege(), (post(picture(1)), 200)

    async def kill() -> None:
        left, end = turns, time.monotonic() + turns
        while left and time.monotonic() < end:
            await asyncio.sleep(0.5)
            alive = [process for process in victims() if process.pid not in told.killed]
            for process in alive:
                process.send_signal(signal.SIGKILL)
                told.killed.add(process.pid)
            left -= bool(alive)
        await asyncio.sleep(2)

    async def probe(going: Callable[[], bool]) -> None:
        client = Client(found.port)
        while going():
            status, *_ = await client.ask(READY)
            told.ready[status] += 1
            await asyncio.sleep(0.05)
        client.close()

    async def all_of_it() -> None:
        killing = asyncio.create_task(kill())

        def going() -> bool:
            return not killing.done()

        await asyncio.gather(killing, probe(going), as_long_as(going, found.port, 8, lambda: good, told.note))

    asyncio.run(all_of_it())
    return told


def test_d7_decoders_that_are_killed_are_replaced_and_nobody_notices(model_file, tally):
    with service(model_file, "--workers", "2") as found:
        told = besieged(found, lambda: found.decoders()[-1:])
        restarts, decoders = found.gauge("vitkit_decoder_restarts_total"), len(found.decoders())
    print(f"\nD7: {restarts:.0f} decoders replaced, {dict(told.statuses)}, slowest {told.slowest:.2f} s")
    assert set(told.statuses) == set(told.ready) == {200} and told.slowest <= 10
    assert len(told.killed) == restarts == KILLS and decoders == 2
    tally(kills=KILLS, requests=sum(told.statuses.values()))


@pytest.mark.control("vitkit.server.decoder.Decoder.replaced")
def test_d7_control_where_the_dead_are_not_replaced_requests_fail(model_file, switched_off):
    with altered(model_file, partial(keep_the_dead, switched_off.proof)) as found:
        told = besieged(found, lambda: found.decoders()[-1:])
        assert found.gauge("vitkit_decoder_restarts_total") == 0
    assert told.statuses[422] > 0


def test_d7_all_decoders_and_their_parent_are_killed_and_come_again(model_file, tally):
    """That takes as long as torch is imported; so long whoever waits for his image has to wait."""
    with service(model_file, "--workers", "2") as found:
        parent = psutil.Process(found.decoders()[0].ppid())
        told = besieged(found, lambda: [parent, *found.decoders()], turns=1)
        again = httpx.post(f"{found.url}/v1/predict", content=picture(1), timeout=60)
        assert "Traceback" not in found.log.read_text()
    print(f"\nD7: with their parent: {dict(told.statuses)}, slowest {told.slowest:.2f} s")
    assert set(told.statuses) == set(told.ready) == {200} and told.slowest <= 30
    assert len(told.killed) == 3 and again.status_code == 200
    tally(kills=3, requests=sum(told.statuses.values()))


def test_decoders_end_with_a_service_that_is_killed(model_file):
    with service(model_file, "--workers", "2") as found:
        helpers = found.decoders()
        found.process.kill()
        assert len(helpers) == 2 and settled(lambda: not any(p.is_running() for p in helpers))
