"""The report of one run: plain values to one page."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.proportions import percent as share_of
from vitkit.proportions import with_interval
from vitkit.report.beside import TITLE, run_section
from vitkit.report.curves import run_curves
from vitkit.report.expense import cost_section
from vitkit.report.html import (
    Markup,
    commands,
    contents,
    details,
    facts,
    name,
    note,
    page,
    section,
    table,
    text,
)
from vitkit.report.judged import (
    batch_section,
    calibration,
    class_tables,
    confusions,
    mistake_section,
    unsure_section,
)
from vitkit.report.terminal import duration

KEPT = {  # files of a run folder, and what a report lacks without them
    "mistakes": "mistakes to look at", "doctor": "findings about the data",
    "environment": "the machine it ran on",
}  # fmt: skip
FINDINGS = 50
FEWEST = {"min": "fewest", "median": "median", "max": "most"}
Found = Mapping[str, Any]  # what a run folder holds, as experiment.pages gathers it


def run_page(found: Found) -> str:
    """Everything that is known of a run; of what is not, a line says so."""
    sections = {title: body for title, body in parts(found).items() if body}
    ids = {f"part-{i}": title for i, title in enumerate(sections)}
    body = top(found) + contents(ids)
    body += "".join(section(title, sections[title], id) for id, title in ids.items())
    return page(f"{found['name']}: {' '.join(headline(found))}", body)


def parts(found: Found) -> dict[str, str]:
    """The sections by title; an empty one is left out."""
    test = (found["result"] or {}).get("test") or {}
    mistakes = found["mistakes"] or {}
    per_class = test.get("per_class") or {}
    return {
        "Curves": run_curves(found["metrics"], found["task"]["metric"]),
        "Classes": class_tables(per_class) if per_class else "",
        "Confusions": confusions(test.get("confusion"), list(per_class), mistakes.get("pairs")),
        "Calibration": calibration(mistakes.get("calibration") or (), test.get("calibration_error")),
        "Mistakes": mistake_section(mistakes, found.get("table")) if "worst" in mistakes else "",
        "Least confident images": unsure_section(mistakes.get("least") or ()),
        TITLE: run_section(found),
        "Data": data_section(found),
        "Training images": batch_section(batch) if (batch := found.get("batch")) else "",
        "Cost": cost_section(
            (found["result"] or {}).get("cost") or {}, found.get("spent") or {}, found.get("pricing", "")
        ),
        "Recipe": recipe_section(found["recipe"], found["usual"]),
        "Environment": facts(found["environment"]["machine"]) if found["environment"] else "",
        "Commands": command_section(found["commands"]),
    }


def top(found: Found) -> str:
    """The headline, what was done in a sentence or two, and what is missing."""
    big, small = headline(found)
    told = f"<header>\n<h1>{name(found['name'])}</h1>\n"
    told += f'<p class="headline">{text(big)} <small>{text(small)}</small></p>\n'
    told += f"<p>{summary(found)}</p>\n{few_shots(found)}"
    if not found["result"]:
        told += f'<p class="status">{text(unfinished(found))}</p>\n'
    missing = [what for key, what in KEPT.items() if found[key] is None]
    if missing and found["result"] and found["task"]["mistakes"]:
        told += note(f"Not kept with this run, made before they were or without them: {', '.join(missing)}.")
    return told + "</header>\n"


def headline(found: Found) -> tuple[str, str]:
    """The one number, and what it is of."""
    if not found["result"]:
        return "Not finished", ""
    big, small = found["task"]["headline"]
    return big, small


def summary(found: Found) -> Markup:
    """What was trained, on what and from where."""
    recipe, environment = found["recipe"], found["environment"] or {}
    data = environment.get("data") or {}
    start = (
        f"Fine-tuned from {name(recipe['weights'])}"
        if recipe.get("weights")
        else f"{name(recipe.get('model') or 'A model')} trained from scratch"
    )
    told = f"{start} on {name(recipe.get('data') or 'unknown data')}"
    if data:
        told += f" ({data['images'].get('train', 0):,} training images of {data['classes']:,} classes)"
    if found["task"]["about"]:
        told += f" {text(found['task']['about'])}"
    size = " × ".join(map(str, recipe.get("image_size") or ()))
    told += f" at {text(size)} pixels with the recipe {name(recipe.get('name', ''))}"
    if found["result"]:
        cost = found["result"].get("cost") or {}
        told += f": {found['result']['steps']:,} steps of {recipe['batch']:,} images"
        if cost.get("seconds"):
            told += f" in {duration(cost['seconds'])} on {text(cost.get('device', 'a device'))}"
    return Markup(told + ".")


def few_shots(found: Found) -> str:
    """How good its features are elsewhere, where that was asked for."""
    test = (found["result"] or {}).get("test") or {}
    if test.get("fewshot_mean") is None:
        return ""
    images, std = test["fewshot_images"], test.get("fewshot_std")
    told = f"Its features, with {test['fewshot_shots']} images of each class of "
    told += f"{name(found['recipe'].get('fewshot', ''))}: {with_interval(test['fewshot_mean'], images)} right"
    spread = "" if std is None else f"; standard deviation over draws {share_of(std, images)}"
    return f"<p>{told} of {images:,} images{spread}.</p>\n"


def unfinished(found: Found) -> str:
    """How far a run has come that has no result."""
    step = max((row["step"] for row in found["metrics"]), default=0)
    total = (found["environment"] or {}).get("steps") or found["recipe"].get("length.steps")
    told = f"This run has no result: it was interrupted or is still going. It has come to step {step:,}"
    told += f" of {total:,}" if total else ""
    metric = found["task"]["metric"]
    key = f"val_{metric['key']}"
    last = next((row for row in reversed(found["metrics"]) if key in row), None)
    if last:
        value = share_of(last[key], last.get("val_images") or 1) if metric["percent"] else f"{last[key]:.4g}"
        told += f"; at step {last['step']:,} its {metric['label']} on the validation images was {value}"
    return f"{told}. The command that began it goes on from its last checkpoint."


def data_section(found: Found) -> str:
    """Counts of the splits, the doctor's findings and the files that could not be used."""
    doctor, unusable = found["doctor"], found["unusable"] or {}
    told = ""
    if doctor and "skipped" in doctor:
        told += note(doctor["skipped"])
    elif doctor:
        rows = [
            {"split": split, "images": row["images"], "classes": row["classes"],
             **{f"{told}_in_a_class": row["per_class"].get(key) for key, told in FEWEST.items()}}
            for split, row in doctor["splits"].items()
        ]  # fmt: skip
        told += table(rows) + findings(doctor["findings"])
    for split, files in unusable.items():
        if files["count"]:
            listed = table({"file": name(key), "why": text(why)} for key, why in files["files"].items())
            more = (
                f", of which {len(files['files'])} are named" if files["count"] > len(files["files"]) else ""
            )
            told += details(f"Files of {split} that could not be used: {files['count']:,}{more}", listed)
    return told


