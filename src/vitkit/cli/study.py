"""The study verb with its subcommands: study list, run, report, pack, unpack and index."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from vitkit.cli.flags import Device, Json, print_json
from vitkit.options import Precision


@dataclass(frozen=True, kw_only=True)
class List:
    """List the studies with the figure or table of the paper that each reproduces.

    $ vitkit study list
    """

    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Plan a study for a time budget, run it and write a report. The same command again resumes it.

    $ vitkit study run positions --data tiny.npz --downstream cifar10.npz --budget 20min
    $ vitkit study run data-size --data digits --seeds 1 --budget 2min --plan
    $ vitkit study run scaling --data shards/ --scale paper --on slurm --cluster slurm_partition=gpu
    $ vitkit study run recipes --weights ViT-S/16.augreg-i21k --data cifar10.npz:10000 pets/ --budget 2h
    $ vitkit study run pretrain-sets --data in1k/ i21k/ --scale paper --rows imagenet i21k --plan
    """

    name: Annotated[Positional[str], arg(metavar="NAME", help="Study name; see vitkit study list.")]
    data: Annotated[
        tuple[str, ...],
        arg(
            metavar="DATA...",
            help="Training data. pretrain-sets and recipes accept several; recipes also a part, DATA:PART: "
            "10000 (images), 10%, 25/class, imbalanced=100 or noise=0.2 (wrong labels).",
        ),
    ]
    weights: Annotated[
        str,
        arg(
            metavar="FILE|NAME",
            help="For recipes: the pretrained weights to fine-tune; for self-supervision: a teacher.",
        ),
    ] = ""
    only: Annotated[
        tuple[str, ...],
        arg(metavar="CHANGE...", help="For recipes: run only the changes whose names contain these words."),
    ] = ()
    downstream: Annotated[
        str,
        arg(
            metavar="DATA",
            help="Data for few-shot accuracy and fine-tuning.",
            help_behavior_hint="(default: DATA)",
        ),
    ] = ""
    budget: Annotated[
        str,
        arg(
            metavar="TIME",
            help="Total time, e.g. 90s, 20min, 2h; model sizes and steps are chosen to fit. recipes starts "
            "no trial after it.",
        ),
    ] = "20min"
    stop_after: Annotated[
        str,
        arg(
            metavar="TIME",
            help="Stop after this time, e.g. 25min: running trials save, and the same command continues.",
            help_behavior_hint="(default: no limit)",
        ),
    ] = ""
    seeds: Annotated[int, arg(metavar="N", help="Runs per setting.")] = 3
    out: Annotated[
        Path | None,
        arg(metavar="DIR", help="Study folder.", help_behavior_hint="(default: runs/studies/NAME)"),
    ] = None
    on: Annotated[
        Literal["local", "ray", "slurm"],
        arg(help="Run on this machine, a Ray cluster, or as Slurm array jobs."),
    ] = "local"
    processes: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Parallel trials.",
            help_behavior_hint="(default: 4 per GPU, or half of the CPU cores; 1 for recipes)",
        ),
    ] = None
    device: Device = "auto"
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto"
    compile: Annotated[
        bool, arg(help="Compile the models (torch.compile), once per shape; pays off for long budgets.")
    ] = False
    scale: Annotated[
        Literal["mini", "paper"], arg(help="Small models, or the models and recipes of the paper.")
    ] = "mini"
    rows: Annotated[
        tuple[str, ...],
        arg(
            metavar="SET...",
            help="With --scale paper: the row of Table 3 for each DATA: imagenet, i21k or jft.",
        ),
    ] = ()
    image_size: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Image size in pixels, a multiple of 16.",
            help_behavior_hint="(default: from the data; 224 for recipes)",
        ),
    ] = None
    steps: Annotated[
        int | None, arg(metavar="N", help="Training steps, instead of a choice for the budget.")
    ] = None
    size: Annotated[int | None, arg(metavar="0-3", help="Size of the small models.")] = None
    set: Annotated[
        tuple[str, ...], arg(metavar="FIELD=VALUE...", help="Override a recipe field in every trial.")
    ] = ()
    cluster: Annotated[
        tuple[str, ...], arg(metavar="NAME=VALUE...", help="sbatch options, by their submitit names.")
    ] = ()
    plan: Annotated[bool, arg(help="Print the plan only; run nothing.")] = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write table, figures and report again from the current contents of a study folder.

    $ vitkit study report runs/studies/positions
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="Study folder.")]
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Write a stopped study into one file, to go on with it on another machine.

    $ vitkit study pack runs/studies/positions
    $ vitkit study pack runs/studies/recipes --to recipes.zip --max-size 20MB
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="Study folder.")]
    to: Annotated[
        Path | None,
        arg(metavar="FILE", help="The file to write.", help_behavior_hint="(default: FOLDER.study.zip)"),
    ] = None
    max_size: Annotated[
        str,
        arg(
            metavar="SIZE",
            help="Size of the file. Checkpoints are added as long as they fit; results that are larger are "
            "written as numbered parts of this size.",
        ),
    ] = "60MB"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Unpack:
    """Read a packed study into a new folder, verify its content and write its report.

    $ vitkit study unpack positions.study.zip --to runs/studies/positions
    $ vitkit study unpack recipes.zip.* --to runs/studies/recipes
    """

    files: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="FILE...", help="The file, or all parts of it.")
    ]
    to: Annotated[Path, arg(metavar="FOLDER", help="The folder to create.")]
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Index:
    """Write one page with the claims of all studies: paper, measurement, verdict, and a small figure each.

    $ vitkit study index runs/studies/scaling runs/studies/heads --to claims/
    $ vitkit study index docs/research/studies --to docs/research/studies
    """

    folders: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="FOLDER...", help="Study folders, or folders with published tables such as scaling.csv."),
    ]
    to: Annotated[Path, arg(metavar="DIR", help="Folder for index.md and its figures.")]
    json: Json = False


