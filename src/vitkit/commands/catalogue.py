"""The tables of `vitkit list` and the facts of `vitkit show`."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error, did_you_mean, similar_path
from vitkit.metrics.cost import flops, parameters
from vitkit.models.variants import NAMED, Config, Model, skeleton, variant
from vitkit.models.vit import ViTConfig
from vitkit.recipes import RECIPES
from vitkit.recipes.recipe import Recipe, settings
from vitkit.report.terminal import say
from vitkit.tasks.task import built_in_tasks, task_class
from vitkit.weights.card import Card
from vitkit.weights.convert import Conversion
from vitkit.weights.formats import formats as weight_formats
from vitkit.weights.hub import is_hub
from vitkit.weights.load import load
from vitkit.weights.locate import is_exported
from vitkit.weights.published import PUBLISHED


def models() -> list[dict[str, Any]]:
    """Every named model with its sizes; of a ResNet, width of the first stage and number of blocks."""
    rows = []
    for name in NAMED:
        config = variant(name)
        row: dict[str, Any] = {
            "model": name,
            "parameters": parameters(skeleton(config)),
            "width": config.width,
        }
        if isinstance(config, ViTConfig):
            row |= {"depth": config.depth, "heads": config.heads, "tokens_224": config.tokens}
        else:
            heads = config.heads if config.attention == "axial" else None
            row |= {"depth": sum(config.blocks), "heads": heads, "tokens_224": None}
        rows.append(row)
    return rows


def sizes() -> list[dict[str, Any]]:
    """Parameters and FLOPs of every named model next to the published numbers."""
    rows = []
    for name, published in NAMED.items():
        model = skeleton(variant(name))
        rows.append(
            {
                "model": name,
                "parameters": parameters(model),
                "published": published.parameters if published else None,
                "GFLOPs_224": round(flops(model, model.config.image_size) / 1e9, 3),
                "published_GFLOPs": round(2 * published.gmac, 3) if published and published.gmac else None,
            }
        )
    return rows


def weights() -> list[dict[str, Any]]:
    return [
        {
            "name": w.name,
            "pixels": w.pixels,
            "trained_on": w.trained_on,
            "ImageNet_top1": w.top1,
            "evaluation": w.evaluation,
            "MiB": w.megabytes,
            "licence": w.licence,
            "gated": bool(w.gated),
            "address": w.address,
        }
        for w in PUBLISHED.values()
    ]


def formats() -> list[dict[str, Any]]:
    return [
        {
            "format": name,
            "what": "read, write",
            "files": " ".join(ending or "folder" for ending in format.endings),
            "holds": format.description,
        }
        for name, format in weight_formats().items()
    ]


def recipes() -> list[dict[str, Any]]:
    rows = []
    for name, make in RECIPES.items():
        r = make()
        length = f"{r.length.steps} steps" if r.length.steps else f"{r.length.epochs:g} epochs"
        rows.append({"recipe": name, "length": length, "batch": r.batch, "rate": r.schedule.rate,
                     "optimizer": r.optimizer.kind, "pixels": r.image_size[0], "about": r.about})  # fmt: skip
    return rows


def tasks() -> list[dict[str, Any]]:
    """The tasks of this package, without those that a program registers."""
    return [{"task": name, "labels": task_class(name).labelled} for name in sorted(built_in_tasks())]


def describe(what: str) -> dict[str, Any]:
    """The facts of a model file, published weights, a recipe or a named model."""
    if is_hub(what) or Path(what).exists():
        if is_exported(what):
            return exported_facts(what)
        model = load(what)
        return {"file": what} | size_facts(model.config) | file_facts(model)
    if what in PUBLISHED:
        weight = asdict(PUBLISHED[what])
        config = variant(weight["model"])
        return weight | size_facts(replace(config, image_size=(weight["pixels"], weight["pixels"])))
    if what in RECIPES:
        return recipe_facts(RECIPES[what]())
    try:
        return {"model": what} | size_facts(variant(what))
    except Error as error:
        hint = did_you_mean(what, [*NAMED, *PUBLISHED, *RECIPES], cutoff=0.7) or similar_path(what)
        if error.code != "model.unknown" or not hint:
            raise
        message = f"no model {what!r}, and no weights, recipe or file of this name;{hint} see vitkit list"
        raise Error(message, code="model.unknown") from None


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """All fields by the names that --set uses, and those that are chosen automatically."""
    return settings(recipe) | {"auto": recipe.auto}


def size_facts(config: Config) -> dict[str, Any]:
    model = skeleton(config)
    facts: dict[str, Any] = {"kind": "ViT" if isinstance(config, ViTConfig) else "ResNet"}
    facts["parameters"] = parameters(model)
    for pixels in (224, 384):
        facts[f"GFLOPs_{pixels}"] = cost_at(model, pixels)
    return facts | {k: v for k, v in asdict(config).items() if k != "stem"} | stem_facts(config)


def cost_at(model: Model, pixels: int) -> float | str:
    """GFLOPs of one square image, or the reason why the model cannot run at this size."""
    try:
        return round(flops(model, (pixels, pixels), model.config.channels) / 1e9, 3)
    except ValueError as error:
        return str(error)


def stem_facts(config: Config) -> dict[str, Any]:
    stem = config.stem if isinstance(config, ViTConfig) else None
    return {f"stem_{k}": v for k, v in asdict(stem).items()} if stem else {}


def exported_facts(what: str) -> dict[str, Any]:
    """The facts of an exported file; nothing in it is run."""
    from vitkit.inference.export import NAMES, describe_export

    exported = describe_export(what)
    facts = {"file": what, "format": NAMES[Path(what).suffix]}
    facts |= {k: v for k, v in exported.facts.items() if v}
    return facts | size_facts(exported.card.config) | file_facts(exported.card)


def file_facts(model: Model | Card) -> dict[str, Any]:
    first = model.labels[:5]
    more = (f"... {len(model.labels)} in total",) if len(model.labels) > 5 else ()
    return {
        "labels": (*first, *more),
        "preprocessing": asdict(model.preprocessing),
        "origin": {k: v for k, v in asdict(model.origin).items() if v and k != "notes"},
        "notes": model.origin.notes,
    }


def print_conversion(c: Conversion) -> None:
    """Print the parity report of a conversion."""
    say(f"{c.source} ({c.source_format}) -> {c.out} ({c.format}), {c.parameters:,} parameters")
    for note in c.notes:
        say(f"  note: {note}")
    say(f"  round trip       {'all tensors bit-identical' if c.read_back else 'TENSORS DIFFER'}")
    if c.parity and c.parity.skipped:
        say(f"  against {c.parity.peer:12} not compared: {c.parity.skipped}")
    elif c.parity:
        parts = {"logits": c.parity.logits, "features": c.parity.features}
        text = ", ".join(f"{k} {v:.1e}" for k, v in parts.items() if v is not None)
        verdict = "equal" if c.parity.ok else "NOT EQUAL"
        say(f"  against {c.parity.peer}: {verdict}; max difference: {text} (limit {c.parity.tolerance:.0e})")
    if c.changed:
        say(f"  numerical settings of that library change the logits of this model by up to {c.changed:.1e}")
    if not c.ok:
        say("  nothing was written", style="bold red")
