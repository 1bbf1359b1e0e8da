"""Verbs that use a model: evaluate, predict."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitkit.cli.words import Device, Json, Model, View, Workers, print_json

AnyModel = Annotated[
    Positional[str],
    arg(
        metavar="MODEL",
        help="A model file, a run folder, a Hugging Face folder, a published name, or an .onnx or .xml "
        "file that vitkit export wrote.",
    ),
]
Engine = Annotated[
    str,
    arg(
        metavar="NAME",
        help="What computes on the CPU: torch, onnxruntime, openvino, ... (docs/export.md); "
        "auto: of much work the fastest that agrees with torch.",
    ),
]
UnsureBelow = Annotated[
    float | None,
    arg(
        metavar="P",
        help="The label is 'unsure' where the likeliest is less probable than this (0 to 1); "
        "with --json a field 'unsure'.",
    ),
]
SortInto = Annotated[
    Path | None,
    arg(
        metavar="DIR",
        help="Copy each image to DIR/<label>/, and what is unsure to DIR/unsure/. Nothing is "
        "overwritten; an image that is there already is not copied again.",
    ),
]


def evaluate(
    model: Model,
    data: Annotated[Positional[str], arg(metavar="DATA", help="Data with the model's classes.")],
    split: Annotated[
        str | None,
        arg(
            metavar="NAME",
            help="train, val, test or all. Images that the model's run knows are in the split that it had "
            "them in. By default those that it was not trained or validated on: test images and new ones.",
        ),
    ] = None,
    batch: Annotated[int, arg(metavar="N", help="Images at a time.")] = 32,
    classes: Annotated[
        str,
        arg(
            metavar="FILE|objectnet",
            help="A .csv of class,label: which of the model's labels are right for each class of the data, "
            "several with ';' between them. Images of other classes are left out and counted.",
        ),
    ] = "",
    real: Annotated[
        str, arg(metavar="FILE", help="Reassessed labels (real.json), in the order of the file names.")
    ] = "",
    view: View = "model",
    workers: Workers = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Accuracy on images that the model was not trained on: top-1 with its interval, top-5, per class.

    A run remembers its images by content, wherever they lie and whatever they are called: of the data that
    it was trained on, its test images are counted; of other data, all but those that trained it; how many
    were left out is printed. Calibration error and confusion matrix are in --json.

    Models of ImageNet's classes take folders named by WordNet number (n01440764), by name, or, all of them,
    by class number (0 to 999, as in ImageNet-V2). Published weights are evaluated with the view of their
    published accuracy, unless --view says otherwise. Under torchrun each process does a share.

    $ vitkit evaluate runs/photos photos/
    $ vitkit evaluate runs/photos other-photos.zip --json
    $ vitkit evaluate ViT-B/16.i21k-i1k-384 imagenet/val --real real.json
    $ vitkit evaluate ViT-B/16.i21k-i1k-384 objectnet-1.0/images --classes objectnet
    $ vitkit evaluate Ti_16.npz imagenet/val --view centre:256
    """
    from vitkit.tasks import evaluate as task

    options = task.EvaluateOptions(
        split=split, batch=batch, classes=classes, real=real, view=view, workers=workers, device=device
    )
    task.evaluate(model, data, options, emit=print_json if json else None)


def predict(
    model: AnyModel,
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...", help="Files, folders or globs.")],
    top: Annotated[int, arg(metavar="N", help="How many labels of each.")] = 5,
    view: View = "model",
    device: Device = "auto",
    engine: Engine = "auto",
    calibrate: Annotated[
        tuple[str, ...],
        arg(metavar="DATA|IMAGE...", help="Images for an engine in int8 to be calibrated on."),
    ] = (),
    unsure_below: UnsureBelow = None,
    sort_into: SortInto = None,
    csv: Annotated[
        bool,
        arg(
            help="Comma-separated lines: image, label, probability. Control characters in names are written "
            "out; what a spreadsheet would take for a formula (=, +, -, @ first) has an apostrophe first. "
            "--json is exact."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Labels and probabilities. Files that cannot be read are named and the others done.

    $ vitkit predict runs/photos cat.jpg
    $ vitkit predict runs/photos holiday/ 'inbox/*.png' --csv
    $ vitkit predict runs/photos holiday/ --unsure-below 0.5 --sort-into sorted
    $ vitkit predict photos.onnx cat.jpg
    """
    from vitkit.tasks.predict import predict as run

    done = run(
        model, images, top, device, csv=csv, emit=print_json if json else None, engine=engine,
        calibrate=calibrate, view=view, unsure_below=unsure_below, sort_into=sort_into,
    )  # fmt: skip
    if not done:
        sys.exit(1)
