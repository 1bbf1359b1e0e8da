"""Parts of the service by themselves: batches, models that are opened and watched, decoders within limits."""

import os
import signal
import time
import zlib
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from refusals import refused

from vitkit.cli.flags import FLAGS
from vitkit.data.decode import BadImage
from vitkit.data.views import View
from vitkit.inference.predict import logits
from vitkit.options import SERVICE, size_in_bytes
from vitkit.server.admission import Batcher, Job
from vitkit.server.decode_worker import FAILED, encode_request, without_addresses
from vitkit.server.decoder import Decoder, Worker
from vitkit.server.guard import Guard
from vitkit.server.monitoring import Metrics
from vitkit.server.served_model import copy_model, file_stamps, open_served, without_path
from vitkit.server.settings import Settings, whole
from vitkit.weights.save import save


@pytest.fixture
def place(small, tmp_path):
    save(small(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def served(place):
    return open_served(Settings(model=str(place), device="cpu"))


def job(served, kind="predict", seed=0, seconds=60.0) -> Job:
    pixels = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return Job(kind, served, pixels, time.monotonic() + seconds)


def test_a_batch_holds_one_kind_of_one_model_and_keeps_the_order(served):
    other = replace(served, name="other")
    batcher = Batcher(2, 0.0, Metrics())
    asked = [("predict", served), ("embed", served), ("predict", other), ("predict", served),
             ("attention", served), ("predict", served), ("attention", served)]  # fmt: skip
    jobs = [job(who, kind) for kind, who in asked]
    for one in jobs:
        batcher.submit(one)
    batcher.stop()
    taken = [[jobs.index(one) for one in batcher.next_batch()] for _ in range(6)]
    assert taken == [[0, 3], [1], [2], [4], [5], [6]]
    assert batcher.next_batch() == []


def test_every_job_is_answered_and_those_that_nobody_wants_are_left_out(served):
    batcher = Batcher(8, 0.0, Metrics())
    good, late, gone, looks = job(served), job(served, seconds=-1), job(served), job(served, "attention", 3)
    gone.future.cancel()
    for one in (good, late, gone, looks):
        batcher.submit(one)
    batcher.stop()
    batcher.start()
    batcher.join(20)
    assert torch.allclose(good.future.result(0), logits(served.model, good.pixels[None])[0], atol=1e-6)
    with pytest.raises(TimeoutError):
        late.future.result(0)
    with pytest.raises(CancelledError):
        gone.future.result(0)
    assert looks.future.result(0)[0]["grid"] == [4, 4]


def test_an_error_of_the_model_reaches_all_who_wait_and_the_next_are_answered(served):
    batcher = Batcher(8, 0.0, Metrics())
    wrong = [replace(job(served), pixels=torch.zeros(3, 5, 33, dtype=torch.uint8)) for _ in range(2)]
    for one in wrong:
        batcher.submit(one)
    batcher.start()
    for one in wrong:
        with refused("model.input", "height 5"):
            one.future.result(20)
    assert batcher.submit(job(served)).result(20).shape == (5,)
    batcher.stop()


def test_weights_are_in_memory_and_not_in_the_file(served, place):
    before = logits(served.model, job(served).pixels[None])
    with place.open("r+b") as file:
        file.truncate(10)  # a mapped file would end the process here
    assert torch.equal(logits(served.model, job(served).pixels[None]), before)
    assert not any(p.requires_grad for p in served.model.parameters())


def test_a_model_that_gives_no_numbers_is_refused(small, tmp_path):
    model = small()
    with torch.no_grad():
        model.head.weight.fill_(3e38)
    save(model, tmp_path / "model.safetensors")
    with refused("weights.values", tmp_path.name):
        open_served(Settings(model=str(tmp_path), device="cpu"))


def test_a_change_of_the_file_is_seen_and_its_copy_is_whole(place, tmp_path):
    first = file_stamps(str(place))
    assert (
        first == file_stamps(str(place)) == file_stamps(str(tmp_path)) and first
    )  # a run folder stands for its model
    os.utime(place, (1, 1))
    assert file_stamps(str(place)) != first
    folder = tmp_path / "copy"
    folder.mkdir()
    with open(copy_model(str(tmp_path), folder), "rb") as file:
        assert file.read() == place.read_bytes()
    assert file_stamps("no such file") == () and copy_model("ViT-B/16", folder) == "ViT-B/16"


def test_where_a_model_came_from_is_told_without_folders():
    assert without_path("/home/someone/secret/b16.npz") == "b16.npz"
    assert without_path("runs/photos/model.safetensors") == "model.safetensors"
    assert without_path("ViT-B/16 from scratch") == "ViT-B/16 from scratch"
    assert without_path("https://example.org/a.npz") == "https://example.org/a.npz"


@pytest.mark.parametrize(
    ("text", "size"), [("10MB", 10**7), ("500 kb", 500_000), ("2e6", 2 * 10**6), ("7000", 7000)]
)
def test_sizes_are_read(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "1TB", "-1", "1e999", "1.2.3MB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"--max-bytes .*: expected"):
        size_in_bytes(text)


def test_hosts_that_others_reach_need_a_token():
    assert Settings(model="m").local and Settings(model="m", host="::1").local
    assert "[::1]" in Settings(model="m", host="::1").allowed_hosts
    open_to_all = Settings(model="m", host="0.0.0.0", token="x" * 16)
    assert open_to_all.allowed_hosts == ["*"]
    assert "photos.example" in replace(open_to_all, allow_host=("photos.example",)).allowed_hosts
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with refused("request.missing", host, "VITKIT_TOKEN", "openssl rand"):
            Settings(model="m", host=host, token="x" * 15)


@pytest.mark.parametrize(
    "name",
    ["", " ", "http://photos.example", "photos.example/path", "photos.example:0", "photos.example:65536",
     "photos.example:http", "a b", "*", "*.", "*example.org", "a.*.org", "photos.*", "**.org", "-a.org",
     "a..org", "2001:db8::1", "[2001:db8::1", "[photos]", "a,b", "photos.example\n"],
)  # fmt: skip
def test_names_that_no_host_can_have_are_refused(name):
    with refused("request.missing" if name == "*" else "request.value", f"--allow-host {name!r}"):
        Settings(model="m", allow_host=("fine.example", name))


def test_names_of_hosts_may_have_wildcards_ports_and_brackets():
    names = ("photos.example", "*.example.org", "Photos.Example:8443", "192.0.2.1", "[2001:db8::1]:80", "a_b")
    known = Settings(model="m", allow_host=names).allowed_hosts[3:]
    assert known == ["photos.example", "*.example.org", "Photos.Example", "192.0.2.1", "[2001:db8::1]", "a_b"]
    assert Settings(model="m", allow_host=("*",), token="secret").allowed_hosts[-1] == "*"


@pytest.mark.parametrize("name", SERVICE)
def test_numbers_out_of_range_are_refused_by_name(name):
    allowed, flag = SERVICE[name], f"--{name.replace('_', '-')}"
    for good in (allowed.least, allowed.largest):
        assert getattr(Settings(model="m", **{name: good}), name) == good
    for wrong in (allowed.least - 1, allowed.largest + 1, -1, float("nan"), float("inf"), -float("inf")):
        with refused("request.value", f"{flag} {wrong}", "number from"):
            Settings(model="m", **{name: wrong})


def test_the_command_line_takes_the_numbers_that_the_service_takes():
    for name, allowed in SERVICE.items():
        flag = f"--{name.replace('_', '-')}"
        assert flag not in FLAGS or name == "workers"  # which other verbs have too, with a range of their own
        assert FLAGS[f"serve {flag}"] == allowed or name == "max_bytes"
    allowed = SERVICE["max_bytes"]
    for size in (allowed.least, allowed.largest):
        assert size_in_bytes(f"{size}") == size
    for size in (allowed.least - 1, allowed.largest + 1):
        with pytest.raises(ValueError, match=f"--max-bytes '{size}'"):
            size_in_bytes(f"{size}")


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True), ("LOCALHOST:8000", True), ("[::1]:9", True), ("a.example.org:80", True),
        ("A.B.Example.Org", True), ("[2001:db8::1]:443", True), ("example.org", False), ("", False),
        ("badexample.org", False), ("a.example.org.evil", False), ("localhost:99999", False),
        ("localhost:80:80", False), ("evil@localhost", False), ("localhost, evil", False),
    ],
)  # fmt: skip
def test_a_host_is_known_by_its_names_alone(host, known):
    settings = Settings(model="m", allow_host=("*.example.org", "[2001:db8::1]"))
    guard = Guard(None, settings, Metrics(), lambda: False)
    scope = {"type": "http", "headers": [(b"host", host.encode())]}
    if known:
        return guard.check_host(scope)
    with refused("server.request", "--allow-host") as caught:
        guard.check_host(scope)
    assert caught.value.status == 400


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_numbers_that_are_not_whole_are_refused_by_name(value):
    assert whole("max-pixels", 2e7) == 20_000_000
    with refused("request.value", "--max-pixels", value):
        whole("max-pixels", value)


