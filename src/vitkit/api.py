"""The Python API of the commands: finetune, evaluate, embed and the others as functions with results."""

import os
import typing
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import numpy as np
import torch

from vitkit.commands.bulk import Written, run_bulk
from vitkit.commands.bulk_request import BulkRequest, features_model
from vitkit.commands.evaluate import EvaluateOptions, measure
from vitkit.commands.export import Exported, export_loaded
from vitkit.commands.finetune import Outcome, execute, finetuning, pretraining
from vitkit.commands.inspect import Inspection, Pictures, evenly_chosen, find_pictures, inspection
from vitkit.commands.keyword_options import (
    EmbedOptions,
    Size,
    TrainingOptions,
    as_text,
    as_texts,
    data_path,
    training_options,
    with_signature,
)
from vitkit.commands.push import Pushed
from vitkit.commands.push import push as push_model
from vitkit.commands.results import Metrics, Place, Run
from vitkit.commands.shared import loaded
from vitkit.data.pictures import Picture, content_of, is_picture, name_of
from vitkit.errors import Error
from vitkit.inference.predict import features, view_of
from vitkit.inference.rejection import STORED, parse_reject
from vitkit.inference.tta import Tta
from vitkit.inference.zero_shot import embed_texts, text_tower, texts_of
from vitkit.inspection.gather import check_layer
from vitkit.inspection.subject import note_dense, transformer
from vitkit.models.variants import Model
from vitkit.options import check_options, parse_size
from vitkit.planning.plan import Plan
from vitkit.planning.resume import Request
from vitkit.report.terminal import warn


@overload
def finetune(
    data: Place, *, protocol: bool = ..., seeds: int = ..., folds: int | None = ...,
    plan: Literal[False] = ..., progress: bool = ..., **options: Unpack[TrainingOptions],
) -> Run: ...  # fmt: skip


@overload
def finetune(
    data: Place, *, protocol: bool = ..., seeds: int = ..., folds: int | None = ..., plan: Literal[True],
    progress: bool = ..., **options: Unpack[TrainingOptions],
) -> Plan: ...  # fmt: skip


@overload
def finetune(
    data: Place, *, protocol: bool = ..., seeds: int = ..., folds: int | None = ..., plan: bool,
    progress: bool = ..., **options: Unpack[TrainingOptions],
) -> Run | Plan: ...  # fmt: skip


@with_signature
def finetune(
    data: Place,
    *,
    protocol: bool = False,
    seeds: int = 3,
    folds: int | None = None,
    plan: bool = False,
    progress: bool = False,
    **options: Unpack[TrainingOptions],
) -> Run | Plan:
    """Train a classifier on your images, test it and save one model file. The same call again resumes.

    Equivalent to `vitkit finetune` with the same options; `vitkit finetune --help` documents them. Defaults
    are chosen from the data and the device. Nothing is printed unless `progress` is set.

    data      a folder, .csv, .parquet, .zip, .tar, .npz, shards (folder or URL) or "digits"
    weights   the pretrained model to start from, or `model` to train one from scratch
    steps     the number of training steps, or `epochs`
    set       overrides of recipe fields: {"schedule.warmup": 10, "mixup": 0.2}
    folds     cross-validation with so many folds before the final run; `Run.folds` has their accuracies
    plan      return the plan with its choices, time and memory, without training
    progress  print choices, warnings and training progress, also in a notebook

    >>> import vitkit
    >>> tiny = {"model_options": "width=32,depth=1,heads=2,hidden=32", "schedule.warmup": 1}
    >>> run = vitkit.finetune("digits", model="ViT-Ti/4", image_size=8, steps=4, batch=16, set=tiny)
    >>> run.metrics.images, run.recipe.batch, str(run.folder)
    (179, 16, 'runs/digits')
    >>> plan = vitkit.finetune("digits", plan=True, model="ViT-Ti/4", image_size=16, steps=4, batch=16)
    >>> plan.steps, str(plan.out)  # other options, another run
    (4, 'runs/digits-2')
    """
    checked = training_options(options, plan=plan, seeds=seeds)
    return run_or_plan(
        finetuning(data_path(data), checked, protocol=protocol, seeds=seeds, folds=folds), progress
    )


