"""Every endpoint, and every refusal, of a real service on a loopback port."""

import base64
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO

import httpx
import numpy as np
import pytest
import torch
from launch import HOST, Service, picture, randomised, service, tiny
from PIL import Image
from refusals import refused

import vitkit
from vitkit.cli.verbs import main
from vitkit.commands.look import normalized
from vitkit.data.names import readable_suffixes
from vitkit.inference.predict import pixels
from vitkit.inspection.attention import attention_rollout, head_maps
from vitkit.inspection.subject import class_number
from vitkit.models.variants import build
from vitkit.report.overlay import stretched
from vitkit.server.guard import HEADERS
from vitkit.server.served_model import attention_objection
from vitkit.weights.load import load
from vitkit.weights.save import save

LABELS = ("cat", "dog <b>", "owl \u2603", "7", "</script>")
TOKEN = "correct-horse-battery"
JPEG = {"content-type": "image/jpeg"}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    model = tiny()
    model.labels = LABELS
    path = tmp_path_factory.mktemp("served") / "animals.safetensors"
    save(model, path)
    return path


@pytest.fixture(scope="module")
def both(model_file):
    """Two services, started side by side: one open, and a ResNet without labels behind a token."""
    sizes = {"blocks": (1, 1), "width": 64, "classes": 5, "image_size": (32, 32)}
    resnet = model_file.with_name("resnet.safetensors")
    save(randomised(build("BiT-R50x1", **sizes), 0.05), resnet)
    wanted = [
        service(model_file, "--max-bytes", "300kB", "--max-pixels", "1e6"),
        service(resnet, "--workers", "1", token=TOKEN),
    ]
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        yield list(pool.map(stack.enter_context, wanted))


@pytest.fixture(scope="module")
def running(both):
    return both[0]


@pytest.fixture(scope="module")
def guarded(both):
    return both[1]


@pytest.fixture
def ask(running):
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


def as_json(*images: tuple[str, bytes]) -> dict:
    return {"images": [{"name": name, "data": base64.b64encode(data).decode()} for name, data in images]}


