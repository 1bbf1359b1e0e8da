"""The request of `vitkit embed` and `vitkit predict --out`: what to compute, and with which model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from vitkit.commands.predict import open_model
from vitkit.commands.shared import loaded
from vitkit.errors import Error
from vitkit.inference.bulk import Computation, Embedding, Pool, TopPredictions
from vitkit.inference.columns import EMBED, PREDICT
from vitkit.inference.predict import Classifier, engine_of
from vitkit.inference.rejection import rejection_threshold
from vitkit.inference.tta import Tta, augmented
from vitkit.models.variants import Model
from vitkit.options import Precision
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.weights.locate import is_exported


@dataclass(frozen=True, kw_only=True)
class BulkRequest:
    """What to compute of which images, and where; options by the names of the flags."""

    verb: Literal["embed", "predict"]
    model: Model | str
    places: tuple[str, ...]
    out: Path
    pool: Pool = "head"  # embed
    normalize: bool = False
    dtype: Literal["float32", "float16"] = "float32"
    precision: Precision = "auto"
    top: int = 5  # predict
    engine: str = "auto"
    calibrate: tuple[str, ...] = ()
    reject: str | None = None
    labels: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    tta: Tta = "none"
    merge_tokens: int = 0
    view: str = "model"
    device: str = "auto"
    batch: int = 64
    workers: int | None = None
    part_size: int = 1024
    restart: bool = False
    on: Literal["local", "ray"] = "local"
    processes: int | None = None

    @property
    def endings(self) -> tuple[str, ...]:
        return EMBED if self.verb == "embed" else PREDICT

    def runtime(self) -> Runtime:
        return choose_runtime(self.device, self.precision if self.verb == "embed" else "fp32")

    def open_model(self) -> Classifier:
        """The model, checked for what is asked of it."""
        if self.verb == "embed":
            return features_model(self.model, self.device, self.view, self.merge_tokens)
        assert isinstance(self.model, str)
        model = open_model(
            self.model, self.device, self.view, self.labels, self.template, engine=self.engine,
            calibrate=self.calibrate, merge_tokens=self.merge_tokens,
        )  # fmt: skip
        rejection_threshold(model, self.reject)  # raises if there is none
        return model

    def computation(
        self, model: Classifier, runtime: Runtime, engine: Callable[[Tensor], Tensor] | None
    ) -> Computation:
        if self.verb == "embed":
            assert isinstance(model, Model)
            return Embedding(model, runtime, self.pool, self.normalize, self.dtype)
        compute = augmented(engine or engine_of(model), model, self.tta)
        return TopPredictions(model, compute, self.top, rejection_threshold(model, self.reject), self.tta)


def features_model(model: Model | str, device: str, view: str, merge_tokens: int = 0) -> Model:
    """A model for its features; an exported file has none."""
    if is_exported(model):
        raise Error(
            f"{model}: an exported file computes no features; use the run folder or model file it was "
            "exported from",
            code="model.unsupported",
        )
    return loaded(model, device, view, merge_tokens).eval()
