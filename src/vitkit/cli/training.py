"""Verbs that look at data and learn from it: doctor, shard, finetune, pretrain, suite."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from vitkit.cli.flags import Data, Device, Json, Model, Workers, print_json
from vitkit.errors import Error
from vitkit.options import Precision, Training


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
    from vitkit.commands import doctor
    from vitkit.commands import doctor as machines

    if bool(data) == machine:
        raise Error("give either DATA to look at, or --machine", code="request.conflict")
    emit = print_json if json else None
    if machine:
        ok = machines.look(out, model, emit=emit)
    else:
        ok = doctor.doctor(data, quick=quick, workers=workers, emit=emit)
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
    from vitkit.commands import doctor

    doctor.shard(data, out, seed=seed, emit=print_json if json else None)


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
    seeds: Annotated[int, arg(metavar="N", help="Runs of the protocol whose mean is reported.")] = 3,
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
    from vitkit.commands import finetune

    finetune.finetune(data, training, protocol=protocol, seeds=seeds, emit=print_json if json else None)


def pretrain(data: Data, training: OmitArgPrefixes[Training], json: Json = False) -> None:
    """A model from scratch by the paper's recipes, on one process or, under torchrun, on many.

    $ vitkit pretrain shards/ --model ViT-S/16 --epochs 90
    $ vitkit pretrain imagenet/ --recipe imagenet.ViT-B/16 --plan
    $ vitkit pretrain shards/ --recipe augreg-i1k.ViT-B/16 --against cifar/ pets/
    $ torchrun --nproc-per-node 8 -m vitkit pretrain shards/ --recipe i21k.ViT-L/16
    """
    from vitkit.commands import finetune

    finetune.pretrain(data, training, emit=print_json if json else None)


def suite(
    model: Model,
    data: Annotated[str, arg(metavar="ROOT", help="The folder of VTAB's data sets (docs/vtab.md).")] = "",
    tasks: Annotated[
        tuple[str, ...], arg(metavar="NAME|FOLDER...", help="Tasks of VTAB-1k (all 19) or data of your own.")
    ] = (),
    rates: Annotated[
        tuple[float, ...],
        arg(metavar="X...", help="Learning rates; of several, each task's is chosen on 200 images (0.01)."),
    ] = (),
    one_setting: Annotated[
        bool, arg(help="VTAB's protocol: rates x schedules, one for all tasks by their mean on 200 images.")
    ] = False,
    schedules: Annotated[
        tuple[int, ...],
        arg(metavar="N...", help="Numbers of steps to compare with --one-setting (500 2500)."),
    ] = (),
    seeds: Annotated[int, arg(metavar="N", help="Final runs of each task, whose mean is reported.")] = 1,
    steps: Annotated[int | None, arg(metavar="N", help="Length of a run (2500).")] = None,
    batch: Annotated[int | None, arg(metavar="N", help="Images a step (512).")] = None,
    image_size: Annotated[str | None, arg(metavar="N|HxW", help="Resolution (384).")] = None,
    out: Annotated[Path, arg(metavar="DIR", help="Where each task has a folder.")] = Path("runs/suite"),
    set: Annotated[
        tuple[str, ...], arg(metavar="FIELD=VALUE...", help="Any other field of the recipe 'vtab'.")
    ] = (),
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Fine-tune on many tasks by the VTAB-1k protocol: a row a task, a mean a group. Resumes.

    A task without data is listed as missing, and the means it belongs to are marked as incomplete.

    $ vitkit suite ViT-B/16.augreg-i21k --data vtab/
    $ vitkit suite b16.npz --data vtab/ --tasks dtd pets my-photos/ --rates 0.003 0.01 --seeds 3
    $ vitkit suite b16.npz --data vtab/ --one-setting --rates 0.003 0.01 --schedules 500 2500
    $ vitkit suite runs/pre --tasks birds/ leaves.zip --steps 500 --json
    """
    from vitkit.commands import suite as task

    options = Training(
        out=out, steps=steps, batch=batch, image_size=image_size, set=set, device=device,
        precision=precision, workers=workers,
    )  # fmt: skip
    choice = task.Choice(rates=rates, schedules=schedules, one_setting=one_setting, seeds=seeds)
    task.suite(model, data, tasks, options, choice, emit=print_json if json else None)
