"""Commands that fail with --json: one JSON value with a code, the line and the exit code as without it."""

import json
import os
import signal
import threading
import time
from errno import ENOSPC, EROFS

import pytest
from test_cli import run
from test_flag_ranges import piped

from vitkit.cli.verbs import VERBS
from vitkit.errors import CODES

TINY = ["--model", "ViT-Ti/4", "--image-size", "8", "--workers", "0", "--steps", "100000"]


def failed(capsys, *words) -> tuple[int, str, str]:
    """Exit code, code and message of a failing command; its line is the same without --json."""
    status = run(*words, "--json")
    messages = capsys.readouterr()
    result = json.loads(messages.out)
    assert set(result) == {"error"} and set(result["error"]) == {"code", "message"}
    code, message = result["error"]["code"], result["error"]["message"]
    assert code in CODES and messages.err.splitlines()[-1] == f"vitkit: {message}"
    assert run(*words) == status
    plain = capsys.readouterr()
    assert plain.out == "" and plain.err == messages.err
    return status, code, message


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        ("finetun photos", "request.unknown", "'finetun'"),
        ("finetune digits --stps 3", "request.unknown", "--stps"),
        ("finetune", "request.missing", "DATA"),
        ("finetune digits --steps", "request.missing", "--steps"),
        ("finetune digits --plan=yes", "request.value", "--plan"),
        ("finetune digits more", "request.value", "'more'"),
        ("finetune digits --steps 0", "request.value", "--steps 0"),
        ("finetune digits --device tpu", "request.value", "'tpu'"),
        ("finetune digits --image-size 8x8x8", "request.value", "8x8x8"),
        ("finetune nowhere", "data.not-found", "'nowhere'"),
        ("finetune here", "data.empty", "here"),
        ("finetune notes.txt", "data.layout", "notes.txt"),
        ("doctor", "request.conflict", "--machine"),
        ("doctor vtab:mnist:data", "request.unknown", "'mnist'"),
        ("doctor broken.zip", "data.corrupt", "broken.zip"),
        ("list planets", "request.value", "'planets'"),
        ("study run heads", "request.missing", "--data"),
    ],
)
def test_a_request_that_cannot_be_met_has_a_code(words, code, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "broken.zip").write_bytes(b"PK\3\4")
    status, result, message = failed(capsys, *words.split())
    assert (status, result) == (2, code) and value in message


@pytest.mark.parametrize("words, code", [("serve m", "request.unknown"), ("", "request.missing")])
def test_a_verb_that_has_no_json_answers_with_it_too(words, code, capsys):
    assert run(*words.split(), "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == code and "--json" in error["message"]


def test_errors_of_the_system_have_codes(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    words = ("shard", "digits", tmp_path / "file" / "out")
    status, code, message = failed(capsys, *words)
    assert (status, code) == (2, "file.not-found") and str(tmp_path / "file") in message
    status, code, message = failed(capsys, "shard", "digits", "/dev/full/out")
    assert status == 2 and code.startswith("file.") and "/dev/full" in message


@pytest.mark.parametrize("number, status, code", [(ENOSPC, 1, "disk.full"), (EROFS, 2, "file.not-writable")])
def test_a_full_or_read_only_disk_has_a_code(capsys, monkeypatch, number, status, code):
    def verb(json: bool = False) -> None:
        raise OSError(number, os.strerror(number), "out/model.safetensors")

    monkeypatch.setitem(VERBS, "demo", verb)
    assert failed(capsys, "demo") == (status, code, f"out/model.safetensors: {os.strerror(number)}")


def test_of_several_processes_the_first_answers(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("finetune", "nowhere", "--json") == 2
    messages = capsys.readouterr()
    assert messages.out == "" and "'nowhere'" in messages.err


def test_what_cannot_be_written_keeps_the_exit_code():
    done = piped("vitkit finetune nowhere --json > /dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'nowhere'" in done.stderr
    assert piped("vitkit finetune nowhere --json >&- 2>&-").returncode == 2
    done = piped("vitkit finetune nowhere --json 2> /dev/full")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "data.not-found"
    assert piped("vitkit finetune nowhere --json | true").returncode == 2


def test_help_and_success_are_not_errors(capsys):
    assert run("list", "recipes", "--json") == 0
    assert "error" not in json.loads(capsys.readouterr().out)[0]


def test_an_interrupted_run_is_reported_with_how_to_go_on(tmp_path, capsys):
    def stop_after_a_step() -> None:
        while not (rows.exists() and rows.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    rows = tmp_path / "metrics.jsonl"
    threading.Thread(target=stop_after_a_step, daemon=True).start()
    assert run("finetune", "digits", *TINY, "--out", tmp_path, "--json") == 128 + signal.SIGTERM
    messages = capsys.readouterr()
    error = json.loads(messages.out)["error"]
    assert error["code"] == "training.stopped" and "SIGTERM" in error["message"]
    assert messages.err.splitlines()[-1] == f"vitkit: {error['message']}"
