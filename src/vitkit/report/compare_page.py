"""The HTML comparison of several runs: results, paired tests, training curves, recipes and costs."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from markupsafe import Markup

from vitkit.metrics.intervals import SIGNIFICANT, decimals, mcnemar, percent, span, wilson
from vitkit.report.charts import line_chart, overlaid
from vitkit.report.cost_section import device_name, flops
from vitkit.report.html import Number, commands, fill, fixed_percent, joined, link, name, note, page, table
from vitkit.report.html import headline as headline_markup
from vitkit.report.literature import PUBLISHED, task_of, task_section
from vitkit.report.run_page import Run, field_text, headline, test_of
from vitkit.report.terminal import duration

PIXELS = 1000  # an image has more, but shares are printed with one decimal
DRAWN = 16  # runs whose curves can be distinguished
LISTED = 3  # runs that a headline names
FIRST, ROWS = 20, 1000  # classes shown at first, and in total
COLUMNS = 8  # runs in the table of classes
SHARES = ("mean_average_precision", "top1", "accuracy")  # main metrics of classifiers
DENSE = ("miou", "ap")  # of segmentation and detection
SEEDED = {"seed", "micro_batch", "evaluations", "about"}  # fields in which runs of one recipe may differ


def compare_page(
    runs: Sequence[Run], title: str = "", lead: Markup | None = None, published: Markup | None = None
) -> str:
    """Compare runs; `lead` replaces the headline, `published` is a section of published results."""
    labels = names(runs)
    title = title or f"Comparison of {len(runs)} runs"
    sections = {
        "Results": results(runs, labels),
        "Paired comparison": paired_section(runs, by_id(runs, labels)),
        "Curves": curves(runs, labels),
        "Recipes": differences(runs, labels),
        "Cost": costs(runs, labels),
        PUBLISHED: published or Markup(),
        "Reports": commands(f"vitkit report {run['quoted']}" for run in runs),
    }
    return page(title, fill("compare.html", "header", title, lead or lead_of(runs)), sections)


def names(runs: Sequence[Run]) -> list[str]:
    """The folder name of each run, or its path if folder names are not unique."""
    short = [run["name"] for run in runs]
    return short if len(set(short)) == len(short) else [run["place"] for run in runs]


def by_id(runs: Sequence[Run], labels: Sequence[str]) -> dict[int, str]:
    return {id(run): label for run, label in zip(runs, labels, strict=True)}


def share(run: Run) -> float | None:
    """The main metric of a run if it is a share."""
    test = test_of(run)
    return next((test[k] for k in (*SHARES, *DENSE) if test.get(k) is not None), None)


def is_dense(run: Run) -> bool:
    """Whether the main metric is none of shares of images, so that it has no binomial interval."""
    return any(test_of(run).get(key) is not None for key in DENSE)


def differ_only_in_seed(runs: Sequence[Run]) -> bool:
    return not changed(runs) - SEEDED and len({run["recipe"].get("seed") for run in runs}) == len(runs)


def changed(runs: Sequence[Run]) -> set[str]:
    """The fields in which the recipes differ."""
    keys = {key for run in runs for key in run["recipe"]}
    return {key for key in keys if len({field_text(run["recipe"].get(key)) for run in runs}) > 1}


def lead_of(runs: Sequence[Run]) -> Markup:
    """The best run if it is significantly better, or mean and standard deviation over seeds of one recipe."""
    finished = [run for run in runs if run["result"]]
    if not finished:
        return headline_markup("No result yet", "none of these runs is finished")
    shares = [value for run in finished if (value := share(run)) is not None]
    if differ_only_in_seed(runs) and len(shares) == len(finished) > 1:
        count = test_of(finished[0])["images"]
        return (dense_headline if is_dense(finished[0]) else mean_headline)(
            shares, headline(finished[0]), count
        )
    return headline_markup(*verdict(finished, by_id(runs, names(runs))))


def verdict(finished: Sequence[Run], labels: Mapping[int, str]) -> tuple[str, str]:
    """The best run if the difference is significant, and an explanation."""
    if len(finished) == 1:
        return headline(finished[0])
    if len(groups(finished)) > 1:
        unknown = not all(map(has_known_test_set, finished))
        reason = "it is not known whether these runs were" if unknown else "these runs were not"
        return "No winner", f"{reason} all tested on the same images, so their results cannot be compared"
    if len({run["task"]["metric"]["key"] for run in finished}) > 1:
        return "No winner", "these runs have different metrics, so their results cannot be compared"
    if not all(map(has_accuracy, finished)):
        best = max(finished, key=lambda run: (share(run) or 0.0, -test_of(run)["loss"]))
        big, small = headline(best)
        return big, f"{labels[id(best)]}, the highest of {len(finished)}, significance unknown: {small}"
    best = best_of(finished)
    big, small = headline(best)
    label, images = labels[id(best)], test_of(best)["images"]
    if winner(finished):
        return big, f"{label}, the best of {len(finished)} by a significant margin: {small}"
    comparisons = len(finished) - 1
    close = [labels[id(run)] for run in finished if run is not best and not is_better(best, run, comparisons)]
    others = ", ".join(close[:LISTED]) + (f" and {len(close) - LISTED} more" if len(close) > LISTED else "")
    return "No clear winner", (
        f"{label} has {big}, but on {images:,} images the difference from {others} is not significant"
    )


def mean_headline(values: Sequence[float], example: tuple[str, str], images: int) -> Markup:
    """Mean and standard deviation over seeds; `example` is the headline of one of them."""
    test_images = example[1].partition(";")[0]
    if len(values) == 1:
        return headline_markup(example[0], f"one seed, {test_images}")
    places = max(1, decimals(images * len(values)))
    middle, deviation = (f"{100 * value:.{places}f}" for value in (mean(values), stdev(values)))
    small = f"mean and standard deviation over {len(values)} seeds of one recipe, each {test_images}; "
    small += f"95 % interval {span(wilson(mean(values), images), images)}"
    return headline_markup(f"{middle} ± {deviation} % {example[0].partition(' % ')[2]}", small)


def dense_headline(values: Sequence[float], example: tuple[str, str], images: int) -> Markup:
    """Mean and standard deviation over seeds of a mean IoU or an AP."""
    big = f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} % mean IoU"
    if "%" not in example[0]:
        big = f"AP {mean(values):.3f} ± {stdev(values):.3f}"
    return headline_markup(
        big, f"mean and standard deviation over {len(values)} seeds of one recipe, each on {images:,} images"
    )


def has_same_test_set(a: Run, b: Run) -> bool:
    """Compare by content if both runs stored it, else by names, labels and sizes; unknown sets differ."""
    first, second = a.get("tested") or {}, b.get("tested") or {}
    key = "content" if first.get("content") and second.get("content") else "names"
    return first.get(key) is not None and first.get(key) == second.get(key)


def has_known_test_set(run: Run) -> bool:
    """Whether the run folder stores which images the run was tested on."""
    tested = run.get("tested") or {}
    return bool(tested.get("content") or tested.get("names"))


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The finished runs grouped by test set."""
    sets: list[list[Run]] = []
    for run in runs:
        if run["result"]:
            group = next((group for group in sets if has_same_test_set(group[0], run)), None)
            if group is None:
                sets.append([run])
            else:
                group.append(run)
    return sets


