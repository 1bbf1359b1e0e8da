"""Charts as SVG inside a page: lines, scores of settings, curves of runs; colours are the page's."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any

from markupsafe import Markup

from vitkit.report.html import clipped, element, fill, joined, name, note

Point = tuple[float, float]
Area = tuple[float, float, float]  # x, low, high
Group = Mapping[str, tuple[float, float]]  # by setting: the mean, and how far its bar reaches
Row = Mapping[str, Any]  # numbers of one training step
WIDTH, HEIGHT = 480, 260  # of a chart in its own units; the page scales it
TOP, RIGHT, BOTTOM, LEFT = 10, 20, 40, 58  # margins; numbers that need more room on the left have it
LETTER = 7.2  # width of a digit at the size of a chart's text
MOST = 600  # points of a line that are drawn
HOVERED = 40  # points of a line that show their numbers under the pointer
HUGE = 1e100  # beyond which a number is as good as infinite
COLOURS = 8  # that the style has; lines beyond are dashed
IDEAL = "ideal dashed"  # classes of a line to compare with
LINES, LINE = 2, 13  # lines of a group's name, and the height of one
FEW = 12  # points of a curve that are marked
VAL = "validation"
DRAWN = ("loss", "top1", "accuracy")  # metrics that have a chart anyway


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: which numbers it spans, and where they lie."""

    low: float
    high: float
    start: float  # where `low` lies
    end: float
    log: bool = False
    percent: bool = False
    whole: bool = False  # counts, as steps are: nothing is marked between them

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        every = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)
        return [tick for tick in every if tick.is_integer()] if self.whole else every

    def label(self, value: float) -> str:
        return f"{short(100 * value)}%" if self.percent else short(value)


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, Sequence[Area]] | None = None,
    errors: Mapping[str, Sequence[float]] | None = None,
    points: bool = False,
    percent: bool = False,
    title: str = "",
    ideal: Mapping[str, Sequence[Point]] | None = None,
) -> Markup:
    """Lines by name, each of points (x, y); what is not a number, or not above 0 on a log axis, is left out.

    bands: by the same names, areas of (x, low, high). errors: by the same names, for each point how far a bar
    reaches up and down. points: a mark at each point, as few of them should have. percent: y is a share.
    ideal: lines to compare with, grey and dashed.
    """
    usable, ideal = able(log_x, log_y), ideal or {}
    lines = {key: [p for p in of if usable(*p)] for key, of in {**series, **ideal}.items()}
    areas = {key: [a for a in of if usable(*a)] for key, of in (bands or {}).items()}
    bars = {key: whiskers(series[key], far, usable) for key, far in (errors or {}).items()}
    corners = [p for of in lines.values() for p in of]
    corners += [(x, y) for of in (*areas.values(), *bars.values()) for x, *ends in of for y in ends]
    if not corners:
        return note(f"{y_label}: no numbers to draw")
    y = Axis(*span([p[1] for p in corners], log_y), HEIGHT - BOTTOM, TOP, log_y, percent)
    ends, whole = span([p[0] for p in corners], log_x, tight=True), all(p[0] == int(p[0]) for p in corners)
    x = Axis(*ends, left_of(y), WIDTH - RIGHT, log_x, whole=whole)
    drawn = frame(x, y, x_label)
    for key, of in ideal.items():
        drawn += element("g", line(of, x, y, key), class_=IDEAL)
    for i, key in enumerate(series):
        inside = area(areas.get(key, ()), x, y) + whisker_marks(bars.get(key, ()), x, y)
        inside += line(lines[key], x, y, key) + marks(lines[key], x, y, key, points)
        drawn += element("g", inside, class_=colour(i))
    label = f"{y_label} by {x_label}: {', '.join(clipped(key, 40) for key in series)}"
    return chart_figure(y_label, legend(series, ideal), svg(WIDTH, HEIGHT, label, drawn), title)


def chart_figure(y_label: str, keys: Markup, drawing: Markup, title: str = "") -> Markup:
    """A drawing below one line of words: what it shows, and which colour is which.

    Charts of a grid share the heights of these lines, so that their plots stand side by side.
    """
    heading = element("h3", title) if title else Markup()
    caption = element("figcaption", heading + element("span", y_label, class_="axis") + keys)
    return element("figure", caption + drawing, class_="chart")


