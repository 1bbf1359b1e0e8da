"""Verbs for models and model files: list, show, convert, cost, export, push, demo."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitkit.cli.flags import Device, Json, MergeTokens, Model, print_json
from vitkit.options import Precision, parse_size

Kind = Literal["models", "weights", "formats", "recipes"]


def list_(
    kind: Annotated[Positional[Kind], arg(help="models, weights, formats or recipes.")] = "models",
    json: Json = False,
) -> None:
    """List models with their sizes, published weights, weight formats or recipes.

    $ vitkit list
    $ vitkit list weights --json
    """
    from vitkit import listing
    from vitkit.report.terminal import print_table

    rows = listing.rows(kind)
    print_json(rows) if json else print_table(rows)


def show(
    what: Annotated[
        Positional[str],
        arg(
            metavar="X",
            help="Name of a model, of published weights or of a recipe; or a model file, run folder, "
            "exported file or hf:owner/name.",
        ),
    ],
    json: Json = False,
) -> None:
    """Show the details of one model: sizes, parameters, FLOPs at 224 and 384 pixels, labels, origin.

    $ vitkit show ViT-L/16
    $ vitkit show runs/pets/model.safetensors
    $ vitkit show ViT-B/16.augreg-i21k
    $ vitkit show photos.onnx
    """
    from vitkit.commands import catalogue
    from vitkit.report import terminal

    facts = catalogue.describe(what)
    print_json(facts) if json else terminal.print_groups(facts)


Heads = Annotated[
    int | None, arg(metavar="N", help="Number of attention heads, if the file does not define it.")
]
Gelu = Annotated[
    Literal["tanh", "erf", "quick"] | None,
    arg(metavar="tanh|erf|quick", help="Set the GELU variant of the output."),
]
OutputView = Annotated[
    str | None,
    arg(
        metavar="NAME",
        help="Set the preprocessing of the output: squash, fit, centre or centre:N, as in evaluate.",
    ),
]


def convert(
    source: Annotated[
        Positional[str],
        arg(metavar="IN", help="Weight file, folder, name of published weights, or hf:owner/name."),
    ],
    out: Annotated[
        Positional[Path],
        arg(metavar="OUT", help="Output file, or output folder for the formats hf and timm."),
    ],
    format: Annotated[
        str | None,
        arg(metavar="FORMAT", help="See vitkit list formats; without it the name of OUT decides."),
    ] = None,
    image_size: Annotated[
        str | None, arg(metavar="N|HxW", help="Image size that the position embeddings were trained at.")
    ] = None,
    heads: Heads = None,
    gelu: Gelu = None,
    view: OutputView = None,
    allow_missing: Annotated[
        tuple[str, ...],
        arg(metavar="NAME...", help="Model parameters that may be missing from the file, by prefix."),
    ] = (),
    ignore: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="Tensors of the file to ignore, by prefix.")
    ] = (),
    overwrite: Annotated[bool, arg(help="Overwrite OUT if it exists.")] = False,
    json: Json = False,
) -> None:
    """Convert between weight formats with a parity report; OUT is written only if the models match.

    $ vitkit convert ViT-B_16.npz b16.safetensors
    $ vitkit convert ViT-B_16.npz b16-hf
    $ vitkit convert b16.safetensors b16.pth --format timm
    """
    from vitkit.commands import catalogue
    from vitkit.weights.convert import convert as run

    result = run(
        source, out, format=format, overwrite=overwrite, image_size=parse_size(image_size), heads=heads,
        gelu=gelu, view=view or "model", allow_missing=allow_missing, ignore=ignore,
    )  # fmt: skip
    print_json(result.to_json()) if json else catalogue.print_conversion(result)
    if not result.ok:
        sys.exit(1)


def demo(
    part: Annotated[
        Positional[Literal["all", "models", "digits", "shapes"]],
        arg(help="models, digits, shapes, or all: models and digits."),
    ] = "all",
    json: Json = False,
) -> None:
    """Run a demo: check every model and weight format, then train and use a digit classifier in six steps.

    shapes trains a detector and a segmenter on drawn shapes, and draws what they predict.

    $ vitkit demo
    $ vitkit demo digits
    $ vitkit demo shapes
    """
    from vitkit.commands import demo, demo_shapes

    results: dict[str, Any] = {}
    parts: dict[str, Callable[..., bool]] = {
        "models": demo.run_models, "digits": demo.run_digits, "shapes": demo_shapes.run_shapes,
    }  # fmt: skip
    chosen = ("models", "digits") if part == "all" else (part,)
    succeeded = [parts[name](partial(results.__setitem__, name) if json else None) for name in chosen]
    if json:
        print_json(results)
    sys.exit(0 if all(succeeded) else 1)


def cost(
    models: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="MODEL...", help="Names of models or of weights, hf:owner/name, files or run folders."),
    ],
    recipe: Annotated[str, arg(metavar="NAME", help="Training recipe; see vitkit list recipes.")],
    images: Annotated[
        int | None, arg(metavar="N", help="Training images per epoch, for recipes whose length is in epochs.")
    ] = None,
    sizes: Annotated[tuple[int, ...], arg(metavar="N...", help="Image sizes in pixels.")] = (
        64,
        128,
        224,
        384,
        512,
    ),
    rate: Annotated[
        float | None,
        arg(
            metavar="X",
            help="Training TFLOP/s of a device, for device-days.",
            help_behavior_hint="(default: measured)",
        ),
    ] = None,
    no_measure: Annotated[
        bool, arg(help="Measure nothing: print only what follows from the model sizes.")
    ] = False,
    seconds: Annotated[float, arg(metavar="X", help="Seconds per measurement.")] = 2.0,
    out: Annotated[
        Path | None, arg(metavar="FILE", help="Plot these models as in Fig. 12 of the paper: .png or .svg.")
    ] = None,
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto",
    json: Json = False,
) -> None:
    """Cost of models: parameters, FLOPs, training exaFLOPs and core-days; speed and batch size by resolution.

    Inference images/s (the best of several batch sizes) is measured on this device. The largest training
    batch is measured on a GPU and estimated from a memory formula on a CPU.

    $ vitkit cost ViT-B/16 ViT-L/16 BiT-R152x2 --recipe jft.ViT-L/16-14ep --no-measure
    $ vitkit cost ViT-Ti/16 BiT-R50x1 --recipe pets --sizes 64 128 224 --out cost.png
    """
    from vitkit.commands import cost as task

    task.cost(
        models, recipe, images=images, sizes=sizes, rate=rate, measure=not no_measure, seconds=seconds,
        out=out, device=device, precision=precision, emit=print_json if json else None,
    )  # fmt: skip


ExportPrecision = Annotated[
    Literal["fp32", "fp16", "bf16", "int8"],
    arg(metavar="NAME", help="fp32, fp16, bf16 (.pt2) or int8 (.onnx, .xml), which needs --calibrate."),
]
StrictSize = Annotated[
    bool,
    arg(help="Reject a size that is not a multiple of the patch size, instead of dropping pixels."),
]
TestImages = Annotated[
    tuple[str, ...],
    arg(metavar="IMAGE...", help="Images to compare on.", help_behavior_hint="(default: generated images)"),
]


def export(
    model: Model,
    out: Annotated[
        Positional[Path],
        arg(metavar="OUT", help="Output file: .onnx, .pt2 (torch.export) or .xml (OpenVINO)."),
    ],
    precision: ExportPrecision = "fp32",
    calibrate: Annotated[
        tuple[str, ...],
        arg(metavar="DATA|IMAGE...", help="Calibration images for int8, similar to later inputs."),
    ] = (),
    image_size: Annotated[
        str | None,
        arg(metavar="N|HxW", help="Change the image size; position embeddings are interpolated."),
    ] = None,
    strict_size: StrictSize = False,
    merge_tokens: MergeTokens = 0,
    any_size: Annotated[
        bool,
        arg(help="Accept any multiple of the patch size; position embeddings are interpolated in the graph."),
    ] = False,
    pixels: Annotated[
        bool, arg(help="Include preprocessing: input uint8 (batch, height, width, 3), output probabilities.")
    ] = False,
    compiled: Annotated[
        bool, arg(help="Compile the .pt2 for this machine (AOTInductor; needs a C++ compiler).")
    ] = False,
    images: TestImages = (),
    overwrite: Annotated[bool, arg(help="Overwrite OUT if it exists.")] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Export a model for other runtimes. The file is written only if its outputs match the model's.

    $ vitkit export runs/photos photos.onnx
    $ vitkit export runs/photos photos.onnx --pixels --any-size --images holiday/
    $ vitkit export runs/photos photos.xml --precision int8 --calibrate photos/
    """
    from vitkit.commands.export import export_verb

    export_verb(
        model, out, device, precision=precision, calibrate=calibrate, image_size=parse_size(image_size),
        strict_size=strict_size, merge_tokens=merge_tokens, any_size=any_size, pixels=pixels,
        compiled=compiled, images=images, overwrite=overwrite, emit=print_json if json else None,
    )  # fmt: skip


