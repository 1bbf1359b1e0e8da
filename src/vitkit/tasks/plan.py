"""--plan: what a run would do and take, as one page or one object; nothing is trained, fetched or written."""

import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.data.content import REMEMBERED
from vitkit.data.remote import Cache
from vitkit.data.sources import Source
from vitkit.evaluation.cost import forward_flops, parameters
from vitkit.experiment.changes import counted
from vitkit.experiment.start import Kept
from vitkit.experiment.terms import Result
from vitkit.models.variants import Model, fresh, variant
from vitkit.models.vit import dropped
from vitkit.proportions import percent
from vitkit.recipes.recipe import Recipe, stages_of
from vitkit.report.terminal import console, duration, printable, say
from vitkit.tasks import automatic
from vitkit.tasks.again import finished
from vitkit.training.checkpoint import complete
from vitkit.training.runtime import Runtime
from vitkit.weights.load import load
from vitkit.weights.published import PUBLISHED, kept_at

WIDTH, NAMES = 80, 15  # columns of the page, and of the names on its left
LONG = 120.0  # seconds of a run for which a shorter one is suggested
CROPS = {
    "inception": "random crops of 5 to 100 % of an image",
    "random": "random crops of the resized image",
    "squash-random": "random crops of the squashed image",
    "centre": "central crops",
    "squash": "whole images, squashed to the size",
}


@contextmanager
def data_opener(plan: bool) -> Iterator[Kept]:
    """How a training verb opens its data; for a plan nothing of it is kept on the disk."""
    if not plan:
        yield Kept()
        return
    with REMEMBERED.in_memory(), tempfile.TemporaryDirectory() as folder:
        yield Kept(cache=Cache(Path(folder), 0))


def load_here(place: str) -> Model:
    """A model of the same shape as the weights: published ones that are not on this machine stay there."""
    weight = None if Path(place).exists() else PUBLISHED.get(place)
    if weight is None or kept_at(weight).exists():
        return load(place)
    return fresh(variant(weight.model))


@dataclass(frozen=True)
class State:
    """What is in a run folder: create (nothing), restart (no checkpoint), resume or finished."""

    action: str
    total: int  # steps of the whole run
    step: int = 0
    result: Result | None = None


def state_of(out: Path, recipe: Recipe, images: int) -> State:
    """What the same command without --plan would do with the folder, for so many training images."""
    total = stages_of(recipe, images)[-1].end
    if not (out / "recipe.json").exists():
        return State("create", total)
    found = complete(out / "checkpoints")
    step = int(found[-1].name.removeprefix("step-")) if found else 0
    if result := finished(out, recipe):
        early = result.kept["stopped_early"] if result.kept else bool(recipe.patience)
        if result.steps >= total or early:
            return State("finished", total, result.steps, result)
    return State("resume" if step else "restart", total, step)