Do = (
    Annotated[List, subcommand("list")]
    | Annotated[Run, subcommand("run")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Pack, subcommand("pack")]
    | Annotated[Unpack, subcommand("unpack")]
    | Annotated[Index, subcommand("index")]
)


def study(do: OmitSubcommandPrefixes[OmitArgPrefixes[Do]]) -> None:
    """Reproduce the paper's studies: many runs, one table, and a report of which claims hold at this scale.

    $ vitkit study list
    $ vitkit study run heads --data digits --budget 5min
    $ vitkit study report runs/studies/heads
    """
    emit = print_json if do.json else None
    if isinstance(do, List):
        from vitkit import listing
        from vitkit.report.terminal import print_table

        return emit(listing.rows("studies")) if emit else print_table(listing.rows("studies"))
    if isinstance(do, Index):
        from vitkit.studies.claims_index import print_index, write_index

        summary = write_index(do.folders, do.to)
        return emit(summary) if emit else print_index(summary)
    from vitkit.studies import conduct
    from vitkit.studies.prepare import Request

    if isinstance(do, Pack):
        return pack(do)
    if isinstance(do, Unpack):
        from vitkit.studies.unpack import unpack

        unpack(do.files, do.to)
        do = Report(folder=do.to, json=do.json)
    if isinstance(do, Report):
        summary = conduct.report(do.folder)
        return emit(summary) if emit else conduct.print_summary(summary)
    request = Request(
        study=do.name, data=do.data, downstream=do.downstream, budget=do.budget, seeds=do.seeds,
        scale=do.scale, image_size=do.image_size, steps=do.steps, size=do.size, set=do.set, rows=do.rows,
        weights=do.weights,
    )  # fmt: skip
    execution = conduct.Execution(
        out=do.out or Path("runs/studies") / do.name, on=do.on, processes=do.processes, device=do.device,
        precision=do.precision, compile=do.compile, cluster=do.cluster, plan=do.plan, only=do.only,
        stop_after=do.stop_after,
    )  # fmt: skip
    if not conduct.run_study(request, execution, emit):
        sys.exit(1)


def pack(do: Pack) -> None:
    """Pack a study and print what is in the file."""
    from vitkit.options import PACK_SIZE, size_in_bytes
    from vitkit.report.terminal import say
    from vitkit.studies import pack

    packed = pack.pack(
        do.folder, do.to or pack.default_name(do.folder), size_in_bytes(do.max_size, "--max-size", PACK_SIZE)
    )
    if do.json:
        return print_json(packed.to_json())
    for line in pack.lines(packed):
        say(line)
