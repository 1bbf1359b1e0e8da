"""Figures by matplotlib: a model's from arrays (Fig. 6, 7, 10, 11), and scores over compute, data or shots.

Every figure is the same to the last byte for the same arrays, whatever the reader's own settings of
matplotlib are. Names of files and classes are drawn as the text that they are.
"""

# h, w grid of patches; P side of a filter; L layers, K heads

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from PIL import Image

from vitkit.report.overlay import stretched

INK, FAINT, ACCENT = "#222222", "#666666", "#b5367a"
STYLE = {
    **{key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")},
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a file may be called $1$
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "vitkit",
}
DPI = 160
TILES = 16  # at most so many maps in a row or a column: more cannot be told apart
WIDEST = 16  # inches of a sheet of pictures
MARKS = "osD^vP*X"
LABEL = 30  # characters of a name in a legend
Point = tuple[float, float, float]  # x, the mean of y, how far a bar reaches up and down


def quietly(work: Callable[..., Any]) -> Callable[..., Any]:
    """With our style, and no word about letters that the font lacks (they are drawn as boxes)."""

    @wraps(work)
    def styled(*args: Any, **options: Any) -> Any:
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            return work(*args, **options)

    return styled


@quietly
def draw_filters(tiles: np.ndarray, *, across: int = 7) -> Figure:
    """Principal components of the embedding's filters, (count, P, P, C), each stretched to 0..1 (Fig. 7)."""
    count, side = tiles.shape[:2]
    rows = math.ceil(count / across)
    zoom = max(1, round(80 / side))
    shown = np.ones((rows * across, side, side, 3), np.float32)  # white where there is none
    shown[:count] = [rgb(stretched(tile)) for tile in tiles]
    shown = shown.reshape(rows, across, side, side, 3).repeat(zoom, 2).repeat(zoom, 3)
    figure, axes = plate(mosaic(shown, gap=6), margins=(12, 44, 12, 12))
    axes.set_title(f"Embedding filters, first {count} components")
    return figure


@quietly
def draw_similarity(similarity: np.ndarray, *, title: str = "Position embedding similarity") -> Figure:
    """Cosines of the position embeddings (h, w, h, w): a map for each patch, in its place (Fig. 7, 10).

    Of more than TILES rows or columns of patches every second, third ... has a map.
    """
    h, w = similarity.shape[:2]
    rows, columns = evenly(h), evenly(w)
    zoom = max(1, round(600 / max(len(rows) * h, len(columns) * w)))
    tiles = similarity[np.ix_(rows, columns)].repeat(zoom, 2).repeat(zoom, 3)
    gap = max(2, zoom * max(h, w) // 14)
    picture = mosaic(tiles[..., None], gap=gap, fill=np.nan)[..., 0]
    tall, wide = (max(0, 300 - side) // 2 for side in picture.shape)  # air around a narrow strip
    margins = (72 + wide, 44 + tall, 120 + wide, 66 + tall)
    figure, axes = plate(picture, margins=margins, cmap="viridis", vmin=-1, vmax=1)
    mark(axes.xaxis, columns, zoom * w + gap, zoom * w)
    mark(axes.yaxis, rows, zoom * h + gap, zoom * h)
    axes.set_xlabel("Patch column" if len(columns) == w else "Patch column (some)")
    axes.set_ylabel("Patch row" if len(rows) == h else "Patch row (some)")
    axes.set_title(title)
    box, across, up = axes.get_position(), *(figure.get_size_inches() * DPI)
    bar = figure.add_axes((box.x1 + 16 / across, box.y0 - tall / up, 14 / across, box.height + 2 * tall / up))
    figure.colorbar(axes.images[0], cax=bar, ticks=[-1, 0, 1]).outline.set_visible(False)
    bar.set_ylabel("Cosine similarity", labelpad=-4)
    return figure


@quietly
def draw_distance(distance: np.ndarray, *, uniform: float | None = None, along: str = "Layer") -> Figure:
    """Mean attention distance (L, K) in pixels: a dot for each head, a line for their mean (Fig. 7, 11).

    `uniform` is what attention to all tokens alike would reach; `along` names the axis.
    """
    layers, heads = distance.shape
    figure = Figure(figsize=(min(6.5, 3.2 + 0.04 * layers), 3.0), layout="constrained")
    axes = figure.add_subplot()
    size = 22 if layers * heads <= 200 else 11
    x = np.arange(layers)
    axes.plot(x, distance.mean(1), color=ACCENT, linewidth=1, zorder=1, label="mean")
    axes.scatter(
        np.repeat(x, heads), distance.ravel(), s=size, color=ACCENT, alpha=0.55, linewidths=0, zorder=2,
        label="head",
    )  # fmt: skip
    if uniform is not None:
        axes.axhline(uniform, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), label="uniform")
    top = max(float(distance.max()), uniform or 0.0, 1e-6)
    axes.set(xlim=(-0.6, layers - 0.4), ylim=(0, 1.08 * top), xlabel=along)
    axes.set_ylabel("Mean attention distance (pixels)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2,
        columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip
    return figure


@quietly
def draw_pictures(
    groups: Sequence[Sequence[np.ndarray]],
    *,
    columns: Sequence[str] = (),
    captions: Sequence[str] = (),
    across: int = 0,
    title: str = "",
    side: float = 1.2,
) -> Figure:
    """Groups of pictures (H, W, 3) uint8 side by side: names above the first row, a caption below each group.

    `across` groups stand in a row (0: as many as give a broad sheet); `side` is a picture's height in inches.
    """
    count = len(groups[0])
    rows = math.ceil(len(groups) / (across or max(1, round(6.6 / count))))
    across = math.ceil(len(groups) / rows)  # as full as the other rows
    height, width = groups[0][0].shape[:2]
    wide, air, below = side * np.clip(width / height, 0.65, 2.5), 0.06, 0.3 if captions else 0.08
    wide = min(wide, WIDEST / (across * (count + 0.25)))
    tall = wide * height / width
    group, apart, top = count * (wide + air) - air, 0.22, 0.26 * bool(columns) + 0.24 * bool(title) + 0.04
    total = (across * (group + apart) - apart + 0.16, rows * (tall + below) + top)
    figure = Figure(figsize=total)
    axes = figure.add_axes((0, 0, 1, 1))  # one for all, in inches from the lower left
    axes.set_axis_off()
    middle: dict[str, Any] = {"ha": "center", "va": "top"}
    for place, pictures in enumerate(groups):
        row, column = divmod(place, across)
        left, y = 0.08 + column * (group + apart), total[1] - top - row * (tall + below) - tall
        for number, picture in enumerate(pictures):
            x = left + number * (wide + air)
            axes.imshow(picture, interpolation="nearest", extent=(x, x + wide, y, y + tall))
            if columns and not row:
                text = fit(columns[number], wide, 8)
                axes.text(x + wide / 2, y + tall + 0.05, text, fontsize=8, ha="center", va="bottom")
        if captions:
            text = fit(captions[place], group, 7)
            axes.text(left + group / 2, y - 0.06, text, fontsize=7, color=FAINT, **middle)
    if title:
        axes.text(total[0] / 2, total[1] - 0.06, shown_text(title, 90), fontsize=9, **middle)
    axes.set(xlim=(0, total[0]), ylim=(0, total[1]), aspect="auto")
    return figure


@quietly
def draw_sheet(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, across: int = 8, title: str = "") -> Figure:
    """Many pairs of pictures (H, W, 3) uint8, all of one size, close together, pixel for pixel (Fig. 14)."""
    across = min(across, len(pairs))
    height, width = pairs[0][0].shape[:2]
    tiles = np.ones((math.ceil(len(pairs) / across) * across, height, 2 * width + 3, 3), np.float32)  # white
    for tile, (left, right) in zip(tiles, pairs, strict=False):
        tile[:, :width], tile[:, width + 3 :] = left / 255, right / 255
    shown = mosaic(tiles.reshape(-1, across, *tiles.shape[1:]), gap=12)
    figure, axes = plate(shown, margins=(16, 44, 16, 16))
    axes.set_title(title)
    return figure


@dataclass(frozen=True)
class Panel:
    """One chart of a figure: lines by name, each of points (x, y)."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@quietly
def draw_panels(panels: Sequence[Panel], *, log: bool = False, top: float | None = None) -> Figure:
    """Charts side by side with one legend below; a name has the same colour and mark in all of them.

    `log`: both axes are logarithmic, and every x has its number. `top`: where y ends, from 0.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    wide = 3.4 * len(panels)
    columns = int(np.clip(wide / (0.6 + 0.06 * max(len(shown_text(n, 40)) for n in names)), 1, len(names)))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(wide, 2.9 + 0.16 * rows), layout="constrained")
    charts = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(charts, panels, strict=True):
        for number, name in enumerate(names):
            points = panel.lines.get(name, ())
            colour = matplotlib.colormaps["tab10"](number % 10)
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colour,
                marker=MARKS[number % len(MARKS)], markersize=4, linewidth=1, label=shown_text(name, 40),
            )  # fmt: skip
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        places = sorted({x for points in panel.lines.values() for x, _ in points})
        if log:
            axes.set(xscale="log", yscale="log")
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        if top is not None:
            axes.set_ylim(0, top)
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.5)
    handles, labels = charts[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=7)
    return figure


