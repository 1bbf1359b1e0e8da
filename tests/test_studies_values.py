"""The numbers that the miniatures of all studies are made of."""

from dataclasses import replace

import pytest

from vitkit.recipes.recipe import override
from vitkit.recipes.values import ModelOptions
from vitkit.studies.scale import STUDIES
from vitkit.studies.setting import (
    LEVELS,
    Arm,
    Setting,
    finetuning,
    hybrid,
    pretraining,
    resnet,
    vit,
    with_sgd,
)

S = Setting(data=("digits", "other"), downstream="", pixels=32, patch=4, batch=32, steps=100, images=1618)
VITS = ((64, 3, 2, 128), (96, 4, 3, 192), (128, 6, 4, 256), (192, 8, 6, 384), (256, 10, 8, 768),
        (384, 12, 6, 1536))  # fmt: skip
RESNETS = (((1, 1), 32), ((1, 1, 1), 32), ((2, 2, 2), 32), ((2, 2, 2), 64), ((3, 4, 3), 64), ((3, 4, 6), 96))


def test_the_miniatures_sizes():
    assert LEVELS == 4
    for level in range(LEVELS):
        for size in range(3):
            at, (width, depth, heads, hidden) = replace(S, level=level), VITS[level + size]
            options = {"width": width, "depth": depth, "heads": heads, "hidden": hidden}
            assert vit(at, size).options == options and vit(at, size).model == "ViT-Ti/4"
            blocks, width = RESNETS[level + size]
            assert resnet(at, size).options == {"blocks": blocks, "width": width}
            stem = {"stem.blocks": (1,), "stem.width": 32, "patch": 1}
            assert hybrid(at, size).options == options | stem
    assert vit(S, 0, patch=8).model == "ViT-Ti/8"


def test_at_the_papers_scale_models_are_named():
    at = replace(S, scale="paper")
    assert (vit(at, 0).model, resnet(at, 0).model) == ("ViT-B/32", "BiT-R50x1")
    assert hybrid(at, 1) == Arm("R50+ViT-B/16")


def test_figures_of_fine_tuned_models_leave_their_pretraining_out():
    drawn = {name: [one.where.get("phase") for one in STUDIES[name].pictures] for name in STUDIES}
    tuned = {name for name, phases in drawn.items() if "tuned" in phases}
    assert tuned == {"pretrain-sets", "optimizer", "resolution", "self-supervision"} and drawn[
        "resolution"
    ] == ["tuned"]


def test_a_miniatures_pretraining_and_fine_tuning():
    r = pretraining(S, vit(S, 0), seed=5)
    assert (r.data, r.fewshot, r.fewshot_when, r.draws, r.seed) == ("digits", "digits", "end", 10, 5)
    assert pretraining(replace(S, downstream="pets"), vit(S, 0), 0).fewshot == "pets"
    assert (r.image_size, r.batch, r.length.steps) == ((32, 32), 32, 100)
    assert (r.schedule.rate, r.schedule.warmup, r.schedule.decay, r.schedule.floor) == (
        1e-3,
        10,
        "cosine",
        0.0,
    )
    assert (r.randaugment, r.mixup, r.evaluations, r.val, r.test) == ((), 0.0, 0, 0.0, 0.1)
    assert (r.optimizer.kind, r.optimizer.weight_decay, r.optimizer.moment) == ("adam", 0.1, "fp32")
    t = finetuning(S, seed=5)
    assert (t.length.steps, t.schedule.rate, t.schedule.warmup, t.schedule.decay) == (30, 0.01, 3, "cosine")
    assert (t.image_size, t.batch, t.evaluations, t.val, t.seed) == ((32, 32), 32, 0, 0.0, 5)
    assert finetuning(S, 0, pixels=64).image_size == (64, 64)
    assert (t.optimizer.kind, t.optimizer.weight_decay) == ("sgd", 0.0)
    assert finetuning(replace(S, steps=1), 0).length.steps == 1
    assert override(r, []) == pretraining(replace(S, changes=()), vit(S, 0), 5)


def test_sgd_is_bits():
    """Rate 0.03 for a batch of 256, weight decay 0.0001, momentum 0.9."""
    r = with_sgd(pretraining(S, resnet(S, 0), 0))
    assert r.schedule.rate == pytest.approx(0.03 * 32 / 256)
    assert (r.optimizer.kind, r.optimizer.momentum, r.optimizer.weight_decay) == ("sgd", 0.9, 1e-4)


def recipes(name: str) -> list:
    return [trial.recipe for trial in STUDIES[name].make(replace(S, seeds=1))]


def test_what_is_looked_at_as_a_run_goes():
    for r in recipes("heads"):
        assert (r.evaluations, r.val, r.fewshot_when, r.patience) == (6, 0.02, "evaluations", 0)
    for r in recipes("data-size"):
        assert (r.evaluations, r.val, r.fewshot_when, r.patience) == (6, 0.02, "end", 2)


def test_the_two_resnets_of_the_optimizer_study_and_the_claims_of_shape():
    large = {r.model_options for r in recipes("optimizer") if r.model}
    assert large == {ModelOptions(blocks=(1, 1), width=32), ModelOptions(blocks=(2, 2, 2), width=32)}
    for claim in STUDIES["shape"].claims:
        assert {"scaled", "factor"} <= set(claim.left) & set(claim.right)