def has_accuracy(run: Run) -> bool:
    """Whether the result is an accuracy, which has an interval."""
    test = test_of(run)
    return test.get("top1") is not None and "mean_average_precision" not in test


def only_correct(a: Run, b: Run) -> tuple[int, int] | None:
    """How many images only the first, and only the second run classifies correctly; None if not stored."""
    first, second = (run["tested"].get("right") if run.get("tested") else None for run in (a, b))
    if not first or not second or first.keys() != second.keys():
        return None
    return (sum(correct and not second[image] for image, correct in first.items()),
            sum(correct and not first[image] for image, correct in second.items()))  # fmt: skip


def p_value(a: Run, b: Run) -> float | None:
    """The p-value of McNemar's test; None if per-image predictions are not stored."""
    pair = only_correct(a, b)
    return None if pair is None else mcnemar(*pair)


def is_better(a: Run, b: Run, comparisons: int) -> bool:
    """Whether the first run is significantly better at 5 %, with Bonferroni correction for the comparisons.

    Without per-image predictions the intervals must not overlap, which is stricter.
    """
    first, second = test_of(a), test_of(b)
    if first["top1"] <= second["top1"]:
        return False
    p = p_value(a, b)
    if p is not None:
        return p * comparisons < SIGNIFICANT
    return wilson(first["top1"], first["images"])[0] > wilson(second["top1"], second["images"])[1]