def left_of(y: Axis) -> float:
    """Where the plot begins: the same in all charts, unless the numbers there are very long."""
    return max(LEFT, 12 + LETTER * max(len(y.label(tick)) for tick in y.ticks()))


def able(log_x: bool, log_y: bool) -> Callable[..., bool]:
    """Whether a point, or an end of an area, can be drawn at all."""

    def usable(x: float, *ys: float) -> bool:
        bounded = all(abs(value) < HUGE for value in (x, *ys))  # which not a number is not
        return bounded and (x > 1 / HUGE or not log_x) and (min(ys) > 1 / HUGE or not log_y)

    return usable


def whiskers(of: Sequence[Point], far: Sequence[float], usable: Callable[..., bool]) -> list[Area]:
    bars = [(x, y - reach, y + reach) for (x, y), reach in zip(of, far, strict=True)]
    return [bar for bar in bars if usable(*bar)]


def span(values: Sequence[float], log: bool, tight: bool = False) -> tuple[float, float]:
    """The ends of an axis: the numbers' own if `tight`, else with a little room around them."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * abs(high):
        apart = abs(low) * 0.1 or 1.0
        return (low / 2, high * 2) if log else (low - apart, high + apart)
    if tight:
        return low, high
    if log:
        room = (high / low) ** 0.05
        return low / room, high * room
    room = 0.05 * (high - low)
    return (0.0 if 0 <= low < 0.5 * high else low - room), high + room


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers between two: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where there are few; round numbers within one power."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    powers = [k * 10.0**e for e in range(first, last + 1, every) for k in steps]
    inside = [tick for tick in powers if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) > 1 else [tick for tick in ticks(low, high) if tick > 0]


def short(value: float) -> str:
    """A number as an axis has room for it: 0.05, 250, 12k, 3M, 1e-05."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def frame(x: Axis, y: Axis, x_label: str) -> Markup:
    """Grid lines, the numbers on them, and what those below are."""
    below, middle = HEIGHT - BOTTOM, {"text_anchor": "middle"}
    drawn = grid(x, y)
    for tick in x.ticks():
        at = x.at(tick)
        drawn += element("line", class_="grid", x1=at, x2=at, y1=below, y2=below + 4)
        drawn += element("text", x.label(tick), class_="tick", x=at, y=below + 17, **middle)
    return drawn + element("text", x_label, class_="axis", x=(x.start + x.end) / 2, y=HEIGHT - 5, **middle)


