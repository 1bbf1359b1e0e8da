"""B9: one of two processes under torchrun is killed; both start again, and the end is the same."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import FULL, LAST_WORDS, Fault, command, crowd, outcome, scaled, until

pytestmark = pytest.mark.faults
SAVING, STEPPING = (0, ("die_in_save", 4, 3, True)), (1, ("die_at_step", 8))
CHAINS: dict[str, list[tuple[int, Fault]]] = {  # each is one run: who dies in its first start, its second ...
    "ddp": [SAVING, STEPPING],
    "ddp-more": [(1, ("die_in_evaluation", 1)), (0, ("die_in_resume", 9))],
    "ddp-early": [(1, ("die_in_meeting",)), (0, ("die_in_meeting",)), (1, ("die_at_step", 1))],
    "fsdp": [(1, ("die_in_save", 5, 2, True)), (0, ("die_in_resume", 9)), (1, ("die_in_evaluation", 4))],
}
MINUTE = 60.0  # in which whoever is left ends


def words(out: Path, parallel: str) -> list[str]:
    made = command(out)
    return [*made[: made.index("--set")], "--parallel", parallel, *made[made.index("--set") :]]


def left(out: Path) -> list[psutil.Process]:
    """Processes of this run, their data workers among them."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(out) in (p.info["cmdline"] or ())]


def alive(agent: int) -> list[tuple[int, int]]:
    """What torchrun has running: the start and the rank of each process."""
    result = []
    for child in psutil.Process(agent).children():
        with suppress(psutil.Error, KeyError):  # gone by now, or not yet what it will be
            told = child.environ()
            result.append((int(told["TORCHELASTIC_RESTART_COUNT"]), int(told["RANK"])))
    return result


def watched(run: subprocess.Popen, out: Path, told: Path, seconds: float = 300.0) -> list[float]:
    """Wait for torchrun -> of each start, how long one of the two lived on after the other."""
    last: dict[int, dict[int, float]] = {}
    end = time.monotonic() + seconds
    try:
        while run.poll() is None:
            assert time.monotonic() < end, told.read_text()[-2000:]
            for start, rank in alive(run.pid):
                last.setdefault(start, {})[rank] = time.monotonic()
            time.sleep(0.02)
        until(lambda: not left(out), 20)
    finally:
        for process in left(out):
            process.kill()
    assert run.returncode == 0, told.read_text()[-3000:]
    return [max(times.values()) - min(times.values()) for times in last.values()]


def twice(out: Path) -> int:
    """Steps that were computed more than once."""
    lines = [json.loads(line) for path in out.glob("seen-*.jsonl") for line in path.read_text().splitlines()]
    seen = Counter((step, place) for step, place, *_ in lines)
    return len({step for (step, _), times in seen.items() if times > 1})


def check_end(out: Path, deaths: int, straight: dict[str, Any]) -> None:
    assert outcome(out) == straight
    assert twice(out) <= deaths, "of what had been done more than one step was lost"


@pytest.fixture(scope="module")
def straights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What two processes come to that nobody touches, by --parallel; made when first asked for."""
    made: dict[str, dict[str, Any]] = {}

    def straight(parallel: str) -> dict[str, Any]:
        if parallel not in made:
            folder = tmp_path_factory.mktemp(parallel)
            out, told = folder / "run", folder / "told.txt"
            watched(crowd(words(out, parallel), told, {}), out, told)
            made[parallel] = outcome(out)
        return made[parallel]

    return straight


@pytest.mark.parametrize("name", scaled(["ddp"], list(CHAINS)))
def test_B9_a_process_is_killed_and_the_run_ends_as_if_nothing_was(name, straights, tmp_path, tally):
    out, told, deaths = tmp_path / "run", tmp_path / "told.txt", CHAINS[name]
    parallel = name.partition("-")[0]
    faults = {(start, rank): fault for start, (rank, fault) in enumerate(deaths)}
    lived_on = watched(crowd(words(out, parallel), told, faults), out, told)
    assert told.read_text().count(LAST_WORDS) == len(deaths) == len(lived_on) - 1
    assert max(lived_on) <= MINUTE, lived_on
    check_end(out, len(deaths), straights(parallel))
    print(f"\nB9: {name}: the others lived on for {', '.join(f'{s:.1f}' for s in lived_on[:-1])} s")
    tally(kills=len(deaths), runs=1)


@pytest.mark.skipif(not FULL, reason="half a minute of waiting: with VITKIT_FAULTS=full")
def test_B9_a_process_that_hears_nothing_of_the_other_is_ended_too(straights, tmp_path, tally):
    """It evaluates by itself for an hour, and a signal to it is only noted."""
    out, told = tmp_path / "run", tmp_path / "told.txt"
    faults: dict[tuple[int, int], Fault] = {
        (0, 0): ("hold_in", "evaluation", 6, str(tmp_path), 3600.0),
        (0, 1): ("die_at_step", 6),
    }
    first, _ = watched(crowd(words(out, "ddp"), told, faults), out, told)
    assert (tmp_path / "there").exists() and 5 < first <= MINUTE
    check_end(out, 1, straights("ddp"))
    tally(kills=1, runs=1)


FORGETFUL = [
    pytest.param("no_resume", marks=pytest.mark.control("vitkit.runs.run.latest")),
    pytest.param("start_over", marks=pytest.mark.control("vitkit.runs.run.training_batches")),
    pytest.param("other_dropout", marks=pytest.mark.control("vitkit.runs.run.seed_step")),
]


@pytest.mark.parametrize("off", scaled(FORGETFUL[:1], FORGETFUL))
def test_B9_control_restarted_without_checkpoint_place_or_seeds_a_run_differs(
    off, straights, tmp_path, switched_off
):
    out, told = tmp_path / "run", tmp_path / "told.txt"
    fault = (off, str(switched_off.proof))
    faults: dict[tuple[int, int], Fault] = {(0, 1): ("die_at_step", 9), (1, 0): fault, (1, 1): fault}
    straight = straights("ddp")
    watched(crowd(words(out, "ddp"), told, faults), out, told)
    with pytest.raises(AssertionError):
        check_end(out, 1, straight)