def flat(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_a_raw_image_is_told_what_predict_tells(ask, model_file):
    model = load(model_file)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        content = picture(1, kind=kind)
        answer = ask.post(
            "/v1/predict?top=3", content=content, headers={"content-type": f"image/{kind.lower()}"}
        )
        output = answer.json()
        assert answer.status_code == 200 and output["model"] == "animals.safetensors"
        (result,) = output["results"]
        wanted = vitkit.predict(model, content, top=3)
        assert result["image"] == "image"
        assert [one["label"] for one in result["top"]] == [label for label, _ in wanted]
        chances = [one["probability"] for one in result["top"]]
        assert chances == pytest.approx([chance for _, chance in wanted], abs=1e-5)  # another thread count


def test_reject_marks_what_is_below_a_threshold(ask, model_file):
    content = picture(1)
    (_, confidence), *_ = vitkit.predict(load(model_file), content, top=1)
    for threshold, rejected in ((confidence + 0.01, True), (confidence - 0.01, False)):
        answer = ask.post(f"/v1/predict?top=2&reject={threshold}", content=content, headers=JPEG)
        (result,) = answer.json()["results"]
        assert result["rejected"] is rejected and len(result["top"]) == 2
    assert "rejected" not in ask.post("/v1/predict", content=content, headers=JPEG).json()["results"][0]
    for value, code in (("model", "model.unsupported"), ("2", "request.value"), ("nan", "request.value")):
        answer = ask.post(f"/v1/predict?reject={value}", content=content, headers=JPEG)
        assert (answer.status_code, answer.json()["code"]) == (422, code)  # the model has no threshold
    assert ask.get("/v1/model").json()["reject_below"] is None


def test_forms_and_json_take_many_images_and_name_those_that_cannot_be_read(ask, model_file):
    model = load(model_file)
    names = ["a.jpg", "<img src=x onerror=alert(1)>.jpg", "../../etc/passwd", "snow\u2603.png"]
    contents = [picture(n, kind="PNG" if n == 3 else "JPEG") for n in range(3)] + [b"no image at all"]
    for options in (
        {"files": [("files", (n, c)) for n, c in zip(names, contents, strict=True)]},
        {"json": as_json(*zip(names, contents, strict=True))},
    ):
        results = ask.post("/v1/predict", **options).json()["results"]
        assert [one["image"] for one in results] == names
        for result, content in zip(results[:3], contents[:3], strict=True):
            best = vitkit.predict(model, content)[0]
            assert result["top"][0]["label"] == best[0]
            assert result["top"][0]["probability"] == pytest.approx(best[1], abs=1e-5)
        assert results[3]["code"] == "image.unreadable" and results[3]["error"] and "top" not in results[3]


def test_features_are_those_that_the_head_sees(ask, model_file):
    model, content = load(model_file), picture(4)
    output = ask.post("/v1/embed", files=[("x", ("a", content))]).json()["results"][0]
    with torch.inference_mode():
        wanted = model.features(normalized(model, pixels(content, model)[None]))[0]
    assert output["image"] == "a"
    torch.testing.assert_close(torch.tensor(output["features"]), wanted, atol=1e-5, rtol=1e-5)


def test_attention_is_shown_by_layer_and_head_and_class(ask, model_file):
    model, content = load(model_file), picture(5)
    output = ask.post("/v1/attention", params={"target": "owl \u2603"}, content=content, headers=JPEG).json()
    image = normalized(model, pixels(content, model)[None])
    assert output["grid"] == [4, 4] and output["image_size"] == [32, 32]
    maps = np.frombuffer(base64.b64decode(output["maps"]), np.uint8)
    maps = maps.reshape(output["layers"], output["heads"], 4, 4)
    for layer in range(2):
        for head, heat in enumerate(head_maps(model, image, layer=layer)[0]):
            assert np.abs(maps[layer, head] - 255 * stretched(heat)).max() <= 0.51
    assert output["rollout"] == pytest.approx(stretched(attention_rollout(model, image)[0]).ravel(), abs=1e-4)
    assert [one["label"] for one in output["top"]] == [label for label, _ in vitkit.predict(model, content)]
    by_class = vitkit.inspect(model, content, target="owl \u2603").class_map
    assert output["class_map"] == pytest.approx(stretched(by_class).ravel(), abs=1e-4)
    best = class_number(model, output["top"][0]["label"])
    by_number = ask.post(f"/v1/attention?target={best}", content=content, headers=JPEG).json()["class_map"]
    assert by_number == ask.post("/v1/attention", content=content, headers=JPEG).json()["class_map"]


def test_a_label_goes_before_a_number(model_file):
    model = load(model_file)
    assert class_number(model, "7") == 3 and class_number(model, "0") == 0


@pytest.mark.parametrize("name", ["5", "-1", "lion", "", "\u0663", "9" * 30])
def test_classes_that_are_none_are_refused(model_file, name):
    for close in (True, False):
        with refused("request.unknown", "no class", name[:80]):
            class_number(load(model_file), name, close)


def test_models_without_such_attention_say_so(small, small_resnet):
    assert attention_objection(small()) == ""
    assert "ResNet" in attention_objection(small_resnet())
    assert "axial" in attention_objection(small("Axial-ViT-Ti/8", head="gap", attention="axial"))
    assert "depth 0" in attention_objection(small(depth=0))


REFUSED = {
    "no image": ("/v1/predict", b"hello", "image/jpeg", 422, "image.unreadable", "image"),
    "empty": ("/v1/predict", b"", "image/jpeg", 422, "image.unreadable", "empty"),
    "cut": ("/v1/predict", picture(1)[:300], "image/jpeg", 422, "image.unreadable", "truncated"),
    "PDF": ("/v1/predict", b"%PDF-1.7", "application/octet-stream", 422, "image.unreadable", "PDF"),
    "too many pixels": ("/v1/predict", flat(1001, 1000), "image/png", 422, "image.too-large", "1000000"),
    "as a JPEG": ("/v1/embed", picture(1, (1001, 1000)), "image/jpeg", 422, "image.too-large", "1000000"),
    "too large": ("/v1/predict", bytes(300_001), "image/jpeg", 413, "server.too-large", "300000 bytes"),
    "text": ("/v1/predict", b"hello", "text/plain", 415, "server.request", "multipart/form-data"),
    "form fields": ("/v1/predict", b"a=b", "application/x-www-form-urlencoded", 415, "server.request",
                    "image/jpeg"),
    "no boundary": ("/v1/predict", b"a", "multipart/form-data", 422, "server.request", "boundary"),
    "no form": ("/v1/predict", b"a", "multipart/form-data; boundary=b", 422, "server.request", "multipart"),
    "not JSON": ("/v1/predict", b"{", "application/json", 422, "server.request", "not JSON"),
    "deep JSON": ("/v1/predict", b"[" * 100_000, "application/json", 422, "server.request", "not JSON"),
    "other JSON": ("/v1/predict", b"[1]", "application/json", 422, "server.request", "images"),
    "no images": ("/v1/predict", b'{"images": []}', "application/json", 422, "server.request", "no image"),
    "no data": ("/v1/predict", b'{"images": [{"name": "a"}]}', "application/json", 422, "server.request",
                "images[0]"),
    "no base64": ("/v1/predict", b'{"images": [{"data": "!"}]}', "application/json", 422, "server.request",
                  "base64"),
    "33 images": ("/v1/predict", json.dumps(as_json(*[("a", b"")] * 33)).encode(), "application/json", 422,
                  "server.request", "at most 32"),
    "top 0": ("/v1/predict?top=0", b"", "image/jpeg", 422, "request.value", "top"),
    "top x": ("/v1/predict?top=x", b"", "image/jpeg", 422, "request.value", "top"),
    "no class": ("/v1/attention?target=lion", picture(1), "image/jpeg", 422, "request.unknown", "lion"),
    "attention of text": ("/v1/attention", b"hello", "image/jpeg", 422, "image.unreadable", "image"),
    "attention of two": ("/v1/attention", json.dumps(as_json(("a", b""), ("b", b""))).encode(),
                         "application/json", 422, "server.request", "one image"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_met_is_refused_with_a_reason(ask, running, case):
    path, body, kind, status, code, text = REFUSED[case]
    answer = ask.post(path, content=body, headers={"content-type": kind})
    output = answer.json()
    assert answer.status_code == status and output["code"] == code and text in output["error"], output
    assert output["request"] == answer.headers["x-request-id"]
    assert running.logged(output["request"])
    assert "Traceback" not in running.log.read_text() and "/" + "site-packages" not in answer.text


def test_34_files_and_packed_bodies_are_refused(ask):
    many = ask.post("/v1/predict", files=[("f", ("a", b"x"))] * 33)
    assert many.status_code == 422 and many.json()["code"] == "server.request"
    packed = ask.post("/v1/predict", content=b"x", headers=JPEG | {"content-encoding": "gzip"})
    assert packed.status_code == 415 and packed.json()["code"] == "server.request"


def test_the_pixels_of_a_request_are_counted_together(ask):
    large = [("f", ("a", flat(1000, 1000)))]
    assert ask.post("/v1/predict", files=large * 5).status_code == 200
    answer = ask.post("/v1/predict", files=large * 6)
    assert answer.status_code == 413 and answer.json()["code"] == "server.too-large"
    assert "6000000 pixels" in answer.json()["error"]


def test_other_paths_and_methods_are_refused(ask):
    evil = {"origin": "http://evil.example"}
    for answer, status, code in (
        (ask.get("/v2"), 404, "server.not-found"),
        (ask.get("/static/none.js"), 404, "server.not-found"),
        (ask.get("/v1/predict"), 405, "server.request"),
        (ask.post("/healthz"), 405, "server.request"),
        (ask.options("/v1/predict", headers=evil), 403, "server.request"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_the_model_tells_of_itself_without_a_path(ask, model_file):
    output = ask.get("/v1/model").json()
    assert output["name"] == model_file.name and output["labels"] == list(LABELS) and output["classes"] == 5
    assert output["image_size"] == [32, 32] and output["attention"] is True and output["multilabel"] is False
    assert output["parameters"] == sum(p.numel() for p in load(model_file).parameters())
    assert output["formats"] == list(readable_suffixes()) and ".tif" in output["formats"]
    assert output["limits"]["bytes"] == 300_000 and output["limits"]["pixels"] == 10**6
    assert str(model_file.parent) not in json.dumps(output)


def test_it_is_healthy_ready_and_counted(ask, running):
    assert ask.get("/healthz").json() == {"status": "ok"} and ask.get("/readyz").status_code == 200
    before = running.gauge('vitkit_requests_total{path="/healthz",status="200"}')
    ask.get("/healthz")
    assert running.gauge('vitkit_requests_total{path="/healthz",status="200"}') == before + 1
    ask.post("/v1/predict", content=picture(), headers=JPEG)
    assert running.gauge("vitkit_batch_images_count") >= 1
    assert running.gauge("vitkit_waiting_images") == running.gauge("vitkit_held_bytes") == 0


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/static/docs.css", "/v1/model", "/none", "/metrics", "/healthz"]
)
def test_every_answer_has_the_strict_headers(ask, path):
    answer = ask.get(path)
    assert HEADERS.items() <= dict(answer.headers).items()
    assert "server" not in answer.headers and len(answer.headers["x-request-id"]) == 16


def test_documents_are_there_and_need_nothing_from_elsewhere(ask):
    document = ask.get("/openapi.json").json()
    assert {"/v1/predict", "/v1/embed", "/v1/attention", "/v1/model"} <= set(document["paths"])
    content = document["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    assert {"image/jpeg", "multipart/form-data", "application/json"} <= set(content)
    page = ask.get("/docs").text
    assert "/v1/attention" in page and not re.search(r"<script|style=|src=", page)
    assert not re.search(r'href="(?!static/|#|\./|openapi)', page)
    assert set(re.findall(r"https?://[^/'\"<]*", page)) == {str(ask.base_url).rstrip("/")}


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py",
                                  "/static//etc/passwd", "/static/", "/static/%00"])  # fmt: skip
def test_nothing_outside_the_page_is_given_out(running, path):
    with socket.create_connection((HOST, running.port), 5) as wire:
        wire.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
        assert wire.makefile("rb").readline().split()[1] in (b"404", b"405")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example", 400), ("", 400)],
)
def test_only_its_own_names_are_answered(ask, host, status):
    answer = ask.get("/healthz", headers={"host": host})
    assert answer.status_code == status
    assert status == 200 or (answer.json()["code"] == "server.request" and "--allow-host" in answer.text)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://127.0.0.1:1", 403),
        (None, 200),
    ],
)
def test_pages_of_other_origins_may_not_ask(ask, running, origin, status):
    headers = JPEG | ({} if origin is None else {"origin": origin})
    assert ask.post("/v1/predict", content=picture(), headers=headers).status_code == status
    own = ask.post("/v1/predict", content=picture(), headers=JPEG | {"origin": running.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_without_the_token_only_the_page_is_there(guarded: Service):
    with httpx.Client(base_url=guarded.url) as client:
        for wrong in (
            b"",
            b"Bearer wrong",
            f"Basic {TOKEN}".encode(),
            f"Bearer {TOKEN}x".encode(),
            b"Bearer \xff",
        ):
            headers = {"authorization": wrong} if wrong else {}
            for path in ("/v1/model", "/metrics"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert client.post("/v1/predict", content=picture(), headers=headers).status_code == 401
        for path in ("/", "/healthz", "/readyz", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        client.headers["authorization"] = f"Bearer {TOKEN}"
        output = client.get("/v1/model").json()
        assert output["attention"] is False and output["labels"] == []
        top = client.post("/v1/predict", content=picture(), headers=JPEG).json()["results"][0]["top"]
        assert {one["label"] for one in top} == set("01234")
        shown = client.post("/v1/attention", content=picture(), headers=JPEG)
        assert shown.json()["code"] == "inspection.unsupported" and "ResNet" in shown.json()["error"]
    assert TOKEN not in guarded.log.read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host", "0.0.0.0"], "VITKIT_TOKEN"),
        (["--host", "0.0.0.0", "--token", "short"], "16 characters"),
        (["--token", "two words"], "without spaces"),
        (["--max-bytes", "much"], "--max-bytes 'much'"),
        (["--queue", "0"], "queue"),
        (["--timeout", "nan"], "timeout"),
        (["--engine", "steam"], "steam"),
        (["--port", "70000"], "70000"),
        (["--max-pixels", "inf"], "--max-pixels"),
        (["--max-pixels", "nan"], "--max-pixels"),
        (["--max-pixels", "-1"], "--max-pixels"),
        (["--max-wait-ms", "-1"], "--max-wait-ms"),
        (["--allow-host", "http://photos.example"], "'http://photos.example'"),
        (["--allow-host", "a.*.org"], "'a.*.org'"),
        (["--allow-host", ""], "''"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(model_file, capsys, monkeypatch, options, text):
    monkeypatch.delenv("VITKIT_TOKEN", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(model_file), "--port", "0", *options])
    output = capsys.readouterr().err
    assert stop.value.code == 2 and text in output and output.count("\n") == 1


def test_a_port_in_use_is_said(model_file, running, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(model_file), "--port", str(running.port)])
    assert stop.value.code == 1 and "in use" in capsys.readouterr().err
