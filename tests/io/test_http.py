"""The HTTP client: proxies, certificates, sizes and redirects, against servers of this machine."""

import base64
import shutil
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from refusals import refused

from vitkit.io import http as client
from vitkit.io.http import check_reachable, download, get_range

CONTENT = bytes(range(256)) * 100


class Handler(BaseHTTPRequestHandler):
    """Sends the content, or what it is asked for of it; as a proxy it does so for any address."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.seen.append((self.path, self.headers))
        if server.location:
            return self.head(302, Location=server.location, Content_Length="0")
        if server.chunked:
            self.head(200, Transfer_Encoding="chunked")
            for _ in range(server.chunked):
                self.wfile.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
            return self.wfile.write(b"0\r\n\r\n")
        asked = self.headers.get("Range", "")
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first or 0), int(last or len(CONTENT) - 1) + 1
        if start >= len(CONTENT):
            return self.head(416, Content_Range=f"bytes */{len(CONTENT)}", Content_Length="0")
        body = CONTENT[start:stop]
        place = {"Content_Range": f"bytes {start}-{start + len(body) - 1}/{len(CONTENT)}"} if asked else {}
        self.head(206 if asked else 200, Content_Length=str(len(body)), **place)
        self.wfile.write(body)

    def head(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def served(certificate=None, location="", chunked=0):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.location, server.chunked = [], location, chunked
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    server.address = f"http{'s' * bool(certificate)}://127.0.0.1:{server.server_port}/w"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No proxies but those of a test, and no waiting."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(client, "PAUSE", 0.001)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key, and a certificate for this machine that nobody knows."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    command = ["openssl", *words.split(), "-keyout", path, "-out", path.with_name("cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_name("cert.pem").read_text())
    return path


def test_the_proxy_of_the_environment_is_asked_and_told_who_asks(monkeypatch, tmp_path):
    with served() as proxy:
        monkeypatch.setenv("http_proxy", proxy.address.replace("//", "//me:a%40b@").removesuffix("/w"))
        assert get_range("http://far.invalid/w", 3, 5) == (CONTENT[3:8], len(CONTENT))
        download("http://far.invalid/w", tmp_path / "w")
        check_reachable("http://far.invalid/w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert [path for path, _ in proxy.seen] == ["http://far.invalid/w"] * 2
    word, _, who = proxy.seen[0][1]["Proxy-Authorization"].partition(" ")
    assert word == "Basic" and base64.b64decode(who) == b"me:a@b"


def test_no_proxy_is_heeded(monkeypatch):
    with served() as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert get_range(server.address, 0, 4)[0] == CONTENT[:4]
        assert server.seen[0][0] == "/w"


def test_a_proxy_that_is_not_there_is_named_within_seconds(monkeypatch):
    monkeypatch.setenv("https_proxy", "127.0.0.1:9")
    with refused("network.unreachable", "https://far.invalid/w", "127.0.0.1", "Connection refused"):
        check_reachable("https://far.invalid/w")


def test_a_certificate_that_nobody_knows_is_refused_at_once(certificate, monkeypatch):
    with served(certificate) as server:
        monkeypatch.setattr(client, "pause", lambda *_: pytest.fail("it is tried again"))
        with refused("network.refused", server.address, "certificate"):
            get_range(server.address, 0, 4)
        assert not server.seen


def test_nothing_leads_from_https_to_http(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with served() as open_to_all, served(certificate, open_to_all.address) as server:
        with refused("network.refused", server.address, open_to_all.address):
            get_range(server.address, 0, 4)
        assert len(server.seen) == 1 and not open_to_all.seen
        server.location = ""
        assert get_range(server.address, 0, 4)[0] == CONTENT[:4]  # so it was not the certificate


def test_what_is_longer_than_accepted_is_refused_before_it_is_fetched(tmp_path):
    with served() as server, refused("data.too-large", server.address, len(CONTENT), 1000):
        download(server.address, tmp_path / "w", limit=1000)
    assert not (tmp_path / "w").exists()


def test_a_server_that_sends_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "CHUNK", 0x1000)
    with served(chunked=100) as server, refused("data.too-large", tmp_path / "w", 10_000):
        download(server.address, tmp_path / "w", limit=10_000)
    assert (tmp_path / "w").stat().st_size <= 10_000


def test_what_does_not_fit_the_disk_is_refused_before_it_is_fetched(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(client.shutil, "disk_usage", lambda path: usage._replace(free=99))
    with served() as server, refused("disk.full", tmp_path / "w", f"{len(CONTENT):,}", 99):
        download(server.address, tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_a_part_that_is_longer_than_the_file_is_not_its_part(tmp_path):
    (tmp_path / "w").write_bytes(bytes(len(CONTENT) + 1))
    with served() as server:
        download(server.address, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT


def test_a_file_of_another_length_than_expected_is_refused(tmp_path):
    with served() as server, refused("network.changed", server.address, len(CONTENT), 77):
        download(server.address, tmp_path / "w", size=77)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:99999/x", "http://[::1/x", "ftp://127.0.0.1/x", "http:///x"]
)
def test_what_is_no_address_is_refused(address):
    with refused("request.value", address):
        get_range(address, 0, 4)


def test_nothing_heavy_is_imported_before_something_is_fetched():
    code = "import sys, vitkit.weights.published, vitkit.io.files, vitkit.io.cache\n"
    code += "print({'torch', 'numpy', 'urllib3'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
