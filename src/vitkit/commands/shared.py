"""Helpers shared by several verbs: the JSON callback, notes on slow work, and model loading."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from vitkit.errors import Error
from vitkit.inference.predict import load_model, with_merging
from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.options import parse_view
from vitkit.report.terminal import warn

Emit = Callable[[Any], None] | None


@contextmanager
def note_if_slow(text: str, *, after: float = 1.0, quiet: bool = False) -> Iterator[None]:
    """Print a note if the block takes longer than `after` seconds."""
    timer = Timer(after, lambda: None if quiet else warn(text))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def loaded(
    model: Model | str, device: str, view: str = "model", merge_tokens: int = 0, *, text: bool = False
) -> Model:
    """Load the model at a path, or use a model object on its own device; with the view and merged tokens.

    text: with the text tower, if it has one.
    """
    return with_merging(with_given_view(model, device, view, text), merge_tokens)  # type: ignore[return-value]


def with_given_view(model: Model | str, device: str, view: str, text: bool) -> Model:
    if isinstance(model, str):
        return load_model(model, device, view, text=text)
    if device != "auto":
        raise Error(
            f"--device {device}: a loaded model stays on its device; move it with model.to(...), or pass its "
            "path",
            code="request.conflict",
        )
    if view == "model":
        return model
    shallow = copy.copy(model)  # shares the parameters
    shallow.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return shallow
