"""The record of the GPU tests is complete, and no file of the GPU path is newer than it."""

import json

import pytest
from lane import PAGE, RECORD, ROOT, hashes, marked, page

RERUN = "run `make gpu` on a machine with an NVIDIA GPU and commit docs/lab/gpu.*"


@pytest.fixture
def record() -> dict:
    return json.loads(RECORD.read_text())


def test_no_file_of_the_gpu_path_has_changed_since_the_record(record):
    now = hashes()
    changed = [name for name in now if record["files"].get(name) != now[name]]
    assert not changed, f"changed since {record['date']}: {', '.join(changed)}; {RERUN}"


def test_every_gpu_test_passed_and_was_run(record):
    assert record["tests"] and set(record["tests"].values()) == {"passed"}
    assert {test.partition("::")[0] for test in record["tests"]} == set(marked()), RERUN


def test_the_page_is_that_of_the_record(record):
    assert PAGE.read_text() == page(record)
    assert record["commit"] != "unknown"


def test_the_reference_is_that_of_the_record(record):
    assert record["reference"] == json.loads((ROOT / "tests/gpu/reference.json").read_text()), RERUN


def test_a_changed_file_is_noticed(record, monkeypatch):
    import lane

    monkeypatch.setitem(record["files"], next(iter(lane.SOURCES)), "0" * 64)
    with pytest.raises(AssertionError, match="changed since"):
        test_no_file_of_the_gpu_path_has_changed_since_the_record(record)