def best_of(group: Sequence[Run]) -> Run:
    return max(group, key=lambda run: (test_of(run)["top1"], -test_of(run)["loss"]))


def winner(group: Sequence[Run]) -> Run | None:
    """The run that is significantly better than all others, if there is one."""
    best = best_of(group)
    others = [run for run in group if run is not best]
    return best if all(is_better(best, run, len(others)) for run in others) else None


def paired_section(runs: Sequence[Run], labels: Mapping[int, str]) -> Markup:
    """For each test set with several runs: the best run against the others, and accuracies by class."""
    shared = [group for group in groups(runs) if len(group) > 1 and all(map(has_accuracy, group))]
    parts = []
    for group in shared:
        test, group_names = test_of(group[0]), [labels[id(run)] for run in group]
        kind = "validation" if test.get("split") == "val" else "test"
        heading = f"{test['images']:,} {kind} images: {', '.join(group_names)}" if len(shared) > 1 else ""
        best = best_of(group)
        others = [run for run in group if run is not best]
        parts.append(fill(
            "compare.html", "paired", heading, test_of(best)["images"], len(others),
            f"{SIGNIFICANT / len(others):.2g}", any(p_value(best, run) is None for run in others),
            [pair_row(best, run, labels, len(others)) for run in others], class_rows(group, group_names),
        ))  # fmt: skip
    return joined(parts)


def pair_row(best: Run, run: Run, labels: Mapping[int, str], comparisons: int) -> dict[str, Any]:
    """The best run compared with another one."""
    pair, p = only_correct(best, run) or (None, None), p_value(best, run)
    return {
        f"{labels[id(best)]} compared with": name(labels[id(run)], 80),
        "only the first correct": pair[0], "only the second correct": pair[1],
        "p-value": Number("–" if p is None else f"{p:.2g}"),
        "difference": "significant" if is_better(best, run, comparisons) else "not significant",
    }  # fmt: skip


def class_rows(group: Sequence[Run], labels: Sequence[str]) -> Markup:
    """The accuracy of each class by run, the largest differences first."""
    columns = list(zip(group, labels, strict=True))[:COLUMNS]
    rows = []
    for class_name, row in (test_of(group[0]).get("per_class") or {}).items():
        cells = [(test_of(run).get("per_class") or {}).get(class_name) or {} for run, _ in columns]
        shares = [cell.get("accuracy") for cell in cells]
        known = [share for share in shares if share is not None]
        images = row["images"]
        if not images or len(known) < len(shares):
            continue
        gap = max(known) - min(known)
        line: dict[str, Any] = {"class": name(class_name, 80), "images": images}
        line |= {
            label: Number(percent(share, images)) for (_, label), share in zip(columns, shares, strict=True)
        }
        rows.append((gap, line | {"largest difference": Number(counted(round(gap * images)))}))
    if not rows:
        return Markup()
    lines = [line for gap, line in sorted(rows, key=lambda row: -row[0]) if gap]
    more = max(0, len(lines) - FIRST)
    return fill("compare.html", "classes", lines[:ROWS], FIRST, more, len(rows) - len(lines))


def counted(images: int) -> str:
    return f"{images:,} image{'s' * (images != 1)}"


