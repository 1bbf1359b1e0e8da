"""What a table is said to show: known exponents are found, and verdicts follow from intervals alone."""

import math

import numpy as np
import pytest

from vitkit.studies.analysis import similarities
from vitkit.studies.claims import FAILS, HOLDS, INCONCLUSIVE, NOT_TESTED, evaluate_claim
from vitkit.studies.differences import STUDENT, estimate
from vitkit.studies.fits import law, laws
from vitkit.studies.scale import STUDIES
from vitkit.studies.study import Claim


def rows(left, right, **more):
    """One row a seed and side."""
    sides = (("a", left), ("b", right), *more.items())
    return [
        {"trial": f"{side}{seed}", "arm": side, "seed": seed, "score": value}
        for side, values in sides
        for seed, value in enumerate(values)
    ]


def claim(relation="above", **more):
    return Claim(text="a is better", left={"arm": "a"}, right={"arm": "b"}, relation=relation, **more)


def test_a_power_law_is_found_with_its_exponent_inside_the_interval():
    rng = np.random.default_rng(1)
    x = np.repeat(10.0 ** np.arange(5), 3)
    fit = law(x, 0.5 * x**-0.25 * np.exp(rng.normal(0, 0.02, len(x))))
    assert fit.exponent == pytest.approx(-0.25, abs=0.01) and fit.scale == pytest.approx(0.5, rel=0.05)
    assert fit.low < -0.25 < fit.high and fit.high - fit.low < 0.03 and fit.r2 > 0.99
    assert fit.predict(100.0) == pytest.approx(0.5 * 100**-0.25, rel=0.05)


@pytest.mark.parametrize(("places", "seeds"), [(3, 1), (3, 3), (4, 5)])
def test_the_interval_of_an_exponent_is_that_of_a_straight_line(places, seeds):
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    x = np.repeat(10.0 ** np.arange(places), seeds)
    y = np.exp(-0.3 * np.log(x) - 1 + rng.normal(0, 0.05, len(x)))
    for kind, xs, ys in (("power", np.log(x), np.log(y)), ("log-linear", np.log10(x), y)):
        fit, line = law(x, y, kind), scipy_stats.linregress(xs, ys)
        margin = scipy_stats.t.ppf(0.975, len(x) - 2) * line.stderr
        assert (fit.low, fit.high) == pytest.approx((line.slope - margin, line.slope + margin), rel=2e-3)
        assert fit.r2 == pytest.approx(line.rvalue**2)


