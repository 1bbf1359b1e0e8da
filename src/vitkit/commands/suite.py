"""Many tasks: VTAB-1k or a user's own, one setting or each its own, a mean for each group and for all."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from vitkit.commands.finetune import make_recipe
from vitkit.commands.report import drawn
from vitkit.commands.shared import Emit
from vitkit.datasets.opening import open_data
from vitkit.datasets.vtab import GROUPS, TASKS, read_task
from vitkit.errors import Error
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
RATES, SCHEDULES = (0.003, 0.01), (500, 2500)  # of VTAB's sweep; the paper names only what it chose
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A task of the suite: what its recipe calls its data, and where BiT goes without flips or crops."""

    name: str
    group: str
    data: str
    order: str = ""  # how VTAB's first 800 images were found
    complete: bool = True  # whether all published files are there
    differs: str = ""  # from what the protocol has
    flip: bool = True
    crop: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the setting of the final runs is found, and how many of these there are."""

    rates: tuple[float, ...] = ()
    schedules: tuple[int, ...] = ()  # numbers of steps
    one_setting: bool = False  # VTAB's own protocol: rates x schedules, by the mean over all tasks
    seeds: int = 1

    def check(self, options: Training) -> None:
        check_seeds(self.seeds)
        if self.schedules and not self.one_setting:
            raise Error("--schedules is for --one-setting; without it give --steps", code="request.conflict")
        if self.one_setting and options.steps is not None:
            raise Error(
                "--one-setting compares --schedules N...; give these instead of --steps",
                code="request.conflict",
            )
        if any(rate <= 0 for rate in self.rates) or any(steps < 1 for steps in self.schedules):
            raise Error(f"--rates {self.rates} and --schedules {self.schedules} must be above 0")

    def settings(self, entry: Entry, options: Training) -> dict[str, Recipe]:
        """What is compared for a task, by the folder of each run."""
        if not self.one_setting:
            return candidates(make(entry, options, self.rates))
        found = {}
        for steps in self.schedules or SCHEDULES:
            for rate in self.rates or RATES:
                (made,) = candidates(make(entry, replace(options, steps=steps), (rate,))).values()
                found[f"rate-{rate:g}-steps-{steps}"] = made
        return found


def suite(
    model: str, data: str, tasks: Sequence[str], options: Training, choice: Choice, *, emit: Emit
) -> None:
    """Every task whose data is there, one after the other; the same command again goes on.

    All data is opened before anything is trained, so that a mistake costs no hours.
    """
    choice.check(options)
    options = replace(options, weights=str(run_model(model) or model))
    entries, missing = find(tasks, data)
    out = options.out or Path("runs") / "suite"
    how = RunOptions(
        workers=options.workers, max_bad=options.max_bad, trackers=options.track, quiet=bool(emit)
    )
    runtime = choose_runtime(
        options.device, options.precision, options.compile, options.recompute,
        deterministic=options.deterministic, cuda_graph=options.cuda_graph,
    )  # fmt: skip
    with runtime.process_group():
        log = log_function(runtime, quiet=bool(emit))
        recipes = [choice.settings(entry, options) for entry in entries]
        first = next(iter(recipes[0].values()))
        pieces = micro_batch(first, options, out / entries[0].name, runtime, log)
        recipes = [{k: replace(r, micro_batch=pieces) for k, r in some.items()} for some in recipes]
        sweep = Sweep(entries, recipes, out, runtime, how, log)
        common = sweep.common() if choice.one_setting else None
        rows: list[dict[str, Any]] = []
        for number, entry in enumerate(entries):
            log(f"{entry.name}: {number + 1} of {len(entries)}")
            rows.append(row(entry, sweep.final(number, choice.seeds, common)))
            summary = {"model": model, "run": str(out), "setting": common}
            summary |= summed(rows, missing, len(entries) - len(rows))
            if runtime.is_main:
                (out / "suite.json").write_text(json.dumps(summary, indent=2))
        drawn(out, runtime, log)
        if runtime.is_main:
            emit(summary) if emit else tell_summary(summary)


@dataclass(frozen=True)
class Sweep:
    """The runs of a suite: what is compared for each task, then its final runs."""

    entries: Sequence[Entry]
    recipes: Sequence[dict[str, Recipe]]
    out: Path
    runtime: Runtime
    how: RunOptions
    log: Tell

    def common(self) -> dict[str, Any]:
        """One setting for all tasks: the best by the mean of their accuracies on validation images."""
        tried = []
        for entry, some in zip(self.entries, self.recipes, strict=True):
            self.log(f"{entry.name}: {len(some)} settings on its validation images")
            tried.append(self.protocol(entry).compare(some))
        means = {name: mean(task[name]["top1"] for task in tried) for name in self.recipes[0]}
        chosen = max(means, key=lambda name: means[name])
        self.log(f"{called(chosen)}: the best mean of {len(tried)} tasks, {means[chosen]:.2%}")
        scores = {entry.name: task for entry, task in zip(self.entries, tried, strict=True)}
        return {"chosen": chosen, "means": means, "tasks": len(tried), "tried": scores_of(scores)}

    def final(self, number: int, seeds: int, common: dict[str, Any] | None) -> dict[str, Any]:
        entry, some = self.entries[number], self.recipes[number]
        if common is None:
            return self.protocol(entry).follow(some, seeds=seeds)
        chosen = common["chosen"]
        tried = {name: {"top1": top1} for name, top1 in common["tried"][entry.name].items()}
        return self.protocol(entry).retrain(some[chosen], chosen, tried, seeds=seeds)

    def protocol(self, entry: Entry) -> Protocol:
        """The runs of one task, in a folder of its name."""
        return Protocol(self.out / entry.name, self.runtime, self.how, self.log)


def scores_of(tried: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """By task and setting the accuracy alone."""
    return {task: {name: test["top1"] for name, test in some.items()} for task, some in tried.items()}


def find(tasks: Sequence[str], root: str) -> tuple[list[Entry], list[str]]:
    """The tasks whose data is there, opened once each, and the names of those of VTAB whose data is not."""
    entries: list[Entry] = []
    missing = []
    wanted = tasks or tuple(TASKS)
    if not root and any(name in TASKS for name in wanted):
        raise Error(
            "the tasks of VTAB-1k need --data ROOT, the folder of their data sets (docs/vtab.md)",
            code="request.missing",
        )
    if root and not Path(root).is_dir():
        raise Error(f"--data {root!r}: there is no such folder", code="data.not-found")
    for name in dict.fromkeys(wanted):
        if name not in TASKS:
            entries.append(own(name))
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
    twice = {e.name for i, e in enumerate(entries) if any(e.name == other.name for other in entries[:i])}
    if twice:
        raise Error(
            f"two tasks are called {', '.join(sorted(twice))}; rename one of the folders",
            code="request.conflict",
        )
    if not entries:
        raise Error(
            f"none of these tasks has its data below {root}: {', '.join(missing)}", code="data.not-found"
        )
    return entries, missing


def own(place: str) -> Entry:
    """A user's folder, archive or manifest, split as `vitkit finetune` would."""
    if place != "digits" and not Path(place).exists():
        raise Error(
            f"no task {place!r}: neither data that is there, nor one of VTAB-1k's ({', '.join(TASKS)})",
            code="data.not-found",
        )
    open_data(place)
    path = Path(place).absolute()
    return Entry(path.name if path.is_dir() else path.stem, OWN, place)


