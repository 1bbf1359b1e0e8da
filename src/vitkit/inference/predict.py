"""Images to labels and probabilities, with the preprocessing that the model carries."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from vitkit.data.views import View, apply, normalise
from vitkit.errors import Error
from vitkit.inference.per_core import per_core
from vitkit.models.card import Origin, Preprocessing, with_view
from vitkit.models.variants import Config, Model
from vitkit.options import parse_view
from vitkit.runtime.runtime import choose_runtime
from vitkit.tasks.task import Answer, task_of
from vitkit.weights.load import load
from vitkit.weights.locate import WEIGHTS, is_exported

BATCH = 32  # images that are computed together
Answers = list[tuple[str, float]]  # (label, probability), the likeliest first


class Classifier(Protocol):
    """What an answer needs of a model: a ViT and a ResNet are such, and so is an exported file."""

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


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image, or why it says nothing."""

    image: str
    answer: Answer | None = None
    error: str = ""

    @property
    def top(self) -> tuple[tuple[str, float], ...]:
        """The likeliest labels of a classifier, with their probabilities."""
        return getattr(self.answer, "top", ())

    def to_json(self) -> dict[str, Any]:
        if self.answer is None:
            return {"image": self.image, "error": self.error}
        return {"image": self.image, **self.answer.to_json()}


def evaluation_view(preprocessing: Preprocessing, size: tuple[int, int]) -> View:
    """The view that a model's own preprocessing asks for."""
    if preprocessing.resize == "squash":
        return View(size=size, crop="squash", interpolation=preprocessing.interpolation)
    resize = round(max(size) / preprocessing.crop)  # of the shorter side: no crop is larger than that
    return View(size=size, crop="centre", resize=resize, interpolation=preprocessing.interpolation)


def view_in_words(preprocessing: Preprocessing, size: tuple[int, int]) -> str:
    """How a picture is brought to a size, in a few words."""
    view = evaluation_view(preprocessing, size)
    if view.crop == "squash":
        return f"squashed to {size[0]}x{size[1]} ({view.interpolation})"
    return f"shorter side to {view.resized}, then the central {size[0]}x{size[1]} ({view.interpolation})"


def pixels(content: bytes | np.ndarray, model: Classifier) -> Tensor:
    """An encoded image, or its pixels, as the model wants it, uint8 (3, h, w)."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    return apply(content, view, np.random.default_rng(0))  # such a view chooses nothing


def logits(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to logits, computed on the model's device."""
    return per_core(partial(logits_together, model), model, images)


@torch.no_grad()  # not inference_mode: a model that is spread over processes could not be trained after it
def logits_together(model: Model, images: Tensor) -> Tensor:
    return model(ready(model, images)).float().cpu()


