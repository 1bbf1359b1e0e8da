"""The command line: words to one call. Imports torch only inside the verbs that need it."""

import json as json_module
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional, arg

from vitkit.options import Training, parse_size

Kind = Literal["models", "weights", "formats", "recipes"]
Format = Literal["vitkit", "official", "timm", "hf", "torchvision"]
Data = Annotated[
    Positional[str],
    arg(metavar="DATA", help="Folder, .csv, .parquet, .zip, .tar, .npz, shards (folder or URL) or 'digits'."),
]
Json = Annotated[bool, arg(help="One JSON object on standard output, nothing else there.")]


def print_json(content: Any) -> None:
    print(json_module.dumps(content, indent=2, ensure_ascii=False))


def list_(kind: Positional[Kind] = "models", json: Json = False) -> None:
    """What there is: models with their sizes, published weights, file formats.

    $ vitkit list
    $ vitkit list weights --json
    """
    from vitkit import catalogue

    rows = {
        "models": catalogue.models,
        "weights": catalogue.weights,
        "formats": catalogue.formats,
        "recipes": catalogue.recipes,
    }[kind]()
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


def demo(
    part: Annotated[
        Positional[Literal["all", "models", "digits"]], arg(help="models, digits or both.")
    ] = "all",
    json: Json = False,
) -> None:
    """See it work: every model and weight format, then the main job on embedded data, in five verbs.

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


def finetune(
    data: Data,
    options: OmitArgPrefixes[Training],
    protocol: Annotated[
        bool,
        arg(help="As the paper does: choose the rate on a held-out slice, retrain on all, test n seeds."),
    ] = False,
    seeds: Annotated[int, arg(metavar="N", help="Runs of the protocol whose mean is told.")] = 3,
    json: Json = False,
) -> None:
    """A classifier from your images: train, test, save one model file. The same command again resumes.

    Without options it chooses weights, resolution, batch and length for this machine, and says why.

    $ vitkit finetune photos/
    $ vitkit finetune photos.zip --weights Ti_16.npz --steps 200 --lr 0.003
    $ vitkit finetune digits --model ViT-Ti/4 --image-size 16
    $ vitkit finetune pets/ --weights ViT-B/16.augreg-i21k --recipe pets --protocol
    """
    from vitkit.tasks import learn

    learn.finetune(data, options, protocol=protocol, seeds=seeds, emit=print_json if json else None)


def pretrain(data: Data, options: OmitArgPrefixes[Training], json: Json = False) -> None:
    """A model from scratch by the paper's recipes, on one process or, under torchrun, on many.

    $ vitkit pretrain shards/ --model ViT-S/16 --epochs 90
    $ vitkit pretrain imagenet/ --recipe imagenet.ViT-B/16 --plan
    $ vitkit pretrain shards/ --recipe augreg-i1k.ViT-B/16 --against cifar/ pets/
    $ torchrun --nproc-per-node 8 -m vitkit pretrain shards/ --recipe i21k.ViT-L/16
    """
    from vitkit.tasks import learn

    learn.pretrain(data, options, emit=print_json if json else None)


def shard(
    data: Data,
    out: Annotated[Positional[Path], arg(metavar="OUT", help="The folder to write.")],
    seed: Annotated[int, arg(metavar="N", help="Decides the order of the images.")] = 0,
    json: Json = False,
) -> None:
    """Tar shards with an index: random access from disk or over HTTP, readable by WebDataset too.

    The same command again completes what is missing. OUT, or an address that serves it, is DATA everywhere.

    $ vitkit shard photos/ shards/
    """
    from vitkit.tasks import use

    use.shard(data, out, seed=seed, emit=print_json if json else None)


def doctor(
    data: Data,
    quick: Annotated[bool, arg(help="Look at names and counts only; read no image.")] = False,
    workers: Annotated[int | None, arg(metavar="N", help="Threads that read images.")] = None,
    json: Json = False,
) -> None:
    """Look at a data set before training: bad files, duplicates, classes, sizes, and what to do about each.

    $ vitkit doctor photos/
    $ vitkit doctor photos.zip --quick --json
    """
    from vitkit.tasks import use

    if not use.doctor(data, quick=quick, workers=workers, emit=print_json if json else None):
        sys.exit(1)


def evaluate(
    model: Annotated[
        Positional[str], arg(metavar="MODEL", help="A model file, a run folder or a published name.")
    ],
    data: Annotated[Positional[str], arg(metavar="DATA", help="Data with the model's classes.")],
    split: Annotated[
        str | None, arg(metavar="NAME", help="train, val or test; the held-out one if not given.")
    ] = None,
    batch: Annotated[int, arg(metavar="N", help="Images at a time.")] = 32,
    workers: Annotated[int | None, arg(metavar="N", help="Processes that prepare images.")] = None,
    device: Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, ...")] = "auto",
    json: Json = False,
) -> None:
    """Accuracy over every image: top-1, top-5, per class, confusion.

    $ vitkit evaluate runs/photos photos/
    $ vitkit evaluate runs/photos other-photos.zip --json
    """
    from vitkit.tasks import use

    use.evaluate(model, data, split, batch, workers, device, emit=print_json if json else None)


def predict(
    model: Annotated[
        Positional[str], arg(metavar="MODEL", help="A model file, a run folder or a published name.")
    ],
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...", help="Files, folders or globs.")],
    top: Annotated[int, arg(metavar="N", help="How many labels of each.")] = 5,
    device: Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, ...")] = "auto",
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


VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "doctor": doctor,
    "shard": shard,
    "finetune": finetune,
    "pretrain": pretrain,
    "evaluate": evaluate,
    "predict": predict,
    "list": list_,
    "show": show,
    "convert": convert,
}


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
    except KeyboardInterrupt as stop:  # a run's Interrupted is one: its text says how to go on
        if str(stop):
            print(f"vitkit: {stop}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    except BrokenPipeError:
        sys.exit(0)
    except ValueError as error:  # WeightsError is one
        fail(error, 2)
    except OSError as error:
        fail(error, 1)


def fail(error: Exception, code: int) -> None:
    print(f"vitkit: {error}", file=sys.stderr)
    sys.exit(code)
