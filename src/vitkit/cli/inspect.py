"""The verb that looks into a model: inspect."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from vitkit.cli.words import Device, Json, Model, print_json
from vitkit.errors import Error

Images = Annotated[
    Positional[tuple[str, ...]],
    arg(
        metavar="[IMAGE...|DATA]",
        help="Image files, folders or globs, or one data set; with --bias, further models.",
    ),
]
Out = Annotated[
    Path | None, arg(metavar="FOLDER", help="Where all is written; runs/inspect/NAME if not given.")
]
Size = Annotated[str, arg(metavar="N|HxW", help="Pixels of the images; the model's own if not given.")]
Strict = Annotated[
    bool, arg(help="Refuse a size that is no whole number of patches; else its rest is dropped.")
]
Layer = Annotated[
    int, arg(metavar="N", help="The layer whose heads are shown, from 0; below 0 from the last.")
]
Classes = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="class", metavar="NAME|N", help="A class to explain, once for each; the predicted one else."),
]
Most = Annotated[
    int | None,
    arg(
        name="images",
        metavar="N",
        help="At most so many images are used; 128 if not given, with --bias 1000.",
    ),
]
Bias = Annotated[
    str, arg(metavar="DATA", help="Accuracy of the models when patches are permuted or the image is shifted.")
]
Cells = Annotated[
    tuple[int, ...],
    arg(metavar="N...", help="With --bias: cells a side that are permuted; the ViTs' own patches and some."),
]
Shifts = Annotated[tuple[int, ...], arg(metavar="N...", help="With --bias: pixels of the shifts.")]
Seed = Annotated[int, arg(metavar="N", help="With --bias: of the permutations and directions.")]
BESIDE = "have no use with --bias: models see images of their size"


def inspect(
    model: Model,
    images: Images = (),
    out: Out = None,
    image_size: Size = "",
    strict_size: Strict = False,
    layer: Layer = -1,
    classes: Classes = (),
    most: Most = None,
    bias: Bias = "",
    cells: Cells = (),
    shifts: Shifts = (),
    seed: Seed = 0,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """What a model looks at: the filters, positions, attention distances and attention maps of Sec. 4.5.

    Leaves figures (PNG and SVG), the arrays behind them, a contact sheet and facts in one folder. Without
    images it shows what needs none. Files that cannot be read are named and the others done.

    $ vitkit inspect ViT-B/16.i21k-i1k-384
    $ vitkit inspect runs/photos cat.jpg dog.jpg --class cat --class dog
    $ vitkit inspect runs/photos photos/ --image-size 384x256 --layer 0 --out look
    $ vitkit inspect runs/vit runs/resnet --bias photos/
    """
    emit = print_json if json else None
    if bias:
        if image_size or classes:
            raise Error(f"--image-size and --class {BESIDE}", code="request.conflict")
        from vitkit.tasks.bias import bias as probe

        many = 1000 if most is None else most
        return probe(
            (model, *images), bias, out, images=many, cells=cells, shifts=shifts, seed=seed, device=device,
            emit=emit,
        )  # fmt: skip
    if cells or shifts:
        raise Error("--cells and --shifts need --bias DATA, which is not given", code="request.conflict")
    from vitkit.tasks import inspect as task

    done = task.inspect(
        model, images, out, image_size=image_size, strict_size=strict_size, layer=layer, classes=classes,
        images=128 if most is None else most, device=device, emit=emit,
    )  # fmt: skip
    if not done:
        sys.exit(1)
