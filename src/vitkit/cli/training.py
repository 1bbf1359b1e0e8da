"""Verbs for data and training: doctor, shard, finetune, pretrain, suite."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from vitkit.cli.flags import Data, Device, Json, Model, Workers, print_json
from vitkit.errors import Error
from vitkit.options import Precision, Training

DoctorModel = Annotated[
    str,
    arg(
        metavar="MODEL",
        help="Also find likely wrong labels, near-duplicates and outliers by the features of this model: "
        "file, run folder or name of published weights. With --machine: name of the model to train.",
        help_behavior_hint="(default: none; with --machine ViT-B/16)",
    ),
]
DoctorOut = Annotated[
    Path | None,
    arg(
        metavar="DIR",
        help="With --model: folder for the page and the table of suspicious images. With --machine: "
        "folder for runs.",
        help_behavior_hint="(default: runs/doctor/<data>; with --machine runs)",
    ),
]


def doctor(
    data: Annotated[Data, arg(metavar="DATA", help="Data set as for finetune; not with --machine.")] = "",
    quick: Annotated[bool, arg(help="Check names and counts only; read no images.")] = False,
    machine: Annotated[
        bool, arg(help="Check this machine instead: disk, memory, open files, GPUs, clock, versions.")
    ] = False,
    model: DoctorModel = "",
    out: DoctorOut = None,
    workers: Annotated[int | None, arg(metavar="N", help="Threads for reading images.")] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Check a data set before training: unreadable files, duplicates, classes, sizes; with a fix for each.

    With --model, index.html shows the images to look at. Write exclude or relabel in the column action of
    manifest.csv, and train with finetune --corrections. Your images are never changed.

    $ vitkit doctor photos/
    $ vitkit doctor photos.zip --quick --json
    $ vitkit doctor photos/ --model ViT-S/16.augreg-i21k
    $ vitkit doctor --machine --model ViT-L/16 --out /scratch/runs
    """
    from vitkit.commands import doctor

    if bool(data) == machine:
        raise Error("expected either DATA or --machine", code="request.conflict")
    emit = print_json if json else None
    if machine:
        ok = doctor.check_machine(out or Path("runs"), model or "ViT-B/16", emit=emit)
    elif quick and model:
        raise Error("--quick reads no images, which --model needs; leave one out", code="request.conflict")
    elif out and not model:
        raise Error("--out needs --model or --machine", code="request.conflict")
    else:
        ok = doctor.doctor(data, quick=quick, model=model, out=out, workers=workers, device=device, emit=emit)
    if not ok:
        sys.exit(1)


def shard(
    data: Data,
    out: Annotated[Positional[Path], arg(metavar="OUT", help="Output folder.")],
    seed: Annotated[int, arg(metavar="N", help="Random seed of the image order.")] = 0,
    json: Json = False,
) -> None:
    """Write tar shards with an index: random access from disk or over HTTP, also readable by WebDataset.

    The same command again resumes. OUT, or a URL that serves it, can be used as DATA in every verb.

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
            help="The paper's protocol: choose the learning rate on a held-out slice (for a ResNet also try "
            "the BiT rule), retrain on all training images, test several seeds."
        ),
    ] = False,
    seeds: Annotated[
        int, arg(metavar="N", help="With --protocol: number of runs; the mean is reported.")
    ] = 3,
    folds: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Cross-validation for little data: N runs, each tested on one of N folds of the train and "
            "validation images and trained on the others, then the model on all of them.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a classifier on your images, test it and save one model file. The same command again resumes.

    With --task segment the images have masks and the model answers with a class for each pixel; with --task
    detect they have boxes, with --task instances masks of objects, and so do the answers.

    By default, weights, resolution, batch size and length are chosen from the data and the device (CPU or
    GPU), each with a reason; --plan prints them without training.
    Other options on the same data start a new run in runs/<data>-2; --more-steps continues a finished run.

    $ vitkit finetune photos/
    $ vitkit finetune photos/ --plan
    $ vitkit finetune photos.zip --weights Ti_16.npz --steps 200 --lr 0.003
    $ vitkit finetune photos/ --train lora
    $ vitkit finetune streets/ --task segment
    $ vitkit finetune cells/ --task detect
    $ vitkit finetune photos/ --more-steps 200
    $ vitkit finetune photos/ --folds 5
    $ vitkit finetune digits --model ViT-Ti/4 --image-size 16
    $ vitkit finetune pets/ --weights ViT-B/16.augreg-i21k --recipe pets --protocol
    """
    from vitkit.commands import finetune

    emit = print_json if json else None
    finetune.finetune(data, training, protocol=protocol, seeds=seeds, folds=folds, emit=emit)


