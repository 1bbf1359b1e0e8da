"""Names of a recipe's fields by groups, as data.batch, which --set and recipe files take beside its own."""

from collections.abc import Mapping
from typing import Any

from vitkit.errors import Error
from vitkit.options import flat
from vitkit.recipes.model_options import TYPES
from vitkit.recipes.values import unknown

GROUPED = {  # group.name -> the recipe's own name for it; schedule.* and optimizer.* are its own already
    "model.name": "model",
    "model.weights": "weights",
    "model.keep_representation": "keep_representation",
    "model.head_bias": "head_bias",
    **{f"model.{name}": f"model_options.{name}" for name in TYPES},
    "data.source": "data",
    "data.against": "against",
    "data.subset": "subset",
    "data.split_of": "split_of",
    "data.train_on": "train_on",
    "data.image_size": "image_size",
    "data.batch": "batch",
    "data.micro_batch": "micro_batch",
    "augment.crop": "crop",
    "augment.resize": "resize",
    "augment.flip": "flip",
    "augment.randaugment": "randaugment",
    "augment.mixup": "mixup",
    "schedule.steps": "length.steps",
    "schedule.epochs": "length.epochs",
    "schedule.more_steps": "more_steps",
    "schedule.rates": "rates",
    "schedule.convolution_rates": "convolution_rates",
    "evaluation.val": "val",
    "evaluation.test": "test",
    "evaluation.crop": "evaluation_crop",
    "evaluation.count": "evaluations",
    "evaluation.report_on": "report_on",
    "evaluation.fewshot": "fewshot",
    "evaluation.shots": "shots",
    "evaluation.draws": "draws",
    "evaluation.fewshot_when": "fewshot_when",
    "evaluation.patience": "patience",
    "evaluation.keep": "keep",
}
GROUPS = {name.partition(".")[0] for name in GROUPED} - {"schedule"}  # no fields with parts of their own


def own_name(name: str) -> str:
    """The recipe's own name of a field: data.batch -> batch, model.head -> model_options.head."""
    first, _, rest = name.partition(".")
    if rest and first in GROUPS and name not in GROUPED:
        raise unknown(name, [known for known in GROUPED if known.startswith(f"{first}.")])
    return GROUPED.get(name, name)


def field_of(change: str) -> str:
    """The field of a recipe that 'name=text' is about."""
    return own_name(change.partition("=")[0].strip()).partition(".")[0]


def ungrouped(table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's table with the recipe's own names, whichever it is written with."""
    made: dict[str, Any] = {}
    for name, content in flat(dict(table)).items():
        *parents, last = own_name(name).split(".")
        inside = made
        for parent in parents:
            inside = inside.setdefault(parent, {})
            if not isinstance(inside, dict):
                raise Error(f"{parent} is given twice, once as a whole", code="recipe.format")
        if last in inside:
            raise Error(f"{name} is given twice", code="recipe.format")
        inside[last] = content
    return made
