"""The small figure of one claim: the measured difference with its interval, beside the paper's own value."""

from collections.abc import Sequence
from typing import Any

from matplotlib import figure as mpl
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from vitkit.report.figure_style import FAINT, SOFT, colour, styled

OURS: dict[str, Any] = {"color": colour(0), "marker": "o", "markersize": 5, "linewidth": 1.6, "capsize": 3}
PAPER: dict[str, Any] = {"color": colour(1), "marker": "D", "markersize": 4.5, "linewidth": 1.6}


@styled
def draw_interval(
    value: float,
    ends: tuple[float, float] | None,
    *,
    limits: tuple[float, float],
    printed: Sequence[float] = (),
    ratio: bool = False,
    unit: str = "points",
) -> mpl.Figure:
    """One difference with its interval, above the paper's value or range.

    limits: what counts as equal is shaded, up to the drawn range. ratio: the values are binary logarithms of
    ratios, and the axis shows the ratios.
    """
    figure = mpl.Figure(figsize=(2.6, 0.8), layout="constrained")
    axis = figure.add_subplot()
    low, high = ends or (value, value)
    least, most = span([low, high, *printed, 0.0, *(end for end in limits if abs(end) < 1e9)])
    shade(axis, limits, least, most)
    axis.axvline(0, color=SOFT, linewidth=0.8)
    axis.errorbar([value], [0.5 if printed else 0.0], xerr=[[value - low], [high - value]], **OURS)
    axis.plot(printed, [-0.5] * len(printed), **PAPER)
    axis.set(xlim=(least, most), ylim=(-1, 1), yticks=[])
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=ratio))
    text = (lambda x, _: f"{2**x:g}x") if ratio else (lambda x, _: f"{x + 0.0:+g}" if x else "0")
    axis.xaxis.set_major_formatter(FuncFormatter(text))
    axis.set_xlabel(unit, labelpad=1, fontsize=7)
    axis.tick_params(labelsize=7)
    return figure


@styled
def draw_curve(
    points: Sequence[tuple[float, float, float, float]], *, x_label: str, printed: Sequence[float] = ()
) -> mpl.Figure:
    """Differences (x, mean, low, high) along a logarithmic axis; it matters where they cross zero."""
    figure = mpl.Figure(figsize=(2.6, 1.2), layout="constrained")
    axis = figure.add_subplot()
    x, y, low, high = zip(*points, strict=True)
    bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
    axis.axhline(0, color=SOFT, linewidth=0.8)
    axis.errorbar(x, y, yerr=bars, **OURS)
    axis.plot(printed, [0.0] * len(printed), **PAPER)
    axis.set_xscale("log")
    axis.set_xticks(x, [f"{value:,.0f}" if value >= 10 else f"{value:g}" for value in x])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value + 0.0:+g}" if value else "0"))
    axis.set_xlabel(x_label, labelpad=1, fontsize=7)
    axis.set_ylabel("points", fontsize=7)
    axis.tick_params(labelsize=7)
    return figure


def span(values: Sequence[float]) -> tuple[float, float]:
    """The drawn range, with a margin."""
    low, high = min(values), max(values)
    pad = 0.08 * (high - low) or 1.0
    return low - pad, high + pad


def shade(axis: Any, limits: tuple[float, float], least: float, most: float) -> None:
    """Shade where differences count as equal or good enough, if that is not simply above zero."""
    low, high = limits
    if low < 0:
        axis.axvspan(max(low, least), min(high, most), color=FAINT, alpha=0.6, linewidth=0)
