"""MAE and SimMIM from data to a fine-tuned classifier: runs, resumed and on several processes."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from refusals import refused
from safetensors.torch import load_file
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, rows, same, tiny
from together import go as one_of_many
from together import in_bfloat16, losses, together

import vitkit
from vitkit.models.positions import sincos2d
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runs.run import run as run_recipe
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.mae import Mae
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration
from vitkit.weights.locate import pretraining

BARE = ("width=32", "depth=2", "heads=2", "hidden=32", "positions=sincos2d-mae")
TASKS = ("mae", "simmim")
BOTH = ["mae", pytest.param("simmim", marks=pytest.mark.slow)]
WORDS = ["--model", "ViT-Ti/4", "--image-size", "16", "--batch", "16", "--workers", "0", "--device", "cpu"]
SMALL = ["--set", "model_options=width=32,depth=2,heads=2,hidden=32", "schedule.warmup=1", "evaluations=2"]


def training(task: str = "mae", **changes) -> Recipe:
    """Eight steps on the digits, with dropout, RandAugment and several evaluations."""
    base = {
        "objective": task, "mixup": 0.0, "image_size": (16, 16), "head_bias": 0.0, "test": 0.02, "val": 0.02,
        "length": Duration(steps=8), "evaluations": 2, "model_options": BARE,
    }  # fmt: skip
    return tiny(**(base | changes))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    outs = {task: tmp_path_factory.mktemp(task) for task in TASKS}
    for task, out in outs.items():
        go(out, training(task))
    return outs


@pytest.mark.parametrize("task", BOTH)
def test_a_run_leaves_a_plain_model_and_the_metrics_of_its_features(straight, task):
    out = straight[task]
    test = json.loads((out / "result.json").read_text())["test"]
    assert test["images"] == 39 and test["top1"] is None and test["loss"] > 0
    assert 0 < test["std"] <= 1.01 and 1 <= test["rank"] <= 32
    assert {"val_loss", "val_std", "val_rank"} <= set(rows(out)[4])
    model = vitkit.load(out / "model.safetensors")
    assert model.head is None and model.mask_token is None and model.labels == ()
    kept = load_file(complete(out / "checkpoints")[-1] / "state-00000.safetensors")
    assert all(torch.equal(kept[f"model.vit.{name}"], t) for name, t in model.state_dict().items())
    assert any(name.startswith("model.decoder." if task == "mae" else "model.predict.") for name in kept)
    assert "model.decoder.positions" not in kept  # fixed


@pytest.mark.parametrize("task", BOTH)
def test_the_report_has_a_batch_with_hidden_patches_and_reconstructions(straight, task):
    content = json.loads((straight[task] / "feature-pictures.json").read_text())["pictures"]
    assert [one["caption"] for one in content] == 4 * ["original", "visible", "reconstruction"]
    sizes = {Image.open(io.BytesIO(base64.b64decode(one["image"]))).size for one in content}
    assert sizes == {(192, 192)}
    batch = json.loads((straight[task] / "training-batch.json").read_text())
    assert "hidden patches" in batch["how"] and not any(one["labels"] for one in batch["images"])


@pytest.mark.parametrize("task", BOTH)
def test_a_stopped_run_ends_like_the_straight_one(straight, tmp_path, task):
    with sigterm_at(5), pytest.raises(Interrupted, match="SIGTERM at step"):
        go(tmp_path, training(task))
    go(tmp_path, training(task))
    assert same(straight[task], tmp_path) and losses(straight[task]) == losses(tmp_path)
    last = [complete(at / "checkpoints")[-1] / "state-00000.safetensors" for at in (straight[task], tmp_path)]
    assert last[0].read_bytes() == last[1].read_bytes()  # the decoder and its moments too
    tests = [json.loads((at / "result.json").read_text())["test"] for at in (straight[task], tmp_path)]
    assert tests[0] == tests[1]


@pytest.mark.parametrize("task", BOTH)
def test_micro_batches_change_no_image_and_no_mask(tmp_path, task):
    for name, micro in (("whole", 0), ("pieces", 5)):
        go(tmp_path / name, training(task, dropout=0.0, evaluations=0, micro_batch=micro))
    assert losses(tmp_path / "pieces") == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


def test_recomputed_activations_change_no_bit(straight, tmp_path):
    run_recipe(training(), tmp_path, Runtime(recompute=True), RunOptions(workers=0, quiet=True))
    assert same(straight["mae"], tmp_path) and losses(tmp_path) == losses(straight["mae"])


@pytest.mark.parametrize("task", BOTH)
@pytest.mark.slow
def test_an_evaluation_hides_the_same_patches_every_time_and_in_any_batch(tmp_path, task):
    still = {
        "schedule": replace(training().schedule, rate=0.0),
        "length": Duration(steps=1),
        "evaluations": 0,
    }
    first, second, other = (
        go(tmp_path / name, training(task, batch=batch, **still)).test
        for name, batch in (("a", 16), ("b", 16), ("c", 7))
    )
    assert first == second
    assert other["loss"] == pytest.approx(first["loss"], abs=1e-6)
    assert other["rank"] == pytest.approx(first["rank"], rel=1e-4)


def for_many(task: str, **changes) -> Recipe:
    """For several processes: without dropout, which is each process's own."""
    return training(task, dropout=0.0, evaluations=1, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize(("kind", "micro"), [("ddp", 3), ("fsdp", 0)])
def test_two_processes_learn_like_one(tmp_path, task, kind, micro):
    go(tmp_path / "one", for_many(task))
    together(2, one_of_many, for_many(task, micro_batch=micro), tmp_path / "many", {}, parallel=kind)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    one, many = (json.loads((tmp_path / n / "result.json").read_text())["test"] for n in ("one", "many"))
    assert many["images"] == one["images"] and many["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert many["std"] == pytest.approx(one["std"], abs=1e-3)
    assert many["rank"] == pytest.approx(one["rank"], rel=1e-2)
    a, b = (vitkit.load(tmp_path / n / "model.safetensors").state_dict() for n in ("one", "many"))
    assert all(torch.allclose(a[name], b[name], atol=1e-3) for name in a)
    shown = [json.loads((tmp_path / n / "feature-pictures.json").read_text()) for n in ("one", "many")]
    assert len(shown[0]["pictures"]) == len(shown[1]["pictures"]) == 12


@pytest.mark.slow
def test_bfloat16_learns_the_same_to_rounding(straight, tmp_path):
    together(1, in_bfloat16, training(), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(straight["mae"]), rel=0.02)


@pytest.mark.parametrize("task", BOTH)
def test_from_the_command_line_to_a_classifier(tmp_path, capsys, task):
    out = tmp_path / "pre"
    words = ["pretrain", "digits", "--recipe", task, *WORDS, "--steps", "6", "--out", out, *SMALL]
    assert run(*words) == 0
    output = capsys.readouterr().out
    assert "effective rank" in output and f"--weights {out}" in output
    tune = ["finetune", "digits", "--weights", out, "--steps", "4", "--image-size", "24", *WORDS[4:]]
    assert run(*tune, "--out", tmp_path / "tuned", "--json") == 0
    assert json.loads(capsys.readouterr().out)["test"]["top1"] is not None
    model = vitkit.load(tmp_path / "tuned" / "model.safetensors")
    assert len(model.labels) == 10 and model.config.image_size == (24, 24)
    tuned = json.loads((tmp_path / "tuned" / "recipe.json").read_text())
    assert (tuned["optimizer"]["layer_decay"], tuned["stochastic_depth"]) == (0.65, 0.1)
    assert (model.config.head, model.config.final_norm, model.config.class_token) == ("gap", "pooled", True)
    assert model.pool_norm.weight.ne(1).any()  # it is trained
    assert run(*tune, "--out", tmp_path / "tuned", "--json") == 0  # the same command finds its run
    assert json.loads(capsys.readouterr().out)["already_finished"]
    assert vitkit.load(out).task == task and model.task == "classify"
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes((out / "model.safetensors").read_bytes())
    assert pretraining(copied) == (task, 32) and pretraining(tmp_path / "tuned") == ("", 32)
    assert run("predict", out, Path(__file__).parent) == 2  # it has no head
    capsys.readouterr()
    more = ["pretrain", "digits", "--recipe", task, "--weights", out, *WORDS[2:], "--steps", "2", "--json"]
    assert run(*more, "--out", tmp_path / "more", "--set", "evaluations=0", f"{task}.mask_ratio=0.5") == 0
    stored = json.loads((tmp_path / "more" / "recipe.json").read_text())
    assert stored["task_options"] == {f"{task}.mask_ratio": 0.5}


@pytest.mark.parametrize("format, name", [("timm", "m.pth"), ("hf", "m")])
def test_fixed_positions_are_written_as_a_table_for_other_libraries(straight, tmp_path, format, name):
    model = vitkit.load(straight["mae"])
    notes = vitkit.save(model, tmp_path / name, format)
    assert any("table" in note for note in notes)
    back = vitkit.load(tmp_path / name, heads=2, image_size=16, gelu="tanh")
    images = torch.randn(2, 3, 16, 16)
    assert back.config.positions == "1d" and torch.allclose(back(images), model(images), atol=1e-5)


def test_the_published_recipes():
    r = recipe("mae-imagenet")
    assert (r.model, r.batch, r.length.epochs, r.schedule.rate) == ("MAE-B/16", 4096, 800, 2.4e-3)
    assert (r.schedule.warmup, r.schedule.decay, r.schedule.floor) == (12_511, "cosine", 0.0)
    o = r.optimizer
    assert (o.kind, o.betas, o.weight_decay, o.clip) == ("adam", (0.9, 0.95), 0.05, 0.0)
    assert (r.crop, r.crop_area, r.interpolation, r.flip) == ("resized", 0.2, "bicubic", True)
    assert (r.randaugment, r.color_jitter, r.mixup, r.image_size) == ((), 0.0, 0.0, (224, 224))
    task = r.task
    assert isinstance(task, Mae) and task.mask_ratio == 0.75 and task.norm_pix
    one = recipe("mae")
    assert one.schedule.rate / one.batch == pytest.approx(1.5e-4 / 256) and not one.model
    s = recipe("simmim")
    assert (s.schedule.rate / s.batch, s.crop_area, s.optimizer.clip) == (1e-4 / 512, 0.67, 5.0)
    assert (s.schedule.decay, s.schedule.stairs, s.stochastic_depth) == ("stairs", (0.875,), 0.1)
    assert s.task.mask_ratio == 0.6 and s.optimizer.betas == (0.9, 0.999)


def test_the_published_run_can_be_started():
    r = replace(recipe("mae-imagenet"), data="digits")
    model = build_model(r, open_splits(r)["train"])
    c = model.config
    assert (c.width, c.depth, c.gelu, c.positions, c.classes) == (768, 12, "erf", "sincos2d-mae", 0)
    at = model.positions.at((14, 14))[0, 1]  # of the first patch; the class token has none
    assert torch.equal(at, sincos2d((14, 14), 768, kind="sincos2d-mae")[0, 0].to(at.dtype))


def test_what_mae_cannot_train_is_said_before_anything_runs(tmp_path: Path):
    for model, word in (("BiT-R50x1", "ResNet"), ("SigLIP-B/16", "map")):
        with refused("model.unsupported", "mae", word):
            go(
                tmp_path / model.replace("/", "-"),
                training(model=model, model_options=(), image_size=(32, 32)),
            )
    with refused("recipe.value", "objective=mae", "mixup"):
        training(mixup=0.2)


def test_a_new_pooling_is_refused_where_it_has_no_use(tmp_path):
    with refused("recipe.value", "pooling=mean"):
        training(pooling="mean")
    with refused("recipe.value", "pooling=mean"):
        tiny(pooling="mean", train="lora")
    with refused("request.conflict", "pooling=mean"):
        go(tmp_path, tiny(pooling="mean"))
