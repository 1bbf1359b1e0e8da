"""Features or predictions of many images, computed part by part on one device and written as columns."""

# B images of a batch, D features

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage
from vitkit.data.loader import range_batches
from vitkit.data.sources.source import Source
from vitkit.datasets.images import Images
from vitkit.errors import Error
from vitkit.inference.columns import Columns, Format
from vitkit.inference.per_core import per_core
from vitkit.inference.predict import Classifier, answers_of, evaluation_view, features, prepare_batch
from vitkit.io.parts import Parts
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Answer, Sizes, task_of

Pool = Literal["head", "cls", "mean"]


class Computation(Protocol):
    """What is computed of each image, and the columns that it becomes."""

    @property
    def model(self) -> Classifier: ...
    @property
    def tta(self) -> str: ...
    @property
    def sizes(self) -> bool:
        """Whether `compute` needs the sizes of the images themselves."""

    def compute(self, images: Tensor, sizes: Sizes = ()) -> list[Any]:
        """uint8 images (B, 3, h, w) to one value for each."""

    def columns(self, images: Images, indices: range, values: list[Any]) -> Columns:
        """The columns besides `image` and `error`; the value of an unreadable image is None."""


@dataclass(frozen=True)
class Embedding:
    """The input of the model's head, its class token, or the mean of its patch tokens."""

    model: Model
    runtime: Runtime
    pool: Pool = "head"
    normalize: bool = False
    dtype: Literal["float32", "float16"] = "float32"
    tta: ClassVar[str] = "none"
    sizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.pool != "head" and not isinstance(self.model, ViT):
            raise Error(
                f"--pool {self.pool}: {type(self.model).__name__} has no tokens; use --pool head",
                code="model.unsupported",
            )
        if self.pool == "cls" and self.model.class_token is None:
            raise Error(
                "--pool cls: this model has no class token; use --pool mean", code="model.unsupported"
            )
        if self.pool != "head" and isinstance(self.model, ViT):
            self.model.check_unmerged()

    def compute(self, images: Tensor, sizes: Sizes = ()) -> list[Any]:
        with self.runtime.autocast():
            if isinstance(self.model, ViT) and self.pool != "head":
                values = per_core(partial(forward_tokens, self.model, self.pool), self.model, images)
            else:
                values = features(self.model, images)
        if self.normalize:
            values = torch.nn.functional.normalize(values, dim=1)
        return list(values.numpy().astype(self.dtype))

    @property
    def width(self) -> int:
        """D: the number of features."""
        config = self.model.config
        blank = torch.zeros(1, config.channels, *config.image_size, dtype=torch.uint8)
        return len(self.compute(blank)[0])

    def columns(self, images: Images, indices: range, values: list[Any]) -> Columns:
        width = next((len(value) for value in values if value is not None), 0) or self.width
        rows = np.zeros((len(values), width), self.dtype)
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[:] = value
        labels = {"labels" if images.multilabel else "label": images.labels(indices)}
        splits = {"split": images.splits(indices)} if images.has_splits else {}
        return {**(labels if images.has_labels else {}), **splits, "embedding": rows}


@torch.no_grad()
def forward_tokens(model: ViT, pool: Pool, images: Tensor) -> Tensor:
    """uint8 images (B, 3, h, w) to the class token, or the mean of the patch tokens, (B, D) on the CPU."""
    tokens = model.tokens(prepare_batch(model, images))
    return (tokens[:, 0] if pool == "cls" else tokens[:, model.config.prefix :].mean(1)).float().cpu()


@dataclass(frozen=True)
class TopPredictions:
    """The model's answers: the top labels with their probabilities, or what its task predicts."""

    model: Classifier
    engine: Callable[[Tensor], Tensor]  # with test-time augmentation
    top: int = 5
    reject_below: float | None = None
    tta: str = "none"

    @property
    def sizes(self) -> bool:
        return bool(task_of(self.model).targets)

    def compute(self, images: Tensor, sizes: Sizes = ()) -> list[Answer]:
        return answers_of(self.model, self.engine(images), self.top, self.reject_below, sizes)

    def columns(self, images: Images, indices: range, values: list[Any]) -> Columns:
        if "probability" not in task_of(self.model).columns:
            return {"answer": [None if value is None else json.dumps(value.to_json()) for value in values]}
        top = [None if value is None else value.top for value in values]
        rejected = {"rejected": [None if value is None else value.rejected for value in values]}
        return {
            "label": [None if value is None else value.best[0] for value in values],
            "probability": [None if value is None else float(value.best[1]) for value in values],
            **({} if self.reject_below is None else rejected),
            "labels": [None if pairs is None else [name for name, _ in pairs] for pairs in top],
            "probabilities": [None if pairs is None else [float(p) for _, p in pairs] for pairs in top],
        }


@dataclass
class WriteBuffer:
    """The values of images that are not written yet, and the errors of the unreadable ones."""

    skip: Callable[[str, str], None]
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def add(self, source: Source, index: int, error: BadImage) -> None:
        self.values[index], self.errors[index] = None, str(error) or error.reason
        self.skip(source.keys[index], self.errors[index])

    def complete(self, rows: range) -> bool:
        return all(index in self.values for index in rows)

    def pop(self, rows: range) -> tuple[list[Any], list[str | None]]:
        return [self.values.pop(i) for i in rows], [self.errors.pop(i, None) for i in rows]


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """Computes parts of a table of images and writes each as soon as it is complete."""

    images: Images
    computation: Computation
    parts: Parts
    format: Format
    batch: int = 64
    workers: int = 0
    advance: Callable[[int], None] = lambda count: None
    skip: Callable[[str, str], None] = lambda name, reason: None

    def run(self, numbers: Iterable[int]) -> None:
        """Compute the parts with these numbers; they are taken one by one, shortly before they are read."""
        model, rows, pending = self.computation.model, WriteBuffer(self.skip), deque[int]()

        def ranges() -> Iterator[range]:
            for number in numbers:
                pending.append(number)
                yield self.parts.range(number)

        if model.preprocessing.resize == "windows":
            raise Error(
                "a table of many images is computed in batches of one size, not in windows; write the "
                "model with vitkit convert --view fit, or leave out --out",
                code="request.conflict",
            )
        view = evaluation_view(model.preprocessing, model.config.image_size, self.computation.tta)
        batches = range_batches(
            self.images.source(), view, self.batch, ranges(), workers=self.workers, bad=rows,
            sizes=self.computation.sizes,
        )  # fmt: skip
        for batch in batches:
            own = (batch["size"].tolist(),) if self.computation.sizes else ()
            values = self.computation.compute(batch["image"], *own)
            rows.values.update(zip(batch["index"].tolist(), values, strict=True))
            self.advance(len(values))
            while pending and rows.complete(self.parts.range(pending[0])):
                self.write(pending.popleft(), rows)
        for number in pending:  # the last batches may have no readable image
            self.write(number, rows)

    def write(self, number: int, rows: WriteBuffer) -> None:
        indices = self.parts.range(number)
        values, errors = rows.pop(indices)
        self.advance(sum(error is not None for error in errors))
        columns = {
            "image": [self.images.name(index) for index in indices],
            **self.computation.columns(self.images, indices, values),
            "error": errors,
        }
        self.parts.write(number, partial(self.write_columns, columns))

    def write_columns(self, columns: Columns, path: Path) -> None:
        self.format.write(path, columns)
