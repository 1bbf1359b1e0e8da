"""The colours and fonts of all pages and figures, as colours.css defines them."""

import re
from importlib.resources import files

CSS = files("vitkit.report").joinpath("colours.css").read_text("utf-8")
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in CSS.split("@media", 1))
SERIES = tuple(LIGHT[f"c{number}"] for number in range(8))  # of lines and dots, in this order
DRAWN = ("ink", "soft", "faint", "paper", *(f"c{number}" for number in range(8)))  # the colours of figures
FONTS = re.search(r"--font: ([^;]+);", CSS)[1].replace('"', "'")  # type: ignore[index]


def dark_rules() -> str:
    """CSS by which an SVG in light colours follows the dark mode of its reader.

    The colours themselves stay in the file, so programs that know no media queries draw it in light colours.
    """
    rules = [
        f'[style*="{kind}: {LIGHT[name]}"] {{ {kind}: {DARK[name]} !important; }}'
        for name in DRAWN for kind in ("fill", "stroke")
    ]  # fmt: skip
    return "@media screen and (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"
