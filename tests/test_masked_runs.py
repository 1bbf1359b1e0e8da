"""Masked patch prediction from data to a fine-tuned classifier: runs, resumed and on several processes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from page_reader import Page
from PIL import Image
from refusals import refused
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, rows, same, tiny
from together import go as one_of_many
from together import in_bfloat16, losses, together

import vitkit
from vitkit.data.order import Order
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.artifacts import first_images
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runs.run import run as run_recipe
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.masked import GREY, TARGETS, Masked, patches_of
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration

BARE = ("width=32", "depth=2", "heads=2", "hidden=32")
WORDS = ["--model", "ViT-Ti/4", "--image-size", "16", "--batch", "16", "--workers", "0", "--device", "cpu"]
SMALL = ["--set", "model_options=width=32,depth=1,heads=2,hidden=32", "schedule.warmup=1", "evaluations=2"]


def masked(**changes) -> Recipe:
    """Twelve steps on the digits with everything random switched on."""
    base = {"objective": "masked", "mixup": 0.0, "image_size": (16, 16), "head_bias": 0.0}
    return tiny(**(base | changes))


def numbers(out: Path) -> list[dict]:
    """What a run wrote down, but for its costs."""
    return [{k: v for k, v in row.items() if not k.startswith("cost_")} for row in rows(out)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("masked")
    go(out, masked())
    return out


def test_its_report_shows_a_batch_with_hidden_patches_and_without_labels(straight):
    r = masked()
    source = open_splits(r)["train"]
    order, task = Order(len(source), r.batch, r.seed), Masked()
    model = build_model(r, source)
    images, _ = first_images(r, source, order)
    batch = {"image": images, "place": torch.arange(len(images))}
    shown, prepared = task.visible(model, order, 0, batch), task.prepare(model, order)(0, batch)
    before, after = patches_of(images, 4), patches_of(shown, 4)
    for image, take in enumerate(prepared["take"].tolist()):
        for place, taken in enumerate(take):
            expected = before[image, taken] if taken < 16 else torch.full_like(before[0, 0], GREY)
            assert torch.equal(after[image, place], expected)
    kept = json.loads((straight / "training-batch.json").read_text())
    assert len(kept["images"]) == 12 and not any(one["labels"] for one in kept["images"])
    assert "Training batch" in Page((straight / "report.html").read_text("utf-8")).sections


def test_a_run_leaves_a_plain_model_and_says_how_well_patches_were_told(straight):
    result = json.loads((straight / "result.json").read_text())
    test = result["test"]
    assert {"run", "model", "steps", "test"} <= set(result) and result["steps"] == 12
    assert test["top1"] is None and test["images"] == 179 and test["patches"] == 179 * 8
    assert 0 <= test["accuracy"] <= 1 and test["loss"] > 0 and test["split"] == "test"
    model = vitkit.load(straight / "model.safetensors")
    assert model.head is None and model.mask_token is None and model.labels == ()
    assert not [name for name in model.state_dict() if name.startswith(("vit.", "predict."))]
    output = rows(straight)
    assert {"val_accuracy", "val_loss", "val_images"} <= set(output[4]) and "test_accuracy" in output[-1]
    from safetensors.torch import load_file

    kept = load_file(complete(straight / "checkpoints")[-1] / "state-00000.safetensors")
    assert {"model.predict.weight", "model.vit.mask_token"} <= set(kept)
    assert kept["model.predict.weight"].any() and kept["model.vit.mask_token"].any()  # both have learned
    for name, tensor in model.state_dict().items():
        assert torch.equal(kept[f"model.vit.{name}"], tensor), name


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_run_ends_like_the_straight_one(straight, tmp_path, workers):
    with sigterm_at(5), pytest.raises(Interrupted, match="SIGTERM at step"):
        go(tmp_path, masked(), workers=workers)
    go(tmp_path, masked(), workers=workers)
    assert same(straight, tmp_path) and numbers(straight) == numbers(tmp_path)
    last = [complete(out / "checkpoints")[-1] / "state-00000.safetensors" for out in (straight, tmp_path)]
    assert last[0].read_bytes() == last[1].read_bytes()  # the layer that predicts too


@pytest.mark.slow
def test_micro_batches_change_no_image_and_no_corruption(straight, tmp_path):
    go(tmp_path, masked(dropout=0.0, model_options=BARE))
    go(tmp_path / "pieces", masked(dropout=0.0, model_options=BARE, micro_batch=5))
    assert losses(tmp_path / "pieces") == pytest.approx(losses(tmp_path), abs=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(o, marks=pytest.mark.slow)
            for o in ({"optimizer": "average"}, {"when": "after-positions"})
        ),
    ],
)
def test_every_target_runs(tmp_path, target, options):
    when = options.get("when", "before-positions")
    r = masked(
        task_options={"masked.target": target, "masked.when": when, "masked.rate": 0.15},
        length=Duration(steps=4),
    )
    if "optimizer" in options:
        r = replace(r, optimizer=replace(r.optimizer, average=0.5))
    test = go(tmp_path, r).test
    assert (test["accuracy"] is None) == (target == "pixels") and test["patches"] == 179 * 2


@pytest.mark.slow
def test_the_best_weights_come_back_with_the_layer_that_predicts(tmp_path):
    """A high rate makes the run worse again, and its result is that of the best evaluation."""
    r = masked(keep="best", evaluations=6, report_on="val")
    result = go(tmp_path, replace(r, schedule=replace(r.schedule, rate=0.3)))
    seen = {row["step"]: row["val_loss"] for row in rows(tmp_path) if "val_loss" in row}
    best = min(seen, key=seen.get)
    assert result.kept["weights"] == "best" and result.kept["step"] == best < max(seen)
    assert result.test["loss"] == result.kept["val_loss"] == seen[best]


@pytest.mark.slow
def test_recomputed_activations_change_no_bit(straight, tmp_path):
    run_recipe(masked(), tmp_path, Runtime(recompute=True), RunOptions(workers=0, quiet=True))
    assert same(straight, tmp_path) and losses(tmp_path) == losses(straight)


def test_the_corruption_of_evaluation_does_not_depend_on_the_batch(tmp_path):
    still = {"schedule": replace(masked().schedule, rate=0.0), "length": Duration(steps=1), "evaluations": 0}
    actual = [go(tmp_path / str(batch), masked(batch=batch, **still)).test for batch in (16, 7)]
    assert actual[0]["loss"] == pytest.approx(actual[1]["loss"], abs=1e-6)
    assert actual[0]["loss"] == pytest.approx(np.log(512), abs=1e-5)  # nothing was learned: chance
    assert actual[0]["accuracy"] == pytest.approx(actual[1]["accuracy"], abs=1e-9)


def spread(steps: int = 12, **changes) -> Recipe:
    """For several processes: without dropout, which is each process's own."""
    return masked(dropout=0.0, model_options=BARE, length=Duration(steps=steps), evaluations=1, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind", "micro"), [(2, "ddp", 0), (2, "ddp", 3), (2, "fsdp", 3)])
def test_any_number_of_processes_corrupts_and_learns_alike(tmp_path, world, kind, micro):
    go(tmp_path / "one", spread())
    together(world, one_of_many, spread(micro_batch=micro), tmp_path / "many", {}, parallel=kind)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    one, many = (json.loads((tmp_path / n / "result.json").read_text())["test"] for n in ("one", "many"))
    assert many["loss"] == pytest.approx(one["loss"], abs=1e-4) and many["images"] == one["images"] == 179
    assert many["patches"] == one["patches"] and many["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)
    a, b = (vitkit.load(tmp_path / n / "model.safetensors").state_dict() for n in ("one", "many"))
    for name in a:
        assert torch.allclose(a[name], b[name], atol=1e-3), name


@pytest.mark.slow
def test_cut_over_processes_stopped_and_gone_on_alone(tmp_path):
    go(tmp_path / "straight", spread())
    together(2, one_of_many, spread(), tmp_path / "cut", {"stop": 5}, parallel="fsdp")
    together(1, one_of_many, spread(), tmp_path / "cut", {})
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "straight"), abs=1e-4)


