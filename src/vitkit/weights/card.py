"""The card of a model file as JSON (configuration, labels, preprocessing, origin); the ImageNet labels."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.dense.dense_model import KINDS as DENSE
from vitkit.models.dense.dense_model import DenseConfig, config_kind
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.text_tower import TextConfig
from vitkit.models.variants import BackboneConfig, Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.limits import LONGEST_LABEL, out_of_range

VERSION = 1
LATER = {  # fields that version 0.1 does not know: written only where they are not the default
    "representation_kind", "class_position", "registers", "distilled", "rope", "rope_shift", "rope_jitter",
    "rope_rescale", "input_norm", "mlp", "mlp_norm", "project_bias", "key_bias", "qk_norm",
    "stochastic_depth_uniform", "stochastic_depth_rescale", "text", "normalize", "merge_tokens",
}  # fmt: skip
ADAPTER = "lora"  # layout of a file with a LoRA adapter, which is not a whole model
FIRST_TASKS = ("classify", "multilabel")  # a card distinguishes these by its field `multilabel`
KINDS: dict[str, type[BackboneConfig]] = {"ViT": ViTConfig, "ResNet": ResNetConfig}


@dataclass(frozen=True)
class Card:
    """The metadata that a model file stores with its arrays."""

    layout: str
    config: Config
    labels: tuple[str, ...] = ()
    preprocessing: Preprocessing = Preprocessing()
    origin: Origin = Origin()
    task: str = "classify"
    reject_below: float = 0.0

    @property
    def multilabel(self) -> bool:
        return self.task == "multilabel"


def card_of(model: Model, layout: str) -> Card:
    return Card(
        layout, model.config, model.labels, model.preprocessing, model.origin, model.task, model.reject_below
    )


def to_json(card: Card) -> str:
    table = asdict(card)
    task = table.pop("task")
    kind, table["config"] = config_table(card.config)
    if not table["reject_below"]:
        del table["reject_below"]
    if task in FIRST_TASKS:  # version 0.1 reads these
        return json.dumps({"version": VERSION, "kind": kind} | table | {"multilabel": card.multilabel})
    return json.dumps({"version": VERSION, "kind": kind} | table | {"multilabel": False, "task": task})


def config_table(config: Config) -> tuple[str, dict[str, Any]]:
    """The kind of a model and its configuration, as a card has them."""
    if isinstance(config, DenseConfig):
        own = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "vit"}
        return config.kind, own | {"vit": config_table(config.vit)[1]}
    usual = {f.name: f.default for f in fields(config)}
    table = {k: v for k, v in asdict(config).items() if k not in LATER or v != usual[k]}
    return "ViT" if isinstance(config, ViTConfig) else "ResNet", table


def config_from(kind: str, table: dict[str, Any]) -> Config:
    """The configuration that a card describes; every value is checked."""
    if kind in DENSE:
        vit = config_from("ViT", table.pop("vit"))
        return parse(config_kind(kind), table, vit=vit)
    for name, inner in (("stem", StemConfig), ("text", TextConfig)):
        if table.get(name) is not None:
            table[name] = parse(inner, table[name])
    config: Config = parse(KINDS[kind], table)
    return config


def from_json(text: str) -> Card:
    """Read a card and check every value: the file is untrusted."""
    try:
        content = json.loads(text)
        if content.pop("version") != VERSION:
            raise WeightsError("the file was written by a newer vitkit; update vitkit to read it")
        kind = content.pop("kind")
        multilabel = content.get("multilabel", False)  # the first files lack it
        return Card(
            layout=str(content["layout"]),
            config=config_from(kind, content["config"]),
            labels=checked("labels", content["labels"], ("",)),
            preprocessing=parse(Preprocessing, content["preprocessing"]),
            origin=parse(Origin, content["origin"]),
            task=checked(
                "task", content.get("task") or FIRST_TASKS[checked("multilabel", multilabel, False)], ""
            ),
            reject_below=probability("reject_below", content.get("reject_below", 0.0)),
        )
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise WeightsError(f"the card of the file is damaged ({reason})") from None


def parse(kind: type, table: dict[str, Any], **parsed: Any) -> Any:
    """A dataclass from JSON: known fields only, each with the type of its default; `parsed` as they are."""
    defaults = {f.name: f.default for f in fields(kind)}
    values = {}
    for name, value in table.items():
        if name not in defaults:
            raise ValueError(f"{kind.__name__} has no field {name!r}")
        values[name] = checked(name, value, defaults[name])
        if reason := out_of_range(name, values[name]):
            raise WeightsError(f"the card of the file: {reason}")
    return kind(**parsed, **values)


def probability(name: str, value: Any) -> float:
    number: float = checked(name, value, 0.0)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {number}")
    return number


def checked(name: str, value: Any, default: Any) -> Any:
    """The value if it has the type of the default; lists become tuples and whole numbers floats."""
    if default is None:  # a parsed stem or text tower, or True, False or None
        if not (value is None or type(value) in (bool, StemConfig, TextConfig)):
            raise TypeError(f"{name} must not be {value!r}")
        return value
    if isinstance(default, tuple):
        if not isinstance(value, list):
            raise TypeError(f"{name} must be a list, not {str(value)[:40]}")
        return tuple(checked(name, item, default[0] if default else "") for item in value)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default) or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"{name} must be {type(default).__name__}, not {str(value)[:40]!r}")
    if isinstance(value, str) and len(value) > LONGEST_LABEL:
        raise ValueError(f"{name} has {len(value)} characters; the limit is {LONGEST_LABEL}")
    return value


def imagenet_synsets() -> tuple[tuple[str, str], ...]:
    """(WordNet number, name) of each ImageNet class."""
    text = files("vitkit.weights").joinpath("imagenet1k.tsv").read_text("utf-8")
    return tuple((number, name) for number, _, name in (line.partition("\t") for line in text.splitlines()))


def imagenet_labels() -> tuple[str, ...]:
    """The names of the ImageNet classes; names that occur twice (crane) get their WordNet number."""
    rows = imagenet_synsets()
    shared = Counter(name for _, name in rows)
    return tuple(f"{name} ({number})" if shared[name] > 1 else name for number, name in rows)


def distinct_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """The labels; a name that several outputs of an ImageNet model share gets the WordNet number of each."""
    times, known = Counter(labels), imagenet_labels()
    if len(times) == len(labels) or len(labels) != len(known):
        return labels
    pairs = zip(labels, known, strict=True)
    return tuple(own if times[name] > 1 and own.startswith(f"{name} (") else name for name, own in pairs)
