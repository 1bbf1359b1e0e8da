"""`vitkit suite`: fine-tune on VTAB-1k or own tasks and report the mean accuracy of each group."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from vitkit.commands.finetune import make_recipe
from vitkit.commands.report import draw_if_possible
from vitkit.commands.shared import Emit
from vitkit.datasets.opening import open_data
from vitkit.datasets.vtab import GROUPS, TASKS, read_task
from vitkit.errors import Error, similar_path
from vitkit.metrics.intervals import mean_interval, percent, span
from vitkit.options import Training
from vitkit.planning import automatic
from vitkit.planning.plan import log_function
from vitkit.recipes.recipe import Recipe, override, read_recipe
from vitkit.report.terminal import print_table, say
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.folder import RunOptions
from vitkit.runs.protocol import Protocol, called, candidates, check_seeds
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.weights.locate import run_model

OWN, ALL = "own", "VTAB-1k"
PLACE = "vtab:{}:{}"
RATES, SCHEDULES = (0.003, 0.01), (500, 2500)  # the VTAB sweep; the paper states only the chosen values
Log = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A task of the suite with its data and augmentation."""

    name: str
    group: str
    data: str
    order: str = ""  # how the first 800 images of VTAB were determined
    complete: bool = True  # whether all published files exist
    differs: str = ""  # how the data differs from the protocol
    flip: bool = True
    crop: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the hyperparameters of the final runs are chosen, and the number of final runs."""

    rates: tuple[float, ...] = ()
    schedules: tuple[int, ...] = ()  # numbers of steps
    one_setting: bool = False  # VTAB protocol: rates x schedules, by the mean over all tasks
    seeds: int = 1

    def check(self, options: Training) -> None:
        check_seeds(self.seeds)
        if self.schedules and not self.one_setting:
            raise Error("--schedules needs --one-setting; without it use --steps", code="request.conflict")
        if self.one_setting and options.steps is not None:
            raise Error(
                "--one-setting excludes --steps; use --schedules N... instead",
                code="request.conflict",
            )
        if any(rate <= 0 for rate in self.rates) or any(steps < 1 for steps in self.schedules):
            raise Error(f"--rates {self.rates} and --schedules {self.schedules} must be above 0")

    def settings(self, entry: Entry, options: Training) -> dict[str, Recipe]:
        """The candidate recipes of a task, by the folder of each run."""
        if not self.one_setting:
            return candidates(task_recipe(entry, options, self.rates))
        recipes = {}
        for steps in self.schedules or SCHEDULES:
            for rate in self.rates or RATES:
                (recipe,) = candidates(task_recipe(entry, replace(options, steps=steps), (rate,))).values()
                recipes[f"rate-{rate:g}-steps-{steps}"] = recipe
        return recipes


def suite(
    model: str, data: str, tasks: Sequence[str], options: Training, choice: Choice, *, emit: Emit
) -> None:
    """Fine-tune on every task whose data exists, one after the other; the same command again resumes.

    All data is opened before any training, so that errors appear early.
    """
    choice.check(options)
    options = replace(options, weights=str(run_model(model) or model))
    entries, missing = find_tasks(tasks, data)
    out = options.out or Path("runs") / "suite"
    run_options = RunOptions(
        workers=options.workers, max_bad=options.max_bad, trackers=options.track, quiet=bool(emit)
    )
    runtime = choose_runtime(
        options.device, options.precision, options.compile == "yes", options.recompute,
        deterministic=options.deterministic, cuda_graph=options.cuda_graph,
    )  # fmt: skip
    with runtime.process_group():
        log = log_function(runtime, quiet=bool(emit))
        recipes = [choice.settings(entry, options) for entry in entries]
        first = next(iter(recipes[0].values()))
        size = micro_batch(first, options, out / entries[0].name, runtime, log)
        recipes = [{k: replace(r, micro_batch=size) for k, r in settings.items()} for settings in recipes]
        sweep = Sweep(entries, recipes, out, runtime, run_options, log)
        common = sweep.common() if choice.one_setting else None
        rows: list[dict[str, Any]] = []
        for number, entry in enumerate(entries):
            log(f"{entry.name}: {number + 1} of {len(entries)}")
            rows.append(row(entry, sweep.final(number, choice.seeds, common)))
            summary = {"model": model, "run": str(out), "setting": common}
            summary |= with_means(rows, missing, len(entries) - len(rows))
            if runtime.is_main:
                (out / "suite.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
        draw_if_possible(out, runtime, log)
        if runtime.is_main:
            emit(summary) if emit else print_summary(summary)


@dataclass(frozen=True)
class Sweep:
    """The runs of a suite: for each task its candidate settings, then its final runs."""

    entries: Sequence[Entry]
    recipes: Sequence[dict[str, Recipe]]
    out: Path
    runtime: Runtime
    options: RunOptions
    log: Log

    def common(self) -> dict[str, Any]:
        """One setting for all tasks: the best by mean validation accuracy."""
        tried = []
        for entry, recipes in zip(self.entries, self.recipes, strict=True):
            self.log(f"{entry.name}: comparing {len(recipes)} settings on its validation images")
            tried.append(self.protocol(entry).compare(recipes))
        means = {name: mean(task[name]["top1"] for task in tried) for name in self.recipes[0]}
        chosen = max(means, key=lambda name: means[name])
        self.log(f"{called(chosen)}: best mean accuracy of {len(tried)} tasks, {means[chosen]:.2%}")
        scores = {entry.name: task for entry, task in zip(self.entries, tried, strict=True)}
        return {"chosen": chosen, "means": means, "tasks": len(tried), "tried": scores_of(scores)}

    def final(self, number: int, seeds: int, common: dict[str, Any] | None) -> dict[str, Any]:
        entry, recipes = self.entries[number], self.recipes[number]
        if common is None:
            return self.protocol(entry).follow(recipes, seeds=seeds)
        chosen = common["chosen"]
        tried = {name: {"top1": top1} for name, top1 in common["tried"][entry.name].items()}
        return self.protocol(entry).retrain(recipes[chosen], chosen, tried, seeds=seeds)

    def protocol(self, entry: Entry) -> Protocol:
        """The protocol of one task, in a folder of its name."""
        return Protocol(self.out / entry.name, self.runtime, self.options, self.log)


def scores_of(tried: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """The top-1 accuracy by task and setting."""
    return {task: {name: test["top1"] for name, test in settings.items()} for task, settings in tried.items()}


def find_tasks(tasks: Sequence[str], root: str) -> tuple[list[Entry], list[str]]:
    """The tasks whose data exists, each opened once, and the names of VTAB tasks without data."""
    entries: list[Entry] = []
    missing = []
    names = tasks or tuple(TASKS)
    if not root and any(name in TASKS for name in names):
        raise Error(
            "VTAB-1k tasks need --data ROOT, the folder of their data sets (docs/research/vtab.md)",
            code="request.missing",
        )
    if root and not Path(root).is_dir():
        raise Error(
            f"--data {root!r}: folder not found;{similar_path(root)}".rstrip(";"), code="data.not-found"
        )
    for name in dict.fromkeys(names):
        if name not in TASKS:
            entries.append(own_task(name))
        elif not (Path(root) / TASKS[name].folder).is_dir():
            missing.append(name)
        else:
            task, opened = TASKS[name], read_task(name, root)
            data = PLACE.format(name, root)
            entries.append(
                Entry(
                    name, task.group, data, opened.order, opened.complete, task.differs, task.flip, task.crop
                )
            )
    counts = Counter(entry.name for entry in entries)
    if duplicates := sorted(name for name, count in counts.items() if count > 1):
        raise Error(
            f"two tasks are named {', '.join(duplicates)}; rename one of the folders",
            code="request.conflict",
        )
    if not entries:
        raise Error(
            f"--data {root} has no data for any of these tasks: {', '.join(missing)}", code="data.not-found"
        )
    return entries, missing


def own_task(place: str) -> Entry:
    """The task of a user's data set, split as by `vitkit finetune`."""
    if place != "digits" and not Path(place).exists():
        raise Error(
            f"unknown task {place!r}: neither an existing data set nor a VTAB-1k task ({', '.join(TASKS)})",
            code="data.not-found",
        )
    open_data(place)
    path = Path(place).absolute()
    return Entry(path.name if path.is_dir() else path.stem, OWN, place)


