"""Task: the one way in which training, evaluation, reports and prediction know what is learned."""

# B batch; C, H, W channels and pixels; K outputs of a model

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.metrics.classification import Accuracy
from vitkit.metrics.intervals import percent
from vitkit.models.variants import Config, Model
from vitkit.options import Range, check_within

Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]
Prepare = Callable[[int, Batch], Batch]


class Metrics(Protocol):
    """What an evaluation comes to; a task's own class has more fields."""

    @property
    def images(self) -> int: ...
    @property
    def loss(self) -> float: ...
    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Headline:
    """The metric by which weights are kept and a run stops early, and how it is printed."""

    key: str  # the field of the metrics
    label: str  # the metric in words
    higher: bool = True  # is better
    percent: bool = True  # a share of images

    def score(self, metrics: Metrics) -> float:
        """A number that is higher for a better model."""
        value = float(getattr(metrics, self.key))
        return value if self.higher else -value

    def text(self, value: float, images: int) -> str:
        return percent(value, images) if self.percent else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation has beside the module: how to compute, and the rows of other processes."""

    forward: Callable[[Model, Tensor], Tensor]  # uint8 images (B, C, H, W) to outputs (B, K) on the CPU
    place: Callable[[Batch], Batch] = lambda batch: batch  # onto the device
    gather: Callable[[Tensor], Tensor] = lambda rows: rows  # the rows of all processes
    images: int = 0  # how many there are, about
    accepted: Tensor | None = None  # (classes of the data, of the model): which are right for each


class Answer(ABC):
    """What a model says of one image."""

    best: tuple[str, float] | None = None  # a label and its probability, by which images can be sorted

    @property
    @abstractmethod
    def value(self) -> Any:
        """What `vitkit.predict` returns."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    def brief(self) -> dict[str, Any]:
        """The same for a client of the service."""
        return self.to_json()

    @abstractmethod
    def text(self, image: str, *, unsure: bool = False, width: int = 1 << 30, alone: bool = False) -> str:
        """For a terminal of so many columns; alone: of one image, with room for several lines."""

    @abstractmethod
    def cells(self) -> list[tuple[Any, ...]]:
        """Rows of a table, under the columns of the task."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What a model is trained for: a frozen value that is its own configuration."""

    name: ClassVar[str]
    headline: ClassVar[Headline]
    measured: ClassVar[tuple[str, ...]] = ()  # metrics that are logged beside the loss and the images
    labelled: ClassVar[bool] = True  # class labels are learned; else images need none
    unused: ClassVar[tuple[str, ...]] = ()  # fields of a recipe that have no meaning here
    ranges: ClassVar[Mapping[str, Range]] = {}  # of the task's own fields
    about: ClassVar[str] = ""  # how it learns, within a report's sentence on what was trained
    batch_note: ClassVar[str] = ""  # what happens to the images of a batch after augmentation
    columns: ClassVar[tuple[str, ...]] = ()  # of a table of answers
    predicts: ClassVar[bool] = True  # whether the model that is kept can be asked about images
    output_names: ClassVar[tuple[str, str]] = ("outputs", "outputs")  # of the model; after `activate`

    def __post_init__(self) -> None:
        check_within(self, self.ranges, f"{self.name}.")

    # data

    def for_source(self, source: Source) -> "Task":
        """The task that this becomes on some training data."""
        return self

    def check_source(self, source: Source) -> None:
        """Refuse data on which a model of this task cannot be trained or evaluated."""
        return

    # the model and the module that learns

    @abstractmethod
    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the outputs of the model that is kept; none: it has no head."""

    def configure(self, config: Config) -> Config:
        """The configuration of a fresh model; an error where the task cannot use it."""
        return config

    def start(self, model: Model) -> Model:
        """A loaded model, with what it lacks for this task."""
        return model

    def build(self, model: Model) -> nn.Module:
        """The module that learns: the model itself, or with more around it."""
        return model

    def extract(self, module: nn.Module) -> Model:
        """The model within the module that learns."""
        return module  # type: ignore[return-value]

    def kept_config(self, config: Config) -> Config:
        """The configuration of the model that is kept."""
        return config

    # training

    def prepare(self, model: Model, order: Order) -> Prepare | None:
        """What (step, batch) goes through before the device: a pure function of seed, step and place."""
        return None

    @abstractmethod
    def objective(self, model: Model) -> Objective:
        """loss(module, batch) -> {"loss": ..., ...}, each the mean over the images of the batch."""

    # evaluation

    def outputs(self, module: nn.Module, batch: Batch, how: Evaluation) -> Tensor:
        """What the module says of a batch of the evaluation; all processes call it equally often."""
        return how.forward(self.extract(module), batch["image"])

    @abstractmethod
    def evaluate(self, module: nn.Module, batches: Iterable[Batch], how: Evaluation) -> Metrics:
        """The metrics over all batches, of all processes."""

    def mistakes(self, metrics: Any) -> Accuracy | None:
        """Answers that are right or wrong image by image, for a report to show; None: there are none."""
        return None

    # words

    def line(self, test: Mapping[str, Any], images: str) -> str:
        """Stored metrics in a line; images: what they are of, as in 'test images'."""
        value = self.headline.text(test[self.headline.key], test["images"])
        return f"{self.headline.label} {value} on {test['images']} {images}"

    def progress(self, metrics: Any, split: str) -> str:
        """An evaluation in a line while a run goes on."""
        return self.line(metrics.to_json(()), f"{split} images")

    def page(self, test: Mapping[str, Any]) -> tuple[str, str]:
        """The headline of a report out of stored metrics: the one number, and what it is of."""
        value = self.headline.text(test[self.headline.key], test["images"])
        return f"{self.headline.label} {value}", f"on {images_in_words(test)}"

    # use

    def check_head(self, model: Any) -> None:
        """Refuse a model that cannot be asked about images."""
        if not self.predicts or not model.config.classes:
            raise Error(
                f"the model ({model.origin.source or 'it'}) has no head and predicts no classes; "
                "fine-tune it first: vitkit finetune DATA --weights MODEL",
                code="model.unsupported",
            )

    def activate(self, values: Tensor) -> Tensor:
        """The outputs (B, K) as an exported graph gives them: probabilities, say."""
        return values

    def invert(self, values: Tensor) -> Tensor:
        """Back from `activate`, up to what `answer` does not see."""
        return values

    @abstractmethod
    def answers(self, model: Any, values: Tensor, top: int) -> list[Answer]:
        """Of each image, out of the model's outputs (B, K)."""


