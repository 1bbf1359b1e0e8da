"""What tests/conftest.py has for the fault tests: fixtures, and counts of what they have done."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from switches import complaints, resolved, switch_off

TESTS = Path(__file__).parent.parent
sys.path += [  # whose tests and makers are used again
    str(TESTS / room) for room in ("faults", "data", "weights", "service")
]
RECORD: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: bad input and broken machines; run by make faults")
    config.addinivalue_line("markers", "control(*targets): with these protections of vitkit switched off")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("control"):
            assert "switched_off" in getattr(item, "fixturenames", ()), f"{item.nodeid} switches nothing off"


class SwitchedOff:
    """switched_off("vitkit.x.y", instead): until the test ends. Other processes get its `proof`."""

    def __init__(self, proof: Path, put: Callable[..., None]):
        self.proof, self.put = proof, put

    def __call__(self, target: str, instead: Callable[..., Any]) -> None:
        switch_off(target, instead, self.proof, self.put)


@pytest.fixture
def switched_off(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
) -> Iterator[SwitchedOff]:
    """For controls: all that the marker names, and nothing else, is switched off and called in the test."""
    marker = request.node.get_closest_marker("control")
    targets: tuple[str, ...] = marker.args if marker else ()
    for target in targets:
        resolved(target)
        record_property("off", target)
    proof = tmp_path_factory.mktemp("off")
    yield SwitchedOff(proof, monkeypatch.setattr)
    wrong = complaints(proof, targets)
    assert not wrong, "; ".join(wrong)


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """tally(kills=3): numbers that are added up over the tests of a promise."""

    def add(**numbers: float) -> None:
        for name, number in numbers.items():
            record_property(f"tally {name}", number)

    return add


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    targets = {str(target) for key, target in report.user_properties if key == "off"}
    name = report.nodeid.partition("[")[0] + (" (control)" if targets else "")
    output = RECORD.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "tally": {}})
    output[report.outcome] += 1
    if targets:
        output["off"] = sorted(targets.union(output.get("off", ())))
    output["seconds"] += report.duration
    for key, number in report.user_properties if report.when == "call" else ():
        if key.startswith("tally "):
            output["tally"][key[6:]] = output["tally"].get(key[6:], 0) + number


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("VITKIT_FAULTS_RECORD")
    if not path or hasattr(session.config, "workerinput"):
        return
    import torch

    machine = f"{os.cpu_count()} cores of {platform.machine()}, Linux {platform.release().partition('-')[0]}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    head = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": f"{machine}, {versions}"}
    head["size"] = os.environ.get("VITKIT_FAULTS", "push")
    Path(path).write_text(json.dumps(head | {"tests": dict(sorted(RECORD.items()))}, indent=1) + "\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """small_disk(bytes): a file system of that size in memory, where one may be mounted."""
    mounted = []

    def made(size: int) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        if (
            os.geteuid()
            or shutil.which("mount") is None
            or subprocess.run(words, capture_output=True).returncode
        ):
            pytest.skip("a small file system can be mounted by root only")
        mounted.append(place)
        return place

    yield made
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], capture_output=True)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the harness's command comes to where nobody touches it."""
    from harness import cold, command, outcome

    folder = tmp_path_factory.mktemp("straight")
    run = cold(command(folder / "run"), folder / "told.txt")
    assert run.wait(180) == 0, (folder / "told.txt").read_text()
    return outcome(folder / "run")