@pytest.mark.slow
def test_from_the_command_line_to_a_classifier(tmp_path, capsys):
    out = tmp_path / "pre"
    words = ["pretrain", "digits", "--recipe", "masked", *WORDS, "--steps", "8", "--out", out, *SMALL]
    assert run(*words, "--plan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8 and not out.exists()
    assert run(*words) == 0
    output = capsys.readouterr().out
    assert "corrupted patches of 20 test images" in output and f"--weights {out}" in output
    assert run(*words, "--json") == 0  # again: nothing left but to tell
    assert json.loads(capsys.readouterr().out)["test"]["top1"] is None
    tune = ["finetune", "digits", "--weights", out, "--steps", "6", "--image-size", "24", *WORDS[4:]]
    assert run(*tune, "--out", tmp_path / "tuned", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["test"]["images"] == 179 and result["test"]["top1"] is not None
    model = vitkit.load(tmp_path / "tuned" / "model.safetensors")
    assert len(model.labels) == 10 and model.mask_token is None and model.config.image_size == (24, 24)
    assert run("finetune", "digits", "--recipe", "masked", *WORDS, "--out", tmp_path / "p", "--protocol") == 2
    assert "fine-tuning the result" in capsys.readouterr().err
    more = [
        "pretrain",
        "digits",
        "--recipe",
        "masked",
        "--weights",
        out,
        *WORDS[2:],
        "--steps",
        "2",
        "--json",
    ]
    assert (
        run(*more, "--out", tmp_path / "more", "--set", "evaluations=0") == 0
    )  # a mask token is put in again


def test_recipes_are_listed(capsys):
    assert run("list", "recipes") == 0
    output = capsys.readouterr().out
    assert "masked" in output and "masked-imagenet" in output


def test_images_without_labels_are_enough(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for i in range(40):
        name = f"{'more/' if i % 4 == 0 else ''}{i}.png"
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(tmp_path / "pictures" / name)
    r = masked(data=str(tmp_path / "pictures"), length=Duration(steps=2))
    splits = open_splits(r)
    assert sum(len(part) for part in splits.values()) == 40
    assert go(tmp_path / "run", r).test["images"] == len(splits["test"]) == 4
    with refused("data.layout", "pictures", "class/image"):
        open_splits(replace(r, objective="classify"))


def test_what_cannot_be_masked_is_said_before_anything_runs(straight, tmp_path):
    for name, message in (("BiT-R50x1", "not a ResNet"), ("ViT-Ti/16", "at least two patches")):
        with pytest.raises(ValueError, match=message):
            go(tmp_path / name.replace("/", "-"), masked(model=name, model_options=()))
    with refused("model.unsupported", "head=map", "head=gap"):
        go(tmp_path / "map", masked(model_options=(*BARE, "head=map", "class_token=false")))


@pytest.mark.slow
def test_a_hybrid_tells_the_pixels_under_a_cell(tmp_path):
    r = override(masked(), ["model=R26+ViT-S/32", "image_size=64", "batch=4", "length.steps=1", "subset=20"])
    r = replace(
        r, model_options=BARE, evaluations=0, test=0.01, task_options={"masked.target": "colours-4x4"}
    )
    test = go(tmp_path, r).test
    assert test["patches"] == 2 * test["images"]  # half of 2 x 2 cells
    assert vitkit.load(Path(tmp_path) / "model.safetensors").config.stem is not None


def test_a_run_of_the_paper_can_be_started(tmp_path):
    r = replace(recipe("masked"), data="digits")
    model = build_model(r, open_splits(r)["train"])
    assert model.config.grid == (14, 14) and model.mask_token is not None and model.head is None


@pytest.mark.slow
def test_bfloat16_learns_the_same_to_rounding(straight, tmp_path):
    together(1, in_bfloat16, masked(), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=0.02)
