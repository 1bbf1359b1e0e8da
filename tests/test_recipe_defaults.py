"""Every number of the recipes that vitkit starts from, and the limits of what a recipe accepts."""

from dataclasses import asdict

import pytest
from refusals import refused

from vitkit.flat_recipe import flat
from vitkit.recipes import recipe
from vitkit.recipes.finetune import hyperrule
from vitkit.recipes.pretrain import AUGREG, LEVELS
from vitkit.recipes.recipe import LARGEST, Recipe, override, read_recipe, to_json
from vitkit.recipes.values import shown
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule, parse_stages

PLAIN = {
    "weights": "", "model": "", "model_options": {}, "keep_representation": False, "pooling": "model",
    "against": (), "subset": "",
    "train_on": "train", "report_on": "test", "image_size": (384, 384), "crop": "inception",
    "crop_area": 0.05, "resize": 0,
    "flip": True, "randaugment": (), "mixup": 0.0, "evaluation_crop": "squash", "batch": 512,
    "micro_batch": 0,
    "length.steps": 10_000, "length.epochs": None, "schedule.rate": 0.03, "schedule.warmup": 500,
    "schedule.decay": "cosine", "schedule.floor": 0.0, "schedule.stairs": (), "rates": (),
    "convolution_rates": (), "optimizer.kind": "sgd", "optimizer.momentum": 0.9,
    "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8, "optimizer.moment": "fp32",
    "optimizer.weight_decay": 0.0, "optimizer.decays": "kernels", "optimizer.clip": 1.0,
    "optimizer.layer_decay": 1.0, "optimizer.average": 0.0, "train": "all", "lora.rank": 8,
    "lora.alpha": 16.0, "lora.targets": "qv",
    "objective": "classify", "loss": "softmax", "label_smoothing": 0.0, "head_bias": 0.0, "dropout": 0.0,
    "stochastic_depth": 0.0, "val": 0.1, "val_images": (), "test": 0.1, "evaluations": 10, "fewshot": "",
    "shots": 5, "draws": 3,
    "fewshot_when": "evaluations", "patience": 0, "seed": 0,
}  # fmt: skip
ADAM = {"optimizer.kind": "adam", "optimizer.weight_decay": 0.1}
SMALL = {
    "image_size": (224, 224), "batch": 64, "length.steps": 500, "schedule.rate": 0.01, "schedule.warmup": 50,
    "rates": (0.001, 0.003, 0.01, 0.03), "val": 0.1,
}  # fmt: skip
LARGE = ADAM | {
    "optimizer.moment": "bf16", "image_size": (224, 224), "batch": 1024, "length.steps": None,
    "length.epochs": 90, "schedule.rate": 1e-3, "randaugment": (2, 10), "mixup": 0.2,
    "evaluation_crop": "centre",
}  # fmt: skip
RATES = (0.001, 0.003, 0.01, 0.03)
RECIPES = {
    "cifar10": {"rates": RATES, "val": 0.02},
    "cifar100": {"rates": RATES, "val": 0.02},
    "pets": {"rates": RATES, "length.steps": 500, "schedule.warmup": 100},
    "flowers": {"rates": RATES, "length.steps": 500, "schedule.warmup": 100},
    "vtab": {
        "rates": (0.01,), "length.steps": 2500, "schedule.rate": 0.01, "schedule.warmup": 200, "val": 0.2,
    },
    "imagenet": {
        "rates": (0.003, 0.01, 0.03), "convolution_rates": (0.06,), "length.steps": 20_000, "val": 0.01,
    },
    "table4": SMALL,
    "finetune": SMALL | {
        "optimizer.kind": "adam", "optimizer.weight_decay": 0.05, "optimizer.layer_decay": 0.75,
        "schedule.rate": 5e-4, "rates": (1e-4, 2e-4, 5e-4, 1e-3), "crop": "resized", "crop_area": 0.3,
        "mixup": 0.2, "label_smoothing": 0.1, "val": 0.05, "val_images": (20, 500),
    },
    "lora": SMALL | {
        "train": "lora", "optimizer.kind": "adam", "schedule.rate": 1e-3, "rates": (3e-4, 1e-3, 3e-3, 1e-2),
    },
    "scratch": SMALL | ADAM | {"length.steps": None, "length.epochs": 30, "schedule.rate": 1e-3},
    "pretrain": LARGE | {"schedule.warmup": 1000, "val": 0.02, "test": 0.02},
    "plain": LARGE | {
        "model": "ViT-S/16", "model_options": {"head": "gap", "positions": "sincos2d", "representation": 384},
        "schedule.warmup": 10_000, "val": 0.01, "test": 0.01,
    },
    "bit": {
        "schedule.rate": 0.003, "schedule.decay": "stairs", "schedule.stairs": (0.3, 0.6, 0.9),
        "optimizer.clip": 0.0, "crop": "squash-random", "resize": 448, "mixup": 0.1, "rates": (0.003,),
        "val": 0.02,
    },
    "masked": ADAM | {
        "model": "ViT-B/16", "image_size": (224, 224), "batch": 4096, "length.steps": 1_000_000,
        "schedule.rate": 2e-4, "schedule.warmup": 10_000, "optimizer.clip": 0.0, "objective": "masked",
        "evaluation_crop": "centre", "val": 0.01, "test": 0.01,
    },
    "augreg-i21k.ViT-B/16": LARGE | {
        "model": "ViT-B/16", "model_options": {"head": "gap"}, "batch": 4096, "length.epochs": 300,
        "schedule.warmup": 10_000, "loss": "sigmoid", "head_bias": -10.0, "val": 0.01, "test": 0.01,
    },
}  # fmt: skip


