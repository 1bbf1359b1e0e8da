"""The style of matplotlib figures: the colours and fonts of the pages, and files that follow dark mode."""

import re
import warnings
from collections.abc import Callable
from functools import wraps
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from vitkit.report.palette import FONTS, LIGHT, SERIES, dark_rules

INK, SOFT, FAINT, PAPER = (LIGHT[name] for name in ("ink", "soft", "faint", "paper"))
BUNDLED = "DejaVu Sans"  # comes with matplotlib, so that PNG files are the same everywhere
STYLE = {
    **{key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")},
    "font.family": [BUNDLED],
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.labelweight": "bold",
    "axes.linewidth": 0.6,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "text.color": INK,
    "text.parse_math": False,  # a file name may contain $
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text, in the fonts of the reader's system
    "svg.hashsalt": "vitkit",
}
DPI = 160
MARKERS = "osD^vP*X"


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Apply our style and silence warnings about missing glyphs, which are drawn as boxes."""

    @wraps(draw)
    def wrapper(*args: Any, **options: Any) -> Any:
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            return draw(*args, **options)

    return wrapper


@styled
def render(figure: Figure, kind: str) -> bytes:
    """A figure as PNG or SVG bytes, without date and program name; an SVG has a light and a dark form."""
    file = BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
    return file.getvalue() if kind == "png" else adaptive(file.getvalue().decode()).encode()


def adaptive(svg: str) -> str:
    """An SVG of matplotlib with the fonts of the pages, which follows the dark mode of its reader."""
    svg = re.sub(rf"(style=\"[^\"]*)'{BUNDLED}'", lambda style: style[1] + FONTS, svg)
    return svg.replace('<style type="text/css">', f'<style type="text/css">\n{dark_rules()}', 1)


def colour(number: int) -> str:
    return SERIES[number % len(SERIES)]


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and line of the series with this number; as on pages, later ones are dashed."""
    later = "--" if number >= len(SERIES) else "-"
    return {"color": colour(number), "marker": MARKERS[number % len(MARKERS)], "linestyle": later}
