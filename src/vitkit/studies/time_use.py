"""time.jsonl: the seconds of each trial and session of a study, and how busy its GPUs were."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from threading import Event, Thread
from typing import Any

from vitkit.metrics.speed import busy_reader
from vitkit.report.terminal import duration
from vitkit.runs.folder import RESULT
from vitkit.studies.folder import trial_folder
from vitkit.studies.prepare import Stopwatch
from vitkit.studies.study import Plan, Trial

FILE = "time.jsonl"
PARTS = ("start", "data", "training", "evaluation", "saving")  # of a run, as its result.json has them
INTERVAL = 1.0  # seconds between readings; the driver reports the share of about the last second


def append(out: Path, row: Mapping[str, Any]) -> None:
    with (out / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(out: Path) -> list[dict[str, Any]]:
    """All complete rows; a process that was killed may have left half a row."""
    path, rows = out / FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


class BusyMeter(Thread):
    """Reads in the background how busy GPUs are; without NVIDIA's library there are no readings."""

    def __init__(self, devices: Sequence[str]):
        super().__init__(daemon=True)
        self.readers = [busy_reader(device) for device in dict.fromkeys(devices)]
        self.readings: list[float] = []
        self.ended = Event()

    def run(self) -> None:
        while not self.ended.wait(INTERVAL):
            values = [value for reader in self.readers if (value := reader()) is not None]
            if not values:
                return
            self.readings.append(mean(values))


@contextmanager
def session(out: Path, devices: Sequence[str], slots: int, spent: Callable[[], float]) -> Iterator[None]:
    """Record a session at its end: its seconds, those of its trials, and how busy its GPUs were meanwhile.

    devices: those of the trials, if they run on this machine. spent: the time since the command began.
    """
    meter, clock = BusyMeter(devices), Stopwatch()
    meter.start()
    try:
        yield
    finally:
        meter.ended.set()
        meter.join()
        busy = {"busy": mean(meter.readings), "readings": len(meter.readings)} if meter.readings else {}
        row = {"session": spent(), "trials": clock(), "slots": slots, "devices": sorted(set(devices))}
        append(out, row | busy)


def trial_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The seconds of each trial over all its sessions."""
    seconds: dict[str, float] = {}
    for row in rows:
        if "trial" in row:
            seconds[row["trial"]] = seconds.get(row["trial"], 0.0) + row["seconds"]
    return seconds


def run_parts(out: Path, trial: Trial) -> dict[str, float] | None:
    """The seconds of the parts of a finished trial, all its runs together; None of an older version."""
    folder = trial_folder(out, trial.name)
    paths = sorted(folder.glob(f"*/{RESULT}")) if trial.compared else [folder / RESULT]
    parts = dict.fromkeys(PARTS, 0.0)
    for path in paths:
        times = json.loads(path.read_text(encoding="utf-8"))["cost"].get("time") if path.exists() else None
        if times is None:
            return None
        parts = {name: parts[name] + times[name] for name in PARTS}
    return parts if paths else None


def time_use(out: Path, plan: Plan) -> dict[str, Any]:
    """Where the time of a study went; empty if nothing was recorded.

    overhead: the share of the time of finished trials in which they neither train (with waiting for data) nor
    evaluate. waiting: seconds of processes without a trial. busy: of the GPUs while trials ran, if measured.
    """
    rows = read(out)
    seconds, total, counted = trial_seconds(rows), dict.fromkeys(PARTS, 0.0), 0.0
    for trial in plan.trials:
        parts = run_parts(out, trial) if trial.name in seconds else None
        if parts:
            total = {name: total[name] + parts[name] for name in PARTS}
            counted += seconds[trial.name]
    sessions = [row for row in rows if "session" in row]
    if not counted or not sessions:
        return {}
    in_slots = sum(row["slots"] * row["trials"] for row in sessions)
    measured = [row for row in sessions if row.get("readings")]
    readings = sum(row["readings"] for row in measured)
    busy = sum(row["busy"] * row["readings"] for row in measured) / readings if readings else None
    working = total["data"] + total["training"] + total["evaluation"]
    return total | {
        "other": max(0.0, counted - sum(total.values())),
        "finished_trials": counted,
        "overhead": max(0.0, 1 - working / counted),
        "waiting": max(0.0, in_slots - sum(seconds.values())),
        "sessions": len(sessions),
        "session": sum(row["session"] for row in sessions),
        "busy": busy,
    }


def facts(use: Mapping[str, Any]) -> dict[str, str]:
    """The use of time for the page and the terminal."""
    if not use:
        return {}
    whole = use["finished_trials"]
    shares = {name: f"{duration(use[name])} ({use[name] / whole:.1%})" for name in (*PARTS, "other")}
    names = {"data": "waiting for data", "start": "start (opening data, building the model)"}
    text = {"time of finished trials": duration(whole)}
    text |= {names.get(name, name): share for name, share in shares.items()}
    text |= {"overhead of trials": f"{use['overhead']:.1%}"}
    text |= {"processes without a trial": duration(use["waiting"])}
    text |= {"time of the study": f"{duration(use['session'])}, sessions: {use['sessions']}"}
    return text | ({"GPU busy while trials ran": f"{use['busy']:.1%}"} if use["busy"] is not None else {})


def time_line(use: Mapping[str, Any]) -> str:
    """What the terminal tells of the use of time."""
    parts = [
        f"training and its data {(use['training'] + use['data']) / use['finished_trials']:.1%} of the time"
    ]
    parts += [f"evaluation {use['evaluation'] / use['finished_trials']:.1%}"]
    parts += [f"overhead of trials {use['overhead']:.1%}"]
    return "; ".join([*parts, *([f"GPU busy {use['busy']:.1%}"] if use["busy"] is not None else [])])
