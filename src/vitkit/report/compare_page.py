"""Several runs side by side: which is better on the same images, curves, differences of recipes, costs."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from markupsafe import Markup

from vitkit.metrics.intervals import SIGNIFICANT, decimals, mcnemar, span, wilson
from vitkit.metrics.intervals import percent as share_of
from vitkit.report.charts import line_chart, overlaid
from vitkit.report.html import Number, commands, fill, joined, link, name, note, page, percent, table
from vitkit.report.html import headline as headline_of
from vitkit.report.literature import PUBLISHED, task_of, task_section
from vitkit.report.run_page import Run, field_text, flops, headline, test_of
from vitkit.report.terminal import duration

DRAWN = 16  # runs whose curves can be told apart
LISTED = 3  # runs that a headline names
FIRST, ROWS = 20, 1000  # classes at first, and behind a click
COLUMNS = 8  # runs in the table of classes
SEEDED = {"seed", "micro_batch", "evaluations", "about"}  # fields in which runs of one recipe may differ


def compare_page(
    runs: Sequence[Run], title: str = "", lead: Markup | None = None, published: Markup | None = None
) -> str:
    """Runs beside each other; `lead` replaces the headline, `published` is a section of published numbers."""
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
    """What each run is called: its folder, or its whole path where folders have the same name."""
    short = [run["name"] for run in runs]
    return short if len(set(short)) == len(short) else [run["place"] for run in runs]


def by_id(runs: Sequence[Run], labels: Sequence[str]) -> dict[int, str]:
    return {id(run): label for run, label in zip(runs, labels, strict=True)}


def share(run: Run) -> float | None:
    """The share that is a run's headline, if it has one."""
    test = test_of(run)
    return next(
        (test[k] for k in ("mean_average_precision", "top1", "accuracy") if test.get(k) is not None), None
    )


def same_but_seed(runs: Sequence[Run]) -> bool:
    return not changed(runs) - SEEDED and len({run["recipe"].get("seed") for run in runs}) == len(runs)


def changed(runs: Sequence[Run]) -> set[str]:
    """The fields in which the recipes differ."""
    keys = {key for run in runs for key in run["recipe"]}
    return {key for key in keys if len({field_text(run["recipe"].get(key)) for run in runs}) > 1}


def lead_of(runs: Sequence[Run]) -> Markup:
    """The best run if it is significantly better, or mean and deviation over seeds of one recipe."""
    done = [run for run in runs if run["result"]]
    if not done:
        return headline_of("No result yet", "none of these runs is finished")
    shares = [value for run in done if (value := share(run)) is not None]
    if same_but_seed(runs) and len(shares) == len(done) > 1:
        return mean_headline(shares, headline(done[0]), test_of(done[0])["images"])
    return headline_of(*verdict(done, by_id(runs, names(runs))))


def verdict(done: Sequence[Run], labels: Mapping[int, str]) -> tuple[str, str]:
    """Which run is the best, if the test images allow to say so, and why."""
    if len(done) == 1:
        return headline(done[0])
    if len(groups(done)) > 1:
        unknown = not all(map(is_known, done))
        why = "it is not known whether these runs were" if unknown else "these runs were not"
        return "No winner", f"{why} all tested on the same images, so their results cannot be compared"
    if not all(map(has_accuracy, done)):
        best = max(done, key=lambda run: (share(run) or 0.0, -test_of(run)["loss"]))
        big, small = headline(best)
        return big, f"{labels[id(best)]}, the highest of {len(done)}, significance unknown: {small}"
    best = best_of(done)
    big, small = headline(best)
    label, number = labels[id(best)], test_of(best)["images"]
    if winner(done):
        return big, f"{label}, the best of {len(done)} by a significant margin: {small}"
    near = [labels[id(run)] for run in done if run is not best and not is_better(best, run, len(done) - 1)]
    others = ", ".join(near[:LISTED]) + (f" and {len(near) - LISTED} more" if len(near) > LISTED else "")
    return "No clear winner", (
        f"{label} has {big}, but on {number:,} images the difference from {others} is not significant"
    )


