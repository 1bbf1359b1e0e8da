"""The HTML report of one run."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.metrics.intervals import percent, span, wilson, with_interval
from vitkit.report.charts import bar, line_chart
from vitkit.report.confusion import FIRST, NAMED, ROWS, confusions
from vitkit.report.cost_section import cost_section, device_name, environment_section
from vitkit.report.dense_sections import dense_sections, legend_of
from vitkit.report.html import (
    Number,
    clipped,
    commands,
    details,
    fill,
    fixed_percent,
    name,
    note,
    page,
    picture,
    table,
)
from vitkit.report.literature import PUBLISHED, run_section
from vitkit.report.run_curves import run_curves
from vitkit.report.terminal import duration

STORED = {  # files of a run folder, and what the report misses without them
    "mistakes": "misclassified images", "doctor": "dataset findings", "environment": "machine information",
}  # fmt: skip
FINDINGS = 50
PER_CLASS = {"min": "fewest", "median": "median", "max": "most"}
SEEN = 12  # mistakes shown at first
ENOUGH = 5  # minimum images per point of a calibration curve
Run = Mapping[str, Any]  # the contents of a run folder, as runs/page.py collects them


def run_page(run: Run) -> str:
    """The report of a run; sections whose data is missing are omitted, and the header lists them."""
    test = test_of(run)
    mistakes, kept = run["mistakes"] or {}, (run["result"] or {}).get("kept") or {}
    dense = dense_sections(run["task"], test, run.get("samples") or {})
    per_class = test.get("per_class") or {}
    classes = dense or {
        "Classes": class_tables(per_class) if per_class else Markup(),
        "Confusion matrix": confusions(test.get("confusion"), list(per_class), mistakes.get("pairs")),
    }
    sections = {
        "Cross-validation": folds_section(run.get("folds")),
        "Curves": run_curves(run["metrics"], run["task"]["metric"], run["task"].get("metrics", ())),
        "Features": feature_section((run["result"] or {}).get("features"), run.get("pictures") or {}),
        **classes,
        "Calibration": calibration(
            mistakes.get("calibration") or (), test.get("calibration_error"), kept.get("calibration") or {}
        ),
        "Mistakes": mistake_section(mistakes, run.get("table")) if "worst" in mistakes else Markup(),
        "Least confident": unsure_section(mistakes),
        "Sample images": sample_section(run.get("samples") or {}),
        PUBLISHED: run_section(run),
        "Data": data_section(run),
        "Training batch": batch_section(batch) if (batch := run.get("batch")) else Markup(),
        "Cost": cost_section(
            (run["result"] or {}).get("cost") or {}, run.get("spent") or {}, run.get("pricing", "")
        ),
        "Recipe": recipe_section(run["recipe"], run["usual"]),
        "Environment": environment_section(run["environment"]["machine"]) if run["environment"] else Markup(),
        "Commands": fill("run.html", "command_groups",
                         [(title, commands(lines)) for title, lines in run["commands"].items()]),
    }  # fmt: skip
    return page(f"{run['name']}: {' '.join(headline(run))}", header(run), sections)


def test_of(run: Run) -> Mapping[str, Any]:
    return (run["result"] or {}).get("test") or {}


def header(run: Run) -> Markup:
    """The headline, a summary of the run, and what is missing."""
    missing = [content for key, content in STORED.items() if run[key] is None]
    expects_all = run["result"] and run["task"]["mistakes"]
    return fill(
        "run.html", "header", run["name"], *headline(run), summary(run), few_shot(run),
        "" if run["result"] else unfinished(run), missing if expects_all else (),
    )  # fmt: skip


def headline(run: Run) -> tuple[str, str]:
    """The main metric, and a line that explains it."""
    if not run["result"]:
        return "Not finished", ""
    big, small = run["task"]["headline"]
    return big, small


def summary(run: Run) -> Markup:
    """The model, data, recipe and duration of a run."""
    recipe, result = run["recipe"], run["result"]
    data = (run["environment"] or {}).get("data") or {}
    cost = (result or {}).get("cost") or {}
    return fill(
        "run.html", "summary", weights=recipe.get("weights"), model=recipe.get("model") or "A model",
        data=recipe.get("data") or "unknown data", about=run["task"]["about"],
        counts=(data["images"].get("train", 0), data["classes"]) if data else None,
        pixels=" × ".join(map(str, recipe.get("image_size") or ())), recipe=recipe.get("name", ""),
        steps=result["steps"] if result else None, batch=recipe["batch"] if result else None,
        fitted=is_fitted_head(recipe),
        time=duration(cost["seconds"]) if cost.get("seconds") else "",
        device=device_name(cost.get("device", "a device")),
    )  # fmt: skip


def is_fitted_head(recipe: Mapping[str, Any]) -> bool:
    """Whether the run fitted a head to frozen features and trained nothing."""
    steps, warmup = recipe.get("length.steps"), recipe.get("schedule.warmup")
    return recipe.get("head_init") == "least-squares" and steps == warmup == 1


def few_shot(run: Run) -> Markup:
    """Few-shot accuracy on another data set, if it was measured."""
    test = test_of(run)
    if test.get("fewshot_mean") is None:
        return Markup()
    images, deviation = test["fewshot_images"], test.get("fewshot_std")
    data = run["recipe"].get("fewshot") or run["recipe"].get("data", "")
    return fill(
        "run.html", "few_shot", data, test["fewshot_shots"],
        with_interval(test["fewshot_mean"], images), images,
        "" if deviation is None else percent(deviation, images),
    )  # fmt: skip


def unfinished(run: Run) -> str:
    """The progress of a run without a result."""
    step = max((row["step"] for row in run["metrics"]), default=0)
    total = (run["environment"] or {}).get("steps") or run["recipe"].get("length.steps")
    reached = f"{step:,} of {total:,}" if total else f"{step:,}"
    metric = run["task"]["metric"]
    key = f"val_{metric['key']}"
    last = next((row for row in reversed(run["metrics"]) if key in row), None)
    metric_note = ""
    if last:
        value = percent(last[key], last.get("val_images") or 1) if metric["percent"] else f"{last[key]:.4g}"
        metric_note = f"; validation {metric['label']} was {value} at step {last['step']:,}"
    return (
        "This run has no result yet: it is still running or was interrupted. It reached step "
        f"{reached}{metric_note}. Run the same command again to resume from the last checkpoint."
    )


def folds_section(folds: Mapping[str, Any] | None) -> Markup:
    """The accuracy of each fold, and their mean."""
    if not folds:
        return Markup()
    rows, images = folds["folds"], folds["images"]
    lead = (
        f"Accuracy {percent(folds['mean'], images)} ± {percent(folds['std'], images)}, mean and standard "
        f"deviation of {len(rows)} folds; 95 % interval {span(folds['interval'], images)}. Each fold was "
        "held out of one training. The model of this report was trained on all of them with the same recipe."
    )
    return note(lead) + table(
        {"fold": row["fold"], "images": row["images"],
         "accuracy": Number(percent(row["top1"], row["images"])),
         "95 % interval": Number(span(row["interval"], row["images"])), " ": bar(row["top1"])}
        for row in rows
    )  # fmt: skip


def feature_section(verdict: Mapping[str, Any] | None, pictures: Mapping[str, Any]) -> Markup:
    """Of a run without labels: the verdict on its features, and pictures of them."""
    body = Markup()
    if verdict:
        images = verdict["images"]
        lead = (
            f"{verdict['sentence'][:1].upper()}{verdict['sentence'][1:]}. Frozen features with the labels of "
            f"{verdict['reference']:,} images, on {images:,} {verdict['split']} of {verdict['data']}; exact "
            "McNemar tests, which share an error probability of 5 %."
        )
        body += note(lead) + table(
            {"measure": {"knn": "k-NN", "probe": "linear probe"}.get(key, key),
             "before": Number(with_interval(row["before"], images)),
             "after": Number(with_interval(row["after"], images)),
             "difference, points (95 %)": Number(" to ".join(f"{100 * e:+.1f}" for e in row["difference"])),
             "p": Number(f"{row['p']:.2g}"), "verdict": row["verdict"]}
            for key, row in verdict["measures"].items()
        )  # fmt: skip
    if moments := pictures.get("moments"):
        steps = [f"step {moment['step']:,}" for moment in moments]
        rows = [
            [picture(data, "image/jpeg", f"{label}, image {number + 1}") for label, data in
             [("the image", image), *((step, m["colours"][number]) for step, m in
                                      zip(steps, moments, strict=True))]]
            for number, image in enumerate(pictures["images"])
        ]  # fmt: skip
        body += fill("run.html", "moments", ["image", *steps], rows)
    extra = [
        (picture(p["image"], "image/jpeg", p["caption"]), p["caption"]) for p in pictures.get("pictures", ())
    ]
    return body + (fill("run.html", "task_pictures", extra) if extra else Markup())


def class_tables(per_class: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The worst classes, and all classes in a collapsed table."""
    key = next((k for row in per_class.values() for k in row if k != "images"), "accuracy")
    rows = [(label, row[key], row["images"]) for label, row in per_class.items()]
    known = [row for row in rows if row[1] is not None]
    worst = sorted(known, key=lambda row: (row[1], row[0]))[:FIRST]
    lead = f"The {len(worst)} worst of {len(rows):,} classes" if len(rows) > FIRST else "Worst classes first"
    without = len(rows) - len(known)
    lead += f"; classes without images: {without:,}." if without else "."
    body = note(lead) + class_table(worst, key)
    if len(rows) > 1:
        which = f"The first {ROWS:,} of {len(rows):,}" if len(rows) > ROWS else f"All {len(rows):,}"
        body += details(f"{which} classes in dataset order", class_table(rows[:ROWS], key))
    return body