@quietly
def draw_scores(
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
            xs, ys, yerr=reach, label=shown_text(name, LABEL), **look(i), linewidth=1, markersize=4
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
            label=shown_text(setting, LABEL), **look(i), markersize=5,
        )  # fmt: skip
    axis.set_xticks(range(len(groups)), [shown_text(name, LABEL) for name in groups])
    axis.set_xlim(-0.6, len(groups) - 0.4)
    return finished(figure, axis, len(settings) + bool(shaded))


@quietly
def draw_shots(panels: Mapping[str, Mapping[str, Sequence[Point]]]) -> Figure:
    """Few-shot accuracy over shots: a panel a data set, side by side; a line a model, the same in each."""
    figure = Figure(figsize=(0.8 + 4.0 * len(panels), 3.2), layout="constrained")
    models = list(dict.fromkeys(model for series in panels.values() for model in series))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        prepare(axis, "images of each class", "few-shot accuracy", shown_text(title, LABEL))
        for model, points in series.items():
            xs, ys, reach = zip(*sorted(points), strict=True)
            axis.errorbar(xs, ys, yerr=reach, label=shown_text(model, LABEL), **look(models.index(model)),
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
    """1, 2, 5, 10 and so on in figures: matplotlib's own are formulas, and names must not be those."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 500 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:.0e}"))
    axis.set_minor_formatter(NullFormatter())


def finished(figure: Figure, axis: Any, names: int) -> Figure:
    if names:
        axis.legend(fontsize=7, frameon=False)
    return figure


def look(number: int) -> dict[str, Any]:
    """Of one line among several: colour and mark differ."""
    return {"color": colour(number), "marker": MARKS[number % len(MARKS)], "capsize": 2, "elinewidth": 0.8}


def colour(number: int) -> str:
    return f"C{number % 10}"


def rgb(values: np.ndarray) -> np.ndarray:
    """Three channels, of one, of three, or the first of others."""
    return values if values.shape[-1] == 3 else values[..., :1].repeat(3, -1)


def mosaic(tiles: np.ndarray, *, gap: int, fill: float = 1.0) -> np.ndarray:
    """Tiles (R, C, H, W, channels) as one picture, with `gap` pixels of `fill` between them."""
    rows, columns, height, width, channels = tiles.shape
    out = np.full((rows, height + gap, columns, width + gap, channels), fill, np.float32)
    out[:, :height, :, :width] = tiles.transpose(0, 2, 1, 3, 4)
    return out.reshape(rows * (height + gap), columns * (width + gap), channels)[:-gap, :-gap]


def plate(picture: np.ndarray, *, margins: tuple[int, int, int, int], **options: Any) -> tuple[Figure, Any]:
    """A figure of one picture, pixel for pixel, with margins of pixels: left, above, right, below."""
    left, above, right, below = margins
    wide, tall = left + picture.shape[1] + right, above + picture.shape[0] + below
    figure = Figure(figsize=(wide / DPI, tall / DPI), dpi=DPI)
    axes = figure.add_axes((left / wide, below / tall, picture.shape[1] / wide, picture.shape[0] / tall))
    axes.imshow(picture, interpolation="nearest", aspect="auto", **options)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure, axes


def evenly(count: int) -> np.ndarray:
    """Places that are drawn: all, or every second, third ... where there are more than TILES."""
    return np.arange(0, count, math.ceil(count / TILES))


def mark(axis: Any, places: np.ndarray, pitch: int, side: int) -> None:
    """Numbers from 1 at the middle of the tiles; some of them where there are many."""
    labelled = np.arange(0, len(places), 1 if len(places) <= 8 else 2)
    axis.set_ticks(labelled * pitch + (side - 1) / 2, [str(places[i] + 1) for i in labelled])
    axis.set_tick_params(length=0, pad=2)


def shown_text(text: str, longest: int) -> str:
    """A name as it can be drawn: one line, nothing that is no letter of any script, not too long."""
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))
    return line if len(line) <= longest else line[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def fit(text: str, inches: float, points: float) -> str:
    """A name cut to what fits into a width; a letter is some 0.6 of its height wide."""
    return shown_text(text, max(4, int(inches * 72 / (0.6 * points))))


@quietly
def render(figure: Figure, kind: str) -> bytes:
    """A figure as the content of a file of kind "png" or "svg", without date or name of a program."""
    file = BytesIO()
    nameless = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    figure.savefig(file, format=kind, dpi=DPI, metadata=nameless)
    return file.getvalue()


def contact_sheet(pictures: Sequence[bytes], *, width: int = 2640, gap: int = 32) -> bytes:
    """PNG files on one sheet in their own size, from left to right; a new row begins where one is full."""
    rows: list[list[Image.Image]] = [[]]
    for content in pictures:
        picture = Image.open(BytesIO(content)).convert("RGB")
        if rows[-1] and sum(p.width + gap for p in [*rows[-1], picture]) > width:
            rows.append([])
        rows[-1].append(picture)
    heights = [max(p.height for p in row) for row in rows]
    widths = [sum(p.width + gap for p in row) - gap for row in rows]
    sheet = Image.new("RGB", (max(widths) + 2 * gap, sum(heights) + gap * (len(rows) + 1)), "white")
    y = gap
    for row, height, wide in zip(rows, heights, widths, strict=True):
        x = (sheet.width - wide) // 2
        for picture in row:
            sheet.paste(picture, (x, y + (height - picture.height) // 2))
            x += picture.width + gap
        y += height + gap
    file = BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()
