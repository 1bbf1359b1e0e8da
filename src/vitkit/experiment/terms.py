"""What a run is given beside its recipe, and what it comes to."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.training.room import OutOfMemory
from vitkit.training.runtime import data_workers
from vitkit.training.step import Diverged
from vitkit.training.trackers import check_trackers


class DivergedRun(Diverged, Error):
    """The loss of a step is not finite; the message names the images of its batch."""

    code = "training.diverged"


class OutOfMemoryRun(OutOfMemory, Error):
    """The device has too little memory, even for the smallest micro-batch."""

    code = "training.out-of-memory"


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    run: str
    model: str
    steps: int
    test: dict[str, Any]
    cost: dict[str, Any]
    kept: dict[str, Any] | None = None  # which weights, and whether the run stopped early; None: an old run

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # asdict would copy every number of a confusion matrix


def read_result(path: Path) -> Result:
    """What a finished run came to."""
    try:
        return Result(**json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise Error(
            f"{path}: not a result that vitkit wrote ({error}); delete it to test again",
            code="run.corrupt",
        ) from None


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
    accept_changed_data: bool | None = None  # go on with other data than before; None: no, and no such flag

    def __post_init__(self) -> None:
        """Before anything takes time: trackers are there, and numbers can be what they are called."""
        check_trackers(self.trackers)
        data_workers(self.workers)
        if not 0 <= self.max_bad <= 1:
            raise Error(f"max-bad is a share of the images, 0 to 1, not {self.max_bad}", code="request.value")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise Error(f"price-per-hour must be 0 or more, not {self.price_per_hour}", code="request.value")