def task_recipe(entry: Entry, options: Training, rates: Sequence[float]) -> Recipe:
    """The VTAB recipe of Table 4 with BiT's crop; no flips or crops for tasks where they change labels."""
    recipe = make_recipe(entry.data, options, "vtab")
    if options.steps is not None:  # the warm-up keeps its fraction of the run
        full = make_recipe(entry.data, replace(options, steps=None), "vtab")
        warmup = round(full.schedule.warmup * options.steps / (full.length.steps or 1))
        recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=warmup))
    recipe = replace(recipe, rates=tuple(rates) or recipe.rates)
    recipe = replace(recipe, crop="squash-random", resize=round(max(recipe.image_size) * 448 / 384))
    recipe = override(recipe, options.set)
    if not entry.crop:
        recipe = replace(recipe, crop="squash", resize=0)
    return replace(recipe, flip=recipe.flip and entry.flip)


def micro_batch(recipe: Recipe, options: Training, out: Path, runtime: Runtime, log: Log) -> int:
    """The micro-batch size that fits on the device, or that of the run to resume."""
    for path in sorted(out.glob("*/recipe.json")):
        return runtime.broadcast(read_recipe(path)).micro_batch
    runtime.local_places(recipe.batch)  # an error now, before long work
    splits = open_splits(recipe)
    model, known = build_model(recipe, splits["train"]), automatic.circumstances(options, splits, runtime)
    fitted = automatic.fitted(recipe, model, known, runtime, lambda choice: log(str(choice)))
    return runtime.broadcast(fitted).micro_batch