def class_table(rows: Sequence[tuple[str, float | None, int]], key: str) -> Markup:
    """A table of classes; accuracies have a 95 % interval, average precisions do not."""

    def line(label: str, share: float | None, images: int) -> dict[str, Any]:
        ends = "–" if share is None else span(wilson(share, images), images)
        interval = {"95 % interval": Number(ends)} if key == "accuracy" else {}
        row = {"class": name(label, NAMED), key: Number(percent(share, images)), **interval}
        return row | {" ": bar(share or 0.0), "images": images}

    return table(line(*row) for row in rows)


def calibration(bins: Sequence[Sequence[float]], error: float | None, fitted: Mapping[str, float]) -> Markup:
    """Accuracy by confidence: bins of (mean confidence, accuracy, images).

    fitted: temperature and threshold of a calibrated run
    """
    points = [(b[0], b[1]) for b in bins if b[2] >= ENOUGH]
    if not points and error is None:
        return Markup()
    chart = line_chart(
        {"this model": points}, x_label="confidence", y_label="accuracy", points=True,
        percent=True, percent_x=True, ideal={"ideal": [(0.0, 0.0), (1.0, 1.0)]},
    )  # fmt: skip
    error_text = "" if error is None else f"Expected calibration error {fixed_percent(error, 1)}."
    return fill("run.html", "calibration", error_text, chart if points else None, ENOUGH, fitted)


