"""docs/guides/serve.md and the Containerfile say what the service does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.server import decoder, guard, http, inputs, monitoring, process
from vitkit.server.http import ConnectionLimits
from vitkit.server.monitoring import Metrics
from vitkit.server.settings import MAX_SCANS, Settings

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "guides" / "serve.md").read_text()


def test_the_policy_the_metrics_and_the_limits_are_the_codes():
    joined = " ".join(TEXT.split())
    assert guard.POLICY in joined
    for metric in Metrics().registry.collect():
        if metric.name.startswith("vitkit"):
            assert f"`{metric.name}" in TEXT, metric.name
    limits = Settings(model="m")
    for name, value in (
        ("time to send the headers", f"{http.SECONDS['head']:.0f} s"),
        ("time to send the body", f"{http.SECONDS['body']:.0f} s"),
        ("time to read the response", f"{http.SECONDS['write']:.0f} s"),
        ("connections", f"{http.MAX_CONNECTIONS}"), ("connections", f"{http.RESERVE}"),
        ("connections per address", f"{ConnectionLimits(http.MAX_CONNECTIONS).per_address}"),
        ("headers", f"{http.MAX_HEADERS}"), ("URL", f"{http.MAX_TARGET}"),
        ("method", f"{http.MAX_METHOD}"), ("values in JSON", f"{inputs.MAX_COMMAS}"),
        ("scans per JPEG", f"{MAX_SCANS}"),
        ("log", f"{monitoring.PER_SECOND}"), ("log", f"{monitoring.MAX_MESSAGE}"),
        ("pixels per request", f"{limits.request_pixels // 10**6} million"),
        ("time to decode", f"{decoder.SECONDS:.0f} s"),
        ("time to decode", f"{decoder.REQUEST_SECONDS:.0f} s"),
        ("chunks", f"{http.MAX_CHUNKS}"), ("queued images", f"{limits.queue}"),
        ("queued attention requests", f"{limits.attention_queue}"),
    ):  # fmt: skip
        assert re.search(rf"^\| {name} \|[^|]*\b{re.escape(value)}\b", TEXT, re.M), name
    assert f"{process.NOTICE:.0f} s" in TEXT


def test_the_container_asks_for_a_token_by_its_host():
    text = (ROOT / "Containerfile").read_text()
    command = re.search(r"^CMD \[(.*)\]$", text, re.M)[1]
    assert "0.0.0.0" in command and "VITKIT_TOKEN" in text and "USER 10001" in text and "HEALTHCHECK" in text


@pytest.mark.slow
def test_the_clients_of_the_document_work(tmp_path, small):
    from launch import picture, service

    from vitkit.weights.save import save

    model = small()
    model.labels = ("cat", "dog", "owl", "hen", "fox")
    save(model, tmp_path / "model.safetensors")
    (tmp_path / "cat.jpg").write_bytes(picture(1))
    (python,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (curl,) = re.findall(r"^curl .*cat.*$", TEXT, re.M)
    assert len([line for line in python.splitlines() if line]) == 3
    with service(tmp_path / "model.safetensors") as result:
        for command in ([sys.executable, "-c", python], ["sh", "-c", curl]):
            command[-1] = command[-1].replace("http://127.0.0.1:8000", result.url)
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and "probability" in done.stdout, done.stderr
