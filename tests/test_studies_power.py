"""How many seeds decide a claim: the power is that of simulated studies, and of the noncentral t."""

import json
import math

import numpy as np
import pytest

from vitkit.studies.claims import FAILS, HOLDS, INCONCLUSIVE, decide, evaluate_claim
from vitkit.studies.differences import STUDENT, Estimate, estimate, student
from vitkit.studies.power import MOST, analyse, detectable, power, seeds_needed
from vitkit.studies.study import Claim

ABOVE, EQUAL = (0.0, math.inf), (-0.01, 0.01)


def simulated(mean, std, seeds, limits, studies=4000):
    """The share of simulated studies whose verdict is not inconclusive."""
    values = np.random.default_rng(3).normal(mean, std, (studies, seeds))
    outcomes = [decide(estimate(row.tolist()), *limits) for row in values]
    return sum(outcome in (HOLDS, FAILS) for outcome in outcomes) / studies


@pytest.mark.parametrize(
    ("mean", "std", "seeds", "limits"),
    [(0.02, 0.01, 3, ABOVE), (0.01, 0.01, 8, ABOVE), (0.0, 0.01, 5, ABOVE), (0.0, 0.006, 4, EQUAL),
     (0.02, 0.006, 4, EQUAL), (0.01, 0.006, 5, EQUAL)],
)  # fmt: skip
def test_the_power_is_the_share_of_simulated_studies_that_decide(mean, std, seeds, limits):
    assert power(mean, std, seeds, *limits) == pytest.approx(simulated(mean, std, seeds, limits), abs=0.025)


def test_the_power_of_one_limit_is_that_of_the_noncentral_t():
    stats = pytest.importorskip("scipy.stats")
    for mean, std, seeds in ((0.02, 0.01, 3), (0.1, 0.01, 2), (0.005, 0.01, 20), (0.001, 0.01, 200)):
        t, shift = stats.t.ppf(0.975, seeds - 1), mean / std * math.sqrt(seeds)
        exact = stats.nct.sf(t, seeds - 1, shift) + stats.nct.cdf(-t, seeds - 1, shift)
        assert power(mean, std, seeds) == pytest.approx(exact, abs=5e-4)
    for freedom in (31, 50, 1000):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-4)
    assert [student(n + 1) for n in range(len(STUDENT))] == list(STUDENT)


def test_the_number_of_seeds_is_the_smallest_with_enough_power():
    for mean, limits in ((0.012, ABOVE), (0.004, ABOVE), (0.0, EQUAL)):
        n = seeds_needed(mean, 0.006, *limits)
        assert power(mean, 0.006, n, *limits) >= 0.8 > power(mean, 0.006, n - 1, *limits)
    assert seeds_needed(1e-5, 0.01) is None  # more than MOST
    assert MOST == 1000 and power(detectable(0.01, 5), 0.01, 5) == pytest.approx(0.8, abs=1e-3)


def test_only_an_undecided_claim_has_a_power_analysis():
    about = Claim(text="a is better", left={"arm": "a"}, right={"arm": "b"})

    def verdict(differences):
        rows = [{"trial": f"{side}{seed}", "arm": side, "seed": seed, "score": 0.5 + (side == "a") * value}
                for seed, value in enumerate(differences) for side in "ab"]  # fmt: skip
        return evaluate_claim(about, rows, "score")

    values = (0.006, 0.012, 0.018)
    undecided = verdict(values)
    assert undecided.outcome == INCONCLUSIVE and undecided.power.std == pytest.approx(0.006)
    assert undecided.power.if_measured == seeds_needed(0.012, 0.006)
    assert undecided.power.if_reference == seeds_needed(0.01, 0.006) and undecided.power.reference == 0.01
    assert undecided.power.detectable == pytest.approx(detectable(0.006, 3), rel=1e-6)
    assert f"{undecided.power.if_measured} seeds" in undecided.words
    assert verdict((0.01, 0.011, 0.012)).power is None and verdict((0.01,)).power is None
    assert json.loads(json.dumps(undecided.to_json()))["power"]["if_measured"] > 3


def test_for_equality_the_other_difference_is_zero():
    plan = analyse(Estimate(0.006, 0.006, -0.009, 0.021, 3), *EQUAL, 0.0)
    assert plan.detectable is None and plan.reference == 0.0
    assert plan.if_reference < plan.if_measured  # a true difference near the margin is harder to decide