def pictures(predictions: Sequence[Mapping[str, Any]]) -> Markup:
    """Images with their predictions and, if available, their attention maps."""
    rows = []
    for row in predictions:
        alt = f"{clipped(str(row['key']), 80)}: true class {clipped(row['truth'], 40)}"
        images = ((row.get("image"), alt), (row.get("overlay"), f"attention over {alt}"))
        rows.append({
            "images": [picture(data, "image/jpeg", alt) for data, alt in images if data],
            "predicted": name(row["said"], NAMED), "confidence": fixed_percent(row["confidence"], 1),
            "correct": row["said"] == row["truth"], "truth": name(row["truth"], NAMED),
            "file": name(row["key"], NAMED),
        })  # fmt: skip
    return fill("run.html", "pictures", rows)


def mistake_section(mistakes: Mapping[str, Any], link: str | None = None) -> Markup:
    """The most confident mistakes; `link`: the URL of a file with all mistakes."""
    worst, unsure = mistakes["worst"], mistakes.get("unsure")
    if not mistakes["wrong"]:
        return note("No images are misclassified.")
    more = details(f"{len(worst) - SEEN} more mistakes", pictures(worst[SEEN:])) if worst[SEEN:] else ""
    attention = any(row.get("overlay") for row in worst)
    return fill(
        "run.html", "mistakes", mistakes["wrong"], mistakes["images"], link, attention,
        pictures(worst[:SEEN]), more,
        details("Least confident mistakes", pictures(unsure)) if unsure else "",  # of older runs
    )  # fmt: skip


def unsure_section(mistakes: Mapping[str, Any]) -> Markup:
    """The correct images with the lowest confidence; of older runs also wrong ones."""
    if correct := mistakes.get("least_correct"):
        lead = "Correct predictions with the lowest confidence: what the model almost got wrong."
        return note(lead) + pictures(correct)
    if predictions := mistakes.get("least"):
        lead = "The images with the lowest confidence, correct or not, except those above. "
        return note(f"{lead}They are often unusual, ambiguous or mislabelled.") + pictures(predictions)
    return Markup()


