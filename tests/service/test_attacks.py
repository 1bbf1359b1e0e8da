"""Clients that mean harm, or merely fail: slow ones, endless bodies, bombs, those that leave, and nonsense.

With VITKIT_FULL=1 in the numbers of docs/lab/serving.md; pytest -s shows the figures. Loopback only.
"""

import asyncio
import os
import random
import socket
import time
from collections import Counter
from contextlib import suppress

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import HOST, Client, picture, post, service, tiny
from malformed import images

from vitkit.weights.save import save

FULL = bool(os.environ.get("VITKIT_FULL"))
SOCKETS = 200 if FULL else 40
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    path = tmp_path_factory.mktemp("attacked") / "model.safetensors"
    save(tiny(), path)
    with service(path) as result:
        yield result
        assert "Traceback" not in result.log.read_text()


def test_d3_slow_clients_are_sent_away_and_others_do_not_notice(running):
    """Heads of one line a second, bodies of one byte a second, and answers that nobody reads."""
    ended: dict[str, list[float]] = {"head": [], "body": [], "read": []}
    honest, most = Counter(), {"head": 15, "body": 36, "read": 50 if FULL else 40}
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 999\r\n".encode()
    asked = f"GET /openapi.json HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode() * 100
    begin = {"head": b"GET / HTTP/1.1\r\n", "body": head + b"\r\n", "read": asked}

    def opened(kind: str) -> socket.socket:
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect((HOST, running.port))
        wire.setblocking(False)
        wire.send(begin[kind])
        return wire

    async def slow(kind: str) -> None:
        """A little more every second, until the service has had enough of it."""
        wire, begun = opened(kind), time.monotonic()
        with wire, suppress(OSError):
            while time.monotonic() < begun + most[kind] + 5:
                await asyncio.sleep(1)
                wire.send({"head": b"X-A: b\r\n", "body": b"x", "read": b"GET"}[kind])
        ended[kind].append(time.monotonic() - begun)

    async def be_honest(stop: asyncio.Event) -> None:
        client, request = Client(running.port), post(picture(1))
        while not stop.is_set():
            status, *_ = await asyncio.wait_for(client.ask(request), 20)
            honest[status] += 1
            await asyncio.sleep(0.1)
        client.close()

    async def all_of_them() -> None:
        stop = asyncio.Event()
        good = asyncio.create_task(be_honest(stop))
        await asyncio.gather(*(slow(kind) for kind in ended for _ in range(SOCKETS)))
        stop.set()
        await good

    memory = running.memory()
    asyncio.run(all_of_them())
    told = {kind: f"{min(times):.0f} to {max(times):.0f} s" for kind, times in ended.items()}
    print(f"\nD3: {SOCKETS} of each, closed after {told}; honest client {dict(honest)}; "
          f"RSS {memory:.0f} -> {running.memory():.0f} MB")  # fmt: skip
    assert set(honest) == {200}
    for kind, times in ended.items():
        assert max(times) <= most[kind], kind


def piece(body: str) -> bytes:
    return f"{body}\r\nHost: {HOST}\r\n".encode()


HEAD = piece("POST /v1/predict HTTP/1.1") + b"Content-Type: image/jpeg\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FORM = piece("POST /v1/predict HTTP/1.1") + b"Content-Type: multipart/form-data; boundary=b\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\nx\r\n'


def form(body: bytes) -> bytes:
    return FORM + b"Content-Length: %d\r\n\r\n" % len(body) + body