def test_errors_of_decoders_hold_no_address():
    assert without_addresses("cannot identify <_io.BytesIO object at 0x7f00aa>") == "cannot identify the file"


@pytest.mark.slow
def test_decoders_have_a_limit_and_an_end():
    from malformed import chunk

    rows = 20_000  # 400 megapixels of nothing, in 400 kB
    head = rows.to_bytes(4) * 2 + bytes([8, 0, 0, 0, 0])
    data = zlib.compress(bytes(rows * (rows + 1)), 1)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    view = View(size=(32, 32), crop="squash")
    worker = Worker(max_pixels=1000)
    try:
        assert worker.request(encode_request(bomb, view, 10**9), 10**6, 60).startswith(
            FAILED
        )  # no memory for it
        assert worker.request(encode_request(b"text", view, 10**9), 10**6, 60).startswith(
            FAILED + b"not-an-image"
        )
    finally:
        worker.kill()
    decoder = Decoder(1, 1000, Metrics())
    try:
        with refused("image.too-large", 1000):
            decoder.submit(bomb, view).result(60)
        (worker,) = decoder.workers
        worker.process.kill()
        with refused("image.unreadable"):  # by another one
            decoder.submit(b"text", view).result(60)
    finally:
        decoder.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "deaths", "told"),
    [
        ("SIGSEGV", 1, "not an image"), ("SIGSEGV", 2, "could not be decoded"),
        ("SIGKILL", 4, "not an image"), ("SIGKILL", 5, "could not be decoded"),
    ],
)  # fmt: skip
def test_an_image_may_crash_one_decoder_and_more_may_be_killed_while_they_have_it(
    monkeypatch, number, deaths, told
):
    died = []

    def request(self, *args):
        if len(died) < deaths:
            died.append(self)
            os.kill(self.process.pid, getattr(signal, number))
        return as_ever(self, *args)

    as_ever = Worker.request
    monkeypatch.setattr(Worker, "request", request)
    metrics = Metrics()
    decoder = Decoder(1, 1000, metrics)
    try:
        with pytest.raises(BadImage, match=told):
            decoder.submit(b"text", View(size=(32, 32), crop="squash")).result(60)
        assert metrics.decoder_restarts._value.get() == deaths == len(died)
    finally:
        decoder.close()


