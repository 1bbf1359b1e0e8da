"""Prediction: images to labels and probabilities, with the model's own preprocessing."""

import copy
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast, overload

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, read
from vitkit.data.names import SUFFIXES
from vitkit.data.pictures import Picture, content_of, is_picture, name_of
from vitkit.data.sources.source import walk
from vitkit.data.views import View, apply, normalise, sized
from vitkit.errors import Error
from vitkit.inference.per_core import per_core
from vitkit.inference.rejection import rejection_threshold
from vitkit.inference.tta import VIEWS, Tta, augmented, check_tta, size_before
from vitkit.inference.zero_shot import zero_shot
from vitkit.models.card import Origin, Preprocessing, shorter_side, with_view
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT
from vitkit.options import parse_view
from vitkit.runtime.runtime import choose_runtime
from vitkit.tasks.shared.image_windows import covering_image, in_image_windows
from vitkit.tasks.task import Answer, Sizes, task_of
from vitkit.weights.load import load
from vitkit.weights.locate import WEIGHTS, is_exported

BATCH = 32
Answers = list[tuple[str, float]]  # (label, probability), most likely first


class Classifier(Protocol):
    """What prediction needs from a model: a ViT, a ResNet or an exported file."""

    @property
    def config(self) -> Config: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def task(self) -> str: ...
    @property
    def preprocessing(self) -> Preprocessing: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def reject_below(self) -> float: ...


@dataclass(frozen=True)
class Prepared:
    """An image as a model takes it, and the size that it had before."""

    pixels: Tensor  # uint8 (3, h, w)
    size: tuple[int, int]  # height, width


@dataclass(frozen=True)
class Prediction:
    """The answer for one image, or the reason why there is none."""

    image: str
    answer: Answer | None = None
    error: str = ""

    @property
    def top(self) -> tuple[tuple[str, float], ...]:
        """The most likely labels of a classifier, with their probabilities."""
        return getattr(self.answer, "top", ())

    def to_json(self) -> dict[str, Any]:
        if self.answer is None:
            return {"image": self.image, "error": self.error}
        return {"image": self.image, **self.answer.to_json()}


def evaluation_view(preprocessing: Preprocessing, size: tuple[int, int], tta: str = "none") -> View:
    """The deterministic transform of a model's own preprocessing; tta: see inference/tta.py."""
    size, least = size_before(size, tta), shorter_side(size, preprocessing)
    if preprocessing.resize in ("squash", "fit", "windows"):
        crop = "fit" if preprocessing.resize == "windows" else preprocessing.resize
        return View(size=size, crop=crop, interpolation=preprocessing.interpolation)
    resize = max(least, *size)
    return View(size=size, crop="centre", resize=resize, interpolation=preprocessing.interpolation)


def describe_view(preprocessing: Preprocessing, size: tuple[int, int], tta: str = "none") -> str:
    """How an image is resized and cropped, as a phrase for a report."""
    view = evaluation_view(preprocessing, size, tta)
    height, width = view.size
    if preprocessing.resize == "windows":
        return f"resized to cover {height}x{width}, in windows of this size ({view.interpolation})"
    more = f"; mean over {VIEWS[tta]}" if tta != "none" else ""
    if view.crop == "squash":
        return f"squashed to {height}x{width} ({view.interpolation}){more}"
    if view.crop == "fit":
        return f"resized to fit {height}x{width}, padded ({view.interpolation}){more}"
    return f"shorter side to {view.resized}, then the central {height}x{width} ({view.interpolation}){more}"


def pixels(content: bytes | np.ndarray, model: Classifier, tta: str = "none") -> Tensor:
    """An encoded image, or its pixels, resized and cropped for the model: uint8 (3, h, w)."""
    return prepared(content, model, tta).pixels


def prepared(content: bytes | np.ndarray, model: Classifier, tta: str = "none") -> Prepared:
    """The same with the size of the image itself."""
    view = evaluation_view(model.preprocessing, model.config.image_size, tta)
    content, size = sized(content)
    if model.preprocessing.resize == "windows":
        return Prepared(covering_image(content, size, model.config, model.preprocessing), size)
    return Prepared(apply(content, view, np.random.default_rng(0)), size)  # the view draws nothing at random