def grid(x: Axis, y: Axis) -> Markup:
    """Lines from left to right with their numbers."""
    drawn = Markup()
    for tick in y.ticks():
        at = y.at(tick)
        drawn += element("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at)
        drawn += element("text", y.label(tick), class_="tick", x=x.start - 6, y=at, dy=4, text_anchor="end")
    return drawn


def line(of: Sequence[Point], x: Axis, y: Axis, key: str) -> Markup:
    if not of:
        return Markup()
    way = " ".join(f"{x.at(a):g},{y.at(b):g}" for a, b in thinned(of))
    return element("polyline", element("title", clipped(key, 80)), class_="line", points=way)


def thinned(of: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most so many points, with the lowest and the highest of each stretch, so that no spike is lost."""
    if len(of) <= most:
        return list(of)
    kept: list[Point] = []
    for part in stretches(of, most // 2):
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def stretches(of: Sequence[Point], count: int) -> Iterable[Sequence[Point]]:
    """The points cut in `count` parts of nearly equal length."""
    cuts = [round(i * len(of) / count) for i in range(count + 1)]
    return (of[a:b] for a, b in pairwise(cuts))


def averaged(of: Sequence[Point], most: int = 75) -> tuple[list[Point], list[Area]]:
    """A noisy line as the means of its stretches, and the band of (x, lowest, highest) around them.

    Where there are few points they are as they are, without a band.
    """
    of = [p for p in of if math.isfinite(p[1])]
    if len(of) <= most:
        return of, []
    means: list[Point] = []
    band: list[Area] = []
    for part in stretches(of, most):
        x, ys = sum(p[0] for p in part) / len(part), [p[1] for p in part]
        means.append((x, sum(ys) / len(ys)))
        band.append((x, min(ys), max(ys)))
    return means, band


def area(of: Sequence[Area], x: Axis, y: Axis) -> Markup:
    if not of:
        return Markup()
    around = [(a, high) for a, _, high in of] + [(a, low) for a, low, _ in reversed(of)]
    way = " ".join(f"{x.at(a):g},{y.at(b):g}" for a, b in around)
    return element("polygon", class_="band", points=way)


def marks(of: Sequence[Point], x: Axis, y: Axis, key: str, shown: bool) -> Markup:
    """Points with their numbers; unless `shown` they are there for the pointer alone."""
    css, radius = ("mark", 3.5) if shown or len(of) == 1 else ("hover", 6)
    chosen = of[:: max(1, len(of) // (MOST if shown else HOVERED))]
    titles = (element("title", f"{clipped(key, 40)}: {x.label(a)}, {y.label(b)}") for a, b in chosen)
    return joined(
        element("circle", title, class_=css, cx=x.at(a), cy=y.at(b), r=radius)
        for title, (a, b) in zip(titles, chosen, strict=True)
    )


def whisker_marks(of: Sequence[Area], x: Axis, y: Axis) -> Markup:
    ways = (f"M{x.at(a) - 3:.1f} {y.at(low)}h6m-3 0V{y.at(high)}m-3 0h6" for a, low, high in of)
    return joined(element("path", class_="error", d=way) for way in ways)


def colour(number: int) -> str:
    return f"s{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


def legend(names: Iterable[str], ideal: Iterable[str] = ()) -> Markup:
    """Which colour is which; nothing where there is but one line, whose axis says what it is."""
    named = [(key, colour(i)) for i, key in enumerate(names)] + [(key, IDEAL) for key in ideal]
    stroke = element("line", class_="line", x1=1, x2=17, y1=4, y2=4)
    key = element("svg", stroke, class_="key", viewBox="0 0 18 8", aria_hidden="true")
    entries = [element("li", key + name(n, 60), class_=css) for n, css in named]
    return element("ul", joined(entries), class_="legend") if len(entries) > 1 else Markup()


def svg(width: float, height: float, label: str, body: Markup, /, **attributes: Any) -> Markup:
    """A drawing that a page scales, with a description for screen readers."""
    box = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria_label": label}
    return element("svg", body, **box, **attributes)


def bar(share: float) -> Markup:
    """A share of a whole as a short bar, for a cell of a table."""
    filled = 100 * min(max(share, 0.0), 1.0)
    inside = element("rect", class_="track", width=100, height=8, rx=2)
    inside += element("rect", class_="filled", width=filled, height=8, rx=2)
    box = {"viewBox": "0 0 100 8", "preserveAspectRatio": "none", "aria_hidden": "true"}
    return element("svg", inside, class_="bar", **box)


def dot_chart(
    groups: Mapping[str, Group],
    *,
    y_label: str,
    title: str = "",
    band: Mapping[str, tuple[float, float]] | None = None,
    band_name: str = "",
) -> Markup:
    """For each group its settings side by side; y is a share. band: by group the ends of a grey area."""
    settings = list(dict.fromkeys(key for group in groups.values() for key in group))
    ends = [end for group in groups.values() for mean, reach in group.values()
            for end in (mean - reach, mean + reach)]  # fmt: skip
    ends += [end for both in (band or {}).values() for end in both]
    y = Axis(*span(ends, log=False), HEIGHT - BOTTOM, TOP, percent=True)
    x = Axis(-0.5, len(groups) - 0.5, left_of(y), WIDTH - RIGHT)
    places = {group: float(i) for i, group in enumerate(groups)}
    shaded: list[Area] = [(places[group], *both) for group, both in (band or {}).items()]
    drawn = grid(x, y) + element("g", area(shaded, x, y), class_=IDEAL)
    drawn += joined(group_name(key, x.at(at), (x.end - x.start) / len(groups)) for key, at in places.items())
    apart = 0.7 / max(1, len(settings))
    for i, setting in enumerate(settings):
        here = []
        for key, group in groups.items():
            if setting in group:  # around the middle of those that this group has
                before = [one for one in settings if one in group].index(setting)
                at = places[key] + (before - (len(group) - 1) / 2) * apart
                here.append((at, *group[setting]))
        drawn += element("g", dots(here, setting, x, y), class_=colour(i))
    label = f"{y_label} of {', '.join(clipped(key, 40) for key in groups)}"
    keys = legend(settings, [band_name] if shaded else ())
    return chart_figure(y_label, keys, svg(WIDTH, HEIGHT, label, drawn), title)


def dots(here: Sequence[tuple[float, float, float]], setting: str, x: Axis, y: Axis) -> Markup:
    """The marks of one setting, each with its bar and its numbers for the pointer."""
    bars = [(at, mean - reach, mean + reach) for at, mean, reach in here if reach]
    drawn = whisker_marks(bars, x, y)
    for at, mean, reach in here:
        label = f"{clipped(setting, 40)}: {100 * mean:.2f}%" + (f" ± {100 * reach:.2f}" if reach else "")
        drawn += element("circle", element("title", label), class_="mark", cx=x.at(at), cy=y.at(mean), r=4)
    return drawn


def group_name(key: str, at: float, room: float) -> Markup:
    """A name below its place, on two lines where one is too short for it."""
    whole = clipped(key, 80)
    lines = wrap(whole, max(4, int(room / LETTER))) or [""]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], clipped(" ".join(lines[LINES - 1 :]), max(4, int(room / LETTER)))]
    top = HEIGHT - BOTTOM + 17
    body = element("title", whole)
    for i, words in enumerate(lines):
        body += element("tspan", words, x=at, y=top + LINE * i)
    return element("text", body, class_="tick", text_anchor="middle")


def points(rows: Sequence[Row], *keys: str) -> list[Point]:
    """(step, number) of the rows that have one of these."""
    pairs = ((row["step"], next((row[k] for k in keys if k in row), None)) for row in rows)
    return [(float(step), float(value)) for step, value in pairs if isinstance(value, int | float)]


def speed(rows: Sequence[Row]) -> list[Point]:
    """(step, images per second)."""
    timed = [row for row in rows if row.get("images") and row.get("seconds")]
    return [(float(row["step"]), row["images"] / row["seconds"]) for row in timed]


def curve(
    series: Mapping[str, Sequence[Point]], y_label: str, *, percent: bool = False, noisy: bool = True
) -> Markup:
    """Over steps; a noisy line of many points is averaged, in a band of what it spans. Nothing for none."""
    lines: dict[str, Sequence[Point]] = {}
    bands: dict[str, Sequence[Area]] = {}
    for key, of in series.items():
        if of:
            lines[key], bands[key] = averaged(of) if noisy else (of, ())
    if not lines:
        return Markup()
    few = all(len(of) <= FEW for of in lines.values())
    return line_chart(lines, x_label="step", y_label=y_label, bands=bands, points=few, percent=percent)


def run_curves(rows: Sequence[Row], metric: Mapping[str, Any]) -> Markup:
    """Loss, accuracy, learning rate and speed of a run; few-shot accuracy where it was measured.

    metric: that of the run's task, which is drawn too where it is another.
    """
    key = str(metric["key"])
    own = {"train": points(rows, key), VAL: points(rows, f"val_{key}")} if key not in DRAWN else {}
    accuracies = {"train": points(rows, "accuracy"), VAL: points(rows, "val_top1", "val_accuracy")}
    return charts(
        curve({"train": points(rows, "loss"), VAL: points(rows, "val_loss")}, "loss"),
        curve(accuracies, "accuracy", percent=True),
        curve(own, str(metric["label"]), percent=bool(metric["percent"])),
        curve({"few-shot": points(rows, "fewshot_mean")}, "few-shot accuracy", percent=True),
        curve({"rate": points(rows, "rate")}, "learning rate", noisy=False),
        curve({"speed": speed(rows)}, "images per second"),
    )


def overlaid(runs: Mapping[str, Sequence[Row]]) -> Markup:
    """The curves of several runs, each in one colour."""

    def of(*keys: str) -> dict[str, list[Point]]:
        return {name: points(rows, *keys) for name, rows in runs.items()}

    return charts(
        curve(of("loss"), "training loss"),
        curve(of("val_loss"), "validation loss"),
        curve(of("accuracy"), "training accuracy", percent=True),
        curve(of("val_top1", "val_accuracy"), "validation accuracy", percent=True),
        curve(of("rate"), "learning rate", noisy=False),
        curve({name: speed(rows) for name, rows in runs.items()}, "images per second"),
    )


def charts(*drawn: Markup) -> Markup:
    """Side by side; those without numbers are left out."""
    there = [one for one in drawn if one]
    return fill("parts.html", "charts", there) if there else note("No training step has been logged yet.")
