"""Segmentation and detection from data to a model: runs, resumed, on several processes, and fine-tuned on."""

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, rows, same
from together import go as one_of_many
from together import losses, together

import vitkit
from vitkit.data.sources.shapes import CLASSES, shapes
from vitkit.models.dense.rf_detr import rf_detr_on
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig
from vitkit.planning import dense_rules
from vitkit.planning.automatic import Circumstances, decide
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runs.run import run as run_recipe
from vitkit.runtime.runtime import Runtime
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration
from vitkit.weights.adapter import merge_adapter

SMALL = ("width=32", "depth=2", "heads=2", "hidden=32")
HEADS = {  # by name: the task, its options, and the model that it trains
    "linear": ("segment", {}, "LinearSegmenter"),
    "eomt": ("segment", {"segment.head": "eomt", "segment.queries": 8, "segment.joint": 1}, "EoMT"),
    "fcos": ("detect", {"detect.channels": 16}, "FCOS"),
    "yolos": ("detect", {"detect.head": "yolos", "detect.detections": 8}, "YOLOS"),
    "rf-detr": ("detect", {"detect.head": "rf-detr"}, "RF-DETR"),
    "instances": (
        "instances",
        {"instances.queries": 8, "instances.joint": 1, "instances.points": 200},
        "EoMT",
    ),
}
METRICS = {"segment": "miou", "detect": "ap", "instances": "ap"}
RARE = ("eomt", "yolos", "rf-detr", "instances")
BOTH = ["linear", "fcos", *(pytest.param(head, marks=pytest.mark.slow) for head in RARE)]
WORDS = ["--model", "ViT-Ti/8", "--image-size", "48", "--batch", "8", "--workers", "0", "--device", "cpu"]
SET = ["--set", f"model_options={','.join(SMALL)}", "evaluations=0"]


def training(head: str, steps: int = 6, **changes) -> Recipe:
    """A few steps on drawn shapes with everything random: scales, crops, flips, colours, dropped blocks."""
    task, options, _ = HEADS[head]
    base = replace(
        recipe(task), data="shapes", model="ViT-Ti/8", model_options=SMALL, image_size=(48, 48), batch=6,
        length=Duration(steps=steps), evaluations=2, auto=(), subset="20", color_jitter=1.0,
        task_options=options,
    )  # fmt: skip
    if head == "rf-detr":  # a new one has 13 groups of 300 queries, which take long on a CPU
        base = replace(base, model="", model_options=(), weights=str(few_queries()))
    return replace(base, schedule=replace(base.schedule, rate=2e-3, warmup=1), **changes)


