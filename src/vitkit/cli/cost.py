"""The verb about the price of models: cost."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitkit.cli.words import Device, Json, print_json
from vitkit.options import Precision


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
    from vitkit.tasks import cost as task

    task.cost(
        models, recipe, images=images, sizes=sizes, rate=rate, measure=not no_measure, seconds=seconds,
        out=out, device=device, precision=precision, emit=print_json if json else None,
    )  # fmt: skip