def make(entry: Entry, options: Training, rates: Sequence[float]) -> Recipe:
    """Table 4's recipe for VTAB with BiT's crop, and without flips or crops where these change the label."""
    recipe = make_recipe(entry.data, options, "vtab")
    if options.steps is not None:  # the warm-up keeps its share of the run
        full = make_recipe(entry.data, replace(options, steps=None), "vtab")
        warmup = round(full.schedule.warmup * options.steps / (full.length.steps or 1))
        recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=warmup))
    recipe = replace(recipe, rates=tuple(rates) or recipe.rates)
    recipe = replace(recipe, crop="squash-random", resize=round(max(recipe.image_size) * 448 / 384))
    recipe = override(recipe, options.set)
    if not entry.crop:
        recipe = replace(recipe, crop="squash", resize=0)
    return replace(recipe, flip=recipe.flip and entry.flip)


def micro_batch(recipe: Recipe, options: Training, out: Path, runtime: Runtime, log: Tell) -> int:
    """Images at a time that the device holds, or as many as when the suite was begun."""
    for path in sorted(out.glob("*/recipe.json")):
        return runtime.broadcast(read_recipe(path)).micro_batch
    runtime.local_places(recipe.batch)  # an error before anything takes time
    splits = open_splits(recipe)
    model, known = build_model(recipe, splits["train"]), automatic.circumstances(options, splits, runtime)
    fitted = automatic.fitted(recipe, model, known, runtime, lambda choice: log(str(choice)))
    return runtime.broadcast(fitted).micro_batch