@cache
def few_queries() -> Path:
    """A small RF-DETR of random weights with two groups of 20 queries."""
    vit = ViTConfig(width=32, depth=2, heads=2, hidden=32, patch=8, image_size=(48, 48), classes=0)
    folder = Path(mkdtemp(prefix="rf-detr"))
    sizes = {"decoder_width": 64, "decoder_hidden": 64, "self_heads": 2, "cross_heads": 2, "bottlenecks": 1}
    model = fresh(rf_detr_on(vit, len(CLASSES), queries=20, groups=2, **sizes), seed=0)
    model.labels = CLASSES
    vitkit.save(model, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of each head that was never stopped, trained when a test asks for it."""
    done = {}

    def of(head: str):
        if head not in done:
            done[head] = tmp_path_factory.mktemp(head)
            go(done[head], training(head))
        return done[head]

    return of


@pytest.mark.parametrize("head", [*list(HEADS)[:4], *BOTH[-2:]])
def test_a_run_leaves_a_model_that_predicts_and_the_metrics_of_its_task(straight, head):
    out, (task, _, kind) = straight(head), HEADS[head]
    result = json.loads((out / "result.json").read_text())
    metric = METRICS[task]
    assert result["test"]["images"] == 100 and 0 <= result["test"][metric] <= 1
    assert [row["step"] for row in rows(out) if f"val_{metric}" in row] == [3, 6]
    assert all(np.isfinite(losses(out)))
    model = vitkit.load(out)
    assert (model.task, model.labels, model.config.kind) == (task, CLASSES, kind)
    assert model.preprocessing.resize == "fit"
    pixels = np.asarray(shapes()["test"].fetch(0))[:48, :48]
    value = vitkit.predict(model, pixels)
    if task == "segment":
        assert value.shape == (48, 48) and set(np.unique(value)) <= {0, 1, 2, 3}
    else:
        mask = {"mask"} if task == "instances" else set()
        assert all(set(one) == {"label", "score", "box"} | mask for one in value)


@pytest.mark.parametrize("head", BOTH)
def test_a_stopped_run_ends_like_the_straight_one(straight, tmp_path, head):
    with sigterm_at(4), pytest.raises(Interrupted, match="SIGTERM at step"):
        go(tmp_path, training(head))
    go(tmp_path, training(head))
    assert same(straight(head), tmp_path) and losses(straight(head)) == losses(tmp_path)
    last = [complete(at / "checkpoints")[-1] / "state-00000.safetensors" for at in (straight(head), tmp_path)]
    assert last[0].read_bytes() == last[1].read_bytes()  # the moments too, and EoMT's count of steps
    tests = [json.loads((at / "result.json").read_text())["test"] for at in (straight(head), tmp_path)]
    assert tests[0] == tests[1]


@pytest.mark.parametrize("head", ["linear", "fcos"])
@pytest.mark.slow
def test_worker_processes_change_no_bit(straight, tmp_path, head):
    go(tmp_path, training(head), workers=2)
    assert same(straight(head), tmp_path) and losses(straight(head)) == losses(tmp_path)


@pytest.mark.parametrize("head", BOTH)
@pytest.mark.slow
def test_micro_batches_change_nothing(tmp_path, head):
    still = {"stochastic_depth": 0.0, "evaluations": 0, "test": 0.02, "subset": "12"}
    for name, micro in (("whole", 0), ("pieces", 4)):
        go(tmp_path / name, training(head, 2, micro_batch=micro, **still))
    assert losses(tmp_path / "pieces") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_recomputed_activations_change_no_bit(straight, tmp_path):
    run_recipe(training("fcos"), tmp_path, Runtime(recompute=True), RunOptions(workers=0, quiet=True))
    assert same(straight("fcos"), tmp_path) and losses(tmp_path) == losses(straight("fcos"))


@pytest.mark.slow
@pytest.mark.parametrize(("head", "kind"), [*((head, "ddp") for head in HEADS), ("fcos", "fsdp")])
def test_two_processes_learn_like_one(tmp_path, head, kind):
    changes = {"stochastic_depth": 0.0, "evaluations": 1}
    go(tmp_path / "one", training(head, **changes))
    together(2, one_of_many, training(head, **changes, micro_batch=2), tmp_path / "many", {}, parallel=kind)
    one, many = (json.loads((tmp_path / n / "result.json").read_text())["test"] for n in ("one", "many"))
    assert many["images"] == one["images"]
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    a, b = (vitkit.load(tmp_path / n / "model.safetensors").state_dict() for n in ("one", "many"))
    assert all(torch.allclose(a[name], b[name], atol=2e-3) for name in a)
    metric = METRICS[HEADS[head][0]]
    assert many[metric] == pytest.approx(one[metric], abs=5e-3)


@pytest.mark.slow
def test_more_steps_continue_a_finished_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["finetune", "shapes", "--task", "segment", *WORDS, "--subset", "16"]
    assert run(*words, "--steps", "2", *SET) == 0
    assert run("finetune", "shapes", "--task", "segment", "--more-steps", "2", "--device", "cpu") == 0
    assert json.loads((tmp_path / "runs/shapes/result.json").read_text())["steps"] == 4


@pytest.mark.parametrize("head", ["linear", "fcos"])
def test_weights_of_a_run_for_other_classes_and_for_a_classifier(straight, tmp_path, capsys, head):
    """The whole model starts from the run, but what depends on its classes; a classifier takes the ViT."""
    task, other = HEADS[head][0], tmp_path / "data"
    drawn_folder(other, task)
    words = ["--weights", straight(head), "--steps", "1", "--lr", "0", *WORDS[2:]]
    assert run("finetune", other, "--task", task, *words, "--out", tmp_path / "other", "--set",
               "evaluations=0") == 0  # fmt: skip
    old, new = vitkit.load(straight(head)), vitkit.load(tmp_path / "other")
    assert new.labels == ("object", "other") and new.config.kind == old.config.kind
    a, b = old.state_dict(), new.state_dict()
    moved = {name for name in a if a[name].shape != b[name].shape or not torch.equal(a[name], b[name])}
    assert moved == ({"classifier.weight", "classifier.bias"} if task == "segment" else
                     {"head.classify.weight", "head.classify.bias"})  # fmt: skip
    digits = ["finetune", "digits", *words, "--out", tmp_path / "classifier", "--subset", "20"]
    assert run(*digits, "--set", "evaluations=0") == 0
    classifier = vitkit.load(tmp_path / "classifier")
    assert classifier.task == "classify" and len(classifier.labels) == 10
    assert torch.equal(classifier.encoder.blocks[1].mlp.up.weight, a["vit.encoder.blocks.1.mlp.up.weight"])


def drawn_folder(folder, task: str) -> None:
    """A few images with masks or with YOLO's boxes of two classes."""
    rng = np.random.default_rng(0)
    beside = {"segment": "masks", "detect": "labels"}[task]
    for split, count in (("train", 6), ("test", 3)):
        for kind in ("images", beside):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            pixels, mask = rng.integers(0, 90, (40, 48, 3)).astype(np.uint8), np.zeros((40, 48), np.uint8)
            pixels[10:30, 12:36], mask[10:30, 12:36] = 200, 1
            name = f"{number}{split}"
            Image.fromarray(pixels).save(folder / "images" / split / f"{name}.png")
            if task == "segment":
                Image.fromarray(mask).save(folder / "masks" / split / f"{name}.png")
            else:
                (folder / "labels" / split / f"{name}.txt").write_text(f"{number % 2} 0.5 0.5 0.5 0.5\n")
    if task == "segment":
        (folder / "classes.txt").write_text("object\nother\n")
    else:
        yaml = "train: images/train\ntest: images/test\nnames: [object, other]\n"
        (folder / "data.yaml").write_text(yaml)


@pytest.mark.parametrize("train", ["head", "last-1", "lora"])
def test_parts_of_a_model_are_trained(straight, tmp_path, train):
    out = tmp_path / "run"
    flat = replace(training("linear").optimizer, layer_decay=1.0)
    fields = {"model": "", "model_options": (), "weights": str(straight("linear")), "train": train}
    go(out, training("linear", 2, **fields, evaluations=0, subset="6", optimizer=flat))
    a, b = (vitkit.load(at).state_dict() for at in (straight("linear"), out))
    changed = {name for name in a if not torch.equal(a[name], b[name])}
    assert "classifier.weight" in changed
    blocks = {name.split(".")[3] for name in changed if name.startswith("vit.encoder.blocks")}
    assert blocks == {"head": set(), "last-1": {"1"}, "lora": {"0", "1"}}[train]
    if train == "lora":
        merged = merge_adapter(vitkit.load(straight("linear")), out / "adapter.safetensors").state_dict()
        assert all(torch.allclose(merged[name], b[name], atol=1e-6) for name in b)


REFUSED = (
    ({}, "data.labels"),  # a classifier needs labels
    ({"task": "segment", "folds": 3}, "request.conflict"),
    ({"task": "detect", "protocol": True}, "request.conflict"),
    ({"task": "segment", "train": "head"}, "request.conflict"),  # there is nothing to freeze
    ({"task": "detect", "subset": "5/class"}, "request.conflict"),
    ({"task": "detect", "set": {"mixup": 0.2}}, "recipe.value"),
    ({"task": "detect", "set": {"segment.head": "eomt"}}, "recipe.value"),
    ({"task": "segment", "model": "BiT-R50x1"}, "model.unsupported"),
)


@pytest.mark.parametrize(("options", "code"), REFUSED)
def test_options_that_do_not_fit_are_refused(tmp_path, options, code):
    small = {"model": "ViT-Ti/8", "steps": 1, "device": "cpu", "workers": 0, "out": tmp_path / "run"}
    with refused(code):
        vitkit.finetune("shapes", **(small | options))
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_data_without_the_annotations_of_a_task_is_refused(tmp_path):
    drawn_folder(tmp_path / "segment", "segment")
    drawn_folder(tmp_path / "detect", "detect")
    for split in ("train", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "classes" / split / label
            folder.mkdir(parents=True)
            for number in range(2):
                noise = np.random.default_rng(number).integers(0, 255, (40, 40, 3), np.uint8)
                Image.fromarray(noise).save(folder / f"{split}{label}{number}.png")
    for data, task, remedy in (
        ("segment", "detect", "--task segment"),
        ("detect", "segment", "--task detect"),
        ("classes", "segment", "without --task"),
        ("classes", "detect", "without --task"),
    ):
        with refused("data.labels", tmp_path / data, remedy):
            vitkit.finetune(tmp_path / data, task=task, model="ViT-Ti/8", plan=True, device="cpu")
    for data, kind in (("segment", "masks"), ("detect", "boxes")):
        with refused("data.labels", f"has {kind}", f"--task {data}"):
            vitkit.finetune(tmp_path / data, model="ViT-Ti/8", plan=True, device="cpu")


def test_images_can_be_excluded_but_not_labelled_by_corrections(tmp_path):
    small = {"task": "segment", "model": "ViT-Ti/8", "steps": 1, "device": "cpu", "workers": 0, "plan": True}
    table, key = tmp_path / "manifest.csv", shapes()["train"].keys[3]
    for action, suggested in (("exclude", ""), ("relabel", "circle")):
        with table.open("w", newline="") as file:
            csv.writer(file).writerows(
                [("image", "split", "suggested", "action"), (key, "train", suggested, action)]
            )
        if action == "exclude":
            plan = vitkit.finetune("shapes", corrections=table, **small)
            assert len(plan.splits["train"]) == 399
        else:
            with refused("data.labels", table.name):
                vitkit.finetune("shapes", corrections=table, **small)


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("segment", {"segment.scale": "0.75,1.5"},
         ["scaled by 0.75 to 1.5, random crops", "random horizontal flips", "colour distortion 1"]),
        ("segment", {"segment.window": 32, "flip": False},
         ["scaled by 0.5 to 2, random crops of 32x32", "colour distortion 1"]),
        ("detect", {"detect.scale": "0.5,1"},
         ["whole images, scaled by 0.5 to 1", "random horizontal flips"]),
    ],
)  # fmt: skip
def test_a_plan_says_how_images_are_changed(task, changes, words):
    options = {"model_options": ",".join(SMALL), **changes}
    plan = vitkit.finetune(
        "shapes", task=task, model="ViT-Ti/8", image_size=48, steps=1, device="cpu", workers=0, plan=True,
        set=options,
    )  # fmt: skip
    assert plan.to_json()["augmentation"] == words
    assert all(word in " ".join(str(plan).split()) for word in words)


