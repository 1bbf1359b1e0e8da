"""Images to labels and probabilities, with the preprocessing that the model carries."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, decode, read
from vitkit.data.sources import SUFFIXES, walk
from vitkit.data.views import View, apply, normalise
from vitkit.models.card import Preprocessing
from vitkit.models.variants import Model


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
    resize = round(min(size) / preprocessing.crop)
    return View(size=size, crop="centre", resize=resize, interpolation=preprocessing.interpolation)


def pixels(content: bytes, model: Model) -> Tensor:
    """An encoded image as the model wants it, uint8 (3, h, w)."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    return apply(decode(content), view, np.random.default_rng(0))  # such a view chooses nothing


@torch.inference_mode()
def logits(model: Model, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to logits, on the model's device."""
    device = next(model.parameters()).device
    ready = normalise(images.to(device), model.preprocessing.mean, model.preprocessing.std)
    return model(ready).float().cpu()


def predict(model: Model, image: str | os.PathLike | bytes, top: int = 5) -> list[tuple[str, float]]:
    """[(label, probability), ...] of one image, the likeliest first."""
    content = image if isinstance(image, bytes) else read(Path(image))
    return ranked(model, logits(model.eval(), pixels(content, model)[None]), top)[0]


def ranked(model: Model, values: Tensor, top: int) -> list[list[tuple[str, float]]]:
    names = model.labels or tuple(str(i) for i in range(values.shape[1]))
    best = values.softmax(-1).topk(min(top, values.shape[1]), dim=-1)
    return [
        [(names[i], p) for p, i in zip(chances, places, strict=True)]
        for chances, places in zip(best.values.tolist(), best.indices.tolist(), strict=True)
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
    images: list[str],
    *,
    top: int = 5,
    batch: int = 32,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Prediction]:
    """A prediction for each image, in order; one that cannot be read is named and the others are done."""
    model.eval()
    for at in range(0, len(images), batch):
        ready: dict[str, Tensor] = {}
        wrong: dict[str, str] = {}
        for name in images[at : at + batch]:
            try:
                ready[name] = pixels(read(Path(name)), model)
            except BadImage as error:
                wrong[name] = str(error)
        answers = ranked(model, logits(model, torch.stack(list(ready.values()))), top) if ready else []
        said = dict(zip(ready, answers, strict=True))
        for name in images[at : at + batch]:
            advance()
            yield (
                Prediction(name, error=wrong[name]) if name in wrong else Prediction(name, tuple(said[name]))
            )
