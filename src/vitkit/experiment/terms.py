"""What a run is given beside its recipe, and what it comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    run: str
    model: str
    steps: int
    test: dict[str, Any]
    cost: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # asdict would copy every number of a confusion matrix


@dataclass(frozen=True, kw_only=True)
class How:
    """What may differ from one machine to the next without changing what a run comes to."""

    workers: int | None = None
    decoded: Path | None = None  # the folder of decoded images; other roundings of the same crops
    max_bad: float = 0.05
    trackers: Sequence[str] = ()
    save_aside: bool = False
    quiet: bool = False
    price_per_hour: float | None = None  # of a device
    report: bool = True  # the mistakes looked at and a page drawn at the end
