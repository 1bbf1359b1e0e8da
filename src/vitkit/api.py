"""The Python API of the commands: finetune, pretrain, evaluate, embed and export return values."""

import inspect
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

import numpy as np
import torch

from vitkit.commands.evaluate import EvaluateOptions, measure
from vitkit.commands.export import Exported, export_loaded
from vitkit.commands.finetune import Outcome, execute, finetuning, pretraining
from vitkit.commands.results import Metrics, Place, Run
from vitkit.commands.shared import loaded
from vitkit.data.pictures import Picture, is_picture
from vitkit.errors import Error, did_you_mean
from vitkit.inference.predict import features, view_of
from vitkit.models.variants import Model
from vitkit.options import Precision, Training, check_options, parse_size
from vitkit.planning.plan import Plan
from vitkit.planning.resume import Request
from vitkit.report.terminal import warn
from vitkit.weights.locate import is_exported

Size = int | tuple[int, int] | str  # 384, (384, 256) or "384x256": height and width


class TrainingOptions(TypedDict, total=False):
    """The options of `vitkit finetune` and `vitkit pretrain`, by the names of their flags."""

    weights: Place
    model: str
    out: Place | None
    recipe: str
    image_size: Size | None
    strict_size: bool
    batch: int | None
    steps: int | None
    epochs: float | None
    keep: Literal["best", "last"] | None
    patience: int | None
    lr: float | None
    seed: int | None
    subset: str | int | None
    corrections: Place
    against: Place | Sequence[Place]
    set: Mapping[str, object] | Sequence[str]
    device: str
    precision: Precision
    workers: int | None
    decoded: Place | None
    max_bad: float
    compile: bool
    recompute: bool
    cuda_graph: bool
    deterministic: bool
    parallel: Literal["auto", "ddp", "fsdp"]
    save_aside: bool
    track: str | Sequence[str]
    price_per_hour: float | None
    accept_changed_data: bool
    more_steps: int | None
    split_of: Place


Trains = TypeVar("Trains", bound=Callable[..., Any])


