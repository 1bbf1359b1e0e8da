"""What several verbs share: where JSON goes, a note on slow work, and a model that may be loaded already."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from vitkit.errors import Error
from vitkit.inference.predict import load_model
from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.options import parse_view
from vitkit.report.terminal import warn

Emit = Callable[[Any], None] | None


@contextmanager
def note_if_slow(text: str, *, after: float = 1.0, quiet: bool = False) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
    timer = Timer(after, lambda: None if quiet else warn(text))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def loaded(model: Model | str, device: str, view: str = "model") -> Model:
    """The model at a place on its device, or one that is loaded already, where it is; with this view."""
    if isinstance(model, str):
        return load_model(model, device, view)
    if device != "auto":
        raise Error(
            f"--device {device}: the model is loaded already and computes where it is; move it yourself with "
            "model.to(...), or give its file or folder",
            code="request.conflict",
        )
    if view == "model":
        return model
    other = copy.copy(model)  # the same parameters
    other.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return other
