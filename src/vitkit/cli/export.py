"""The verb that writes a model for other runtimes: export."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitkit.cli.words import Device, Json, Model, print_json
from vitkit.options import parse_size


def export(
    model: Model,
    out: Annotated[
        Positional[Path], arg(metavar="OUT", help="out.onnx, out.pt2 (torch.export) or out.xml (OpenVINO).")
    ],
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"],
        arg(metavar="NAME", help="fp32, fp16, bf16 (.pt2) or int8 (.onnx, .xml), which needs --calibrate."),
    ] = "fp32",
    calibrate: Annotated[
        tuple[str, ...], arg(metavar="DATA|IMAGE...", help="Images like those to come, for int8.")
    ] = (),
    image_size: Annotated[
        str | None,
        arg(metavar="N|HxW", help="Another size; positions are interpolated to it."),
    ] = None,
    strict_size: Annotated[
        bool, arg(help="Refuse a size that is no whole number of patches; else its rest is dropped.")
    ] = False,
    any_size: Annotated[
        bool, arg(help="Take every size that fits the patches; positions are interpolated in the graph.")
    ] = False,
    pixels: Annotated[
        bool, arg(help="Preprocessing inside: uint8 (batch, height, width, 3) in, probabilities out.")
    ] = False,
    compiled: Annotated[bool, arg(help="A .pt2 compiled for this machine (AOTInductor; needs C++).")] = False,
    images: Annotated[
        tuple[str, ...], arg(metavar="IMAGE...", help="Compare on these; on generated ones if not given.")
    ] = (),
    overwrite: Annotated[bool, arg(help="Replace OUT if it exists.")] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """A model for other runtimes. The file is run and compared first; one that disagrees is not written.

    $ vitkit export runs/photos photos.onnx
    $ vitkit export runs/photos photos.onnx --pixels --any-size --images holiday/
    $ vitkit export runs/photos photos.xml --precision int8 --calibrate photos/
    """
    from vitkit.tasks.export import export_verb

    export_verb(
        model, out, device, precision=precision, calibrate=calibrate, image_size=parse_size(image_size),
        strict_size=strict_size, any_size=any_size, pixels=pixels, compiled=compiled, images=images,
        overwrite=overwrite, emit=print_json if json else None,
    )  # fmt: skip
