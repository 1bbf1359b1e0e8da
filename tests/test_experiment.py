"""Runs: resumed ones equal straight ones, bit for bit; kills, damage and locks are survived."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from sigterm import sigterm_at
from together import in_bfloat16, losses, together

import vitkit
from vitkit.io.files import locked
from vitkit.recipes import RECIPES, recipe
from vitkit.recipes.recipe import Recipe, from_json, override, to_json
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime
from vitkit.training.checkpoint import CheckpointError, complete, latest
from vitkit.training.schedule import Duration

TINY = ("width=32", "depth=2", "heads=2", "hidden=32", "dropout=0.1")


def tiny(**changes) -> Recipe:
    """Twelve steps on the digits with everything random switched on."""
    base = override(recipe("scratch"), ["image_size=8", "batch=16", "schedule.warmup=2", "evaluations=3"])
    base = replace(base, data="digits", model="ViT-Ti/4", model_options=TINY, length=Duration(steps=12))
    return replace(base, **({"dropout": 0.1, "mixup": 0.2, "randaugment": (1, 5)} | changes))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return vitkit.load(out / "model.safetensors").state_dict()


def same(a: Path, b: Path) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


CLOCK = ("seconds", "waited", "cost_seconds", "cost_device_hours", "cost_images_per_second")  # never the same


def rows(out: Path) -> list[dict]:
    actual = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in actual]


def go(out: Path, r: Recipe, **options):
    return run(r, out, Runtime(), RunOptions(quiet=True, **({"workers": 0} | options)))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("straight")
    go(out, tiny())
    return out


def test_a_run_leaves_all_that_its_folder_promises(straight):
    names = {p.name for p in straight.iterdir()}
    assert {"recipe.json", "metrics.jsonl", "checkpoints", "model.safetensors", "result.json"} <= names
    result = json.loads((straight / "result.json").read_text())
    assert result["steps"] == 12 and result["test"]["images"] == 179 and result["cost"]["images_seen"] == 192
    model = vitkit.load(straight / "model.safetensors")
    assert model.labels == tuple("0123456789") and model.config.image_size == (8, 8)
    assert from_json((straight / "recipe.json").read_text()) == tiny()


def test_evaluations_are_at_even_distances_and_the_last_is_the_end(tmp_path):
    go(tmp_path, tiny(length=Duration(steps=13)))
    assert [row["step"] for row in rows(tmp_path) if "val_top1" in row] == [5, 9, 13]
    assert [row["step"] for row in rows(tmp_path) if "test_top1" in row] == [13]


class Killed(Exception):
    """Where a test ends a run without a word."""


def noting(monkeypatch, scores=(), die_at: int = 0) -> list[dict[str, torch.Tensor]]:
    """The weights of every evaluation on val; `scores` take the place of its accuracy, one after another."""
    from vitkit.runs.evaluator import Evaluator

    real, seen = Evaluator.evaluate, []

    def evaluate(self, split):
        actual = real(self, split)
        if split == "val":
            if self.run.state.step == die_at:
                raise Killed
            seen.append({n: t.clone() for n, t in self.run.state.model.state_dict().items()})
            actual = replace(actual, top1=scores[len(seen) - 1]) if scores else actual
        return actual

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    return seen


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("best", [0, 1, 2])
def test_with_patience_the_best_evaluated_weights_are_kept_also_the_last(
    tmp_path, monkeypatch, best, average
):
    scores = [0.5 if i == best else 0.4 for i in range(3)]
    seen = noting(monkeypatch, scores)
    optimizer = replace(tiny().optimizer, average=average)
    assert go(tmp_path, tiny(patience=100, optimizer=optimizer)).steps == 12
    assert len(seen) == 3 and not equal(seen[0], seen[1]) and not equal(seen[1], seen[2])
    assert equal(weights(tmp_path), seen[best])


def test_without_patience_the_last_weights_are_kept(tmp_path, monkeypatch):
    seen = noting(monkeypatch, [0.5, 0.4, 0.3])
    go(tmp_path, tiny())
    assert equal(weights(tmp_path), seen[2])


def test_the_average_is_evaluated_and_kept_while_the_raw_weights_go_on(straight, tmp_path, monkeypatch):
    seen = noting(monkeypatch)
    go(tmp_path, tiny(optimizer=replace(tiny().optimizer, average=0.9)))
    assert equal(weights(tmp_path), seen[2]) and not same(tmp_path, straight)
    actual = [[row["loss"] for row in rows(out) if "loss" in row] for out in (straight, tmp_path)]
    assert actual[0] == actual[1], "training does not notice"
    state = load_file(complete(tmp_path / "checkpoints")[-1] / "state-00000.safetensors")
    raw = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
    average = {n.removeprefix("average."): t for n, t in state.items() if n.startswith("average.")}
    assert equal(raw, weights(straight)) and equal(average, seen[2])


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.slow
def test_a_run_killed_before_its_last_evaluation_ends_like_the_straight_one(tmp_path, monkeypatch, average):
    recipe = tiny(patience=100, optimizer=replace(tiny().optimizer, average=average))
    go(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        patch.setattr("vitkit.runs.checkpointer.SAVE_SECONDS", 0.0)
        noting(patch, die_at=12)
        with pytest.raises(Killed):
            go(tmp_path / "killed", recipe)
    assert latest(tmp_path / "killed" / "checkpoints")[0].name == "step-00000012"
    go(tmp_path / "killed", recipe)
    assert same(tmp_path / "whole", tmp_path / "killed")
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")


def test_an_earlier_versions_run_evaluates_its_end_once(tmp_path, monkeypatch):
    """Its last checkpoint is of the last step, and was never evaluated."""
    from vitkit.runs import run as experiment

    recipe, seen, real = tiny(patience=100), noting(monkeypatch, [0.4, 0.5, 0.6]), experiment.Trainer.validate
    with monkeypatch.context() as patch:
        patch.setattr(
            experiment.Trainer, "validate", lambda self: real(self) if self.run.state.step < 12 else None
        )
        go(tmp_path, recipe)
    assert len(seen) == 2 and equal(weights(tmp_path), seen[1])
    go(tmp_path, recipe)
    go(tmp_path, recipe)
    assert len(seen) == 3 and equal(weights(tmp_path), seen[2])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(straight, tmp_path, workers):
    go(tmp_path, tiny(), workers=workers)
    assert same(straight, tmp_path) and rows(straight) == rows(tmp_path)


@pytest.mark.parametrize("at", [1, 4, 11, 12])
def test_a_run_stopped_by_a_signal_ends_like_the_straight_one(straight, tmp_path, at):
    stopped(tmp_path, tiny(), at)
    go(tmp_path, tiny())
    assert same(straight, tmp_path) and rows(straight) == rows(tmp_path)


def stopped(out: Path, r: Recipe, at: int) -> None:
    """A run that a signal stops at a step."""
    with sigterm_at(at), pytest.raises(Interrupted, match="SIGTERM at step"):
        go(out, r)


def test_a_damaged_checkpoint_is_passed_over(straight, tmp_path):
    from vitkit.runs import checkpointer

    saved = checkpointer.SAVE_SECONDS
    checkpointer.SAVE_SECONDS = 0.0
    try:
        go(tmp_path, tiny())
    finally:
        checkpointer.SAVE_SECONDS = saved
    newest = complete(tmp_path / "checkpoints")[-1]
    content = bytearray((newest / "state-00000.safetensors").read_bytes())
    content[-5] ^= 1
    (newest / "state-00000.safetensors").write_bytes(content)
    actual, damaged = latest(tmp_path / "checkpoints")
    assert damaged == [newest.name] and actual == complete(tmp_path / "checkpoints")[-2]
    go(tmp_path, tiny())
    assert same(straight, tmp_path)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    from vitkit.training import checkpoint

    go(tmp_path, tiny())
    before = complete(tmp_path / "checkpoints")
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"needs .* bytes and 100 are free"):
        go(tmp_path, tiny())
    assert complete(tmp_path / "checkpoints") == before


def test_a_second_process_is_refused(tmp_path):
    with locked(tmp_path, wait=False), refused("run.locked", tmp_path, f"process {os.getpid()}"):
        go(tmp_path, tiny())


def test_a_changed_recipe_is_refused_with_what_changed(straight):
    with pytest.raises(ValueError, match=r"--seed 0 -> 1.*another --out"):
        go(straight, tiny(seed=1))


def test_averaged_weights_are_what_is_saved(tmp_path):
    r = tiny(optimizer=replace(tiny().optimizer, average=0.5))
    go(tmp_path, r)
    arrays = load_file(complete(tmp_path / "checkpoints")[-1] / "state-00000.safetensors")
    assert torch.equal(weights(tmp_path)["head.weight"], arrays["average.head.weight"])
    assert not torch.equal(weights(tmp_path)["head.weight"], arrays["model.head.weight"])


def test_patience_stops_a_run_that_gets_no_better(tmp_path):
    r = tiny(patience=1, evaluations=12, schedule=replace(tiny().schedule, rate=0.0))
    assert go(tmp_path, r).steps == 2
    before = weights(tmp_path)["encoder.norm.weight"].clone()
    assert go(tmp_path, r).steps == 2  # again: it has stopped, and stays so
    assert torch.equal(weights(tmp_path)["encoder.norm.weight"], before)


def test_fine_tuning_at_a_higher_resolution_starts_from_a_run(straight, tmp_path):
    r = replace(
        tiny(), model="", model_options=(), weights=str(straight / "model.safetensors"), image_size=(16, 12)
    )
    go(tmp_path, r)
    assert vitkit.load(tmp_path / "model.safetensors").config.image_size == (16, 12)


def test_bad_files_are_named_once_and_the_run_goes_on(tmp_path, capfd):
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(40):
        folder = tmp_path / "data" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "data" / "cat" / "broken.png").write_bytes(b"not an image")
    r = tiny(data=str(tmp_path / "data"), evaluations=0, length=Duration(steps=8))
    result = run(r, tmp_path / "run", Runtime(), RunOptions(workers=2, max_bad=0.2))
    named = capfd.readouterr().err.count("broken.png")
    assert named == 1 and result.steps == 8
    with refused("data.too-many-bad", "1 of ", "broken.png"):
        run(r, tmp_path / "strict", Runtime(), RunOptions(workers=0, max_bad=0.0, quiet=True))


def test_nothing_to_start_from_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"--weights FILE\|NAME, or --model"):
        go(tmp_path, tiny(model=""))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name):
    assert from_json(to_json(recipe(name))) == recipe(name)


def test_table_4_is_as_published():
    steps = {
        "imagenet": 20_000,
        "cifar100": 10_000,
        "cifar10": 10_000,
        "pets": 500,
        "flowers": 500,
        "vtab": 2500,
    }
    for name, length in steps.items():
        r = recipe(name)
        assert r.length.steps == length and r.batch == 512 and r.image_size == (384, 384)
        assert r.optimizer.kind == "sgd" and r.optimizer.momentum == 0.9 and r.optimizer.clip == 1
        assert r.optimizer.weight_decay == 0 and r.schedule.decay == "cosine"
    assert recipe("vtab").schedule.rate == 0.01


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("rate=3", ("recipe.unknown-field", "'rate'", "schedule.rate")),
        ("optimizer.speed=3", ("recipe.unknown-field", "'speed'", "weight_decay")),
        ("batch=many", ("recipe.value", "batch", "'many'", "a whole number")),
        ("batch", ("recipe.value", "'batch'", "field=value")),
        ("optimizer.kind=lion", ("recipe.value", "lion", "sgd, adam")),
        ("batch=0", ("recipe.value", "batch", "1 to 65536", "not 0")),
    ],
)
def test_overrides_are_checked(change, refusal):
    with refused(*refusal):
        override(recipe("finetune"), [change])


def test_overrides_reach_every_kind_of_field():
    changes = [
        "image_size=64x32",
        "flip=no",
        "optimizer.average=0.9999",
        "length.steps=3",
        "schedule.stairs=0.5,0.9",
        "model_options=attention=axial,depth=2",
    ]
    r = override(recipe("finetune"), changes)
    assert r.model_options == {"attention": "axial", "depth": 2}
    assert r.image_size == (64, 32) and r.flip is False and r.optimizer.average == 0.9999
    assert r.length.steps == 3 and r.schedule.stairs == (0.5, 0.9)


@pytest.mark.slow
def test_bfloat16_follows_the_weights_as_they_learn(straight, tmp_path):
    """Autocast keeps copies of the weights while it is entered: it must be left between steps."""
    r = tiny(mixup=0.0, randaugment=(), dropout=0.0, length=Duration(steps=60), crop="squash", flip=False)
    r = override(
        r, ["schedule.rate=0.005", "evaluations=0", "model_options=width=32,depth=2,heads=2,hidden=32"]
    )
    run(r, tmp_path / "fp32", Runtime(), RunOptions(workers=0, quiet=True))
    together(1, in_bfloat16, r, tmp_path / "bf16")
    full, half = (np.array(losses(tmp_path / precision)) for precision in ("fp32", "bf16"))
    assert full[-10:].mean() < 0.7 * full[0]
    assert half[-10:].mean() == pytest.approx(full[-10:].mean(), rel=0.1)


def test_a_head_fitted_first_is_kept_by_a_resumed_run(straight, tmp_path):
    """The fit is made once; training goes on from it, and a resumed run equals one that was never stopped."""
    changes = {"weights": str(straight / "model.safetensors"), "model": "", "model_options": ()}
    r = tiny(**changes, head_init="least-squares", sampling="balanced", class_weights="balanced", cutmix=1.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fitted = go(whole, r)
    stopped(parts, r, 5)
    go(parts, r)
    assert same(whole, parts) and rows(whole) == rows(parts)
    still = replace(
        r, schedule=replace(r.schedule, rate=0.0, warmup=0), length=Duration(steps=1), keep="last"
    )
    unfitted = replace(still, head_init="zero")
    results = {name: go(tmp_path / name, one) for name, one in (("still", still), ("unfitted", unfitted))}
    assert results["still"].test["top1"] > results["unfitted"].test["top1"] + 0.2  # a zero head knows nothing
    assert fitted.test["images"] == results["still"].test["images"]
    with refused("request.conflict", "head_init"):
        go(tmp_path / "scratch", tiny(head_init="least-squares"))


def test_a_calibrated_run_has_the_same_labels_and_fitting_probabilities(tmp_path):
    """Mixup and smoothing make a model unsure of what it knows; one temperature, found on val, mends it."""
    r = tiny(length=Duration(steps=120), mixup=0.8, label_smoothing=0.2, randaugment=(), dropout=0.0)
    r = replace(r, val=0.3, patience=0, keep="best", schedule=replace(r.schedule, rate=3e-3))
    without, calibrated = (go(tmp_path / str(c), replace(r, calibrate=c)) for c in (False, True))
    assert without.test["top1"] == calibrated.test["top1"] and calibrated.test["loss"] < without.test["loss"]
    model = vitkit.load(tmp_path / "True" / "model.safetensors")
    assert (
        0.1 < model.reject_below < 1
        and vitkit.load(tmp_path / "False" / "model.safetensors").reject_below == 0
    )
    heads = [vitkit.load(tmp_path / c / "model.safetensors").head.weight for c in ("False", "True")]
    ratio = heads[0] / heads[1]
    assert float(ratio.std()) < 1e-4 and 0.25 <= float(ratio.mean()) < 1  # sharper than it was
