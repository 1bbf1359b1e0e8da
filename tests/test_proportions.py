"""Shares of counted images: intervals, the paired test and the digits, by values that are known."""

import pytest

from vitkit.metrics.intervals import decimals, mcnemar, mean_interval, percent, span, wilson, with_interval


@pytest.mark.parametrize(
    ("right", "images", "low", "high"),  # of statsmodels.stats.proportion.proportion_confint, method wilson
    [(12, 12, 0.75751, 1.0), (0, 12, 0.0, 0.24249), (11, 12, 0.64612, 0.98513), (5, 10, 0.23659, 0.76341)],
)
def test_wilson_by_known_values(right, images, low, high):
    assert wilson(right / images, images) == (pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5))


def test_a_mean_of_shares_has_the_interval_of_its_parts():
    assert mean_interval([0.8], [50]) == pytest.approx(wilson(0.8, 50))
    low, high = mean_interval([0.9, 0.9], [50, 50])
    one = wilson(0.9, 50)
    assert 0.9 - low == pytest.approx((0.9 - one[0]) / 2**0.5) and high - 0.9 < one[1] - 0.9


def test_mcnemar_is_the_sign_test_of_the_images_that_differ():
    scipy_stats = pytest.importorskip("scipy.stats")
    for first, second in ((0, 1), (1, 9), (0, 6), (30, 50), (5, 5)):
        expected = scipy_stats.binomtest(first, first + second).pvalue
        assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(expected)
    assert mcnemar(0, 0) == 1
    assert 0 <= mcnemar(9_000, 9_700) < 1e-6  # thousands do not overflow


def test_digits_fit_the_number_of_images():
    assert [decimals(n) for n in (1, 12, 100, 101, 1000, 1001, 10_000, 50_000)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert percent(11 / 12, 12) == "92 %" and percent(118 / 120, 120) == "98.3 %"
    assert percent(0.8125, 50_000) == "81.25 %" and percent(None, 5) == "–"
    assert span(wilson(1.0, 12), 12) == "76 to 100 %"
    assert with_interval(1.0, 12) == "100 % (95 % interval: 76 to 100 %)"


def test_100_percent_are_all_images_and_0_percent_none():
    assert percent(49_999 / 50_000, 50_000) == "99.99 %" and percent(1 / 50_000, 50_000) == "0.01 %"
    assert percent(1.0, 120) == "100.0 %" and percent(0.0, 12) == "0 %"