def row(entry: Entry, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": entry.name, "group": entry.group, "top1": told["mean"], "interval": told["interval"],
        "std": told["std"],
        "seeds": told["seeds"], "rate": told["rate"], "steps": told["steps"], "chosen": told["chosen"],
        "tried": told["tried"], "images": told["images"],
        "order": entry.order or None, "complete": entry.complete, "differs": entry.differs or None,
        "run": told["run"],
    }  # fmt: skip


def summed(rows: Sequence[dict[str, Any]], missing: Sequence[str], waiting: int = 0) -> dict[str, Any]:
    """Rows and means; a mean is of the tasks that are there, and says of how many, and whether of all."""

    def of(part: Sequence[dict[str, Any]], total: int) -> dict[str, Any]:
        whole = len(part) == total and all(row["complete"] for row in part)
        value = mean(row["top1"] for row in part) if part else None
        images = [row["images"] for row in part]
        ends = list(mean_interval([row["top1"] for row in part], images)) if part else None
        counted = {"images": sum(images), "interval": ends}
        return {"mean": value, **counted, "tasks": len(part), "of": total, "complete": whole}

    published = [r for r in rows if r["group"] != OWN]
    mine = [r for r in rows if r["group"] == OWN]
    means: dict[str, Any] = {OWN: of(mine, len(mine))} if mine else {}
    if published or missing:
        for group, total in GROUPS.items():
            means[group] = of([r for r in published if r["group"] == group], total)
        means[ALL] = of(published, len(TASKS))
    return {
        "tasks": list(rows),
        "missing": [{"task": name, "group": TASKS[name].group} for name in missing],
        "means": means,
        "waiting": waiting,
    }


def tell_summary(summary: dict[str, Any]) -> None:
    """A row for each task, also for those without data, and one for each mean."""

    def line(task: str, group: str, row: dict[str, Any], key: str, note: str) -> dict[str, Any]:
        images, ends = row.get("images") or 0, row.get("interval")
        found = {
            "accuracy": percent(row.get(key), images),
            "95 % interval": span(ends, images) if ends else "–",
        }
        named = {"images": images or None, "order": row.get("order")}
        return {"task": task, "group": group, **found, **named, "note": note}

    table = []
    for r in summary["tasks"]:
        std = percent(r["std"], r["images"])
        spread = f"+- {std} over {len(r['seeds'])} seeds" if r["std"] is not None else ""
        files = "" if r["complete"] else "other files than published"
        best = f"{called(r['chosen'])}, the best of {len(r['tried'])}" if r["tried"] else ""
        best = "" if summary["setting"] else best
        note = "; ".join(filter(None, (spread, best, files, r["differs"])))
        table.append(line(r["task"], r["group"], r, "top1", note))
    table += [line(r["task"], r["group"], {}, "top1", "missing: no data") for r in summary["missing"]]
    for group, r in summary["means"].items():
        note = f"of {r['tasks']} of {r['of']} tasks" + ("" if r["complete"] else ", incomplete")
        table.append(line("mean", group, r, "mean", note))
    print_table(table)
    if one := summary["setting"]:
        say(f"one setting for all tasks: {called(one['chosen'])}, of {len(one['means'])} that were compared")
    say(f"everything is in {summary['run']}")