def features(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to what the head sees, (B, D), likewise."""
    return per_core(partial(features_together, model), model, images)


@torch.no_grad()  # not inference_mode: something may be learned from them
def features_together(model: Model, images: Tensor) -> Tensor:
    return model.features(ready(model, images)).float().cpu()


def ready(model: Model, images: Tensor) -> Tensor:
    """On the model's device, as numbers of the range that it was trained with."""
    device = next(model.parameters()).device
    return normalise(images.to(device), model.preprocessing.mean, model.preprocessing.std)


@overload
def predict(  # type: ignore[overload-overlap]  # a text is a path, not a sequence of letters
    model: Classifier | str | os.PathLike[str], image: Picture, top: int = 5
) -> Answers: ...


@overload
def predict(
    model: Classifier | str | os.PathLike[str], image: Iterable[Picture], top: int = 5
) -> list[Answers]: ...


def predict(
    model: Classifier | str | os.PathLike[str], image: Picture | Iterable[Picture], top: int = 5
) -> Answers | list[Answers]:
    """[(label, probability), ...] of an image, the likeliest first; of several images a list of those.

    A model of another task than classification answers with the value of that task.

    model  a model, or where it lies: a model file, a run folder, a published name, or an .onnx or .xml file
           that `vitkit export` wrote. A path is opened at every call: load a model once to use it often.
    image  a path, the bytes of a file, a PIL image or uint8 pixels (height, width, 3); or a list of such
    """
    if top < 1:
        raise Error(f"top must be at least 1, not {top}")
    model = opened_model(model)
    task, compute = task_of(model), engine_of(model)
    task.check_head(model)
    if is_picture(image):
        return task.answers(model, compute(view_of(image, model)[None]), top)[0].value
    values: list[Answers] = []
    rest = iter(cast(Iterable[Picture], image))
    while batch := [view_of(one, model) for one in islice(rest, BATCH)]:
        values += [answer.value for answer in task.answers(model, compute(torch.stack(batch)), top)]
    return values


def opened_model(model: Classifier | str | os.PathLike[str]) -> Classifier:
    """A model, or the one that lies at a path."""
    if isinstance(model, str | os.PathLike):
        if is_exported(model):
            from vitkit.inference.exported import open_exported  # another runtime, only where it is needed

            return open_exported(model)
        return load(Path(model) if isinstance(model, os.PathLike) else model)
    if not hasattr(model, "preprocessing"):
        raise Error(
            "model must be a vitkit model, or a model file, a run folder or a published name, "
            f"not {type(model).__name__}"
        )
    return model


def engine_of(model: Classifier) -> Callable[[Tensor], Tensor]:
    """What computes a model's logits: an exported file by itself, another model in torch."""
    if isinstance(model, Model):
        model.eval()
        return partial(logits, model)
    return model.logits  # type: ignore[attr-defined]


def view_of(image: Picture, model: Classifier) -> Tensor:
    """A picture as the model wants it; what cannot be read is named."""
    content = content_of(image)
    try:
        return pixels(content, model)
    except BadImage as error:
        name = name_of(image)
        raise BadImage(error.reason, f"{name}: {error}" if name else str(error)) from None


def find_images(places: Iterable[str], outside: Path | None = None) -> list[str]:
    """Files, the images in folders, and what globs match, each once and in this order.

    outside: a folder whose images do not count, unless a place in it is given: one that is written to.
    """
    found: dict[str, None] = {}
    for place in places:
        path = Path(place)
        if path.is_dir():
            inside = sorted(n for n in walk(path) if n.lower().endswith(SUFFIXES))
            there = [str(path / name) for name in inside]
        elif path.exists() or not glob.has_magic(place):
            there = [place]
        else:
            there = sorted(glob.glob(place, recursive=True))
        if outside and not lies_in(place, outside):
            there = [name for name in there if not lies_in(name, outside)]
        found |= dict.fromkeys(there)
    if not found:
        raise Error(f"no image at {', '.join(map(repr, places))}", code="data.empty")
    return list(found)


def lies_in(place: str, folder: Path) -> bool:
    return Path(place).resolve().is_relative_to(folder.resolve())


def predict_many(
    model: Classifier,
    images: Iterable[str],
    *,
    top: int = 5,
    batch: int = BATCH,
    threads: int = 4,
    engine: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Prediction]:
    """A prediction for each image, in order; one that cannot be read is named and the others are done.

    While the model works on a batch, `threads` read and decode the next one, and no more than that: of a
    million images two batches are in memory. engine: see inference/engines.py; plain torch if None.
    """
    compute = engine or engine_of(model)
    rest = iter(images)
    pool = ThreadPoolExecutor(threads)

    def begin() -> list[tuple[str, Future[Tensor]]]:
        return [(name, pool.submit(from_file, name, model)) for name in islice(rest, batch)]

    try:
        ahead = begin()
        while ahead:
            made, ahead = [(name, opened(future)) for name, future in ahead], begin()
            for prediction in answers(model, made, top, compute):
                advance()
                yield prediction
    finally:
        pool.shutdown(cancel_futures=True)  # whoever wants no more does not wait for the rest


def from_file(name: str, model: Classifier) -> Tensor:
    return pixels(read(Path(name)), model)


def opened(future: Future[Tensor]) -> Tensor | BadImage:
    try:
        return future.result()
    except BadImage as error:
        return error


def answers(
    model: Classifier,
    made: list[tuple[str, Tensor | BadImage]],
    top: int,
    compute: Callable[[Tensor], Tensor],
) -> list[Prediction]:
    """What the model says of a batch, and of those that could not be read, why."""
    good = [image for _, image in made if isinstance(image, Tensor)]
    said = iter(task_of(model).answers(model, compute(torch.stack(good)), top) if good else [])
    return [
        Prediction(name, error=str(image)) if isinstance(image, BadImage) else Prediction(name, next(said))
        for name, image in made
    ]


def load_model(place: str, device: str, view: str = "model") -> Model:
    """A model file, a run folder, a Hugging Face folder or a published name, on its device.

    view: how images are brought to its size, where that is not to be as the model's own card has it.
    """
    model = load(place).to(choose_runtime(device, "fp32").device).eval()
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return model


def short_names(places: Iterable[str]) -> dict[str, str]:
    """How a figure names models: a file or a run folder by its own name, if no two have the same."""
    found = {}
    for place in places:
        path = Path(place)
        named = path.parent.name if path.name == WEIGHTS[0] else path.stem
        found[place] = path.name if path.is_dir() else named if path.is_file() else place
    return found if len(set(found.values())) == len(found) else {place: place for place in found}
