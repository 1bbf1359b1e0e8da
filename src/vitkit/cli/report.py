"""The verb that draws pages of what was done: report."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitkit.cli.words import Json, print_json


def report(
    runs: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="RUN...", help="Run folders; a protocol's or a suite's folder is one too."),
    ],
    out: Annotated[
        Path | None, arg(metavar="FILE", help="The page: RUN/report.html, or compare.html for several.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        arg(metavar="X", help="Price of a device-hour; else the run's own, or an assumed one."),
    ] = None,
    json: Json = False,
) -> None:
    """One HTML file that needs no network: result, curves, classes, mistakes, data, cost, recipe.

    Every run ends with it; the verb draws it again, also of a run that is not finished. Several runs are
    put side by side, with mean and spread where they are seeds of one recipe.

    $ vitkit report runs/photos
    $ vitkit report runs/photos --price-per-hour 2.50
    $ vitkit report runs/photos runs/photos-large --out compare.html
    """
    from vitkit.tasks.report import report as draw

    draw(runs, out, price_per_hour=price_per_hour, emit=print_json if json else None)
