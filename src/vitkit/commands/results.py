"""What trainings and evaluations return in Python: a Run, its metrics and its page."""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from vitkit.commands.report import draw
from vitkit.errors import Error
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe, read_recipe
from vitkit.runs.folder import RESULT
from vitkit.runs.page import REPORT, read
from vitkit.runs.protocol import PROTOCOL
from vitkit.weights.load import load
from vitkit.weights.locate import RECIPE

Place = str | os.PathLike[str]
SHOWN = ("top1", "mean_average_precision", "top5", "f1", "accuracy", "loss", "images")  # in a short form


class Metrics(Mapping[str, Any]):
    """What was measured: the object that --json prints, with its headline as attributes.

    >>> Metrics({"top1": 0.9, "images": 20})["images"]
    20
    """

    def __init__(self, facts: Mapping[str, Any], notes: Iterable[str] = ()):
        self.facts, self.notes = dict(facts), tuple(notes)  # notes: what a reader of the numbers should know

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def images(self) -> int:
        return int(self.facts["images"])

    @property
    def loss(self) -> float | None:
        return self.facts.get("loss")

    @property
    def top1(self) -> float | None:
        """The share of images whose likeliest label is right; None where images have several labels."""
        return self.facts.get("top1")

    @property
    def top5(self) -> float | None:
        return self.facts.get("top5")

    def to_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def __repr__(self) -> str:
        shown = {name: self.facts[name] for name in SHOWN if self.facts.get(name) is not None}
        return f"Metrics({', '.join(f'{name}={value:.4g}' for name, value in shown.items())})"


class Page(type(Path())):  # type: ignore[misc]  # the kind of path of this system
    """The path of a run's report; in a notebook the page shows itself."""

    def _repr_html_(self) -> str:
        page = escape(self.read_text("utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0" sandbox></iframe>'


class Run(os.PathLike[str]):
    """A finished run: the folder that a training has written. It is taken wherever a model is.

    folder, result, metrics, model, report and recipe show it; Run("runs/photos") opens an earlier one.
    """

    def __init__(self, folder: Place):
        self.folder = Path(folder)
        if not any((self.folder / name).exists() for name in (RESULT, PROTOCOL)):
            raise Error(
                f"{self.folder}: no finished run there (no {RESULT} or {PROTOCOL}); give the folder of one",
                code="run.not-found",
            )

    def __fspath__(self) -> str:
        return str(self.folder)

    @cached_property
    def result(self) -> dict[str, Any]:
        """All that the run came to, as --json prints it: steps, test metrics, cost, seeds of the protocol."""
        path = next(p for p in (self.folder / PROTOCOL, self.folder / RESULT) if p.exists())
        content: dict[str, Any] | None = read(path)
        if content is None:
            raise Error(f"{path}: not readable as JSON; run the same call again", code="run.corrupt")
        return content

    @property
    def metrics(self) -> Metrics:
        """On the test images, or those that the recipe reports on."""
        return Metrics(self.result["test"])

    @cached_property
    def model(self) -> Model:
        """The trained model, loaded when it is first asked for."""
        return load(self.folder)

    @property
    def report(self) -> Page:
        """The page of the run; it is drawn if it is not there."""
        path = self.folder / REPORT
        return Page(path if path.exists() else draw(self.folder, None))

    @cached_property
    def recipe(self) -> Recipe:
        """Everything that decided the run; of a protocol that of its first seed."""
        places = (self.folder, *sorted(self.folder.glob("seed-*")))
        return read_recipe(next(p for p in places if (p / RECIPE).exists()) / RECIPE)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, steps={self.result['steps']}, {self.metrics!r})"

    def _repr_html_(self) -> str:
        link = escape(str(self.report))
        return f"<p><code>{escape(repr(self))}</code> <a href='{link}'>report</a></p>"
