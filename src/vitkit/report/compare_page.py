"""Several runs side by side: headline numbers with their spread, curves, recipes where they differ, costs."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from vitkit.proportions import decimals, span, wilson
from vitkit.proportions import percent as share_of
from vitkit.report.beside import TITLE, task_section
from vitkit.report.charts import line_chart
from vitkit.report.curves import overlaid
from vitkit.report.expense import flops
from vitkit.report.html import (
    Markup,
    Number,
    commands,
    contents,
    name,
    note,
    page,
    percent,
    section,
    table,
    text,
)
from vitkit.report.literature import task_of
from vitkit.report.paired_runs import (
    best_of,
    counts,
    groups,
    is_better,
    is_known,
    section_of,
    test_of,
    winner,
)
from vitkit.report.run_page import Found, headline, said
from vitkit.report.terminal import duration

DRAWN = 16  # runs whose curves can be told apart
LISTED = 3  # runs that a headline names
SEEDED = {"seed", "micro_batch", "evaluations", "about"}  # fields in which runs of one recipe may differ


def compare_page(runs: Sequence[Found], title: str = "", lead: str = "", published: str = "") -> str:
    """Runs beside each other; `lead` is what is to be said before, `published` numbers of others."""
    called = names(runs)
    title = title or f"{len(runs)} runs compared"
    sections = {
        "Results": results(runs, called),
        "On the same images": section_of(
            runs, {id(run): label for run, label in zip(runs, called, strict=True)}
        ),
        "Curves": curves(runs, called),
        "Recipes": differences(runs, called),
        "Cost": costs(runs, called),
        TITLE: published,
        "Reports": commands(f"vitkit report {run['quoted']}" for run in runs),
    }
    sections = {heading: body for heading, body in sections.items() if body}
    ids = {f"part-{i}": heading for i, heading in enumerate(sections)}
    head = lead or spread_lead(runs)
    body = f"<header>\n<h1>{text(title)}</h1>\n{head}</header>\n{contents(ids)}"
    body += "".join(section(heading, sections[heading], id) for id, heading in ids.items())
    return page(title, body)


def names(runs: Sequence[Found]) -> list[str]:
    """What each run is called: its folder, or its whole place where folders are called alike."""
    short = [run["name"] for run in runs]
    return short if len(set(short)) == len(short) else [run["place"] for run in runs]


def share(run: Found) -> float | None:
    """The share that a run's headline tells, if it tells one."""
    test = test_of(run)
    return next(
        (test[k] for k in ("mean_average_precision", "top1", "accuracy") if test.get(k) is not None), None
    )


def same_but_seed(runs: Sequence[Found]) -> bool:
    return not changed(runs) - SEEDED and len({run["recipe"].get("seed") for run in runs}) == len(runs)


def changed(runs: Sequence[Found]) -> set[str]:
    """The fields in which the recipes differ."""
    keys = {key for run in runs for key in run["recipe"]}
    return {key for key in keys if len({said(run["recipe"].get(key)) for run in runs}) > 1}


def spread_lead(runs: Sequence[Found]) -> str:
    """The best run where one is better than chance explains, or mean and spread over seeds of one recipe."""
    done = [run for run in runs if run["result"]]
    if not done:
        return headline_words("No result yet", "none of these runs is finished")
    shares = [found for run in done if (found := share(run)) is not None]
    if same_but_seed(runs) and len(shares) == len(done) > 1:
        return mean_words(shares, headline(done[0]), test_of(done[0])["images"])
    return headline_words(
        *verdict(done, {id(run): label for run, label in zip(runs, names(runs), strict=True)})
    )


def verdict(done: Sequence[Found], called: Mapping[int, str]) -> tuple[str, str]:
    """Which run is the best, if the test images allow to say so, and why."""
    if len(done) == 1:
        return headline(done[0])
    sets = groups(done)
    if len(sets) > 1:
        unknown = not all(map(is_known, done))
        why = "it is not known whether these runs were" if unknown else "these runs were not"
        return "No winner", f"{why} all tested on the same images, so their numbers cannot be compared"
    if not all(map(counts, done)):
        best = max(done, key=lambda run: (share(run) or 0.0, -test_of(run)["loss"]))
        big, small = headline(best)
        return big, f"{called[id(best)]}, the highest of {len(done)}; whether by chance is not known: {small}"
    best = best_of(done)
    big, small = headline(best)
    label, number = called[id(best)], test_of(best)["images"]
    if winner(done):
        return big, f"{label}, the best of {len(done)}, by more than chance explains: {small}"
    near = [called[id(run)] for run in done if run is not best and not is_better(best, run, len(done) - 1)]
    others = ", ".join(near[:LISTED]) + (f" and {len(near) - LISTED} more" if len(near) > LISTED else "")
    return "No clear winner", (
        f"{label} has {big}, but on {number:,} images the difference to {others} is within chance"
    )


def mean_words(values: Sequence[float], of: tuple[str, str], images: int) -> str:
    """Mean and standard deviation over seeds, in the words of one of them."""
    counted = of[1].partition(";")[0]
    if len(values) == 1:
        return headline_words(of[0], f"one seed, {counted}")
    places = max(1, decimals(images * len(values)))
    middle, deviation = (f"{100 * value:.{places}f}" for value in (mean(values), stdev(values)))
    told = f"mean and standard deviation over {len(values)} seeds of one recipe, each {counted}; "
    told += f"95 % interval {span(wilson(mean(values), images), images)}"
    return headline_words(f"{middle} ± {deviation} % {of[0].partition(' % ')[2]}", told)


