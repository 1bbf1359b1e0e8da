"""What travels with a model beside its weights: preprocessing and origin, and sizes as a pair."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the numbers that a model expects."""

    resize: str = "squash"  # "squash" to the model's size, or "crop": shorter side, then the centre
    crop: float = 1.0  # with resize="crop": the share of the shorter side that the centre keeps
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self):
        if self.resize not in ("squash", "crop"):
            raise ValueError(f"resize must be 'squash' or 'crop', not {self.resize!r}")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', not {self.interpolation!r}")
        if not 0 < self.crop <= 1 or 0 in self.std or len(self.mean) != len(self.std):
            raise ValueError(f"impossible preprocessing: {self}")


@dataclass(frozen=True)
class Origin:
    """Where a model came from, and what was done to it on the way in."""

    format: str = "fresh"
    source: str = ""
    licence: str = ""
    sha256: str = ""
    notes: tuple[str, ...] = ()


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of an image size given as one number or as two."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