@pytest.mark.parametrize(
    ("name", "changes", "fixed", "optimizer", "schedule"),
    [
        ("detect", {"task_options": {"detect.head": "rf-detr"}}, (), "rf-detr", "rf-detr"),
        ("detect", {"weights": "RF-DETR-nano.coco"}, (), "rf-detr", "rf-detr"),
        ("rf-detr", {}, (), "rf-detr", "rf-detr"),
        ("detect", {"weights": "RF-DETR-nano.coco"}, ("optimizer",), "detect", "rf-detr"),
        ("detect", {"weights": "RF-DETR-nano.coco"}, ("schedule",), "rf-detr", "detect"),
        ("detect", {}, (), "detect", "detect"),
        ("instances", {}, (), "instances", "instances"),
    ],
)
def test_rf_detr_and_eomt_for_instances_are_trained_with_their_published_optimizers(
    name, changes, fixed, optimizer, schedule
):
    changes = {"weights": "ViT-Ti/16.augreg-i21k"} | changes
    parts = frozenset({"schedule.rate", "schedule.warmup"} if "schedule" in fixed else ())
    known = Circumstances(splits=shapes(), fixed=frozenset(fixed), parts=parts, device="cuda")
    chosen = decide(replace(recipe(name), **changes), dense_rules.RULES, known, lambda choice: None)
    expected = recipe(schedule).schedule
    assert chosen.optimizer == recipe(optimizer).optimizer and chosen.batch == 16
    assert (chosen.schedule.rate, chosen.schedule.decay) == (expected.rate, expected.decay)
    assert "schedule" in fixed or chosen.schedule.warmup == chosen.length.steps // 10


def test_instances_from_scratch_have_the_rate_of_other_tasks_and_no_layer_decay():
    known = Circumstances(splits=shapes(), fixed=frozenset(), device="cuda")
    wanted = replace(recipe("instances"), model="ViT-Ti/16", weights="")
    chosen = decide(wanted, dense_rules.RULES, known, lambda choice: None)
    assert (chosen.schedule.rate, chosen.optimizer.layer_decay) == (dense_rules.RATE, 1.0)
