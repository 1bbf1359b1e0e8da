"""Verbs that use a model: evaluate, fewshot, predict, inspect, report, serve."""

import signal
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from vitkit.cli.flags import Device, Json, Model, View, Workers, print_json
from vitkit.errors import Error
from vitkit.options import Precision, size_in_bytes

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
    from vitkit.commands import evaluate as task

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
    from vitkit.commands.predict import predict as run

    done = run(
        model, images, top, device, csv=csv, emit=print_json if json else None, engine=engine,
        calibrate=calibrate, view=view, unsure_below=unsure_below, sort_into=sort_into,
    )  # fmt: skip
    if not done:
        sys.exit(1)


FrozenView = Annotated[
    str,
    arg(
        metavar="NAME",
        help="model, squash, centre or centre:N as in evaluate, or official: squash to 256/224 of the size, "
        "then the centre.",
    ),
]
Cache = Annotated[
    Path | None,
    arg(metavar="DIR", help="Where features are kept; if not given, 10 GB of them in the user's cache."),
]


def fewshot(
    model: Model,
    data: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="DATA...", help="Data sets as for finetune; with --l2 grid, l2 is chosen over all."),
    ],
    shots: Annotated[
        tuple[int, ...],
        arg(metavar="N...", help="Images of each class; 1 5 10 25 as far as there are so many."),
    ] = (),
    seeds: Annotated[int, arg(metavar="N", help="Draws of those images whose mean is reported.")] = 3,
    l2: Annotated[str, arg(metavar="X|grid", help="The penalty, or the best of 2^-10 to 2^19.")] = "1024",
    knn: Annotated[
        int | None, arg(metavar="K", help="Also the vote of the K nearest training images.")
    ] = None,
    compare: Annotated[
        tuple[str, ...], arg(metavar="MODEL...", help="More models, on the same images of each class.")
    ] = (),
    figure: Annotated[
        Path | None, arg(metavar="FILE", help="Accuracy over shots, a line a model, as .png or .svg.")
    ] = None,
    probe: Annotated[bool, arg(help="Also a linear probe on all training images.")] = False,
    view: FrozenView = "model",
    batch: Annotated[int, arg(metavar="N", help="Images at a time.")] = 64,
    cache: Cache = None,
    workers: Workers = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """How much frozen features are worth: closed-form least squares on a few images of each class.

    The whole test split is tested on (else val, else a tenth of train). Features are computed once and kept.

    $ vitkit fewshot ViT-B/16.augreg-i21k pets/ --shots 5 10 --knn 20 --probe
    $ vitkit fewshot ViT-B/16.augreg-i21k pets/ cars/ birds/ --l2 grid --json
    $ vitkit fewshot b16.npz pets/ cars/ --compare ti16.npz runs/pre --figure shots.png
    """
    from vitkit.commands import fewshot

    options = fewshot.Options(
        shots=shots, seeds=seeds, l2=l2, knn=knn, probe=probe, view=view, batch=batch, cache=cache,
        compare=compare, figure=figure,
    )  # fmt: skip
    fewshot.fewshot(model, data, options, workers, device, emit=print_json if json else None)


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
        from vitkit.commands.bias import bias as probe

        many = 1000 if most is None else most
        return probe(
            (model, *images), bias, out, images=many, cells=cells, shifts=shifts, seed=seed, device=device,
            emit=emit,
        )  # fmt: skip
    if cells or shifts:
        raise Error("--cells and --shifts need --bias DATA, which is not given", code="request.conflict")
    from vitkit.commands import inspect as task

    done = task.inspect(
        model, images, out, image_size=image_size, strict_size=strict_size, layer=layer, classes=classes,
        images=128 if most is None else most, device=device, emit=emit,
    )  # fmt: skip
    if not done:
        sys.exit(1)


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
    from vitkit.commands.report import report as draw

    draw(runs, out, price_per_hour=price_per_hour, emit=print_json if json else None)


def serve(
    model: Model,
    host: Annotated[str, arg(metavar="NAME", help="Others than this machine need a token.")] = "127.0.0.1",
    port: Annotated[int, arg(metavar="N", help="0: any that is free.")] = 8000,
    token: Annotated[
        str, arg(metavar="TEXT", help="What a client must send; better in VITKIT_TOKEN, where none sees it.")
    ] = "",
    allow_host: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="Names by which a proxy's clients know the service.")
    ] = (),
    engine: Annotated[str, arg(metavar="NAME", help="torch, or auto for the fastest here.")] = "torch",
    max_batch: Annotated[int, arg(metavar="N", help="Images computed together.")] = 32,
    max_wait_ms: Annotated[float, arg(metavar="MS", help="That an image waits for others.")] = 5.0,
    queue: Annotated[int, arg(metavar="N", help="Images that may wait; more get 503 and try again.")] = 256,
    timeout: Annotated[float, arg(metavar="S", help="Seconds until an answer.")] = 30.0,
    max_bytes: Annotated[str, arg(metavar="SIZE", help="Of a request's body.")] = "10MB",
    max_pixels: Annotated[float, arg(metavar="N", help="Of an image.")] = 20e6,
    workers: Annotated[int | None, arg(metavar="N", help="Processes that decode images.")] = None,
    view: View = "model",
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "fp32",
) -> None:
    """Answer over HTTP: labels, features, attention maps, and a page to try them (docs/serving.md).

    A new model file in the place of the old one, or SIGHUP, is taken over without a lost answer. SIGTERM
    stops it in order.

    $ vitkit serve runs/photos
    $ VITKIT_TOKEN=$(openssl rand -hex 16) vitkit serve ViT-B/16.i21k-i1k-384 --host 0.0.0.0 --device cuda
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service is ready to take it as "load again"
    try:
        from vitkit.server.process import serve as run
    except ModuleNotFoundError as error:
        raise Error(
            f"vitkit serve needs {error.name}, which is not installed: pip install 'vitkit[serve]'",
            code="request.extra-missing",
        ) from None
    from vitkit.server.settings import Settings, decoders, token_or_environment, whole

    settings = Settings(
        model=model, host=host, port=port, token=token_or_environment(token), allow_host=allow_host,
        engine=engine, view=view, device=device, precision=precision, max_batch=max_batch,
        max_wait_ms=max_wait_ms, queue=queue, timeout=timeout, max_bytes=size_in_bytes(max_bytes),
        max_pixels=whole("max-pixels", max_pixels), workers=decoders(workers),
    )  # fmt: skip
    run(settings)
