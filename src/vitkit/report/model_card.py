"""The model card of a repository on the Hugging Face Hub: README.md with metadata, in Markdown."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import escape

from vitkit.metrics.intervals import percent, span, wilson
from vitkit.report.cost_section import energy_text, price_text, without_none
from vitkit.report.run_page import field_text
from vitkit.report.task_table import TaskTable
from vitkit.report.terminal import duration, printable

LIBRARIES = {"hf": "transformers", "timm": "timm", "vitkit": "vitkit"}
PIXELS = 1000  # an image has more, but shares are printed with one decimal
ROWS = 30  # of a table that is not collapsed
Facts = Mapping[str, Any]  # as commands/push.py collects them
USE = {
    "vitkit": """\
import vitkit  # pip install "vitkit[hub]"

model = vitkit.load("hf:{repo}")
{call}""",
    "transformers": """\
from transformers import pipeline

classifier = pipeline("image-classification", model="{repo}")
classifier("cat.jpg")""",
    "transformers features": """\
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained("{repo}")
model = AutoModel.from_pretrained("{repo}", add_pooling_layer={pooled})""",
    "timm": """\
import timm
from PIL import Image

model = timm.create_model("hf-hub:{repo}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
model(transform(Image.open("cat.jpg").convert("RGB"))[None])""",
}


def model_card(facts: Facts) -> str:
    """README.md: the metadata that the Hub indexes, and sections for what is known of the model."""
    run = facts["run"] or {}
    result = run.get("result") or {}
    test = result.get("test") or {}
    sections = {
        "How to use it": usage(facts),
        "Accuracy": accuracy(test, run),
        "Data": data_section(facts, run),
        "Classes": classes(facts["labels"]),
        "Model": table(facts["model"]),
        "Recipe": recipe_section(facts["recipe"]),
        "Cost": cost_section(result.get("cost") or {}, run.get("spent") or {}),
        "Versions": table(facts["versions"]),
    }
    parts = [f"# {text(facts['name'])}", introduction(facts, run)]
    parts += [f"## {title}\n\n{body}" for title, body in sections.items() if body]
    return f"---\n{metadata(facts, test)}---\n\n" + "\n\n".join(parts) + "\n"


def metadata(facts: Facts, test: Mapping[str, Any]) -> str:
    """The YAML header, each value as JSON, which YAML includes."""
    kind = kind_of(facts)
    values: dict[str, Any] = {
        "license": facts["license"] or None,
        "library_name": LIBRARIES[facts["format"]],
        "pipeline_tag": kind,
        "tags": ["vitkit", "vision", *([kind] if facts["labels"] else [])],
        "base_model": facts["base_model"] or None,
        "datasets": [facts["data"]] if re.fullmatch(r"[\w.-]+", facts["data"], re.ASCII) else None,
        "model-index": model_index(facts, test),
    }
    lines = (
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in without_none(values).items()
    )
    return "".join(lines)


def kind_of(facts: Facts) -> str:
    """The Hub's name of what the model does."""
    kinds = dict.fromkeys(("segment", "instances"), "image-segmentation") | {"detect": "object-detection"}
    if facts.get("task") in kinds:
        return kinds[facts["task"]]
    return "image-classification" if facts["labels"] else "image-feature-extraction"


def model_index(facts: Facts, test: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The measured accuracy as the Hub's leaderboards read it."""
    measured = {"accuracy": test.get("top1"), "mean_average_precision": test.get("mean_average_precision"),
                "mean_iou": test.get("miou"), "average_precision": test.get("ap")}  # fmt: skip
    key, share = next(((k, v) for k, v in measured.items() if v is not None), ("", None))
    if share is None:
        return None
    images, split = test["images"], str(test.get("split") or "test")
    name = f"{key.replace('_', ' ')} on {images:,} images"
    if key == "accuracy":
        name += f", 95 % interval {span(wilson(share, images), images)}"
    elif key == "mean_iou":
        name += f", 95 % interval {span(test['interval'], PIXELS)}"
    kind = re.sub(r"\W+", "-", facts["data"].lower()).strip("-") or "images"
    return [{"name": printable(facts["name"]), "results": [{
        "task": {"type": (task := kind_of(facts)), "name": task.replace("-", " ").capitalize()},
        "dataset": {"name": printable(facts["data"] or "images"), "type": kind, "split": split},
        "metrics": [{"type": key, "value": share, "name": name}],
    }]}]  # fmt: skip


def introduction(facts: Facts, run: Mapping[str, Any]) -> str:
    """What the model is, and how good it is, in two sentences."""
    model = facts["model"]
    trained = f", trained on {text(facts['data'])}" if facts["data"] else ""
    lines = f"A {text(model['architecture'])} of {model['parameters']} parameters{trained}, made with vitkit."
    headline = (run.get("task") or {}).get("headline")
    return f"{lines} **{text(headline[0])}** {text(headline[1])}." if headline else lines


def usage(facts: Facts) -> str:
    """Code for the libraries that load this repository."""
    library = LIBRARIES[facts["format"]]
    names = [library, "vitkit"] if library != "vitkit" else ["vitkit"]
    if not facts["labels"] and library == "transformers":
        names[0] = "transformers features"
    call = 'vitkit.predict(model, "cat.jpg")' if facts["labels"] else 'vitkit.embed(model, "cat.jpg")'
    blocks = [USE[name].format(repo=facts["repo"], call=call, pooled=facts["pooled"]) for name in names]
    return "\n\n".join(f"```python\n{block}\n```" for block in blocks)


def accuracy(test: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The main metric with its interval, and every class."""
    headline = (run.get("task") or {}).get("headline")
    if not headline:
        return ""
    body = f"{text(headline[0])} {text(headline[1])}."
    if tables := (run.get("task") or {}).get("tables"):
        return "\n\n".join([body, *map(task_table, map(TaskTable.from_json, tables))])
    per_class = test.get("per_class") or {}
    key = next((k for row in per_class.values() for k in row if k not in ("images", "interval")), "")
    if not key:
        return body
    rows = [class_row(label, row[key], row["images"], key) for label, row in per_class.items()]
    return f"{body}\n\n{collapsed(columns(rows), len(rows), 'classes')}"


def task_table(content: TaskTable) -> str:
    """A table that the task of the run defines."""
    rows = [{key: text(value) for key, value in row.items()} for row in content.lines()]
    about = f"\n\n{text(content.note)}" if content.note else ""
    return f"### {content.title}{about}\n\n{collapsed(columns(rows), len(rows), 'rows')}"


def class_row(label: str, share: float | None, images: int, key: str) -> dict[str, str]:
    row = {"class": text(label), key.replace("_", " "): percent(share, images)}
    if key == "accuracy":
        row["95 % interval"] = "–" if share is None else span(wilson(share, images), images)
    return row | {"images": f"{images:,}"}


def data_section(facts: Facts, run: Mapping[str, Any]) -> str:
    data = (run.get("environment") or {}).get("data") or {}
    if not facts["data"]:
        return ""
    images = {f"{split} images": f"{count:,}" for split, count in (data.get("images") or {}).items()}
    return table({"data set": facts["data"]} | images | without_none({"classes": data.get("classes")}))


def classes(labels: Sequence[str]) -> str:
    """The names of the outputs, in their order."""
    rows = [{"output": str(i), "class": text(label)} for i, label in enumerate(labels)]
    return collapsed(columns(rows), len(rows), "classes") if rows else ""


def recipe_section(recipe: Mapping[str, Any]) -> str:
    rows = [{"field": f"`{key}`", "value": text(field_text(value))} for key, value in recipe.items()]
    return collapsed(columns(rows), len(rows), "fields") if rows else ""


def cost_section(cost: Mapping[str, Any], spent: Mapping[str, Any]) -> str:
    """Time, price and energy, as the report of the run states them."""
    if cost.get("seconds") is None:
        return ""
    devices = f"{cost['processes']} × " if cost.get("processes", 1) != 1 else ""
    values = {
        "time": f"{duration(cost['seconds'])} on {devices}{cost.get('device', 'a device')}",
        "price": price_text(spent) if spent else None,
        "energy": energy_text(spent) if spent else None,
        "images seen": cost.get("images_seen"),
        "training exaFLOPs": f"{cost['exaFLOPs']:.3g}" if cost.get("exaFLOPs") else None,
        "precision": cost.get("precision"),
    }
    return table(without_none(values))


def table(values: Mapping[str, Any]) -> str:
    """Names and values in two columns."""
    return columns([{"": text(name), " ": text(value)} for name, value in values.items()])


def columns(rows: Iterable[Mapping[str, str]]) -> str:
    rows = list(rows)
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])] if rows else []
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows)])


def collapsed(body: str, rows: int, what: str) -> str:
    """A long table behind a line to click."""
    return (
        body if rows <= ROWS else f"<details><summary>All {rows:,} {what}</summary>\n\n{body}\n\n</details>"
    )


def text(value: object) -> str:
    """Any value as Markdown that shows it as it is: names of classes come from files."""
    shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value))
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", str(escape(shown)))