@pytest.mark.slow
def test_where_no_process_may_be_started_requests_are_told_to_come_again_and_later_ones_are_answered(
    monkeypatch,
):
    def no_more(max_pixels):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    decoder, view = Decoder(1, 1000, Metrics()), View(size=(32, 32), crop="squash")
    try:
        (worker,) = decoder.workers
        worker.process.kill()
        with monkeypatch.context() as limited:
            limited.setattr("vitkit.server.decoder.Worker", no_more)
            for _ in range(2):
                with refused("server.busy") as told:
                    decoder.submit(b"text", view).result(60)
                assert told.value.status == 503
        with refused("image.unreadable"):
            decoder.submit(b"text", view).result(60)
    finally:
        decoder.close()


@pytest.mark.slow
def test_another_engine_says_the_same(place):
    pytest.importorskip("onnxruntime")
    settings = Settings(model=str(place), device="cpu", engine="onnxruntime")
    served = open_served(settings)
    images = torch.stack([job(served, seed=n).pixels for n in range(3)])
    assert served.describe(settings)["engine"] == "onnxruntime"
    assert torch.allclose(served.engine(images), logits(served.model, images), atol=1e-4)


def test_a_decoder_is_started_also_when_what_it_is_forked_from_has_just_died(monkeypatch):
    tried = []

    def start(max_pixels):
        tried.append(1)
        if len(tried) < 3:
            raise EOFError("unexpected EOF")
        return Worker(max_pixels)

    monkeypatch.setattr("vitkit.server.decoder.Worker", start)
    decoder = Decoder(1, 1000, Metrics())
    assert len(tried) == 3 and decoder.idle.get().process.is_alive()
    decoder.close()
    monkeypatch.setattr("vitkit.server.decoder.TRIES", 2)
    tried.clear()
    with pytest.raises(EOFError):
        Decoder(1, 1000, Metrics())
