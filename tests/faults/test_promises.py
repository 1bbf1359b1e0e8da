"""Every promise of docs/reliability.md has a test and a control, and its table is that of the record."""

import json
import os
import re

import pytest
from promises import ELSEWHERE, HERE, PAGE, PROMISES, RECORD, is_control, promise_of, written

IDS = [f"{room}{n}" for room, last in (("A", 6), ("B", 16), ("C", 3)) for n in range(1, last + 1)]
IDS += ["D7", "D11"]  # the rest of the service's are told in docs/serving.md


def listed() -> list[str]:
    """All tests of this folder, and those that live elsewhere."""
    found = [
        f"tests/faults/{path.name}::{name}"
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    ]
    return found + [f"tests/{name}" for names in ELSEWHERE.values() for name in names]


@pytest.mark.parametrize("identity", IDS)
def test_a_promise_has_a_test_and_one_that_must_fail_without_it(identity):
    mine = [test for test in listed() if promise_of(test) == identity]
    assert identity in PROMISES and any(not is_control(test) for test in mine)
    assert any(is_control(test) or "control" in text(test) for test in mine)


def text(test: str) -> str:
    """A test and what is written above it: the identity of a case may say that it is the control."""
    path, name = test.removeprefix("tests/").split("::")
    source = (HERE.parent / path).read_text()
    at = source.index(f"def {name}(")
    return source[source.rindex("\n\n\n", 0, at) : at]


def test_tests_that_live_elsewhere_are_there():
    for names in ELSEWHERE.values():
        for name in names:
            path, test = name.split("::")
            assert f"def {test}(" in (HERE.parent / path).read_text()


@pytest.mark.skipif("VITKIT_FAULTS_RECORD" in os.environ, reason="the table is written after this run")
def test_the_table_is_that_of_the_record():
    record = json.loads(RECORD.read_text())
    assert record["size"] == "full" and not any(told["failed"] for told in record["tests"].values())
    assert PAGE.read_text() == written(PAGE.read_text(), record), "run tests/faults/promises.py"
