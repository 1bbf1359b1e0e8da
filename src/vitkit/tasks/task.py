"""Task: the interface through which training, evaluation, reports and prediction know what a model learns."""

# B: batch size; C, H, W: channels, height, width; K: outputs of the model

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.target_views import TargetView
from vitkit.data.views import MoreViews, View
from vitkit.errors import Error, did_you_mean
from vitkit.metrics.classification import Accuracy
from vitkit.metrics.intervals import percent
from vitkit.models.adapt import adapt
from vitkit.models.variants import Config, Model, fresh
from vitkit.options import Range, check_within
from vitkit.report.task_table import TaskTable

Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]
Prepare = Callable[[int, Batch], Batch]
Sizes = Sequence[tuple[int, int]]  # height and width of images
Outputs = Callable[[Any], Tensor]  # an image, as a source has it, to the outputs of a model, (1, ...)


class Metrics(Protocol):
    """The metrics of one evaluation; the class of each task adds its own fields."""

    @property
    def images(self) -> int: ...
    @property
    def loss(self) -> float: ...
    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]: ...


class SummedObjective(ABC):
    """An objective whose sums are divided by what is counted in the whole batch of a step, such as objects.

    So its gradients do not depend on the micro-batches and processes that a batch is divided into.
    """

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Return what is counted in a batch, (), from its targets alone and without reading a number back."""

    @abstractmethod
    def __call__(
        self, module: nn.Module, batch: Batch, counts: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return {"loss": ..., ...}: what this batch adds to each value of a step.

        counts: those of the whole step; None: this batch is all of it
        """


