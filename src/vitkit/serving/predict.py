"""Images to labels and probabilities, with the preprocessing that the model carries."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, read
from vitkit.data.sources import SUFFIXES, walk
from vitkit.data.views import View, apply, normalise
from vitkit.models.card import Preprocessing
from vitkit.models.variants import Model
from vitkit.serving.abreast import abreast


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image, or why it says nothing."""

    image: str
    top: tuple[tuple[str, float], ...] = ()
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.error:
            return {"image": self.image, "error": self.error}
        top = [{"label": label, "probability": probability} for label, probability in self.top]
        return {"image": self.image, **top[0], "top": top}


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


def pixels(content: bytes, model: Model) -> Tensor:
    """An encoded image as the model wants it, uint8 (3, h, w)."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    return apply(content, view, np.random.default_rng(0))  # such a view chooses nothing


def logits(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to logits, computed on the model's device."""
    return abreast(partial(logits_together, model), model, images)


@torch.no_grad()  # not inference_mode: a model that is spread over processes could not be trained after it
def logits_together(model: Model, images: Tensor) -> Tensor:
    return model(ready(model, images)).float().cpu()


def features(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to what the head sees, (B, D), likewise."""
    return abreast(partial(features_together, model), model, images)


@torch.no_grad()  # not inference_mode: something may be learned from them
def features_together(model: Model, images: Tensor) -> Tensor:
    return model.features(ready(model, images)).float().cpu()


def ready(model: Model, images: Tensor) -> Tensor:
    """On the model's device, as numbers of the range that it was trained with."""
    device = next(model.parameters()).device
    return normalise(images.to(device), model.preprocessing.mean, model.preprocessing.std)


def check_head(model: Model) -> None:
    if not model.config.classes:
        source = model.origin.source or "it"
        raise ValueError(
            f"the model ({source}) has no head and tells no classes; fine-tune it first: "
            "vitkit finetune DATA --weights MODEL"
        )


def predict(model: Model, image: str | os.PathLike | bytes, top: int = 5) -> list[tuple[str, float]]:
    """[(label, probability), ...] of one image, the likeliest first."""
    check_head(model)
    content = image if isinstance(image, bytes) else read(Path(image))
    return list(ranked(model, logits(model.eval(), pixels(content, model)[None]), top)[0])


def ranked(model: Model, values: Tensor, top: int) -> list[tuple[tuple[str, float], ...]]:
    """Of each image the likeliest labels: out of all, or each for itself where an image may have several."""
    names = model.labels or tuple(str(i) for i in range(values.shape[1]))
    chances = values.sigmoid() if model.multilabel else values.softmax(-1)
    best = chances.topk(min(top, values.shape[1]), dim=-1)
    return [
        tuple((names[i], p) for p, i in zip(found, places, strict=True))
        for found, places in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def find_images(places: Iterable[str]) -> list[str]:
    """Files, the images in folders, and what globs match, each once and in this order."""
    found: dict[str, None] = {}
    for place in places:
        path = Path(place)
        if path.is_dir():
            inside = sorted(n for n in walk(path) if n.lower().endswith(SUFFIXES))
            found |= {str(path / name): None for name in inside}
        elif path.exists() or not glob.has_magic(place):
            found[place] = None
        else:
            found |= dict.fromkeys(sorted(glob.glob(place, recursive=True)))
    if not found:
        raise ValueError(f"no image at {', '.join(map(repr, places))}")
    return list(found)


def predict_many(
    model: Model,
    images: Iterable[str],
    *,
    top: int = 5,
    batch: int = 32,
    threads: int = 4,
    engine: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Prediction]:
    """A prediction for each image, in order; one that cannot be read is named and the others are done.

    While the model works on a batch, `threads` read and decode the next one, and no more than that: of a
    million images two batches are in memory. engine: see serving/engines.py; plain torch if None.
    """
    model.eval()
    compute = engine or (lambda images: logits(model, images))
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


def from_file(name: str, model: Model) -> Tensor:
    return pixels(read(Path(name)), model)


def opened(future: Future[Tensor]) -> Tensor | BadImage:
    try:
        return future.result()
    except BadImage as error:
        return error


def answers(
    model: Model,
    made: list[tuple[str, Tensor | BadImage]],
    top: int,
    compute: Callable[[Tensor], Tensor],
) -> list[Prediction]:
    """What the model says of a batch, and of those that could not be read, why."""
    good = [image for _, image in made if isinstance(image, Tensor)]
    said = iter(ranked(model, compute(torch.stack(good)), top) if good else [])
    return [
        Prediction(name, error=str(image)) if isinstance(image, BadImage) else Prediction(name, next(said))
        for name, image in made
    ]
