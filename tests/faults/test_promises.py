"""Every promise of docs/contributing/reliability.md has a test and a control; its table is the record's."""

import json
import os

import pytest
from promises import ELSEWHERE, PAGE, PLANTED, PROMISES, RECORD, listed, promise_of, written
from switches import complaints, resolved, switch_off

from vitkit.training import checkpoint

IDS = [f"{room}{n}" for room, last in (("A", 6), ("B", 16), ("C", 3)) for n in range(1, last + 1)]
IDS += ["D7", "D11"]  # the rest of the service's are told in docs/lab/serving.md


@pytest.mark.parametrize("identity", IDS)
def test_a_promise_has_a_test_and_a_control_that_switches_its_protection_off(identity):
    mine = {test: targets for test, targets in listed().items() if promise_of(test) == identity}
    assert identity in PROMISES and any("control" not in test for test in mine)
    controls = [target for targets in mine.values() for target in targets]
    for target in controls:
        resolved(target)
    planted = [test for test in mine if test.startswith(f"tests/{PLANTED.get(identity, '-')}")]
    assert planted if identity in PLANTED else controls


def test_tests_that_live_elsewhere_are_there():
    assert {f"tests/{name}" for names in ELSEWHERE.values() for name in names} <= set(listed())


def test_a_test_that_is_called_a_control_is_one():
    named = [test for test in listed() if "_control_" in test and promise_of(test) not in (None, *PLANTED)]
    assert len(named) > 20 and all(listed()[test] for test in named)


@pytest.mark.parametrize("target", ["pickle.loads", "vitkit.io.files.os.fsync", "vitkit.data.loader.POLL"])
def test_only_what_vitkit_does_can_be_switched_off(target):
    with pytest.raises(AssertionError, match=r"switch off|is of"):
        resolved(target)


def test_what_is_off_and_never_called_is_noticed(tmp_path, monkeypatch):
    target = "vitkit.training.checkpoint.flush"
    switch_off(target, lambda path: "off", tmp_path, monkeypatch.setattr)
    assert complaints(tmp_path, (target,)) == [f"{target} was not called while it was off"]
    assert checkpoint.flush(tmp_path) == "off" and not complaints(tmp_path, (target,))
    assert complaints(tmp_path, ()) == [f"{target} was off, which its marker does not say"]


@pytest.mark.skipif("VITKIT_FAULTS_RECORD" in os.environ, reason="the table is written after this run")
def test_the_table_is_that_of_the_record():
    record = json.loads(RECORD.read_text())
    assert record["size"] == "full" and not any(output["failed"] for output in record["tests"].values())
    assert PAGE.read_text() == written(PAGE.read_text(), record), "run tests/faults/promises.py"