def make_plan(
    recipe: Recipe,
    out: Path,
    splits: Mapping[str, Source],
    model: Model,
    runtime: Runtime,
    state: State,
    seconds: float | None,
    start: float,
) -> dict[str, Any]:
    """The plan as an object; `seconds` a step, None where not measured, and `start` until the first batch."""
    images, steps = len(splits["train"]), state.total
    left = 0 if state.action == "finished" else steps - state.step
    memory = automatic.memory_of(recipe, model, runtime, recipe.micro_batch or recipe.batch // runtime.world)
    time = 0.0 if not left else None if seconds is None else start + left * seconds
    note = dropped(model.config)
    return {
        "run": str(out), "action": state.action, "step": state.step, "recipe": recipe.name,
        "data": recipe.data, "against": list(recipe.against), "download_MB": download_size(recipe.weights),
        "start": recipe.weights or f"{recipe.model} from scratch",
        **{f"{name}_images": len(part) for name, part in splits.items()},
        "classes": len(splits["train"].classes), "parameters": parameters(model),
        "image_size": f"{recipe.image_size[0]} x {recipe.image_size[1]}",
        **({"pixels": note} if note else {}),
        "batch": recipe.batch, "micro_batch": recipe.micro_batch or None, "optimizer": optimizer(recipe),
        "learning_rate": recipe.schedule.rate, "warmup": recipe.schedule.warmup,
        "decay": recipe.schedule.decay, "augmentation": augmentation(recipe),
        "evaluations": recipe.evaluations if "val" in splits else 0,
        "keep": "best" if recipe.keeps_best else "last", "patience": recipe.patience,
        "steps": steps, "steps_left": left, "images_seen": steps * recipe.batch,
        "epochs": steps * recipe.batch / images,
        "training_FLOPs": 3 * forward_flops(model.config) * steps * recipe.batch,
        "memory_GB": memory.total / 1e9, "memory_free_GB": automatic.device_memory(runtime.device) / 1e9,
        "largest_batch_at_once": automatic.largest_batch(recipe, model, runtime),
        "seconds": time, "time": "not measured" if time is None else duration(time),
        "checkpoint_GB": (memory.parameters + memory.optimizer) / 1e9, "choices": [],
        "result": state.result.test.get("top1") if state.result else None,
    } | runtime.facts()  # fmt: skip


def download_size(weights: str) -> float | None:
    """The megabytes that would be fetched: 0 for what is here, None where the publisher does not tell."""
    weight = None if Path(weights or ".").exists() else PUBLISHED.get(weights)
    return 0.0 if weight is None or kept_at(weight).exists() else weight.megabytes


def optimizer(recipe: Recipe) -> str:
    made = recipe.optimizer
    name = f"SGD, momentum {made.momentum:g}" if made.kind == "sgd" else "Adam"
    decay = f", weight decay {made.weight_decay:g}" if made.weight_decay else ""
    frozen = f", {made.frozen} frozen" if made.frozen != "nothing" else ""
    return f"{name}{decay}{frozen}"


def augmentation(recipe: Recipe) -> list[str]:
    found = [CROPS[recipe.crop]]
    found += ["mirrored at random"] if recipe.flip else []
    if recipe.randaugment:
        found.append(f"RandAugment ({recipe.randaugment[0]} layers, magnitude {recipe.randaugment[1]})")
    found += [f"Mixup {recipe.mixup:g}"] if recipe.mixup else []
    found += [f"label smoothing {recipe.label_smoothing:g}"] if recipe.label_smoothing else []
    return found


def with_protocol(plan: dict[str, Any], candidates: int, seeds: int) -> dict[str, Any]:
    """The plan of one run as the plan of the paper's protocol, which makes many like it."""
    runs = (candidates if candidates > 1 else 0) + seeds
    seconds = None if plan["seconds"] is None else runs * plan["seconds"]
    time = plan["time"] if seconds is None else duration(seconds)
    return plan | {"candidates": candidates, "seeds": seeds, "runs": runs, "seconds": seconds, "time": time,
                   "keep": "last", "patience": 0, "evaluations": 0}  # fmt: skip


def print_plan(plan: Mapping[str, Any]) -> None:
    """The plan as a page."""
    for line in page(plan, min(WIDTH, console().width)):
        say(line)


def page(plan: Mapping[str, Any], width: int = WIDTH) -> Iterator[str]:
    """Lines of at most so many columns."""
    yield from textwrap.wrap(printable(headline(plan)), width)
    for name, text in rows(plan):
        yield from textwrap.wrap(
            printable(text), width, initial_indent=f"  {name:<{NAMES}}", subsequent_indent=" " * (NAMES + 2)
        )
    again = "" if plan["action"] == "finished" else "; leave out --plan to do it"
    yield from textwrap.wrap(f"Nothing was trained, downloaded or written{again}.", width)


def headline(plan: Mapping[str, Any]) -> str:
    run, steps = plan["run"], plan["steps"]
    if plan["action"] == "finished":
        right = (
            ""
            if plan["result"] is None
            else f", {percent(plan['result'], plan['test_images'])} of the test images right"
        )
        return (
            f"{run} is already finished: {counted(plan['step'], 'step')}{right}. It was trained as follows."
        )
    if plan["action"] == "resume":
        return f"Would resume {run} at step {plan['step']:,} of {steps:,}."
    if plan["action"] == "restart":
        return f"Would start {run} again from the beginning: it holds no checkpoint yet."
    return f"Would create {run}."


def rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The page, one name and one text a row."""
    words = {"train": "training", "val": "validation", "test": "test"}
    counts = {word: plan.get(f"{name}_images") for name, word in words.items()}
    parts = [f"{count:,} {word}" for word, count in counts.items() if count is not None]
    yield (
        "data",
        f"{plan['data']}: {' + '.join(parts)} images, {counted(plan['classes'], 'class', 'classes')}",
    )
    if plan["against"]:
        yield "left out", f"training images that are in {', '.join(plan['against'])} too, or look like those"
    size = plan["download_MB"]
    fetch = "" if size == 0 else f"; {f'{size:,.0f} MB' if size else 'its file'} would be downloaded first"
    yield "start from", f"{plan['start']}, {plan['parameters'] / 1e6:,.1f} million parameters{fetch}"
    yield "resolution", f"{plan['image_size']} pixels{'; ' + plan['pixels'] if 'pixels' in plan else ''}"
    pieces = f", {plan['micro_batch']} at a time" if plan["micro_batch"] else ""
    yield "batch", f"{counted(plan['batch'], 'image')}{pieces}"
    warmup = f"{counted(plan['warmup'], 'step')} of warm-up, " if plan["warmup"] else ""
    yield "learning rate", f"{plan['learning_rate']:g}, {warmup}{plan['decay']} decay; {plan['optimizer']}"
    yield "augmentation", ", ".join(plan["augmentation"])
    yield (
        "length",
        f"{counted(plan['steps'], 'step')}, {plan['epochs']:,.1f} passes over the training images (epochs)",
    )
    yield "validation", validation(plan)
    if "runs" in plan:
        settings = counted(plan["candidates"], "setting")
        yield "protocol", f"{settings} compared on validation images, then {plan['seeds']} seeds of the best"
    if plan["action"] != "finished":
        yield "time", time_in_words(plan)
    yield "memory", f"{plan['memory_GB']:.1f} GB, {plan['memory_free_GB']:.1f} GB are free"
    several = f"{plan['processes']} processes, " if plan["processes"] > 1 else ""
    yield "device", f"{plan['device']}, {several}{plan['precision']}, {counted(plan['threads'], 'thread')}"
    names = ["chosen", *[""] * len(plan["choices"])]
    yield from zip(names, plan["choices"], strict=False)


def validation(plan: Mapping[str, Any]) -> str:
    if not plan["evaluations"]:
        return "none during the run; the last weights are kept"
    kept = "the best weights are kept (--keep last: the last)"
    if plan["keep"] == "last":
        kept = "the last weights are kept (--keep best: the best)"
    stop = f"the run stops early after {plan['patience']} without a better one (--patience 0: never)"
    if not plan["patience"]:
        stop = "the run does not stop early (--patience 5: after 5 without a better one)"
    return f"{counted(plan['evaluations'], 'time')}; {kept}; {stop}"


def time_in_words(plan: Mapping[str, Any]) -> str:
    """How long, and how to make it shorter where it is long."""
    if plan["seconds"] is None:
        return "not measured: the model is cut over several processes"
    text = f"about {plan['time']} for {counted(plan['steps_left'], 'step')}, at the speed measured now"
    if plan["action"] == "resume" or plan["seconds"] < LONG:
        return text
    return f"{text}; --steps {plan['steps'] // 4} takes about {duration(plan['seconds'] / 4)}"
