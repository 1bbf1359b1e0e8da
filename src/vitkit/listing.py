"""What `vitkit list` and `vitkit study list` print, and the fields of named recipes, without torch.

listing.json holds what the tables of the code amount to; `python tests/make_listing.py` writes it, and a test
compares it with them.
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
    """Of models, weights, formats, recipes or studies: one row each."""
    return table()[kind]


def recipe_fields(name: str) -> dict[str, Any]:
    """The fields of a named recipe by their dotted names; none for a name that is not known."""
    return table()["recipe_fields"].get(name, {})


def is_finetuning(recipe: str) -> bool:
    """Whether `vitkit finetune` has the recipe; the others are those of `vitkit pretrain`."""
    return recipe in table()["finetuning"]
