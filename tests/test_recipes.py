"""Every number of Tables 2, 3 and 4, of AugReg and of BiT's HyperRule, typed from the papers."""

from dataclasses import replace

import pytest
from refusals import refused

from vitkit.models.variants import build
from vitkit.recipes import RECIPES, recipe
from vitkit.recipes.finetune import bit_beside, hyperrule
from vitkit.recipes.pretrain import AUGREG
from vitkit.recipes.recipe import override
from vitkit.studies.setting import Arm, Setting, pretraining, with_sgd
from vitkit.training.schedule import Duration

TABLE_3 = """
jft ViT-B/16 7 8e-4 linear 0.1 0.0
jft ViT-B/32 7 8e-4 linear 0.1 0.0
jft ViT-L/32 7 6e-4 linear 0.1 0.0
jft ViT-L/16 7 4e-4 linear 0.1 0.0
jft ViT-L/16 14 4e-4 linear 0.1 0.0
jft ViT-H/14 14 3e-4 linear 0.1 0.0
jft BiT-R50x1 7 1e-3 linear 0.1 0.0
jft BiT-R50x2 7 1e-3 linear 0.1 0.0
jft BiT-R101x1 7 8e-4 linear 0.1 0.0
jft BiT-R152x1 7 6e-4 linear 0.1 0.0
jft BiT-R152x2 7 6e-4 linear 0.1 0.0
jft R50+ViT-B/16 7 8e-4 linear 0.1 0.0
jft R50+ViT-B/32 7 8e-4 linear 0.1 0.0
jft R50+ViT-L/32 7 2e-4 linear 0.1 0.0
jft R50+ViT-L/16 7 4e-4 linear 0.1 0.0
jft R50+ViT-L/16 14 4e-4 linear 0.1 0.0
i21k ViT-B/16 90 1e-3 linear 0.03 0.1
i21k ViT-B/32 90 1e-3 linear 0.03 0.1
i21k ViT-L/16 30 1e-3 linear 0.03 0.1
i21k ViT-L/16 90 1e-3 linear 0.03 0.1
i21k ViT-L/32 30 1e-3 linear 0.03 0.1
i21k ViT-L/32 90 1e-3 linear 0.03 0.1
imagenet ViT-B/16 300 3e-3 cosine 0.3 0.1
imagenet ViT-B/32 300 3e-3 cosine 0.3 0.1
imagenet ViT-L/16 300 3e-3 cosine 0.3 0.1
imagenet ViT-L/32 300 3e-3 cosine 0.3 0.1
imagenet ViT-H/14 300 3e-3 cosine 0.3 0.1
"""
TABLE_4 = {  # steps, warm-up (of the official code), rates, share held out (App. B.1.1)
    "imagenet": (20_000, 500, (0.003, 0.01, 0.03), 0.01),
    "cifar100": (10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
    "cifar10": (10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
    "pets": (500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
    "flowers": (500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
    "vtab": (2_500, 200, (0.01,), 0.2),
}
WIDTH = {"B": 768, "L": 1024, "H": 1280}


def rows():
    return [line.split() for line in TABLE_3.split("\n") if line]


def test_table_3_has_these_rows_and_no_others():
    made = [r for name in RECIPES if (r := recipe(name)).about.startswith("Table 3") and r.name == name]
    result = {(r.name.split(".")[0], r.model, int(r.length.epochs)) for r in made}
    assert result == {(data, model, int(epochs)) for data, model, epochs, *_ in rows()}
    assert len(made) == len(rows())


@pytest.mark.parametrize(("data", "model", "epochs", "rate", "decay", "weight_decay", "dropout"), rows())
def test_a_row_of_table_3(data, model, epochs, rate, decay, weight_decay, dropout):
    mine = [r for r in map(recipe, RECIPES) if r.name.startswith(f"{data}.") and r.model == model]
    (r,) = [r for r in mine if r.length.epochs == int(epochs)]
    assert (r.schedule.rate, r.schedule.decay, r.schedule.warmup) == (float(rate), decay, 10_000)
    assert r.schedule.floor == (1e-5 if decay == "linear" else 0)
    assert (r.batch, r.image_size, r.dropout, r.stochastic_depth) == (4096, (224, 224), float(dropout), 0)
    o = r.optimizer
    assert (o.kind, o.betas, o.weight_decay, o.average) == ("adam", (0.9, 0.999), float(weight_decay), 0)
    assert o.clip == (1.0 if data == "imagenet" else 0.0)
    assert (r.loss, r.head_bias, r.mixup, r.randaugment, r.crop) == ("sigmoid", -10, 0, (), "inception")
    hidden = {"representation": WIDTH[model.split("ViT-")[1][0]]} if "ViT" in model else {}
    assert r.model_options == hidden


@pytest.mark.parametrize("name", TABLE_4)
def test_a_row_of_table_4(name):
    r, (steps, warmup, rates, held_out) = recipe(name), TABLE_4[name]
    assert (r.length.steps, r.schedule.warmup, r.rates, r.val) == (steps, warmup, rates, held_out)
    assert r.schedule.rate in rates and r.schedule.decay == "cosine" and r.schedule.floor == 0
    assert r.convolution_rates == ((0.06,) if name == "imagenet" else ())
    assert (r.batch, r.image_size, r.mixup, r.dropout, r.crop) == (512, (384, 384), 0, 0, "inception")
    o = r.optimizer
    assert (o.kind, o.momentum, o.weight_decay, o.clip, o.average) == ("sgd", 0.9, 0, 1, 0)
    assert r.loss == "softmax" and not r.keep_representation


@pytest.mark.parametrize(("model", "pixels"), [("ViT-L/16", 512), ("ViT-H/14", 518)])
def test_the_imagenet_rows_of_table_2(model, pixels):
    r = recipe(f"table2.{model}")
    assert (r.image_size, r.length.steps, r.optimizer.average) == ((pixels, pixels), 20_000, 0.9999)
    assert (r.rates, r.val, r.batch, r.schedule.warmup) == ((0.003, 0.01, 0.03), 0.01, 512, 500)
    assert (r.optimizer.kind, r.optimizer.clip, r.optimizer.weight_decay) == ("sgd", 1, 0)
    build(model, image_size=r.image_size, depth=1, classes=2)  # patches fit


RULE = {  # images, pixels of one: steps, warm-up, where the rate falls, Mixup, resized, cropped
    (800, 500 * 500): (500, 100, (200, 300, 400), 0.0, 448, 384),
    (19_999, 96 * 96): (500, 100, (200, 300, 400), 0.0, 448, 384),
    (20_000, 96 * 96): (10_000, 500, (3_000, 6_000, 9_000), 0.1, 448, 384),
    (50_000, 32 * 32): (10_000, 500, (3_000, 6_000, 9_000), 0.1, 160, 128),
    (499_999, 96 * 96 - 1): (10_000, 500, (3_000, 6_000, 9_000), 0.1, 160, 128),
    (500_000, 500 * 500): (20_000, 500, (6_000, 12_000, 18_000), 0.1, 448, 384),
}


@pytest.mark.parametrize(("images", "pixels"), RULE)
def test_bits_hyperrule(images, pixels):
    steps, warmup, falls, mixup, resized, cropped = RULE[images, pixels]
    for r in (hyperrule(recipe("bit"), images, pixels), bit_beside(recipe("cifar10"), images, pixels)):
        assert (r.length.steps, r.schedule.warmup, r.mixup) == (steps, warmup, mixup)
        assert tuple(round(share * steps) for share in r.schedule.stairs) == falls
        assert (r.resize, r.image_size, r.crop, r.flip) == (
            resized,
            (cropped, cropped),
            "squash-random",
            True,
        )
        assert (r.schedule.rate, r.rates, r.batch) == (0.003, (0.003,), 512)
        assert r.schedule.at(steps - 1, steps) == pytest.approx(3e-6)
        o = r.optimizer
        assert (o.kind, o.momentum, o.weight_decay, o.clip) == ("sgd", 0.9, 0, 0)


def test_bits_rule_beside_another_recipe_keeps_its_data_and_what_a_person_decided():
    pets = replace(recipe("pets"), data="d", weights="w", seed=7, batch=64, image_size=(96, 96),
                   length=Duration(steps=50))  # fmt: skip
    free = bit_beside(pets, 3000, 300 * 300)
    assert (free.data, free.weights, free.seed, free.batch, free.val) == ("d", "w", 7, 64, 0.1)
    assert free.image_size == (384, 384) and free.length.steps == 500
    bound = bit_beside(pets, 3000, 300 * 300, {"image_size", "length", "batch"})
    assert (bound.image_size, bound.resize, bound.length.steps) == ((96, 96), 112, 50)
    assert (bound.schedule.warmup, bound.schedule.decay, bound.schedule.rate) == (10, "stairs", 0.003)


LEVELS = {  # RandAugment layers, magnitude, Mixup
    "none": (0, 0, 0.0), "light1": (2, 0, 0.0), "light2": (2, 10, 0.2), "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5), "strong1": (2, 20, 0.5), "strong2": (2, 20, 0.8),
}  # fmt: skip
CHOSEN = {
    "i21k": {"ViT-Ti/16": "none", "ViT-S/32": "none", "ViT-S/16": "light1", "ViT-B/32": "light2",
             "ViT-B/16": "light2", "ViT-L/16": "medium2"},
    "i1k": {"ViT-Ti/16": "light1", "ViT-S/32": "medium1", "ViT-S/16": "medium2", "ViT-B/32": "medium2",
            "ViT-B/16": "medium2", "ViT-L/16": "medium2"},
}  # fmt: skip


@pytest.mark.parametrize(("data", "model"), [(data, model) for data in CHOSEN for model in CHOSEN[data]])
def test_augreg(data, model):
    assert AUGREG == LEVELS
    r, (layers, magnitude, mixup) = recipe(f"augreg-{data}.{model}"), LEVELS[CHOSEN[data][model]]
    assert r.randaugment == ((layers, magnitude) if layers else ()) and r.mixup == mixup
    assert (r.batch, r.length.epochs, r.image_size) == (4096, 300, (224, 224))
    assert (r.schedule.rate, r.schedule.warmup, r.schedule.decay) == (1e-3, 10_000, "cosine")
    o = r.optimizer
    assert (o.kind, o.betas, o.weight_decay, o.clip, o.moment) == ("adam", (0.9, 0.999), 0.1, 1, "bf16")
    assert (r.dropout, r.stochastic_depth, r.loss) == (0, 0, "sigmoid")
    assert (r.model_options.get("head") == "gap") == (data == "i21k")


def test_plain_vit_and_masked_patches():
    r = recipe("plain")
    assert (r.model, r.batch, r.length.epochs, r.randaugment, r.mixup) == ("ViT-S/16", 1024, 90, (2, 10), 0.2)
    assert (r.schedule.rate, r.schedule.warmup, r.optimizer.weight_decay) == (1e-3, 10_000, 0.1)
    assert r.model_options == {"head": "gap", "positions": "sincos2d", "representation": 384}
    assert r.loss == "softmax"
    for name, steps in (("masked", 1_000_000), ("masked-imagenet", 100_000)):
        r = recipe(name)
        assert (r.model, r.batch, r.length.steps, r.objective) == ("ViT-B/16", 4096, steps, "masked")
        assert (r.schedule.rate, r.schedule.warmup, r.schedule.decay) == (2e-4, 10_000, "cosine")


def test_the_resnets_of_the_sgd_study_have_bits_hyperparameters():
    """BiT pre-trains by SGD: 0.03 x batch / 256, momentum 0.9, weight decay 1e-4."""
    s = Setting(data=("digits",), downstream="", scale="paper", images=303_000_000)
    r = with_sgd(pretraining(s, Arm("BiT-R50x1"), 0))
    assert (r.batch, r.schedule.rate) == (4096, pytest.approx(0.48))
    o = r.optimizer
    assert (o.kind, o.momentum, o.weight_decay) == ("sgd", 0.9, 1e-4)


def test_values_are_read_by_the_type_of_their_field():
    assert override(Duration(steps=3), ["steps=none", "epochs=2"]) == Duration(None, 2.0)
    with refused("recipe.value", "optimizer", "'adam'"):
        override(recipe("finetune"), ["optimizer=adam"])
    with refused("recipe.value", "image_size", "224,224,3"):
        replace(recipe("finetune"), image_size=(224, 224, 3))
