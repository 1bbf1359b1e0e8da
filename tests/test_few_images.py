"""A few images per class: a calibrated fitted head, warm-up, and what is refused before any training."""

import json

import numpy as np
import pytest
import torch
from conftest import SMALL, randomise
from PIL import Image
from refusals import refused
from test_cli import run as command

import vitkit
from vitkit.commands.finetune import finetuning
from vitkit.data.folds import check_classes
from vitkit.data.sources.source import from_arrays
from vitkit.models.variants import build
from vitkit.options import Training
from vitkit.planning import automatic, finetune_rules, plan_text
from vitkit.recipes import recipe
from vitkit.recipes.recipe import override
from vitkit.runs.build import SplitCache, warnings
from vitkit.runs.features import Extractor, labels_of
from vitkit.runs.kept_weights import calibration_note
from vitkit.runtime.runtime import Runtime

HERE = {"device": "cpu", "workers": 0, "image_size": 32}


def write(folder, per_class, rng, names=("red", "green", "blue"), noise=200):
    """So many images of each class; each class has its own colour, with noise."""
    for number, (name, count) in enumerate(zip(names, per_class, strict=True)):
        for image in range(count):
            pixels = rng.integers(0, noise, (32, 32, 3))
            pixels[:, :, number % 3] += 225 - noise
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{image}.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Pretrained weights; data with validation images, and data without."""
    folder, rng = tmp_path_factory.mktemp("few"), np.random.default_rng(0)
    vitkit.save(randomise(build("ViT-Ti/8", **SMALL)), folder / "w.safetensors")
    for name, parts in (("with", {"train": 2, "val": 8, "test": 4}), ("without", {"train": 4, "test": 4})):
        for part, count in parts.items():
            write(folder / name / part, [count] * 3, rng)
    return folder


def finetune(made, data, out, *, plan=False, **options):
    return vitkit.finetune(made / data, weights=made / "w.safetensors", out=out, plan=plan, **HERE | options)


def test_a_fitted_head_is_calibrated_on_the_validation_images(made, tmp_path):
    plain = finetune(made, "with", tmp_path / "plain", set=["calibrate=false"])
    run = finetune(made, "with", tmp_path / "calibrated")  # 24 validation images are enough by default
    assert run.recipe.head_init == "least-squares" and run.recipe.schedule.at(0, 1) == 0
    before, after = (vitkit.load(r.folder / "model.safetensors") for r in (plain, run))
    ratio = (before.head.weight / after.head.weight).detach()
    temperature = float(ratio.median())
    assert torch.allclose(ratio, torch.full_like(ratio, temperature), rtol=1e-3) and temperature != 1
    assert not before.reject_below and 0 < after.reject_below < 1
    stored = json.loads((run.folder / "result.json").read_text())["kept"]["calibration"]
    assert stored == pytest.approx({"temperature": temperature, "threshold": after.reject_below}, rel=1e-3)
    threshold = f"{100 * after.reject_below:.1f} %"
    assert threshold in calibration_note(stored) and threshold in (run.folder / "report.html").read_text()
    assert "steps with batch size" not in (run.folder / "report.html").read_text()  # no weights were trained
    assert "calibration" not in json.loads((plain.folder / "result.json").read_text())["kept"]
    val = SplitCache()(run.recipe, None)["val"]
    features = Extractor(model=before).features(val)
    logits, labels = before.head(features.x).detach(), labels_of(val, features)
    losses = {
        t: float(torch.nn.functional.cross_entropy(logits / t, labels)) for t in (1.0, temperature, 0.25, 4.0)
    }
    assert losses[temperature] == min(losses.values())
    right = logits.argmax(1) == labels
    confidence = (logits / temperature).softmax(1).amax(1)[right]
    assert after.reject_below == pytest.approx(
        float(confidence.quantile(0.05, interpolation="lower")), rel=1e-4
    )
    answers = vitkit.predict(run, [str(p) for p in sorted((made / "with/test").glob("*/*"))], reject=True)
    assert len(answers) == 12


@pytest.mark.parametrize("data, options, code, values", [
    ("without", {"set": ["calibrate=true"]}, "data.empty", ("calibrate", "val=0.2 val_images=")),
    ("with", {"set": ["calibrate=true", "evaluations=0"]}, "request.conflict", ("evaluations",)),
    ("with", {"set": ["calibrate=true", "loss=sigmoid"]}, "request.conflict", ("softmax",)),
    ("with", {"set": ["calibrate=true"], "protocol": True}, "request.conflict", ("protocol",)),
    ("with", {"set": ["calibrate=true", "train_on=train+val"]}, "request.conflict", ("train+val",)),
    ("without", {"keep": "best"}, "data.empty", ("keep=best", "validation images")),
    ("without", {"patience": 2}, "data.empty", ("patience=2", "validation images")),
    ("with", {"set": ["schedule.warmup=9"], "steps": 8}, "request.conflict", ("warmup=9", "8 steps")),
    ("with", {"folds": 11}, "data.empty", ("--folds 11", "10 images", "--folds 10")),
    ("without", {"folds": 10}, "data.empty", ("--folds 10", "4 images", "--folds 4")),
])  # fmt: skip
def test_what_the_data_cannot_give_is_refused_before_training(made, tmp_path, data, options, code, values):
    with refused(code, *values):
        finetune(made, data, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_remedy_for_missing_validation_images_works(made, tmp_path):
    options = {"set": ["calibrate=true", "val=0.2", "val_images="]}
    planned = finetune(made, "without", tmp_path / "run", plan=True, **options)
    assert len(planned.splits["val"]) == 3 and planned.recipe.evaluations > 0


def test_few_validation_images_for_a_calibration_are_a_warning():
    splits = {name: pixels([10, 10]) for name in ("train", "test")}
    r = override(recipe("finetune"), ["calibrate=true"])
    for count, warned in ((9, True), (10, False)):
        lines = list(warnings(splits | {"val": pixels([count, count])}, r))
        assert any("temperature" in line and str(2 * count) in line for line in lines) == warned


def pixels(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 4, 4, 3), dtype=np.uint8)
    return from_arrays("made", images, labels, tuple(f"class {n}" for n in range(len(counts))))


def test_a_class_needs_a_different_image_for_each_fold():
    source = pixels([9, 4, 20])
    check_classes(source, 4)
    with refused("data.empty", "--folds 5", "'class 1'", "4 images", "--folds 4"):
        check_classes(source, 5)
    groups = np.arange(33)
    groups[10:12] = 9  # copies, which stay in one fold
    check_classes(source, 2, groups)
    with refused("data.empty", "--folds 3", "'class 1'", "2 different images", "--folds 2"):
        check_classes(source, 3, groups)
    with refused("data.empty", "--folds 2", "1 image;") as refusal:
        check_classes(pixels([9, 1]), 2)
    assert "use --folds" not in str(refusal.value)


@pytest.mark.parametrize("options, warmup", [
    ({"steps": 40}, 4), ({"steps": 1}, 0), ({"epochs": 4.0}, 2),
    ({"steps": 40, "set": ("schedule.warmup=30",)}, 30),
    ({"steps": 40, "set": ("schedule.decay=linear",)}, 4), ({"steps": 400, "lr": 0.1}, 40),
])  # fmt: skip
def test_the_warmup_is_a_tenth_of_the_steps_that_the_user_gives(options, warmup):
    known = automatic.circumstances(Training(**options), {"train": pixels([20, 20])}, Runtime())
    request = finetuning("digits", Training(**options))
    asked = override(request.recipe, request.options.set)
    chosen = automatic.decide(
        asked, (*finetune_rules.RULES, automatic.fit_warmup), known, lambda choice: None
    )
    assert chosen.schedule.warmup == warmup


@pytest.mark.parametrize("name", ["finetune", "table4"])
def test_a_warmup_of_the_user_stays(name):
    known = automatic.circumstances(
        Training(set=("schedule.warmup=7",)), {"train": pixels([20, 20])}, Runtime()
    )
    asked = override(recipe(name), ["schedule.warmup=7"])
    rules = (*automatic.RECIPE_RULES, *finetune_rules.RULES, automatic.fit_warmup)
    asked = override(asked, ["weights=given"])
    assert automatic.decide(asked, rules, known, lambda choice: None).schedule.warmup == 7


def test_what_is_said_about_a_fitted_head(made, tmp_path, capsys):
    words = ["finetune", str(made / "with"), "--weights", str(made / "w.safetensors"), "--image-size", "32"]
    words += ["--device", "cpu", "--workers", "0", "--out", str(tmp_path / "run")]
    assert command(*words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("head is fitted" in line and "--steps" in line for line in lines)
    heads = [line for line in lines if line.startswith("head: ridge")]
    assert len(heads) == 1 and "%" not in heads[0]  # of two images per class none can be left out
    assert not [line for line in lines if line.startswith(("500 steps", "learning rate", "weights averaged"))]
    assert finetune_rules.is_fitted_head(vitkit.Run(tmp_path / "run").recipe)
    assert not finetune_rules.is_fitted_head(recipe("finetune"))


def test_the_plan_of_a_fitted_head_names_no_choice_about_training(made, tmp_path):
    planned = finetune(made, "with", tmp_path / "run", plan=True)
    names = [choice.what for choice in planned.choices]
    assert names == ["batch 8", "calibrated probabilities", "a ridge classifier on frozen features"]
    rows = dict(plan_text.rows(planned.to_json()))
    assert "head" in rows and not {"learning rate", "augmentation", "length"} & rows.keys()
    trained = finetune(made, "with", tmp_path / "run", plan=True, train="all")
    assert "500 steps" in [choice.what for choice in trained.choices]
    rows = dict(plan_text.rows(trained.to_json()))
    assert "head" not in rows and {"learning rate", "augmentation", "length"} <= rows.keys()


def test_no_correct_validation_image_gives_no_threshold(made, tmp_path, capsys):
    folder, rng = tmp_path / "data", np.random.default_rng(1)
    for part in ("train", "test"):
        write(folder / part, [2, 2, 2], rng, noise=40)
    write(folder / "val", [6, 0, 0], rng, names=("green", "blue", "red"), noise=40)  # they are red
    run = vitkit.finetune(
        folder, weights=made / "w.safetensors", out=tmp_path / "run", set=["calibrate=true"], progress=True,
        **HERE,
    )  # fmt: skip
    assert run.result["kept"]["val_images"] == 6
    assert not vitkit.load(run).reject_below
    assert "no threshold for --reject" in capsys.readouterr().err


def test_all_images_of_a_fitted_head_are_checked(made, tmp_path):
    """Also where the only step sees fewer images than the head is fitted to."""
    rng, names = np.random.default_rng(2), tuple("abcdef")
    for part in ("train", "test"):
        write(tmp_path / "data" / part, [2] * 6, rng, names=names)
    for name in names[:3]:
        (tmp_path / "data/train" / name / "0.png").write_bytes(b"broken")
    options = HERE | {"weights": made / "w.safetensors", "out": tmp_path / "run"}
    run = vitkit.finetune(tmp_path / "data", max_bad=0.5, **options)
    assert run.recipe.batch < 12 and run.result["cost"]["unusable_images"] == 3
    with refused("data.too-many-bad", "of 12 images"):
        vitkit.finetune(tmp_path / "data", **(options | {"out": tmp_path / "other"}))
