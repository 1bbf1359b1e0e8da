"""B8, B10, B11, B12: processes, data workers that die or hang, numbers that are none, too little memory."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import HERE, scaled
from safetensors.torch import load_file
from switches import switch_off
from test_processes import CLOSE
from together import batches, go, losses, small, together

from vitkit.data import loader as making
from vitkit.data.order import Order
from vitkit.data.sources.source import from_arrays
from vitkit.data.views import View
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.checkpoint import complete, latest
from vitkit.training.step import Diverged, OutOfMemory, Stepper

pytestmark = pytest.mark.faults


def source(images: int = 64, side: int = 8):
    return from_arrays("pictures", np.zeros((images, side, side, 3), np.uint8), np.arange(images) % 4)


def stream(side: int = 8, batch: int = 8, workers: int = 2):
    view = View(size=(side, side), crop="squash")
    return making.train_batches(source(side=side), view, Order(64, batch), workers=workers)


def mine(before) -> list[multiprocessing.Process]:
    return [child for child in multiprocessing.active_children() if child not in before]


def exhausted(made, most: float = 30.0) -> None:
    """Until the stream raises what it has to."""
    end = time.monotonic() + most
    while time.monotonic() < end:
        next(made)


def test_B10_a_killed_data_worker_is_told_with_what_it_had_in_hand(monkeypatch, tally):
    monkeypatch.setattr(making, "POLL", 0.2)
    for number in range(scaled(4, 10)):
        before, made = multiprocessing.active_children(), stream()
        for _ in range(2 + number % 3):
            next(made)
        os.kill(mine(before)[number % 2].pid, signal.SIGKILL)
        begun = time.monotonic()
        words = r"pictures: a data worker died .* while it processed 16 images, the first '0.*"
        words += "Use fewer --workers or more memory.*vitkit doctor"
        with pytest.raises(ChildProcessError, match=words):
            exhausted(made)
        assert time.monotonic() - begun < 10
        tally(killed=1)


def hanging(self, places):
    """Protection on or off: nothing comes any more from the third step on."""
    if places[0][0] >= 2:
        time.sleep(60)
    return REAL(self, places)


REAL = making.Samples.__getitems__


def told_of_a_hanging_worker(monkeypatch) -> None:
    monkeypatch.setattr(making, "POLL", 0.2)
    monkeypatch.setattr(making, "TIMEOUT", 1.0)
    monkeypatch.setattr(making.Samples, "__getitems__", hanging)
    made = stream()
    with pytest.raises(
        ChildProcessError, match="a data worker did not respond for 1 seconds while it processed"
    ):
        exhausted(made, 10)


def test_B10_a_hanging_data_worker_is_told_after_some_patience(monkeypatch, tally):
    for _ in range(scaled(2, 5)):
        with monkeypatch.context() as patch:
            told_of_a_hanging_worker(patch)
        tally(hung=1)


class StillWaiting(Exception):
    pass


@pytest.mark.control("vitkit.data.loader.next_batch")
def test_B10_control_without_an_end_of_patience_a_hanging_worker_is_waited_for(monkeypatch, switched_off):
    def without_end(batches):
        looks = 0
        while True:
            try:
                return next(batches)
            except RuntimeError:
                looks += 1
                if looks > 4 * making.TIMEOUT / making.POLL:  # but for this test's end
                    raise StillWaiting from None

    switched_off("vitkit.data.loader.next_batch", without_end)
    with pytest.raises(StillWaiting):
        told_of_a_hanging_worker(monkeypatch)


SHARED = f"""
import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import test_steps
test_steps.making.TIMEOUT = 4
made = test_steps.stream(side=224, batch=32)
for _ in range(6): next(made)
"""


def test_B10_too_little_shared_memory_is_told_with_its_name():
    mounts = 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"'
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a small /dev/shm can be mounted by root only")
    words = ["unshare", "-m", "sh", "-c", mounts, "sh"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    done = subprocess.run([*words, sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "ChildProcessError" in done.stderr and "/dev/shm" in done.stderr, (
        done.stderr
    )
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr  # with enough of it


def test_B10_a_run_that_loses_a_worker_keeps_its_checkpoints(tmp_path, monkeypatch):
    from vitkit.runs import checkpointer
    from vitkit.runs import run as experiment

    monkeypatch.setattr(making, "POLL", 0.2)
    monkeypatch.setattr(checkpointer, "SAVE_SECONDS", 0.0)
    before, watch = multiprocessing.active_children(), experiment.Trainer.watch

    def killing(self, state, metrics):
        if state.step == 5:
            for child in mine(before):
                os.kill(child.pid, signal.SIGKILL)
        return watch(self, state, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(experiment.Trainer, "watch", killing)
        with pytest.raises(ChildProcessError, match=r"digits: a data worker died .*the same command resumes"):
            run(small(30), tmp_path, Runtime(), RunOptions(workers=1, quiet=True))
    assert latest(tmp_path / "checkpoints")[0].name >= "step-00000005"
    assert run(small(30), tmp_path, Runtime(), RunOptions(workers=1, quiet=True)).steps == 30


def poison(monkeypatch, what: str, step: int) -> None:
    """At that step the loss, the gradient or a weight is no number."""
    begin = Stepper.begin

    def poisoned(self, micro_batches, rate):
        objective = self.objective

        def bad(model, batch):
            result = objective(model, batch)
            factor = {"loss": float("nan"), "infinite": float("inf")}.get(what, 1.0)
            return result | {"loss": result["loss"] * factor}

        if self.state.step != step:
            return begin(self, micro_batches, rate)
        if what == "gradient":
            self.state.model.head.bias.register_hook(lambda gradient: gradient * float("nan"))
        self.objective = bad
        return begin(self, micro_batches, rate)

    monkeypatch.setattr(Stepper, "begin", poisoned)


KINDS = ("loss", "infinite", "gradient")
STEPS = scaled((0, 3, 8), (0, 1, 2, 3, 5, 7, 8, 9, 10, 11))


def finite(out: Path) -> bool:
    arrays = [
        load_file(part) for path in complete(out / "checkpoints") for part in path.glob("*.safetensors")
    ]
    return all(bool(tensor.isfinite().all()) for table in arrays for tensor in table.values())


@pytest.mark.parametrize("what", KINDS)
def test_B11_numbers_that_are_none_stop_the_run_before_they_reach_a_weight(
    what, tmp_path, monkeypatch, tally
):
    from vitkit.runs import checkpointer

    monkeypatch.setattr(checkpointer, "SAVE_SECONDS", 0.0)
    for step in STEPS:
        out = tmp_path / str(step)
        with monkeypatch.context() as patch:
            poison(patch, what, step)
            stops(out, step)
        assert finite(out) and len((out / f"batch-{step}.txt").read_text().splitlines()) == 16
        newest = latest(out / "checkpoints")[0] if step else None
        assert newest is None or newest.name == f"step-{step:08d}"
        assert not (out / "model.safetensors").exists()
        tally(stops=1)


def stops(out: Path, step: int) -> None:
    with pytest.raises(Diverged, match=f"step {step}: .*its batch: '"):
        run(small(12), out, Runtime(), RunOptions(workers=0, quiet=True))


@pytest.mark.control("vitkit.training.step.is_finite")
def test_B11_control_without_the_check_the_weights_are_spoilt_and_saved(tmp_path, monkeypatch, switched_off):
    from vitkit.runs import checkpointer

    monkeypatch.setattr(checkpointer, "SAVE_SECONDS", 0.0)
    poison(monkeypatch, "loss", 3)
    switched_off("vitkit.training.step.is_finite", lambda metrics: True)
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:  # whatever first stumbles over them
        stops(tmp_path, 3)
    assert not isinstance(caught.value, Diverged) and not finite(tmp_path)


def cramped(most: int, steps: range | tuple[int, ...], ranks: tuple[int, ...] = (0,)):
    """A memory into which at those steps of those processes no more images fit."""
    real = ClassificationLoss.__call__

    def call(self, model, batch):
        at, rank = AT.get("step", -1), int(os.environ.get("RANK", 0))
        if len(batch["image"]) > most and at in steps and rank in ranks and model.training:
            raise torch.OutOfMemoryError("CUDA out of memory (as if)")
        return real(self, model, batch)

    return call


AT: dict[str, int] = {}


def noting(step: int) -> None:
    AT["step"] = step


def crowded(runtime: Runtime, recipe, out: Path, most: int, steps, ranks, proof: Path | None = None) -> dict:
    """One process of a run with too little memory; what it says of it goes into a file.

    proof: the protection is off, and no batch is cut into smaller pieces.
    """
    from vitkit.runs import run as experiment

    if proof:
        switch_off("vitkit.training.step.Stepper.may_shrink", lambda self, careful: False, proof)

    seed, say = experiment.seed_step, experiment.Live.say

    def seeded(number, step, rank):
        noting(step)
        seed(number, step, rank)

    def said(self, text):
        with (out / f"said-{runtime.rank}.txt").open("a") as file:
            file.write(f"{text}\n")
        say(self, text)

    experiment.seed_step, experiment.Live.say = seeded, said
    ClassificationLoss.__call__ = cramped(most, steps, ranks)
    try:
        return go(runtime, recipe, out, {})
    except OutOfMemory as error:
        (out / f"said-{runtime.rank}.txt").write_text(str(error))
        raise


@pytest.mark.parametrize("step", scaled((0, 6), (0, 1, 4, 6, 9)))
def test_B12_out_of_memory_halves_the_pieces_and_not_the_batch(step, tmp_path, tally):
    goes_on_in_smaller_pieces(tmp_path, step)
    tally(steps=1)


def goes_on_in_smaller_pieces(tmp_path: Path, step: int, proof: Path | None = None) -> None:
    out = tmp_path / "cramped"
    together(1, go, small(10), tmp_path / "plain", {})
    together(1, crowded, small(10), out, 5, range(step, 10), (0,), proof)
    assert losses(out) == pytest.approx(losses(tmp_path / "plain"), **CLOSE)
    assert batches(out) == batches(tmp_path / "plain")
    output = [line for line in (out / "said-0.txt").read_text().splitlines() if "out of memory" in line]
    assert [line[: line.index(",")] for line in output] == [
        f"step {step}: out of memory; from here on micro-batches of {images} images" for images in (8, 4)
    ]


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_B12_all_processes_agree_on_smaller_pieces(ranks, tmp_path, tally):
    together(1, go, small(10), tmp_path / "plain", {})
    out = tmp_path / "cramped"
    together(2, crowded, small(10), out, 2, range(10), ranks)
    assert losses(out) == pytest.approx(losses(tmp_path / "plain"), **CLOSE)
    assert batches(out) == batches(tmp_path / "plain")
    output = [(out / f"said-{rank}.txt").read_text() for rank in (0, 1)]
    assert output[0].count("out of memory") == output[1].count("out of memory") == 2
    tally(processes=2)


def test_B12_later_on_a_process_among_many_names_the_remedy(tmp_path):
    with pytest.raises(AssertionError):  # the other process, left alone, ends with an error of gloo's
        together(2, crowded, small(10), tmp_path, 2, range(5, 10), (1,))
    output = (tmp_path / "said-1.txt").read_text()
    assert "step 5: process 1 is out of memory" in output and "--set micro_batch=N" in output


def test_B12_one_image_that_does_not_fit_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(ClassificationLoss, "__call__", cramped(0, (-1, 0)))
    monkeypatch.setitem(AT, "step", 0)
    with pytest.raises(OutOfMemory, match=r"not even one image at a time fits into memory.*--recompute"):
        run(small(4), tmp_path, Runtime(), RunOptions(workers=0, quiet=True))


@pytest.mark.control("vitkit.training.step.Stepper.may_shrink")
def test_B12_control_without_smaller_pieces_the_run_ends(tmp_path, switched_off):
    with pytest.raises(AssertionError):
        goes_on_in_smaller_pieces(tmp_path, 4, switched_off.proof)
    assert len(losses(tmp_path / "plain")) == 10 and len(losses(tmp_path / "cramped")) == 4
    assert "step 4: process 0 is out of memory" in (tmp_path / "cramped" / "said-0.txt").read_text()


def unshared(runtime: Runtime, recipe, out: Path, options: dict, proof: Path) -> dict:
    """Protection off: every process has the same places of the batch."""
    switch_off("vitkit.runtime.runtime.Runtime.local_places", lambda self, n: range(n // self.world), proof)
    return go(runtime, recipe, out, options)


@pytest.mark.control("vitkit.runtime.runtime.Runtime.local_places")
def test_B8_control_processes_that_do_not_share_the_batch_are_noticed(tmp_path, switched_off):
    together(1, go, small(4), tmp_path / "one", {})
    together(2, unshared, small(4), tmp_path / "two", {}, switched_off.proof)
    assert batches(tmp_path / "two") != batches(tmp_path / "one")
    assert losses(tmp_path / "two") != pytest.approx(losses(tmp_path / "one"), **CLOSE)
    assert json.loads((tmp_path / "two" / "result.json").read_text())["steps"] == 4