def results(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    """One row per run; if there are several test sets, each has a letter."""
    rows = [result_row(run, label) for run, label in zip(runs, labels, strict=True)]
    sets = groups(runs)
    if len(sets) > 1:
        set_of = {id(run): number for number, group in enumerate(sets) for run in group}
        for run, row in zip(runs, rows, strict=True):
            row["test set"] = "–" if id(run) not in set_of else letters(set_of[id(run)])
    return fill("compare.html", "results", rows, len(sets) > 1)


def letters(number: int) -> str:
    """A to Z, then AA and so on."""
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def result_row(run: Run, label: str) -> dict[str, Any]:
    result = run["result"] or {}
    test = test_of(run)
    ends = span(wilson(test["top1"], test["images"]), test["images"]) if has_accuracy(run) else "–"
    ends = span(test["interval"], PIXELS) if test.get("miou") is not None else ends
    steps = result.get("steps") or max((row["step"] for row in run["metrics"]), default=0)
    return {
        "run": link(run.get("link"), name(label, 80)),
        "result": Number(headline(run)[0]),
        "95 % interval": Number(ends),
        "images": test.get("images"),
        "loss": test.get("loss"),
        "calibration error": fixed_percent(test.get("calibration_error"), 1),
        "steps": steps,
        "seed": run["recipe"].get("seed"),
    }


def curves(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    metrics = dict(list(zip(labels, (run["metrics"] for run in runs), strict=True))[:DRAWN])
    return fill("compare.html", "curves", overlaid(metrics, dense_metrics(runs)), len(metrics), len(runs))


def dense_metrics(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """The main metrics that have no curve of their own yet."""
    metrics = {run["task"]["metric"]["key"]: run["task"]["metric"] for run in runs}
    return [metric for key, metric in metrics.items() if key in DENSE]


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    """The recipe fields that are not the same in all runs."""
    fields = changed(runs)
    rows = [
        {"field": key} | {label: name(field_text(run["recipe"].get(key)), 120)
                          for run, label in zip(runs, labels, strict=True)}
        for key in dict.fromkeys(key for run in runs for key in run["recipe"]) if key in fields
    ]  # fmt: skip
    return table(rows) if rows else note("All runs have the same recipe.")


def costs(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    rows = [cost_row(run, label) for run, label in zip(runs, labels, strict=True)]
    known = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return table({key: row[key] for key in known} for row in rows)


def cost_row(run: Run, label: str) -> dict[str, Any]:
    cost: Mapping[str, Any] = (run["result"] or {}).get("cost") or {}
    seconds = cost.get("seconds")
    return {
        "run": name(label, 80),
        "time": Number("–" if seconds is None else duration(seconds)),
        "device hours": cost.get("device_hours"),
        "images seen": cost.get("images_seen"),
        "training compute": Number(flops(cost.get("training_FLOPs")) or "–"),
        "parameters": cost.get("parameters"),
        "kWh": cost.get("energy_kWh"),
        "price": cost.get("price"),
        "device": device_name(cost.get("device", "–")),
    }


def protocol_page(protocol: Mapping[str, Any] | None, runs: Sequence[Run], title: str) -> str:
    """The paper's protocol: learning rates compared on held-out images, then several seeds of the best."""
    if protocol is None:
        lead = headline_markup("Not finished", f"{len(runs)} runs so far")
        return compare_page(runs, title, lead + fill("compare.html", "unfinished"))
    count, chart = protocol["images"], None
    accuracy = f"{percent(protocol['mean'], count)} accuracy", f"on {count:,} test images"
    if len(protocol["rates"]) > 1:
        rates = {"held-out": [(float(rate), top1) for rate, top1 in protocol["rates"].items()]}
        chart = line_chart(rates, x_label="learning rate", y_label="accuracy on held-out images",
                           log_x=True, points=True, percent=True)  # fmt: skip
    lead = mean_headline(protocol["seeds"], accuracy, count)
    lead += fill("compare.html", "protocol", chosen_setting(protocol), chart)
    recipe = runs[-1]["recipe"]
    task = task_of(recipe.get("data") or "", recipe.get("name") or "", count)
    return compare_page(
        runs, title, lead, task_section(task, title, protocol["mean"], protocol["std"], count)
    )


def chosen_setting(protocol: Mapping[str, Any]) -> str:
    """The setting chosen on held-out images, and the alternatives."""
    chosen, tried = protocol.get("chosen", ""), protocol.get("tried") or {}
    rate, rule_top1 = f"Learning rate {protocol['rate']:g}", tried.get("bit")
    if "-steps-" in chosen:
        return f"{rate}, {protocol['steps']:,} steps: the setting of the whole suite"
    if rule_top1 is None:
        return f"{rate}, chosen on held-out images" if len(protocol["rates"]) > 1 else rate
    rule = fixed_percent(rule_top1, 1)
    best = fixed_percent(max(top1 for key, top1 in tried.items() if key != "bit"), 1)
    if chosen == "bit":
        return f"BiT's HyperRule ({rule} on held-out images, the best learning rate {best})"
    return f"{rate} ({best} on held-out images, BiT's HyperRule {rule})"