def test_a_line_over_the_logarithm_is_found_exactly():
    x = [1.0, 10.0, 100.0, 1000.0]
    fit = law(x, [0.2 + 0.1 * math.log10(v) for v in x], "log-linear")
    assert (fit.scale, fit.exponent) == pytest.approx((0.2, 0.1))
    assert (fit.low, fit.high) == pytest.approx((0.1, 0.1)) and fit.r2 == pytest.approx(1)
    assert law([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) is None  # two places make no law


def test_intervals_are_those_of_students_t():
    scipy_stats = pytest.importorskip("scipy.stats")
    for n, quantile in enumerate(STUDENT, start=1):
        assert quantile == pytest.approx(scipy_stats.t.ppf(0.975, n), abs=6e-4)
    s = estimate([0.1, 0.2, 0.6])
    low, high = scipy_stats.t.interval(0.95, 2, loc=0.3, scale=np.std([0.1, 0.2, 0.6], ddof=1) / 3**0.5)
    assert (s.low, s.high) == pytest.approx((low, high), rel=1e-3)
    assert estimate([0.5]).std is None


@pytest.mark.parametrize(
    ("left", "right", "relation", "outcome"),
    [
        ((0.50, 0.60, 0.70), (0.45, 0.55, 0.651), "above", HOLDS),
        ((0.45, 0.55, 0.651), (0.50, 0.60, 0.70), "above", FAILS),
        ((0.50, 0.60, 0.70), (0.45, 0.65, 0.60), "above", INCONCLUSIVE),
        ((0.500, 0.600, 0.700), (0.501, 0.601, 0.700), "equal", HOLDS),
        ((0.50, 0.60, 0.70), (0.45, 0.55, 0.651), "equal", FAILS),
        ((0.45, 0.55, 0.651), (0.50, 0.60, 0.70), "equal", FAILS),
        ((0.50, 0.60, 0.70), (0.45, 0.65, 0.60), "equal", INCONCLUSIVE),
        ((0.500, 0.600, 0.700), (0.501, 0.601, 0.700), "not below", HOLDS),
        ((0.50, 0.60, 0.70), (0.45, 0.55, 0.651), "not below", HOLDS),
        ((0.45, 0.55, 0.651), (0.50, 0.60, 0.70), "not below", FAILS),
        ((0.50, 0.60, 0.70), (0.45, 0.65, 0.60), "not below", INCONCLUSIVE),
        ((0.9,), (0.1,), "above", INCONCLUSIVE),
        ((0.9, 0.9), (), "above", NOT_TESTED),
    ],
)
def test_a_verdict_is_what_the_interval_of_paired_differences_says(left, right, relation, outcome):
    verdict = evaluate_claim(claim(relation), rows(left, right), "score")
    assert verdict.outcome == outcome
    if outcome in (HOLDS, FAILS):
        assert verdict.difference == pytest.approx(np.mean(left) - np.mean(right))
        assert f"{100 * verdict.difference:+.2f} [" in verdict.words and "3 seeds" in verdict.words


def test_seeds_are_compared_with_themselves_and_only_where_both_sides_are_done():
    verdict = evaluate_claim(claim(), rows((0.5, 0.6, 0.7, 0.8), (0.4, 0.5, 0.601)), "score")
    assert verdict.seeds == 3 and verdict.outcome == HOLDS  # though means of sides overlap


def test_gains_are_compared_where_a_claim_is_about_gains():
    table = rows((0.5, 0.6), (0.5, 0.6), a0=(0.2, 0.3), b0=(0.4, 0.501))
    baseline = ({"arm": "a0"}, {"arm": "b0"})
    verdict = evaluate_claim(claim(baseline=baseline), table, "score")
    assert verdict.difference == pytest.approx(0.2, abs=1e-3) and verdict.outcome == HOLDS


def test_compute_is_compared_at_equal_score():
    table = []
    for family, factor in (("ViT", 1.0), ("ResNet", 4.0)):
        for seed in range(3):
            for size in range(4):
                compute = factor * 10.0**size
                score = 0.2 + 0.1 * math.log10(compute / factor) + 0.001 * seed
                table.append({"trial": "", "family": family, "seed": seed, "score": score,
                              "pretrain_exaFLOPs": compute})  # fmt: skip
    about = Claim(text="less compute", left={"family": "ViT"}, right={"family": "ResNet"}, measure="compute")
    verdict = evaluate_claim(about, table, "score")
    assert verdict.difference == pytest.approx(2.0) and verdict.outcome == HOLDS  # 2^2 = 4 times
    assert verdict.words.startswith("4.00 [4.00, 4.00] times the compute")
    apart = [row | {"score": row["score"] / 100} if row["family"] == "ViT" else row for row in table]
    assert evaluate_claim(about, apart, "score").outcome == INCONCLUSIVE
    output = laws(table, ["family"], "score")
    assert {(one["family"], one["kind"]) for one in output} == {
        (family, kind) for family in ("ViT", "ResNet") for kind in ("power", "log-linear")
    }
    assert output[1]["exponent"] == pytest.approx(0.1)


def test_every_study_states_claims():
    assert len(STUDIES) == 12 and all(one.pictures and (one.claims or one.base) for one in STUDIES.values())


def test_a_figure_whose_models_are_gone_is_left_out(tmp_path):
    picture = next(one for one in STUDIES["positions"].pictures if one.kind == "similarity")
    row = {"trial": "a", "positions": "1d", "injection": "stem", "hyper": "default", "seed": 0}
    assert similarities(picture, [row], tmp_path) == {}


@pytest.mark.parametrize(
    ("left", "right", "named"),
    [(274.0, 224.0, False), (4262.0, 1567.0, True), (100.0, 126.0, True), (100.0, 124.0, False)],
)
def test_a_verdict_says_when_its_sides_are_not_of_like_compute(left, right, named):
    """More than a quarter apart."""
    table = rows((0.5, 0.6), (0.4, 0.5))
    for row in table:
        row["pretrain_exaFLOPs"] = left if row["arm"] == "a" else right
    verdict = evaluate_claim(claim(), table, "score")
    assert verdict.compute == (left, right)
    assert ("different compute" in verdict.words) == named
    assert (f"{left:,.0f} against {right:,.0f}" in verdict.words) == named


def test_a_claim_may_compare_another_column():
    table = [row | {"top1": 1 - row["score"]} for row in rows((0.1, 0.2, 0.3), (0.4, 0.5, 0.61))]
    assert evaluate_claim(claim(), table, "score").outcome == FAILS
    assert evaluate_claim(claim(score="top1"), table, "score").outcome == HOLDS


PUBLISHED = {  # Tables 5 and 6, ImageNet: accuracy in per cent, exaFLOPs of pre-training
    "ViT-B/32 7ep": (80.73, 55), "ViT-B/16 7ep": (84.15, 224), "ViT-L/32 7ep": (84.37, 196),
    "ViT-L/16 7ep": (86.30, 783), "ViT-L/16 14ep": (87.12, 1567), "ViT-H/14 14ep": (88.08, 4262),
    "BiT-R50x1 7ep": (77.54, 50), "BiT-R50x2 7ep": (82.12, 199), "BiT-R101x1 7ep": (80.67, 96),
    "BiT-R152x1 7ep": (81.88, 141), "BiT-R152x2 7ep": (84.97, 563), "BiT-R152x2 14ep": (85.56, 1126),
    "BiT-R200x3 14ep": (87.22, 3306), "R50+ViT-B/32 7ep": (84.90, 106), "R50+ViT-B/16 7ep": (85.58, 274),
    "R50+ViT-L/32 7ep": (85.68, 246), "R50+ViT-L/16 7ep": (86.60, 834), "R50+ViT-L/16 14ep": (87.12, 1668),
}  # fmt: skip


def test_the_claims_at_the_papers_scale_hold_for_the_papers_own_numbers():
    """And compare models of like compute, but for the one about larger models."""
    families = {"ViT": "ViT", "BiT": "ResNet", "R50": "hybrid"}
    table = [
        {"trial": f"{size}{seed}", "family": families[size[:3]], "size": size, "tuned": "yes", "seed": seed,
         "top1": top1 / 100 + seed * 1e-4, "pretrain_exaFLOPs": flops, "fewshot_mean": None}
        for size, (top1, flops) in PUBLISHED.items() for seed in range(3)
    ]  # fmt: skip
    verdicts = [evaluate_claim(one, table, "fewshot_mean") for one in STUDIES["scaling"].claims_at("paper")]
    assert [one.outcome for one in verdicts] == [HOLDS] * 4
    assert ["different compute" in one.words for one in verdicts] == [False, False, False, True]
