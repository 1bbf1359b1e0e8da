"""Runs on several processes: the same batches, losses, checkpoints and results as on one."""

import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from together import OPTIONS, batches, go, losses, small, together

import vitkit
from vitkit.io.files import locked
from vitkit.runtime.runtime import Runtime
from vitkit.training import checkpoint
from vitkit.training.checkpoint import complete, latest

CLOSE = {"rel": 0, "abs": 1e-5}  # between numbers of processes: the same sums in another order, at this rate
KINDS = [(1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp")]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return vitkit.load(out / "model.safetensors").state_dict()


def same(a: Path, b: Path) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Hundred steps that nobody stops, by (processes, parallel); made when first asked for."""
    folder, done = tmp_path_factory.mktemp("straight"), {}

    def made(world: int, parallel: str) -> Path:
        out = folder / f"{world}-{parallel}"
        if out not in done:
            done[out] = together(world, go, small(100), out, {}, parallel=parallel)
        return out

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel"), KINDS[1:])
def test_batches_losses_and_results_do_not_depend_on_processes(straight, world, parallel):
    one, many = straight(1, "ddp"), straight(world, parallel)
    assert batches(one) == batches(many) and len(batches(one)) == 100
    assert losses(many) == pytest.approx(losses(one), **CLOSE)
    assert np.mean(losses(one)[-10:]) < losses(one)[0] - 0.1, "what does not learn shows no difference"
    results = [json.loads((out / "result.json").read_text())["test"] for out in (one, many)]
    for name in ("images", "top1", "top5", "confusion", "per_class"):
        assert results[0][name] == results[1][name]
    assert results[0]["images"] == 179 and results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "options"), [("ddp", {}), ("fsdp", {"save_aside": True, "save": 0.3})])
def test_a_run_stopped_and_resumed_on_as_many_processes_is_equal_bit_for_bit(
    straight, tmp_path, parallel, options
):
    stopped = together(2, go, small(100), tmp_path, options | {"stop": 33}, parallel=parallel)
    assert stopped == [{"stopped": 33}] * 2 and latest(tmp_path / "checkpoints")[0].name == "step-00000033"
    together(2, go, small(100), tmp_path, options, parallel=parallel)
    assert same(straight(2, parallel), tmp_path) and losses(straight(2, parallel)) == losses(tmp_path)
    assert batches(tmp_path) == batches(straight(2, parallel))
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert len(names) == 2 and "step-00000100" in names  # no more, no fewer, nothing unfinished


@pytest.mark.slow
def test_any_number_of_processes_goes_on_from_any_other(straight, tmp_path):
    for world, parallel, stop in ((4, "fsdp", 20), (2, "fsdp", 45), (1, "ddp", 70), (4, "ddp", None)):
        together(world, go, small(100), tmp_path, {"stop": stop}, parallel=parallel)
        files = {path.name for path in latest(tmp_path / "checkpoints")[0].glob("*.safetensors")}
        assert len(files) == (world if parallel == "fsdp" else 1)
    assert losses(tmp_path) == pytest.approx(losses(straight(1, "ddp")), **CLOSE)
    assert batches(tmp_path) == batches(straight(1, "ddp"))


@pytest.mark.slow
def test_half_moments_are_cut_and_read_anywhere(tmp_path):
    optimizer = replace(small().optimizer, moment="bf16", average=0.9)
    r = small(24, optimizer=optimizer)
    together(1, go, r, tmp_path / "one", {})
    together(2, go, r, tmp_path / "many", {"stop": 8}, parallel="fsdp")
    path = latest(tmp_path / "many" / "checkpoints")[0] / "state-00001.safetensors"
    with safe_open(path, "pt") as file:
        kinds = {name.split(".")[-1]: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert kinds["exp_avg"] == torch.bfloat16 and kinds["exp_avg_sq"] == torch.float32
    together(1, go, r, tmp_path / "many", {"stop": 16})
    together(2, go, r, tmp_path / "many", {}, parallel="fsdp")
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), **CLOSE)


@pytest.mark.slow
def test_pieces_and_recomputing_change_nothing_on_any_number(tmp_path):
    together(1, go, small(16), tmp_path / "plain", {})
    for world, parallel, recompute in ((1, "ddp", False), (2, "ddp", True), (2, "fsdp", True)):
        out = tmp_path / f"{world}-{parallel}"
        together(world, go, small(16, micro_batch=3), out, {}, parallel=parallel, recompute=recompute)
        assert losses(out) == pytest.approx(losses(tmp_path / "plain"), **CLOSE)
        assert batches(out) == batches(tmp_path / "plain")


MODERN = ("rope=dinov3", "positions=none", "registers=2", "mlp=swiglu", "key_bias=false", "layer_scale=true")


@pytest.mark.slow
def test_a_modern_vit_trains_alike_sharded_and_whole(tmp_path):
    """Buffers such as the periods of RoPE are not sharded, and are stored as they are."""
    recipe = small(12)
    recipe = replace(recipe, model_options=OPTIONS + MODERN)
    together(1, go, recipe, tmp_path / "one", {})
    together(2, go, recipe, tmp_path / "many", {}, parallel="fsdp")
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), **CLOSE)
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert one.keys() == many.keys() and any("rope" in name for name in one)
    for name, tensor in one.items():
        assert torch.allclose(many[name], tensor, atol=1e-4), name


@pytest.fixture
def spoilt(tmp_path):
    """Forty small pictures, ten of them broken."""
    rng = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "data" / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)).save(path)
        if i % 4 == 3:
            path.write_bytes(path.read_bytes()[:60])
    return tmp_path / "data"


@pytest.mark.slow
def test_unusable_files_leave_the_same_gaps_on_any_number(spoilt, tmp_path):
    """Two images a process and one a piece: some pieces and some processes are left without any."""
    r = small(20, data=str(spoilt), batch=8, micro_batch=1)
    actual = {}
    for world, parallel in ((1, "ddp"), (4, "ddp"), (4, "fsdp")):
        out = tmp_path / f"{world}-{parallel}"
        actual[out] = together(world, go, r, out, {"max_bad": 0.5}, parallel=parallel)
        assert losses(out) == pytest.approx(losses(tmp_path / "1-ddp"), **CLOSE)
        assert batches(out) == batches(tmp_path / "1-ddp")
    used = [{place // 2 for place, _, _ in rows} for rows in batches(out).values()]
    assert any(len(processes) < 4 for processes in used), "no process was without an image"
    counted = {result["cost"]["unusable_images"] for results in actual.values() for result in results}
    assert len(counted) == 1 and counted.pop() >= 3
    tested = [results[0]["test"]["images"] for results in actual.values()]
    assert len(set(tested)) == 1


@pytest.mark.slow
def test_too_many_unusable_files_are_an_error_of_every_process(spoilt, tmp_path):
    told = together(2, go, small(20, data=str(spoilt), batch=8), tmp_path / "run", {"max_bad": 0.0})
    assert all("images are unusable, more than the 0% allowed" in str(error) for error in told)
    assert not (tmp_path / "run" / "checkpoints").exists()


def measured(runtime: Runtime, path: Path, batch: int) -> dict:
    from vitkit.data.splits import complete as splits
    from vitkit.datasets.opening import open_data
    from vitkit.runs.evaluation import evaluate
    from vitkit.tasks.classify import Classify

    model = runtime.place(vitkit.load(path))
    source = splits(open_data("digits"))["test"]
    return evaluate(Classify(), model, source, batch, 0, runtime=runtime).to_json(source.classes)


@pytest.mark.slow
def test_every_test_image_counts_once_where_processes_have_unequal_numbers(tmp_path):
    model = vitkit.build("ViT-Ti/4", classes=10, image_size=8, width=32, depth=2, heads=2, hidden=32)
    torch.nn.init.normal_(model.head.weight)
    vitkit.save(model, tmp_path / "model.safetensors")
    one = together(1, measured, tmp_path / "model.safetensors", 44)[0]
    assert one["images"] == 179
    for world, parallel in ((2, "ddp"), (4, "fsdp")):  # of four, the last has 44 images, the others 45
        for told in together(world, measured, tmp_path / "model.safetensors", 44, parallel=parallel):
            assert told["confusion"] == one["confusion"] and told["top1"] == one["top1"]
            assert told["images"] == 179 and told["loss"] == pytest.approx(one["loss"], abs=1e-6)
            assert told["interval"] == one["interval"]
            assert told["calibration_error"] == pytest.approx(one["calibration_error"], abs=1e-6)


@pytest.mark.parametrize("harm", ["missing", "damaged"])
@pytest.mark.slow
def test_a_checkpoint_with_a_bad_part_is_passed_over_and_two_sound_ones_stay(tmp_path, harm):
    together(2, go, small(8), tmp_path / "run", {"save": 0.0}, parallel="fsdp")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    newest = complete(tmp_path / "other" / "checkpoints")[-1]
    part = newest / "state-00001.safetensors"
    part.unlink() if harm == "missing" else part.write_bytes(part.read_bytes()[:-1] + b"\x55")
    actual, damaged = latest(newest.parent)
    assert actual.name == "step-00000007" and damaged == ["step-00000008"]
    together(2, go, small(8), tmp_path / "other", {}, parallel="fsdp")
    assert same(tmp_path / "run", tmp_path / "other")
    assert latest(newest.parent) == (newest, []) and len(complete(newest.parent)) == 2


def test_a_damaged_newer_checkpoint_does_not_push_out_sound_ones(tmp_path):
    for step in (3, 5, 90):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-00000004.partial").mkdir()
    partial = checkpoint.begin(tmp_path, 7)
    checkpoint.write_part(partial, 0, {})
    checkpoint.close(partial, {"step": 7})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000007"]


def failing(runtime: Runtime, recipe, out: Path, aside: bool):
    def full(partial, rank, mine):
        raise OSError(28, "No space left on device")

    if runtime.rank == 1:
        checkpoint.write_part = full
    return go(runtime, recipe, out, {"save_aside": aside})


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.slow
def test_a_part_that_cannot_be_written_is_an_error_of_every_process(tmp_path, aside):
    for error in together(2, failing, small(4), tmp_path, aside, parallel="fsdp"):
        assert "step-00000004" in str(error) and "could not write its part" in str(error)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_process_without_rows_still_has_its_part(tmp_path):
    """Four processes, and tensors of at most three rows."""
    assert together(4, few_rows, tmp_path, parallel="fsdp") == [3.0] * 4


def few_rows(runtime: Runtime, folder: Path) -> float:
    from vitkit.training.checkpoint import Saver, load_checkpoint
    from vitkit.training.step import TrainState

    model = torch.nn.Linear(2, 3)
    model.units, model.recompute = list, False
    state = TrainState.start(runtime.place(model), small().optimizer)
    Saver(folder, runtime).save(state, {"best": 3.0})
    return load_checkpoint(latest(folder)[0], state)["best"]


def idle(ready) -> None:
    ready.set()
    time.sleep(60)


def test_a_data_worker_that_outlives_its_run_does_not_keep_the_folder(tmp_path):
    fork = multiprocessing.get_context("fork")
    with locked(tmp_path, wait=False):
        worker = fork.Process(target=idle, args=(ready := fork.Event(),))
        worker.start()
        assert ready.wait(10)
    with locked(tmp_path, wait=False):
        worker.kill()
    worker.join()


def test_an_error_that_nobody_catches_does_not_wait_for_data_workers():
    code = """
from vitkit.data.loader import train_batches
from vitkit.data.order import Order
from vitkit.datasets.opening import open_data
from vitkit.data.views import View
source = next(iter(open_data("digits").values()))
batches = train_batches(source, View(size=(8, 8), crop="squash"), Order(len(source), 4), workers=1)
next(batches)
raise RuntimeError("a library's")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "a library's" in done.stderr


@pytest.mark.slow
def test_what_cannot_be_is_told_by_every_process(tmp_path):
    def told(recipe, world=2):
        return [str(error) for error in together(world, go, recipe, tmp_path, {})]

    assert all("cannot be shared by 3 processes; give --batch 15" in text for text in told(small(2), 3))
    with locked(tmp_path, wait=False):
        assert all("is in use by process" in text for text in told(small(2)))
    together(2, go, small(2), tmp_path, {})
    for text in told(small(2, seed=5, batch=8)):
        assert "--batch 16 -> 8, --seed 0 -> 5" in text
    done = together(2, go, small(2, micro_batch=4, evaluations=1, about="other"), tmp_path, {})
    assert done[0]["steps"] == 2
