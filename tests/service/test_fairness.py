"""One request, however costly, does not keep others waiting: scans, pixels, time, turns, and large JSON."""

import asyncio
import base64
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from altered import altered
from launch import Client, picture, post, service, tiny
from malformed import form_of, progressive
from refusals import refused

from vitkit.data.decode import jpeg_scans, pixels_by_header
from vitkit.data.views import View
from vitkit.server import decoder, inputs
from vitkit.server.admission import SMALL, AdmissionControl
from vitkit.server.app import encode_results
from vitkit.server.decoder import Decoder, FairQueue, Share
from vitkit.server.inputs import from_base64, from_json
from vitkit.server.monitoring import Metrics
from vitkit.server.settings import MAX_SCANS, Settings
from vitkit.weights.save import save

VIEW = View(size=(32, 32), crop="squash")
COMMON: Share = Share()


@pytest.fixture
def model_file(tmp_path):
    save(tiny(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_scans_are_counted_by_the_markers_up_to_the_end_of_the_image():
    ordinary = progressive(10)
    assert jpeg_scans(ordinary, 32) == 10 and jpeg_scans(picture(1), 32) == 1
    assert jpeg_scans(progressive(100), 32) == 33 and jpeg_scans(progressive(100), 200) == 100
    film = b"\xff\xda" * 100  # as phones have it after the image
    assert jpeg_scans(ordinary + film, 32) == 10
    hidden = ordinary[:-2] + b"\xff\x01\xff\xff" + progressive(100)[len(ordinary) :]  # no body follows FF 01
    assert jpeg_scans(hidden, 32) == 33
    assert jpeg_scans(picture(1, kind="PNG"), 32) == jpeg_scans(b"\xff\xd8\xff", 32) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pixels_are_read_in_the_header(kind):
    assert pixels_by_header(picture(1, (50, 70), kind)) == 50 * 70
    assert pixels_by_header(picture(1, (50, 70), kind)[:12]) == pixels_by_header(b"text") == 0


def test_costs_are_refused_before_anything_is_decoded():
    settings = Settings(model="m", max_pixels=10_000)
    good = ("a.jpg", progressive(10, (100, 100)))
    inputs.check_cost([good] * 5 + [("too large by itself", picture(1, (200, 200)))], settings)
    for images, status, code, values in (
        ([good] * 6, 413, "server.too-large", ("60000",)),
        ([good, ("b.jpg", progressive(MAX_SCANS + 1))], 422, "image.too-large", ("b.jpg", "32 scans")),
    ):
        with refused(code, *values) as refusal:
            inputs.check_cost(images, settings)
        assert refusal.value.status == status


def test_requests_take_turns():
    queue: FairQueue[str] = FairQueue()
    many, few, one = Share(), Share(), Share()
    for number in range(6):
        queue.put(many, f"many {number}")
    assert queue.take()[1] == "many 0"
    queue.put(few, "few 0")
    queue.put(few, "few 1")
    queue.put(one, "one 0")
    order = [queue.take()[1] for _ in range(4)]  # many has one in work, so the others come first
    assert order == ["few 0", "one 0", "many 1", "few 1"]
    queue.done(many, 1.5)
    queue.done(many, 2.0)
    assert many.spent == 3.5 and queue.clear() == ["many 2", "many 3", "many 4", "many 5"]
    assert queue.take() is None


def order_of_answers(images: int) -> list[str]:
    """Whose images one decoder answers, where a request of many comes before a request of one."""
    order: list[str] = []
    many, one = Share(), Share()
    service, large = Decoder(1, 10**7, Metrics()), progressive(10, (600, 800))
    worker = service.idle.get()  # held back until all images are submitted
    try:
        futures = [service.submit(large, VIEW, many) for _ in range(images)]
        futures.append(service.submit(picture(1), VIEW, one))
        for future, name in zip(futures, ["many"] * images + ["one"], strict=True):
            future.add_done_callback(lambda _, name=name: order.append(name))
        service.idle.put(worker)
        for future in futures:
            future.result(60)
        return order
    finally:
        service.close()


def test_one_image_does_not_wait_for_the_many_of_another_request():
    assert order_of_answers(8).index("one") == 2  # after the one in work and the next: then it is its turn


def test_control_without_turns_one_image_waits_for_all_of_another_request(monkeypatch):
    as_ever = FairQueue.put
    monkeypatch.setattr(FairQueue, "put", lambda self, share, item: as_ever(self, COMMON, item))
    assert order_of_answers(8).index("one") == 8


def test_a_request_has_so_many_seconds_of_decoders():
    service, share = Decoder(1, 10**7, Metrics()), Share()
    try:
        assert service.submit(picture(1), VIEW, share).result(60).pixels.shape == (3, 32, 32)
        assert 0 < share.spent < decoder.REQUEST_SECONDS
        share.spent = decoder.REQUEST_SECONDS
        with refused("server.too-large", f"{decoder.REQUEST_SECONDS:.0f} s") as refusal:
            service.submit(picture(1), VIEW, share).result(60)
        assert refusal.value.status == 422
        assert service.submit(picture(1), VIEW, Share()).result(60).pixels.shape == (3, 32, 32)
    finally:
        service.close()


def test_images_that_wait_when_it_closes_are_cancelled():
    service = Decoder(1, 10**7, Metrics())
    content = progressive(10, (600, 800))
    futures = [service.submit(content, VIEW) for _ in range(200)]
    service.close()
    assert all(future.done() for future in futures) and futures[-1].cancelled()


async def besieged(port: int, form: bytes) -> tuple[list[str], int, dict]:
    """Who is answered when, while one client sends a form and another asks for one image after the other."""
    order: list[str] = []

    async def honest() -> None:
        client = Client(port)
        for _ in range(3):
            status, *_ = await client.ask(post(picture(1)))
            order.append(f"honest {status}")
        client.close()

    async def other() -> tuple[int, dict]:
        client = Client(port)
        status, _, body = await client.ask(form)
        order.append("form")
        client.close()
        return status, json.loads(body)

    sent = asyncio.create_task(other())
    await asyncio.sleep(0.1)  # so that its images are first
    await honest()
    return order, *(await sent)


HEAVY = form_of([progressive(30, (1000, 1200))] * 24)


def no_turns() -> None:
    """Protection off: the images of all requests stand in one queue."""
    as_ever = FairQueue.put
    FairQueue.put = lambda self, share, item: as_ever(self, COMMON, item)


def any_scans() -> None:
    """Protection off: a JPEG may have any number of scans."""
    inputs.MAX_SCANS = 10**6


@pytest.mark.slow
def test_a_form_of_many_scans_is_refused_and_a_heavy_one_does_not_delay_others(model_file):
    with service(model_file, "--workers", "1") as actual:
        decoded = actual.gauge("vitkit_decode_seconds_count")
        hostile = form_of([progressive(100, (500, 600))] * 32)
        status, _, body = asyncio.run(Client(actual.port).ask(hostile))
        assert status == 422 and json.loads(body)["code"] == "image.too-large"
        assert actual.gauge("vitkit_decode_seconds_count") == decoded
        order, status, answer = asyncio.run(besieged(actual.port, HEAVY))
    assert status == 200 and len(answer["results"]) == 24
    assert order == ["honest 200"] * 3 + ["form"]


@pytest.mark.slow
def test_control_without_turns_others_wait_for_a_heavy_form(model_file):
    with altered(model_file, no_turns, workers=1) as actual:
        order, *_ = asyncio.run(besieged(actual.port, HEAVY))
    assert order != ["honest 200"] * 3 + ["form"]


@pytest.mark.slow
def test_control_without_a_limit_of_scans_all_of_them_are_decoded(model_file):
    with altered(model_file, any_scans) as actual:
        hostile = form_of([progressive(100)] * 4)
        status, *_ = asyncio.run(Client(actual.port).ask(hostile))
        assert status == 200 and actual.gauge("vitkit_decode_seconds_count") == 4


async def longest_pause(work) -> float:
    """Of an event loop that should do something every millisecond while some work is waited for."""
    longest, last = 0.0, time.perf_counter()
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    task.result()
    return longest


class Parser:
    """The part of the admission control that runs functions in another thread."""

    offload = AdmissionControl.offload

    def __init__(self) -> None:
        self.parser = ThreadPoolExecutor(1)


def test_what_is_large_is_not_read_or_written_by_the_thread_of_the_event_loop():
    async def threads() -> list[bool]:
        mine = threading.get_ident()
        return [await Parser().offload(size, threading.get_ident) == mine for size in (1, SMALL + 1)]

    assert asyncio.run(threads()) == [True, False]


def test_the_event_loop_goes_on_while_a_large_answer_is_written():
    rows = list(torch.rand(32, 4000))
    images = [(str(number), b"") for number in range(32)]
    values = ("m", images, rows, lambda row: {"features": row.tolist()})
    begun = time.perf_counter()
    whole = encode_results(*values)
    alone = time.perf_counter() - begun
    assert [r["image"] for r in json.loads(whole)["results"]] == [name for name, _ in images]
    assert np.allclose(json.loads(whole)["results"][7]["features"], rows[7])
    pause = asyncio.run(longest_pause(Parser().offload(len(whole), encode_results, *values)))
    assert pause < alone / 3, (pause, alone)


def test_json_of_millions_of_values_is_not_even_read(monkeypatch):
    def no_reading(body: bytes) -> None:
        raise AssertionError("it was read")

    body = b'{"images": [' + b"1," * 20_000 + b"1]}"
    many = json.dumps({"images": [{"data": ""}] * 33}).encode()
    with refused("server.request", "32"):
        inputs.parse_images("application/json", {}, many, Settings(model="m"))
    monkeypatch.setattr(inputs.json, "loads", no_reading)
    with refused("server.request", "10000"):
        from_json(body)


def test_base64_is_read_in_pieces_and_as_strictly_as_ever(monkeypatch):
    monkeypatch.setattr(inputs, "PIECE", 8)
    for size in (0, 1, 5, 6, 7, 12, 100):
        content = os.urandom(size)
        assert from_base64(base64.b64encode(content).decode()) == content
    for wrong in ("AAAAAA==AAAAAAAA", "AAAAAAA", "AAAA\nAAAA", "?", "AAAAAA==A", "\u2603"):
        with pytest.raises(ValueError):
            from_base64(wrong)
