"""Verbs that use a trained model: evaluate, fewshot, inspect, report, serve."""

import signal
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from vitkit.cli.flags import (
    Device,
    Json,
    MergeTokens,
    Model,
    Reject,
    Template,
    Tta,
    View,
    Workers,
    print_json,
)
from vitkit.errors import Error
from vitkit.io.system import RELOAD_SIGNALS
from vitkit.options import Precision, size_in_bytes

Split = Annotated[
    str | None,
    arg(
        metavar="NAME",
        help="train, val, test or all. Images known from the model's run keep their split there.",
        help_behavior_hint="(default: images not used for training or validation)",
    ),
]
ClassLabels = Annotated[
    tuple[str, ...] | None,
    arg(
        metavar="[TEXT...]",
        help="Zero-shot classification with a CLIP or SigLIP model: the labels to choose from, or a .txt "
        "file with one per line.",
        help_behavior_hint="(without TEXT: the class names of the data)",
    ),
]
ClassMap = Annotated[
    str,
    arg(
        metavar="FILE|objectnet",
        help="A .csv of class,label that maps each class of the data to the model labels that are "
        "correct for it, separated by ';'. Images of other classes are skipped and counted.",
    ),
]


def evaluate(
    model: Model,
    data: Annotated[Positional[str], arg(metavar="DATA", help="Labelled data with the model's classes.")],
    split: Split = None,
    batch: Annotated[int, arg(metavar="N", help="Batch size.")] = 32,
    classes: ClassMap = "",
    real: Annotated[
        str, arg(metavar="FILE", help="ImageNet ReaL labels (real.json), in the order of the file names.")
    ] = "",
    labels: ClassLabels = None,
    template: Template = (),
    view: View = "model",
    tta: Tta = "none",
    merge_tokens: MergeTokens = 0,
    reject: Reject = None,
    workers: Workers = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Accuracy on images that the model was not trained on: top-1 with confidence interval, top-5, per class.

    A run recognizes its images by content, even if they were moved or renamed: on its own data the test
    images are evaluated; on other data all images except those used in training. The number of skipped
    images is printed. Calibration error and confusion matrix are in --json. With --reject, the share of
    accepted images and the accuracy on them are reported too.

    For models with ImageNet classes, folders may be named by WordNet ID (n01440764), by class name, or, if
    all are, by class number (0 to 999, as in ImageNet-V2). Published weights use the preprocessing of their
    published accuracy unless --view is given. Under torchrun the images are divided among the processes.

    $ vitkit evaluate runs/photos photos/
    $ vitkit evaluate runs/photos other-photos.zip --json
    $ vitkit evaluate ViT-B/16.i21k-i1k-384 imagenet/val --real real.json
    $ vitkit evaluate ViT-B/16.i21k-i1k-384 objectnet-1.0/images --classes objectnet
    $ vitkit evaluate Ti_16.npz imagenet/val --view centre:256
    $ vitkit evaluate hf:openai/clip-vit-base-patch32 pets/ --labels --template "a photo of a {}, a pet."
    """
    from vitkit.commands import evaluate as task

    options = task.EvaluateOptions(
        split=split, batch=batch, classes=classes, real=real, view=view, tta=tta,
        merge_tokens=merge_tokens, reject=reject, workers=workers, device=device, labels=labels,
        template=template,
    )  # fmt: skip
    task.evaluate(model, data, options, emit=print_json if json else None)


FrozenView = Annotated[
    str,
    arg(
        metavar="NAME",
        help="model, squash, fit, centre or centre:N as in evaluate, or official: squash to 256/224 of the "
        "size, then centre crop.",
    ),
]
Cache = Annotated[
    Path | None,
    arg(
        metavar="DIR",
        help="Feature cache.",
        help_behavior_hint="(default: up to 10 GB in the user's cache folder)",
    ),
]


Shots = Annotated[
    tuple[int, ...],
    arg(
        metavar="N...",
        help="Training images per class.",
        help_behavior_hint="(default: 1 5 10 25, if every class has that many)",
    ),
]


def fewshot(
    model: Model,
    data: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="DATA...", help="Data sets as for finetune; --l2 grid chooses one l2 for all of them."),
    ],
    shots: Shots = (),
    seeds: Annotated[
        int, arg(metavar="N", help="Random draws of the training images; the mean is reported.")
    ] = 3,
    l2: Annotated[
        str, arg(metavar="X|grid", help="L2 penalty, or grid for the best of 2^-10 to 2^19.")
    ] = "1024",
    knn: Annotated[int | None, arg(metavar="K", help="Also report k-nearest-neighbour accuracy.")] = None,
    compare: Annotated[
        tuple[str, ...], arg(metavar="MODEL...", help="More models to compare on the same images.")
    ] = (),
    figure: Annotated[
        Path | None,
        arg(metavar="FILE", help="Plot accuracy over shots, one line per model, as .png or .svg."),
    ] = None,
    probe: Annotated[bool, arg(help="Also train a linear probe on all training images.")] = False,
    view: FrozenView = "model",
    batch: Annotated[int, arg(metavar="N", help="Batch size.")] = 64,
    cache: Cache = None,
    workers: Workers = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Few-shot accuracy of frozen features: closed-form least squares on a few images per class.

    Tested on the full test split, or else val, or else a tenth of train. Features are computed once and
    cached.

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
        help="Image files, folders or globs, or one data set; with --bias, more models.",
    ),
]
Out = Annotated[
    Path | None,
    arg(metavar="FOLDER", help="Output folder.", help_behavior_hint="(default: runs/inspect/NAME)"),
]
Size = Annotated[
    str, arg(metavar="N|HxW", help="Image size in pixels.", help_behavior_hint="(default: the model's)")
]
Strict = Annotated[
    bool, arg(help="Reject a size that is not a multiple of the patch size, instead of dropping pixels.")
]
Layer = Annotated[
    int, arg(metavar="N", help="Layer whose attention heads are drawn; negative numbers count from the last.")
]
Classes = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(
        name="class",
        metavar="NAME|N",
        help="Class to explain; may be repeated.",
        help_behavior_hint="(default: the predicted class)",
    ),
]
Most = Annotated[
    int | None,
    arg(
        name="images",
        metavar="N",
        help="Maximum number of images.",
        help_behavior_hint="(default: 128, with --bias 1000)",
    ),
]
Bias = Annotated[
    str, arg(metavar="DATA", help="Measure accuracy on images with permuted patches and on shifted images.")
]
Cells = Annotated[
    tuple[int, ...],
    arg(
        metavar="N...",
        help="With --bias: permute an N x N grid of cells.",
        help_behavior_hint="(default: several, and the patch grid)",
    ),
]
Shifts = Annotated[tuple[int, ...], arg(metavar="N...", help="With --bias: shifts in pixels.")]
Seed = Annotated[int, arg(metavar="N", help="With --bias: random seed of permutations and directions.")]
NOT_WITH_BIAS = "cannot be combined with --bias: each model sees images of its own size"


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
    """Inspect a model as in Sec. 4.5: filters, position embeddings, attention distances and attention maps.

    Writes figures (PNG and SVG), their arrays, a contact sheet and facts.json into one folder. Without
    images, only filters and position embeddings are drawn. Unreadable files are reported and skipped.

    $ vitkit inspect ViT-B/16.i21k-i1k-384
    $ vitkit inspect runs/photos cat.jpg dog.jpg --class cat --class dog
    $ vitkit inspect runs/photos photos/ --image-size 384x256 --layer 0 --out look
    $ vitkit inspect runs/vit runs/resnet --bias photos/
    """
    emit = print_json if json else None
    if bias:
        if image_size or classes:
            raise Error(f"--image-size and --class {NOT_WITH_BIAS}", code="request.conflict")
        from vitkit.commands.bias import bias as probe

        count = 1000 if most is None else most
        return probe(
            (model, *images), bias, out, images=count, cells=cells, shifts=shifts, seed=seed, device=device,
            emit=emit,
        )  # fmt: skip
    if cells or shifts:
        raise Error("--cells and --shifts need --bias DATA", code="request.conflict")
    from vitkit.commands import inspect as task

    all_read = task.inspect(
        model, images, out, image_size=image_size, strict_size=strict_size, layer=layer, classes=classes,
        images=128 if most is None else most, device=device, emit=emit,
    )  # fmt: skip
    if not all_read:
        sys.exit(1)


def report(
    runs: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="RUN...", help="Run folders, including those of --protocol and suite."),
    ],
    out: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Output file.",
            help_behavior_hint="(default: RUN/report.html, or compare.html for several runs)",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        arg(
            metavar="X",
            help="Price of a device-hour.",
            help_behavior_hint="(default: from the run, or an assumed price)",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a self-contained HTML report: result, curves, classes, mistakes, data, cost, recipe.

    Every run writes one at its end; this verb writes it again, also for an unfinished run. Several runs are
    compared side by side, with mean and standard deviation if they are seeds of one recipe.

    $ vitkit report runs/photos
    $ vitkit report runs/photos --price-per-hour 2.50
    $ vitkit report runs/photos runs/photos-large --out compare.html
    """
    from vitkit.commands.report import report as draw

    draw(runs, out, price_per_hour=price_per_hour, emit=print_json if json else None)


Token = Annotated[
    str,
    arg(metavar="TEXT", help="Bearer token of clients; prefer VITKIT_TOKEN, which other users cannot see."),
]
AllowHost = Annotated[
    tuple[str, ...], arg(metavar="NAME...", help="Additional allowed Host names, e.g. behind a proxy.")
]


def serve(
    model: Model,
    host: Annotated[
        str, arg(metavar="NAME", help="Address to listen on; any other than localhost needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, arg(metavar="N", help="Port; 0 chooses a free one.")] = 8000,
    token: Token = "",
    allow_host: AllowHost = (),
    engine: Annotated[
        str, arg(metavar="NAME", help="Inference engine: torch, or auto for the fastest.")
    ] = "torch",
    max_batch: Annotated[int, arg(metavar="N", help="Maximum batch size.")] = 32,
    max_wait_ms: Annotated[float, arg(metavar="MS", help="Maximum time to wait for a full batch.")] = 5.0,
    queue: Annotated[int, arg(metavar="N", help="Queue length; further requests get 503.")] = 256,
    timeout: Annotated[float, arg(metavar="S", help="Request timeout in seconds.")] = 30.0,
    max_bytes: Annotated[str, arg(metavar="SIZE", help="Maximum request body.")] = "10MB",
    max_pixels: Annotated[
        float,
        arg(metavar="N", help="Maximum pixels per image.", help_behavior_hint="(default: 20e6)"),
    ] = 20e6,
    workers: Annotated[int | None, arg(metavar="N", help="Processes for image decoding.")] = None,
    view: View = "model",
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "fp32",
) -> None:
    """Serve a model over HTTP: labels, features, attention maps, and a demo page (docs/guides/serve.md).

    A replaced model file, or SIGHUP, reloads the model; no request is dropped. SIGTERM shuts down gracefully.

    $ vitkit serve runs/photos
    $ VITKIT_TOKEN=$(openssl rand -hex 16) vitkit serve ViT-B/16.i21k-i1k-384 --host 0.0.0.0 --device cuda
    """
    for number in RELOAD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # until the server handles it as a reload
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
