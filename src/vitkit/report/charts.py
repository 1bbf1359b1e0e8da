"""Inline SVG charts: lines, dots per setting, and training curves; colours come from the page style."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any

from markupsafe import Markup

from vitkit.report.html import clipped, element, fill, joined, name, note

Point = tuple[float, float]
Area = tuple[float, float, float]  # x, low, high
Group = Mapping[str, tuple[float, float]]  # by setting: the mean and the half-length of its error bar
Row = Mapping[str, Any]  # metrics of one training step
WIDTH, HEIGHT = 480, 260  # of a chart in its own units; the page scales it
TOP, RIGHT, BOTTOM, LEFT = 10, 20, 40, 58  # margins; the left one grows with long tick labels
LETTER = 7.2  # width of a digit in chart text
MOST = 600  # points drawn per line
HOVERED = 40  # points per line with a tooltip
HUGE = 1e100  # larger numbers count as infinite
COLOURS = 8  # in the style sheet; further lines are dashed
IDEAL = "ideal dashed"  # CSS classes of a reference line
LINES, LINE = 2, 13  # lines of a group name, and the height of one
FEW = 12  # up to this many points, a curve has markers
VAL = "validation"


@dataclass(frozen=True)
class Axis:
    """Maps values to positions along one direction of a chart."""

    low: float
    high: float
    start: float  # position of `low`
    end: float
    log: bool = False
    percent: bool = False
    integers: bool = False  # counts such as steps: only they have ticks

    def position(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        values = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)
        return [value for value in values if value.is_integer()] if self.integers else values

    def label(self, value: float) -> str:
        return f"{short(100 * value)}%" if self.percent else short(value)

    def tick_labels(self) -> list[tuple[float, str]]:
        """The ticks with their labels; on a linear axis all have the same number of decimals, except 0."""
        values = self.ticks()
        scale, unit = (100, "%") if self.percent else (1, "")
        if self.log or max(abs(scale * value) for value in values) >= 1e4:
            return [(value, self.label(value)) for value in values]
        places = max(decimals(scale * value) for value in values)
        return [(v, f"{scale * v:.{places}f}{unit}" if v else f"0{unit}") for v in values]


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, Sequence[Area]] | None = None,
    errors: Mapping[str, Sequence[float]] | None = None,
    points: bool | Container[str] = False,
    percent: bool = False,
    percent_x: bool = False,
    title: str = "",
    ideal: Mapping[str, Sequence[Point]] | None = None,
) -> Markup:
    """A line chart of series of points (x, y); non-finite values, and values <= 0 on a log axis, are omitted.

    bands: areas (x, low, high) by series. errors: half-lengths of error bars by series, one per point.
    points: draw a marker at each point, of all series or of these. percent: y is a share; percent_x: x is.
    ideal: grey dashed reference lines.
    """
    usable, ideal = drawable(log_x, log_y), ideal or {}
    lines = {key: [p for p in values if usable(*p)] for key, values in {**series, **ideal}.items()}
    areas = {key: [a for a in values if usable(*a)] for key, values in (bands or {}).items()}
    bars = {key: error_bars(series[key], sizes, usable) for key, sizes in (errors or {}).items()}
    extent = [p for values in lines.values() for p in values]
    extent += [(x, y) for values in (*areas.values(), *bars.values()) for x, *ends in values for y in ends]
    if not extent:
        return note(f"{y_label}: no data to plot")
    y = Axis(*span([p[1] for p in extent], log_y), HEIGHT - BOTTOM, TOP, log_y, percent)
    ends, integers = span([p[0] for p in extent], log_x, tight=True), all(p[0] == int(p[0]) for p in extent)
    x = Axis(*ends, plot_left(y), WIDTH - RIGHT, log_x, percent_x, integers and not percent_x)
    markup = frame(x, y, x_label)
    for key, values in ideal.items():
        markup += element("g", line(values, x, y, key), class_=IDEAL)
    for i, key in enumerate(series):
        shapes = area(areas.get(key, ()), x, y) + draw_error_bars(bars.get(key, ()), x, y)
        marked = points if isinstance(points, bool) else key in points
        shapes += line(lines[key], x, y, key) + markers(lines[key], x, y, key, marked)
        markup += element("g", shapes, class_=colour(i))
    label = f"{y_label} by {x_label}: {', '.join(clipped(key, 40) for key in series)}"
    return chart_figure(y_label, legend(series, ideal), svg(WIDTH, HEIGHT, label, markup), title)


def chart_figure(y_label: str, keys: Markup, drawing: Markup, title: str = "") -> Markup:
    """A chart below a caption with title, y label and legend.

    Charts in a grid share the height of the caption, so that their plots are aligned.
    """
    heading = element("h3", title) if title else Markup()
    caption = element("figcaption", heading + element("span", y_label, class_="axis") + keys)
    return element("figure", caption + drawing, class_="chart")


def plot_left(y: Axis) -> float:
    """The left edge of the plot: the same in all charts unless tick labels are very long."""
    return max(LEFT, 12 + LETTER * max(len(label) for _, label in y.tick_labels()))


def drawable(log_x: bool, log_y: bool) -> Callable[..., bool]:
    """A predicate for points (x, y) and areas (x, low, high) that the axes can show."""

    def usable(x: float, *ys: float) -> bool:
        bounded = all(abs(value) < HUGE for value in (x, *ys))  # false for NaN
        return bounded and (x > 1 / HUGE or not log_x) and (min(ys) > 1 / HUGE or not log_y)

    return usable


def error_bars(points: Sequence[Point], sizes: Sequence[float], usable: Callable[..., bool]) -> list[Area]:
    bars = [(x, y - size, y + size) for (x, y), size in zip(points, sizes, strict=True)]
    return [bar for bar in bars if usable(*bar)]


def span(values: Sequence[float], log: bool, tight: bool = False) -> tuple[float, float]:
    """The limits of an axis: minimum and maximum if `tight`, else with some padding."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * abs(high):
        padding = abs(low) * 0.1 or 1.0
        return (low / 2, high * 2) if log else (low - padding, high + padding)
    if tight:
        return low, high
    if log:
        padding = (high / low) ** 0.05
        return low / padding, high * padding
    padding = 0.05 * (high - low)
    return (0.0 if 0 <= low < 0.5 * high else low - padding), high + padding


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers in a range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, also times 2 and 5 over a short range; linear ticks within one power."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, (last - first) // 6)
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    powers = [k * 10.0**e for e in range(first, last + 1, stride) for k in factors]
    inside = [tick for tick in powers if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) > 1 else [tick for tick in ticks(low, high) if tick > 0]


