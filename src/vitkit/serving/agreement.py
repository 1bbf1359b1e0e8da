"""Whether two runtimes give the same answer: the largest difference and the likeliest label."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from vitkit.errors import Error

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