def numbers(value: Recipe) -> dict:
    rows = flat(asdict(value)) | {"model_options": value.model_options}
    return {k: v for k, v in rows.items() if k in PLAIN}


def test_a_recipe_says_nothing_that_was_not_said():
    assert numbers(Recipe(name="x")) == PLAIN


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_of_a_recipe(name):
    assert numbers(recipe(name)) == PLAIN | RECIPES[name]


def test_masked_pretraining_on_imagenet_is_a_tenth_as_long():
    short, long = recipe("masked-imagenet"), recipe("masked")
    assert short.name == "masked-imagenet" and long.name == "masked"
    assert numbers(short) == numbers(long) | {"length.steps": 100_000}


def test_augregs_levels_are_as_published():
    assert AUGREG == {
        "none": (0, 0, 0.0), "light1": (2, 0, 0.0), "light2": (2, 10, 0.2), "medium1": (2, 15, 0.2),
        "medium2": (2, 15, 0.5), "strong1": (2, 20, 0.5), "strong2": (2, 20, 0.8),
    }  # fmt: skip
    assert list(LEVELS["i21k"].values()) == ["none", "none", "light1", "light2", "light2", "medium2"]
    assert list(LEVELS["i1k"].values()) == ["light1", "medium1", "medium2", "medium2", "medium2", "medium2"]
    for name in ("augreg-i21k.ViT-L/16", "augreg-i1k.ViT-Ti/16"):
        assert recipe(name).optimizer == OptimizerConfig(kind="adam", weight_decay=0.1, moment="bf16")


@pytest.mark.parametrize(
    "images, pixels, steps, mixup, stairs, size, resize",
    [
        (19_999, 96 * 96, 500, 0.0, (0.4, 0.6, 0.8), 384, 448),
        (20_000, 96 * 96, 10_000, 0.1, (0.3, 0.6, 0.9), 384, 448),
        (499_999, 96 * 96 - 1, 10_000, 0.1, (0.3, 0.6, 0.9), 128, 160),
        (500_000, 96 * 96, 20_000, 0.1, (0.3, 0.6, 0.9), 384, 448),
    ],
)
def test_the_edges_of_bits_rule(images, pixels, steps, mixup, stairs, size, resize):
    r = hyperrule(recipe("bit"), images, pixels)
    assert (r.length.steps, r.mixup, r.schedule.stairs) == (steps, mixup, stairs)
    assert (r.image_size, r.resize) == ((size, size), resize)
    assert r.schedule.warmup == (100 if steps == 500 else 500) and r.schedule.rate == 0.003