def short(value: float) -> str:
    """A number in short form for an axis: 0.05, 250, 12k, 3M, 1e-05."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def decimals(value: float) -> int:
    """The number of decimals that a tick needs."""
    return len(f"{value:.8f}".rstrip("0").partition(".")[2])


def frame(x: Axis, y: Axis, x_label: str) -> Markup:
    """Grid lines, tick labels and the label of the x axis."""
    bottom, middle = HEIGHT - BOTTOM, {"text_anchor": "middle"}
    markup = grid(x, y)
    for tick, label in x.tick_labels():
        left = x.position(tick)
        markup += element("line", class_="grid", x1=left, x2=left, y1=bottom, y2=bottom + 4)
        markup += element("text", label, class_="tick", x=left, y=bottom + 17, **middle)
    return markup + element("text", x_label, class_="axis", x=(x.start + x.end) / 2, y=HEIGHT - 5, **middle)


def grid(x: Axis, y: Axis) -> Markup:
    """Horizontal grid lines with their tick labels."""
    markup = Markup()
    for tick, label in y.tick_labels():
        top = y.position(tick)
        markup += element("line", class_="grid", x1=x.start, x2=x.end, y1=top, y2=top)
        markup += element("text", label, class_="tick", x=x.start - 6, y=top, dy=4, text_anchor="end")
    return markup


def line(points: Sequence[Point], x: Axis, y: Axis, key: str) -> Markup:
    if not points:
        return Markup()
    path = " ".join(f"{x.position(a):g},{y.position(b):g}" for a, b in thinned(points))
    return element("polyline", element("title", clipped(key, 80)), class_="line", points=path)


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Reduce to at most `most` points: the minimum and maximum of each segment, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    selected: list[Point] = []
    for part in segments(points, most // 2):
        selected += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return selected


def segments(points: Sequence[Point], count: int) -> Iterable[Sequence[Point]]:
    """Split the points into `count` parts of nearly equal length."""
    cuts = [round(i * len(points) / count) for i in range(count + 1)]
    return (points[a:b] for a, b in pairwise(cuts))


def averaged(points: Sequence[Point], most: int = 75) -> tuple[list[Point], list[Area]]:
    """The means of the segments of a noisy line, and the band (x, minimum, maximum) around them.

    Up to `most` points are returned unchanged, without a band.
    """
    points = [p for p in points if math.isfinite(p[1])]
    if len(points) <= most:
        return points, []
    means: list[Point] = []
    band: list[Area] = []
    for part in segments(points, most):
        x, ys = sum(p[0] for p in part) / len(part), [p[1] for p in part]
        means.append((x, sum(ys) / len(ys)))
        band.append((x, min(ys), max(ys)))
    return means, band


def area(band: Sequence[Area], x: Axis, y: Axis) -> Markup:
    if not band:
        return Markup()
    outline = [(a, high) for a, _, high in band] + [(a, low) for a, low, _ in reversed(band)]
    path = " ".join(f"{x.position(a):g},{y.position(b):g}" for a, b in outline)
    return element("polygon", class_="band", points=path)


def markers(points: Sequence[Point], x: Axis, y: Axis, key: str, visible: bool) -> Markup:
    """Markers with tooltips; unless `visible`, they appear only under the mouse pointer."""
    css, radius = ("mark", 3.5) if visible or len(points) == 1 else ("hover", 6)
    selected = points[:: max(1, len(points) // (MOST if visible else HOVERED))]
    titles = (element("title", f"{clipped(key, 40)}: {x.label(a)}, {y.label(b)}") for a, b in selected)
    return joined(
        element("circle", title, class_=css, cx=x.position(a), cy=y.position(b), r=radius)
        for title, (a, b) in zip(titles, selected, strict=True)
    )


def draw_error_bars(bars: Sequence[Area], x: Axis, y: Axis) -> Markup:
    markup = Markup()
    for a, low, high in bars:
        path = f"M{x.position(a) - 3:.1f} {y.position(low)}h6m-3 0V{y.position(high)}m-3 0h6"
        markup += element("path", class_="error", d=path)
    return markup


def colour(number: int) -> str:
    return f"s{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


def legend(names: Iterable[str], ideal: Iterable[str] = ()) -> Markup:
    """The colour of each line; empty for a single line, which the y label describes."""
    styles = [(key, colour(i)) for i, key in enumerate(names)] + [(key, IDEAL) for key in ideal]
    stroke = element("line", class_="line", x1=1, x2=17, y1=4, y2=4)
    sample = element("svg", stroke, class_="key", viewBox="0 0 18 8", aria_hidden="true")
    entries = [element("li", sample + name(key, 60), class_=css) for key, css in styles]
    return element("ul", joined(entries), class_="legend") if len(entries) > 1 else Markup()


def svg(width: float, height: float, label: str, body: Markup, /, **attributes: Any) -> Markup:
    """A scalable drawing with a description for screen readers."""
    box = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria_label": label}
    return element("svg", body, **box, **attributes)


def bar(share: float) -> Markup:
    """A share as a short bar for a table cell."""
    filled = 100 * min(max(share, 0.0), 1.0)
    shapes = element("rect", class_="track", width=100, height=8, rx=2)
    shapes += element("rect", class_="filled", width=filled, height=8, rx=2)
    box = {"viewBox": "0 0 100 8", "preserveAspectRatio": "none", "aria_hidden": "true"}
    return element("svg", shapes, class_="bar", **box)


def dot_chart(
    groups: Mapping[str, Group],
    *,
    y_label: str,
    title: str = "",
    band: Mapping[str, tuple[float, float]] | None = None,
    band_name: str = "",
) -> Markup:
    """Dots with error bars for the settings of each group; y is a share. band: a grey area (low, high)."""
    settings = list(dict.fromkeys(key for group in groups.values() for key in group))
    ends = [end for group in groups.values() for mean, error in group.values()
            for end in (mean - error, mean + error)]  # fmt: skip
    ends += [end for limits in (band or {}).values() for end in limits]
    y = Axis(*span(ends, log=False), HEIGHT - BOTTOM, TOP, percent=True)
    x = Axis(-0.5, len(groups) - 0.5, plot_left(y), WIDTH - RIGHT)
    centres = {group: float(i) for i, group in enumerate(groups)}
    shaded: list[Area] = [(centres[group], *limits) for group, limits in (band or {}).items()]
    markup = grid(x, y) + element("g", area(shaded, x, y), class_=IDEAL)
    width = (x.end - x.start) / len(groups)
    markup += joined(group_name(key, x.position(centre), width) for key, centre in centres.items())
    gap = 0.7 / max(1, len(settings))
    for i, setting in enumerate(settings):
        values = []
        for key, group in groups.items():
            if setting in group:  # the dots of a group are centred
                rank = [other for other in settings if other in group].index(setting)
                values.append((centres[key] + (rank - (len(group) - 1) / 2) * gap, *group[setting]))
        markup += element("g", dots(values, setting, x, y), class_=colour(i))
    label = f"{y_label} of {', '.join(clipped(key, 40) for key in groups)}"
    keys = legend(settings, [band_name] if shaded else ())
    return chart_figure(y_label, keys, svg(WIDTH, HEIGHT, label, markup), title)


def dots(values: Sequence[tuple[float, float, float]], setting: str, x: Axis, y: Axis) -> Markup:
    """The dots (x, mean, error) of one setting, with error bars and tooltips."""
    markup = draw_error_bars([(a, mean - error, mean + error) for a, mean, error in values if error], x, y)
    for a, mean, error in values:
        label = f"{clipped(setting, 40)}: {100 * mean:.2f}%" + (f" ± {100 * error:.2f}" if error else "")
        centre = {"cx": x.position(a), "cy": y.position(mean)}
        markup += element("circle", element("title", label), class_="mark", **centre, r=4)
    return markup


def group_name(key: str, centre: float, width: float) -> Markup:
    """The name of a group below its dots, wrapped to two lines if necessary."""
    full_name, letters = clipped(key, 80), max(4, int(width / LETTER))
    lines = wrap(full_name, letters) or [""]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], clipped(" ".join(lines[LINES - 1 :]), letters)]
    top = HEIGHT - BOTTOM + 17
    body = element("title", full_name)
    for i, words in enumerate(lines):
        body += element("tspan", words, x=centre, y=top + LINE * i)
    return element("text", body, class_="tick", text_anchor="middle")


def points(rows: Sequence[Row], *keys: str) -> list[Point]:
    """(step, value) of the rows that have one of the keys."""
    pairs = ((row["step"], next((row[k] for k in keys if k in row), None)) for row in rows)
    return [(float(step), float(value)) for step, value in pairs if isinstance(value, int | float)]


def speed(rows: Sequence[Row]) -> list[Point]:
    """(step, images per second)."""
    timed = [row for row in rows if row.get("images") and row.get("seconds")]
    return [(float(row["step"]), row["images"] / row["seconds"]) for row in timed]


def curve(
    series: Mapping[str, Sequence[Point]], y_label: str, *, percent: bool = False, noisy: bool = True
) -> Markup:
    """A chart over training steps; noisy lines are averaged within a band. Empty without points."""
    lines: dict[str, Sequence[Point]] = {}
    bands: dict[str, Sequence[Area]] = {}
    for key, values in series.items():
        if values:
            lines[key], bands[key] = averaged(values) if noisy else (values, ())
    if not lines:
        return Markup()
    few = {key for key, values in lines.items() if len(values) <= FEW}
    return line_chart(lines, x_label="step", y_label=y_label, bands=bands, points=few, percent=percent)


def overlaid(runs: Mapping[str, Sequence[Row]], metrics: Sequence[Mapping[str, Any]] = ()) -> Markup:
    """The training curves of several runs, one colour per run; metrics: further ones of their tasks."""

    def series(*keys: str) -> dict[str, list[Point]]:
        return {name: points(rows, *keys) for name, rows in runs.items()}

    return charts(
        curve(series("loss"), "training loss"),
        curve(series("val_loss"), "validation loss"),
        curve(series("accuracy"), "training accuracy", percent=True),
        curve(series("val_top1", "val_accuracy"), "validation accuracy", percent=True),
        *(
            curve(series(f"val_{m['key']}"), f"validation {m['label']}", percent=m["percent"])
            for m in metrics
        ),
        curve(series("rate"), "learning rate", noisy=False),
        curve({name: speed(rows) for name, rows in runs.items()}, "images per second"),
    )


def charts(*figures: Markup) -> Markup:
    """A grid of charts; empty ones are omitted."""
    non_empty = [figure for figure in figures if figure]
    return fill("parts.html", "charts", non_empty) if non_empty else note("No training steps logged yet.")
