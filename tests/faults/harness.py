"""What the fault tests share: how much is run, file operations to interfere with, cold runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch

HERE = Path(__file__).parent
FULL = os.environ.get("VITKIT_FAULTS", "push") == "full"
CLOCK = ("seconds", "waited", "cost_seconds", "cost_device_hours", "cost_images_per_second")  # never the same
OPERATIONS: dict[str, tuple[tuple[Any, str], ...]] = {  # that a save is made of
    "write": ((Path, "write_text"), (safetensors.torch, "save_file")),
    "fsync": ((os, "fsync"),),
    "rename": ((os, "replace"),),
    "mkdir": ((os, "mkdir"),),
    "remove": ((os, "unlink"), (os, "rmdir")),
}
Act = Callable[[str, Callable[..., Any], tuple[Any, ...]], None]
Fault = tuple[Any, ...]  # a function of inside.py, and its words
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "5", "--no-python")  # fmt: skip
LAST_WORDS = "killed by the test\n"


def scaled(push: Any, full: Any) -> Any:
    """How much of something: what every change has time for, or all that is promised."""
    return full if FULL else push


@contextmanager
def operations(act: Act) -> Iterator[None]:
    """Inside, act(kind, call, arguments) runs before each file operation."""
    places = [(kind, owner, name) for kind, rows in OPERATIONS.items() for owner, name in rows]
    real = {(owner, name): getattr(owner, name) for _, owner, name in places}

    def wrapped(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **options: Any) -> Any:
            act(kind, call, arguments)
            return call(*arguments, **options)

        return inner

    for kind, owner, name in places:
        setattr(owner, name, wrapped(kind, real[owner, name]))
    try:
        yield
    finally:
        for (owner, name), call in real.items():
            setattr(owner, name, call)


def die() -> None:
    """kill -9 of this process, which says so first."""
    os.write(2, LAST_WORDS.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def dying(number: int, *, torn: bool = False, when: Callable[[], bool] = lambda: True) -> Act:
    """kill -9 of this process at the number-th operation; torn: half of what it writes is on the disk."""
    seen = 0

    def act(kind: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        seen += when()
        if seen == number and when():
            if torn and kind == "write":
                call(*arguments)
                path = arguments[0] if isinstance(arguments[0], Path) else Path(arguments[1])
                os.truncate(path, path.stat().st_size // 2)
            die()

    return act


def command(out: Path, *, workers: int = 0, steps: int = 24, more: tuple[str, ...] = ()) -> list[str]:
    """A small training with everything random in it: six steps an epoch, four evaluations."""
    words = f"finetune digits --model ViT-Ti/4 --image-size 8 --steps {steps} --batch 16 --subset 96".split()
    options = ["model_options=width=32,depth=2,heads=2,hidden=32,dropout=0.1", "evaluations=4", "dropout=0.1"]
    options += ["mixup=0.2", "randaugment=1,5", "schedule.warmup=2", *more]
    return [*words, "--workers", str(workers), "--device", "cpu", "--out", str(out), "--set", *options]


def cold(
    words: list[str],
    output: Path,
    *,
    save: float = 0.0,
    fault: Fault = (),
    before: tuple[str, ...] = (),
) -> subprocess.Popen:
    """The command in a process and session of its own; `fault` names a function of inside.py and its words.

    save: seconds between checkpoints; told: a file for what it says; before: a program that runs it.
    """
    return started(words, output, {"save": save, "faults": {"0 0": fault} if fault else {}}, before)


def crowd(words: list[str], output: Path, faults: dict[tuple[int, int], Fault]) -> subprocess.Popen:
    """The command on two processes under torchrun, a checkpoint after each step.

    faults: by the start, of which torchrun makes one more after each death, and the process.
    """
    by_name = {f"{start} {rank}": fault for (start, rank), fault in faults.items()}
    return started(words, output, {"save": 0.0, "faults": by_name}, TORCHRUN)


def started(
    words: list[str], output: Path, facts: dict[str, Any], before: tuple[str, ...]
) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "VITKIT_FAULT": json.dumps(facts)}
    with output.open("a") as file:
        return subprocess.Popen(
            [*before, sys.executable, str(HERE / "inside.py"), *words],
            env=env, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


def until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def rows(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its clock."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def outcome(out: Path) -> dict[str, Any]:
    """All that a killed and resumed run must have in common with one that nobody has touched."""
    import hashlib

    from together import batches

    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return {"weights": digest, "losses": rows(out), "samples": batches(out)}
