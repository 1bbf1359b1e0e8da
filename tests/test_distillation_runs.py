"""Distillation from images to a model that is fine-tuned or predicts: resumed, and on several processes."""

import json
import shutil
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
from together import go as one_of_many
from together import in_bfloat16, losses, together

import vitkit
from vitkit.models.variants import build
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, from_json, to_json
from vitkit.runs.folder import Interrupted
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration
from vitkit.weights.save import save

TINY = ("width=16", "depth=1", "heads=2", "hidden=16")
KINDS = ("features", "hard", "soft")


def teacher_file(path: Path, seed: int = 0) -> str:
    """A larger random classifier of the digits, with other patches than the student."""
    model = build("ViT-Ti/8", seed=seed, width=32, depth=2, heads=2, hidden=48, image_size=24, classes=10)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
    model.labels = tuple("0123456789")
    save(model, path)
    return str(path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return teacher_file(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def distilled(kind: str, teacher: str, steps: int = 8, **changes) -> Recipe:
    options = {"distill.teacher": teacher}
    if kind != "features":
        options = {"distill_labels.teacher": teacher, "distill_labels.kind": kind}
    base = {"objective": "distill" if kind == "features" else "distill_labels", "image_size": (16, 16),
            "dropout": 0.0, "model_options": TINY, "length": Duration(steps=steps), "task_options": options,
            "mixup": 1.0, "cutmix": 1.0, "evaluations": 2, "crop": "resized"}  # fmt: skip
    return tiny(**(base | changes))


def state(out: Path) -> dict[str, torch.Tensor]:
    return load_file(complete(out / "checkpoints")[-1] / "state-00000.safetensors")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, teacher):
    """One undisturbed run of each kind."""
    folder = tmp_path_factory.mktemp("distilled")
    for kind in KINDS:
        go(folder / kind, distilled(kind, teacher))
    return folder


def test_a_run_of_features_leaves_a_model_without_a_head(straight):
    out = straight / "features"
    test = json.loads((out / "result.json").read_text())["test"]
    assert test["images"] == 179 and test["loss"] > 0 and test["std"] > 0 and test["rank"] > 1
    model, kept = vitkit.load(out), state(out)
    assert model.head is None and {n.split(".")[1] for n in kept if n.startswith("model.")} == {
        "student", "to_feature", "to_patches", "teacher",
    }  # fmt: skip
    assert kept["model.teacher"].shape == (32,)  # the digest, not the teacher
    for name, tensor in model.state_dict().items():
        assert torch.equal(kept[f"model.student.{name}"], tensor), name
    logged = [row for row in rows(out) if "loss" in row]
    assert all(row["loss"] == pytest.approx(row["global"] + row["dense"], rel=1e-5) for row in logged)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_run_of_labels_leaves_a_classifier_that_predicts(straight, kind, tmp_path):
    out = straight / kind
    test = json.loads((out / "result.json").read_text())["test"]
    model = vitkit.load(out)
    assert test["images"] == 179 and 0 <= test["top1"] <= 1 and sum(map(sum, test["confusion"])) == 179
    assert model.task == "classify" and model.labels == tuple("0123456789") and model.config.distilled
    picture = np.full((16, 16, 3), 128, np.uint8)
    (answer,) = [vitkit.predict(model, picture, top=10)]
    assert sum(p for _, p in answer) == pytest.approx(1, abs=1e-5)
    assert run("evaluate", out, "digits", "--workers", 0) == 0
    assert model.distillation_head.weight.any() and model.head.weight.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_ends_like_the_straight_one(straight, teacher, tmp_path, kind):
    with sigterm_at(3), pytest.raises(Interrupted):
        go(tmp_path, distilled(kind, teacher))
    go(tmp_path, distilled(kind, teacher))
    assert same(straight / kind, tmp_path) and losses(straight / kind) == losses(tmp_path)
    last = [complete(o / "checkpoints")[-1] / "state-00000.safetensors" for o in (straight / kind, tmp_path)]
    assert last[0].read_bytes() == last[1].read_bytes()


@pytest.mark.parametrize("kind", ["features", "hard"])
def test_another_teacher_of_the_same_name_is_refused(tmp_path, kind):
    place = teacher_file(tmp_path / "teacher.safetensors")
    with sigterm_at(3), pytest.raises(Interrupted):
        go(tmp_path / "run", distilled(kind, place))
    shutil.copy(place, tmp_path / "kept")
    teacher_file(tmp_path / "teacher.safetensors", seed=1)
    with refused("run.changed", "teacher.safetensors"):
        go(tmp_path / "run", distilled(kind, place))
    shutil.copy(tmp_path / "kept", place)
    assert go(tmp_path / "run", distilled(kind, place)).steps == 8
    other = teacher_file(tmp_path / "other.safetensors")  # the same content under another name
    with refused("run.changed"):
        go(tmp_path / "run", distilled(kind, other))


SLOW = [
    pytest.param(*pair, marks=pytest.mark.slow)
    for pair in (("features", "fsdp"), ("soft", "ddp"), ("soft", "fsdp"))
]


@pytest.mark.parametrize(("kind", "parallel"), [("features", "ddp"), *SLOW])
@pytest.mark.slow
def test_two_processes_learn_like_one(straight, teacher, tmp_path, kind, parallel):
    together(2, one_of_many, distilled(kind, teacher), tmp_path, {}, parallel=parallel)
    assert losses(tmp_path) == pytest.approx(losses(straight / kind), abs=1e-4)
    one, two = (json.loads((o / "result.json").read_text())["test"] for o in (straight / kind, tmp_path))
    assert one["images"] == two["images"] and two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    a, b = (vitkit.load(out).state_dict() for out in (straight / kind, tmp_path))
    for name in a:
        assert torch.allclose(a[name], b[name], atol=1e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_nothing(straight, teacher, tmp_path, kind):
    go(tmp_path, distilled(kind, teacher, micro_batch=5))
    assert losses(tmp_path) == pytest.approx(losses(straight / kind), abs=1e-4)


def test_the_best_weights_and_an_average_come_back(teacher, tmp_path):
    r = distilled("features", teacher, keep="best", report_on="val", evaluations=4)
    result = go(tmp_path, replace(r, optimizer=replace(r.optimizer, average=0.5)))
    seen = {row["step"]: row["val_loss"] for row in rows(tmp_path) if "val_loss" in row}
    assert result.test["loss"] == result.kept["val_loss"] == min(seen.values())


def test_a_small_model_learns_a_larger_ones_features(teacher, tmp_path):
    r = distilled("features", teacher, 60, mixup=0.0, cutmix=0.0, randaugment=(), evaluations=0)
    go(tmp_path, replace(r, schedule=replace(r.schedule, rate=0.01)))
    logged = losses(tmp_path)
    assert np.mean(logged[-5:]) < 0.7 * np.mean(logged[:3])


def test_images_without_labels_are_enough(teacher, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for i in range(40):
        picture = Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8))
        picture.save(tmp_path / "pictures" / f"{i}.png")
    r = distilled("features", teacher, 2, data=str(tmp_path / "pictures"))
    assert go(tmp_path / "run", r).test["images"] == 4


def test_from_the_command_line_to_a_classifier(teacher, tmp_path, capsys):
    words = ["--image-size", "16", "--batch", "16", "--workers", "0", "--device", "cpu", "--steps", "3"]
    more = ["model_options=width=16,depth=1,heads=2,hidden=16", "schedule.warmup=1", "evaluations=1"]
    own = ["distill.teacher_size=24", "--teacher", teacher]
    model = ["--model", "ViT-Ti/4"]
    pre = ["pretrain", "digits", "--recipe", "distill", *model, *words, "--set", *more]
    assert run(*pre, "--out", tmp_path / "no") == 2
    assert "--teacher" in capsys.readouterr().err
    assert run("pretrain", "digits", "--task", "mae", "--teacher", teacher, "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "request.conflict"
    assert run(*pre, *own, "--out", tmp_path / "pre") == 0
    assert "effective rank" in capsys.readouterr().out
    tune = [
        "finetune",
        "digits",
        "--weights",
        tmp_path / "pre",
        *words,
        "--out",
        tmp_path / "tuned",
        "--json",
    ]
    assert run(*tune) == 0
    assert json.loads(capsys.readouterr().out)["test"]["top1"] is not None
    deit = ["pretrain", "digits", "--recipe", "deit-distilled", *words, "--out", tmp_path / "deit", "--json"]
    options = ["model_options=width=16,depth=1,heads=2,hidden=16,patch=4", *more[1:]]
    assert run(*deit, "--set", *options, f"distill_labels.teacher={teacher}") == 0
    assert json.loads(capsys.readouterr().out)["test"]["top1"] is not None
    assert vitkit.load(tmp_path / "deit").config.distilled


@pytest.mark.parametrize("change", [{}, {"train": "lora"}, {"train": "head", "head_init": "least-squares"}])
def test_a_pretrained_model_gets_a_distillation_token(straight, teacher, tmp_path, change):
    r = distilled("hard", teacher, 3, weights=str(straight / "features"), model="", model_options=(),
                  evaluations=0, mixup=0.0, cutmix=0.0, **change)  # fmt: skip
    go(tmp_path, r)
    model = vitkit.load(tmp_path)
    assert model.config.distilled and model.distillation_head.weight.any() and model.task == "classify"


def test_other_classes_than_the_datas_are_refused(tmp_path):
    model = build("ViT-Ti/8", width=16, depth=1, heads=2, hidden=16, image_size=24, classes=7)
    save(model, tmp_path / "seven.safetensors")
    with refused("evaluation.classes", "7 classes", "10"):
        go(tmp_path / "run", distilled("hard", str(tmp_path / "seven.safetensors")))


def test_the_recipes_have_the_published_numbers():
    r = recipe("deit-distilled")
    assert r.batch == 1024 and r.length.epochs == 300 and r.schedule.rate == pytest.approx(5e-4 * 1024 / 512)
    assert r.schedule.warmup == pytest.approx(5 * 1_281_167 / 1024, abs=1) and r.schedule.floor == 1e-5
    assert (r.optimizer.weight_decay, r.optimizer.clip, r.stochastic_depth) == (0.05, 0.0, 0.1)
    assert (r.mixup, r.cutmix, r.label_smoothing, r.erasing, r.randaugment) == (0.8, 1.0, 0.1, 0.25, (2, 9))
    assert (r.task.kind, r.task.alpha, r.task.temperature) == ("hard", 0.5, 1.0)
    r = recipe("distill")
    assert r.crop_area == 0.14 and r.mixup == 1.0 and r.optimizer.weight_decay == 0.04
    assert r.schedule.rate == pytest.approx(5e-4 * (r.batch / 1536) ** 0.5, rel=0.03)
    for name in ("distill", "deit-distilled", "contrastive", "contrastive-imagenet"):
        assert from_json(to_json(recipe(name))) == recipe(name)


@pytest.mark.parametrize("kind", ["features", "hard"])
@pytest.mark.slow
def test_bfloat16_learns_the_same_to_rounding(straight, teacher, tmp_path, kind):
    together(1, in_bfloat16, distilled(kind, teacher), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(straight / kind), rel=0.05)
