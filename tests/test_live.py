"""The line of a run in a real terminal: bar, step, time left and loss at any width, without jitter."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from itertools import pairwise

import pytest

from vitkit.report.terminal import Average, Live, clock, field

STEPS = """
import math, sys, time
from vitkit.report.terminal import Live
with Live("train", 20000) as live:
    for step in range(500, 20001, 500):
        live.step(step, loss=2 + math.sin(step), accuracy=step / 20000, rate=1 / step,
                  **{"images/s": 812.3 + step, "waiting %": 3.2})
        time.sleep(0.3 if step in (5000, 10000, 15000) else 0.001)
        if step == 10000:
            live.say("step 10000: a line of news")
    for number in range(9):
        live.skip(f"cat/{number}.jpg", "JPEG: cut off before its end")
"""
MUST = r"(?:(train) )?([━─]+) ( *\d+/20000) ( *\S+|-:--:--)(?: left)? +loss +(\d\.\d{4})"


def in_terminal(columns: int, *words: str, **options) -> list[str]:
    """What a command writes to a terminal of that width, line by line, each drawing of a line by itself."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "CI")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }
    process = subprocess.Popen(
        [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, **options
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0, written.decode()
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return [line for line in re.split(r"[\r\n]+", bare) if line]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_bar_step_time_and_loss_stand_at_any_width(columns):
    lines = in_terminal(columns, "-c", STEPS)
    drawn = [line for line in lines if "/20000" in line and "loss" in line]
    assert len(drawn) > 3 and max(map(len, lines)) <= columns
    for line in drawn:
        result = re.match(MUST, line)
        assert result and len(result[2]) >= 4, line
        assert ("train" in line) == ("left" in line) == (columns > 40)
        assert ("accuracy" in line) == (columns >= 80) and ("data wait" in line) == (columns == 200)
    assert len({(len(line), line.index("/20000"), line.index("loss")) for line in drawn}) == 1  # no jitter
    assert "20000/20000" in drawn[-1] and "─" not in drawn[-1]


def test_news_and_skipped_files_are_lines_of_their_own():
    lines = in_terminal(80, "-c", STEPS)
    assert lines.count("step 10000: a line of news") == 1
    assert [line for line in lines if line.startswith("skipped: ")] == [
        *(f"skipped: cat/{number}.jpg: JPEG: cut off before its end" for number in range(3)),
        "skipped: 6 more images; all are listed in the run's unusable.json",
    ]


def test_a_log_has_whole_lines_and_every_file():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert not done.stdout and "\x1b" not in done.stderr and "\r" not in done.stderr
    assert len([line for line in lines if line.startswith("skipped: cat/")]) == 9
    (last,) = [line for line in lines if "/20000" in line]  # one in ten seconds, and the last
    assert last.startswith("train  20000/20000  loss") and last.endswith("0:00:00 left")
    assert "data wait" in last


def test_notes_are_shown_where_they_fit(capsys):
    live = Live("train", 60, every=0.0)
    live.notes = ("best 91.2 % at step 30", "stops early after 3 more evaluations without improvement")
    live.step(40, loss=1.0, accuracy=0.5)
    assert live.line(60)[2].endswith("loss  1.0000")
    assert live.line(80)[2].endswith("loss  1.0000  best 91.2 % at step 30")
    assert live.line(100)[2].endswith("  best 91.2 % at step 30  accuracy  50.0%")
    assert live.line(180)[2].endswith("  ".join(["accuracy  50.0%", live.notes[1]]))
    assert capsys.readouterr().err.rstrip().endswith("  ".join(live.notes))


def test_the_loss_that_is_shown_is_smooth():
    average, shown = Average(0.9), []
    for value in (2.0, 3.0, 1.0) * 20:
        average.add(value)
        shown.append(average.value)
    assert shown[0] == 2.0 and all(1.8 < value < 2.6 for value in shown[1:])
    assert max(abs(a - b) for a, b in pairwise(shown[20:])) < 0.15
    average.add(float("nan"))
    assert average.value != average.value  # what is wrong is shown at once
    average.add(2.0)
    assert 1.8 < average.value < 2.2


def test_the_time_left_leaves_out_the_first_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    live = Live("train", 11, quiet=True)
    for step, seconds in ((1, 60.0), (2, 2.0), (3, 2.0)):  # the first one compiles
        now[0] += seconds
        live.step(step, loss=1.0)
    assert live.left == pytest.approx(16.0)
    assert [clock(s) for s in (None, 9, 3661, 400_000)] == ["-:--:--", "0:00:09", "1:01:01", "  4 days"]


@pytest.mark.parametrize("name", ["loss", "accuracy", "rate", "images/s", "waiting %"])
def test_numbers_keep_their_width(name):
    top = {"accuracy": 1.0, "waiting %": 100.0}.get(name, 99_999.0)
    assert len({len(field(name, value)) for value in (0.0, 0.01234, 0.5, 1.0, top)}) == 1


@pytest.mark.slow
def test_a_training_is_seen_at_80_columns(tmp_path):
    """The command itself, stopped and resumed."""
    words = [
        "-m",
        "vitkit",
        "finetune",
        "digits",
        "--model",
        "ViT-Ti/4",
        "--image-size",
        "8",
        "--batch",
        "16",
    ]
    words += ["--set", "model_options=width=16,depth=1,heads=1,hidden=16", "--steps", "60", "--workers", "0"]
    words += ["--out", str(tmp_path / "run"), "--subset", "400"]
    first = in_terminal(80, "-c", STOPPED, *words[2:])
    lines = in_terminal(80, *words)
    assert max(map(len, [*first, *lines])) <= 80
    drawn = [
        line
        for line in lines
        if re.match(r"train [━─]{8,} +\d+/60 +\S+ left  loss +\d\.\d{4}  (accuracy|best)", line)
    ]
    assert drawn and "60/60" in drawn[-1] and re.search(r"  best [\d.]+ % at step \d+$", drawn[-1])
    assert [line for line in lines if line.startswith("resumed")] == ["resumed at step 7 of 60"]


STOPPED = """
import os, signal, sys
from vitkit.cli import main
from vitkit.report.terminal import Live
step = Live.step

def stop(self, at, **numbers):
    if at == 7:
        os.kill(os.getpid(), signal.SIGINT)
    step(self, at, **numbers)

Live.step = stop
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 130
"""
