"""The text that --plan prints."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from vitkit.metrics.intervals import percent
from vitkit.report.terminal import console, duration, printable, say
from vitkit.runs.provenance.changes import counted

WIDTH, NAMES = 80, 15  # columns of the text, and of the names on its left
LONG = 120.0  # seconds of a run from which on a shorter one is suggested


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a plan."""
    for line in page(plan, min(WIDTH, console().width)):
        say(line)


def page(plan: Mapping[str, Any], width: int = WIDTH) -> Iterator[str]:
    """The lines of a plan, at most `width` columns wide."""
    yield from textwrap.wrap(printable(headline(plan)), width)
    for name, text in rows(plan):
        yield from textwrap.wrap(
            printable(text), width, initial_indent=f"  {name:<{NAMES}}", subsequent_indent=" " * (NAMES + 2)
        )
    hint = "" if plan["action"] == "finished" else "; run it without --plan"
    yield from textwrap.wrap(f"Nothing was trained, downloaded or written{hint}.", width)


def headline(plan: Mapping[str, Any]) -> str:
    run, steps = plan["run"], plan["steps"]
    if plan["action"] == "finished":
        accuracy = ""
        if plan["result"] is not None:
            accuracy = f", {percent(plan['result'], plan['test_images'])} of the test images correct"
        elif plan["summary"]:
            accuracy = f", {plan['summary']}"
        steps_done = counted(plan["step"], "step")
        return f"{run} is already finished: {steps_done}{accuracy}. It was trained as follows."
    if plan["action"] == "resume":
        return f"Would resume {run} at step {plan['step']:,} of {steps:,}."
    if plan["action"] == "restart":
        return f"Would start {run} again from the beginning: it has no checkpoint yet."
    return f"Would create {run}."


def rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows of the text: a name and a description."""
    words = {"train": "training", "val": "validation", "test": "test"}
    counts = {word: plan.get(f"{name}_images") for name, word in words.items()}
    parts = [f"{count:,} {word}" for word, count in counts.items() if count is not None]
    yield (
        "data",
        f"{plan['data']}: {' + '.join(parts)} images, {counted(plan['classes'], 'class', 'classes')}",
    )
    if plan["corrections"]:
        yield "corrections", str(plan["corrections"])
    if plan["against"]:
        yield "left out", f"duplicates and near-duplicates of images in {', '.join(plan['against'])}"
    size = plan["download_MB"]
    download = "" if size == 0 else f"; {f'{size:,.0f} MB' if size else 'its file'} would be downloaded first"
    yield "start from", f"{plan['start']}, {plan['parameters'] / 1e6:,.1f} million parameters{download}"
    if plan["train"] != "all":
        yield "trains", plan["trains"]
    yield "resolution", f"{plan['image_size']} pixels{'; ' + plan['pixels'] if 'pixels' in plan else ''}"
    micro = f", in micro-batches of {plan['micro_batch']}" if plan["micro_batch"] else ""
    yield "batch", f"{counted(plan['batch'], 'image')}{micro}"
    if plan["fitted_head"]:
        yield "head", "a ridge classifier is fitted to the features of whole images; no weights are trained"
    else:
        yield from training_rows(plan)
    yield "validation", validation(plan)
    if "folds" in plan:
        yield "folds", f"{plan['folds']} runs, each tested on a fold, then one on all training images"
    elif "runs" in plan:
        settings = counted(plan["candidates"], "setting")
        yield "protocol", f"{settings} compared on validation images, then {plan['seeds']} seeds of the best"
    if plan["action"] != "finished":
        yield "time", time_in_words(plan)
    yield "memory", f"{plan['memory_GB']:.1f} GB of {plan['memory_free_GB']:.1f} GB free"
    several = f"{plan['processes']} processes, " if plan["processes"] > 1 else ""
    yield "device", f"{plan['device']}, {several}{plan['precision']}, {counted(plan['threads'], 'thread')}"
    names = ["chosen", *[""] * len(plan["choices"])]
    yield from zip(names, plan["choices"], strict=False)


def training_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows about the steps of training."""
    warmup = f"{counted(plan['warmup'], 'step')} of warm-up, " if plan["warmup"] else ""
    yield "learning rate", f"{plan['learning_rate']:g}, {warmup}{plan['decay']} decay; {plan['optimizer']}"
    yield "augmentation", ", ".join(plan["augmentation"])
    yield "length", f"{counted(plan['steps'], 'step')}, {plan['epochs']:,.1f} epochs"


def validation(plan: Mapping[str, Any]) -> str:
    if not plan["evaluations"]:
        return "none during the run; keeps the last weights"
    kept = "keeps the best weights (--keep last keeps the last)"
    if plan["keep_margin"]:
        kept = "keeps the last weights, or earlier ones that are clearly better (--keep last keeps the last)"
    if plan["keep"] == "last":
        kept = "keeps the last weights (--keep best keeps the best)"
    stop = f"stops early after {plan['patience']} without improvement (--patience 0 disables it)"
    if not plan["patience"]:
        stop = "no early stopping (--patience 5 stops after 5 without improvement)"
    return f"{counted(plan['evaluations'], 'time')}; {kept}; {stop}"


def time_in_words(plan: Mapping[str, Any]) -> str:
    """The expected time, and how to shorten a long run."""
    if plan["seconds"] is None:
        return "not measured: the model is sharded over several processes"
    runs = f" in each of {plan['runs']} runs" if "folds" in plan else ""
    text = f"about {plan['time']} for {counted(plan['steps_left'], 'step')}{runs}, at the current speed"
    if plan["action"] == "resume" or plan["seconds"] < LONG:
        return text
    return f"{text}; --steps {plan['steps'] // 4} takes about {duration(plan['seconds'] / 4)}"
