"""The report of one run: what its folder holds, as one page."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.metrics.intervals import percent as share_of
from vitkit.metrics.intervals import span, wilson, with_interval
from vitkit.report.charts import bar, line_chart, run_curves, short
from vitkit.report.html import (
    Number,
    clipped,
    commands,
    details,
    facts,
    fill,
    name,
    note,
    page,
    percent,
    picture,
    table,
)
from vitkit.report.literature import PUBLISHED, run_section
from vitkit.report.terminal import duration

STORED = {  # files of a run folder, and what a report lacks without them
    "mistakes": "mistakes to look at", "doctor": "findings about the data",
    "environment": "the machine it ran on",
}  # fmt: skip
FINDINGS = 50
PER_CLASS = {"min": "fewest", "median": "median", "max": "most"}
FIRST, ROWS, OFTEN = 20, 1000, 12  # rows of a table at first, unfolded, and beside a matrix
SEEN = 12  # mistakes at first
ENOUGH = 5  # images for a point of a calibration curve
NAMED = 120  # letters of a name in a long table
WHOLE, PART = 40, 24  # classes whose whole matrix fits a wide screen; of more, so many that are confused most
NARROW, NARROW_PART = 10, 8  # the same on a phone
OTHER = "other classes"
Run = Mapping[str, Any]  # what a run folder holds, as experiment.pages gathers it
Pair = tuple[str, str, int, int]  # true class, predicted class, how often, images of the true class
Matrix = Sequence[Sequence[int]]


def run_page(run: Run) -> str:
    """Everything that is known of a run; what its folder lacks is left out, with a line that names it."""
    test = test_of(run)
    mistakes = run["mistakes"] or {}
    per_class = test.get("per_class") or {}
    sections = {
        "Curves": run_curves(run["metrics"], run["task"]["metric"]),
        "Classes": class_tables(per_class) if per_class else Markup(),
        "Confusion matrix": confusions(test.get("confusion"), list(per_class), mistakes.get("pairs")),
        "Calibration": calibration(mistakes.get("calibration") or (), test.get("calibration_error")),
        "Mistakes": mistake_section(mistakes, run.get("table")) if "worst" in mistakes else Markup(),
        "Least confident images": unsure_section(mistakes.get("least") or ()),
        PUBLISHED: run_section(run),
        "Data": data_section(run),
        "Training images": batch_section(batch) if (batch := run.get("batch")) else Markup(),
        "Cost": cost_section(
            (run["result"] or {}).get("cost") or {}, run.get("spent") or {}, run.get("pricing", "")
        ),
        "Recipe": recipe_section(run["recipe"], run["usual"]),
        "Environment": facts(run["environment"]["machine"]) if run["environment"] else Markup(),
        "Commands": fill("run.html", "command_groups",
                         [(title, commands(lines)) for title, lines in run["commands"].items()]),
    }  # fmt: skip
    return page(f"{run['name']}: {' '.join(headline(run))}", header(run), sections)


def test_of(run: Run) -> Mapping[str, Any]:
    return (run["result"] or {}).get("test") or {}


def header(run: Run) -> Markup:
    """The headline, what was done in a sentence or two, and what is missing."""
    missing = [what for key, what in STORED.items() if run[key] is None]
    complete = not run["result"] or not run["task"]["mistakes"]
    return fill(
        "run.html", "header", run["name"], *headline(run), summary(run), few_shot(run),
        "" if run["result"] else unfinished(run), () if complete else missing,
    )  # fmt: skip


def headline(run: Run) -> tuple[str, str]:
    """The one number, and what it is of."""
    if not run["result"]:
        return "Not finished", ""
    big, small = run["task"]["headline"]
    return big, small


def summary(run: Run) -> Markup:
    """What was trained, on what and from where."""
    recipe, result = run["recipe"], run["result"]
    data = (run["environment"] or {}).get("data") or {}
    cost = (result or {}).get("cost") or {}
    return fill(
        "run.html", "summary", weights=recipe.get("weights"), model=recipe.get("model") or "A model",
        data=recipe.get("data") or "unknown data", about=run["task"]["about"],
        counts=(data["images"].get("train", 0), data["classes"]) if data else None,
        pixels=" × ".join(map(str, recipe.get("image_size") or ())), recipe=recipe.get("name", ""),
        steps=result["steps"] if result else None, batch=recipe["batch"] if result else None,
        time=duration(cost["seconds"]) if cost.get("seconds") else "",
        device=cost.get("device", "a device"),
    )  # fmt: skip


def few_shot(run: Run) -> Markup:
    """How good its features are on another data set, where that was measured."""
    test = test_of(run)
    if test.get("fewshot_mean") is None:
        return Markup()
    images, deviation = test["fewshot_images"], test.get("fewshot_std")
    return fill(
        "run.html", "few_shot", run["recipe"].get("fewshot", ""), test["fewshot_shots"],
        with_interval(test["fewshot_mean"], images), images,
        "" if deviation is None else share_of(deviation, images),
    )  # fmt: skip


def unfinished(run: Run) -> str:
    """How far a run has come that has no result."""
    step = max((row["step"] for row in run["metrics"]), default=0)
    total = (run["environment"] or {}).get("steps") or run["recipe"].get("length.steps")
    reached = f"{step:,} of {total:,}" if total else f"{step:,}"
    metric = run["task"]["metric"]
    key = f"val_{metric['key']}"
    last = next((row for row in reversed(run["metrics"]) if key in row), None)
    metric_note = ""
    if last:
        value = share_of(last[key], last.get("val_images") or 1) if metric["percent"] else f"{last[key]:.4g}"
        metric_note = f"; validation {metric['label']} was {value} at step {last['step']:,}"
    return (
        "This run has no result: it was interrupted, or is still running. It has reached step "
        f"{reached}{metric_note}. Run the same command again to resume from the last checkpoint."
    )


def class_tables(per_class: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The worst classes, and behind a click all of them in their order."""
    key = next((k for row in per_class.values() for k in row if k != "images"), "accuracy")
    rows = [(label, row[key], row["images"]) for label, row in per_class.items()]
    known = [row for row in rows if row[1] is not None]
    worst = sorted(known, key=lambda row: (row[1], row[0]))[:FIRST]
    lead = (
        f"The {len(worst)} worst of {len(rows):,} classes" if len(rows) > FIRST else "The worst class first"
    )
    without = len(rows) - len(known)
    lead += f"; classes without images here: {without:,}." if without else "."
    body = note(lead) + class_table(worst, key)
    if len(rows) > 1:
        more = f", the first {ROWS:,} of them" if len(rows) > ROWS else ""
        body += details(f"All {len(rows):,} classes in order{more}", class_table(rows[:ROWS], key))
    return body