def row(entry: Entry, result: dict[str, Any]) -> dict[str, Any]:
    copied = ("interval", "std", "seeds", "rate", "steps", "chosen", "tried", "images")
    return {
        "task": entry.name, "group": entry.group, "top1": result["mean"],
        **{name: result[name] for name in copied},
        "order": entry.order or None, "complete": entry.complete, "differs": entry.differs or None,
        "run": result["run"],
    }  # fmt: skip


def with_means(rows: Sequence[dict[str, Any]], missing: Sequence[str], waiting: int = 0) -> dict[str, Any]:
    """The rows and the means of groups; each mean has its number of tasks and whether it is complete."""

    def group_mean(part: Sequence[dict[str, Any]], total: int) -> dict[str, Any]:
        complete = len(part) == total and all(row["complete"] for row in part)
        value = mean(row["top1"] for row in part) if part else None
        images = [row["images"] for row in part]
        interval = list(mean_interval([row["top1"] for row in part], images)) if part else None
        size = {"images": sum(images), "interval": interval}
        return {"mean": value, **size, "tasks": len(part), "of": total, "complete": complete}

    vtab = [r for r in rows if r["group"] != OWN]
    own = [r for r in rows if r["group"] == OWN]
    means: dict[str, Any] = {OWN: group_mean(own, len(own))} if own else {}
    if vtab or missing:
        for group, total in GROUPS.items():
            means[group] = group_mean([r for r in vtab if r["group"] == group], total)
        means[ALL] = group_mean(vtab, len(TASKS))
    return {
        "tasks": list(rows),
        "missing": [{"task": name, "group": TASKS[name].group} for name in missing],
        "means": means,
        "waiting": waiting,
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Print a table with one row per task, including those without data, and one per mean."""

    def line(task: str, group: str, row: dict[str, Any], key: str, note: str) -> dict[str, Any]:
        images, interval = row.get("images") or 0, row.get("interval")
        accuracy = {
            "accuracy": percent(row.get(key), images),
            "95 % interval": span(interval, images) if interval else "–",
        }
        data = {"images": images or None, "order": row.get("order")}
        return {"task": task, "group": group, **accuracy, **data, "note": note}

    table = []
    for r in summary["tasks"]:
        std = percent(r["std"], r["images"])
        deviation = f"+- {std} over {len(r['seeds'])} seeds" if r["std"] is not None else ""
        files = "" if r["complete"] else "files differ from the published ones"
        best = f"{called(r['chosen'])}, the best of {len(r['tried'])}" if r["tried"] else ""
        best = "" if summary["setting"] else best
        note = "; ".join(filter(None, (deviation, best, files, r["differs"])))
        table.append(line(r["task"], r["group"], r, "top1", note))
    table += [line(r["task"], r["group"], {}, "top1", "missing: no data") for r in summary["missing"]]
    for group, r in summary["means"].items():
        note = f"{r['tasks']} of {r['of']} tasks" + ("" if r["complete"] else ", incomplete")
        table.append(line("mean", group, r, "mean", note))
    print_table(table)
    if common := summary["setting"]:
        say(f"setting for all tasks: {called(common['chosen'])}, the best of {len(common['means'])}")
    say(f"results: {summary['run']}")
