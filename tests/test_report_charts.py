"""Charts: what is drawn is what was given, on round axes, whatever the numbers are."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from vitkit.report.charts import MOST, averaged, bar, dot_chart, line_chart, log_ticks, short, thinned, ticks
from vitkit.report.confusion import OTHER, confusion_matrix, most_confused


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
    assert (x0, x1) == (along["0"], along["10"]) and (y0, y1) == (up["0"], up["1.0"])
    assert "step" in {e.text for e in tree(drawn).iter("text")}
    assert tree(drawn).find("figcaption/span").text == "loss"


def test_between_steps_nothing_is_marked():
    drawn = line_chart({"a": [(1, 0.0), (2, 1.0), (4, 0.5)]}, x_label="step", y_label="loss")
    assert list(axis(drawn, "middle")) == ["1", "2", "3", "4"]
    drawn = line_chart({"a": [(1, 0.0), (2.5, 1.0), (4, 0.5)]}, x_label="n", y_label="loss")
    assert "1.5" in axis(drawn, "middle")


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
        assert "no data to plot" in line_chart(nothing, x_label="x", y_label="y")


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


def test_charts_begin_at_the_same_place_whatever_their_numbers():
    """So that plots which stand in one grid are aligned."""
    ways = ([(0, 0), (9, 1)], [(0, 1e-4), (9, 3e-3)], [(0, 2000), (9, 90_000)])
    starts = {corners(line_chart({"a": way}, x_label="x", y_label="y"))[0][0] for way in ways}
    assert starts == {58}


def test_a_line_to_compare_with_is_grey_dashed_and_has_no_points():
    ideal = {"ideal": [(0, 0), (1, 1)]}
    drawn = tree(line_chart({"a": [(0.2, 0.4)]}, x_label="x", y_label="y", points=True, ideal=ideal))
    groups = {e.get("class"): e for e in drawn.iter("g")}
    assert set(groups) == {"ideal dashed", "s0"} and len(list(drawn.iter("circle"))) == 1
    assert groups["ideal dashed"].find("circle") is None
    assert [e.get("class") for e in drawn.iter("li")] == ["s0", "ideal dashed"]


def test_marks_of_settings_stand_in_the_middle_of_their_group():
    groups = {"none": {"a": (0.5, 0.0)}, "both": {"a": (0.4, 0.1), "b": (0.6, 0.1)}}
    drawn = dot_chart(groups, y_label="accuracy", band={"both": (0.3, 0.7)}, band_name="others")
    dots = {e.find("title").text: float(e.get("cx")) for e in tree(drawn).iter("circle")}
    names = {e.findall("tspan")[0].text: float(e.findall("tspan")[0].get("x"))
             for e in tree(drawn).iter("text") if e.find("tspan") is not None}  # fmt: skip
    assert dots["a: 50.00%"] == names["none"]
    assert (dots["a: 40.00% ± 10.00"] + dots["b: 60.00% ± 10.00"]) / 2 == pytest.approx(
        names["both"], abs=0.2
    )
    assert len(list(tree(drawn).iter("path"))) == 2  # a mark without spread has no bar
    assert [e.find("bdi").text for e in tree(drawn).iter("li")] == ["a", "b", "others"]


def test_long_names_of_groups_stay_in_their_place():
    drawn = tree(dot_chart({f"{'long ' * 12}{i}": {"a": (0.5, 0)} for i in range(6)}, y_label="y"))
    lines = [e.text for e in drawn.iter("tspan")]
    assert len(lines) == 12 and max(map(len, lines)) <= 11


def cells(markup: str) -> list[list[tuple[str | None, str | None]]]:
    """(class, number) of every square of the first matrix of some markup."""
    first = tree(f"<div>{markup}</div>").find("div/table/tbody")
    return [[(e.get("class"), e.find("span").text) for e in row.findall("td")] for row in first]


def test_a_confusion_matrix_shows_every_number_and_tells_right_from_wrong():
    drawn = confusion_matrix([[8, 2], [0, 5]], ["cat", "dog"])
    assert cells(drawn) == [[("right q8", "8"), ("wrong q2", "2")], [(None, None), ("right q10", "5")]]
    assert 'title="cat → dog: 2 (20.0%)"' in drawn


@pytest.mark.parametrize("count, wide, narrow", [(5, 5, 5), (10, 10, 10), (37, 37, 8), (100, 24, 8),
                                                 (1000, 24, 8)])  # fmt: skip
def test_a_matrix_is_whole_or_the_part_that_is_confused_most(count, wide, narrow):
    matrix = [[0] * count for _ in range(count)]
    for i in range(count):
        matrix[i][i], matrix[i][(i + 1) % count] = 50, i + 1
        matrix[i][(i + 2) % count] += 1
    names = [f"class number {i}" for i in range(count)]
    drawn = tree(f"<div>{confusion_matrix(matrix, names)}</div>")
    tables = drawn.findall("div/table")
    assert [len(one.findall("tbody/tr")) for one in tables] == ([wide] if wide == narrow else [wide, narrow])
    for one in tables:
        rows = [e.find("bdi").text for e in one.iter("th") if e.get("scope") == "row"]
        columns = [e.find("span/bdi").text for e in one.iter("th") if e.get("scope") == "col"]
        assert columns == rows + [OTHER] * (len(rows) < count)
        assert names[-1] in rows  # which is taken for another most often
        for row, line in zip(rows, one.findall("tbody/tr"), strict=True):  # and none of its images is lost
            shown = sum(int(e.find("span").text or 0) for e in line.findall("td"))
            assert shown == sum(matrix[names.index(row)])


def test_the_most_confused_classes_stand_beside_each_other():
    matrix = [[9, 0, 0, 3], [0, 9, 0, 0], [0, 7, 9, 0], [0, 0, 0, 9]]
    assert most_confused(matrix, 4) == [2, 1, 0, 3] and most_confused(matrix, 2) == [2, 1]
    assert most_confused([[3, 0], [0, 3]], 4) == []


@pytest.mark.parametrize("share, width", [(0, "0"), (0.5, "50"), (1, "100"), (7, "100"), (-1, "0")])
def test_a_bar_is_as_long_as_its_share(share, width):
    assert tree(bar(share)).findall("rect")[1].get("width") == width
