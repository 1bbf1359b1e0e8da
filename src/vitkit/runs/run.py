"""Recipe to run folder: build, train, evaluate, save. The only place that combines the rooms."""

import signal
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
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe, stages_of
from vitkit.report.terminal import Live
from vitkit.runs import artifacts
from vitkit.runs.batches import UnusableImages, name_batch, training_batches
from vitkit.runs.build import (
    REMOVED,
    Opener,
    build_model,
    images_per_class,
    open_splits,
    start_training,
)
from vitkit.runs.checkpointer import Checkpointer
from vitkit.runs.context import RunContext, continuation_starts
from vitkit.runs.corrections import keep_copy
from vitkit.runs.evaluator import Evaluator
from vitkit.runs.features import fit_head
from vitkit.runs.finish import finish_run
from vitkit.runs.folder import (
    DivergedRun,
    Interrupted,
    OutOfMemoryRun,
    Result,
    RunOptions,
    resume_hint,
    resume_messages,
    signals,
    take,
)
from vitkit.runs.provenance.fingerprint import check_data
from vitkit.runs.run_logger import RunLogger
from vitkit.runs.validator import Validator
from vitkit.runtime.runtime import Runtime, cpu_cores, data_workers, seed_step
from vitkit.training.checkpoint import latest, load_checkpoint
from vitkit.training.loop import train
from vitkit.training.schedule import stage_at
from vitkit.training.step import Diverged, Metrics, OutOfMemory, TrainState

COMPARE_TIMEOUT = timedelta(days=1)  # for comparing a large data set with others
FEW_TO_LEAVE_OUT = 3  # images of a class, below which leaving one out says nothing about the accuracy
HEAD_BATCH = 256  # images at a time for the features that a head is fitted to
PREFLIGHT_IMAGES = 1000  # that are read before training, to find out early if too many are unusable


def run(
    recipe: Recipe, out: Path, runtime: Runtime, options: RunOptions = RunOptions(),
    opener: Opener = open_splits, build: Callable[[Recipe, Source], Model] = build_model,
) -> Result:  # fmt: skip
    """Train by the recipe into a run folder, or resume the run in it.

    opener: opens the data; a caller with many recipes on the same data may keep it open.
    build: makes the initial model from the recipe and the training images; a plan may have built it already.
    """
    began = time.monotonic()
    runtime.local_places(recipe.batch)
    with ExitStack() as stack:
        recipe = runtime.on_main_first(lambda: take(out, recipe, stack))
        messages: list[str] = []
        splits, changed = checked_data(recipe, out, runtime, options, opener, messages)
        task = recipe.task.for_source(splits["train"])
        model = build(recipe, splits["train"])
        if recipe.head_init == "least-squares" and not has_checkpoint(out, runtime):
            messages.append(init_head(model, recipe, splits["train"], runtime, options))
        state = start_training(recipe, task, model, runtime)
        progress = resume(out, state, runtime, messages)
        stages = stages_of(recipe, len(splits["train"]))
        total = stages[-1].end
        task.begin(state.model, total)
        if changed:  # earlier evaluations were on other images
            progress |= {"best": None, "since": 0}
        if state.step in continuation_starts(stages):
            progress["since"] = 0
        with Live("train", total, state.step, quiet=options.quiet or not runtime.is_main) as live:
            for text in messages:
                live.say(text)
            if 0 < state.step < total:
                live.say(f"resumed at step {state.step} of {total}")
            if options.decoded:
                workers = cpu_cores() if options.workers is None else options.workers
                splits = splits | {"train": decoded(
                    splits["train"], options.decoded, workers, log=live.say, once=runtime.on_main_first
                )}  # fmt: skip
            context = RunContext(recipe, task, out, runtime, options, splits, state, stages, progress, began)
            trainer = build_trainer(context, live, opener)
            try:
                trainer.train()
                return finish_run(context, trainer.validator.evaluator, trainer.logger, trainer.unusable.bad)
            except BaseException:
                trainer.checkpointer.abandon()
                trainer.logger.close(failed=True)
                raise


def checked_data(
    recipe: Recipe, out: Path, runtime: Runtime, options: RunOptions, opener: Opener, messages: list[str]
) -> tuple[dict[str, Source], bool]:
    """The splits, and whether they differ from those that the run had before; adds to `messages`."""
    if recipe.against and options.accept_changed_data:  # the list of duplicates is of the earlier data
        runtime.on_main_first(lambda: (out / REMOVED).unlink(missing_ok=True))
    if recipe.against:  # takes long, so one process does it and the others read its list
        runtime.on_main_first(lambda: bool(opener(recipe, out)), timeout=COMPARE_TIMEOUT)
    splits, changed = check_data(
        opener(recipe, out), out, runtime, accept=options.accept_changed_data,
        labelled=recipe.task.labelled, say=messages.append,
    )  # fmt: skip
    if recipe.corrections:
        runtime.on_main_first(lambda: messages.append(keep_copy(Path(recipe.corrections), out)))
    return splits, changed


def has_checkpoint(out: Path, runtime: Runtime) -> bool:
    return bool(runtime.broadcast(runtime.is_main and latest(out / "checkpoints")[0] is not None))


def init_head(model: Model, recipe: Recipe, train: Source, runtime: Runtime, options: RunOptions) -> str:
    """Fit the head to frozen features before training; returns a line about it."""
    if not recipe.weights:
        raise Error(
            "head_init=least-squares needs pretrained weights; give --weights, or use head_init=zero",
            code="request.conflict",
        )
    head = fit_head(
        model, train, runtime, batch=min(recipe.batch, HEAD_BATCH), workers=data_workers(options.workers),
        seed=recipe.seed,
    )  # fmt: skip
    text = "head: ridge regression on frozen features"
    counts = images_per_class(train)
    if counts[counts > 0].min() < FEW_TO_LEAVE_OUT:
        return text
    return f"{text}, leave-one-out accuracy {head.accuracy:.1%}"


