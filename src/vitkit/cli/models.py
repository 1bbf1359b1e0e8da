"""Verbs about models and their files: list, show, convert, demo."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitkit.cli.words import Json, print_json
from vitkit.options import parse_size

Kind = Literal["models", "weights", "formats", "recipes"]
Format = Literal["vitkit", "official", "timm", "hf", "torchvision"]


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
    from vitkit import catalogue

    facts = catalogue.describe(what)
    print_json(facts) if json else catalogue.print_groups(facts)


def convert(
    source: Annotated[
        Positional[str], arg(metavar="IN", help="A weight file, a folder or a published name.")
    ],
    out: Annotated[
        Positional[Path], arg(metavar="OUT", help="The file to write, or a folder for Hugging Face.")
    ],
    format: Annotated[
        Format | None,
        arg(metavar="FORMAT", help="vitkit, official, timm, hf or torchvision, where OUT does not tell."),
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
    from vitkit import catalogue
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
    from vitkit.demo import digits, models

    told: dict[str, Any] = {}
    right = [
        module.run((lambda content, name=name: told.update({name: content})) if json else None)
        for name, module in (("models", models), ("digits", digits))
        if part in ("all", name)
    ]
    if json:
        print_json(told)
    sys.exit(0 if all(right) else 1)