def with_signature(function: Trains) -> Trains:
    """Decorator that lists every option with its default in the signature, for help() and notebooks."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = typing.get_type_hints(TrainingOptions)
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
        for field in fields(Training)
        if (hint := hints.get(field.name))
    ]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@overload
def finetune(
    data: Place, *, protocol: bool = ..., seeds: int = ..., plan: Literal[False] = ..., progress: bool = ...,
    **options: Unpack[TrainingOptions],
) -> Run: ...  # fmt: skip


@overload
def finetune(
    data: Place, *, protocol: bool = ..., seeds: int = ..., plan: Literal[True], progress: bool = ...,
    **options: Unpack[TrainingOptions],
) -> Plan: ...  # fmt: skip


@overload
def finetune(
    data: Place, *, protocol: bool = ..., seeds: int = ..., plan: bool, progress: bool = ...,
    **options: Unpack[TrainingOptions],
) -> Run | Plan: ...  # fmt: skip


@with_signature
def finetune(
    data: Place,
    *,
    protocol: bool = False,
    seeds: int = 3,
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
    return run_or_plan(finetuning(data_path(data), checked, protocol=protocol, seeds=seeds), progress)


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
    """Pre-train a model from scratch with the paper's recipes; options and result as for `finetune`.

    >>> import vitkit
    >>> plan = vitkit.pretrain("digits", model="ViT-Ti/4", image_size=8, epochs=2, batch=64, plan=True)
    >>> plan.steps, plan.recipe.name, plan.state.action
    (46, 'pretrain', 'create')
    """
    return run_or_plan(pretraining(data_path(data), training_options(options, plan=plan)), progress)


def run_or_plan(request: Request, progress: bool) -> Run | Plan:
    outcome: Outcome = execute(request, progress=progress)
    return outcome.plan if outcome.result is None else Run(outcome.plan.out)


def training_options(options: Mapping[str, Any], *, plan: bool, **others: int) -> Training:
    """Keyword arguments as training options, checked like command-line flags; `others` are only checked."""
    known = {field.name for field in fields(Training)}
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise Error(
                f"unknown option {name!r};{hint} the options are {', '.join(sorted(known))}",
                code="request.unknown",
            )
    values = {name: as_option(name, value) for name, value in options.items()} | {"plan": plan}
    hints = typing.get_type_hints(Training, include_extras=True)
    check_options(hints | {"seeds": int}, values | others)
    return Training(**values)


def data_path(data: object) -> str:
    if not isinstance(data, str | os.PathLike):
        raise Error(
            f"data={data!r}: expected a path or the name of a data set".replace("\n", " "),
            code="request.value",
        )
    return as_text(data)


def as_option(name: str, value: Any) -> Any:
    """A Python value in command-line form: a size as text, a mapping as field=value."""
    if name == "set" and isinstance(value, Mapping):
        return tuple(f"{field}={as_text(content)}" for field, content in value.items())
    if name in ("set", "against", "track"):
        return as_texts(value)
    if name in ("out", "decoded"):
        return Path(value) if isinstance(value, str | os.PathLike) else value
    if name in ("image_size", "subset"):
        return None if value is None else as_text(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def as_texts(values: Place | Iterable[Place]) -> tuple[str, ...]:
    return tuple(map(as_text, (values,) if isinstance(values, str | os.PathLike) else values))


def as_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, tuple | list):
        return ("x" if all(type(part) is int for part in value) else ",").join(map(str, value))
    return str(value)


def evaluate(
    model: Model | Place,
    data: Place,
    *,
    split: str | None = None,
    batch: int = 32,
    classes: Place = "",
    real: Place = "",
    view: str = "model",
    workers: int | None = None,
    device: str = "auto",
    progress: bool = False,
) -> Metrics:
    """Metrics on images that the model was not trained on, as `vitkit evaluate --json` prints them.

    model  a model, a Run, a run folder, a model file or a published name. A run recognizes its images: on
           its own data, only its test images are evaluated unless `split` is given.

    >>> import vitkit
    >>> metrics = vitkit.evaluate("runs/digits", "digits", workers=0)
    >>> metrics.images, metrics["split"], sorted(metrics["per_class"])[:2]
    (179, 'test', ['0', '1'])
    """
    options = EvaluateOptions(
        split=split, batch=batch, classes=as_text(classes), real=as_text(real), view=view, workers=workers,
        device=device,
    )  # fmt: skip
    check_options(typing.get_type_hints(EvaluateOptions), vars(options))
    evaluation = measure(
        model_or_path(model), data_path(data), options, say=warn if progress else ignore, quiet=not progress
    )
    return Metrics(evaluation.facts, evaluation.notes)


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


def embed(
    model: Model | Place,
    images: Picture | Iterable[Picture],
    *,
    batch: int = 32,
    view: str = "model",
    device: str = "auto",
) -> np.ndarray:
    """Features, the input of the model's head: float32 of shape (D,) for one image, (N, D) for several.

    images  a path, the bytes of a file, a PIL image or uint8 pixels (height, width, 3); or several of them

    >>> import numpy as np, vitkit
    >>> grey = np.full((8, 8, 3), 128, np.uint8)
    >>> vitkit.embed("runs/digits", [grey, grey]).shape
    (2, 32)
    """
    options = EvaluateOptions(batch=batch, view=view, device=device)
    check_options(typing.get_type_hints(EvaluateOptions), vars(options))
    model = model_or_path(model)
    if is_exported(model):
        raise Error(
            f"{model}: an exported file computes no features; use the run folder or model file it was "
            "exported from",
            code="model.unsupported",
        )
    encoder = loaded(model, device, view).eval()
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


def export(
    model: Model | Place,
    out: Place,
    *,
    precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32",
    calibrate: Place | Sequence[Place] = (),
    image_size: Size | None = None,
    strict_size: bool = False,
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
    check_options({"image_size": str | None, "device": str}, {"image_size": size, "device": device})
    return export_loaded(
        model_or_path(model), Path(out), device, say=warn if progress else ignore, precision=precision,
        calibrate=as_texts(calibrate), image_size=parse_size(size), strict_size=strict_size,
        any_size=any_size, pixels=pixels, compiled=compiled, images=as_texts(images),
        overwrite=overwrite, quiet=not progress,
    )  # fmt: skip
