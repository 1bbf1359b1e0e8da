"""What trainings and evaluations return in Python: a Run, its metrics and its page."""

import csv
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
from vitkit.report.html import fill
from vitkit.runs.folder import RESULT
from vitkit.runs.page import FOLDS, MISTAKES, REPORT, read, rows
from vitkit.runs.protocol import PROTOCOL
from vitkit.weights.load import load
from vitkit.weights.locate import RECIPE

Place = str | os.PathLike[str]
SHOWN = (  # in a short form
    "top1", "mean_average_precision", "top5", "miou", "pixel_accuracy", "ap", "ap50", "f1", "accuracy",
    "loss", "images",
)  # fmt: skip
CLASSES, PICTURES = 10, 12  # shown in a notebook, the worst first


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

    @property
    def miou(self) -> float | None:
        """The mean IoU of the classes of a segmentation; None for other tasks."""
        return self.facts.get("miou")

    @property
    def ap(self) -> float | None:
        """COCO's average precision of a detector; None for other tasks."""
        return self.facts.get("ap")

    @property
    def ap50(self) -> float | None:
        return self.facts.get("ap50")

    def to_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value}' for name, value in self.headline().items())})"

    def headline(self) -> dict[str, str]:
        return {name: f"{self.facts[name]:.4g}" for name in SHOWN if self.facts.get(name) is not None}

    def _repr_html_(self) -> str:
        known = [
            (name, row)
            for name, row in (self.facts.get("per_class") or {}).items()
            if row.get("accuracy") is not None
        ]
        worst = sorted(known, key=lambda item: item[1]["accuracy"])[:CLASSES]
        return str(fill("notebook.html", "metrics", self.headline(), worst, len(known), self.notes))


class Mistakes(list[dict[str, Any]]):
    """The test images that a run got wrong, the most confident first: file, truth, said, confidence.

    In a notebook the first of them show themselves, with what the model attended to.
    """

    def __init__(self, folder: Path):
        path = folder / MISTAKES
        if not path.exists():
            raise Error(
                f"{path}: no such file; only a run that tested a classifier lists its mistakes",
                code="run.not-found",
            )
        with path.open(encoding="utf-8", newline="") as file:
            super().__init__(row | {"confidence": float(row["confidence"])} for row in csv.DictReader(file))
        self.pictures: list[dict[str, Any]] = (read(folder / "mistakes.json") or {}).get("worst", [])

    def _repr_html_(self) -> str:
        return str(fill("notebook.html", "mistakes", self.pictures[:PICTURES], len(self)))


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
    def folds(self) -> dict[str, Any] | None:
        """The accuracy of each fold of a cross-validation, and their mean; None without --folds."""
        return read(self.folder / FOLDS)

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
        return read_recipe(self.first_seed / RECIPE)

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was measured during training: losses, rates and evaluations, a row for each logged step."""
        return rows(self.first_seed / "metrics.jsonl")

    @property
    def mistakes(self) -> Mistakes:
        """The test images with a wrong label; of a protocol those of its first seed."""
        return Mistakes(self.first_seed)

    @property
    def first_seed(self) -> Path:
        """The folder with recipe and metrics: of a protocol that of its first seed."""
        places = (self.folder, *sorted(self.folder.glob("seed-*")))
        return next(p for p in places if (p / RECIPE).exists())

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, steps={self.result['steps']}, {self.metrics!r})"

    def _repr_html_(self) -> str:
        link = escape(str(self.report))
        return f"<p><code>{escape(repr(self))}</code> <a href='{link}'>report</a></p>"
