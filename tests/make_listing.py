"""src/vitkit/listing.json out of the tables of the code: python tests/make_listing.py writes it."""

import json
from pathlib import Path
from typing import Any

import vitkit
from vitkit.commands import catalogue
from vitkit.listing import TABLE
from vitkit.recipes import RECIPES
from vitkit.recipes.finetune import RECIPES as FINETUNING
from vitkit.studies.scale import listed


def computed() -> dict[str, Any]:
    """What the file must hold."""
    return {
        "models": catalogue.models(), "weights": catalogue.weights(), "formats": catalogue.formats(),
        "recipes": catalogue.recipes(), "studies": listed(), "tasks": catalogue.tasks(),
        "finetuning": list(FINETUNING),
        "recipe_fields": {
            name: json.loads(json.dumps(catalogue.recipe_facts(make()))) for name, make in RECIPES.items()
        },
    }  # fmt: skip


def text(content: dict[str, Any]) -> str:
    """One line for each entry, so that a change is a short difference."""
    parts = []
    for kind, entries in content.items():
        if isinstance(entries, dict):
            lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
            inside = "{\n" + ",\n".join(lines) + "\n}"
        else:
            inside = "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]"
        parts.append(f"{json.dumps(kind)}: {inside}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    (Path(vitkit.__file__).parent / TABLE).write_text(text(computed()))
