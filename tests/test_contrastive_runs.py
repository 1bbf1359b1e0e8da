"""Contrastive learning from images to a fine-tuned classifier: runs, resumed and on several processes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from safetensors.torch import load_file
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, rows, same, tiny
from together import batches, in_bfloat16, losses, timed, together
from together import go as one_of_many

import vitkit
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.folder import Interrupted
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration

TINY = ("width=16", "depth=1", "heads=2", "hidden=16")
HEADS = {"contrastive.hidden": 16, "contrastive.key_width": 8}


def contrastive(steps: int = 8, **changes) -> Recipe:
    base = {"objective": "contrastive", "mixup": 0.0, "image_size": (16, 16), "dropout": 0.0,
            "model_options": TINY, "length": Duration(steps=steps), "task_options": HEADS,
            "randaugment": (), "crop": "resized", "evaluations": 2}  # fmt: skip
    return tiny(**(base | changes))


def state(out: Path) -> dict[str, torch.Tensor]:
    return load_file(complete(out / "checkpoints")[-1] / "state-00000.safetensors")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("contrastive")
    go(out, contrastive())
    return out


def test_a_run_leaves_the_student_and_the_statistics_of_its_features(straight):
    test = json.loads((straight / "result.json").read_text())["test"]
    assert test["images"] == 179 and test["loss"] > 0 and 0 < test["std"] < 2 and test["rank"] > 1
    model, kept = vitkit.load(straight), state(straight)
    assert model.head is None and model.labels == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(kept[f"model.student.vit.{name}"], tensor), name
    assert int(kept["model.step"]) == 8
    assert {name.split(".")[1] for name in kept if name.startswith("model.")} == {
        "student", "teacher", "predictor", "step",
    }  # fmt: skip
    start = build_model(contrastive(), open_splits(contrastive())["train"])
    assert torch.equal(model.project.weight, start.project.weight)  # frozen
    assert not torch.equal(model.encoder.norm.weight, start.encoder.norm.weight)
    logged = [row for row in rows(straight) if "loss" in row]
    assert len(logged) == 8 and all({"loss", "accuracy", "std"} <= set(row) for row in logged)


def test_a_stopped_run_ends_like_the_straight_one(straight, tmp_path):
    """Bit for bit, with the averaged weights, the running statistics and the moments of Adam."""
    with sigterm_at(3), pytest.raises(Interrupted):
        go(tmp_path, contrastive())
    go(tmp_path, contrastive())
    assert same(straight, tmp_path) and losses(straight) == losses(tmp_path)
    last = [complete(out / "checkpoints")[-1] / "state-00000.safetensors" for out in (straight, tmp_path)]
    assert last[0].read_bytes() == last[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_learn_like_one(straight, tmp_path, kind):
    together(2, one_of_many, contrastive(), tmp_path, {}, parallel=kind)
    assert losses(tmp_path) == pytest.approx(losses(straight), abs=1e-4)
    one, two = (json.loads((out / "result.json").read_text())["test"] for out in (straight, tmp_path))
    assert one.pop("split") == two.pop("split") and one.pop("top1") is two.pop("top1") is None
    assert two == pytest.approx(one, rel=1e-3)
    a, b = (vitkit.load(out).state_dict() for out in (straight, tmp_path))
    for name in a:
        assert torch.allclose(a[name], b[name], atol=1e-3), name
    spread = [[row["std"] for row in rows(out) if "std" in row] for out in (straight, tmp_path)]
    assert len(spread[0]) == 8 and spread[1] == pytest.approx(spread[0], abs=1e-4)


@pytest.mark.slow
def test_the_time_of_a_step_is_measured_on_several_processes():
    assert all(seconds > 0 for seconds in together(2, timed, contrastive()))


@pytest.fixture
def spoilt(tmp_path):
    """Sixty small pictures without labels, a third of them broken."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for i in range(60):
        path = tmp_path / "data" / f"{i}.png"
        Image.fromarray(rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)).save(path)
        if i % 3 == 2:
            path.write_bytes(path.read_bytes()[:60])
    return tmp_path / "data"


