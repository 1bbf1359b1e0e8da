"""Connections: too many, heads that are too long, half-closed ones, refusals with an id, and the log."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from altered import altered
from launch import HOST, picture, post, service, tiny
from uvicorn.server import ServerState

from vitkit.server import http, monitoring
from vitkit.server.http import RESERVE, ConnectionLimits, TimedProtocol, listen
from vitkit.server.monitoring import Handler, RateLimitedLog, Writer, escaped
from vitkit.weights.save import save

FILES = 300
GET = f"GET /healthz HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
PAGES = [
    "/",
    "/docs",
    "/openapi.json",
    "/static/docs.css",
    "/v1/model",
    "/healthz",
    "/readyz",
    "/metrics",
    "/none",
]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("connected") / "model.safetensors"
    save(tiny(), path)
    return path


@pytest.fixture(scope="module")
def running(model_file):
    with service(model_file, "--workers", "1", files=FILES) as found:
        yield found
        assert "Traceback" not in found.log.read_text()


def said(wire: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer after which the connection is closed."""
    content = b""
    while piece := wire.recv(65536):
        content += piece
    head, _, body = content.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body


def asked(port: int, request: bytes, half_close: bool = False) -> tuple[int, dict[str, str], bytes]:
    with socket.create_connection((HOST, port), 20) as wire:
        wire.sendall(request)
        if half_close:
            wire.shutdown(socket.SHUT_WR)
        return said(wire)


@asynccontextmanager
async def one_server(app=None, most: int = 10):
    """Our connections around any application: the port, and those that are open."""
    state = ServerState()
    config = uvicorn.Config(app, http=TimedProtocol, lifespan="off", log_config=None)
    limits = ConnectionLimits(most)

    def made() -> TimedProtocol:
        return TimedProtocol(limits, config=config, server_state=state, app_state={})

    wire = listen(HOST, 0)
    server = await asyncio.get_running_loop().create_server(made, sock=wire)
    try:
        yield wire.getsockname()[1], state.connections
    finally:
        server.close()


def test_answers_are_sent_at_once():
    async def option() -> int:
        async with one_server() as (port, connections):
            _, writer = await asyncio.open_connection(HOST, port)
            while not connections:
                await asyncio.sleep(0.01)
            (one,) = connections
            wire = one.transport.get_extra_info("socket")
            found = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            return found

    assert asyncio.run(option()) != 0


@pytest.mark.parametrize("wait", ["head", "body"])
def test_slow_requests_are_answered_408_with_the_id_of_the_log(monkeypatch, caplog, wait):
    async def app(scope, receive, send) -> None:
        scope["state"]["request_id"] = "the id of the guard"
        while (await receive())["type"] != "http.disconnect":
            pass

    async def answer() -> bytes:
        async with one_server(app) as (port, _):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(GET[:20] if wait == "head" else post(b"body")[:-1])
            content = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return content

    monkeypatch.setattr(http, "CHECK_INTERVAL", 0.05)
    monkeypatch.setitem(http.SECONDS, wait, 0.2)
    with caplog.at_level(logging.INFO):
        head, _, body = asyncio.run(answer()).partition(b"\r\n\r\n")
    number = json.loads(body)["request"]
    assert json.loads(body)["code"] == "server.request"
    assert head.startswith(b"HTTP/1.1 408") and f"X-Request-Id: {number}".encode() in head
    assert f"request {number}: the {wait} of the request took" in caplog.text
    assert (number == "the id of the guard") is (wait == "body")


