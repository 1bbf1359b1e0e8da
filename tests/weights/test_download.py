"""Published weights: fetched from a server that cuts connections, kept, and checked ever after."""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from refusals import refused

import vitkit
from vitkit.io import http as client
from vitkit.io.cache import cache_folder
from vitkit.weights import published as downloads
from vitkit.weights.published import PUBLISHED, DownloadError, Weight, download

CONTENT = bytes(range(256)) * 4000  # about a megabyte


class Server(ThreadingHTTPServer):
    """Sends at most `piece` bytes a connection, then cuts it; ignores ranges when told to."""

    def __init__(
        self, content: bytes = CONTENT, piece: int | None = None, ranges: bool = True, status: int = 0
    ):
        self.content, self.piece, self.ranges, self.status = content, piece, ranges, status
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/weights.npz"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self):
        wanted = self.headers.get("Range", "")
        self.server.requests.append(wanted)
        if self.server.status:
            return self.send_error(self.server.status)
        start = int(wanted.removeprefix("bytes=").rstrip("-") or 0) if self.server.ranges else 0
        if start >= len(self.server.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.server.content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            total = len(self.server.content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.piece])
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.001)
    servers = []

    def start(**options) -> Server:
        servers.append(Server(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def quiet(done, total):
    pass


def fetch(server: Server, path):
    return download(server.address, path, progress=quiet)


def test_a_file_arrives_whole_with_its_checksum(serve, tmp_path):
    seen = []
    digest = download(
        serve().address, tmp_path / "w", progress=lambda done, total: seen.append((done, total))
    )
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert digest == hashlib.sha256(CONTENT).hexdigest() == (tmp_path / "w.sha256").read_text().strip()
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_cut_connections_are_resumed_where_they_broke(serve, tmp_path):
    server = serve(piece=100_000)
    fetch(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert len(server.requests) == 11 and server.requests[3] == "bytes=300000-"


def test_a_later_call_goes_on_from_what_an_earlier_one_left(serve, tmp_path):
    (tmp_path / "w.partial").write_bytes(CONTENT[:777])
    server = serve()
    fetch(server, tmp_path / "w")
    assert server.requests == ["bytes=777-"] and (tmp_path / "w").read_bytes() == CONTENT


def test_a_complete_partial_file_is_simply_kept(serve, tmp_path):
    (tmp_path / "w.partial").write_bytes(CONTENT)
    fetch(serve(), tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_it_all_again(serve, tmp_path):
    (tmp_path / "w.partial").write_bytes(b"rubbish" * 100)
    fetch(serve(ranges=False), tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT


def test_a_second_use_asks_no_server_and_checks_the_file(serve, tmp_path):
    server = serve()
    assert fetch(server, tmp_path / "w") == fetch(server, tmp_path / "w")
    assert len(server.requests) == 1
    (tmp_path / "w").write_bytes(CONTENT[:-1] + b"?")
    with refused("file.unreadable", tmp_path / "w", "has changed"):
        fetch(server, tmp_path / "w")


def test_a_file_without_its_checksum_is_not_trusted(serve, tmp_path):
    (tmp_path / "w").write_bytes(CONTENT)
    with refused("file.unreadable", tmp_path / "w", "w.sha256"):
        fetch(serve(), tmp_path / "w")


def test_what_is_not_there_is_an_error_at_once(serve, tmp_path):
    server = serve(status=404)
    with refused("network.refused", server.address, 404):
        fetch(server, tmp_path / "w")
    assert len(server.requests) == 1 and not (tmp_path / "w").exists()


def test_a_busy_server_is_asked_again_and_then_given_up(serve, tmp_path):
    server = serve(status=503)
    with refused("network.unreachable", server.address, 503, "--weights FILE"):
        fetch(server, tmp_path / "w")
    assert len(server.requests) == downloads.TRIES


def test_being_offline_says_what_to_do(tmp_path):
    address = "http://127.0.0.1:9/w.npz"
    with refused("network.unreachable", address, "127.0.0.1", "Offline", "--weights FILE") as caught:
        download(address, tmp_path / "w", progress=quiet)
    assert isinstance(caught.value, DownloadError) and not list(tmp_path.iterdir())


def test_a_server_that_never_answers_is_given_up_within_seconds(tmp_path):
    """As behind a firewall that drops everything: here a queue of connections that is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        start = time.monotonic()
        with refused("network.unreachable", "cannot be reached"):
            download(f"http://127.0.0.1:{full.getsockname()[1]}/w", tmp_path / "w", progress=quiet)
        assert time.monotonic() - start < 4.5


def test_a_published_name_offline_is_one_line_within_seconds(tmp_path):
    """The command itself, where no name can be looked up."""
    code = "import socket, sys, time; start = time.monotonic()\n"
    code += "def lookup(*_, **__): raise socket.gaierror(-2, 'Name or service not known')\n"
    code += "socket.getaddrinfo = lookup\nfrom vitkit.cli import main\ntry: main(sys.argv[1:])\n"
    code += "finally: print(time.monotonic() - start, 'torch' in sys.modules)"
    words = ["predict", "ViT-B/16.augreg-i21k", "a.jpg"]
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for named in (words[1], PUBLISHED[words[1]].address, "--weights FILE", "storage.googleapis.com"):
        assert named in done.stderr
    seconds, torch_imported = done.stdout.split()
    assert float(seconds) < 5 and torch_imported == "False"


def test_only_http_is_spoken(tmp_path):
    with refused("request.value", "file:///etc/hostname", "expected an http"):
        download("file:///etc/hostname", tmp_path / "w", progress=quiet)


def test_published_weights_load_by_name_through_cut_connections(serve, small, tmp_path, monkeypatch):
    model = small()
    vitkit.save(model, tmp_path / "published.npz")
    server = serve(content=(tmp_path / "published.npz").read_bytes(), piece=50_000)
    weight = Weight("ViT-x/8.test", "ViT-Ti/8", server.address, 0.1, 32, "noise")
    monkeypatch.setitem(PUBLISHED, weight.name, weight)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    back = vitkit.load(weight.name)
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(back(images), model(images))
    assert (cache_folder() / "ViT-x_8.test.npz").exists()


def test_the_table_of_published_weights_is_sound():
    from vitkit.models.variants import published_variant

    assert len(PUBLISHED) == 9 + 8 + 20 + 18 + 89 + 4 + 14 + 4
    assert len({weight.address for weight in PUBLISHED.values()}) == len(PUBLISHED)
    for name, weight in PUBLISHED.items():
        assert name.startswith(f"{weight.model}.") and weight.address.startswith("https://")
        assert weight.address.endswith((".npz", ".pth", ".safetensors", ".bin")) and weight.licence
        assert bool(weight.gated) == name.endswith("-original")
        published_variant(weight.model)
    assert PUBLISHED["ViT-B/16.augreg-i21k-i1k-384"].address.endswith(
        "augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
        "--imagenet2012-steps_20k-lr_0.03-res_384.npz"
    )
