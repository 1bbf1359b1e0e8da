"""Scores of named settings as marks with bars, group beside group, as SVG inside a page."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from vitkit.report.charts import (
    BOTTOM,
    HEIGHT,
    IDEAL,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Area,
    Axis,
    area,
    chart_figure,
    colour,
    left_of,
    legend,
    rungs,
    span,
    svg,
    whisker_marks,
)
from vitkit.report.html import Markup, clipped, element

LINES, LINE = 2, 13  # lines of a group's name, and the height of one
Group = Mapping[str, tuple[float, float]]  # by setting: the mean, and how far its bar reaches


def dot_chart(
    groups: Mapping[str, Group],
    *,
    y_label: str,
    title: str = "",
    band: Mapping[str, tuple[float, float]] | None = None,
    band_name: str = "",
) -> str:
    """For each group its settings side by side; y is a share. band: by group the ends of a grey area."""
    settings = list(dict.fromkeys(key for group in groups.values() for key in group))
    ends = [end for group in groups.values() for mean, reach in group.values()
            for end in (mean - reach, mean + reach)]  # fmt: skip
    ends += [end for both in (band or {}).values() for end in both]
    y = Axis(*span(ends, log=False), HEIGHT - BOTTOM, TOP, percent=True)
    x = Axis(-0.5, len(groups) - 0.5, left_of(y), WIDTH - RIGHT)
    places = {group: float(i) for i, group in enumerate(groups)}
    shaded: list[Area] = [(places[group], *both) for group, both in (band or {}).items()]
    drawn = rungs(x, y) + element("g", Markup(area(shaded, x, y)), class_=IDEAL)
    drawn += "".join(group_name(key, x.at(at), (x.end - x.start) / len(groups)) for key, at in places.items())
    apart = 0.7 / max(1, len(settings))
    for i, setting in enumerate(settings):
        here = []
        for key, group in groups.items():
            if setting in group:  # around the middle of those that this group has
                before = [one for one in settings if one in group].index(setting)
                at = places[key] + (before - (len(group) - 1) / 2) * apart
                here.append((at, *group[setting]))
        drawn += element("g", Markup(dots(here, setting, x, y)), class_=colour(i))
    label = f"{y_label} of {', '.join(clipped(key, 40) for key in groups)}"
    keys = legend(settings, [band_name] if shaded else ())
    return chart_figure(y_label, keys, svg(WIDTH, HEIGHT, label, drawn), title)


def dots(here: Sequence[tuple[float, float, float]], setting: str, x: Axis, y: Axis) -> str:
    """The marks of one setting, each with its bar and its numbers for the pointer."""
    bars = [(at, mean - reach, mean + reach) for at, mean, reach in here if reach]
    drawn = whisker_marks(bars, x, y)
    for at, mean, reach in here:
        told = f"{clipped(setting, 40)}: {100 * mean:.2f}%" + (f" ± {100 * reach:.2f}" if reach else "")
        drawn += element("circle", element("title", told), class_="mark", cx=x.at(at), cy=y.at(mean), r=4)
    return drawn


def group_name(key: str, at: float, room: float) -> str:
    """A name below its place, on two lines where one is too short for it."""
    whole = clipped(key, 80)
    lines = wrap(whole, max(4, int(room / LETTER))) or [""]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], clipped(" ".join(lines[LINES - 1 :]), max(4, int(room / LETTER)))]
    top = HEIGHT - BOTTOM + 17
    told = element("title", whole)
    for i, words in enumerate(lines):
        told = Markup(told + element("tspan", words, x=at, y=top + LINE * i))
    return element("text", told, class_="tick", text_anchor="middle")
