"""Whether two runtimes give the same answer: the largest difference and the likeliest label."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, read
from vitkit.data.sources.source import digits
from vitkit.data.views import apply
from vitkit.datasets.opening import is_data_file, open_data
from vitkit.errors import Error
from vitkit.inference.predict import evaluation_view, find_images
from vitkit.models.variants import Model
from vitkit.report.terminal import warn

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
    if len(places) == 1 and (places[0] == "digits" or is_data_file(places[0])):
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


# of the largest output, where that is above 1
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "8bit": 1e-1, "int8": 3e-1}


@dataclass(frozen=True)
class Agreement:
    """How far the outputs for some images lie apart from the reference."""

    images: int
    largest: float  # difference of one output
    tolerance: float
    same_top1: float  # share of the images
    other_top1: int  # images with another one, where the reference was sure by more than the tolerance

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance and not self.other_top1  # a difference that is no number is not

    def text(self) -> str:
        return (
            f"largest difference {self.largest:.1e} (tolerance {self.tolerance:.1e}), "
            f"the same top-1 for {self.same_top1:.1%} of {self.images} images"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def agreement(want: Tensor, got: Tensor, precision: str = "fp32") -> Agreement:
    """Outputs (B, classes) of the reference and of another runtime."""
    if want.shape != got.shape:
        raise Error(
            f"outputs have shape {tuple(got.shape)}, those of the model {tuple(want.shape)}",
            code="export.disagrees",
        )
    tolerance = TOLERANCES[precision] * max(1.0, float(want.abs().max()))
    largest = float((want - got).abs().max())
    said, told = want.argmax(-1), got.argmax(-1)
    margin = (want.gather(1, said[:, None]) - want.gather(1, told[:, None]))[:, 0]  # 0 where they agree
    return Agreement(
        images=len(want),
        largest=largest,
        tolerance=tolerance,
        same_top1=float((said == told).double().mean()),
        other_top1=int((margin > tolerance).sum()),
    )
