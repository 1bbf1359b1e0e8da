"""An inline SVG dot plot with a row per change: its difference from a base, one dot per data set."""

from collections.abc import Mapping

from markupsafe import Markup

from vitkit.report.charts import LETTER, RIGHT, WIDTH, Axis, Group, chart_figure, colour, legend, span, svg
from vitkit.report.html import clipped, element, text

ROW = 18  # height
TOP, BOTTOM = 6, 38
LONGEST = 28  # characters of a name


def difference_chart(changes: Mapping[str, Group], *, x_label: str, title: str = "") -> Markup:
    """Dots with error bars: {change: {data set: (difference of shares, error)}}; the axis is in points."""
    names = list(dict.fromkeys(name for row in changes.values() for name in row))
    ends = [100 * (mean + sign * error) for row in changes.values() for mean, error in row.values()
            for sign in (-1, 1)]  # fmt: skip
    left = 12 + LETTER * max(len(clipped(change, LONGEST)) for change in changes)
    x = Axis(*span([0.0, *ends], log=False), left, WIDTH - RIGHT)
    bottom = TOP + ROW * len(changes)
    markup = vertical_grid(x, bottom, x_label)
    for number, (change, row) in enumerate(changes.items()):
        y = TOP + ROW * (number + 0.5)
        steps = [ROW * 0.6 * ((i + 0.5) / len(names) - 0.5) for i in range(len(names))]
        name = element("title", change) + text(clipped(change, LONGEST))
        markup += element("text", name, class_="tick", x=left - 6, y=y, dy=4, text_anchor="end")
        for i, data in enumerate(names):
            if data in row:
                markup += element("g", dot(data, *row[data], x, y + steps[i]), class_=colour(i))
    label = f"{x_label} by change: {', '.join(clipped(name, 40) for name in names)}"
    return chart_figure(x_label, legend(names), svg(WIDTH, bottom + BOTTOM, label, markup), title)


def vertical_grid(x: Axis, bottom: float, x_label: str) -> Markup:
    """Grid lines with tick labels below, and the label of the axis."""
    markup, middle = Markup(), {"text_anchor": "middle"}
    for tick, label in x.tick_labels():
        place = x.position(tick)
        css = "grid" if tick else "grid zero"
        markup += element("line", class_=css, x1=place, x2=place, y1=TOP, y2=bottom + 4)
        markup += element("text", label, class_="tick", x=place, y=bottom + 17, **middle)
    return markup + element("text", x_label, class_="axis", x=(x.start + x.end) / 2, y=bottom + 33, **middle)


def dot(name: str, mean: float, error: float, x: Axis, y: float) -> Markup:
    """One dot with its error bar and a tooltip."""
    centre, markup = x.position(100 * mean), Markup()
    if error:
        low, high = x.position(100 * (mean - error)), x.position(100 * (mean + error))
        markup = element("path", class_="error", d=f"M{low} {y - 3}v6m0 -3H{high}m0 -3v6")
    label = f"{clipped(name, 40)}: {100 * mean:+.2f}" + (f" ± {100 * error:.2f}" if error else "")
    return markup + element("circle", element("title", label), class_="mark", cx=centre, cy=y, r=4)
