"""Rejection: the confidence below which a classifier predicts "unknown", and a detector drops a box."""

from typing import Any

from vitkit.errors import Error
from vitkit.options import SHARE

STORED = "model"  # stands for the threshold that is stored in the model


def parse_reject(text: str) -> float | None:
    """'model' -> None, the model's own threshold; '0.6' -> 0.6."""
    if text == STORED:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value not in SHARE:
        raise Error(
            f"--reject {text!r}: expected {SHARE.expected(whole=False)}, or {STORED!r} for the model's own "
            "threshold",
            code="request.value",
        )
    return value


def rejection_threshold(model: Any, reject: str | float | bool | None) -> float | None:
    """The confidence below which an image is rejected; None if every image is accepted.

    reject: True or "model" for the threshold of the model, or a number from 0 to 1.
    """
    if reject is None or reject is False:
        return None
    given = None if reject is True else parse_reject(str(reject))
    if model.task not in ("classify", "detect", "instances"):
        raise Error(
            "--reject needs a classifier with one label per image, or a detector, not a model for "
            f"{model.task}; omit it",
            code="model.unsupported",
        )
    if given is None and not model.reject_below and model.task in ("detect", "instances"):
        raise Error(
            "--reject: a detector has no threshold of its own; give the minimum score of a box, e.g. "
            "--reject 0.5",
            code="model.unsupported",
        )
    if given is None and not model.reject_below:
        raise Error(
            "--reject: the model has no threshold of its own; give one, e.g. --reject 0.6, or train with "
            "vitkit finetune DATA --set calibrate=true, which chooses one on validation images",
            code="model.unsupported",
        )
    return float(model.reject_below) if given is None else given
