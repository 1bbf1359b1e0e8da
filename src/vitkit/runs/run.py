"""Recipe to run folder: build, train, evaluate, save. The only place that combines the rooms."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from vitkit.data.decoded_cache import decoded
from vitkit.data.doctor import preflight
from vitkit.data.loader import BadFiles, Batch
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.io.files import replace_file
from vitkit.metrics.speed import Meter
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe, settings, stages_of
from vitkit.report.terminal import Live
from vitkit.runs import artifacts, evaluation
from vitkit.runs.artifacts import keep_batch
from vitkit.runs.batches import UnusableImages, name_batch, training_batches
from vitkit.runs.build import REMOVED, Opener, build_model, open_splits
from vitkit.runs.estimates import cost
from vitkit.runs.evaluation import evaluate, kept_model, load_best, numbers, save_best
from vitkit.runs.features import FewShot
from vitkit.runs.folder import (
    MODEL,
    DivergedRun,
    Interrupted,
    OutOfMemoryRun,
    Result,
    RunOptions,
    news,
    remains,
    signals,
    take,
)
from vitkit.runs.page import write_shown
from vitkit.runs.provenance.fingerprint import check_data
from vitkit.runtime.runtime import Runtime, cpu_cores, data_workers, seed_step
from vitkit.tasks.task import Metrics as Evaluated
from vitkit.tasks.task import Task
from vitkit.training.checkpoint import Saver, latest, load_checkpoint
from vitkit.training.logging import Journal
from vitkit.training.loop import train
from vitkit.training.optimizer import swap_average
from vitkit.training.schedule import Stage, stage_at
from vitkit.training.step import Diverged, Metrics, OutOfMemory, TrainState
from vitkit.weights.save import save

SAVE_SECONDS = 300.0  # at most so much work is lost when a machine dies
LONG = timedelta(days=1)  # that a data set may take to be compared with others


def run(
    recipe: Recipe, out: Path, runtime: Runtime, how: RunOptions = RunOptions(), opened: Opener = open_splits,
    build: Callable[[Recipe, Source], Model] = build_model,
) -> Result:  # fmt: skip
    """Train by the recipe into a run folder, or go on where an earlier process stopped.

    opened: how its data is opened; whoever runs many recipes on the same data may keep it open.
    build: the model to start from, for the recipe and its training images; a plan may have built it already.
    """
    runtime.local_places(recipe.batch)
    with ExitStack() as held:
        recipe = runtime.on_main_first(lambda: take(out, recipe, held))
        notes: list[str] = []
        splits, changed = checked_data(recipe, out, runtime, how, opened, notes)
        task = recipe.task.for_source(splits["train"])
        model = runtime.place(task.build(build(recipe, splits["train"])))
        state = TrainState.start(model, recipe.optimizer)
        found, damaged = runtime.broadcast(latest(out / "checkpoints") if runtime.is_main else None)
        memory = load_checkpoint(found, state) if found else {"best": None, "since": 0, "seconds": 0.0}
        stages = stages_of(recipe, len(splits["train"]))
        total = stages[-1].end
        if changed:  # evaluations until here were on other images
            memory |= {"best": None, "since": 0}
        if state.step in starts(stages):
            memory["since"] = 0
        with Live("train", total, state.step, quiet=how.quiet or not runtime.is_main) as live:
            for text in (*notes, *news(damaged, memory.pop("machine", {}), runtime.describe())):
                live.say(text)
            if 0 < state.step < total:
                live.say(f"resumed at step {state.step} of {total}")
            if how.decoded:
                made = (splits["train"], how.decoded, cpu_cores() if how.workers is None else how.workers)
                splits = splits | {"train": decoded(*made, log=live.say, once=runtime.on_main_first)}
            work = Trainer(recipe, task, out, runtime, how, splits, state, memory, stages, live, opened)
            try:
                work.train()
                return work.finish()
            except BaseException:
                work.saver.leave()
                if work.journal:
                    work.journal.close(failed=True)
                raise


def checked_data(
    recipe: Recipe, out: Path, runtime: Runtime, how: RunOptions, opened: Opener, notes: list[str]
) -> tuple[dict[str, Source], bool]:
    """The splits, compared with those that the run has had; whether they changed. notes: gets what to say."""
    if recipe.against and how.accept_changed_data:  # what was taken out of the data as it was
        runtime.on_main_first(lambda: (out / REMOVED).unlink(missing_ok=True))
    if recipe.against:  # long work, done by one process and written down
        runtime.on_main_first(lambda: bool(opened(recipe, out)), timeout=LONG)
    return check_data(
        opened(recipe, out), out, runtime, accept=how.accept_changed_data, labelled=recipe.task.labelled,
        say=notes.append,
    )  # fmt: skip


def starts(stages: list[Stage]) -> set[int]:
    """The steps at which a run is trained on."""
    return {stage.start for stage in stages[1:]}


@dataclass
class Trainer:
    """One run in the making."""

    recipe: Recipe
    task: Task
    out: Path
    runtime: Runtime
    how: RunOptions
    splits: dict[str, Source]
    state: TrainState
    memory: dict[str, Any]
    stages: list[Stage]
    live: Live
    opened: Opener

    def __post_init__(self) -> None:
        self.total = self.stages[-1].end
        self.workers = data_workers(self.how.workers)
        self.bad = BadFiles(self.how.max_bad, self.live.skip)
        self.unusable = UnusableImages(self.splits["train"], self.bad, self.runtime)
        self.unseen: dict[str, dict[str, str]] = {}  # unusable files of val and test, each named once
        self.order = Order(len(self.splits["train"]), self.recipe.batch, self.recipe.seed)
        self.fewshot = None
        if self.recipe.fewshot:
            few = (self.recipe.fewshot, self.recipe.shots, self.recipe.draws)
            self.fewshot = FewShot(*few, opened=self.opened)
        self.objective = self.task.objective(self.model)
        self.saver = Saver(self.out / "checkpoints", self.runtime, aside=self.how.save_aside)
        about = settings(self.recipe) | self.runtime.describe()
        self.journal = None
        if self.runtime.is_main:
            named = self.how.trackers
            self.journal = Journal(self.out, self.state.step, trackers=named, about=about, say=self.live.say)
            told = (self.out, self.splits, self.total, self.runtime, self.live.say)
            artifacts.begin(*told, task=self.task, doctor=self.how.report, step=self.state.step)
            if self.how.report:
                keep_batch(self.out, self.recipe, self.splits["train"], self.order, self.live.say)
        self.looks = self.recipe.evaluations if "val" in self.splits else 0

    def train(self) -> None:
        """The loop, with everything that happens beside it."""
        self.saved, self.waited = time.monotonic(), 0.0
        with signals() as self.asked:
            model = self.runtime.wrap(self.state.model)
            self.look_ahead()
            self.clock, self.meter = time.monotonic(), Meter(self.runtime.device)
            try:
                train(
                    self.state, self.batches(), self.objective,
                    until=self.state.step if self.stopped else self.total, config=self.recipe.optimizer,
                    rate=lambda step: stage_at(self.stages, step).rate(step),
                    watch=self.watch, due=self.due, call=model, runtime=self.runtime, log=self.live.say,
                    before=lambda step: seed_step(self.recipe.seed, step, self.runtime.rank),
                )  # fmt: skip
            except Diverged as error:
                named = name_batch(self.order, error.step, self.splits["train"], self.out, self.runtime)
                raise DivergedRun(f"{error}; {named}", error.step) from None
            except OutOfMemory as error:
                raise OutOfMemoryRun(str(error)) from None
            except ChildProcessError as error:  # a data worker
                raise ChildProcessError(f"{error}; {remains(self.out)}") from None
            if self.looks and self.state.step == self.total and self.memory.get("evaluated") != self.total:
                self.charge()
                self.validate()
                self.meter.lap()
            self.save()
            self.saver.finish()

    def look_ahead(self) -> None:
        """Before any training: are too many files unusable? All processes hear of them."""

        def look() -> dict[str, str]:
            most = min(1000, self.total * self.recipe.batch)
            preflight(self.splits["train"], self.bad, sample=most, workers=self.workers or 1)
            return self.bad.reasons

        if self.state.step == 0:
            self.bad.reasons = self.runtime.on_main_first(look)

    @property
    def model(self) -> Model:
        """The model within the module that learns."""
        return self.task.extract(self.state.model)

    def batches(self) -> Iterator[list[Batch]]:
        def waited(seconds: float) -> None:
            self.waited += seconds

        return training_batches(
            self.recipe, self.splits["train"], self.order, self.model.preprocessing, self.runtime,
            start=self.state.step, stop=self.total, workers=self.workers, bad=self.unusable, waited=waited,
            prepare=self.task.prepare(self.model, self.order),
        )  # fmt: skip

    def due(self, step: int) -> bool:
        """Whether `watch` has more to do after this step than to log it."""
        return self.runtime.world > 1 or any(self.wanted()) or self.evaluates(step)

    def wanted(self) -> list[float]:
        """A signal, a save that is late, news of unusable files: what any process has of them."""
        heard, late = self.asked[0] if self.asked else 0, time.monotonic() - self.saved > SAVE_SECONDS
        return self.runtime.all_reduce_max(heard, late, len(self.unusable.news))

    def evaluates(self, step: int) -> bool:
        """At even distances of each stage; the last of them is the end, which `train` evaluates."""
        stage = stage_at(self.stages, step - 1)
        done, steps = step - stage.start, stage.steps
        return step < self.total and done * self.looks // steps > (done - 1) * self.looks // steps

    def watch(self, state: TrainState, metrics: Metrics) -> bool:
        """Log, evaluate, save; whether the run is to stop early. Where the model is further, only log."""
        now, found = time.monotonic(), dict(metrics)
        spent, self.clock = max(1e-9, now - self.clock), now
        shown = {k: v for k, v in found.items() if k not in ("images", "gradient_norm")}
        shown |= {"images/s": found["images"] / spent, "waiting %": 100 * self.waited / spent}
        found |= {"seconds": round(spent, 4), "waited": round(self.waited, 4)}
        self.waited = 0.0
        self.live.step(state.step, **shown)
        if self.journal:
            self.journal.write(state.step, passing=True, **found)
        self.memory["seconds"] += spent
        if state.step < self.state.step:
            return False
        if self.evaluates(state.step):
            self.charge()
            self.validate()
            self.clock = time.monotonic()
            self.meter.lap()
        asked, late, news = self.wanted()
        if news:
            self.unusable.tell()
        if asked:
            self.save()
            self.saver.finish()
            raise Interrupted(int(asked), state.step)
        if late:
            self.save()
        return self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the run has ended early; it stays so when the command is given again."""
        return evaluation.stopped(self.recipe, self.memory)

    def write(self, **numbers: Any) -> None:
        if self.journal:
            self.journal.write(self.state.step, **numbers)

    def validate(self) -> None:
        """The averaged weights, where there are any, else those of this step; the best so far are kept."""
        with self.state.averaged():
            found = self.evaluate("val")
            self.write(**numbers(self.task, found, "val"))
            self.live.say(f"step {self.state.step}: {self.task.progress(found, 'validation')}")
            if self.recipe.fewshot_when == "evaluations" and self.state.step < self.total:
                self.write(**self.few_shots())  # at the end: of the weights that are kept
            self.memory |= evaluation.after_evaluation(
                self.memory, found, self.task.headline, self.state.step
            )
            if self.memory["since"] == 0 and self.recipe.keeps_best:
                best = self.out / evaluation.BEST
                save_best(self.task, self.state.model, best, main=self.runtime.is_main)
        if self.state.step in starts(self.stages):  # from here on it is trained on
            self.memory["since"] = 0
        self.memory["evaluated"] = self.state.step

    def few_shots(self) -> dict[str, Any]:
        if not self.fewshot:
            return {}
        work = (self.state.model, self.runtime, self.recipe.batch, self.workers, self.live.say)
        return self.fewshot(self.task, *work)

    def evaluate(self, split: str) -> Evaluated:
        bad = BadFiles(1.0, self.bad.report, self.unseen.setdefault(split, {}))
        how = (self.splits[split], self.recipe.batch, self.workers, bad, self.runtime)
        return evaluate(self.task, self.state.model, *how)

    def charge(self) -> None:
        """The energy since the last look. A look takes a driver milliseconds, so not every step has one."""
        if (used := self.meter.lap()) is not None:
            self.memory["joules"] = self.memory.get("joules", 0.0) + used

    def save(self) -> None:
        self.charge()
        self.saver.save(self.state, self.memory | {"machine": self.runtime.describe()})
        self.saved = time.monotonic()

    def save_model(self, name: str) -> Model:
        """The model that is kept, whole and on the CPU, also as a file."""
        model = kept_model(self.task, self.state.model)
        if self.runtime.is_main:
            save(model, self.out / name)
        return model

    def keep(self) -> None:
        """Into the model: the weights that did best on val, or the last or their average."""
        best = self.out / evaluation.BEST
        if self.recipe.keeps_best and best.exists():
            load_best(self.task, self.state.model, best)
        else:
            swap_average(self.state.average, self.state.model)

    def finish(self) -> Result:
        """The weights that are kept, tested on every test image and saved as one file."""
        self.keep()
        found, few = self.evaluate(self.recipe.report_on), self.few_shots()
        model = self.save_model(MODEL)
        test = found.to_json(model.labels) | {"split": self.recipe.report_on} | few
        cost = self.cost(model)
        told = {f"cost_{k}": v for k, v in cost.items() if isinstance(v, int | float)}
        self.write(**numbers(self.task, found, "test"), **few, **told)
        kept = evaluation.kept(self.recipe, self.task.headline, self.memory, self.state.step, self.total)
        result = Result(str(self.out), str(self.out / MODEL), self.state.step, test, cost, kept)
        if self.runtime.is_main:
            text = json.dumps(result.to_json(), indent=2)
            replace_file(self.out / "result.json", lambda beside: beside.write_text(text))
            write_shown(self.out, self.task, test)
        if self.journal:
            self.journal.close()
        if self.how.report:
            on, unusable = self.splits[self.recipe.report_on], {"train": self.bad.reasons} | self.unseen
            artifacts.finish(self.out, self.runtime, on, self.task, found, model, unusable, self.live.say)
        self.runtime.barrier()
        return result

    def cost(self, model: Model) -> dict[str, Any]:
        told = cost(
            model, self.runtime, seen=self.state.step * self.recipe.batch, seconds=self.memory["seconds"],
            joules=self.memory.get("joules"), an_hour=self.how.price_per_hour,
        )  # fmt: skip
        return told | {"unusable_images": len(self.bad.reasons)}