def resume(out: Path, state: TrainState, runtime: Runtime, messages: list[str]) -> dict[str, Any]:
    """Load the newest intact checkpoint, if there is one; returns the progress of the run."""
    checkpoint, damaged = runtime.broadcast(latest(out / "checkpoints") if runtime.is_main else None)
    start = {"best": None, "since": 0, "seconds": 0.0}
    progress = load_checkpoint(checkpoint, state) if checkpoint else start
    messages += resume_messages(damaged, progress.pop("machine", {}), runtime.describe())
    return progress


def build_trainer(run: RunContext, live: Live, opener: Opener) -> "Trainer":
    """The parts of a run, and the files that it writes before training."""
    bad = BadFiles(run.options.max_bad, live.skip)
    unusable = UnusableImages(run.splits["train"], bad, run.runtime)
    evaluator = Evaluator(run, live, opener)  # before any file is written, since its data may be refused
    logger = RunLogger(run, live)
    if run.runtime.is_main:
        artifacts.begin(
            run.out, run.splits, run.total, run.runtime, live.say, task=run.task, doctor=run.options.report,
            step=run.state.step,
        )  # fmt: skip
        if run.options.report:
            artifacts.keep_batch(
                run.out, run.recipe, run.splits["train"], run.order, run.task, run.model, live.say
            )
    return Trainer(run, logger, Validator(run, evaluator, logger), Checkpointer(run, logger), unusable)


@dataclass
class Trainer:
    """Drives the training loop; evaluating, saving and logging are done by its parts."""

    run: RunContext
    logger: RunLogger
    validator: Validator
    checkpointer: Checkpointer
    unusable: UnusableImages

    def train(self) -> None:
        """Train to the last step, or until the run stops early; then evaluate and save."""
        run = self.run
        with signals() as self.received:
            model = run.runtime.wrap(run.state.model)
            self.check_files()
            self.validator.evaluator.begin()
            self.logger.start()
            try:
                train(
                    run.state, self.batches(), run.task.objective(run.model),
                    until=run.state.step if self.validator.stopped else run.total,
                    config=run.recipe.optimizer, rate=lambda step: stage_at(run.stages, step).rate(step),
                    watch=self.watch, due=self.due, call=model, runtime=run.runtime, log=self.logger.say,
                    before=lambda step: seed_step(run.recipe.seed, step, run.runtime.rank),
                )  # fmt: skip
            except Diverged as error:
                batch = name_batch(run.order, error.step, run.splits["train"], run.out, run.runtime)
                raise DivergedRun(f"{error}; {batch}", error.step) from None
            except OutOfMemory as error:
                raise OutOfMemoryRun(str(error)) from None
            except ChildProcessError as error:  # a data loader worker
                raise ChildProcessError(f"{error}; {resume_hint(run.out)}") from None
            if self.validator.is_due_at_end():
                self.validate()
            with run.counting("saving"):
                self.checkpointer.save()
                self.checkpointer.wait()

    def check_files(self) -> None:
        """Before the first step: read a sample of the images, and fail early if too many are unusable."""
        run, bad = self.run, self.unusable.bad

        def check() -> dict[str, str]:
            fitted = run.recipe.head_init == "least-squares"  # to all images, however short the training is
            sample = PREFLIGHT_IMAGES if fitted else min(PREFLIGHT_IMAGES, run.total * run.recipe.batch)
            preflight(run.splits["train"], bad, sample=sample, workers=run.workers or 1)
            return bad.reasons

        if run.state.step == 0:
            bad.reasons = run.runtime.on_main_first(check)

    def batches(self) -> Iterator[list[Batch]]:
        run = self.run
        return training_batches(
            run.recipe, run.splits["train"], run.order, run.model.preprocessing, run.runtime,
            start=run.state.step, stop=run.total, workers=run.workers, bad=self.unusable,
            waited=self.logger.add_wait, prepare=run.task.prepare(run.model, run.order),
        )  # fmt: skip

    def due(self, step: int) -> bool:
        """Whether `watch` has more to do after this step than to log it."""
        return self.run.runtime.world > 1 or any(self.requests()) or self.validator.is_due(step)

    def requests(self) -> list[float]:
        """A signal to stop, or no time left; a late checkpoint; and new unusable files, in any process."""
        late = time.monotonic() >= self.run.options.stop_at
        number = self.received[0] if self.received else signal.SIGTERM if late else 0
        return self.run.runtime.all_reduce_max(
            number, self.checkpointer.overdue, len(self.unusable.unreported)
        )

    def watch(self, state: TrainState, metrics: Metrics) -> bool:
        """Log, evaluate and save; whether to stop early. Only logs if the model is already a step ahead."""
        self.logger.log_step(state.step, metrics)
        self.run.task.check_step(state.step, metrics)
        if state.step < self.run.state.step:
            return False
        if self.validator.is_due(state.step):
            self.validate()
        number, save_overdue, unusable = self.requests()
        if unusable:
            self.unusable.synchronize()
        if number:
            self.checkpointer.save()
            self.checkpointer.wait()
            raise Interrupted(int(number), state.step)
        if save_overdue:
            self.checkpointer.save()
        return self.validator.stopped

    def validate(self) -> None:
        with self.logger.paused(), self.run.counting("evaluation"):
            self.validator.validate()
