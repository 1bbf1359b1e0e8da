"""Figures in the paper's form: scores over compute, data, settings or shots, with the spread of seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from vitkit.report.figures import quietly, shown_text

Point = tuple[float, float, float]  # x, the mean of y, how far a bar reaches up and down
LONGEST = 30  # characters of a name
MARKS = "osD^vP*X"


@quietly
def draw_lines(
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    fits: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Marks with bars, joined by lines; by the same names, dashed lines that were fitted to them."""
    figure, axis = empty(x_label, y_label, title)
    for i, (name, points) in enumerate(series.items()):
        xs, ys, reach = zip(*sorted(points), strict=True) if points else ((), (), ())
        axis.errorbar(
            xs, ys, yerr=reach, label=shown_text(name, LONGEST), **look(i), linewidth=1, markersize=4
        )  # fmt: skip
        if fits and name in fits:
            axis.plot(*zip(*fits[name], strict=True), linestyle="--", linewidth=0.8, color=colour(i))
    if log_x and all(x > 0 for points in series.values() for x, _, _ in points):
        axis.set_xscale("log")
        count_by_powers(axis.xaxis)
    return finished(figure, axis, len(series))


@quietly
def draw_bars(
    groups: Mapping[str, Mapping[str, tuple[float, float]]],
    *,
    y_label: str,
    title: str = "",
    band: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """For each group its settings side by side as marks with bars: {group: {setting: (mean, reach)}}.

    band: by group the ends of a shaded area, as Fig. 3 has it of BiT's models.
    """
    figure, axis = empty("", y_label, title)
    shaded = [(g, *band[name]) for g, name in enumerate(groups) if band and name in band]
    if shaded:
        places, low, high = zip(*shaded, strict=True)
        axis.fill_between(places, low, high, color="0.6", alpha=0.35, linewidth=0, label="BiT ResNets")
    settings = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.7 / max(1, len(settings))
    for i, setting in enumerate(settings):
        here = [(g, group[setting]) for g, group in enumerate(groups.values()) if setting in group]
        xs = [g + (i - (len(settings) - 1) / 2) * width for g, _ in here]
        axis.errorbar(
            xs, [mean for _, (mean, _) in here], yerr=[reach for _, (_, reach) in here], linestyle="none",
            label=shown_text(setting, LONGEST), **look(i), markersize=5,
        )  # fmt: skip
    axis.set_xticks(range(len(groups)), [shown_text(name, LONGEST) for name in groups])
    axis.set_xlim(-0.6, len(groups) - 0.4)
    return finished(figure, axis, len(settings) + bool(shaded))


@quietly
def draw_shots(panels: Mapping[str, Mapping[str, Sequence[Point]]]) -> Figure:
    """Few-shot accuracy over shots: a panel a data set, side by side; a line a model, the same in each."""
    figure = Figure(figsize=(0.8 + 4.0 * len(panels), 3.2), layout="constrained")
    models = list(dict.fromkeys(model for series in panels.values() for model in series))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        prepare(axis, "images of each class", "few-shot accuracy", shown_text(title, LONGEST))
        for model, points in series.items():
            xs, ys, reach = zip(*sorted(points), strict=True)
            axis.errorbar(xs, ys, yerr=reach, label=shown_text(model, LONGEST), **look(models.index(model)),
                          linewidth=1, markersize=4)  # fmt: skip
        shots = sorted({int(x) for points in series.values() for x, _, _ in points})
        axis.set_xscale("log")
        axis.set_xticks(shots, [str(n) for n in shots])
        axis.minorticks_off()
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def empty(x_label: str, y_label: str, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axis = figure.add_subplot()
    prepare(axis, x_label, y_label, title)
    return figure, axis


def prepare(axis: Any, x_label: str, y_label: str, title: str) -> None:
    axis.set(xlabel=x_label, ylabel=y_label, title=title)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axis.grid(True, linewidth=0.3, alpha=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def count_by_powers(axis: Any) -> None:
    """1, 2, 5, 10 and so on in plain figures: matplotlib's own are formulas, and names must not be those."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 500 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:.0e}"))
    axis.set_minor_formatter(NullFormatter())


def finished(figure: Figure, axis: Any, names: int) -> Figure:
    if names:
        axis.legend(fontsize=7, frameon=False)
    return figure


def look(number: int) -> dict[str, Any]:
    """Of one line among several: told apart by colour and by mark."""
    return {"color": colour(number), "marker": MARKS[number % len(MARKS)], "capsize": 2, "elinewidth": 0.8}


def colour(number: int) -> str:
    return f"C{number % 10}"