@pytest.mark.slow
def test_unusable_images_leave_the_same_gaps_on_any_number_of_processes(spoilt, tmp_path):
    r = contrastive(10, data=str(spoilt), batch=4, evaluations=0)
    r = replace(r, schedule=replace(r.schedule, rate=1e-4))  # the norm of two images amplifies rounding
    for world in (1, 2):
        together(world, one_of_many, r, tmp_path / str(world), {"max_bad": 0.6})
    one, two = (losses(tmp_path / str(world)) for world in (1, 2))
    assert two == pytest.approx(one, abs=1e-3) and len(one) == 10
    seen = [{place // 2 for place, _, _ in batch} for batch in batches(tmp_path / "2").values()]
    assert any(len(processes) == 1 for processes in seen), "no process was without an image"


def test_from_the_command_line_to_a_classifier(tmp_path, capsys):
    words = [
        "--model",
        "ViT-Ti/4",
        "--image-size",
        "16",
        "--batch",
        "16",
        "--workers",
        "0",
        "--device",
        "cpu",
    ]
    more = ["model_options=width=16,depth=1,heads=2,hidden=16", "schedule.warmup=1", "evaluations=1",
            "contrastive.hidden=16", "contrastive.key_width=8"]  # fmt: skip
    out = tmp_path / "pre"
    words = ["pretrain", "digits", "--recipe", "contrastive", *words, "--steps", "4", "--set", *more]
    assert run(*words, "--out", out) == 0
    assert "effective rank" in capsys.readouterr().out
    tune = ["finetune", "digits", "--weights", out, "--steps", "3", "--image-size", "16", "--batch", "16"]
    assert run(*tune, "--workers", "0", "--device", "cpu", "--out", tmp_path / "tuned", "--json") == 0
    assert json.loads(capsys.readouterr().out)["test"]["top1"] is not None


def test_from_weights_the_patch_embedding_is_trained(straight, tmp_path):
    go(tmp_path, contrastive(2, weights=str(straight), model="", model_options=(), evaluations=0))
    before, after = (vitkit.load(out).project.weight for out in (straight, tmp_path))
    assert not torch.equal(before, after)


def test_collapsed_features_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("vitkit.tasks.contrastive.GRACE", 3)
    monkeypatch.setattr("vitkit.tasks.contrastive.COLLAPSED", 10.0)
    with refused("training.collapsed", "step 4"):
        go(tmp_path, contrastive())


def test_a_resnet_is_refused(tmp_path):
    with refused("model.unsupported", "contrastive"):
        go(tmp_path, contrastive(model="BiT-R50x1", model_options=()))


def test_the_recipe_of_imagenet_has_mocos_numbers():
    r = recipe("contrastive-imagenet")
    assert r.schedule.rate == pytest.approx(1.5e-4 * r.batch / 256) and r.batch == 4096
    assert r.schedule.warmup == pytest.approx(40 * 1_281_167 / r.batch, abs=1) and r.length.epochs == 300
    assert (r.optimizer.kind, r.optimizer.betas, r.optimizer.weight_decay) == ("adam", (0.9, 0.999), 0.1)
    assert r.optimizer.decays == "all" and r.optimizer.clip == 0 and r.crop_area == 0.08 and r.flip
    task = r.task
    assert (task.temperature, task.momentum, task.hidden, task.key_width) == (0.2, 0.99, 4096, 256)
    assert (task.projector_layers, task.predictor_layers) == (3, 2)
    small = recipe("contrastive")
    assert small.schedule.rate == pytest.approx(1.5e-4 * small.batch / 256)


@pytest.mark.slow
def test_bfloat16_learns_the_same_to_rounding(straight, tmp_path):
    together(1, in_bfloat16, contrastive(), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=0.05)
