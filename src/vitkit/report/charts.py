"""Line charts as SVG inside a page; their colours come from the page's style, light and dark."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vitkit.report.html import Markup, clipped, element, name, note

Point = tuple[float, float]
Area = tuple[float, float, float]  # x, low, high

WIDTH, HEIGHT = 480, 260  # of a chart in its own units; the page scales it
TOP, RIGHT, BOTTOM, LEFT = 10, 20, 40, 58  # margins; numbers that need more room on the left have it
LETTER = 7.2  # width of a digit at the size of a chart's text
MOST = 600  # points of a line that are drawn
HOVERED = 40  # points of a line that tell their numbers
HUGE = 1e100  # beyond which a number is as good as infinite
COLOURS = 8  # that the style has; lines beyond are dashed
IDEAL = "ideal dashed"  # classes of a line to compare with


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
        found = log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)
        return [tick for tick in found if tick.is_integer()] if self.whole else found

    def told(self, value: float) -> str:
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
) -> str:
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
        drawn += element("g", Markup(line(of, x, y, key)), class_=IDEAL)
    for i, key in enumerate(series):
        inside = area(areas.get(key, ()), x, y) + whisker_marks(bars.get(key, ()), x, y)
        inside += line(lines[key], x, y, key) + marks(lines[key], x, y, key, points)
        drawn += element("g", Markup(inside), class_=colour(i))
    label = f"{y_label} by {x_label}: {', '.join(clipped(key, 40) for key in series)}"
    return chart_figure(y_label, legend(series, ideal), svg(WIDTH, HEIGHT, label, drawn), title)


def chart_figure(y_label: str, keys: str, drawing: str, title: str = "") -> str:
    """A drawing below one line of words: what it shows, and which colour is which.

    Charts of a grid share the heights of these lines, so that their plots stand side by side.
    """
    words = element("h3", title) if title else Markup("")
    words = Markup(words + element("span", y_label, class_="axis") + keys)
    return element("figure", Markup(element("figcaption", words) + drawing), class_="chart")


def left_of(y: Axis) -> float:
    """Where the plot begins: the same in all charts, unless the numbers there are very long."""
    return max(LEFT, 12 + LETTER * max(len(y.told(tick)) for tick in y.ticks()))


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
    found = [k * 10.0**e for e in range(first, last + 1, every) for k in steps]
    found = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
    return found if len(found) > 1 else [tick for tick in ticks(low, high) if tick > 0]


def short(value: float) -> str:
    """A number as an axis has room for it: 0.05, 250, 12k, 3M, 1e-05."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def frame(x: Axis, y: Axis, x_label: str) -> str:
    """Grid lines, the numbers on them, and what those below are."""
    below, middle = HEIGHT - BOTTOM, {"text_anchor": "middle"}
    drawn = rungs(x, y)
    for tick in x.ticks():
        at = x.at(tick)
        drawn += element("line", class_="grid", x1=at, x2=at, y1=below, y2=below + 4)
        drawn += element("text", x.told(tick), class_="tick", x=at, y=below + 17, **middle)
    return drawn + element("text", x_label, class_="axis", x=(x.start + x.end) / 2, y=HEIGHT - 5, **middle)


def rungs(x: Axis, y: Axis) -> str:
    """Lines from left to right with their numbers."""
    drawn = ""
    for tick in y.ticks():
        at = y.at(tick)
        drawn += element("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at)
        drawn += element("text", y.told(tick), class_="tick", x=x.start - 6, y=at, dy=4, text_anchor="end")
    return drawn


def line(of: Sequence[Point], x: Axis, y: Axis, key: str) -> str:
    way = " ".join(f"{x.at(a):g},{y.at(b):g}" for a, b in thinned(of))
    return element("polyline", element("title", clipped(key, 80)), class_="line", points=way) if of else ""


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


def area(of: Sequence[Area], x: Axis, y: Axis) -> str:
    around = [(a, high) for a, _, high in of] + [(a, low) for a, low, _ in reversed(of)]
    way = " ".join(f"{x.at(a):g},{y.at(b):g}" for a, b in around)
    return element("polygon", class_="band", points=way) if of else ""


def marks(of: Sequence[Point], x: Axis, y: Axis, key: str, shown: bool) -> str:
    """Points that tell their numbers; unless `shown` they are there for the pointer alone."""
    css, radius = ("mark", 3.5) if shown or len(of) == 1 else ("hover", 6)
    chosen = of[:: max(1, len(of) // (MOST if shown else HOVERED))]
    told = (element("title", f"{clipped(key, 40)}: {x.told(a)}, {y.told(b)}") for a, b in chosen)
    return "".join(
        element("circle", title, class_=css, cx=x.at(a), cy=y.at(b), r=radius)
        for title, (a, b) in zip(told, chosen, strict=True)
    )


def whisker_marks(of: Sequence[Area], x: Axis, y: Axis) -> str:
    ways = (f"M{x.at(a) - 3:.1f} {y.at(low)}h6m-3 0V{y.at(high)}m-3 0h6" for a, low, high in of)
    return "".join(element("path", class_="error", d=way) for way in ways)


def colour(number: int) -> str:
    return f"s{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


def legend(names: Iterable[str], ideal: Iterable[str] = ()) -> str:
    """Which colour is which; nothing where there is but one line, whose axis says what it is."""
    named = [(key, colour(i)) for i, key in enumerate(names)] + [(key, IDEAL) for key in ideal]
    stroke = element("line", class_="line", x1=1, x2=17, y1=4, y2=4)
    key = element("svg", stroke, class_="key", viewBox="0 0 18 8", aria_hidden="true")
    told = [element("li", Markup(key + name(n, 60)), class_=css) for n, css in named]
    return element("ul", Markup("".join(told)), class_="legend") if len(told) > 1 else ""


def svg(width: float, height: float, label: str, body: str, /, **attributes: Any) -> Markup:
    """A drawing that a page scales, with words for those who do not see it."""
    box = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria_label": label}
    return element("svg", Markup(body), **box, **attributes)
