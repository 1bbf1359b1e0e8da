"""Numerical agreement between two runtimes: the check itself, and the sample images that it runs on."""

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
from vitkit.tasks.classify import Classify
from vitkit.tasks.task import OutputAgreement, Task

# precision -> largest allowed difference of an output; relative to the largest output where that exceeds 1
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "8bit": 1e-1, "int8": 3e-1}
Unread = Callable[[list[tuple[str, str]], int], None]  # (name, reason) of each bad image, number of images


@dataclass(frozen=True)
class Agreement:
    """How far the outputs for some images are from those of the reference."""

    images: int
    largest: float  # difference of one output
    tolerance: float
    same_top1: float  # share of the images, or of what the task compares: pixels, objects
    other_top1: int  # of these, how many have another answer although the reference leads by the tolerance
    about: str = OutputAgreement.about

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance and not self.other_top1  # False for a NaN difference

    def text(self) -> str:
        same = self.about.format(share=f"{self.same_top1:.1%}", images=self.images)
        return f"largest difference {self.largest:.1e} (tolerance {self.tolerance:.1e}), the same {same}"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "about"} | {"ok": self.ok}


def agreement(
    reference: Tensor, outputs: Tensor, precision: str = "fp32", task: Task | None = None
) -> Agreement:
    """Compare outputs (B, ...) of a runtime with those of the reference, as its task does."""
    if reference.shape != outputs.shape:
        raise Error(
            f"the outputs have shape {tuple(outputs.shape)}, those of the model {tuple(reference.shape)}",
            code="export.disagrees",
        )
    alike = (task or Classify()).agreement(reference, outputs, TOLERANCES[precision])
    return Agreement(
        images=len(reference), largest=alike.largest, tolerance=alike.tolerance, same_top1=alike.same,
        other_top1=alike.others, about=alike.about,
    )  # fmt: skip


def sample_images(
    model: Model,
    count: int = 8,
    *,
    size: tuple[int, int] | None = None,
    places: Sequence[str] = (),
    unread: Unread = lambda bad, total: None,
) -> Tensor:
    """uint8 (B, 3, h, w), preprocessed for the model: from files or a data set, or generated.

    Images that cannot be read are skipped and passed to `unread`; it is an error if none can be read.
    """
    view = evaluation_view(model.preprocessing, size or model.config.image_size)
    rng = np.random.default_rng(0)
    if not places:
        return torch.stack([apply(picture, view, rng) for picture in generated(count)])
    images: list[Tensor] = []
    bad: list[tuple[str, str]] = []
    candidates = select_images(places, count)
    for name, content in candidates:
        try:
            images.append(apply(content(), view, rng))
        except BadImage as error:
            bad.append((name, str(error)))
    if not images:
        name, reason = bad[0]
        raise Error(
            f"none of {len(bad)} images could be read; the first is {name}: {reason}", code="image.unreadable"
        )
    if bad:
        unread(bad, len(candidates))
    return torch.stack(images)


def warn_unread(bad: list[tuple[str, str]], total: int) -> None:
    """Print one warning about the skipped images."""
    name, reason = bad[0]
    warn(f"{len(bad)} of {total} images could not be read and were skipped; the first is {name}: {reason}")


def select_images(places: Sequence[str], count: int) -> list[tuple[str, Callable[[], bytes | np.ndarray]]]:
    """Names and readers of `count` images, evenly spaced: the first ones might all be of one class."""
    if len(places) == 1 and (places[0] == "digits" or is_data_file(places[0])):
        splits = open_data(places[0])
        source = splits.get("train") or next(iter(splits.values()))
        return [(source.keys[n], partial(source.fetch, int(n))) for n in evenly_spaced(len(source), count)]
    names = find_images(places)
    return [(names[n], partial(read, Path(names[n]))) for n in evenly_spaced(len(names), count)]


def evenly_spaced(total: int, count: int) -> np.ndarray:
    """At most `count` indices, evenly spaced from 0 to total - 1."""
    return np.linspace(0, total - 1, min(total, count)).astype(int)


def generated(count: int) -> list[np.ndarray]:
    """Generated pictures: three quarters clouds, one quarter digits, which preprocessing enlarges."""
    source = digits()
    return [
        *(clouds(n) for n in range(count - count // 4)),
        *(np.asarray(source.fetch(n)) for n in range(count // 4)),
    ]


def clouds(seed: int, side: int = 256) -> np.ndarray:
    """Noise with the 1/f spectrum of photographs, uint8 (H, W, 3)."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
    frequency[0, 0] = 1.0
    planes = rng.standard_normal((3, side, side))
    planes[1:] = 0.8 * planes[:1] + 0.6 * planes[1:]  # colour channels of photographs are correlated
    planes = np.fft.irfft2(np.fft.rfft2(planes) / frequency, s=(side, side))
    planes = (planes - planes.mean((1, 2), keepdims=True)) / planes.std((1, 2), keepdims=True)
    light = rng.uniform(70, 180, (3, 1, 1)) + rng.uniform(30, 70) * planes
    return light.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
