"""Crossings, what augmentation is worth, and each side at its best rate, on data with known answers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from small_study import tiny_plan

from vitkit.studies.attention_depth import attention_depth, profile
from vitkit.studies.claims import FAILS, HOLDS, INCONCLUSIVE, NOT_TESTED, evaluate_claim
from vitkit.studies.curves import Place, compute_ratios, crossing, crossing_place, paired_curves, seed_samples
from vitkit.studies.differences import by_seed_at_best, student
from vitkit.studies.folder import is_finished, table_rows
from vitkit.studies.study import Claim
from vitkit.studies.trial import WorkerConfig, run_trial

IMAGES = (1e3, 1e4, 1e5, 1e6)


def table(arms, noise=(0.0,), images=IMAGES):
    """One row for each arm, number of images and seed; an arm is a function of log10 of the images."""
    return [
        {"trial": f"{arm}{x}{seed}", "arm": arm, "seed": seed, "train_images": x,
         "score": curve(math.log10(x)) + shift * (arm == "vit")}
        for arm, curve in arms.items() for x in images for seed, shift in enumerate(noise)
    ]  # fmt: skip


ARMS = {"vit": lambda x: 0.1 * x, "resnet": lambda x: 0.23 + 0.05 * x}  # cross at log10 x = 4.6
CROSS = Claim(text="they cross", left={"arm": "vit"}, right={"arm": "resnet"}, measure="crossing")


def test_a_crossing_is_where_the_differences_become_positive():
    assert crossing([1, 10, 100], [-1.0, -0.5, 0.5]) == pytest.approx(10**1.5)
    assert crossing([1, 10, 100], [0.1, 0.5, 0.5]) == 0.0
    assert crossing([1, 10, 100], [-1.0, 0.5, -0.5]) == math.inf
    assert crossing([1, 10, 100], [1.0, -1.0, 3.0]) == pytest.approx(10**1.25)  # the last one counts


def test_the_crossing_of_two_curves_is_known_and_inside_its_interval():
    verdict = evaluate_claim(CROSS, table(ARMS, (-0.006, 0.0, 0.007)), "score")
    assert verdict.outcome == HOLDS and verdict.seeds == 3 and verdict.power is None
    assert verdict.place.at == pytest.approx(10**4.6, rel=0.02)
    assert 10**3 < verdict.place.low < 10**4.6 < verdict.place.high < 10**5.5
    exact = evaluate_claim(CROSS, table(ARMS, (0.0, 0.0)), "score").place
    assert (exact.low, exact.high) == pytest.approx((10**4.6, 10**4.6))


def test_a_crossing_needs_both_ends():
    turned = Claim(text="", left={"arm": "resnet"}, right={"arm": "vit"}, measure="crossing")
    assert evaluate_claim(turned, table(ARMS, (0.0, 0.001)), "score").outcome == FAILS
    unclear = evaluate_claim(CROSS, table(ARMS, (-0.2, 0.0, 0.1)), "score")
    assert unclear.outcome == INCONCLUSIVE and unclear.power.if_measured > 3
    assert unclear.place.low == 0.0 and unclear.place.high is None  # anywhere
    assert evaluate_claim(CROSS, table(ARMS, images=IMAGES[:1]), "score").outcome == NOT_TESTED


def test_the_interval_of_a_crossing_covers_it():
    """In about 95 of 100 simulated studies of three seeds."""
    rng, x, inside = np.random.default_rng(0), [1.0, 10.0, 100.0, 1000.0], 0
    for _ in range(150):
        place = crossing_place(x, np.array([-0.3, -0.1, 0.1, 0.3]) + rng.normal(0, 0.05, (3, 4)))
        inside += (place.low or 0) <= 10**1.5 <= (place.high or math.inf)
    assert 0.91 <= inside / 150 <= 0.99


def test_bootstrap_samples_have_students_t_at_each_point():
    values = np.array([[0.0, 1.0], [0.2, 1.1], [0.1, 1.5]])
    low, high = np.quantile(seed_samples(values), [0.025, 0.975], axis=0)
    margin = student(2) * values.std(0, ddof=1) / math.sqrt(3)
    assert (high - low) / 2 == pytest.approx(margin, rel=0.12)
    assert (high + low) / 2 == pytest.approx(values.mean(0), abs=0.05)


def test_only_seeds_with_all_places_are_compared():
    rows = table(ARMS, (0.0, 0.1, 0.2))
    x, values = paired_curves(rows[:-1], {"arm": "vit"}, {"arm": "resnet"}, "train_images", "score")
    assert x == list(IMAGES) and values.shape == (2, 4)


WORTH = Claim(text="worth data", left={"arm": "augmented"}, right={"arm": "plain"}, measure="data")


def augmented(score, noise=(-0.001, 0.0, 0.001)):
    """A curve without augmentation of 0.1 for ten times the data, and an augmented model on 10,000 images."""
    rows = [{"trial": f"plain{x}{seed}", "arm": "plain", "seed": seed, "train_images": x,
             "score": 0.1 * math.log10(x) - 0.1} for x in (1e4, 1e5, 1e6)
            for seed in range(len(noise))]  # fmt: skip
    return rows + [{"trial": f"augmented{seed}", "arm": "augmented", "seed": seed, "train_images": 1e4,
                    "score": score + shift} for seed, shift in enumerate(noise)]  # fmt: skip


@pytest.mark.parametrize(
    ("score", "times", "outcome"), [(0.37, 10**0.7, HOLDS), (0.42, 10**1.2, HOLDS), (0.31, 10**0.1, FAILS)]
)
def test_augmentation_is_worth_as_much_data_as_reaches_its_score(score, times, outcome):
    verdict = evaluate_claim(WORTH, augmented(score), "score")
    assert verdict.place.at == pytest.approx(times, rel=0.01) and verdict.outcome == outcome
    assert verdict.place.low < times < verdict.place.high


def test_what_all_of_the_data_does_not_reach_is_more_than_measured():
    verdict = evaluate_claim(WORTH, augmented(0.9), "score")
    assert verdict.place == Place(None, None, None) and verdict.outcome == HOLDS
    assert "worth > 100 [> 100, > 100] times" in verdict.words
    assert evaluate_claim(WORTH, augmented(0.3, noise=()), "score").outcome == NOT_TESTED


def test_the_ratio_of_compute_is_that_of_two_parallel_fronts():
    rows = [{"family": family, "seed": 0, "pretrain_exaFLOPs": factor * 10.0**size, "score": 0.2 + 0.1 * size}
            for family, factor in (("vit", 1.0), ("resnet", 3.0)) for size in range(3)]  # fmt: skip
    ratios = compute_ratios(rows, {"family": "vit"}, {"family": "resnet"}, "score")
    assert ratios == {0: pytest.approx(math.log2(3))}


def rates(scores):
    return [{"trial": f"{rate}{seed}", "rate": rate, "seed": seed, "score": value}
            for rate, values in scores.items() for seed, value in enumerate(values)]  # fmt: skip


def test_the_best_rate_of_a_seed_is_chosen_by_the_other_seeds():
    assert by_seed_at_best(rates({"low": (0.1, 0.2, 0.3), "high": (0.4, 0.5, 0.6)}), "rate", "score") == {
        0: 0.4, 1: 0.5, 2: 0.6,
    }  # fmt: skip
    lucky = rates({"low": (0.9, 0.1, 0.1), "high": (0.3, 0.3, 0.3)})  # luck does not count for itself
    assert by_seed_at_best(lucky, "rate", "score") == {0: 0.3, 1: 0.1, 2: 0.1}
    assert by_seed_at_best([], "rate", "score") == {}
    both = [row | {"head": head, "score": row["score"] - (head == "token") * 0.05}
            for head in ("token", "gap")
            for row in rates({"low": (0.1, 0.11, 0.1), "high": (0.2, 0.22, 0.21)})]  # fmt: skip
    claim = Claim(text="", left={"head": "gap"}, right={"head": "token"}, best="rate")
    verdict = evaluate_claim(claim, both, "score")
    assert verdict.difference == pytest.approx(0.05) and "best rate: high against high" in verdict.words
    one_rate = [row for row in both if row["head"] == "gap" or row["rate"] == "low"]
    assert evaluate_claim(claim, one_rate, "score").outcome == NOT_TESTED


def test_a_score_may_be_compared_with_zero():
    claim = Claim(text="it grows", left={"arm": "a"}, right=None)
    rows = [{"trial": str(seed), "arm": "a", "seed": seed, "score": 0.2 + 0.01 * seed} for seed in range(3)]
    verdict = evaluate_claim(claim, rows, "score")
    assert verdict.outcome == HOLDS and verdict.difference == pytest.approx(0.21)
    with pytest.raises(ValueError):
        Claim(text="", left={}, right=None, measure="compute")


def test_attention_depth_is_the_line_through_the_layers():
    assert profile(np.array([0.2, 0.4, 0.6])) == pytest.approx(
        {"attention_first": 0.2, "attention_last": 0.6, "attention_growth": 0.4}
    )
    assert profile(np.array([0.3]))["attention_growth"] == 0.0


def test_a_trial_measures_how_far_its_model_attends(tmp_path):
    plan = tiny_plan(broken=False, seeds=1)
    trial = replace(plan.trials[0], attention="digits")
    plan = replace(plan, trials=(trial,))
    test = run_trial(trial, tmp_path, WorkerConfig(threads=1))["test"]
    assert 0 < test["attention_first"] < 1.5 and test["attention_growth"] == 0  # of one layer
    (row,) = table_rows(tmp_path, plan)
    assert row["attention_first"] == row["attention_last"] == test["attention_first"]
    assert row["pretrain_images"] == 1618 and is_finished(tmp_path, trial)
    result = tmp_path / "trials" / trial.name / "result.json"
    content = json.loads(result.read_text())
    del content["test"]["attention_first"]
    result.write_text(json.dumps(content))
    assert not is_finished(tmp_path, trial)


def test_uniform_attention_has_the_distance_of_uniform_attention():
    import torch

    from vitkit.datasets.opening import open_data
    from vitkit.models.variants import build

    model = build("ViT-Ti/4", classes=10, image_size=16, width=16, depth=2, heads=2, hidden=16, seed=0)
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.zero_()
    values = attention_depth(model, open_data("digits")["all"])
    assert values == pytest.approx(
        {"attention_first": 1, "attention_last": 1, "attention_growth": 0}, abs=1e-5
    )
