"""Write docs/reference/recipe-fields.md: every field of a recipe with its type, default and comment."""

import dataclasses
import inspect
import io
import re
import tokenize
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vitkit.models.lora import LoRA
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.vit_config import CHOICES as MODEL_CHOICES
from vitkit.models.vit_config import ViTConfig
from vitkit.recipes.recipe import AUTO, CHOICES, Recipe
from vitkit.recipes.values import GROUPED
from vitkit.tasks.task import option_names, task_class, task_names
from vitkit.training.optimizer import OPTIMIZERS, OptimizerConfig
from vitkit.training.schedule import DECAYS, Duration, Schedule

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "recipe-fields.md"
START = """# Recipe fields

Every field of a [recipe](../research/recipes.md). `--set` takes the name of a field or its grouped
name, if it has one. `vitkit list recipes` lists the recipes, and `vitkit show RECIPE` prints the values of
one.

This page is written by `python tests/make_recipe_page.py`.

## Recipe

"""
OPTIONS = """
## Model options

Options of a model that is trained from scratch. The defaults are those of ViT-B/16 and BiT-R50x1;
`vitkit show MODEL` prints those of another model.
"""
TASKS = """
## Task options

Options of the task that a recipe trains (its field `objective`), as in `--set masked.rate=0.15`.
"""
PARTS = {"length": Duration, "schedule": Schedule, "optimizer": OptimizerConfig, "lora": LoRA}
MODELS = {
    "Vision Transformers": (ViTConfig, ""),
    "Hybrids": (StemConfig, "stem."),
    "ResNets": (ResNetConfig, ""),
}
ELSEWHERE = {  # fields of a model that fields of the recipe, its data or its weights set
    "stem", "text", "image_size", "classes", "dropout", "stochastic_depth",
}  # fmt: skip
KNOWN: dict[type, dict[str, Collection[str]]] = {  # the choices of fields
    Recipe: {**CHOICES, "auto": tuple(AUTO)},
    Schedule: {"decay": DECAYS},
    OptimizerConfig: {"kind": tuple(OPTIMIZERS)},
    ViTConfig: MODEL_CHOICES,
}


def comments(cls: type) -> dict[str, str]:
    """The comment at the end of the line of each field."""
    result, first = dict(comments(cls.__base__) if dataclasses.is_dataclass(cls.__base__) else {}), ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type == tokenize.NAME and not token.line[: token.start[1]].strip():
            first = token.string
        elif token.type == tokenize.COMMENT and token.line.strip().startswith(f"{first}:"):
            result[first] = re.sub(": (names|a key) of [A-Z]+$", "", token.string.removeprefix("#").strip())
    return result


def default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{text.lower() if value is None or isinstance(value, bool) else text}`" if text else "empty"


def type_of(hint: Any) -> str:
    return (hint.__name__ if isinstance(hint, type) else str(hint)).replace("|", "or")


def table(cls: type, prefix: str = "", option: str = "") -> str:
    """The fields of a dataclass. prefix: of their own names; option: that of a model's options."""
    messages, known = comments(cls), KNOWN.get(cls, {})
    lines = ["| field | grouped name | type | default | meaning |", "|---|---|---|---|---|"]
    names = {own: grouped for grouped, own in GROUPED.items()}
    for field in dataclasses.fields(cls):
        if field.name in getattr(cls, "from_recipe", ()):  # of a task: the recipe has it
            continue
        name = option + prefix + field.name
        if field.name in getattr(cls, "from_recipe", ()):  # of a task: fields of the recipe set these
            continue
        if cls is Recipe and field.name in {*PARTS, "model_options", "task_options"}:
            lines.append(f"| `{name}` | | | | [below](#{field.name.replace('_', '-')}) |")
        elif not option or field.name not in ELSEWHERE or prefix:
            meaning, choices = messages.get(field.name, ""), known.get(field.name, ())
            if any(one not in meaning and one != field.default for one in choices):
                listed = ", ".join(f"`{one}`" for one in choices)
                meaning = f"{meaning}: {listed}" if meaning else listed
            kind, usual = type_of(field.type), default(field.default)
            grouped = f"`{names[name]}`" if name in names else ""
            lines.append(f"| `{name}` | {grouped} | {kind} | {usual} | {meaning} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    parts = [f"\n## {name}\n\n{cls.__doc__}\n\n{table(cls, f'{name}.')}" for name, cls in PARTS.items()]
    models = [
        f"\n### {title}\n\n{cls.__doc__}\n\n{table(cls, prefix, 'model_options.')}"
        for title, (cls, prefix) in MODELS.items()
    ]
    tasks = {name: task_class(name) for name in task_names()}
    options = [
        f"\n### {name}\n\n{cls.__doc__}\n\n{table(cls, f'{name}.')}"
        for name, cls in tasks.items()
        if option_names(cls)
    ]
    return START + table(Recipe) + "".join(parts) + TASKS + "".join(options) + OPTIONS + "".join(models)


if __name__ == "__main__":
    PAGE.write_text(page())
