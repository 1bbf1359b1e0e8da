"""Metadata of a model: preprocessing, origin and task; and helpers for sizes and repr."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vitkit.errors import ConfigError, Error

RESIZES = ("squash", "crop", "fit", "windows")


@dataclass(frozen=True)
class Preprocessing:
    """How an image is resized and normalised for a model."""

    # "squash" ignores the aspect ratio, "crop" resizes the shorter side, then crops the centre, and "fit"
    # resizes the whole image to fit, keeping its aspect ratio, and pads the right or bottom; "windows", for
    # segmentation, resizes it to cover the model, in windows (tasks/shared/image_windows.py)
    resize: str = "squash"
    crop: float = 1.0  # with resize="crop": crop size / shorter side
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.resize not in RESIZES:
            raise ConfigError(f"resize must be one of {', '.join(RESIZES)}, not {self.resize!r}")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ConfigError(f"interpolation must be 'bilinear' or 'bicubic', not {self.interpolation!r}")
        if not 0 < self.crop <= 1 or 0 in self.std or len(self.mean) != len(self.std):
            mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
            raise ConfigError(
                f"preprocessing with crop {self.crop:g}, mean {mean} and std {std}: crop must be above 0 and "
                "at most 1, mean and std must have the same length, and no std may be 0"
            )


def shorter_side(size: tuple[int, int], preprocessing: Preprocessing) -> int:
    """The pixels to which the shorter side is resized before the central crop, which must fit into it."""
    return round(max(size) / preprocessing.crop)


CENTRE = 224 / 256  # the usual central crop: crop size / shorter side


def with_view(
    preprocessing: Preprocessing, size: tuple[int, int], kind: str, side: int | None = None
) -> Preprocessing:
    """The preprocessing with another view: 'squash', 'fit', 'centre', 'windows', or 'model' for no change.

    side: with 'centre', the pixels to which the shorter side is resized before the crop.
    """
    if kind == "model":
        return preprocessing
    if kind in ("squash", "fit", "windows"):
        return replace(preprocessing, resize=kind, crop=1.0)
    if kind != "centre":
        raise Error(f"no view {kind!r}; known: model, squash, fit, centre, windows")
    if side is not None and not max(size) <= side <= 20 * max(size):
        raise Error(
            f"view centre:{side}: the model takes a crop of {size[0]}x{size[1]} pixels; "
            f"give {max(size)} to {20 * max(size)}"
        )
    return replace(preprocessing, resize="crop", crop=CENTRE if side is None else max(size) / side)


@dataclass(frozen=True)
class Origin:
    """Where a model came from, and notes on how it was read."""

    format: str = "fresh"
    source: str = ""
    licence: str = ""
    sha256: str = ""
    notes: tuple[str, ...] = ()


class Described:
    """The task of a model, which says what its outputs mean; shared by ViT and ResNet."""

    task = "classify"
    reject_below = 0.0  # confidence that 95 % of the correct validation images reach; 0: not known

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several labels."""
        return self.task == "multilabel"

    @multilabel.setter
    def multilabel(self, value: bool) -> None:
        self.task = "multilabel" if value else "classify"


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from one number or two."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise ConfigError(f"an image size is one number of pixels, or height and width, not {size}")
    return sides


def short_repr(value: Any, usual: Any, always: Sequence[str] = ()) -> str:
    """The repr of a dataclass with the fields that differ from `usual`, and those in `always`."""
    pairs = [(field.name, getattr(value, field.name)) for field in fields(value)]
    parts = [f"{name}={item!r}" for name, item in pairs if name in always or item != getattr(usual, name)]
    return f"{type(value).__name__}({', '.join(parts)})"


def model_repr(model: Any) -> str:
    """The repr of a model in one line: its configuration and its number of parameters."""
    options = repr(model.config).partition("(")[2].removesuffix(")")
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}({options}; {count:,} parameters)"
