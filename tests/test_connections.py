"""No verb opens a connection outward unless it is asked to; what native code does is seen by strace."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from vitkit.cli import verbs
from vitkit.telemetry import OFF

CALLS = "connect,sendto,sendmsg,sendmmsg"
ALONE = ["unshare", "--map-root-user", "--net"]  # without a network: nothing that is tried here leaves
# Where one of these is set, ONNX Runtime reports nothing; users have none of them.
SILENT = {"CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "TRAVIS", "JENKINS_URL", "BUILDKITE"}
SILENT |= {"TEAMCITY_VERSION", "APPVEYOR"}
TRACED = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", f"trace={CALLS}"]
VERBS = """
import sys
from vitkit.cli import main
tiny = ["--model", "ViT-Ti/4", "--image-size", "8", "--batch", "16", "--workers", "0", "--device", "cpu"]
for words in WORDS:
    try:
        main([*words, *(tiny if words[0] in ("finetune", "pretrain") else [])])
    except SystemExit as stop:
        assert not stop.code, (words, stop.code)
"""
# A service, and what a page in a browser asks of it; without its loopback device it could not listen.
SERVED = r"""
import fcntl, http.client, re, signal, socket, struct, subprocess, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 0x49))  # SIOCSIFFLAGS: up
words = [sys.executable, "-m", "vitkit", "serve", "run", "--port", "0", "--device", "cpu", "--workers", "1"]
process = subprocess.Popen([*words, "--engine", "onnxruntime"], stdout=subprocess.PIPE, text=True)
wire = http.client.HTTPConnection(re.search(r"http://(\S+)", process.stdout.readline())[1])
posts = ("/v1/predict", "/v1/embed", "/v1/attention")
for path in ("/", "/docs", "/openapi.json", "/static/app.js", "/v1/model", "/metrics", *posts):
    body = open("a.png", "rb").read() if path in posts else None
    wire.request("POST" if body else "GET", path, body)
    answer = wire.getresponse()
    assert answer.status == 200 and answer.read(), path
process.send_signal(signal.SIGINT)
assert process.wait(60) in (0, 130, -signal.SIGINT), process.returncode
"""
QUICK = [
    ["doctor", "digits", "--quick"],
    ["finetune", "digits", "--out", "run", "--steps", "1", "--set", "evaluations=1"],
    ["predict", "run", "a.png", "--engine", "onnxruntime"],
    ["report", "run"],
]
STUDY = ["study", "run", "heads", "--data", "digits", "--steps", "1", "--size", "0", "--seeds", "1"]
STUDY += ["--device", "cpu", "--out", "study"]
REST = [
    ["list"],
    ["list", "weights"],
    ["show", "ViT-B/16.augreg-i21k"],
    ["shard", "digits", "shards"],
    *QUICK,
    ["evaluate", "run", "digits", "--device", "cpu", "--workers", "0"],
    ["fewshot", "run", "digits", "--shots", "1", "--seeds", "1", "--device", "cpu", "--cache", "features"],
    ["inspect", "run", "a.png", "--out", "look"],
    ["convert", "run", "hf"],
    ["embed", "run", "digits", "--out", "features.npz", "--workers", "0"],
    ["push", "run", "me/digits", "--dry-run", "repo"],
    ["export", "run", "m.onnx"],
    ["export", "run", "m.xml"],
    ["export", "run", "8.xml", "--precision", "int8", "--calibrate", "digits"],
    [
        "suite",
        "run",
        "--tasks",
        "digits",
        "--steps",
        "1",
        "--batch",
        "8",
        "--image-size",
        "8",
        "--out",
        "suite",
    ],
    ["study", "list"],
    [*STUDY, "--plan"],
    STUDY,
    ["study", "report", "study"],
    ["pretrain", "digits", "--out", "pretrained", "--steps", "1", "--set", "evaluations=1"],
    ["cost", "ViT-B/16", "--recipe", "pets"],
    ["completion", "bash"],
]


def attempts(folder, code: str, **environment: str) -> list[str]:
    """Calls that would have left this machine, of a Python program and all that it starts."""
    trace = folder / "trace.txt"
    clean = {name: value for name, value in os.environ.items() if name not in OFF.keys() | SILENT}
    own = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*ALONE, *TRACED, "-o", str(trace), sys.executable, "-c", code], cwd=folder,
        env=clean | own | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    local = re.compile(r"AF_UNIX|AF_NETLINK|inet_addr\(\"127\.|\"::1\"")
    return [line for line in trace.read_text().splitlines() if "sa_family" in line and not local.search(line)]


@pytest.fixture
def place(tmp_path):
    from PIL import Image

    if not shutil.which("strace") or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs strace, and a network namespace of its own")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    return tmp_path


def left_by_onnxruntime(folder) -> list[str]:
    return [path.name for path in folder.rglob("deviceid")]


@pytest.mark.slow
def test_training_and_predicting_ask_no_other_host(place):
    assert attempts(place, VERBS.replace("WORDS", repr(QUICK))) == []
    assert not left_by_onnxruntime(place)


@pytest.mark.slow
def test_no_verb_asks_another_host(place):
    assert attempts(place, VERBS.replace("WORDS", repr(REST))) == []
    assert not left_by_onnxruntime(place)


@pytest.mark.slow
def test_serving_asks_no_other_host(place):
    assert attempts(place, VERBS.replace("WORDS", repr(QUICK[1:2])) + SERVED) == []
    assert not left_by_onnxruntime(place)


@pytest.mark.slow
def test_the_demonstration_asks_no_other_host(place):
    assert attempts(place, VERBS.replace("WORDS", repr([["demo", "digits"]]))) == []
    assert not left_by_onnxruntime(place)


def test_every_verb_is_walked_through():
    walked = {words[0] for words in REST} | {"serve", "demo"}
    assert walked == set(verbs.VERBS)


def test_the_trace_sees_a_look_up_and_a_connection(place):
    """The control: names and addresses that belong to nobody, asked for where there is no network."""
    code = "import socket\nfor ask in (lambda: socket.getaddrinfo('vitkit.invalid', 80), "
    code += "lambda: socket.create_connection(('192.0.2.1', 80), 1)):\n"
    code += "    try: ask()\n    except OSError: pass"
    seen = attempts(place, code)
    assert any("htons(53)" in line for line in seen) and any("192.0.2.1" in line for line in seen)


def test_the_users_own_choice_counts(place):
    """And the control of the rest: where it is asked for, ONNX Runtime leaves its device id."""
    code = "import vitkit, os, onnxruntime; assert os.environ['ORT_DISABLE_TELEMETRY'] == '0'"
    attempts(place, code, ORT_DISABLE_TELEMETRY="0")
    assert left_by_onnxruntime(place)


@pytest.mark.slow
def test_without_the_protection_the_look_up_is_seen(place):
    code = "import onnxruntime, time; time.sleep(20)"
    assert any("htons(53)" in line for line in attempts(place, code))
