"""The card of a model file as JSON (configuration, labels, preprocessing, origin), and ImageNet's labels."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.limits import LONGEST_LABEL, out_of_range

VERSION = 1
FIRST = ("classify", "multilabel")  # tasks that a card tells apart by its field `multilabel`
KINDS = {"ViT": ViTConfig, "ResNet": ResNetConfig}


@dataclass(frozen=True)
class Card:
    """What a model file says beside its arrays."""

    layout: str
    config: Config
    labels: tuple[str, ...] = ()
    preprocessing: Preprocessing = Preprocessing()
    origin: Origin = Origin()
    task: str = "classify"

    @property
    def multilabel(self) -> bool:
        return self.task == "multilabel"


def card_of(model: Model, layout: str) -> Card:
    return Card(layout, model.config, model.labels, model.preprocessing, model.origin, model.task)


def to_json(card: Card) -> str:
    kind = "ViT" if isinstance(card.config, ViTConfig) else "ResNet"
    table = asdict(card)
    task = table.pop("task")
    if task in FIRST:  # as version 0.1 names them
        return json.dumps({"version": VERSION, "kind": kind} | table | {"multilabel": card.multilabel})
    return json.dumps({"version": VERSION, "kind": kind} | table | {"multilabel": False, "task": task})


def from_json(text: str) -> Card:
    """The card back, every value checked: it comes out of a file that anyone may have written."""
    try:
        told = json.loads(text)
        if told.pop("version") != VERSION:
            raise WeightsError("the file was written by a newer vitkit; update vitkit to read it")
        kind, several = KINDS[told.pop("kind")], told.get("multilabel", False)  # the first files lack it
        if told["config"].get("stem") is not None:
            told["config"]["stem"] = value(StemConfig, told["config"]["stem"])
        return Card(
            layout=str(told["layout"]),
            config=value(kind, told["config"]),
            labels=checked("labels", told["labels"], ("",)),
            preprocessing=value(Preprocessing, told["preprocessing"]),
            origin=value(Origin, told["origin"]),
            task=checked("task", told.get("task") or FIRST[checked("multilabel", several, False)], ""),
        )
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise WeightsError(f"the file's own description is damaged ({reason})") from None


def value(kind: type, told: dict[str, Any]) -> Any:
    """A frozen value out of JSON: known fields only, each of its default's type."""
    known = {f.name: f.default for f in fields(kind)}
    given = {}
    for name, content in told.items():
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}")
        given[name] = checked(name, content, known[name])
        if reason := out_of_range(name, given[name]):
            raise WeightsError(f"its card: {reason}")
    return kind(**given)


def checked(name: str, content: Any, default: Any) -> Any:
    if default is None:  # a stem that is one already, or True, False or None
        if not (content is None or type(content) in (bool, StemConfig)):
            raise TypeError(f"{name} must not be {content!r}")
        return content
    if isinstance(default, tuple):
        if not isinstance(content, list):
            raise TypeError(f"{name} must be a list, not {str(content)[:40]}")
        return tuple(checked(name, item, default[0] if default else "") for item in content)
    if isinstance(default, float) and type(content) is int:
        content = float(content)
    if type(content) is not type(default) or (isinstance(content, float) and not math.isfinite(content)):
        raise TypeError(f"{name} must be {type(default).__name__}, not {str(content)[:40]!r}")
    if isinstance(content, str) and len(content) > LONGEST_LABEL:
        raise ValueError(f"{name} has {len(content)} characters; at most {LONGEST_LABEL} are read")
    return content


def imagenet_synsets() -> tuple[tuple[str, str], ...]:
    """(WordNet number, name) of each class."""
    text = files("vitkit.weights").joinpath("imagenet1k.tsv").read_text("utf-8")
    return tuple((number, name) for number, _, name in (line.partition("\t") for line in text.splitlines()))


def imagenet_labels() -> tuple[str, ...]:
    """The names; two classes that share one (there are two cranes) carry their number too."""
    rows = imagenet_synsets()
    shared = Counter(name for _, name in rows)
    return tuple(f"{name} ({number})" if shared[name] > 1 else name for number, name in rows)