LEAST = {"batch": (0, 1), "micro_batch": (-1, 0), "evaluations": (-1, 0), "patience": (-1, 0),
         "shots": (0, 1), "draws": (0, 1), "mixup": (-0.1, 0.0), "label_smoothing": (-0.1, 0.0)}  # fmt: skip


@pytest.mark.parametrize("field", LEAST)
def test_the_least_of_a_field_is_accepted_and_less_refused(field):
    less, least = LEAST[field]
    assert getattr(Recipe(name="x", **{field: least}), field) == least
    with refused("recipe.value", field, less):
        Recipe(name="x", **{field: less})


def test_smoothing_ends_below_1_and_val_is_needed_to_stop_on():
    with refused("recipe.value", "label_smoothing", 1.0):
        Recipe(name="x", label_smoothing=1.0)
    for more in ({"patience": 1}, {"report_on": "val"}):
        with refused("recipe.value", "train_on=train+val"):
            Recipe(name="x", train_on="train+val", **more)


@pytest.mark.parametrize(
    "bad",
    [{"average": 1.0}, {"average": -0.1}, {"layer_decay": 0.0}, {"layer_decay": 1.1}, {"clip": -1.0},
     {"weight_decay": -0.1}],
    ids=str,
)  # fmt: skip
def test_shares_and_limits_of_an_optimizer(bad):
    with pytest.raises(ValueError, match=rf"optimizer\.{next(iter(bad))} must be"):
        OptimizerConfig(**bad)
    OptimizerConfig(average=0.9999, layer_decay=1.0, clip=0.0, weight_decay=0.0)


def test_a_schedule_and_a_length_accept_their_least():
    assert Schedule().rate == 0.01 and Schedule(rate=0.0, warmup=0, floor=0.0).at(3, 10) == 0
    assert Duration(epochs=0.001).in_steps(10, 100) == 1 and Duration(steps=1).in_steps(10, 100) == 1
    stairs = Schedule(rate=1.0, decay="stairs", stairs=(0.5,))
    assert [stairs.at(step, 10) for step in (4, 5)] == [1.0, pytest.approx(0.1)]


@pytest.mark.parametrize(
    "text, value", [("224", (224, 224)), ("384x256", (384, 256)), ("384,256", (384, 256))]
)
def test_a_size_may_be_one_number_or_two(text, value):
    assert override(Recipe(name="x"), [f"image_size={text}"]).image_size == value
    assert override(Recipe(name="x"), ["randaugment=2,15"]).randaugment == (2, 15)
    for bad in ("1x2x3", "", "x"):
        with refused("recipe.value", "image_size", repr(bad)):
            override(Recipe(name="x"), [f"image_size={bad}"])


def test_the_largest_file_and_the_longest_value_that_are_taken_whole(tmp_path):
    text = to_json(recipe("finetune"))
    (tmp_path / "recipe.json").write_text(text + " " * (LARGEST - len(text)))
    assert read_recipe(tmp_path / "recipe.json") == recipe("finetune")
    (tmp_path / "recipe.json").write_text(text + " " * (LARGEST - len(text) + 1))
    with refused("recipe.format", f"{LARGEST:,} bytes"):
        read_recipe(tmp_path / "recipe.json")
    assert shown("x" * 78) == repr("x" * 78) and shown("x" * 79).endswith(" ...")


def test_a_run_of_one_step_can_be_trained_on():
    assert parse_stages(["1+2", "3+4"]) == [(1, 2), (3, 4)]
    for bad in (["0+2"], ["1+2", "4+1"], ["2+2", "2+1"], ["1+0"]):
        with pytest.raises(ValueError, match="more_steps"):
            parse_stages(bad)
