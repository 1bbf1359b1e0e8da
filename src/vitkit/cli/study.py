"""The verb of the paper's studies, with verbs of its own: study list, study run, study report."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from vitkit.cli.flags import Device, Json, print_json
from vitkit.options import Precision


@dataclass(frozen=True, kw_only=True)
class List:
    """The ten studies, with the figure or the table of the paper that each is about.

    $ vitkit study list
    """

    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Plan a study for a budget of time, run it, and write one page. The same command again goes on.

    $ vitkit study run positions --data tiny.npz --downstream cifar10.npz --budget 20min
    $ vitkit study run data-size --data digits --seeds 1 --budget 2min --plan
    $ vitkit study run scaling --data shards/ --scale paper --on slurm --cluster slurm_partition=gpu
    $ vitkit study run pretrain-sets --data in1k/ i21k/ --scale paper --rows imagenet i21k --plan
    """

    name: Annotated[Positional[str], arg(metavar="NAME", help="See vitkit study list.")]
    data: Annotated[
        tuple[str, ...], arg(metavar="DATA...", help="To pre-train on; several for pretrain-sets alone.")
    ]
    downstream: Annotated[
        str, arg(metavar="DATA", help="For few-shot accuracy and fine-tuning; DATA itself if not given.")
    ] = ""
    budget: Annotated[
        str, arg(metavar="TIME", help="Time for all of it, as in 90s, 20min, 2h: sizes and steps follow.")
    ] = "20min"
    seeds: Annotated[int, arg(metavar="N", help="Runs of every setting.")] = 3
    out: Annotated[
        Path | None, arg(metavar="DIR", help="The study folder (runs/studies/NAME if not given).")
    ] = None
    on: Annotated[
        Literal["local", "ray", "slurm"], arg(help="This machine, a Ray cluster, or SLURM array jobs.")
    ] = "local"
    processes: Annotated[
        int | None, arg(metavar="N", help="Trials at a time; several share a GPU (4 of each GPU).")
    ] = None
    device: Device = "auto"
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto"
    compile: Annotated[
        bool, arg(help="Compile the models, once for all trials of a shape: for budgets of many minutes.")
    ] = False
    scale: Annotated[
        Literal["mini", "paper"], arg(help="Miniatures, or the paper's own models and recipes.")
    ] = "mini"
    rows: Annotated[
        tuple[str, ...],
        arg(
            metavar="SET...",
            help="At the paper's scale, Table 3's rows for each DATA: imagenet, i21k or jft.",
        ),
    ] = ()
    image_size: Annotated[
        int | None, arg(metavar="N", help="Pixels of a side, a multiple of 16; as the data has them.")
    ] = None
    steps: Annotated[int | None, arg(metavar="N", help="Steps of a pre-training, instead of a budget.")] = (
        None
    )
    size: Annotated[int | None, arg(metavar="0-3", help="How large the miniatures are.")] = None
    set: Annotated[
        tuple[str, ...], arg(metavar="FIELD=VALUE...", help="A field of every trial's recipe.")
    ] = ()
    cluster: Annotated[
        tuple[str, ...], arg(metavar="NAME=VALUE...", help="Options of sbatch, by submitit's names.")
    ] = ()
    plan: Annotated[bool, arg(help="Say what would be run, and do nothing.")] = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Table, figures and page again, out of what a study folder holds by now.

    $ vitkit study report runs/studies/positions
    """

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="A study folder.")]
    json: Json = False


Do = (
    Annotated[List, subcommand("list")]
    | Annotated[Run, subcommand("run")]
    | Annotated[Report, subcommand("report")]
)


def study(do: OmitSubcommandPrefixes[OmitArgPrefixes[Do]]) -> None:
    """The paper's studies: many runs, one table, one page that says which claims hold at this scale.

    $ vitkit study list
    $ vitkit study run heads --data digits --budget 5min
    $ vitkit study report runs/studies/heads
    """
    emit = print_json if do.json else None
    if isinstance(do, List):
        from vitkit import listing
        from vitkit.report.terminal import print_table

        return emit(listing.rows("studies")) if emit else print_table(listing.rows("studies"))
    from vitkit.studies import conduct
    from vitkit.studies.prepare import Request

    if isinstance(do, Report):
        told = conduct.report(do.folder)
        return emit(told) if emit else conduct.print_summary(told)
    request = Request(
        study=do.name, data=do.data, downstream=do.downstream, budget=do.budget, seeds=do.seeds,
        scale=do.scale, image_size=do.image_size, steps=do.steps, size=do.size, set=do.set, rows=do.rows,
    )  # fmt: skip
    execution = conduct.Execution(
        out=do.out or Path("runs/studies") / do.name, on=do.on, processes=do.processes, device=do.device,
        precision=do.precision, compile=do.compile, cluster=do.cluster, plan=do.plan,
    )  # fmt: skip
    if not conduct.run_study(request, execution, emit):
        sys.exit(1)