@overload
def pretrain(
    data: Place, *, plan: Literal[False] = ..., progress: bool = ..., **options: Unpack[TrainingOptions]
) -> Run: ...


@overload
def pretrain(
    data: Place, *, plan: Literal[True], progress: bool = ..., **options: Unpack[TrainingOptions]
) -> Plan: ...


@overload
def pretrain(
    data: Place, *, plan: bool, progress: bool = ..., **options: Unpack[TrainingOptions]
) -> Run | Plan: ...


@with_signature
def pretrain(
    data: Place, *, plan: bool = False, progress: bool = False, **options: Unpack[TrainingOptions]
) -> Run | Plan:
    """Pre-train a model with a published recipe; options and result as for `finetune`.

    task    what to learn: with a task that needs no labels, `data` may be images in any folders

    >>> import vitkit
    >>> plan = vitkit.pretrain("digits", model="ViT-Ti/4", image_size=8, epochs=2, batch=64, plan=True)
    >>> plan.steps, plan.recipe.name, plan.state.action
    (46, 'pretrain', 'create')
    """
    return run_or_plan(pretraining(data_path(data), training_options(options, plan=plan)), progress)


def run_or_plan(request: Request, progress: bool) -> Run | Plan:
    outcome: Outcome = execute(request, progress=progress)
    return outcome.plan if outcome.result is None else Run(outcome.plan.out)


def evaluate(
    model: Model | Place,
    data: Place,
    *,
    split: str | None = None,
    batch: int = 32,
    classes: Place = "",
    real: Place = "",
    view: str = "model",
    tta: Tta = "none",
    merge_tokens: int = 0,
    reject: bool | float | None = None,
    labels: bool | str | Iterable[str] | None = None,
    template: str | Iterable[str] = (),
    workers: int | None = None,
    device: str = "auto",
    progress: bool = False,
) -> Metrics:
    """Metrics on images that the model was not trained on, as `vitkit evaluate --json` prints them.

    model  a model, a Run, a run folder, a model file or a published name. A run recognizes its images: on
           its own data, only its test images are evaluated unless `split` is given.
    tta, merge_tokens, reject  as in `vitkit.predict`; with `reject`, "rejection" has the share of accepted
           images and the accuracy on them
    labels, template  zero-shot classification as in `vitkit.predict`; labels=True: the classes of the data

    >>> import vitkit
    >>> metrics = vitkit.evaluate("runs/digits", "digits", workers=0)
    >>> metrics.images, metrics["split"], sorted(metrics["per_class"])[:2]
    (179, 'test', ['0', '1'])
    """
    options = EvaluateOptions(
        split=split, batch=batch, classes=as_text(classes), real=as_text(real), view=view, tta=tta,
        merge_tokens=merge_tokens, reject=as_reject(reject), workers=workers, device=device,
        labels=as_labels(labels), template=as_texts(template),
    )  # fmt: skip
    check_options(typing.get_type_hints(EvaluateOptions), vars(options))
    evaluation = measure(
        model_or_path(model), data_path(data), options, say=warn if progress else ignore, quiet=not progress
    )
    return Metrics(evaluation.facts, evaluation.notes)


