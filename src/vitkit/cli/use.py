"""Verbs that use a model: evaluate, predict."""

import sys
from typing import Annotated

from tyro.conf import Positional, arg

from vitkit.cli.words import Device, Json, Model, Workers, print_json


def evaluate(
    model: Model,
    data: Annotated[Positional[str], arg(metavar="DATA", help="Data with the model's classes.")],
    split: Annotated[
        str | None, arg(metavar="NAME", help="train, val or test; the held-out one if not given.")
    ] = None,
    batch: Annotated[int, arg(metavar="N", help="Images at a time.")] = 32,
    workers: Workers = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Accuracy over every image: top-1, top-5, per class, confusion.

    $ vitkit evaluate runs/photos photos/
    $ vitkit evaluate runs/photos other-photos.zip --json
    """
    from vitkit.tasks import use

    use.evaluate(model, data, split, batch, workers, device, emit=print_json if json else None)


def predict(
    model: Model,
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...", help="Files, folders or globs.")],
    top: Annotated[int, arg(metavar="N", help="How many labels of each.")] = 5,
    device: Device = "auto",
    csv: Annotated[bool, arg(help="Comma-separated lines: image, label, probability.")] = False,
    json: Json = False,
) -> None:
    """Labels and probabilities. Files that cannot be read are named and the others done.

    $ vitkit predict runs/photos cat.jpg
    $ vitkit predict runs/photos holiday/ 'inbox/*.png' --csv
    """
    from vitkit.tasks import use

    if not use.predict(model, images, top, device, csv=csv, emit=print_json if json else None):
        sys.exit(1)