def endless(piece: bytes, most: int):
    """The same bytes again and again, in writes of a megabyte, up to `most` bytes."""
    block = piece * (2**20 // len(piece))
    for _ in range(0, most, len(block)):
        yield block


SIZES = {
    "10 GB announced": [HEAD + b"Content-Length: 10000000000\r\n\r\n"],
    "10 GB sent": [HEAD + b"Content-Length: 10000000000\r\n\r\n", (bytes(2**20), 200 * 2**20)],
    "20 digits": [HEAD + b"Content-Length: 99999999999999999999\r\n\r\n"],
    "endless chunks": [CHUNKED, (b"10000\r\n" + bytes(65536) + b"\r\n", 200 * 2**20)],
    "chunks of a byte": [CHUNKED, (b"1\r\nx\r\n", 30 * 2**20)],
    "a chunk without end": [CHUNKED + b"fffffffffff\r\n", (bytes(2**20), 200 * 2**20)],
    "a long chunk head": [CHUNKED + b"1;" + b"x" * 10**6],
    "negative length": [HEAD + b"Content-Length: -1\r\n\r\n"],
    "two lengths": [HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx"],
    "both framings": [HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"],
    "gzip": [HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"],
    "10 000 parts": [form(PART * 10_000 + b"--b--\r\n")],
    "a part head of 1 MB": [form(PART.replace(b"name", b"x" * 10**6 + b"name"))],
    "9 MB of near boundaries": [form(PART[:-3] + b"\r\n--a" * 1_800_000 + b"\r\n--b--\r\n")],
    "a long boundary": [FORM.replace(b"=b", b"=" + b"b" * 9000) + b"Content-Length: 1\r\n\r\nx"],
    "a URL of 64 KB": [b"GET /" + b"a" * 65536 + b" HTTP/1.1\r\n\r\n"],
    "1000 headers": [HEAD + b"a: b\r\n" * 1000 + b"\r\n"],
    "a header of 1 MB": [HEAD + b"a: " + b"b" * 10**6 + b"\r\n\r\n"],
    "no HTTP": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)],
    "HTTP/2": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
}


def first_line(port: int, parts: list) -> tuple[int, float]:
    """The status of the answer to what is sent, and after how long; 0 when there is none."""
    with socket.create_connection((HOST, port), 10) as wire:
        begun = time.monotonic()
        try:
            for part in parts:
                for block in [part] if isinstance(part, bytes) else endless(*part):
                    wire.sendall(block)
        except OSError:  # it has heard enough
            pass
        try:
            line = wire.makefile("rb").readline()
        except OSError:
            line = b""
        return int(line.split()[1]) if line else 0, time.monotonic() - begun


@pytest.mark.parametrize("case", SIZES)
def test_d4_sizes_that_are_meant_to_hurt(running, case):
    before = running.memory()
    status, seconds = first_line(running.port, SIZES[case])
    well = httpx.get(f"{running.url}/healthz", timeout=5)
    print(f"\nD4: {case}: {status} after {seconds:.2f} s, RSS {before:.0f} -> {running.memory():.0f} MB")
    wanted = (200, 422) if "boundaries" in case else (400, 411, 413, 414, 415, 422, 431)
    assert status in wanted and well.status_code == 200
    assert running.memory() <= before + 64 and seconds < 5


def test_d5_images_that_are_meant_to_hurt(running):
    memory, slowest, wrong = running.memory(), ("", 0.0), {}
    with httpx.Client(base_url=running.url, timeout=30) as client:
        client.post("/v1/predict", content=picture(1))
        for kind, (content, status) in images().items():
            begun = time.monotonic()
            answer = client.post("/v1/predict", content=content)
            slowest = max(slowest, (kind, time.monotonic() - begun), key=lambda one: one[1])
            if answer.status_code != status:
                wrong[kind] = answer.status_code, answer.text
            assert client.get("/healthz").status_code == 200
    helpers = max(p.memory_info().rss for p in running.decoders()) / 1e6
    print(
        f"\nD5: {len(images())} kinds, not as expected: {wrong or 0}; slowest {slowest[0]}: "
        f"{slowest[1]:.2f} s; RSS {memory:.0f} -> {running.memory():.0f} MB, a decoder {helpers:.0f} MB"
    )
    assert not wrong and slowest[1] < 2 and running.memory() <= memory + 100


def test_d6_clients_that_leave_are_forgotten(running):
    rng, request = random.Random(0), post(picture(1, (600, 800)))
    for _ in range(200):
        with socket.create_connection((HOST, running.port), 10) as wire:
            wire.sendall(request[: rng.choice([len(request), rng.randrange(len(request))])])
            time.sleep(rng.choice([0, 0, 0.005, 0.02]))
            if rng.random() < 0.5:  # with a reset, not with a goodbye
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until = time.monotonic() + 20
    while running.gauge("vitkit_in_flight_requests") > 1 and time.monotonic() < until:  # 1 asks for the gauge
        time.sleep(0.1)
    assert running.gauge("vitkit_in_flight_requests") == 1
    assert running.gauge("vitkit_waiting_images") == running.gauge("vitkit_held_bytes") == 0
    log = running.log.read_text()
    print("\nD6: 200 clients left, nothing in flight, no traceback")
    assert "Traceback" not in log and "ERROR" not in log


PATHS = ["/v1/predict", "/v1/embed", "/v1/attention", "/v1/model", "/", "/docs", "/static/x", "/healthz"]
KINDS = ["image/jpeg", "multipart/form-data; boundary=b", "multipart/form-data", "application/json", "",
         "x/y", "multipart/form-data; boundary=b; charset=utf-7", "application/json; charset=x"]  # fmt: skip
TEXT = st.text(max_size=20)
PLAIN = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
VALUE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
HEADERS = ["origin", "host", "authorization", "accept", "range", "expect", "x-forwarded-for",
           "content-encoding", "upgrade"]  # fmt: skip
ENTRY = st.fixed_dictionaries({}, optional={"name": VALUE, "data": VALUE | st.just("AAAA")})
BODY = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda cut, more: picture(1)[:cut] + more, st.integers(0, 3000), st.binary(max_size=20)),
    st.builds(
        lambda *parts: b"--b\r\n" + b"\r\n".join(parts), st.binary(max_size=60), st.binary(max_size=60)
    ),
    st.builds(lambda head, body: PART.replace(b'"a"', head, 1) + body, st.binary(max_size=9), st.binary()),
)


@settings(max_examples=600 if FULL else 200, deadline=None, derandomize=not FULL,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(
    method=st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "HEAD", "OPTIONS"]),
    path=st.sampled_from(PATHS), kind=st.sampled_from(KINDS), body=BODY,
    query=st.dictionaries(st.sampled_from(["top", "target", "x"]), TEXT | st.integers().map(str), max_size=3),
    headers=st.dictionaries(st.sampled_from(HEADERS), PLAIN, max_size=2),
)  # fmt: skip
def test_d10_nonsense_never_ends_in_an_error_of_ours(running, method, path, kind, body, query, headers):
    with httpx.Client(base_url=running.url, timeout=20) as client:
        content_type = {"content-type": kind} if kind else {}
        answer = client.request(method, path, params=query, content=body, headers=content_type | headers)
    assert answer.status_code < 500, (answer.status_code, answer.text)


@settings(max_examples=200 if FULL else 100, deadline=None, derandomize=not FULL,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(content=VALUE | st.fixed_dictionaries({"images": VALUE | st.lists(ENTRY | VALUE, max_size=4)}))
def test_d10_json_of_any_kind_never_ends_in_an_error_of_ours(running, content):
    import json

    with httpx.Client(base_url=running.url, timeout=20) as client:
        body, kind = json.dumps(content).encode(), {"content-type": "application/json"}
        answer = client.post("/v1/predict", content=body, headers=kind)
    assert answer.status_code in (200, 422), (answer.status_code, answer.text)
