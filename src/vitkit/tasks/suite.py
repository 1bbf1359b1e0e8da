"""Many tasks, one setting: VTAB-1k or a user's own, a run for each, a mean for each group and for all."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from vitkit.data.sources import open_data
from vitkit.data.vtab import TASKS, read_task
from vitkit.data.vtab.tasks import GROUPS
from vitkit.experiment.run import How
from vitkit.experiment.start import open_splits, start_model
from vitkit.options import Training
from vitkit.recipes.recipe import Recipe, override, read_recipe
from vitkit.report.terminal import print_table, say
from vitkit.tasks import automatic
from vitkit.tasks.learn import make_recipe, voice
from vitkit.tasks.protocol import follow
from vitkit.tasks.report import drawn
from vitkit.tasks.use import Emit
from vitkit.training.runtime import Runtime, choose
from vitkit.weights.locate import run_model

OWN, ALL = "own", "VTAB-1k"
PLACE = "vtab:{}:{}"


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


def suite(
    model: str, data: str, tasks: Sequence[str], options: Training, *, rates: Sequence[float], seeds: int,
    emit: Emit,
) -> None:  # fmt: skip
    """Every task whose data is there, one after the other; the same command again goes on.

    All data is opened before anything is trained, so that a mistake costs no hours.
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, not {seeds}")
    options = replace(options, weights=str(run_model(model) or model))
    entries, missing = find(tasks, data)
    out = options.out or Path("runs") / "suite"
    how = How(workers=options.workers, max_bad=options.max_bad, trackers=options.track, quiet=bool(emit))
    runtime = choose(
        options.device, options.precision, options.compile, options.recompute,
        deterministic=options.deterministic, record=options.record,
    )  # fmt: skip
    with runtime.joined():
        tell = voice(runtime, emit)
        recipes = [make(entry, options, rates) for entry in entries]
        pieces = micro_batch(recipes[0], options, out / entries[0].name, runtime, tell)
        rows: list[dict[str, Any]] = []
        for entry, recipe in zip(entries, recipes, strict=True):
            tell(f"{entry.name}: {len(rows) + 1} of {len(entries)}")
            told = follow(
                replace(recipe, micro_batch=pieces), out / entry.name, runtime, how,
                seeds=seeds, convolutional=False, say=tell,
            )  # fmt: skip
            rows.append(row(entry, told))
            summary = {"model": model, "run": str(out), **summed(rows, missing, len(entries) - len(rows))}
            if runtime.main:
                (out / "suite.json").write_text(json.dumps(summary, indent=2))
        drawn(out, runtime, tell)
        if runtime.main:
            emit(summary) if emit else tell_summary(summary)


def find(tasks: Sequence[str], root: str) -> tuple[list[Entry], list[str]]:
    """The tasks whose data is there, opened once each, and the names of those of VTAB whose data is not."""
    entries: list[Entry] = []
    missing = []
    wanted = tasks or tuple(TASKS)
    if not root and any(name in TASKS for name in wanted):
        raise ValueError(
            "the tasks of VTAB-1k need --data ROOT, the folder of their data sets (docs/vtab.md)"
        )
    if root and not Path(root).is_dir():
        raise ValueError(f"--data {root!r}: there is no such folder")
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
        raise ValueError(f"two tasks are called {', '.join(sorted(twice))}; rename one of the folders")
    if not entries:
        raise ValueError(f"none of these tasks has its data below {root}: {', '.join(missing)}")
    return entries, missing


def own(place: str) -> Entry:
    """A user's folder, archive or manifest, split as `vitkit finetune` would."""
    if place != "digits" and not Path(place).exists():
        raise ValueError(
            f"no task {place!r}: neither data that is there, nor one of VTAB-1k's ({', '.join(TASKS)})"
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


def micro_batch(
    recipe: Recipe, options: Training, out: Path, runtime: Runtime, tell: Callable[[str], None]
) -> int:
    """Images at a time that the device holds, or as many as when the suite was begun."""
    for path in sorted(out.glob("*/recipe.json")):
        return runtime.agreed(read_recipe(path)).micro_batch
    runtime.share(recipe.batch)  # an error before anything takes time
    model = start_model(recipe, open_splits(recipe)["train"])
    return runtime.agreed(automatic.fit_memory(recipe, options, model, runtime, tell)).micro_batch


def row(entry: Entry, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": entry.name, "group": entry.group, "top1": told["mean"], "std": told["std"],
        "seeds": told["seeds"], "rate": told["rate"], "images": told["images"],
        "order": entry.order or None, "complete": entry.complete, "differs": entry.differs or None,
        "run": told["run"],
    }  # fmt: skip


def summed(rows: Sequence[dict[str, Any]], missing: Sequence[str], waiting: int = 0) -> dict[str, Any]:
    """Rows and means; a mean is of the tasks that are there, and says of how many, and whether of all."""

    def of(part: Sequence[dict[str, Any]], total: int) -> dict[str, Any]:
        whole = len(part) == total and all(row["complete"] for row in part)
        value = mean(row["top1"] for row in part) if part else None
        return {"mean": value, "tasks": len(part), "of": total, "complete": whole}

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

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    def line(task: str, group: str, top1: float | None, note: str, **facts: Any) -> dict[str, Any]:
        named = {"images": None, "order": None} | facts
        return {"task": task, "group": group, "accuracy_%": percent(top1), **named, "note": note}

    table = []
    for r in summary["tasks"]:
        spread = f"+- {percent(r['std'])} over {len(r['seeds'])} seeds" if r["std"] is not None else ""
        files = "" if r["complete"] else "other files than published"
        note = "; ".join(filter(None, (spread, files, r["differs"])))
        table.append(line(r["task"], r["group"], r["top1"], note, images=r["images"], order=r["order"]))
    table += [line(r["task"], r["group"], None, "missing: no data") for r in summary["missing"]]
    for group, r in summary["means"].items():
        note = f"of {r['tasks']} of {r['of']} tasks" + ("" if r["complete"] else ", incomplete")
        table.append(line("mean", group, r["mean"], note))
    print_table(table)
    say(f"everything is in {summary['run']}")
