"""What travels with a model beside its weights: preprocessing and origin, and sizes as a pair."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vitkit.errors import ConfigError, Error


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the numbers that a model expects."""

    resize: str = "squash"  # "squash" to the model's size, or "crop": shorter side, then the centre
    crop: float = 1.0  # with resize="crop": the share of the shorter side that the centre keeps
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.resize not in ("squash", "crop"):
            raise ConfigError(f"resize must be 'squash' or 'crop', not {self.resize!r}")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ConfigError(f"interpolation must be 'bilinear' or 'bicubic', not {self.interpolation!r}")
        if not 0 < self.crop <= 1 or 0 in self.std or len(self.mean) != len(self.std):
            mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
            raise ConfigError(
                f"preprocessing with crop {self.crop:g}, mean {mean} and std {std}: crop must be above 0 and "
                "at most 1, mean and std of one length, and no std 0"
            )


CENTRE = 224 / 256  # the usual share of the shorter side that a central crop keeps


def with_view(
    preprocessing: Preprocessing, size: tuple[int, int], kind: str, side: int | None = None
) -> Preprocessing:
    """The same with another view: 'squash', or 'centre' with so many pixels of the shorter side before it.

    'model' changes nothing.
    """
    if kind == "model":
        return preprocessing
    if kind == "squash":
        return replace(preprocessing, resize="squash", crop=1.0)
    if kind != "centre":
        raise Error(f"no view {kind!r}; known: model, squash, centre")
    if side is not None and not max(size) <= side <= 20 * max(size):
        raise Error(
            f"a view that resizes the shorter side to {side} pixels: the model takes {size[0]}x{size[1]} "
            f"from the centre; give {max(size)} to {20 * max(size)}"
        )
    return replace(preprocessing, resize="crop", crop=CENTRE if side is None else max(size) / side)


@dataclass(frozen=True)
class Origin:
    """Where a model came from, and what was done to it on the way in."""

    format: str = "fresh"
    source: str = ""
    licence: str = ""
    sha256: str = ""
    notes: tuple[str, ...] = ()


class Described:
    """What the outputs of a model mean, for ViT and ResNet alike: the task that it was trained for."""

    task = "classify"

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several of the labels."""
        return self.task == "multilabel"

    @multilabel.setter
    def multilabel(self, several: bool) -> None:
        self.task = "multilabel" if several else "classify"


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of an image size given as one number or as two."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise ConfigError(f"an image size is one number of pixels or two, height and width, not {size}")
    return sides


def short_repr(value: Any, usual: Any, always: Sequence[str] = ()) -> str:
    """A frozen value by the fields that differ from those of the usual one, and those always shown."""
    pairs = [(field.name, getattr(value, field.name)) for field in fields(value)]
    shown = [f"{name}={one!r}" for name, one in pairs if name in always or one != getattr(usual, name)]
    return f"{type(value).__name__}({', '.join(shown)})"


def model_repr(model: Any) -> str:
    """A model in a line: its configuration and its number of parameters; its parts still show themselves."""
    inside = repr(model.config).partition("(")[2].removesuffix(")")
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}({inside}; {count:,} parameters)"