def headline_words(big: str, small: str) -> str:
    return f'<p class="headline">{text(big)} <small>{text(small)}</small></p>\n'


def results(runs: Sequence[Found], called: Sequence[str]) -> str:
    """A row for each; where not all were tested on the same images, with a letter for each test set."""
    rows = [result_row(run, label) for run, label in zip(runs, called, strict=True)]
    sets = groups(runs)
    if len(sets) < 2:
        return table(rows)
    which = {id(run): number for number, group in enumerate(sets) for run in group}
    for run, row in zip(runs, rows, strict=True):
        row["test set"] = "–" if id(run) not in which else letters(which[id(run)])
    return table(rows) + note("Only runs with the same test set were tested on the same images.")


def letters(number: int) -> str:
    """A to Z, then AA and so on."""
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def result_row(run: Found, label: str) -> dict[str, Any]:
    result = run["result"] or {}
    test = test_of(run)
    ends = span(wilson(test["top1"], test["images"]), test["images"]) if counts(run) else "–"
    steps = result.get("steps") or max((row["step"] for row in run["metrics"]), default=0)
    return {
        "run": link(run, label),
        "result": Number(text(headline(run)[0])),
        "95 % interval": Number(ends),
        "images": test.get("images"),
        "loss": test.get("loss"),
        "calibration error": percent(test.get("calibration_error")),
        "steps": steps,
        "seed": run["recipe"].get("seed"),
    }


def link(run: Found, label: str) -> Markup:
    """A run's name, leading to its report where that lies below this page."""
    told = name(label, 80)
    return Markup(f'<a href="{text(run["link"])}">{told}</a>') if run.get("link") else told


def curves(runs: Sequence[Found], called: Sequence[str]) -> str:
    shown = dict(list(zip(called, (run["metrics"] for run in runs), strict=True))[:DRAWN])
    more = note(f"The first {DRAWN} of {len(runs)} runs.") if len(runs) > DRAWN else ""
    return more + overlaid(shown)


def differences(runs: Sequence[Found], called: Sequence[str]) -> str:
    """A row for each field that is not the same in all."""
    other = changed(runs)
    rows = [
        {"field": key} | {label: name(said(run["recipe"].get(key)), 120)
                          for run, label in zip(runs, called, strict=True)}
        for key in dict.fromkeys(key for run in runs for key in run["recipe"]) if key in other
    ]  # fmt: skip
    return table(rows) if rows else note("All are of the same recipe, in every field.")


def costs(runs: Sequence[Found], called: Sequence[str]) -> str:
    rows = [cost_row(run, label) for run, label in zip(runs, called, strict=True)]
    known = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return table({key: row[key] for key in known} for row in rows)


def cost_row(run: Found, label: str) -> dict[str, Any]:
    cost: Mapping[str, Any] = (run["result"] or {}).get("cost") or {}
    seconds, energy, price = (cost.get(key) for key in ("seconds", "energy_kWh", "price"))
    return {
        "run": name(label, 80),
        "time": Number("–" if seconds is None else duration(seconds)),
        "device hours": cost.get("device_hours"),
        "images seen": cost.get("images_seen"),
        "operations": Number(flops(cost.get("training_FLOPs")) or "–"),
        "parameters": cost.get("parameters"),
        "kWh": energy,
        "price": price,
        "device": cost.get("device", "–"),
    }


def protocol_page(protocol: Mapping[str, Any] | None, runs: Sequence[Found], title: str) -> str:
    """The paper's protocol: the rates tried on held-out images, then seeds with the best of them on test."""
    if protocol is None:
        status = '<p class="status">The protocol is not finished: these are its runs so far.</p>\n'
        return compare_page(runs, title, headline_words("Not finished", f"{len(runs)} runs so far") + status)
    count = protocol["images"]
    images = f"of {count:,} test images"
    lead = mean_words(protocol["seeds"], (f"{share_of(protocol['mean'], count)} right", images), count)
    lead += f"<p>{text(chosen_words(protocol))}, then all of train and val.</p>\n"
    if len(protocol["rates"]) > 1:
        rates = {"held-out": [(float(rate), top1) for rate, top1 in protocol["rates"].items()]}
        drawn = line_chart(rates, x_label="learning rate", y_label="accuracy on held-out images",
                           log_x=True, points=True, percent=True)  # fmt: skip
        lead += f'<div class="charts">{drawn}<div></div></div>\n'  # as wide as one of two
    recipe = runs[-1]["recipe"]
    task = task_of(recipe.get("data") or "", recipe.get("name") or "", count)
    beside = task_section(task, title, protocol["mean"], protocol["std"], count)
    return compare_page(runs, title, lead, beside)


def chosen_words(protocol: Mapping[str, Any]) -> str:
    """What was chosen on the held-out images, and what it was compared with."""
    chosen, tried = protocol.get("chosen", ""), protocol.get("tried") or {}
    rate, rule = f"Learning rate {protocol['rate']:g}", tried.get("bit")
    if "-steps-" in chosen:
        return f"{rate}, {protocol['steps']:,} steps: the setting of the whole suite"
    if rule is None:
        return rate
    ours = max(top1 for key, top1 in tried.items() if key != "bit")
    if chosen == "bit":
        best = f"the best rate {percent(ours, 1)}"
        return f"BiT's HyperRule ({percent(rule, 1)} of the held-out images right, {best})"
    return f"{rate} ({percent(ours, 1)} of the held-out images right, BiT's HyperRule {percent(rule, 1)})"
