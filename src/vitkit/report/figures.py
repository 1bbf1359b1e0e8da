"""Matplotlib figures: the inspection figures of the paper (6, 7, 10, 11), and scores over compute or shots.

The same arrays always give the same bytes, regardless of the user's matplotlib settings. Names of files and
classes are never parsed as formulas.
"""

# h, w grid of patches; P side of a filter; L layers, K heads

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import figure as mpl
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from vitkit.report.figure_style import DPI, SOFT, colour, line_style, render, styled
from vitkit.report.overlay import stretched

TILES = 16  # maximum maps in a row or column: more cannot be distinguished
WIDEST = 16  # inches
LABEL = 30  # characters of a name in a legend
BARS = {"capsize": 2, "elinewidth": 0.8}  # error bars
Point = tuple[float, float, float]  # x, mean of y, half-length of the error bar


class Figure(mpl.Figure):
    """A matplotlib figure that shows itself in a notebook, where pyplot does not know of it."""

    def _repr_png_(self) -> bytes:
        return render(self, "png")


@styled
def draw_filters(tiles: np.ndarray, *, across: int = 7) -> Figure:
    """Principal components of the embedding filters, (count, P, P, C), each normalized to 0..1 (Fig. 7)."""
    count, side = tiles.shape[:2]
    rows = math.ceil(count / across)
    zoom = max(1, round(80 / side))
    pixels = np.zeros((rows * across, side, side, 4), np.float32)  # transparent where there is no tile
    pixels[:count] = [opaque(rgb(stretched(tile))) for tile in tiles]
    pixels = pixels.reshape(rows, across, side, side, 4).repeat(zoom, 2).repeat(zoom, 3)
    figure, axes = pixel_figure(mosaic(pixels, gap=6, fill=0.0), margins=(12, 44, 12, 12))
    axes.set_title(f"Embedding filters, first {count} components")
    return figure