def class_table(rows: Sequence[tuple[str, float | None, int]], key: str) -> Markup:
    """An accuracy has its 95 % interval; an average precision has none."""

    def line(label: str, share: float | None, images: int) -> dict[str, Any]:
        ends = "–" if share is None else span(wilson(share, images), images)
        interval = {"95 % interval": Number(ends)} if key == "accuracy" else {}
        row = {"class": name(label, NAMED), key: Number(share_of(share, images)), **interval}
        return row | {" ": bar(share or 0.0), "images": images}

    return table(line(*row) for row in rows)


def pairs_of(matrix: Matrix, names: Sequence[str]) -> list[Pair]:
    """Which class is predicted for which, the most frequent first."""
    counts = [(n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if n and i != j]
    counts.sort(key=lambda one: (-one[0], one[1:]))
    return [(names[i], names[j], count, sum(matrix[i])) for count, i, j in counts[:ROWS]]


def confusions(matrix: Matrix | None, names: Sequence[str], pairs: Sequence[Pair] | None) -> Markup:
    """The matrix, or the part of it that is confused most, and the most frequent confusions."""
    if pairs is None and matrix is not None:
        pairs = pairs_of(matrix, names)
    drawn = confusion_matrix(matrix, names) if matrix is not None else Markup()
    if not drawn and pairs is None:
        return Markup()
    rows = [
        {"true class": name(truth, NAMED), "predicted class": name(predicted, NAMED),
         "images": Number(f"{times:,} of {images:,}"),
         "share": Number(share_of(times / images if images else None, images))}
        for truth, predicted, times, images in (pairs or ())[: OFTEN if drawn else FIRST]
    ]  # fmt: skip
    return fill("run.html", "confusions", drawn, rows)


def confusion_matrix(matrix: Matrix, names: Sequence[str]) -> Markup:
    """The matrix as large as a screen has room for: all of it, or the part that is confused most.

    Wide and narrow screens have a matrix each where one does not fit both; the style shows the right one.
    """
    chosen = most_confused(matrix, PART)
    everything = list(range(len(names)))
    wide = everything if len(names) <= WHOLE else chosen
    narrow = everything if len(names) <= NARROW else chosen[:NARROW_PART]
    if wide == narrow:
        return squares(matrix, names, wide)
    return squares(matrix, names, wide, "on-wide") + squares(matrix, names, narrow, "on-narrow")


def most_confused(matrix: Matrix, most: int) -> list[int]:
    """Classes by how often one is predicted for another, the two beside each other."""
    counted = ((-count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if count)
    chosen: dict[int, None] = {}
    for _, i, j in sorted(one for one in counted if one[1] != one[2]):
        if len(chosen.keys() | {i, j}) <= most:
            chosen |= {i: None, j: None}
        if len(chosen) == most:
            break
    return list(chosen)


def squares(matrix: Matrix, names: Sequence[str], chosen: Sequence[int], where: str = "") -> Markup:
    """Each row is coloured by the shares of its images; what lies in no chosen column is one column more."""
    if not chosen:
        return Markup()
    part, inside = len(chosen) < len(names), set(chosen)
    columns = [names[j] for j in chosen] + [OTHER] * part
    rows = []
    for place, i in enumerate(chosen):
        counts = [matrix[i][j] for j in chosen]
        if part:
            counts.append(sum(count for j, count in enumerate(matrix[i]) if j not in inside))
        total = sum(matrix[i])
        cells = [
            square(count, total, names[i], column, correct=j == place)
            for j, (count, column) in enumerate(zip(counts, columns, strict=True))
        ]
        rows.append((names[i], cells))
    sizes = ((3, "fewest"), (6, "few"), (14, "some"), (10**9, "many"))
    css = next(css for most, css in sizes if len(columns) <= most)
    counted = (len(chosen), f"{len(names):,}") if part else None
    return fill("run.html", "matrix", f"{css} {where}".strip(), counted, columns, rows)


def square(count: int, total: int, row: str, column: str, *, correct: bool) -> dict[str, str] | None:
    """One square, with its number and, for the pointer, its words."""
    if not count:
        return None
    share = count / total
    return {
        "css": f"{'right' if correct else 'wrong'} q{max(1, round(10 * share))}", "count": short(count),
        "title": f"{clipped(row, 40)} → {clipped(column, 40)}: {short(count)} ({share:.1%})",
    }  # fmt: skip


def calibration(bins: Sequence[Sequence[float]], error: float | None) -> Markup:
    """Accuracy by confidence: bins of (mean confidence, accuracy, images)."""
    points = [(b[0], b[1]) for b in bins if b[2] >= ENOUGH]
    if not points and error is None:
        return Markup()
    drawn = line_chart(
        {"this model": points}, x_label="confidence", y_label="accuracy", points=True,
        percent=True, ideal={"ideal": [(0.0, 0.0), (1.0, 1.0)]},
    )  # fmt: skip
    measured = "" if error is None else f"Expected calibration error {percent(error)}."
    return fill("run.html", "calibration", measured, drawn if points else None, ENOUGH)


def pictures(shown: Sequence[Mapping[str, Any]]) -> Markup:
    """Images with their predictions, each beside its attention if that is known."""
    rows = []
    for one in shown:
        alt = f"{clipped(str(one['key']), 80)}: true class {clipped(one['truth'], 40)}"
        both = ((one.get("image"), alt), (one.get("overlay"), f"attention over {alt}"))
        rows.append({
            "images": [picture(data, "image/jpeg", words) for data, words in both if data],
            "predicted": name(one["said"], NAMED), "confidence": percent(one["confidence"], 1),
            "correct": one["said"] == one["truth"], "truth": name(one["truth"], NAMED),
            "file": name(one["key"], NAMED),
        })  # fmt: skip
    return fill("run.html", "pictures", rows)


def mistake_section(mistakes: Mapping[str, Any], link: str | None = None) -> Markup:
    """The most confident mistakes; `link`: the address of a file with all of them."""
    worst, unsure = mistakes["worst"], mistakes.get("unsure")
    if not mistakes["wrong"]:
        return note("There are none.")
    more = details(f"{len(worst) - SEEN} more of them", pictures(worst[SEEN:])) if worst[SEEN:] else ""
    attention = any(one.get("overlay") for one in worst)
    return fill(
        "run.html", "mistakes", mistakes["wrong"], mistakes["images"], link, attention,
        pictures(worst[:SEEN]), more,
        details("Least confident mistakes", pictures(unsure)) if unsure else "",  # of older runs
    )  # fmt: skip


def unsure_section(shown: Sequence[Mapping[str, Any]]) -> Markup:
    """The images with the lowest confidence, right or wrong."""
    if not shown:
        return Markup()
    lead = (
        "The images with the lowest confidence, right or wrong, apart from those above. Unusual, unclear or "
    )
    return note(f"{lead}mislabelled images are often among them.") + pictures(shown)


def batch_section(batch: Mapping[str, Any]) -> Markup:
    """Images of the first training batch, cropped and augmented, with their labels."""
    images = []
    for one in batch["images"]:
        alt = f"training image labelled {', '.join(clipped(str(label), 40) for label, _ in one['labels'])}"
        labels = [(name(label, NAMED), "" if share >= 0.995 else f"\u00a0{100 * share:.0f}\u00a0%")
                  for label, share in one["labels"]]  # fmt: skip
        images.append((picture(one["image"], "image/jpeg", alt), labels))
    lead = f"The first {len(images)} of {batch['of']:,} images of step {batch['step'] + 1:,}, as the model "
    return fill("run.html", "batch", f"{lead}sees them: {batch['how']}.", images)


def data_section(run: Run) -> Markup:
    """Counts of the splits, the doctor's findings and the files that could not be used."""
    doctor, body = run["doctor"], Markup()
    if doctor and "skipped" in doctor:
        body += note(doctor["skipped"])
    elif doctor:
        rows = [
            {"split": split, "images": row["images"], "classes": row["classes"],
             **{f"{label}_per_class": row["per_class"].get(key) for key, label in PER_CLASS.items()}}
            for split, row in doctor["splits"].items()
        ]  # fmt: skip
        body += table(rows) + findings(doctor["findings"])
    unusable = [
        (split, files["count"], len(files["files"]),
         [{"file": name(key), "reason": why} for key, why in files["files"].items()])
        for split, files in (run["unusable"] or {}).items() if files["count"]
    ]  # fmt: skip
    return body + fill("run.html", "unusable", unusable)


def findings(listed: Sequence[Mapping[str, Any]]) -> Markup:
    lead = "From file names and counts alone; vitkit doctor looks at every image."
    if not listed:
        return note(f"No problem was found. {lead}")
    rows = [
        {"": fill("run.html", "severity", one["severity"]), "finding": name(one["text"], 1000),
         "what to do": one["remedy"]}
        for one in listed[:FINDINGS]
    ]  # fmt: skip
    more = f" The first {FINDINGS} of {len(listed):,}." if len(listed) > FINDINGS else ""
    return note(f"{lead}{more}") + table(rows)


def recipe_section(recipe: Mapping[str, Any], defaults: Mapping[str, Any]) -> Markup:
    """Every field; those that differ from the recipe of that name first, and marked."""
    other = {key for key in recipe if key in defaults and defaults[key] != recipe[key]}
    rows = [{"field": key, "value": name(field_text(value))} for key, value in recipe.items()]
    whole = details(f"All {len(rows)} fields", table(rows, [key in other for key in recipe]))
    if not defaults:
        return (
            note("This is not one of vitkit's own recipes, so there are no defaults to compare with.") + whole
        )
    if not other:
        return note(f"Every field has the default of the recipe {recipe['name']}.") + whole
    changed = [{"field": key, "this run": name(field_text(recipe[key])),
                "default": name(field_text(defaults[key]))} for key in recipe if key in other]  # fmt: skip
    return note(f"Differs from the defaults of the recipe {recipe['name']} in:") + table(changed) + whole


def field_text(value: Any) -> str:
    """A field's value as one would write it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return "–" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def cost_section(cost: Mapping[str, Any], spent: Mapping[str, Any], pricing: str = "") -> Markup:
    """Time, money and energy, then what a paper reports. pricing: the command that states another price."""
    if not cost:
        return Markup()
    seconds, processes, speed = cost.get("seconds"), cost.get("processes", 1), cost.get("images_per_second")
    many = f"{processes} × " if processes != 1 else ""
    values = {
        "time": None if seconds is None else f"{duration(seconds)} on {many}{cost.get('device', '?')}",
        "money": money(spent) if spent else None,
        "energy": energy(spent) if spent else None,
        "images seen": cost.get("images_seen"),
        "images per second": None if not speed else f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}",
        "unusable images": cost.get("unusable_images") or None,
    }
    papers = {
        "exaFLOPs": cost.get("exaFLOPs"),
        "TPUv3-core-days": cost.get("tpu_v3_core_days"),
        "device hours": cost.get("device_hours"),
        "training compute": flops(cost.get("training_FLOPs")),
        "forward pass of one image": flops(cost.get("forward_FLOPs")),
        "parameters": cost.get("parameters"),
        "precision": cost.get("precision"),
        "model FLOPs utilization": percent(cost["MFU"], 1) if cost.get("MFU") else None,
    }
    hint = note(f"With your own price per hour: {pricing}") if pricing and spent else Markup()
    return facts(known(values)) + hint + details("For papers", facts(known(papers)))


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def money(spent: Mapping[str, Any]) -> str:
    """What the hours cost, and the price per hour that this is based on."""
    sign = "" if spent["given"] else "$"
    price = f"{sign}{spent['price']:,.2f}" if spent["price"] >= 0.01 else f"under {sign}0.01"
    hours = f"{spent['hours']:.2g}" if spent["hours"] < 10 else f"{spent['hours']:,.0f}"
    which = "" if spent["given"] else "an assumed "
    return f"{price} ({hours} device hours at {which}{sign}{spent['per_hour']:,.2f} per hour)"


def energy(spent: Mapping[str, Any]) -> str:
    used = f"{spent['kWh']:.3g} kWh" if spent["kWh"] >= 0.1 else f"{1000 * spent['kWh']:.2g} Wh"
    if spent["watts"] is None:
        return f"{used}, measured by the device"
    return f"about {used} (not measured: assumes {spent['watts']} watts)"


def flops(count: float | None) -> str | None:
    """In FLOPs, with the unit that fits."""
    if count is None:
        return None
    units = ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))
    return next(
        (f"{count / unit:.4g} {word}" for unit, word in units if count >= unit), f"{short(count)} FLOPs"
    )
