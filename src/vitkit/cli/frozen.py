"""Verbs about a model's frozen features: fewshot."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitkit.cli.words import Device, Json, Model, Workers, print_json

FrozenView = Annotated[
    str,
    arg(
        metavar="NAME",
        help="model, squash, centre or centre:N as in evaluate, or official: squash to 256/224 of the size, "
        "then the centre.",
    ),
]
Cache = Annotated[
    Path | None,
    arg(metavar="DIR", help="Where features are kept; if not given, 10 GB of them in the user's cache."),
]


def fewshot(
    model: Model,
    data: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="DATA...", help="Data sets as for finetune; with --l2 grid, l2 is chosen over all."),
    ],
    shots: Annotated[
        tuple[int, ...],
        arg(metavar="N...", help="Images of each class; 1 5 10 25 as far as there are so many."),
    ] = (),
    seeds: Annotated[int, arg(metavar="N", help="Choices of those images whose mean is told.")] = 3,
    l2: Annotated[str, arg(metavar="X|grid", help="The penalty, or the best of 2^-10 to 2^19.")] = "1024",
    knn: Annotated[
        int | None, arg(metavar="K", help="Also the vote of the K nearest training images.")
    ] = None,
    compare: Annotated[
        tuple[str, ...], arg(metavar="MODEL...", help="More models, on the same images of each class.")
    ] = (),
    figure: Annotated[
        Path | None, arg(metavar="FILE", help="Accuracy over shots, a line a model, as .png or .svg.")
    ] = None,
    probe: Annotated[bool, arg(help="Also a linear probe on all training images.")] = False,
    view: FrozenView = "model",
    batch: Annotated[int, arg(metavar="N", help="Images at a time.")] = 64,
    cache: Cache = None,
    workers: Workers = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """How much frozen features are worth: closed-form least squares on a few images of each class.

    The whole test split is tested on (else val, else a tenth of train). Features are computed once and kept.

    $ vitkit fewshot ViT-B/16.augreg-i21k pets/ --shots 5 10 --knn 20 --probe
    $ vitkit fewshot ViT-B/16.augreg-i21k pets/ cars/ birds/ --l2 grid --json
    $ vitkit fewshot b16.npz pets/ cars/ --compare ti16.npz runs/pre --figure shots.png
    """
    from vitkit.tasks import frozen

    options = frozen.Options(
        shots=shots, seeds=seeds, l2=l2, knn=knn, probe=probe, view=view, batch=batch, cache=cache,
        compare=compare, figure=figure,
    )  # fmt: skip
    frozen.fewshot(model, data, options, workers, device, emit=print_json if json else None)
