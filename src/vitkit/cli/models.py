"""Verbs about models and their files: list, show, convert, cost, export, demo."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitkit.cli.flags import Device, Json, Model, print_json
from vitkit.options import Precision, parse_size

Kind = Literal["models", "weights", "formats", "recipes"]


def list_(kind: Positional[Kind] = "models", json: Json = False) -> None:
    """What there is: models with their sizes, published weights, file formats.

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
            help="The name of a model, of published weights or of a recipe; a model file, a run folder or "
            "an exported file.",
        ),
    ],
    json: Json = False,
) -> None:
    """Everything about one model: sizes, parameters, FLOPs at 224 and 384 pixels, labels, origin.

    $ vitkit show ViT-L/16
    $ vitkit show runs/pets/model.safetensors
    $ vitkit show ViT-B/16.augreg-i21k
    $ vitkit show photos.onnx
    """
    from vitkit.commands import catalogue
    from vitkit.report import terminal

    facts = catalogue.describe(what)
    print_json(facts) if json else terminal.print_groups(facts)


def convert(
    source: Annotated[
        Positional[str], arg(metavar="IN", help="A weight file, a folder or a published name.")
    ],
    out: Annotated[
        Positional[Path], arg(metavar="OUT", help="The file to write, or a folder for Hugging Face.")
    ],
    format: Annotated[
        str | None,
        arg(metavar="FORMAT", help="See vitkit list formats; without it the name of OUT decides."),
    ] = None,
    image_size: Annotated[
        str | None, arg(metavar="N|HxW", help="The size that the position table was learned at.")
    ] = None,
    heads: Annotated[int | None, arg(metavar="N", help="Where the arrays do not tell.")] = None,
    gelu: Annotated[
        Literal["tanh", "erf"] | None, arg(metavar="tanh|erf", help="The GELU from now on.")
    ] = None,
    view: Annotated[
        str | None,
        arg(metavar="NAME", help="The view from now on: squash, centre or centre:N, as in evaluate."),
    ] = None,
    allow_missing: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="Our parameters that the file may lack, by prefix.")
    ] = (),
    ignore: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="The file's arrays to leave out, by prefix.")
    ] = (),
    overwrite: Annotated[bool, arg(help="Replace OUT if it exists.")] = False,
    json: Json = False,
) -> None:
    """Any published weight format to any other, with a parity report; OUT appears only if all is equal.

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
        Positional[Literal["all", "models", "digits"]], arg(help="models, digits or both.")
    ] = "all",
    json: Json = False,
) -> None:
    """See it work: every model and weight format, then the main job on embedded data, in six verbs.

    $ vitkit demo
    $ vitkit demo digits
    """
    from vitkit.commands import demo

    results: dict[str, Any] = {}
    parts: dict[str, Callable[..., bool]] = {"models": demo.run_models, "digits": demo.run_digits}
    succeeded = [
        run(partial(results.__setitem__, name) if json else None)
        for name, run in parts.items()
        if part in ("all", name)
    ]
    if json:
        print_json(results)
    sys.exit(0 if all(succeeded) else 1)


def cost(
    models: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="MODEL...", help="Names of models or published weights, files or run folders."),
    ],
    recipe: Annotated[str, arg(metavar="NAME", help="Whose training is counted; see vitkit list recipes.")],
    images: Annotated[
        int | None, arg(metavar="N", help="Training images, where the recipe counts epochs of other data.")
    ] = None,
    sizes: Annotated[tuple[int, ...], arg(metavar="N...", help="Image sides in pixels.")] = (
        64,
        128,
        224,
        384,
        512,
    ),
    rate: Annotated[
        float | None,
        arg(metavar="X", help="TFLOP/s of a device in training, for device days; else measured."),
    ] = None,
    no_measure: Annotated[bool, arg(help="Only what is computed from the models' sizes.")] = False,
    seconds: Annotated[float, arg(metavar="X", help="Time for each measurement.")] = 2.0,
    out: Annotated[
        Path | None, arg(metavar="FILE", help="Fig. 12 of the paper, of these models here: .png or .svg.")
    ] = None,
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto",
    json: Json = False,
) -> None:
    """What models cost: parameters, FLOPs, exaFLOPs and core-days of a recipe; speed and batch by resolution.

    images/s (inference, the best of several batch sizes) is measured on this device, and so is the largest
    training batch on a GPU; on a CPU that follows from the memory formula.

    $ vitkit cost ViT-B/16 ViT-L/16 BiT-R152x2 --recipe jft.ViT-L/16-14ep --no-measure
    $ vitkit cost ViT-Ti/16 BiT-R50x1 --recipe pets --sizes 64 128 224 --out cost.png
    """
    from vitkit.commands import cost as task

    task.cost(
        models, recipe, images=images, sizes=sizes, rate=rate, measure=not no_measure, seconds=seconds,
        out=out, device=device, precision=precision, emit=print_json if json else None,
    )  # fmt: skip


def export(
    model: Model,
    out: Annotated[
        Positional[Path], arg(metavar="OUT", help="out.onnx, out.pt2 (torch.export) or out.xml (OpenVINO).")
    ],
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        arg(metavar="NAME", help="fp32, fp16, bf16 (.pt2) or int8 (.onnx, .xml), which needs --calibrate."),
    ] = "fp32",
    calibrate: Annotated[
        tuple[str, ...], arg(metavar="DATA|IMAGE...", help="Images like those to come, for int8.")
    ] = (),
    image_size: Annotated[
        str | None,
        arg(metavar="N|HxW", help="Another size; positions are interpolated to it."),
    ] = None,
    strict_size: Annotated[
        bool, arg(help="Refuse a size that is no whole number of patches; else its rest is dropped.")
    ] = False,
    any_size: Annotated[
        bool, arg(help="Take every size that fits the patches; positions are interpolated in the graph.")
    ] = False,
    pixels: Annotated[
        bool, arg(help="Preprocessing inside: uint8 (batch, height, width, 3) in, probabilities out.")
    ] = False,
    compiled: Annotated[bool, arg(help="A .pt2 compiled for this machine (AOTInductor; needs C++).")] = False,
    images: Annotated[
        tuple[str, ...], arg(metavar="IMAGE...", help="Compare on these; on generated ones if not given.")
    ] = (),
    overwrite: Annotated[bool, arg(help="Replace OUT if it exists.")] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """A model for other runtimes. The file is run and compared first; one that disagrees is not written.

    $ vitkit export runs/photos photos.onnx
    $ vitkit export runs/photos photos.onnx --pixels --any-size --images holiday/
    $ vitkit export runs/photos photos.xml --precision int8 --calibrate photos/
    """
    from vitkit.commands.export import export_verb

    export_verb(
        model, out, device, precision=precision, calibrate=calibrate, image_size=parse_size(image_size),
        strict_size=strict_size, any_size=any_size, pixels=pixels, compiled=compiled, images=images,
        overwrite=overwrite, emit=print_json if json else None,
    )  # fmt: skip
