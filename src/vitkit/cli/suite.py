"""The verb of many tasks: suite."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from vitkit.cli.words import Device, Json, Model, Workers, print_json
from vitkit.options import Precision, Training


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
    seeds: Annotated[int, arg(metavar="N", help="Final runs of each task, whose mean is told.")] = 1,
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
    from vitkit.tasks import suite as task

    options = Training(
        out=out, steps=steps, batch=batch, image_size=image_size, set=set, device=device,
        precision=precision, workers=workers,
    )  # fmt: skip
    choice = task.Choice(rates=rates, schedules=schedules, one_setting=one_setting, seeds=seeds)
    task.suite(model, data, tasks, options, choice, emit=print_json if json else None)
