"""Charts: what is drawn is what was given, on round axes, whatever the numbers are."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from vitkit.report.charts import MOST, averaged, line_chart, log_ticks, short, thinned, ticks
from vitkit.report.heat import bar, heat_map


def tree(markup: str) -> ElementTree.Element:
    """Our markup is well-formed, so that a strict parser reads it."""
    return ElementTree.fromstring(markup)


def corners(markup: str, css: str = "line") -> list[tuple[float, float]]:
    """Where the first line of a chart goes."""
    kind = "polyline" if css == "line" else "polygon"
    found = next(e for e in tree(markup).iter(kind) if e.get("class") == css)
    return [tuple(map(float, pair.split(","))) for pair in found.get("points").split()]


def axis(markup: str, anchor: str) -> dict[str, float]:
    """The numbers at an axis, and where they stand: 'middle' for x, 'end' for y."""
    texts = [e for e in tree(markup).iter("text") if e.get("class") == "tick"]
    side = "x" if anchor == "middle" else "y"
    return {e.text: float(e.get(side)) for e in texts if e.get("text-anchor") == anchor}


@pytest.mark.parametrize(
    "low, high, found",
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.91, 0.98, [0.92, 0.94, 0.96, 0.98]),
     (-3, 7, [-2, 0, 2, 4, 6]), (0, 123456, [0, 50000, 100000]), (1e-7, 9e-7, [2e-7, 4e-7, 6e-7, 8e-7])],
)  # fmt: skip
def test_ticks_are_round_numbers(low, high, found):
    assert ticks(low, high) == pytest.approx(found)


@pytest.mark.parametrize(
    "low, high, found",
    [(1, 100, [1, 2, 5, 10, 20, 50, 100]), (1e-5, 10, [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10]),
     (3, 4, [3, 3.2, 3.4, 3.6, 3.8, 4])],
)  # fmt: skip
def test_ticks_of_a_log_axis_are_powers_of_ten_and_what_lies_between(low, high, found):
    assert log_ticks(low, high) == pytest.approx(found)


@pytest.mark.parametrize(
    "value, told",
    [
        (0, "0"),
        (0.05, "0.05"),
        (250, "250"),
        (12_000, "12k"),
        (3e6, "3M"),
        (1e-5, "1e-05"),
        (-20_000, "-20k"),
    ],
)
def test_numbers_of_an_axis_are_short(value, told):
    assert short(value) == told


def test_a_point_lies_where_the_axes_say():
    drawn = line_chart({"a": [(0, 0), (10, 1)]}, x_label="step", y_label="loss")
    (x0, y0), (x1, y1) = corners(drawn)
    along, up = axis(drawn, "middle"), axis(drawn, "end")
    assert (x0, x1) == (along["0"], along["10"]) and (y0, y1) == (up["0"], up["1"])
    assert {"step", "loss"} <= {e.text for e in tree(drawn).iter("text")}


def test_log_axes_put_equal_factors_at_equal_distances():
    way = [(1, 1e-3), (10, 1e-2), (100, 1e-1)]
    drawn = line_chart({"a": way}, x_label="n", y_label="error", log_x=True, log_y=True)
    (x0, y0), (x1, y1), (x2, y2) = corners(drawn)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_what_cannot_be_drawn_is_left_out():
    way = [(0, 1.0), (1, math.nan), (2, math.inf), (3, -1.0), (4, 2.0), (5, 1e300)]
    assert len(corners(line_chart({"a": way}, x_label="x", y_label="y"))) == 3
    assert len(corners(line_chart({"a": way}, x_label="x", y_label="y", log_y=True))) == 2
    for nothing in ({}, {"a": []}, {"a": [(1, math.nan)]}):
        assert "no numbers to draw" in line_chart(nothing, x_label="x", y_label="y")


@pytest.mark.parametrize("way", [[(5, 3.0)], [(5, 0.0)], [(1, 2.0), (2, 2.0)], [(1, 1e-90), (2, 1e90)]])
def test_one_number_or_many_equal_ones_can_be_drawn(way):
    for log in (False, True):
        usable = [p for p in way if p[1] > 0] or not log
        drawn = line_chart({"a": way}, x_label="x", y_label="y", log_y=log)
        assert not usable or len(corners(drawn)) == len(way)
        assert "nan" not in drawn and "inf" not in drawn.replace("information", "")


def test_a_long_line_is_thinned_and_no_spike_is_lost():
    way = [(i, math.sin(i / 100)) for i in range(100_000)]
    way[54_321] = (54_321, 50.0)
    kept = thinned(way)
    assert len(kept) <= MOST and (54_321, 50.0) in kept and kept == sorted(kept)
    assert len(line_chart({"a": way}, x_label="x", y_label="y")) < 30_000
    assert thinned(way[:MOST]) == way[:MOST]


def test_a_noisy_line_becomes_means_in_a_band():
    way = [(i, float(i % 2)) for i in range(1000)]
    means, band = averaged(way, 100)
    assert len(means) == len(band) == 100
    assert all(y == 0.5 for _, y in means) and all((low, high) == (0, 1) for _, low, high in band)
    assert averaged(way[:10], 100) == (way[:10], [])


def test_bands_and_errors_reach_as_far_as_they_are():
    options = {"x_label": "x", "y_label": "y"}
    drawn = line_chart({"a": [(0, 5), (10, 5)]}, bands={"a": [(0, 0, 10), (10, 0, 10)]}, **options)
    up = axis(drawn, "end")
    assert {y for _, y in corners(drawn, "band")} == {up["0"], up["10"]}
    drawn = line_chart({"a": [(0, 5), (10, 5)]}, errors={"a": [5, 0]}, **options)
    up = axis(drawn, "end")
    first = next(e for e in tree(drawn).iter("path")).get("d")
    assert re.search(rf" {up['0']}h6m-3 0V{up['10']}", first)


def test_a_legend_names_the_lines_in_their_colours():
    drawn = tree(line_chart({f"run {i}": [(0, i), (1, i)] for i in range(10)}, x_label="x", y_label="y"))
    told = {e.find("bdi").text: e.get("class") for e in drawn.iter("li")}
    assert told["run 0"] == "s0" and told["run 9"] == "s1 dashed" and len(set(told.values())) == 10
    assert {e.get("class") for e in drawn.iter("g")} == set(told.values())


def test_shares_are_told_in_percent_and_points_tell_their_numbers():
    drawn = line_chart({"a": [(1, 0.5), (2, 1.0)]}, x_label="x", y_label="y", percent=True, points=True)
    assert {"60%", "100%"} <= set(axis(drawn, "end"))
    titles = [e.find("title").text for e in tree(drawn).iter("circle")]
    assert titles == ["a: 1, 50%", "a: 2, 100%"]


def test_a_heat_map_shows_every_number_and_tells_right_from_wrong():
    drawn = tree(heat_map([[8, 2], [0, 5]], ["cat", "dog"], ["cat", "dog"]))
    squares = [(e.get("class"), e.get("fill-opacity")) for e in drawn.iter("rect")]
    assert squares == [("right", "0.82"), ("wrong", "0.28"), ("none", None), ("right", "1")]
    assert [e.text for e in drawn.iter("text") if e.get("class").startswith("count")] == ["8", "2", "5"]
    assert "cat → dog: 2 (20.0%)" in [e.text for e in drawn.iter("title")]


@pytest.mark.parametrize("share, width", [(0, "0"), (0.5, "50"), (1, "100"), (7, "100"), (-1, "0")])
def test_a_bar_is_as_long_as_its_share(share, width):
    assert tree(bar(share)).findall("rect")[1].get("width") == width