def findings(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return note("By names and counts nothing is wrong with the data; vitkit doctor looks at every image.")
    rows = [
        {"": Markup(f'<span class="{text(one["severity"])}-word">{text(one["severity"])}</span>'),
         "found": name(one["text"], 1000), "what to do": one["remedy"]}
        for one in found[:FINDINGS]
    ]  # fmt: skip
    more = f" The first {FINDINGS} of {len(found):,}." if len(found) > FINDINGS else ""
    return note(f"By names and counts; vitkit doctor looks at every image.{more}") + table(rows)


def recipe_section(recipe: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Every field; those that differ from the recipe of that name first, and marked."""
    other = {key for key in recipe if key in usual and usual[key] != recipe[key]}
    changed = [{"field": key, "here": name(said(recipe[key])), "by default": name(said(usual[key]))}
               for key in recipe if key in other]  # fmt: skip
    rows = [{"field": key, "value": name(said(value))} for key, value in recipe.items()]
    whole = details(f"All {len(rows)} fields", table(rows, marked=[key in other for key in recipe]))
    if not usual:
        return (
            note("The recipe's name is not one of ours, so that there is nothing to compare it with.") + whole
        )
    lead = f"What differs from the recipe {recipe['name']} as it is by default:" if changed else (
        f"Exactly the recipe {recipe['name']}.")  # fmt: skip
    return note(lead) + (table(changed) if changed else "") + whole


def said(value: Any) -> str:
    """A field's value as one would write it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return "–" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def command_section(told: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"<h3>{text(title)}</h3>\n{commands(lines)}" for title, lines in told.items())
