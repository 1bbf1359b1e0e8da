"""Verbs that compute something of every image: predict, and embed."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from vitkit.cli.flags import (
    Device,
    Json,
    Labels,
    MergeTokens,
    Model,
    Reject,
    Template,
    Tta,
    View,
    Workers,
    print_json,
)
from vitkit.errors import Error
from vitkit.options import Precision

if TYPE_CHECKING:
    from vitkit.commands.bulk_request import BulkRequest

AnyModel = Annotated[
    Positional[str],
    arg(
        metavar="MODEL",
        help="Model file or folder, run folder, name of published weights, hf:owner/name, or an .onnx or "
        ".xml file written by vitkit export.",
    ),
]
Engine = Annotated[
    str,
    arg(
        metavar="NAME",
        help="CPU inference engine: torch, onnxruntime, openvino, ... (docs/guides/predict-export.md). auto: "
        "for many images, the fastest whose outputs match torch.",
    ),
]
UnsureBelow = Annotated[
    float | None,
    arg(
        metavar="P",
        help="Print 'unsure' as the label if the top probability is below P (0 to 1); with --json, add a "
        "field 'unsure'.",
    ),
]
SortInto = Annotated[
    Path | None,
    arg(
        metavar="DIR",
        help="Copy each image to DIR/<label>/, unsure ones to DIR/unsure/, those that --reject rejects to "
        "DIR/unknown/. Existing files are never "
        "overwritten; an identical copy is skipped.",
    ),
]

Calibrate = Annotated[
    tuple[str, ...], arg(metavar="DATA|IMAGE...", help="Calibration images for an int8 engine.")
]
Csv = Annotated[
    bool,
    arg(
        help="Print CSV: image, label, probability. Control characters in names are escaped, and an "
        "apostrophe is put before cells that a spreadsheet would read as a formula (=, +, -, @). --json "
        "keeps names unchanged."
    ),
]
TableOut = Annotated[
    Path | None,
    arg(metavar="FILE", help="Write to a .parquet or .csv file, resumably, instead of printing."),
]
Places = (
    "Image files, folders, globs, .zip, .tar, .csv, .parquet, .npz, shards, or addresses such as s3://b/x."
)


Images = Annotated[
    Positional[tuple[str, ...]],
    arg(metavar="IMAGE...", help="Image files, folders or globs; with --out also what embed takes."),
]


@dataclass(frozen=True, kw_only=True)
class BulkOptions:
    """How a table of many images is computed; none of it changes the values beyond rounding."""

    batch: Annotated[int, arg(metavar="N", help="Batch size of --out.")] = 64
    workers: Workers = None
    part_size: Annotated[
        int,
        arg(metavar="N", help="Images that --out saves at a time; a killed command loses at most these."),
    ] = 1024
    restart: Annotated[
        bool, arg(help="Compute --out again from the start, instead of continuing; replaces the file.")
    ] = False
    on: Annotated[
        Literal["local", "ray"], arg(help="Compute --out on this machine (also by torchrun), or with Ray.")
    ] = "local"
    processes: Annotated[
        int | None,
        arg(
            metavar="N",
            help="With --on ray: number of actors.",
            help_behavior_hint="(default: one per GPU, else one per machine)",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlaceFiles:
    """What predict writes of boxes and masks."""

    masks: Annotated[
        Path | None,
        arg(
            metavar="DIR",
            help="Segmentation: write the class of each pixel to DIR/<image>.png, numbers with a palette.",
        ),
    ] = None
    draw: Annotated[
        Path | None,
        arg(metavar="DIR", help="Write each image with its boxes or masks over it to DIR/<image>.png."),
    ] = None
    coco: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Detection: write a COCO results file (.json). Categories are the model's labels from 1, "
            "images are numbered from 1 in their order, with file_name. It has boxes of any score, or with "
            "--reject P those from P.",
        ),
    ] = None


def embed(
    model: Model,
    data: Annotated[Positional[tuple[str, ...]], arg(metavar="DATA...", help=Places)],
    out: Annotated[Path, arg(metavar="FILE", help="Output file, .parquet or .npz.")],
    options: OmitArgPrefixes[BulkOptions],
    text: Annotated[
        tuple[str, ...],
        arg(
            metavar="TEXT...",
            help="Embed texts instead of images, with the text tower of a CLIP or SigLIP model: texts, or a "
            ".txt file with one per line.",
        ),
    ] = (),
    pool: Annotated[
        Literal["head", "cls", "mean"],
        arg(help="Input of the model's head, class token, or mean of the patch tokens."),
    ] = "head",
    normalize: Annotated[bool, arg(help="Scale each embedding to length 1.")] = False,
    dtype: Annotated[Literal["float32", "float16"], arg(help="Type of the stored numbers.")] = "float32",
    merge_tokens: MergeTokens = 0,
    view: View = "model",
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto",
    json: Json = False,
) -> None:
    """Write the features of all images to one file: image, label and split if the data has them, embedding.

    A killed command continues where it was when it is run again. Unreadable images have a text in the column
    error and no embedding; the exit code is then 1. torchrun divides the images among its processes.

    $ vitkit embed ViT-B/16.augreg-i21k photos/ --out features.parquet
    $ vitkit embed runs/photos photos.zip more/*.jpg --out features.npz --normalize
    $ vitkit embed runs/photos s3://bucket/photos --out features.parquet --device cuda
    $ vitkit embed hf:openai/clip-vit-base-patch32 --text "a red car" --out query.npz
    """
    if text:
        return embed_text(
            model, text, out, normalize=normalize, dtype=dtype, device=device, json=json,
            unused={"DATA": data, "--pool": pool != "head", "--view": view != "model",
                    "--restart": options.restart},
        )  # fmt: skip
    if not data:
        raise Error("embed: give DATA, or --text", code="request.missing")
    from vitkit.commands.bulk_request import BulkRequest

    request = BulkRequest(
        verb="embed", model=model, places=data, out=out, pool=pool, normalize=normalize, dtype=dtype,
        merge_tokens=merge_tokens, view=view, device=device, precision=precision, **vars(options),
    )  # fmt: skip
    write_table(request, json)


def embed_text(
    model: str, text: tuple[str, ...], out: Path, *, json: bool, unused: dict[str, Any], **options: Any
) -> None:
    """embed --text; `unused` are flags that belong to images."""
    for flag, value in unused.items():
        if value:
            raise Error(f"--text embeds texts alone; omit {flag}", code="request.conflict")
    from vitkit.commands.embed_text import embed_text as run
    from vitkit.report.terminal import say

    count, width = run(model, text, out, **options)
    if json:
        print_json({"path": str(out), "texts": count, "width": width})
    else:
        say(f"{out}: {count} text{'s' * (count != 1)}, {width} numbers each")


def write_table(request: "BulkRequest", json: bool) -> None:
    """Compute a table and print its summary; the exit code is 1 if images were unreadable."""
    from vitkit.commands.bulk import run_bulk
    from vitkit.report.terminal import say

    written = run_bulk(request, quiet=json)
    if not written.main:
        return
    if json:
        print_json(written.to_json())
    else:
        say(written.text())
    if written.unreadable:
        sys.exit(1)


def predict(
    model: AnyModel,
    images: Images,
    options: OmitArgPrefixes[BulkOptions],
    files: OmitArgPrefixes[PlaceFiles],
    out: TableOut = None,
    top: Annotated[int, arg(metavar="N", help="Number of labels per image.")] = 5,
    labels: Labels = (),
    template: Template = (),
    view: View = "model",
    device: Device = "auto",
    engine: Engine = "auto",
    calibrate: Calibrate = (),
    reject: Reject = None,
    tta: Tta = "none",
    merge_tokens: MergeTokens = 0,
    unsure_below: UnsureBelow = None,
    sort_into: SortInto = None,
    csv: Csv = False,
    json: Json = False,
) -> None:
    """Predict labels and probabilities, boxes or masks. Unreadable files are reported and skipped.

    Boxes are left, top, right, bottom in pixels of the image. With --out the images are written to one file,
    a row each; a killed command continues when it is run again, and torchrun divides the images.

    $ vitkit predict runs/photos holiday/ 'inbox/*.png' --csv
    $ vitkit predict runs/photos cat.jpg --reject
    $ vitkit predict runs/photos holiday/ --unsure-below 0.5 --sort-into sorted
    $ vitkit predict photos.onnx cat.jpg
    $ vitkit predict runs/cells slides/ --draw drawn --coco boxes.json
    $ vitkit predict hf:openai/clip-vit-base-patch32 cat.jpg --labels cat dog "red car"
    $ vitkit predict runs/photos photos.zip s3://bucket/more --out answers.parquet
    """
    shared: dict[str, Any] = {
        "top": top, "view": view, "device": device, "engine": engine, "calibrate": calibrate, "tta": tta,
        "reject": reject, "merge_tokens": merge_tokens, "labels": labels, "template": template,
    }  # fmt: skip
    if out is not None:
        printed = {"csv": csv, "sort_into": sort_into, "unsure_below": unsure_below, **vars(files)}
        return predict_to_table(model, images, out, options, json=json, unused=printed, **shared)
    check_printed(options, reject, unsure_below)
    from vitkit.commands.predict import predict as run

    all_read = run(
        model, images, csv=csv, emit=print_json if json else None, unsure_below=unsure_below,
        sort_into=sort_into, files=vars(files), **shared,
    )  # fmt: skip
    if not all_read:
        sys.exit(1)


def check_printed(options: BulkOptions, reject: str | None, unsure_below: float | None) -> None:
    """Refuse flags of --out without it, and two thresholds."""
    for name, default in vars(BulkOptions()).items():
        if getattr(options, name) != default:
            raise Error(f"--{name.replace('_', '-')} needs --out FILE", code="request.conflict")
    if reject is not None and unsure_below is not None:
        raise Error("--reject and --unsure-below exclude each other; omit one", code="request.conflict")


def predict_to_table(
    model: str,
    images: tuple[str, ...],
    out: Path,
    options: BulkOptions,
    *,
    json: bool,
    unused: dict[str, Any],
    **flags: Any,
) -> None:
    """predict --out; `unused` are flags that belong to printed predictions."""
    for name, value in unused.items():
        if value not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise Error(f"--out {out} writes every image to a table; omit {flag}", code="request.conflict")
    from vitkit.commands.bulk_request import BulkRequest

    write_table(
        BulkRequest(verb="predict", model=model, places=images, out=out, **flags, **vars(options)), json
    )