def images_in_words(test: Mapping[str, Any]) -> str:
    """How many images of which split stored metrics are of."""
    return f"{test['images']:,} {'validation' if test.get('split') == 'val' else 'test'} images"


T = TypeVar("T", bound=type[Task])
REGISTERED: dict[str, type[Task]] = {}
HERE = "vitkit.tasks"


def register(kind: T) -> T:
    """A class decorator: the task can be named in recipes and model files from here on."""
    REGISTERED[kind.name] = kind
    return kind


def task_names() -> tuple[str, ...]:
    """All tasks: the files of this room, each named as its task, and those that were registered elsewhere."""
    files = (module.name for module in pkgutil.iter_modules(importlib.import_module(HERE).__path__))
    return tuple(sorted({*(name for name in files if name != "task"), *REGISTERED}))


def task_class(name: str) -> type[Task]:
    """The class of a task; its file is imported when it is first asked for."""
    if name not in REGISTERED and name in task_names():
        importlib.import_module(f"{HERE}.{name}")
    if name not in REGISTERED:
        raise Error(
            f"no task {name!r}; known: {', '.join(task_names())}. A task of your own must be imported before "
            "its models and recipes are used",
            code="model.unsupported",
        )
    return REGISTERED[name]


def make_task(name: str, settings: Mapping[str, Any]) -> Task:
    """A task out of a recipe's fields: the one of its name, or those that both have."""
    kind = task_class(name)
    own = settings.get(name)
    if isinstance(own, kind):
        return own
    return kind(**{f.name: settings[f.name] for f in fields(kind) if f.name in settings})


def task_of(model: Any) -> Task:
    """The task of a model that was trained, with its default configuration."""
    return task_class(model.task)()