def logits(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to logits, computed on the model's device, returned on the CPU."""
    return per_core(partial(forward_logits, model), model, images)


@torch.no_grad()  # not inference_mode: a sharded model could not be trained afterwards
def forward_logits(model: Model, images: Tensor) -> Tensor:
    return model(prepare_batch(model, images)).float().cpu()


def features(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to the input of the head, (B, D), returned on the CPU."""
    return per_core(partial(forward_features, model), model, images)


@torch.no_grad()  # not inference_mode: a classifier may be trained on the features
def forward_features(model: Model, images: Tensor) -> Tensor:
    return model.features(prepare_batch(model, images)).float().cpu()


def prepare_batch(model: Model, images: Tensor) -> Tensor:
    """uint8 images on the model's device, normalised with its mean and standard deviation."""
    device = next(model.parameters()).device
    return normalise(images.to(device), model.preprocessing.mean, model.preprocessing.std)


@overload
def predict(  # type: ignore[overload-overlap]  # a text is a path, not a sequence of letters
    model: Classifier | str | os.PathLike[str], image: Picture, top: int = 5, *,
    labels: str | Iterable[str] | None = ..., template: str | Iterable[str] = ...,
    reject: bool | float | None = ..., tta: Tta = ..., merge_tokens: int = ...,
) -> Answers: ...  # fmt: skip


@overload
def predict(
    model: Classifier | str | os.PathLike[str], image: Iterable[Picture], top: int = 5, *,
    labels: str | Iterable[str] | None = ..., template: str | Iterable[str] = ...,
    reject: bool | float | None = ..., tta: Tta = ..., merge_tokens: int = ...,
) -> list[Answers]: ...  # fmt: skip


def predict(
    model: Classifier | str | os.PathLike[str], image: Picture | Iterable[Picture], top: int = 5, *,
    labels: str | Iterable[str] | None = None, template: str | Iterable[str] = (),
    reject: bool | float | None = None, tta: Tta = "none", merge_tokens: int = 0,
) -> Answers | list[Answers]:  # fmt: skip
    """[(label, probability), ...] for an image, most likely first; for several images a list of such lists.

    A detector returns its boxes, [{"label", "score", "box": [left, top, right, bottom]}, ...], in pixels of
    the image, a segmenter the class number of each pixel, a uint8 array (height, width), and a model of
    another task what that task answers.

    model   a model, or its path: a model file, a run folder, a published name, or an .onnx or .xml file
            that `vitkit export` wrote. A path is loaded at every call: use `vitkit.load` once instead.
    image   a path, the bytes of a file, a PIL image or uint8 pixels (height, width, 3); or a list of these
    labels  zero-shot classification with a CLIP or SigLIP model that has its text tower: the labels to choose
            from, each put into one or more texts ("a photo of a {}."). For many calls use `vitkit.zero_shot`.
    template  with `labels`: the texts, with {} where the label goes
    reject  answer [("unknown", probability)] if the probability of the likeliest label is below this number,
            or, with True, below the threshold of the model; of a detector, the minimum score of a box
    tta     test-time augmentation: mean over the image and its mirror ("flip"), or over five crops and their
            mirrors ("crops")
    merge_tokens  merge so many similar tokens in each layer (ToMe): faster, and a little less accurate
    """
    if top < 1:
        raise Error(f"top must be at least 1, not {top}")
    model = open_model(model) if labels is None else zero_shot_model(model, labels, template)
    model = with_merging(model, merge_tokens)
    task_of(model).check_head(model)
    check_tta(tta)
    below, compute = rejection_threshold(model, reject), augmented(engine_of(model), model, tta)
    values: list[Answers] = []
    images = iter([image] if is_picture(image) else cast(Iterable[Picture], image))
    while batch := [prepared_of(picture, model, tta) for picture in islice(images, BATCH)]:
        values += [answer.value for answer in compute_answers(model, batch, top, compute, below)]
    return values[0] if is_picture(image) else values


def answers_of(
    model: Classifier, values: Tensor, top: int, below: float | None = None, sizes: Sizes = ()
) -> list[Answer]:
    """The answers for the outputs (B, ...) of a model; with a threshold, "unknown" where it is not reached.

    sizes: of the images themselves, for answers about places in them.
    """
    task = task_of(model)
    if task.targets:
        answers = task.answers(model, values, top, sizes=sizes)
    else:  # a task of a user may not know sizes
        answers = task.answers(model, values, top)
    return [answer.reject(below) for answer in answers]


def open_model(model: Classifier | str | os.PathLike[str]) -> Classifier:
    """Load a model from a path; a model is returned as it is."""
    if isinstance(model, str | os.PathLike):
        if is_exported(model):
            from vitkit.inference.exported import open_exported  # lazy import: needs another runtime

            return open_exported(model)
        return load(Path(model) if isinstance(model, os.PathLike) else model)
    if not hasattr(model, "preprocessing"):
        raise Error(
            "model must be a vitkit model, a model file, a run folder or a published name, "
            f"not {type(model).__name__}"
        )
    return model


def zero_shot_model(
    model: Classifier | str | os.PathLike[str], labels: str | Iterable[str], template: str | Iterable[str]
) -> Model:
    """The classifier of a model, or of the model at a path, for these labels."""
    if is_exported(model):
        raise Error(
            f"{model}: labels= needs the model with its text tower, not an exported file",
            code="model.unsupported",
        )
    if isinstance(model, str | os.PathLike):
        model = load(Path(model) if isinstance(model, os.PathLike) else model, text=True)
    return zero_shot(model, labels, template)  # type: ignore[arg-type]


def with_merging(model: Classifier, merge_tokens: int) -> Classifier:
    """The model with so many tokens merged in each layer, sharing its parameters; 0: the model as it is."""
    if not merge_tokens:
        return model
    if isinstance(model, DenseModel):
        raise Error(
            f"merge_tokens={merge_tokens}: a model for {model.task} needs the token of every patch; omit it",
            code="model.unsupported",
        )
    if not isinstance(model, ViT):
        exported = "" if isinstance(model, Model) else "; for an exported file give it to vitkit export"
        raise Error(f"merge_tokens={merge_tokens}: only a ViT has tokens{exported}", code="model.unsupported")
    c = model.config
    patches = c.tokens - c.prefix
    if merge_tokens > (most := patches // max(1, c.depth)):
        raise Error(
            f"merge_tokens={merge_tokens} in each of {c.depth} layers leaves almost no patch of {patches}; "
            f"use at most {most}",
            code="request.value",
        )
    shallow = copy.copy(model)
    shallow.config = replace(c, merge_tokens=merge_tokens)
    return shallow


def engine_of(model: Classifier) -> Callable[[Tensor], Tensor]:
    """The function that computes a model's logits: the runtime of an exported file, or torch."""
    if isinstance(model, Model):
        model.eval()
        return partial(logits, model)
    return model.logits  # type: ignore[attr-defined]


def view_of(image: Picture, model: Classifier, tta: str = "none") -> Tensor:
    """An image, resized and cropped for the model; the error for an unreadable one names it."""
    return prepared_of(image, model, tta).pixels


def prepared_of(image: Picture, model: Classifier, tta: str = "none") -> Prepared:
    """The same with the size of the image itself."""
    content = content_of(image)
    try:
        return prepared(content, model, tta)
    except BadImage as error:
        name = name_of(image)
        raise BadImage(error.reason, f"{name}: {error}" if name else str(error)) from None


def find_images(places: Iterable[str], outside: Path | None = None) -> list[str]:
    """Paths of images from files, folders and globs, in this order and without duplicates.

    outside: a folder that is being written to; its images are skipped unless a place inside it is given.
    """
    paths: dict[str, None] = {}
    for place in places:
        path = Path(place)
        if path.is_dir():
            names = sorted(n for n in walk(path) if n.lower().endswith(SUFFIXES))
            matches = [str(path / name) for name in names]
        elif path.exists() or not glob.has_magic(place):
            matches = [place]
        else:
            matches = sorted(glob.glob(place, recursive=True))
        if outside and not is_inside(place, outside):
            matches = [name for name in matches if not is_inside(name, outside)]
        paths |= dict.fromkeys(matches)
    if not paths:
        raise Error(f"no images found at {', '.join(map(repr, places))}", code="data.empty")
    return list(paths)


def is_inside(place: str, folder: Path) -> bool:
    return Path(place).resolve().is_relative_to(folder.resolve())


def predict_many(
    model: Classifier,
    images: Iterable[str],
    *,
    top: int = 5,
    batch: int = BATCH,
    threads: int = 4,
    engine: Callable[[Tensor], Tensor] | None = None,
    reject_below: float | None = None,
    tta: str = "none",
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Prediction]:
    """Yield a prediction for each image, in order; for an unreadable image it holds the error.

    While the model computes a batch, a thread pool decodes the next one and no more, so at most two batches
    are in memory. engine: see inference/engines.py; torch if None. reject_below, tta: see `predict`.
    """
    compute = augmented(engine or engine_of(model), model, tta)
    names = iter(images)
    pool = ThreadPoolExecutor(threads)

    def prefetch() -> list[tuple[str, Future[Prepared]]]:
        return [(name, pool.submit(from_file, name, model, tta)) for name in islice(names, batch)]

    try:
        pending = prefetch()
        while pending:
            decoded, pending = [(name, image_or_error(future)) for name, future in pending], prefetch()
            for prediction in predict_batch(model, decoded, top, compute, reject_below):
                advance()
                yield prediction
    finally:
        pool.shutdown(cancel_futures=True)  # a caller that stops early does not wait for the rest


def from_file(name: str, model: Classifier, tta: str = "none") -> Prepared:
    return prepared(read(Path(name)), model, tta)


def image_or_error(future: Future[Prepared]) -> Prepared | BadImage:
    try:
        return future.result()
    except BadImage as error:
        return error


def predict_batch(
    model: Classifier,
    images: list[tuple[str, Prepared | BadImage]],
    top: int,
    compute: Callable[[Tensor], Tensor],
    below: float | None = None,
) -> list[Prediction]:
    """A prediction for each image of a batch, with the error for each that could not be decoded."""
    good = [image for _, image in images if isinstance(image, Prepared)]
    answers = iter(compute_answers(model, good, top, compute, below) if good else [])
    return [
        Prediction(name, error=str(image)) if isinstance(image, BadImage) else Prediction(name, next(answers))
        for name, image in images
    ]


def compute_answers(
    model: Classifier,
    images: list[Prepared],
    top: int,
    compute: Callable[[Tensor], Tensor],
    below: float | None = None,
) -> list[Answer]:
    """The answers for some images, in one batch or each in its windows."""
    if model.preprocessing.resize == "windows":  # images of any size, each in batches of windows
        rows = ((in_image_windows(compute, one.pixels, model.config)[None], [one.size]) for one in images)
        return [answers_of(model, values, top, below, size)[0] for values, size in rows]
    values = compute(torch.stack([one.pixels for one in images]))
    return answers_of(model, values, top, below, [one.size for one in images])


def image_outputs(model: Model, content: bytes | np.ndarray) -> Tensor:
    """The outputs (1, ...) of a model for one image, as it sees it in an evaluation."""
    image, compute = prepared(content, model).pixels, partial(logits, model)
    if model.preprocessing.resize == "windows":
        return in_image_windows(compute, image, model.config)[None]
    return compute(image[None])


def load_model(place: str, device: str, view: str = "model", *, text: bool = False) -> Model:
    """Load a model file, a run folder, a Hugging Face folder or a published name onto a device.

    view: how images are resized and cropped; "model" keeps the model's own preprocessing. text: see `load`.
    """
    model = load(place, text=text).to(choose_runtime(device, "fp32").device).eval()
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    if model.preprocessing.resize == "windows" and model.task != "segment":
        raise Error(
            f"view windows is for segmentation, not for a model of the task {model.task}; omit it",
            code="request.conflict",
        )
    return model


def short_names(places: Iterable[str]) -> dict[str, str]:
    """place -> label in a figure: the name of the file or run folder, or the place if names repeat."""
    names = {}
    for place in places:
        path = Path(place)
        file_name = path.parent.name if path.name == WEIGHTS[0] else path.stem
        names[place] = path.name if path.is_dir() else file_name if path.is_file() else place
    return names if len(set(names.values())) == len(names) else {place: place for place in names}