def mean_headline(values: Sequence[float], of: tuple[str, str], images: int) -> Markup:
    """Mean and standard deviation over seeds, in the words of one of them."""
    counted = of[1].partition(";")[0]
    if len(values) == 1:
        return headline_of(of[0], f"one seed, {counted}")
    places = max(1, decimals(images * len(values)))
    middle, deviation = (f"{100 * value:.{places}f}" for value in (mean(values), stdev(values)))
    small = f"mean and standard deviation over {len(values)} seeds of one recipe, each {counted}; "
    small += f"95 % interval {span(wilson(mean(values), images), images)}"
    return headline_of(f"{middle} ± {deviation} % {of[0].partition(' % ')[2]}", small)


def is_same(a: Run, b: Run) -> bool:
    """By content where both runs know it, else by names, labels and sizes; unknown counts as another set."""
    mine, other = a.get("tested") or {}, b.get("tested") or {}
    key = "content" if mine.get("content") and other.get("content") else "names"
    return mine.get(key) is not None and mine.get(key) == other.get(key)


def is_known(run: Run) -> bool:
    """Whether the run folder has stored which images it was tested on."""
    tested = run.get("tested") or {}
    return bool(tested.get("content") or tested.get("names"))


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The finished runs by test set, each in their order."""
    sets: list[list[Run]] = []
    for run in runs:
        if run["result"]:
            group = next((group for group in sets if is_same(group[0], run)), None)
            if group is None:
                sets.append([run])
            else:
                group.append(run)
    return sets


def has_accuracy(run: Run) -> bool:
    """Whether its result is a share of correct images, which has an interval."""
    test = test_of(run)
    return test.get("top1") is not None and "mean_average_precision" not in test


def only_correct(a: Run, b: Run) -> tuple[int, int] | None:
    """The images that only the first of two runs has correct, and only the second; None: not stored."""
    mine, other = (run["tested"].get("right") if run.get("tested") else None for run in (a, b))
    if not mine or not other or mine.keys() != other.keys():
        return None
    return (sum(right and not other[image] for image, right in mine.items()),
            sum(right and not mine[image] for image, right in other.items()))  # fmt: skip


def p_value(a: Run, b: Run) -> float | None:
    """On the same images; None where it is not stored which of them each run has correct."""
    pair = only_correct(a, b)
    return None if pair is None else mcnemar(*pair)


def is_better(a: Run, b: Run, comparisons: int) -> bool:
    """Whether the first is better on the same images, at 5 % over so many comparisons.

    Where predictions were not stored, the intervals must not overlap, which is stricter.
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
    """The run that is better than each of the others, if one is."""
    best = best_of(group)
    others = [run for run in group if run is not best]
    return best if all(is_better(best, run, len(others)) for run in others) else None


def paired_section(runs: Sequence[Run], labels: Mapping[int, str]) -> Markup:
    """Of each test set that several runs share: the best beside the others, and class by class."""
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
    """The run with the most images correct, beside one other."""
    pair, p = only_correct(best, run) or (None, None), p_value(best, run)
    return {
        f"{labels[id(best)]} compared with": name(labels[id(run)], 80),
        "only the first correct": pair[0], "only the second correct": pair[1],
        "p-value": Number("–" if p is None else f"{p:.2g}"),
        "difference": "significant" if is_better(best, run, comparisons) else "not significant",
    }  # fmt: skip


def class_rows(group: Sequence[Run], labels: Sequence[str]) -> Markup:
    """The accuracy of each class by run, those that differ most first."""
    shown = list(zip(group, labels, strict=True))[:COLUMNS]
    rows = []
    for kind, row in (test_of(group[0]).get("per_class") or {}).items():
        cells = [(test_of(run).get("per_class") or {}).get(kind) or {} for run, _ in shown]
        shares = [cell.get("accuracy") for cell in cells]
        known = [share for share in shares if share is not None]
        images = row["images"]
        if not images or len(known) < len(shares):
            continue
        gap = max(known) - min(known)
        line: dict[str, Any] = {"class": name(kind, 80), "images": images}
        line |= {
            label: Number(share_of(share, images)) for (_, label), share in zip(shown, shares, strict=True)
        }
        rows.append((gap, line | {"largest difference": Number(f"{round(gap * images)} images")}))
    if not rows:
        return Markup()
    lines = [line for gap, line in sorted(rows, key=lambda one: -one[0]) if gap]
    more = max(0, len(lines) - FIRST)
    return fill("compare.html", "classes", lines[:ROWS], FIRST, more, len(rows) - len(lines))


