"""B9: one of two processes under torchrun is killed; the other ends, both start again, and the end is the same."""

import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import LAST_WORDS, Fault, command, crowd, outcome, scaled, until

pytestmark = pytest.mark.faults
Death = tuple[int, *Fault]  # who, and how
CHAINS: dict[str, list[Death]] = {  # each is one run: in its first start the first dies, and so on
    "steps": [(0, "die_in_save", 4, 3, True), (1, "die_at_step", 8)],
}
if scaled(False, True):
    CHAINS = {
        "meeting": [(1, "die_in_meeting"), (0, "die_in_meeting"), (1, "die_at_step", 1)],
        "steps": [*CHAINS["steps"], (1, "die_in_evaluation", 1), (0, "die_in_resume", 9)],
        "fsdp": [(1, "die_in_save", 5, 2, True), (0, "die_in_resume", 9), (1, "die_in_evaluation", 4)],
    }


def words(out: Path, spread: str) -> list[str]:
    made = command(out)
    return [*made[: made.index("--set")], "--spread", spread, *made[made.index("--set") :]]


def ended(run: subprocess.Popen, told: Path, seconds: float = 300.0) -> list[float]:
    """Wait for torchrun -> of each start, how long one process lived on after the other."""
    last: dict[int, dict[int, float]] = {}
    until_ = time.monotonic() + seconds
    try:
        while run.poll() is None:
            assert time.monotonic() < until_, told.read_text()[-2000:]
            for child in psutil.Process(run.pid).children():
                with suppress(psutil.Error, KeyError):  # gone by now, or not yet what it will be
                    name = child.environ()
                    start, rank = int(name["TORCHELASTIC_RESTART_COUNT"]), int(name["RANK"])
                    last.setdefault(start, {})[rank] = time.monotonic()
            time.sleep(0.02)
    finally:
        for process in left(run.args[-1]):
            process.kill()
    return [max(times.values()) - min(times.values()) for times in last.values()]