HEADS = {
    "a header of 20 kB": (GET[:-2] + b"A: " + b"b" * 20_000 + b"\r\n\r\n", 431),
    "a header of 70 kB": (GET[:-2] + b"A: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    "101 headers": (GET[:-2] + b"a: b\r\n" * 101 + b"\r\n", 431),
    "a URL of 9 kB": (GET.replace(b"/healthz", b"/" + b"a" * 9000), 414),
    "a URL of 70 kB": (GET.replace(b"/healthz", b"/" + b"a" * 70_000), 414),
    "a method of 21": (GET.replace(b"GET", b"G" * 21), 400),
    "a method of 70 kB": (b"G" * 70_000, 431),
    "two lengths": (GET[:-2] + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_that_come_at_once_meet_the_limits_and_refusals_have_an_id(running, case):
    request, status = HEADS[case]
    output, headers, body = asked(running.port, request)
    number = json.loads(body)["request"]
    assert output == status and headers["x-request-id"] == number and len(number) == 16
    assert json.loads(body)["code"] == ("server.request" if status == 400 else "server.too-large")
    assert running.logged(f"request {number}: ")


def test_a_head_within_the_limits_is_answered(running):
    request = GET[:-2] + b"A: " + b"b" * 15_000 + b"\r\nConnection: close\r\n\r\n"
    assert asked(running.port, request)[0] == 200


@pytest.mark.parametrize("path", PAGES)
def test_head_has_the_headers_of_get_and_no_body(running, path):
    with httpx.Client(base_url=running.url) as client:
        get, head = client.get(path), client.head(path)
    assert head.status_code == get.status_code and head.content == b""
    varying = {"x-request-id", "date", *(["content-length"] if path in ("/metrics", "/none") else [])}
    assert {k: v for k, v in head.headers.items() if k not in varying} == {
        k: v for k, v in get.headers.items() if k not in varying
    }


def test_clients_that_send_no_more_are_answered(running):
    status, _, body = asked(running.port, post(picture(1)), half_close=True)
    assert status == 200 and json.loads(body)["results"][0]["top"]
    with socket.create_connection((HOST, running.port), 20) as wire:  # two at once
        wire.sendall(GET + post(picture(1)))
        wire.shutdown(socket.SHUT_WR)
        content = b"".join(iter(lambda: wire.recv(65536), b""))
    assert content.count(b"HTTP/1.1 200") == 2 and b'"top"' in content
    status, headers, body = asked(running.port, GET[:-2], half_close=True)
    assert status == 400 and json.loads(body)["request"] == headers["x-request-id"]
    assert json.loads(body)["code"] == "server.request"


def test_half_sent_heads_are_evicted_and_others_are_answered(running):
    """With 300 files 100 connections may be open, and 50 of one address."""
    assert FILES - RESERVE == 100
    wires = []
    lines = len(running.log.read_text().splitlines())
    try:
        for number in range(150):
            wires.append(socket.create_connection((HOST, running.port), 20))
            wires[-1].sendall(GET[:20])
            if number % 30 == 29:
                answer = httpx.post(f"{running.url}/v1/predict", content=picture(1), timeout=20)
                assert answer.status_code == 200 and running.files() < FILES
        status, headers, body = said(wires[0])
        assert (
            status == 503
            and headers["retry-after"]
            and json.loads(body)["request"] == headers["x-request-id"]
            and json.loads(body)["code"] == "server.busy"
        )
        wires[-1].sendall(GET[20:])  # the newest are still there
        assert wires[-1].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for wire in wires:
            wire.close()
    assert running.logged("too many are open")
    output = running.log.read_text().splitlines()[lines:]
    assert len(output) <= 3 and any("too many are open" in line for line in output)


def room_for_all() -> None:
    """Protection off: as many connections as come."""
    ConnectionLimits.enter = lambda self, one: not self.open.update([one.address])


@pytest.mark.slow
def test_control_without_a_limit_half_sent_heads_take_all_files(model_file):
    with altered(model_file, room_for_all, files=FILES) as found:
        wires = [socket.create_connection((HOST, found.port), 20) for _ in range(350)]
        try:
            for wire in wires:
                wire.sendall(GET[:20])
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{found.url}/healthz", timeout=3)
        finally:
            for wire in wires:
                wire.close()


ACCEPTING = """
import asyncio, resource, socket, sys
from vitkit.server.http import listen

async def main():
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    wire = listen("127.0.0.1", 0)
    if sys.argv[1] == "ordinary":
        wire = socket.socket(wire.family, wire.type, wire.proto, wire.detach())
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    await loop.create_server(asyncio.Protocol, sock=wire, backlog=500)
    print(wire.getsockname()[1], flush=True)
    await asyncio.sleep(3)
    print(len(complaints), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["ours", "ordinary"])
@pytest.mark.slow
def test_without_files_accepting_waits_and_the_control_an_ordinary_socket_complains_without_end(kind):
    process = subprocess.Popen([sys.executable, "-c", ACCEPTING, kind], stdout=subprocess.PIPE, text=True)
    with process:
        port = int(process.stdout.readline())
        wires = [socket.create_connection((HOST, port), 20) for _ in range(60)]
        complaints = int(process.stdout.readline())
        for wire in wires:
            wire.close()
    assert 1 <= complaints <= 4 if kind == "ours" else complaints > 100


def test_the_oldest_waiting_connections_are_evicted_and_active_ones_stay():
    class One:
        def __init__(self, address: str) -> None:
            self.address, self.gone = address, False

        def evict(self) -> None:
            self.gone = True

    limits = ConnectionLimits(6)
    many = [One("many") for _ in range(4)]
    for one in many:
        assert limits.enter(one)
        limits.idle(one)
    assert [one.gone for one in many] == [True, False, False, False]  # three of one address at most
    limits.leave(many[0])
    limits.busy(many[1])
    limits.idle(many[2])  # has been answered, and waits anew
    newcomer = One("many")
    assert limits.enter(newcomer) and [one.gone for one in many] == [True, False, False, True]
    limits.leave(many[3])
    others = [One(f"other {n}") for n in range(4)]
    for one in others:
        assert limits.enter(one)
    assert many[2].gone and not any(one.gone for one in others)
    limits.leave(many[2])
    assert not limits.enter(One("last"))  # nobody waits: all are being answered
    assert limits.total == 7


def test_lines_are_clipped_and_control_characters_escaped():
    assert escaped("a\r\nb\x1b[31m\x00\u2028é") == r"a\r\nb\x1b[31m\x00\u2028é"
    assert len(escaped("x" * 10**6)) < 1100 and "1000000 characters" in escaped("x" * 10**6)


def full_pipe() -> int:
    """The end for writing of a pipe that nobody reads."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    try:
        while True:
            os.write(end, bytes(4096))
    except BlockingIOError:
        os.set_blocking(end, True)
    return end


def test_a_log_that_nobody_reads_drops_lines_and_counts_them(monkeypatch):
    monkeypatch.setattr(
        monitoring, "REPORT_INTERVAL", 600.0
    )  # no report, which starts at 0 again, until it is read
    read, write = os.pipe()
    writer = Writer(write)
    log = logging.Logger("test")
    log.addHandler(Handler(writer))
    for number in range(500):
        log.info("line %d %s", number, "x" * 2000)
    for _ in range(3 * monitoring.MAX_LINES):
        log.error("an error")
    assert writer.dropped > 500 - monitoring.PER_SECOND and len(writer.lines) <= monitoring.MAX_LINES
    monkeypatch.setattr(monitoring, "REPORT_INTERVAL", 0.1)
    file, text = os.fdopen(read, errors="replace"), []
    while "log lines were dropped" not in (text[-1] if text else ""):
        text.append(file.readline())
    assert "line 0 x" in text[0] and max(map(len, text)) < 1200
    dropped = int(re.search(r"(\d+) log lines", text[-1])[1])
    assert dropped + len(text) - 1 == 500 + 3 * monitoring.MAX_LINES
    stuck = Writer(full_pipe())
    stuck.put("a line")
    begun = time.monotonic()
    stuck.drain(0.1)
    assert time.monotonic() - begun < 5


def test_what_happens_often_is_one_line_with_a_count(caplog, monkeypatch):
    limited = RateLimitedLog(logging.getLogger("test"), "things")
    for _ in range(1000):
        limited("something")
    monkeypatch.setattr(monitoring, "REPORT_INTERVAL", 0.0)
    limited("something")
    assert [re.search(r"(\d+) things", line)[1] for line in caplog.messages] == ["1", "1000"]


def nobody_reads() -> None:
    monitoring.descriptor = lambda *_: full_pipe()


def nobody_reads_and_no_thread_writes() -> None:
    """Protection off: whoever logs writes itself."""
    nobody_reads()
    Writer.put = lambda self, line, important=False: self.write(line.encode())


@pytest.mark.slow
@pytest.mark.parametrize("change", [nobody_reads, nobody_reads_and_no_thread_writes])
def test_a_service_goes_on_and_stops_where_nobody_reads_its_log_and_the_control_does_not(model_file, change):
    with altered(model_file, change) as found:
        with httpx.Client(base_url=found.url, timeout=5) as client:
            statuses = []
            for _ in range(20):
                try:
                    statuses.append(client.get("/" + "x" * 90).status_code)
                except httpx.HTTPError:
                    statuses.append(0)
                    break
        os.kill(found.process.pid, signal.SIGTERM)
        found.process.join(20 if change is nobody_reads else 6)
        code = found.process.exitcode
        found.process.kill()
    assert (statuses, code) == (([404] * 20, 0) if change is nobody_reads else ([0], None))


def hangs_up_while_it_loads() -> None:
    from vitkit.server import served_model

    as_ever = served_model.load_served

    def load_served(*values):
        signal.raise_signal(signal.SIGHUP)
        return as_ever(*values)

    served_model.load_served = load_served


@pytest.mark.slow
def test_sighup_never_ends_it(model_file):
    with altered(model_file, hangs_up_while_it_loads) as found:
        with httpx.Client(base_url=found.url, timeout=20) as client:
            assert client.get("/v1/model").json()["revision"] == 1
            os.kill(found.process.pid, signal.SIGHUP)
            until = time.monotonic() + 30
            while client.get("/v1/model").json()["revision"] == 1 and time.monotonic() < until:
                time.sleep(0.1)
            assert client.get("/v1/model").json()["revision"] >= 2  # a signal while it reloads asks once more
        os.kill(found.process.pid, signal.SIGTERM)
        while found.process.is_alive():
            os.kill(found.process.pid, signal.SIGHUP)
            time.sleep(0.005)
        assert found.process.exitcode == 0
