"""The verb that looks into a model: inspect."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from vitkit.cli.words import Device, Json, Model, print_json


def inspect(
    model: Model,
    images: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="[IMAGE...|DATA]", help="Image files, folders or globs, or one data set."),
    ] = (),
    out: Annotated[
        Path | None, arg(metavar="FOLDER", help="Where all is written; runs/inspect/NAME if not given.")
    ] = None,
    image_size: Annotated[
        str, arg(metavar="N|HxW", help="Pixels of the images; the model's own if not given.")
    ] = "",
    strict_size: Annotated[
        bool, arg(help="Refuse a size that is no whole number of patches; else its rest is dropped.")
    ] = False,
    layer: Annotated[
        int, arg(metavar="N", help="The layer whose heads are shown, from 0; below 0 from the last.")
    ] = -1,
    classes: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(
            name="class", metavar="NAME|N", help="A class to explain, once for each; the predicted one else."
        ),
    ] = (),
    most: Annotated[
        int, arg(name="images", metavar="N", help="At most so many images are used, 8 of them shown.")
    ] = 128,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """What a model looks at: the filters, positions, attention distances and attention maps of Sec. 4.5.

    Leaves figures (PNG and SVG), the arrays behind them, a contact sheet and facts in one folder. Without
    images it shows what needs none. Files that cannot be read are named and the others done.

    $ vitkit inspect ViT-B/16.i21k-i1k-384
    $ vitkit inspect runs/photos cat.jpg dog.jpg --class cat --class dog
    $ vitkit inspect runs/photos photos/ --image-size 384x256 --layer 0 --out look
    """
    from vitkit.tasks import inspect as task

    done = task.inspect(
        model, images, out, image_size=image_size, layer=layer, classes=classes, images=most, device=device,
        strict_size=strict_size, emit=print_json if json else None,
    )  # fmt: skip
    if not done:
        sys.exit(1)
