"""Pictures to compare a graph on: given ones, or clouds with the spectrum of photographs, and digits."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, read
from vitkit.data.names import DATA_SUFFIXES
from vitkit.data.sources import digits
from vitkit.data.views import apply
from vitkit.datasets.opening import open_data
from vitkit.errors import Error
from vitkit.models.variants import Model
from vitkit.report.terminal import warn
from vitkit.serving.predict import evaluation_view, find_images

Unread = Callable[[list[tuple[str, str]], int], None]  # names and reasons, and of how many images


def sample_images(
    model: Model,
    count: int = 8,
    *,
    size: tuple[int, int] | None = None,
    places: Sequence[str] = (),
    unread: Unread = lambda bad, total: None,
) -> Tensor:
    """uint8 (B, 3, h, w) as the model's own preprocessing makes them: of files or data, or generated ones.

    Images that cannot be read are left out and handed to `unread`; an error if none is left.
    """
    view = evaluation_view(model.preprocessing, size or model.config.image_size)
    rng = np.random.default_rng(0)
    if not places:
        return torch.stack([apply(picture, view, rng) for picture in generated(count)])
    made: list[Tensor] = []
    bad: list[tuple[str, str]] = []
    chosen = given(places, count)
    for name, content in chosen:
        try:
            made.append(apply(content(), view, rng))
        except BadImage as error:
            bad.append((name, str(error)))
    if not made:
        name, reason = bad[0]
        raise Error(
            f"none of {len(bad)} images could be read; the first, {name}: {reason}", code="image.unreadable"
        )
    if bad:
        unread(bad, len(chosen))
    return torch.stack(made)


def warn_unread(bad: list[tuple[str, str]], total: int) -> None:
    """One line on the images that were left out."""
    name, reason = bad[0]
    warn(f"{len(bad)} of {total} images could not be read and were left out; the first, {name}: {reason}")


def given(places: Sequence[str], count: int) -> list[tuple[str, Callable[[], bytes | np.ndarray]]]:
    """Some of the images there, spread over all of them: the first alone might be of one class."""
    if len(places) == 1 and (places[0] == "digits" or places[0].endswith(DATA_SUFFIXES)):
        parts = open_data(places[0])
        source = parts.get("train") or next(iter(parts.values()))
        return [(source.keys[n], partial(source.fetch, int(n))) for n in spread(len(source), count)]
    names = find_images(places)
    return [(names[n], partial(read, Path(names[n]))) for n in spread(len(names), count)]


def spread(total: int, count: int) -> np.ndarray:
    """At most `count` places, evenly over a length."""
    return np.linspace(0, total - 1, min(total, count)).astype(int)


def generated(count: int) -> list[np.ndarray]:
    """Clouds, and a quarter of them digits, which the view enlarges."""
    source = digits()
    return [
        *(clouds(n) for n in range(count - count // 4)),
        *(np.asarray(source.fetch(n)) for n in range(count // 4)),
    ]


def clouds(seed: int, side: int = 256) -> np.ndarray:
    """A picture whose spectrum falls with the frequency, as that of photographs does, uint8 (H, W, 3)."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = 1.0
    planes = rng.standard_normal((3, side, side))
    planes[1:] = 0.8 * planes[:1] + 0.6 * planes[1:]  # the colours of a photograph go together
    planes = np.fft.irfft2(np.fft.rfft2(planes) / frequency, s=(side, side))
    planes = (planes - planes.mean((1, 2), keepdims=True)) / planes.std((1, 2), keepdims=True)
    light = rng.uniform(70, 180, (3, 1, 1)) + rng.uniform(30, 70) * planes
    return light.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