@dataclass(frozen=True)
class Headline:
    """The metric that selects the best weights and drives early stopping, and how to print it."""

    key: str  # name of the field in the metrics
    label: str  # name that users read
    higher: bool = True  # higher is better
    percent: bool = True  # print as a percentage of the images

    def score(self, metrics: Metrics) -> float:
        """The metric with its sign chosen so that higher is better."""
        value = float(getattr(metrics, self.key))
        return value if self.higher else -value

    def text(self, value: float, images: int) -> str:
        """The value as users read it, with as many digits as the number of images supports."""
        return percent(value, images) if self.percent else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation needs besides the module: the forward pass, the device, and the other processes."""

    forward: Callable[[Model, Tensor], Tensor]  # uint8 images (B, C, H, W) to outputs (B, K) on the CPU
    place: Callable[[Batch], Batch] = lambda batch: batch  # move a batch to the device
    gather: Callable[[Tensor], Tensor] = lambda rows: rows  # all-gather rows over the processes
    images: int = 0  # approximate number of images, for choosing an algorithm
    source: Source | None = None  # of the images, whose targets are those of batch["index"]
    accepted: Tensor | None = None  # (data classes, model classes) bool: model classes that count as correct
    calibrate: bool = False  # also find the temperature at which the probabilities fit


@dataclass(frozen=True, kw_only=True)
class OutputAgreement:
    """How far the outputs of another runtime are from those of the model."""

    largest: float  # difference of one output
    tolerance: float
    same: float  # share of the images, pixels or objects with the same answer
    others: int  # of them, how many have another answer although the model's is clear
    about: str = "top-1 for {share} of {images} images"  # what is the same


class Answer(ABC):
    """The prediction for one image, in each form that users receive."""

    best: tuple[str, float] | None = None  # top-1 label and its probability, if the task predicts labels

    @property
    @abstractmethod
    def value(self) -> Any:
        """The Python value that `vitkit.predict` returns."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The object that `vitkit predict --json` prints."""

    def brief(self) -> dict[str, Any]:
        """The object that the server returns."""
        return self.to_json()

    def reject(self, below: float | None) -> "Answer":
        """The same answer, or "unknown" if its confidence is below the threshold; None: no threshold."""
        return self

    @abstractmethod
    def text(self, image: str, *, unsure: bool = False, width: int = 1 << 30, alone: bool = False) -> str:
        """The text for a terminal of `width` columns; `alone` allows several lines for a single image."""

    @abstractmethod
    def cells(self) -> list[tuple[Any, ...]]:
        """The CSV rows, one value for each of `Task.columns`."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What a model is trained for, as a frozen dataclass whose fields are its configuration."""

    name: ClassVar[str]  # the `objective` of a recipe and the `task` of a model file
    headline: ClassVar[Headline]  # the metric for selecting weights and for early stopping
    metric_names: ClassVar[tuple[str, ...]] = ()  # metrics that are logged besides "loss" and "images"
    labelled: ClassVar[bool] = True  # training needs class labels
    targets: ClassVar[str] = ""  # what it needs of a source beside labels: "mask" or "boxes"
    unused_fields: ClassVar[tuple[str, ...]] = ()  # recipe fields that have no effect on this task
    from_recipe: ClassVar[tuple[str, ...]] = ()  # own fields that recipe fields or the data set
    ranges: ClassVar[Mapping[str, Range]] = {}  # valid ranges of the task's own fields
    about: ClassVar[str] = ""  # phrase for a report's sentence about how the model was trained
    counted: ClassVar[str] = "images"  # what a confusion matrix counts
    batch_note: ClassVar[str] = ""  # end of the caption of sample batches, after the augmentations
    columns: ClassVar[tuple[str, ...]] = ()  # CSV columns of predictions
    predicts: ClassVar[bool] = True  # the saved model can predict; otherwise it must be fine-tuned first
    rate_power: ClassVar[float] = 0.0  # the rate grows with this power of the batch: 1 in proportion, 0 never
    output_names: ClassVar[tuple[str, str]] = ("outputs", "outputs")  # in exports: raw, activated

    def __post_init__(self) -> None:
        check_within(self, self.ranges, f"{self.name}.")

    # data

    def for_source(self, source: Source) -> "Task":
        """Return the task to train on this data: this one, or another that fits the data's labels."""
        return self

    def check_source(self, source: Source) -> None:
        """Raise an error if a model of this task cannot be trained or evaluated on this data."""
        return

    # model: the module to train wraps the model to save

    @abstractmethod
    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the saved model's outputs; an empty tuple means that it has no head."""

    def configure(self, config: Config) -> Config:
        """Return the configuration of a model to train from scratch; raise an error if it does not fit."""
        return config

    def initial(self, config: Config, seed: int) -> Model:
        """Return a new model of this configuration, with its first weights."""
        return fresh(config, seed=seed)

    def adapt(
        self, model: Model, labels: tuple[str, ...], image_size: tuple[int, int], seed: int, **options: Any
    ) -> Model:
        """Return a pretrained model with a new head of this task; options: see `models.adapt.adapt`."""
        return adapt(model, classes=len(labels), labels=labels, image_size=image_size, **options)

    def extend(self, model: Model) -> Model:
        """Return a pretrained model with the parameters that this task adds."""
        return model

    def build(self, model: Model) -> nn.Module:
        """Return the module to train: the model itself or a wrapper around it."""
        return model

    def extract(self, module: nn.Module) -> Model:
        """Return the model inside the module to train."""
        return module  # type: ignore[return-value]

    def saved_config(self, config: Config) -> Config:
        """Return the configuration of the model to save, without parts that only training needs."""
        return config

    # training

    def first_view(self, view: View) -> View:
        """Return the transform that makes "image" of a training batch; `view` is the recipe's."""
        return view

    def more_views(self, view: View) -> MoreViews:
        """Return further views of each training image, by their names in a batch; `view` is "image"'s.

        A batch holds them as uint8 (B, V, 3, h, w). An image is decoded once for all of its views.
        """
        return ()

    def target_view(self, view: View, source: Source) -> TargetView | None:
        """Return the transform of an image with its masks or boxes, for a task that learns from them."""
        return None

    def prepare(self, model: Model, order: Order) -> Prepare | None:
        """Return a function (step, batch) -> batch that runs on the CPU before the batch is moved.

        It must depend only on the seed, the step and each image's place in the batch, so that a resumed run
        sees the same batches.
        """
        return None

    def visible(self, model: Model, order: Order, step: int, batch: Batch) -> Tensor:
        """Return what the model sees of the uint8 images of a batch, for a report to show."""
        return batch["image"]

    def pictures(self, module: nn.Module, images: Tensor) -> list[tuple[str, Tensor]]:
        """Return pictures of what the module makes of uint8 images (B, 3, H, W), each with a caption.

        Each is uint8 (3, h, w), such as a reconstruction or the attention of a head, for a report to show.
        Collective: with a sharded module, all processes call this.
        """
        return []

    @abstractmethod
    def objective(self, model: Model) -> Objective:
        """Return loss(module, batch) -> {"loss": ..., ...}, each value a mean over the batch's images.

        A loss that is divided by something else, such as the number of objects, is a `SummedObjective`.
        """

    def begin(self, module: nn.Module, steps: int) -> None:
        """Prepare the module for a run of so many steps in total, for schedules of the task's own."""
        return

    def before_update(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Runs before each update of the weights, when all gradients of the batch are there and clipped.

        Like `after_update` it must not read a number back from the GPU, since both become part of the CUDA
        graph of a step. Numbers that change with the step, such as a momentum, come from buffers.
        """
        return

    def after_update(self, module: nn.Module) -> None:
        """Runs after each update of the weights, for example to average them into a teacher."""
        return

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise an error if the metrics of a training step show that nothing useful is learned any more."""
        return

    def passes(self, model: Model) -> float | None:
        """Return what a training step costs an image, in forward passes of the model; None: as usual."""
        return None

    # evaluation

    @property
    def resize(self) -> str:
        """The `resize` of a model's preprocessing, where the task learns from masks or boxes."""
        return "fit"

    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        """Compute one evaluation batch; with sharded models, all processes must call this equally often."""
        return context.forward(self.extract(module), batch["image"])

    @abstractmethod
    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> Metrics:
        """Return the metrics over the batches of all processes."""

    def mistakes(self, metrics: Any) -> Accuracy | None:
        """Return the metrics if they say which images are wrong, for a report to show; None if not."""
        return None

    def examples(self, metrics: Any, source: Source, model: Model, outputs: Outputs) -> dict[str, Any] | None:
        """Return pictures of predictions beside the truth for a report, as JSON; None: sample images do.

        "groups": a list of {"title", "lead", "images": [{"key", "caption", "truth", "predicted"}]}, pictures
        as JPEGs in base64; "legend": names of classes with their colours; "curves": by class, for detection.
        """
        return None

    # text

    def tables(self, test: Mapping[str, Any]) -> Sequence[TaskTable]:
        """Return tables of stored metrics for `vitkit evaluate` and reports, if these are not accuracies."""
        return ()

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        """Return stored metrics in one line; `images` names their split, as in 'test images'."""
        value = self.headline.text(test[self.headline.key], test["images"])
        return f"{self.headline.label} {value} on {test['images']} {images}"

    def progress(self, metrics: Any, split: str) -> str:
        """Return the line that is printed for an evaluation during training."""
        return self.summary(metrics.to_json(()), f"{split} images")

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        """Return the headline of a report from stored metrics: the main number, and the text below it."""
        value = self.headline.text(test[self.headline.key], test["images"])
        return f"{self.headline.label} {value}", f"on {describe_images(test)}"

    # prediction

    def check_head(self, model: Any) -> None:
        """Raise an error if the model has no head to predict with."""
        if not self.predicts or not model.config.classes:
            raise Error(
                f"the model ({model.origin.source or 'unknown source'}) has no head, so it cannot predict; "
                "fine-tune it first: vitkit finetune DATA --weights MODEL",
                code="model.unsupported",
            )

    def output_shape(self, config: Any) -> tuple[int | None, ...]:
        """Return the shape of the outputs for a batch, with None for any length."""
        return None, config.classes or None

    def agreement(self, reference: Tensor, outputs: Tensor, tolerance: float) -> "OutputAgreement":
        """Compare outputs (B, K, ...) of another runtime with those of the model.

        tolerance: of a number up to 1; relative to the largest where that exceeds 1.
        """
        tolerance *= max(1.0, float(reference.abs().max()))
        largest = float((reference - outputs).abs().max())
        reference, outputs = (values.movedim(1, -1).flatten(0, -2) for values in (reference, outputs))
        expected, top1 = reference.argmax(-1), outputs.argmax(-1)
        lead = reference.gather(1, expected[:, None]) - reference.gather(
            1, top1[:, None]
        )  # 0 where they agree
        same = float((expected == top1).cpu().double().mean())
        return OutputAgreement(
            largest=largest, tolerance=tolerance, same=same, others=int((lead > tolerance).sum())
        )

    def activate(self, values: Tensor) -> Tensor:
        """Map outputs (B, K) to what an exported graph returns, such as probabilities."""
        return values

    def invert(self, values: Tensor) -> Tensor:
        """Undo `activate`, up to what does not change `answers` (a constant added to all logits)."""
        return values

    @abstractmethod
    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        """Return one answer for each row of the model's outputs (B, K), with at most `top` labels.

        sizes: the original height and width of each image, where the answer is about places in it.
        """

    @property
    def classifies(self) -> bool:
        """Whether training needs a label for each image."""
        return self.labelled and not self.targets


def describe_images(test: Mapping[str, Any]) -> str:
    """The number of images and their split, as in '1,000 test images'."""
    return f"{test['images']:,} {'validation' if test.get('split') == 'val' else 'test'} images"


T = TypeVar("T", bound=type[Task])
REGISTERED: dict[str, type[Task]] = {}
PACKAGE = "vitkit.tasks"


def register(task_type: T) -> T:
    """Class decorator that makes a task available to recipes and model files by its name."""
    REGISTERED[task_type.name] = task_type
    return task_type


def task_names() -> tuple[str, ...]:
    """The names of all tasks: one for each file of this package, and those registered elsewhere."""
    return tuple(sorted({*built_in_tasks(), *REGISTERED}))


@cache
def built_in_tasks() -> tuple[str, ...]:
    """The names of this package's tasks: each of its files but this one."""
    modules = pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__)
    return tuple(module.name for module in modules if not module.ispkg and module.name != "task")


def task_class(name: str) -> type[Task]:
    """Return the class of a task, importing its file on first use."""
    if name not in REGISTERED and name in task_names():
        importlib.import_module(f"{PACKAGE}.{name}")
    if name not in REGISTERED:
        raise Error(
            f"unknown task {name!r};{did_you_mean(name, task_names())} known: {', '.join(task_names())}, and "
            "the tasks of imported modules",
            code="model.unsupported",
        )
    return REGISTERED[name]


def option_names(task_type: type[Task]) -> tuple[str, ...]:
    """The fields that a recipe sets by `--set TASK.FIELD=VALUE`."""
    return tuple(f.name for f in fields(task_type) if f.name not in task_type.from_recipe)


def make_task(name: str, settings: Mapping[str, Any]) -> Task:
    """Build a task from a recipe: the recipe's field of that name, or the fields that both have."""
    task_type = task_class(name)
    task = settings.get(name)
    if isinstance(task, task_type):
        return task
    return task_type(**{f.name: settings[f.name] for f in fields(task_type) if f.name in settings})


def task_of(model: Any) -> Task:
    """Return the task of a trained model, with the default configuration."""
    return task_class(model.task)()
