"""The tables of `vitkit list` and `vitkit study list`, and the fields of named recipes, without torch.

`python tests/make_listing.py` generates listing.json from the code, and a test checks that it is up to date.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

TABLE = "listing.json"


@cache
def table() -> dict[str, Any]:
    return json.loads(files("vitkit").joinpath(TABLE).read_text("utf-8"))


def rows(kind: str) -> list[dict[str, Any]]:
    """The table of models, weights, formats, recipes, studies or tasks: one row each."""
    return table()[kind]


def recipe_fields(name: str) -> dict[str, Any]:
    """The fields of a named recipe by their dotted names; empty for an unknown name."""
    return table()["recipe_fields"].get(name, {})


def tasks_without_labels() -> tuple[str, ...]:
    """The names of the tasks that train a model without class labels."""
    return tuple(row["task"] for row in rows("tasks") if not row["labels"])


def is_finetuning(recipe: str) -> bool:
    """Whether the recipe is one of `vitkit finetune`; all others are of `vitkit pretrain`."""
    return recipe in table()["finetuning"]