def sample_section(samples: Mapping[str, Any]) -> Markup:
    """Test images with their labels and predictions: one of each class, or some of all."""
    if not samples.get("images"):
        return Markup()
    rows = []
    for sample in samples["images"]:
        alt = f"{clipped(str(sample['key']), 80)}: {', '.join(clipped(t, 40) for t in sample['truth'])}"
        rows.append({
            "image": picture(sample["image"], "image/jpeg", alt),
            "truth": [name(label, NAMED) for label in sample["truth"]],
            "predicted": [(name(label, NAMED), fixed_percent(share, 1), label in sample["truth"])
                          for label, share in sample["predicted"]],
        })  # fmt: skip
    classes, count = samples["classes"], len(rows)
    if classes is None:
        lead = f"{count} images of the test set, evenly chosen, with the most probable labels."
    else:
        which = "every class" if count == classes else f"{count} of {classes:,} classes"
        lead = f"One test image of {which}: the most confident prediction, correct where any is."
    return note(lead) + fill("run.html", "samples", rows, classes is None)


def batch_section(batch: Mapping[str, Any]) -> Markup:
    """Images of the first training batch, cropped and augmented, with their labels."""
    images = []
    for image in batch["images"]:
        words = ", ".join(clipped(str(label), 40) for label, _ in image["labels"])
        alt = f"training image labelled {words}" if words else "training image"
        labels = [(name(label, NAMED), "" if share >= 0.995 else f"\u00a0{100 * share:.0f}\u00a0%")
                  for label, share in image["labels"]]  # fmt: skip
        images.append((picture(image["image"], "image/jpeg", alt), labels))
    lead = f"The first {len(images)} of {batch['of']:,} images of step {batch['step'] + 1:,}, as the model "
    body = fill("run.html", "batch", f"{lead}sees them: {batch['how']}.", images)
    return legend_of(batch["legend"]) + body if batch.get("legend") else body


def data_section(run: Run) -> Markup:
    """Images per split, the findings of vitkit doctor, and unusable files."""
    doctor, body = run["doctor"], Markup()
    if doctor and "skipped" in doctor:
        body += note(doctor["skipped"])
    elif doctor:
        rows = [
            {"split": split, "images": row["images"], "classes": row["classes"],
             **{f"{label}_per_class": row["per_class"].get(key) for key, label in PER_CLASS.items()}}
            for split, row in doctor["splits"].items()
        ]  # fmt: skip
        if run["task"].get("tables"):  # images have no label of their own
            rows = [{"split": row["split"], "images": row["images"]} for row in rows]
        body += table(rows) + findings(doctor["findings"])
    unusable = [
        (split, files["count"], len(files["files"]),
         [{"file": name(key), "reason": why} for key, why in files["files"].items()])
        for split, files in (run["unusable"] or {}).items() if files["count"]
    ]  # fmt: skip
    return body + fill("run.html", "unusable", unusable)


def findings(entries: Sequence[Mapping[str, Any]]) -> Markup:
    lead = "Based on file names and counts only; vitkit doctor checks every image."
    if not entries:
        return note(f"No problems found. {lead}")
    rows = [
        {"": fill("run.html", "severity", entry["severity"]), "finding": name(entry["text"], 1000),
         "what to do": entry["remedy"]}
        for entry in entries[:FINDINGS]
    ]  # fmt: skip
    more = f" Showing the first {FINDINGS} of {len(entries):,}." if len(entries) > FINDINGS else ""
    return note(f"{lead}{more}") + table(rows)


def recipe_section(recipe: Mapping[str, Any], defaults: Mapping[str, Any]) -> Markup:
    """The fields that differ from the defaults, and all fields in a collapsed table."""
    changed = [key for key in recipe if key in defaults and defaults[key] != recipe[key]]
    rows = [{"field": key, "value": name(field_text(value))} for key, value in recipe.items()]
    all_fields = details(f"All {len(rows)} fields", table(rows, [key in changed for key in recipe]))
    if not defaults:
        return note("A custom recipe, without defaults to compare with.") + all_fields
    if not changed:
        return note(f"All fields have the defaults of the recipe {recipe['name']}.") + all_fields
    differences = [
        {"field": key, "this run": name(field_text(recipe[key])), "default": name(field_text(defaults[key]))}
        for key in changed
    ]
    lead = note(f"Fields that differ from the defaults of the recipe {recipe['name']}:")
    return lead + table(differences) + all_fields


def field_text(value: Any) -> str:
    """A recipe value as text."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return "–" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)
