"""The record of the GPU tests names every test, and no file of the GPU path is newer than it."""

import json
import os
import subprocess
import sys

import pytest
from lane import PAGE, RECORD, ROOT, WITHOUT_TRAINING, earlier, hashes, marked, page, valid

RERUN = "run `make gpu` on a machine with an NVIDIA GPU and commit docs/lab/gpu.*"


@pytest.fixture
def record() -> dict:
    return json.loads(RECORD.read_text())


def test_no_file_of_the_gpu_path_has_changed_since_the_record(record):
    now = hashes()
    changed = [name for name in now if record["files"].get(name) != now[name]]
    assert not changed, f"changed since {record['date']}: {', '.join(changed)}; {RERUN}"


def test_every_gpu_test_passed_or_is_named_as_open(record):
    """A run may be cut short, but the page says what is missing."""
    assert record["tests"] and set(record["tests"].values()) == {"passed"}
    assert not set(record["tests"]) & set(record["open"])
    names = {*record["tests"], *record["open"]}
    assert {test.partition("::")[0] for test in names} == set(marked()), RERUN
    for name, end in record["open"].items():
        assert end in ("failed", "not run")
        assert f"`{name}`: {end}" in PAGE.read_text() or name.partition("::")[0] in PAGE.read_text()


def test_a_test_is_open_until_it_passes():
    import lane

    record = {"tests": {}, "open": {"a": "not run", "b": "not run"}}
    lane.note(record, "a", "failed")
    lane.note(record, "b", "passed")
    assert (record["tests"], record["open"]) == ({"b": "passed"}, {"a": "failed"})
    assert any("`a`: failed" in line for line in lane.open_lines(record["open"]))
    lane.note(record, "a", "passed")
    assert record["open"] == {} and lane.open_lines({}) == []


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


def test_passes_hold_while_the_files_that_a_test_uses_stay(record):
    passed = dict.fromkeys([f"{WITHOUT_TRAINING[0]}::a", "tests/gpu/test_gpu_commands.py::b"], "passed")
    now = hashes()
    assert valid(passed, now) == passed
    assert list(valid(passed, now | {"training/step.py": "0"})) == [f"{WITHOUT_TRAINING[0]}::a"]
    assert valid(passed, now | {"training/step.py": "0", "ops/fused.py": "0"}) == {}
    old = {"commit": "x", "date": "d", "earlier": [{"commit": "w", "date": "c", "tests": ["a", "gone"]}]}
    assert earlier({"a": "passed", "b": "passed"}, old) == [
        {"commit": "w", "date": "c", "tests": ["a"]}, {"commit": "x", "date": "d", "tests": ["b"]},
    ]  # fmt: skip


def test_some_tests_use_nothing_of_training():
    names = [path.rpartition("/")[2].removesuffix(".py") for path in WITHOUT_TRAINING]
    folders = [str(ROOT / path.rpartition("/")[0]) for path in WITHOUT_TRAINING]
    paths = [str(ROOT / "tests"), str(ROOT / "tests/service"), str(ROOT / "src"), *folders]
    code = "import sys, importlib\n"
    code += f"for name in {names}: importlib.import_module(name)\n"
    code += "print(*[name for name in sys.modules if name.startswith('vitkit.training')])\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done
