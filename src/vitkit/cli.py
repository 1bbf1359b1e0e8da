"""The command line: words to one call. Imports torch only inside the verbs that need it."""

import json as json_module
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

Kind = Literal["models", "weights", "formats"]
Format = Literal["vitkit", "official", "timm", "hf", "torchvision"]
Json = Annotated[bool, arg(help="One JSON object on standard output, nothing else there.")]


def print_json(content: Any) -> None:
    print(json_module.dumps(content, indent=2, ensure_ascii=False))


def list_(kind: Positional[Kind] = "models", json: Json = False) -> None:
    """What there is: models with their sizes, published weights, file formats.

    $ vitkit list
    $ vitkit list weights --json
    """
    from vitkit import catalogue

    rows = {"models": catalogue.models, "weights": catalogue.weights, "formats": catalogue.formats}[kind]()
    print_json(rows) if json else catalogue.print_table(rows)


def show(
    what: Annotated[
        Positional[str],
        arg(metavar="X", help="A model's name, a published weight's name, a file or a folder."),
    ],
    json: Json = False,
) -> None:
    """Everything about one model: sizes, parameters, FLOPs at 224 and 384 pixels, labels, origin.

    $ vitkit show ViT-L/16
    $ vitkit show runs/pets/model.safetensors
    $ vitkit show ViT-B/16.augreg-i21k
    """
    from vitkit import catalogue

    facts = catalogue.describe(what)
    print_json(facts) if json else catalogue.print_facts(facts)


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
        source,
        out,
        format=format,
        overwrite=overwrite,
        image_size=parse_size(image_size),
        heads=heads,
        gelu=gelu,
        allow_missing=allow_missing,
        ignore=ignore,
    )
    print_json(result.to_json()) if json else catalogue.print_conversion(result)
    if not result.ok:
        sys.exit(1)


def demo(json: Json = False) -> None:
    """Build every model, compare its size with the published one, and take a model through every format.

    $ vitkit demo
    """
    from vitkit.demo import run

    sys.exit(0 if run(print_json if json else None) else 1)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """'384' or '384x256' -> (height, width)."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"--image-size {text!r}: give N or HxW, as in 384 or 384x256")
    return int(parts[0]), int(parts[-1])


VERBS: dict[str, Callable[..., None]] = {"demo": demo, "list": list_, "show": show, "convert": convert}


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0: done; 1: failed; 2: a request that cannot be met. No traceback for a user's mistake."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="vitkit",
            description="The Vision Transformer system. vitkit VERB --help explains a verb, with examples.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except ValueError as error:  # WeightsError is one
        fail(error, 2)
    except OSError as error:
        fail(error, 1)


def fail(error: Exception, code: int) -> None:
    print(f"vitkit: {error}", file=sys.stderr)
    sys.exit(code)