@styled
def draw_similarity(similarity: np.ndarray, *, title: str = "Position embedding similarity") -> Figure:
    """Cosine similarities of position embeddings (h, w, h, w): a grid with one map per patch (Fig. 7, 10).

    With more than TILES rows or columns, only every second, third ... patch has a map.
    """
    h, w = similarity.shape[:2]
    rows, columns = subsampled(h), subsampled(w)
    zoom = max(1, round(600 / max(len(rows) * h, len(columns) * w)))
    tiles = similarity[np.ix_(rows, columns)].repeat(zoom, 2).repeat(zoom, 3)
    gap = max(2, zoom * max(h, w) // 14)
    picture = mosaic(tiles[..., None], gap=gap, fill=np.nan)[..., 0]
    pad_y, pad_x = (max(0, 300 - side) // 2 for side in picture.shape)  # extra margin around narrow grids
    margins = (72 + pad_x, 44 + pad_y, 120 + pad_x, 66 + pad_y)
    figure, axes = pixel_figure(picture, margins=margins, cmap="magma", vmin=-1, vmax=1)
    label_tiles(axes.xaxis, columns, zoom * w + gap, zoom * w)
    label_tiles(axes.yaxis, rows, zoom * h + gap, zoom * h)
    axes.set_xlabel("Patch column" if len(columns) == w else "Patch column (subsampled)")
    axes.set_ylabel("Patch row" if len(rows) == h else "Patch row (subsampled)")
    axes.set_title(title)
    box, width, height = axes.get_position(), *(figure.get_size_inches() * DPI)
    bar = figure.add_axes(
        (box.x1 + 16 / width, box.y0 - pad_y / height, 14 / width, box.height + 2 * pad_y / height)
    )
    figure.colorbar(axes.images[0], cax=bar, ticks=[-1, 0, 1]).outline.set_visible(False)
    bar.set_ylabel("Cosine similarity", labelpad=-4)
    return figure


@styled
def draw_distance(distance: np.ndarray, *, uniform: float | None = None, along: str = "Layer") -> Figure:
    """Mean attention distance (L, K) in pixels: one dot per head, and a line for the mean (Fig. 7, 11).

    `uniform` is the distance of uniform attention; `along` is the label of the x axis.
    """
    layers, heads = distance.shape
    figure = Figure(figsize=(min(6.5, 3.2 + 0.04 * layers), 3.0), layout="constrained")
    axes = figure.add_subplot()
    size = 22 if layers * heads <= 200 else 11
    x = np.arange(layers)
    axes.plot(x, distance.mean(1), color=colour(0), linewidth=1, zorder=1, label="mean")
    axes.scatter(
        np.repeat(x, heads), distance.ravel(), s=size, color=colour(0), alpha=0.55, linewidths=0, zorder=2,
        label="head",
    )  # fmt: skip
    if uniform is not None:
        axes.axhline(uniform, color=colour(6), linewidth=0.8, linestyle=(0, (4, 3)), label="uniform")
    top = max(float(distance.max()), uniform or 0.0) or 1.0
    axes.set(xlim=(-0.6, layers - 0.4), ylim=(0, 1.08 * top), xlabel=along)
    axes.set_ylabel("Mean attention distance (pixels)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, columnspacing=1.2,
        handletextpad=0.5,
    )  # fmt: skip
    return figure


@styled
def draw_pictures(
    groups: Sequence[Sequence[np.ndarray]],
    *,
    columns: Sequence[str] = (),
    captions: Sequence[str] = (),
    across: int = 0,
    title: str = "",
    side: float = 1.2,
) -> Figure:
    """Groups of images (H, W, 3) uint8 in a grid, with column names on top and a caption below each group.

    across: groups per row (0: chosen automatically); side: the height of an image in inches.
    """
    count = len(groups[0])
    rows = math.ceil(len(groups) / (across or max(1, round(6.6 / count))))
    across = math.ceil(len(groups) / rows)  # balances the rows
    height, width = groups[0][0].shape[:2]
    wide, gap, below = side * np.clip(width / height, 0.65, 2.5), 0.06, 0.3 if captions else 0.08
    wide = min(wide, WIDEST / (across * (count + 0.25)))
    tall = wide * height / width
    group, group_gap, top = count * (wide + gap) - gap, 0.22, 0.26 * bool(columns) + 0.24 * bool(title) + 0.04
    size = (across * (group + group_gap) - group_gap + 0.16, rows * (tall + below) + top)
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1))  # one for all images, in inches from the lower left
    axes.set_axis_off()
    middle: dict[str, Any] = {"ha": "center", "va": "top"}
    for index, pictures in enumerate(groups):
        row, column = divmod(index, across)
        left, y = 0.08 + column * (group + group_gap), size[1] - top - row * (tall + below) - tall
        for number, picture in enumerate(pictures):
            x = left + number * (wide + gap)
            axes.imshow(picture, interpolation="nearest", extent=(x, x + wide, y, y + tall))
            if columns and not row:
                text = fit(columns[number], wide, 8)
                axes.text(x + wide / 2, y + tall + 0.05, text, color=SOFT, ha="center", va="bottom")
        if captions:
            text = fit(captions[index], group, 7)
            axes.text(left + group / 2, y - 0.06, text, fontsize=7, color=SOFT, **middle)
    if title:
        axes.text(0.08, size[1] - 0.06, display_text(title, 90), fontsize=9, va="top", weight="bold")
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]), aspect="auto")
    return figure


@styled
def draw_sheet(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, across: int = 8, title: str = "") -> Figure:
    """A dense grid of pairs of images (H, W, 3) uint8 of equal size, pixel for pixel (Fig. 14)."""
    across = min(across, len(pairs))
    height, width = pairs[0][0].shape[:2]
    tiles = np.zeros((math.ceil(len(pairs) / across) * across, height, 2 * width + 3, 4), np.float32)
    for tile, (left, right) in zip(tiles, pairs, strict=False):  # transparent between the images
        tile[:, :width], tile[:, width + 3 :] = opaque(left / 255), opaque(right / 255)
    picture = mosaic(tiles.reshape(-1, across, *tiles.shape[1:]), gap=12, fill=0.0)
    figure, axes = pixel_figure(picture, margins=(16, 44, 16, 16))
    axes.set_title(title)
    return figure