def as_labels(value: bool | str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The argument `labels` as --labels takes it; None: no zero-shot classification."""
    if value is None or isinstance(value, bool):
        return () if value else None
    return texts_of(value, "labels")


def as_reject(value: bool | float | None) -> str | None:
    """The argument `reject` as --reject takes it; None: no threshold."""
    if value is None or value is False:
        return None
    text = STORED if value is True else str(value)
    parse_reject(text)
    return text


def model_or_path(model: object) -> Model | str:
    if isinstance(model, Model):
        return model
    if isinstance(model, str | os.PathLike):
        return str(os.fspath(model))
    raise Error(
        "model must be a vitkit model, a Run, a run folder, a model file or a published name, "
        f"not {type(model).__name__}",
        code="request.value",
    )


def ignore(text: str) -> None:
    """Discard a message."""


@overload
def embed(
    model: Model | Place, images: None = ..., *, text: str | Iterable[str], out: None = ..., device: str = ...
) -> np.ndarray: ...


@overload
def embed(
    model: Model | Place, images: Picture | Iterable[Picture], *, out: None = ..., batch: int = ...,
    merge_tokens: int = ..., view: str = ..., device: str = ...,
) -> np.ndarray: ...  # fmt: skip


@overload
def embed(
    model: Model | Place, images: Place | Iterable[Place], *, out: Place, batch: int = ...,
    merge_tokens: int = ..., view: str = ..., device: str = ..., progress: bool = ...,
    **options: Unpack[EmbedOptions],
) -> Written: ...  # fmt: skip


def embed(
    model: Model | Place,
    images: Any = None,
    *,
    text: str | Iterable[str] | None = None,
    out: Place | None = None,
    batch: int = 64,
    merge_tokens: int = 0,
    view: str = "model",
    device: str = "auto",
    progress: bool = False,
    **options: Unpack[EmbedOptions],
) -> np.ndarray | Written:
    """Features, the input of the model's head: float32 of shape (D,) for one image, (N, D) for several.

    images  a path, the bytes of a file, a PIL image or uint8 pixels (height, width, 3); or several of them
    text    instead of images a text or several, for the text tower of a CLIP or SigLIP model, whose
            embeddings can be compared with those of images by their cosine similarity
    out     write them to this .parquet or .npz file instead, as `vitkit embed` does with the same options;
            `images` is then any data: a folder, an archive, shards, an address, or several. The same call
            continues one that was killed.

    >>> import numpy as np, vitkit
    >>> grey = np.full((8, 8, 3), 128, np.uint8)
    >>> vitkit.embed("runs/digits", [grey, grey]).shape
    (2, 32)
    >>> done = vitkit.embed("runs/digits", "digits", out="digits.npz", restart=True)
    >>> done.images, done.unreadable, np.load(done.path)["embedding"].shape
    (1797, 0, (1797, 32))
    """
    given: dict[str, Any] = {"batch": batch, "merge_tokens": merge_tokens, "view": view, "device": device}
    given |= options
    check_options(typing.get_type_hints(BulkRequest), given)
    model = model_or_path(model)
    if text is not None:
        return text_features(model, text, device, {"images": images, "out": out, **options})
    if images is None:
        raise Error("embed: give images or text", code="request.missing")
    if out is not None:
        request = BulkRequest(verb="embed", model=model, places=as_texts(images), out=Path(out), **given)
        return run_bulk(request, quiet=not progress)
    if options:
        raise Error(f"{', '.join(options)}: only with out=FILE", code="request.conflict")
    return image_features(features_model(model, device, view, merge_tokens), images, batch)


def image_features(encoder: Model, images: Picture | Iterable[Picture], batch: int) -> np.ndarray:
    """The features (D,) of an image, or (N, D) of several."""
    if is_picture(images):
        return features(encoder, view_of(images, encoder)[None]).numpy()[0]
    rows = []
    remaining = iter(cast(Iterable[Picture], images))
    while views := [view_of(image, encoder) for image in islice(remaining, batch)]:
        rows.append(features(encoder, torch.stack(views)))
    if not rows:  # no images: an empty array with the right number of columns
        blank = torch.zeros(1, encoder.config.channels, *encoder.config.image_size, dtype=torch.uint8)
        rows.append(features(encoder, blank)[:0])
    return torch.cat(rows).numpy()


def text_features(
    model: Model | str, text: str | Iterable[str], device: str, others: dict[str, Any]
) -> np.ndarray:
    """The embedding (D,) of a text, or (N, D) of several; `others` must be empty."""
    if given := [name for name, value in others.items() if value is not None]:
        raise Error(f"text: omit {', '.join(given)}", code="request.conflict")
    tower = text_tower(loaded(model, device, text=True), "text")
    values = embed_texts(tower, texts_of(text, "text")).numpy()
    alone = isinstance(text, str) and len(values) == 1 and not text.endswith(".txt")
    return values[0] if alone else values


def inspect_model(
    model: Model | Place,
    images: Picture | Iterable[Picture] = (),
    *,
    most: int = 128,
    layer: int = -1,
    image_size: Size | None = None,
    device: str = "auto",
) -> Inspection:
    """What a ViT has learned, as `vitkit inspect` shows it: filters and position embeddings, and with images
    the attention distance of its heads and attention maps. `vitkit.inspect` looks at one image.

    images  a path of an image, a folder or a data set such as "digits"; or several pictures in any form
    most    if there are more images, so many from all over them
    layer   the layer of the attention heads that are drawn

    >>> import vitkit
    >>> result = vitkit.inspect_model("runs/digits", "digits", most=4)
    >>> result.arrays["position_similarity"].shape, result.facts["images"], list(result.figures)[0]
    ((1, 2, 2, 2, 2), 4, 'filters')
    """
    size = None if image_size is None else as_text(image_size)
    check_options(
        {"image_size": str | None, "device": str, "most": int},
        {"image_size": size, "device": device, "most": most},
    )
    if most < 1:
        raise Error(f"most={most}: expected 1 or more", code="request.value")
    vit = transformer(whole := loaded(place := model_or_path(model), device))
    check_layer(vit, layer)
    name = place if isinstance(place, str) else ""
    pictures = evenly_chosen(as_pictures(images), most)
    pixels = parse_size(size) or vit.config.image_size
    result = inspection(vit, name, pictures if pictures.names else None, pixels, layer, [], quiet=True)
    note_dense(whole, result.facts["skipped"])
    return result


def as_pictures(images: Picture | Iterable[Picture]) -> Pictures:
    """The images at a place, or those that are given, which are read on demand."""
    if isinstance(images, str | os.PathLike):
        return find_pictures((as_text(images),))
    given = [images] if is_picture(images) else list(cast(Iterable[Picture], images))
    names = [name_of(picture) or f"image {number}" for number, picture in enumerate(given)]
    return Pictures(names, lambda i: content_of(given[i]))


def export(
    model: Model | Place,
    out: Place,
    *,
    precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32",
    calibrate: Place | Sequence[Place] = (),
    image_size: Size | None = None,
    strict_size: bool = False,
    merge_tokens: int = 0,
    any_size: bool = False,
    pixels: bool = False,
    compiled: bool = False,
    images: Place | Sequence[Place] = (),
    overwrite: bool = False,
    device: str = "auto",
    progress: bool = False,
) -> Exported:
    """Export a model as .onnx, .pt2 or .xml; the file is written only if its outputs match the model's.

    >>> import numpy as np, vitkit
    >>> done = vitkit.export("runs/digits", "digits.onnx", overwrite=True)
    >>> done.format, done.output, len(vitkit.predict("digits.onnx", np.zeros((8, 8, 3), np.uint8)))
    ('ONNX', 'logits', 5)
    """
    size = None if image_size is None else as_text(image_size)
    check_options(
        {"image_size": str | None, "device": str, "merge_tokens": int},
        {"image_size": size, "device": device, "merge_tokens": merge_tokens},
    )
    return export_loaded(
        model_or_path(model), Path(out), device, say=warn if progress else ignore, precision=precision,
        calibrate=as_texts(calibrate), image_size=parse_size(size), strict_size=strict_size,
        merge_tokens=merge_tokens, any_size=any_size, pixels=pixels, compiled=compiled,
        images=as_texts(images), overwrite=overwrite, quiet=not progress,
    )  # fmt: skip


def push(
    model: Model | Place,
    repo: str,
    *,
    format: Literal["hf", "timm", "vitkit"] | None = None,
    private: bool = False,
    message: str = "",
    license: str = "",
    dry_run: Place | None = None,
    progress: bool = False,
) -> Pushed:
    """Push a model, a Run or a run folder to "owner/name" on the Hugging Face Hub, as `vitkit push` does.

    dry_run  a new folder to write the files to, instead of the upload

    >>> import vitkit
    >>> vitkit.push("runs/digits", "me/digits", format="timm", dry_run="digits-hub").files
    ('README.md', 'config.json', 'model.safetensors')
    """
    known = typing.get_args(typing.get_type_hints(push)["format"])[0]
    if format is not None and format not in typing.get_args(known):
        raise Error(
            f"format={format!r}: expected one of {', '.join(typing.get_args(known))}", code="request.value"
        )
    folder = None if dry_run is None else Path(dry_run)
    return push_model(
        model_or_path(model), repo, format=format, private=private, message=message, license=license,
        dry_run=folder, note=warn if progress else ignore,
    )  # fmt: skip
