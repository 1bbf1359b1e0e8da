"""Runs under torchrun: signals, processes that die, restarts, several machines, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from test_processes import CLOSE, same
from together import batches, go, losses, together

from vitkit.recipes.recipe import from_json
from vitkit.training.checkpoint import complete

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from together import note_batches
from vitkit import cli
from vitkit.runs import checkpointer
checkpointer.SAVE_SECONDS = float(os.environ["SAVE"])
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
note_batches(int(os.environ["RANK"]), out)
cli.main()
"""
STANDALONE = ["--standalone", "--nproc-per-node", "2"]


def command(
    folder: Path, how: list[str], steps: int, workers: int = 0, batch: int = 16, parallel: str = "ddp"
) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = f"finetune digits --model ViT-Ti/4 --image-size 8 --steps {steps} --batch {batch}".split()
    words += f"--workers {workers} --parallel {parallel} --device cpu --out {folder / 'run'}".split()
    words += ["--set", "model_options=width=32,depth=2,heads=2,hidden=32", "evaluations=2", "mixup=0.2"]
    return [sys.executable, "-m", "torch.distributed.run", *how, str(script), *words]


def start(words: list[str], folder: Path, *, save: float = 300.0, before: tuple[str, ...] = (), **env: str):
    """The command in a session of its own, with its output in a file."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "SAVE": str(save)} | env
    with (folder / "told.txt").open("a") as output:
        return subprocess.Popen(
            [*before, *words], env=env, stdout=output, stderr=output, start_new_session=True, cwd=folder
        )


def ranks(agent: int) -> list[int]:
    """The processes that torchrun has started, in their order."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    actual = {}
    for child in map(int, children):
        with suppress(OSError):  # it may be gone by now
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = [one[5:] for one in environment if one.startswith(b"RANK=")]
            actual |= {int(rank[0]): child} if rank else {}
    return [actual[rank] for rank in sorted(actual)]


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("gradient_norm") if path.exists() else 0


def until(true, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def reference(folder: Path) -> Path:
    """The same recipe on two processes that nobody disturbs."""
    recipe = from_json((folder / "run" / "recipe.json").read_text())
    together(2, go, recipe, folder / "straight", {})
    return folder / "straight"


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen]]:
    """Whatever a test has started is gone after it."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        if process.poll() is None:
            for child in ranks(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
        process.wait()


@pytest.mark.slow
def test_sigterm_to_all_saves_once_and_the_same_command_goes_on(tmp_path, ended):
    """As a job manager does it: to torchrun and to every process; torchrun tells the latter once more."""
    words = command(tmp_path, STANDALONE, 60, workers=1)
    ended.append(run := start(words, tmp_path))
    until(lambda: steps(tmp_path) >= 10)
    for process in [*ranks(run.pid), run.pid]:
        os.kill(process, signal.SIGTERM)
    assert run.wait(60) != 0
    saved = complete(tmp_path / "run" / "checkpoints")
    assert [int(path.name[-8:]) for path in saved] == [steps(tmp_path)] and steps(tmp_path) < 60
    assert "the same command resumes there" in (tmp_path / "told.txt").read_text()
    ended.append(run := start(words, tmp_path))
    assert run.wait(120) == 0
    straight = reference(tmp_path)
    assert same(tmp_path / "run", straight) and losses(tmp_path / "run") == losses(straight)
    assert batches(tmp_path / "run") == batches(straight)


@pytest.mark.slow
def test_processes_that_die_are_started_again_and_the_run_ends_as_if_nothing_was(tmp_path, ended):
    """First the main one, whose data workers live on for a while, then the other."""
    words = command(tmp_path, [*STANDALONE, "--max-restarts", "2"], 60, workers=1)
    ended.append(run := start(words, tmp_path, save=0.2))
    for rank, at in ((0, 8), (1, 30)):
        until(lambda at=at: steps(tmp_path) >= at and complete(tmp_path / "run" / "checkpoints"))
        before = ranks(run.pid)
        os.kill(before[rank], signal.SIGKILL)
        until(lambda before=before: set(before).isdisjoint(now := ranks(run.pid)) and len(now) == 2, 60)
    assert run.wait(120) == 0, (tmp_path / "told.txt").read_text()[-2000:]
    straight = reference(tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(losses(straight), **CLOSE)
    assert same(tmp_path / "run", straight)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_within_a_minute(tmp_path, ended):
    ended.append(run := start(command(tmp_path, STANDALONE, 2000, parallel="fsdp"), tmp_path))
    until(lambda: steps(tmp_path) >= 3)
    others = ranks(run.pid)
    os.kill(others.pop(), signal.SIGKILL)
    assert run.wait(60) != 0
    assert not any(Path(f"/proc/{other}").exists() for other in others)


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_refused_before_any_training(tmp_path, ended):
    words = command(tmp_path, ["--standalone", "--nproc-per-node", "2"], 5, batch=15)
    ended.append(run := start(words, tmp_path))
    assert run.wait(60) != 0
    output = (tmp_path / "told.txt").read_text()
    assert output.startswith("vitkit: a batch of 15 images cannot be shared by 2 processes; give --batch 16")
    assert "[rank" not in output, "torchrun's own traceback is enough"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: machines that share nothing but a folder."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = uuid.uuid4().hex[:6]
    names, cables = [f"vk{mark}{i}" for i in "ab"], [f"vc{mark}{i}" for i in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {cables[0]} type veth peer name {cables[1]}")
    for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
        commands += [
            f"ip link set {cable} netns {name}",
            f"ip -n {name} link set {cable} name wire",
            f"ip -n {name} addr add 10.213.7.{number}/24 dev wire",
            f"ip -n {name} link set wire up",
            f"ip -n {name} link set lo up",
        ]
    try:
        for line in commands:
            made = subprocess.run(line.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {line}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_machines_train_as_one(tmp_path, machines, ended):
    for number, name in enumerate(machines, start=1):
        how = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id v --rdzv-endpoint 10.213.7.1:29511"
        how += f" --local-addr 10.213.7.{number} --rdzv-conf is_host={int(number == 1)}"
        words = command(tmp_path, how.split(), 30)
        inside = ("ip", "netns", "exec", name)
        ended.append(start(words, tmp_path, before=inside, GLOO_SOCKET_IFNAME="wire"))
    assert [run.wait(120) for run in ended] == [0, 0], (tmp_path / "told.txt").read_text()[-2000:]
    straight = reference(tmp_path)
    assert batches(tmp_path / "run") == batches(straight) and len(batches(straight)) == 30
    assert losses(tmp_path / "run") == pytest.approx(losses(straight), **CLOSE)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["cost"]["processes"] == 2 and result["test"]["images"] == 179
