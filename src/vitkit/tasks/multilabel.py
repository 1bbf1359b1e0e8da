"""Multi-label classification: any number of labels per image, a sigmoid for each class."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.metrics.intervals import percent, with_interval
from vitkit.metrics.multilabel import MultilabelAccuracy, multilabel_accuracy
from vitkit.models.variants import Model
from vitkit.tasks.classify import ClassificationLoss, Ranking, Supervised, ranked
from vitkit.tasks.task import Answer, Batch, Evaluation, Headline, Sizes, describe_images, register


@register
@dataclass(frozen=True, kw_only=True)
class Multilabel(Supervised):
    """Multi-label classification: each image has any number of labels."""

    name: ClassVar[str] = "multilabel"
    headline: ClassVar[Headline] = Headline("top1", "accuracy")  # of the most probable label
    metric_names: ClassVar[tuple[str, ...]] = ("top1",)
    columns: ClassVar[tuple[str, ...]] = ("label", "probability")
    output_names: ClassVar[tuple[str, str]] = ("logits", "probabilities")

    label_smoothing: float = 0.0

    def check_source(self, source: Source) -> None:
        if not source.multilabel:
            raise Error(
                f"{source.name} has one label per image, but the model predicts any number; in a .csv, end a "
                "label with ';' to allow several",
                code="data.labels",
            )

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return classes

    def objective(self, model: Model) -> ClassificationLoss:
        p = model.preprocessing
        return ClassificationLoss(
            classes=model.config.classes, mean=p.mean, std=p.std, loss="sigmoid",
            label_smoothing=self.label_smoothing,
        )  # fmt: skip

    def evaluate(
        self, module: nn.Module, batches: Iterable[Batch], context: Evaluation
    ) -> MultilabelAccuracy:
        model = self.extract(module)
        assert context.accepted is None
        return multilabel_accuracy(
            lambda images: context.forward(model, images), batches, model.config.classes, context.gather,
            context.images,
        )  # fmt: skip

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        n = test["images"]
        mean, f1 = (percent(test[key] or 0.0, n) for key in ("mean_average_precision", "f1"))
        exact = with_interval(test["exact_match"], n)
        return (
            f"mean average precision {mean}, F1 {f1} at 0.5, all labels correct for {exact} of {n} {images}"
        )

    def progress(self, metrics: Any, split: str) -> str:
        return f"{percent(metrics.top1, metrics.images)} of {metrics.images} {split} images correct"

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        n, mean = test["images"], test["mean_average_precision"]
        exact = with_interval(test["exact_match"], n)
        details = f"F1 {percent(test['f1'], n)} at threshold 0.5, all labels correct for {exact}"
        return f"{percent(mean, n)} mean average precision", f"on {describe_images(test)}; {details}"

    def activate(self, values: Tensor) -> Tensor:
        return values.sigmoid()

    def invert(self, values: Tensor) -> Tensor:
        return values.logit()

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        return [Ranking(row, several=True) for row in ranked(model.labels, self.activate(values), top)]