def pretrain(data: Data, training: OmitArgPrefixes[Training], json: Json = False) -> None:
    """Pre-train a model with a published recipe or, with --task, without labels; on one process or many.

    A task without labels takes images in any folders. The model, image size, batch and length are chosen from
    the images and the device, each with a reason; --plan prints them without training.

    $ vitkit pretrain photos/ --task mae
    $ vitkit pretrain photos/ --task distill --teacher DINOv2-S/14.lvd142m --model ViT-Ti/16
    $ vitkit pretrain shards/ --model ViT-S/16 --epochs 90
    $ vitkit pretrain imagenet/ --recipe imagenet.ViT-B/16 --plan
    $ vitkit pretrain shards/ --recipe augreg-i1k.ViT-B/16 --against cifar/ pets/
    $ torchrun --nproc-per-node 8 -m vitkit pretrain shards/ --recipe i21k.ViT-L/16
    """
    from vitkit.commands import finetune

    finetune.pretrain(data, training, emit=print_json if json else None)


Tasks = Annotated[
    tuple[str, ...],
    arg(
        metavar="NAME|FOLDER...",
        help="VTAB-1k tasks or your own data sets.",
        help_behavior_hint="(default: all 19 VTAB-1k tasks)",
    ),
]
Rates = Annotated[
    tuple[float, ...],
    arg(
        metavar="X...",
        help="Learning rates; the best is chosen per task on 200 images.",
        help_behavior_hint="(default: 0.01)",
    ),
]
OneSetting = Annotated[
    bool,
    arg(help="VTAB protocol: one of rates x schedules for all tasks, by mean accuracy on 200 images each."),
]
Schedules = Annotated[
    tuple[int, ...],
    arg(
        metavar="N...",
        help="With --one-setting: numbers of steps to compare.",
        help_behavior_hint="(default: 500 2500)",
    ),
]


def suite(
    model: Model,
    data: Annotated[
        str, arg(metavar="ROOT", help="Folder of the VTAB data sets (docs/research/vtab.md).")
    ] = "",
    tasks: Tasks = (),
    rates: Rates = (),
    one_setting: OneSetting = False,
    schedules: Schedules = (),
    seeds: Annotated[int, arg(metavar="N", help="Final runs per task; the mean is reported.")] = 1,
    steps: Annotated[
        int | None, arg(metavar="N", help="Training steps.", help_behavior_hint="(default: 2500)")
    ] = None,
    batch: Annotated[
        int | None, arg(metavar="N", help="Batch size.", help_behavior_hint="(default: 512)")
    ] = None,
    image_size: Annotated[
        str | None, arg(metavar="N|HxW", help="Image resolution.", help_behavior_hint="(default: 384)")
    ] = None,
    out: Annotated[Path, arg(metavar="DIR", help="Output folder, with one subfolder per task.")] = Path(
        "runs/suite"
    ),
    set: Annotated[
        tuple[str, ...], arg(metavar="FIELD=VALUE...", help="Override any field of the recipe 'vtab'.")
    ] = (),
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Fine-tune on many tasks with the VTAB-1k protocol and report accuracy per task and mean per group.

    Tasks without data are listed as missing, and their means are marked as incomplete. The same command
    again resumes.

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