def results(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    """A row for each; where not all were tested on the same images, with a letter for each test set."""
    rows = [result_row(run, label) for run, label in zip(runs, labels, strict=True)]
    sets = groups(runs)
    if len(sets) > 1:
        which = {id(run): number for number, group in enumerate(sets) for run in group}
        for run, row in zip(runs, rows, strict=True):
            row["test set"] = "–" if id(run) not in which else letters(which[id(run)])
    return fill("compare.html", "results", rows, len(sets) > 1)


def letters(number: int) -> str:
    """A to Z, then AA and so on."""
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def result_row(run: Run, label: str) -> dict[str, Any]:
    result = run["result"] or {}
    test = test_of(run)
    ends = span(wilson(test["top1"], test["images"]), test["images"]) if has_accuracy(run) else "–"
    steps = result.get("steps") or max((row["step"] for row in run["metrics"]), default=0)
    return {
        "run": link(run.get("link"), name(label, 80)),
        "result": Number(headline(run)[0]),
        "95 % interval": Number(ends),
        "images": test.get("images"),
        "loss": test.get("loss"),
        "calibration error": percent(test.get("calibration_error")),
        "steps": steps,
        "seed": run["recipe"].get("seed"),
    }


def curves(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    shown = dict(list(zip(labels, (run["metrics"] for run in runs), strict=True))[:DRAWN])
    return fill("compare.html", "curves", overlaid(shown), len(shown), len(runs))


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Markup:
    """A row for each field that is not the same in all."""
    other = changed(runs)
    rows = [
        {"field": key} | {label: name(field_text(run["recipe"].get(key)), 120)
                          for run, label in zip(runs, labels, strict=True)}
        for key in dict.fromkeys(key for run in runs for key in run["recipe"]) if key in other
    ]  # fmt: skip
    return table(rows) if rows else note("All runs have the same recipe, in every field.")


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
        "device": cost.get("device", "–"),
    }


def protocol_page(protocol: Mapping[str, Any] | None, runs: Sequence[Run], title: str) -> str:
    """The paper's protocol: learning rates compared on held-out images, then seeds with the best on test."""
    if protocol is None:
        lead = headline_of("Not finished", f"{len(runs)} runs so far") + fill("compare.html", "unfinished")
        return compare_page(runs, title, lead)
    count, chart = protocol["images"], None
    accuracy = f"{share_of(protocol['mean'], count)} accuracy", f"on {count:,} test images"
    if len(protocol["rates"]) > 1:
        rates = {"held-out": [(float(rate), top1) for rate, top1 in protocol["rates"].items()]}
        chart = line_chart(rates, x_label="learning rate", y_label="accuracy on held-out images",
                           log_x=True, points=True, percent=True)  # fmt: skip
    lead = mean_headline(protocol["seeds"], accuracy, count)
    lead += fill("compare.html", "protocol", chosen_words(protocol), chart)
    recipe = runs[-1]["recipe"]
    task = task_of(recipe.get("data") or "", recipe.get("name") or "", count)
    return compare_page(
        runs, title, lead, task_section(task, title, protocol["mean"], protocol["std"], count)
    )


def chosen_words(protocol: Mapping[str, Any]) -> str:
    """What was chosen on the held-out images, and what it was compared with."""
    chosen, tried = protocol.get("chosen", ""), protocol.get("tried") or {}
    rate, rule = f"Learning rate {protocol['rate']:g}", tried.get("bit")
    if "-steps-" in chosen:
        return f"{rate}, {protocol['steps']:,} steps: the setting of the whole suite"
    if rule is None:
        return f"{rate}, chosen on held-out images" if len(protocol["rates"]) > 1 else rate
    ours = max(top1 for key, top1 in tried.items() if key != "bit")
    if chosen == "bit":
        return f"BiT's HyperRule ({percent(rule, 1)} on held-out images, the best rate {percent(ours, 1)})"
    return f"{rate} ({percent(ours, 1)} on held-out images, BiT's HyperRule {percent(rule, 1)})"