@dataclass(frozen=True)
class Panel:
    """One chart of a figure: points (x, y) by line."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@styled
def draw_panels(panels: Sequence[Panel], *, log: bool = False, top: float | None = None) -> Figure:
    """Charts side by side with one legend below; a name has the same colour and marker in all of them.

    log: both axes are logarithmic. top: the upper limit of y, from 0.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width = 3.4 * len(panels)
    columns = int(np.clip(width / (0.6 + 0.06 * max(len(display_text(n, 40)) for n in names)), 1, len(names)))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(width, 2.9 + 0.16 * rows), layout="constrained")
    charts = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(charts, panels, strict=True):
        for number, name in enumerate(names):
            points = panel.lines.get(name, ())
            axes.plot(
                [x for x, _ in points], [y for _, y in points], label=display_text(name, 40), markersize=4,
                linewidth=1, **line_style(number),
            )  # fmt: skip
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        xs = sorted({x for points in panel.lines.values() for x, _ in points})
        if log:
            axes.set(xscale="log", yscale="log")
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        if top is not None:
            axes.set_ylim(0, top)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.grid(axis="y")
    handles, labels = charts[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


@styled
def draw_scores(
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    fits: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Lines with error bars, and dashed fits of the same names."""
    figure, axis = new_chart(x_label, y_label, title)
    for i, (name, points) in enumerate(series.items()):
        xs, ys, errors = zip(*sorted(points), strict=True) if points else ((), (), ())
        axis.errorbar(
            xs, ys, yerr=errors, label=display_text(name, LABEL), linewidth=1, markersize=4, **BARS,
            **line_style(i),
        )  # fmt: skip
        if fits and name in fits:
            axis.plot(*zip(*fits[name], strict=True), linestyle="--", linewidth=0.8, color=colour(i))
    if log_x and all(x > 0 for points in series.values() for x, _, _ in points):
        axis.set_xscale("log")
        label_powers(axis.xaxis)
    return with_legend(figure, axis, len(series))


@styled
def draw_bars(
    groups: Mapping[str, Mapping[str, tuple[float, float]]],
    *,
    y_label: str,
    title: str = "",
    band: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """The settings of each group as dots with error bars: {group: {setting: (mean, error)}}.

    band: by group, the limits of a shaded area, such as that of the BiT models in Fig. 3.
    """
    figure, axis = new_chart("", y_label, title)
    shaded = [(g, *band[name]) for g, name in enumerate(groups) if band and name in band]
    if shaded:
        xs, low, high = zip(*shaded, strict=True)
        axis.fill_between(xs, low, high, color=colour(6), alpha=0.18, linewidth=0, label="BiT ResNets")
    settings = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.7 / max(1, len(settings))
    for i, setting in enumerate(settings):
        values = [(g, *group[setting]) for g, group in enumerate(groups.values()) if setting in group]
        offset = (i - (len(settings) - 1) / 2) * width
        axis.errorbar(
            [g + offset for g, _, _ in values], [mean for _, mean, _ in values],
            yerr=[error for _, _, error in values], label=display_text(setting, LABEL), markersize=5, **BARS,
            **(line_style(i) | {"linestyle": "none"}),
        )  # fmt: skip
    axis.set_xticks(range(len(groups)), [display_text(name, LABEL) for name in groups])
    axis.set_xlim(-0.6, len(groups) - 0.4)
    return with_legend(figure, axis, len(settings) + bool(shaded))


@styled
def draw_differences(
    changes: Mapping[str, Mapping[str, tuple[float, float]]], *, x_label: str, title: str = ""
) -> Figure:
    """A dot plot with a row per change: {change: {data set: (difference, error)}}, in points."""
    figure = Figure(figsize=(5.6, 1.1 + 0.2 * len(changes)), layout="constrained")
    axis = figure.add_subplot()
    bars: dict[str, Any] = BARS | {"markersize": 4, "linestyle": "none"}
    axis.axvline(0, color=SOFT, linewidth=0.8)
    names = list(dict.fromkeys(name for row in changes.values() for name in row))
    for i, name in enumerate(names):
        offset = 0.6 * ((i + 0.5) / len(names) - 0.5)
        dots = [(*row[name], y + offset) for y, row in enumerate(changes.values()) if name in row]
        axis.errorbar(
            [100 * mean for mean, _, _ in dots], [y for _, _, y in dots],
            xerr=[100 * error for _, error, _ in dots], label=display_text(name, LABEL),
            **(line_style(i) | bars),
        )  # fmt: skip
    axis.set(xlabel=x_label, title=title, ylim=(len(changes) - 0.4, -0.6))
    axis.set_yticks(range(len(changes)), [display_text(name, LABEL) for name in changes])
    axis.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@styled
def draw_shots(panels: Mapping[str, Mapping[str, Sequence[Point]]]) -> Figure:
    """Few-shot accuracy over shots: one panel per data set, one line per model."""
    figure = Figure(figsize=(0.8 + 4.0 * len(panels), 3.2), layout="constrained")
    models = list(dict.fromkeys(model for series in panels.values() for model in series))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        format_axis(axis, "images per class", "few-shot accuracy", display_text(title, LABEL))
        for model, points in series.items():
            xs, ys, errors = zip(*sorted(points), strict=True)
            axis.errorbar(xs, ys, yerr=errors, label=display_text(model, LABEL), linewidth=1, markersize=4,
                          **BARS, **line_style(models.index(model)))  # fmt: skip
        shots = sorted({int(x) for points in series.values() for x, _, _ in points})
        axis.set_xscale("log")
        axis.set_xticks(shots, [str(n) for n in shots])
        axis.minorticks_off()
    axes[0].legend()
    return figure


def new_chart(x_label: str, y_label: str, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axis = figure.add_subplot()
    format_axis(axis, x_label, y_label, title)
    return figure, axis


def format_axis(axis: Any, x_label: str, y_label: str, title: str) -> None:
    axis.set(xlabel=x_label, ylabel=y_label, title=title)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    axis.grid(axis="y")


def label_powers(axis: Any) -> None:
    """Label a log axis with 1, 2, 5, 10 ...; matplotlib's own labels need math parsing, which is disabled."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 500 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:.0e}"))
    axis.set_minor_formatter(NullFormatter())


def with_legend(figure: Figure, axis: Any, entries: int) -> Figure:
    if entries:
        axis.legend()
    return figure


def rgb(values: np.ndarray) -> np.ndarray:
    """RGB values as they are; otherwise the first channel as grey."""
    return values if values.shape[-1] == 3 else values[..., :1].repeat(3, -1)


def opaque(values: np.ndarray) -> np.ndarray:
    """RGB values with a fourth channel of ones."""
    return np.concatenate([values, np.ones_like(values[..., :1])], -1)


def mosaic(tiles: np.ndarray, *, gap: int, fill: float = 1.0) -> np.ndarray:
    """Tiles (R, C, H, W, channels) as one image, with `gap` pixels of `fill` between them."""
    rows, columns, height, width, channels = tiles.shape
    out = np.full((rows, height + gap, columns, width + gap, channels), fill, np.float32)
    out[:, :height, :, :width] = tiles.transpose(0, 2, 1, 3, 4)
    return out.reshape(rows * (height + gap), columns * (width + gap), channels)[:-gap, :-gap]


def pixel_figure(
    picture: np.ndarray, *, margins: tuple[int, int, int, int], **options: Any
) -> tuple[Figure, Any]:
    """A figure of one image, pixel for pixel, with margins (left, top, right, bottom) in pixels."""
    left, top, right, bottom = margins
    width, height = left + picture.shape[1] + right, top + picture.shape[0] + bottom
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axes = figure.add_axes(
        (left / width, bottom / height, picture.shape[1] / width, picture.shape[0] / height)
    )
    axes.imshow(picture, interpolation="nearest", aspect="auto", **options)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure, axes


def subsampled(count: int) -> np.ndarray:
    """All indices, or every second, third ... if there are more than TILES."""
    return np.arange(0, count, math.ceil(count / TILES))


def label_tiles(axis: Any, indices: np.ndarray, pitch: int, side: int) -> None:
    """Label tiles with their indices from 1; every second one if there are many."""
    labelled = np.arange(0, len(indices), 1 if len(indices) <= 8 else 2)
    axis.set_ticks(labelled * pitch + (side - 1) / 2, [str(indices[i] + 1) for i in labelled])
    axis.set_tick_params(length=0, pad=2)


def display_text(text: str, longest: int) -> str:
    """A name on one line with unprintable characters replaced, shortened if necessary."""
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))
    return line if len(line) <= longest else line[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def fit(text: str, inches: float, points: float) -> str:
    """A name shortened to a width; a letter is about 0.6 times as wide as high."""
    return display_text(text, max(4, int(inches * 72 / (0.6 * points))))


def contact_sheet(pictures: Sequence[bytes], *, width: int = 2640, gap: int = 32) -> bytes:
    """PNG images in rows on one sheet, in their original size."""
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
