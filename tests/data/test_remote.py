"""Shards from a server that drops, delays, lies and forgets: the same bytes, or an error that says why."""

import hashlib
import http.server
import io
import os
import re
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from vitkit.data.decode import BadImage
from vitkit.data.loader import train_batches
from vitkit.data.order import Order
from vitkit.data.sources.index import INDEX, open_index
from vitkit.data.sources.remote import Cache, mirror
from vitkit.data.sources.shard_folders import verify
from vitkit.data.sources.shards import write_shards
from vitkit.data.sources.source import from_rows
from vitkit.data.views import View
from vitkit.datasets.opening import open_data
from vitkit.io import http as client
from vitkit.io.cache import size_of
from vitkit.io.http import NetworkError, get_range


class Handler(http.server.BaseHTTPRequestHandler):
    """Files with ranges; `server.faults` is a list of what goes wrong, one for each request."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # header and body in one packet

    def do_GET(self):
        server = self.server
        with server.turn:
            server.seen.append((self.path, self.headers.get("Range"), self.client_address[1]))
            fault = server.faults.pop(0) if server.faults else server.always
        path = server.root / self.path.split("?")[0].lstrip("/")
        if fault == "drop":
            self.close_connection = True
            return None
        if isinstance(fault, tuple):
            return self.answer(fault[0], b"", **fault[1])
        if isinstance(fault, int):
            return self.answer(fault, b"sorry")
        if not path.is_file():
            return self.answer(404, b"")
        content = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if fault == "whole" or not match:
            self.close_connection = fault == "short"
            return self.answer(200, content, len(content) // 2 if fault == "short" else None)
        start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
        if start >= len(content):
            return self.answer(416, b"")
        body = content[start:stop]
        output = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault == "shifted":
            output = {"Content-Range": f"bytes {start + 1}-{stop}/{len(content)}"}
        if fault == "short":
            self.close_connection = True
            return self.answer(206, body, len(body) // 2, **output)
        if fault == "slow":
            time.sleep(1.0)
        return self.answer(206, body, **output)

    def answer(self, status, body, sent=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if sent is None else body[:sent])

    def log_message(self, *_):
        pass


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def shards(tmp_path):
    rows = [(f"{i}.jpg", f"class {i % 3}") for i in range(40)]
    data = from_rows("x", rows, lambda key: picture(int(key[:-4])))
    write_shards(
        {"train": data.take(np.arange(32)), "test": data.take(np.arange(32, 40))},
        tmp_path / "shards",
        images=8,
    )
    return tmp_path / "shards"


@pytest.fixture
def server(shards, monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.001)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.root, server.faults, server.always, server.seen = shards, [], None, []
    server.turn = threading.Lock()
    server.address = f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def batches(source, **options):
    view = View(size=(16, 16), crop="inception")
    return list(islice(train_batches(source, view, Order(len(source), 8, seed=3), **options), 6))


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_are_those_of_the_disk_bit_for_bit(server, shards, cache, workers):
    far, near = open_data(server.address, cache=cache), open_data(shards)
    assert set(far) == set(near) and list(far["train"].keys) == list(near["train"].keys)
    far["train"].fetch(0)  # a connection that workers must not inherit
    for a, b in zip(batches(far["train"], workers=workers), batches(near["train"]), strict=True):
        assert torch.equal(a["image"], b["image"]) and torch.equal(a["label"], b["label"])


def test_a_sample_is_one_request_and_then_none(server, cache):
    source = open_data(server.address, cache=cache)["train"]
    index = open_index(server.root / INDEX)[1]["train"]
    server.seen.clear()
    for _ in range(2):
        for i in range(32):
            assert source.fetch(i) == picture(i)
    start, size = (int(index.columns[name][0]) for name in ("offset", "length"))
    assert len(server.seen) == 32 and server.seen[0][1] == f"bytes={start}-{start + size - 1}"
    assert len({port for _, _, port in server.seen}) == 1  # one connection
    server.seen.clear()
    again = open_data(server.address, cache=cache)["train"]
    assert [again.fetch(i) for i in range(32)] == [picture(i) for i in range(32)]
    assert len(server.seen) == 1  # is the index still the same?


def test_without_a_cache_every_fetch_is_a_request(server, tmp_path):
    source = open_data(server.address, cache=Cache(tmp_path / "cache", limit=0))["train"]
    server.seen.clear()
    assert source.fetch(3) == source.fetch(3) == picture(3) and len(server.seen) == 2
    assert not list((tmp_path / "cache").rglob("*.tar"))


def test_a_torn_write_in_the_cache_is_a_hole(server, cache):
    source = open_data(server.address, cache=cache)["train"]
    source.fetch(0)
    (copy,) = cache.folder.rglob("*.tar")
    copy.write_bytes(copy.read_bytes()[:-20] + b"\0" * 20)
    server.seen.clear()
    assert source.fetch(0) == picture(0) and len(server.seen) == 1
    os.truncate(copy, 10)
    assert source.fetch(0) == picture(0) and len(server.seen) == 2


def test_the_least_recently_used_copies_go_first(server, tmp_path):
    cache = Cache(tmp_path / "cache", limit=4 * 4096)  # a hole costs nothing, a sample a block or two
    source = open_data(server.address, cache=cache)["train"]
    numbers = open_index(server.root / INDEX)[1]["train"].columns["shard"].tolist()
    for i in range(32):
        assert source.fetch(i) == picture(i)
        time.sleep(0.002)
        copies = list(cache.folder.rglob("*.tar"))
        last = f"train-{numbers[i]:06d}.tar"
        assert sum(size_of(copy.stat()) for copy in copies) <= cache.limit or copies[0].name == last
    assert (next(iter(cache.folder.iterdir())) / INDEX).exists()


FAULTS = ["drop", "short", 500, 502, 503, 429, (503, {"Retry_After": "0"})]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_goes_wrong_for_a_while_is_tried_again(server, cache, fault):
    source = open_data(server.address, cache=cache)["train"]
    server.faults = [fault] * 3
    server.seen.clear()
    assert source.fetch(5) == picture(5) and len(server.seen) == 4


def test_a_storm_of_faults_changes_no_byte(server, cache):
    rng = np.random.default_rng(0)
    source = open_data(server.address, cache=cache)["train"]
    server.faults = [[*FAULTS, "flip", *[None] * 8][i] for i in rng.integers(0, 16, 60)]
    assert [source.fetch(i) for i in range(32)] == [picture(i) for i in range(32)]


def test_a_request_that_takes_too_long_is_tried_again(server, cache, monkeypatch):
    source = open_data(server.address, cache=cache)["train"]
    monkeypatch.setattr(client, "TIMEOUT", 0.3)
    server.faults = ["slow"]
    server.seen.clear()
    assert source.fetch(1) == picture(1) and len(server.seen) == 2


@pytest.mark.parametrize("fault", ["drop", "short", 503], ids=str)
def test_what_stays_wrong_is_an_error_that_says_so(server, cache, fault, monkeypatch):
    source = open_data(server.address, cache=cache)["train"]
    server.always = fault
    server.seen.clear()
    with refused("network.unreachable", f"cannot fetch {server.address}train-", "after 8 tries: ") as caught:
        source.fetch(5)
    assert len(server.seen) == 8 and isinstance(caught.value, OSError)  # so that commands end with 1
    assert str(caught.value).partition("tries: ")[2]


def test_pauses_grow_and_vary(server, monkeypatch):
    paused = []
    monkeypatch.setattr(client.time, "sleep", paused.append)
    monkeypatch.setattr(client, "PAUSE", 1.0)
    server.always = 503
    for _ in range(3):
        with pytest.raises(NetworkError):
            get_range(server.address + "x", 0, 10)
    tries = np.array(paused).reshape(3, 6)  # the second try follows the first at once
    assert (tries >= 0.5 * 2.0 ** np.arange(1, 7)).all() and tries.max() <= 60 and len(set(tries[:, 0])) == 3
    for asked, waited in (("17", 17), ("86400", 60)):  # no server makes us wait for a day
        paused.clear()
        server.always = (429, {"Retry_After": asked})
        with pytest.raises(NetworkError):
            get_range(server.address + "x", 0, 10)
        assert paused == [waited] * 7
    server.always = (503, {"Retry_After": "soon"})
    with refused("network.unreachable", "503"):
        get_range(server.address + "x", 0, 10)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (404, "the server answered 404"),
        (403, "the server answered 403"),
        ("whole", "must support byte ranges"),
        ("shifted", "must support byte ranges"),
        ((302, {"Location": "file:///etc/passwd"}), "'file:///etc/passwd', which is not followed"),
        ((302, {"Location": "ftp://127.0.0.1/x"}), "which is not followed"),
        ((301, {"Location": "/again"}), "redirects more than 5 times"),
    ],
    ids=str,
)
def test_what_cannot_go_better_is_an_error_at_once(server, cache, fault, message):
    source = open_data(server.address, cache=cache)["train"]
    server.always = fault
    server.seen.clear()
    with refused("network.refused", message):
        source.fetch(5)
    assert len(server.seen) <= 6


def test_a_redirect_is_followed(server, cache):
    source = open_data(server.address, cache=cache)["train"]
    index = open_index(server.root / INDEX)[1]["train"]
    name = index.shards[index.columns["shard"][2]].file
    server.faults = [(302, {"Location": f"{server.address}{name}?signed=1"})]
    server.seen.clear()
    assert source.fetch(2) == picture(2) and server.seen[1][0] == f"/{name}?signed=1"


def test_a_shard_replaced_at_the_server_is_noticed(server, cache):
    source = open_data(server.address, cache=cache)["train"]
    index = open_index(server.root / INDEX)[1]["train"]
    number = int(index.columns["shard"][0])
    path = server.root / index.shards[number].file
    content = path.read_bytes()
    path.write_bytes(content[:-512])
    with refused("network.changed", f"{path.name}: {len(content) - 512} bytes", len(content)):
        source.fetch(0)
    path.write_bytes(bytes(len(content)))
    with pytest.raises(BadImage, match=rf"{path.name}!0\.jpg.*its index says"):
        source.fetch(0)
    path.write_bytes(content[:600])
    with refused("network.changed", path.name):
        source.fetch(int(np.flatnonzero(index.columns["shard"] == number)[-1]))


def test_an_index_that_changed_is_fetched_anew_and_a_cut_one_is_not_kept(server, cache, tmp_path):
    first = open_data(server.address, cache=cache)
    good = (server.root / INDEX).read_bytes()
    (server.root / INDEX).write_bytes(good[:-64])
    with refused("data.corrupt", INDEX, len(good) - 64):
        open_data(server.address, cache=Cache(tmp_path / "other"))
    flipped = bytearray(good)
    flipped[-100] ^= 1
    (server.root / INDEX).write_bytes(flipped)
    with refused("network.changed", INDEX, "damaged in transfer"):
        open_data(server.address, cache=Cache(tmp_path / "other"))
    assert not list((tmp_path / "other").rglob(INDEX))
    (server.root / INDEX).write_bytes(good.replace(b"vitkit-shards 1", b"vitkit-shards 3", 1))
    with pytest.raises(ValueError, match="version 3"):
        open_data(server.address, cache=cache)
    evil = re.sub(rb" [0-9a-f]{64}\n", b" " + b"../" * 21 + b"x\n", good, count=1)
    (server.root / INDEX).write_bytes(evil)
    with pytest.raises(ValueError, match="no SHA-256"):
        open_data(server.address, cache=cache)
    (server.root / INDEX).unlink()
    with refused("network.refused", "404"):
        open_data(server.address, cache=cache)
    assert first["train"].fetch(0) == picture(0)


def test_a_mirror_is_the_folder_itself_and_goes_on_where_it_was_cut(server, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "CHUNK", 5000)
    server.faults = [None] * 3 + ["short", 404]
    with refused("network.refused", "404"):
        mirror(server.address, tmp_path / "copy")
    assert not (tmp_path / "copy" / INDEX).exists()
    (kept,) = (tmp_path / "copy").glob("*.partial")
    assert (size := kept.stat().st_size) and shards.joinpath(kept.stem).read_bytes().startswith(
        kept.read_bytes()
    )
    server.faults = [None, "short", 503]
    server.seen.clear()
    output = []
    mirror(server.address, tmp_path / "copy", advance=output.append)
    assert (f"/{kept.stem}", f"bytes={size}-") in {seen[:2] for seen in server.seen}
    assert sum(output) == 40 and verify(tmp_path / "copy") == []
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {INDEX, *(p.name for p in shards.glob("*.tar"))}
    for path in [*shards.glob("*.tar"), shards / INDEX]:
        assert path.read_bytes() == (tmp_path / "copy" / path.name).read_bytes()
    path = shards / "train-000000.tar"
    path.write_bytes(bytes(path.stat().st_size))
    with refused("network.changed", "train-000000.tar", hashlib.sha256(path.read_bytes()).hexdigest()):
        mirror(server.address, tmp_path / "second")


def test_addresses_of_other_kinds_are_not_fetched():
    for address in ("file:///etc/passwd", "ftp://host/x", "http:///x"):
        with refused("request.value", address):
            get_range(address, 0, 10)


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.001)
    with refused("network.unreachable", "http://127.0.0.1:9/x/", "Connection refused"):
        open_data("http://127.0.0.1:9/x/")


def test_an_index_longer_than_its_header_says_is_refused_before_it_is_fetched(server, tmp_path):
    good = (server.root / INDEX).read_bytes()
    with (server.root / INDEX).open("r+b") as file:
        file.truncate(5 * 10**7)  # a hole, which would be fetched as bytes
    asked = len(server.seen)
    with refused("data.corrupt", f"{INDEX}: 50000000 bytes"):
        open_data(server.address, cache=Cache(tmp_path / "other"))
    assert len(server.seen) - asked <= 2
    assert sum(p.stat().st_size for p in (tmp_path / "other").rglob("*") if p.is_file()) < len(good)


def test_a_server_that_is_not_there_ends_a_command_with_one(monkeypatch, capsys):
    from vitkit.cli.verbs import main

    monkeypatch.setattr(client, "PAUSE", 0.001)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "http://127.0.0.1:9/x/"])
    output = capsys.readouterr().err
    assert ended.value.code == 1 and output.count("\n") == 1 and "http://127.0.0.1:9/x/" in output
