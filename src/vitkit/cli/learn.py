"""Verbs that look at data and learn from it: doctor, shard, finetune, pretrain."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from vitkit.cli.words import Data, Json, print_json
from vitkit.errors import Error
from vitkit.options import Training


def doctor(
    data: Annotated[Data, arg(metavar="DATA", help="As for finetune; not needed with --machine.")] = "",
    quick: Annotated[bool, arg(help="Look at names and counts only; read no image.")] = False,
    machine: Annotated[
        bool, arg(help="Look at this machine instead: disk, memory, files, GPUs, clock, versions.")
    ] = False,
    out: Annotated[Path, arg(metavar="DIR", help="With --machine: where runs would be kept.")] = Path("runs"),
    model: Annotated[str, arg(metavar="NAME", help="With --machine: what would be trained.")] = "ViT-B/16",
    workers: Annotated[int | None, arg(metavar="N", help="Threads that read images.")] = None,
    json: Json = False,
) -> None:
    """Look at a data set before training: bad files, duplicates, classes, sizes, and what to do about each.

    $ vitkit doctor photos/
    $ vitkit doctor photos.zip --quick --json
    $ vitkit doctor --machine --model ViT-L/16 --out /scratch/runs
    """
    from vitkit.tasks import machine as machines
    from vitkit.tasks import use

    if bool(data) == machine:
        raise Error("give either DATA to look at, or --machine", code="request.conflict")
    emit = print_json if json else None
    if machine:
        ok = machines.look(out, model, emit=emit)
    else:
        ok = use.doctor(data, quick=quick, workers=workers, emit=emit)
    if not ok:
        sys.exit(1)


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


def finetune(
    data: Data,
    training: OmitArgPrefixes[Training],
    protocol: Annotated[
        bool,
        arg(
            help="As the paper does: choose the rate on a held-out slice (for a ResNet also try BiT's rule), "
            "retrain on all, test n seeds."
        ),
    ] = False,
    seeds: Annotated[int, arg(metavar="N", help="Runs of the protocol whose mean is told.")] = 3,
    json: Json = False,
) -> None:
    """A classifier from your images: train, test, save one model file. The same command again resumes.

    Without options it chooses weights, resolution, batch and length by the data and the kind of device (CPU
    or GPU), and says why; --plan shows all of it first.
    Other options on the same data start a new run in runs/<data>-2; --more-steps trains a finished one on.

    $ vitkit finetune photos/
    $ vitkit finetune photos/ --plan
    $ vitkit finetune photos.zip --weights Ti_16.npz --steps 200 --lr 0.003
    $ vitkit finetune photos/ --more-steps 200
    $ vitkit finetune digits --model ViT-Ti/4 --image-size 16
    $ vitkit finetune pets/ --weights ViT-B/16.augreg-i21k --recipe pets --protocol
    """
    from vitkit.tasks import learn

    learn.finetune(data, training, protocol=protocol, seeds=seeds, emit=print_json if json else None)


def pretrain(data: Data, training: OmitArgPrefixes[Training], json: Json = False) -> None:
    """A model from scratch by the paper's recipes, on one process or, under torchrun, on many.

    $ vitkit pretrain shards/ --model ViT-S/16 --epochs 90
    $ vitkit pretrain imagenet/ --recipe imagenet.ViT-B/16 --plan
    $ vitkit pretrain shards/ --recipe augreg-i1k.ViT-B/16 --against cifar/ pets/
    $ torchrun --nproc-per-node 8 -m vitkit pretrain shards/ --recipe i21k.ViT-L/16
    """
    from vitkit.tasks import learn

    learn.pretrain(data, training, emit=print_json if json else None)