def push(
    model: Model,
    repo: Annotated[
        Positional[str], arg(metavar="OWNER/NAME", help="Repository on the Hub; it is created if necessary.")
    ],
    format: Annotated[
        Literal["hf", "timm", "vitkit"] | None,
        arg(
            metavar="FORMAT",
            help="hf (for transformers), timm or vitkit.",
            help_behavior_hint="(default: the first of these that holds the model)",
        ),
    ] = None,
    private: Annotated[bool, arg(help="Create a private repository; refuse one that is public.")] = False,
    message: Annotated[str, arg(metavar="TEXT", help="Commit message.")] = "",
    license: Annotated[
        str, arg(metavar="NAME", help="Licence of the model for its card, e.g. apache-2.0.")
    ] = "",
    dry_run: Annotated[
        Path | None, arg(metavar="FOLDER", help="Write the files to a new folder and upload nothing.")
    ] = None,
    json: Json = False,
) -> None:
    """Push a model to the Hugging Face Hub: weights, configuration and a model card, in one commit.

    The card states accuracy, data, classes, recipe and cost of a run folder. Log in with `hf auth login`
    first, or set HF_TOKEN.

    $ vitkit push runs/photos me/photos --license apache-2.0
    $ vitkit push runs/photos me/photos --format timm --private
    $ vitkit push runs/photos me/photos --dry-run photos-hub
    """
    from vitkit.commands.push import push_verb

    push_verb(
        model, repo, format=format, private=private, message=message, license=license, dry_run=dry_run,
        emit=print_json if json else None,
    )  # fmt: skip
