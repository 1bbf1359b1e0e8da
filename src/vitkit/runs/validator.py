"""Validator: evaluations on val during training, the best weights so far, and early stopping."""

from dataclasses import dataclass

from vitkit.runs.context import RunContext, continuation_starts
from vitkit.runs.evaluation import metrics_row
from vitkit.runs.evaluator import Evaluator
from vitkit.runs.kept_weights import BEST, after_evaluation, best_notes, save_best, stopped_early
from vitkit.runs.run_logger import RunLogger
from vitkit.training.schedule import stage_at


@dataclass
class Validator:
    """Evaluates on val at regular intervals of each stage, and keeps the best weights."""

    run: RunContext
    evaluator: Evaluator
    logger: RunLogger

    def __post_init__(self) -> None:
        self.count = self.run.recipe.evaluations if "val" in self.run.splits else 0  # in each stage
        self.logger.live.notes = self.notes()

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step; the one after the last step is `is_due_at_end`."""
        stage = stage_at(self.run.stages, step - 1)
        done, steps = step - stage.start, stage.steps
        return step < self.run.total and done * self.count // steps > (done - 1) * self.count // steps

    def is_due_at_end(self) -> bool:
        """Whether the run has reached its last step and not evaluated it yet."""
        run = self.run
        finished = run.state.step == run.total
        return bool(self.count) and finished and run.progress.get("evaluated") != run.total

    @property
    def stopped(self) -> bool:
        """Whether early stopping has ended the run; a resumed run stays ended."""
        return stopped_early(self.run.recipe, self.run.progress)

    def validate(self) -> None:
        """Evaluate the averaged weights, or the current ones without an average; save the best."""
        run, state, progress = self.run, self.run.state, self.run.progress
        with state.averaged():
            metrics = self.evaluator.evaluate("val")
            self.logger.write(**metrics_row(run.task, metrics, "val"))
            progress |= after_evaluation(progress, metrics, run.task.headline, state.step)
            if run.recipe.fewshot_when == "evaluations":
                self.log_fewshot()
            if state.step < run.total:
                self.evaluator.pictures.keep(state.step)
            if progress["since"] == 0 and run.recipe.keeps_best:
                save_best(run.task, state.model, run.out / BEST, main=run.runtime.is_main)
        if state.step in continuation_starts(run.stages):  # patience starts anew with each stage
            progress["since"] = 0
        progress["evaluated"] = state.step
        self.logger.live.notes = self.notes()
        line = f"step {state.step}: {run.task.progress(metrics, 'validation')}"
        self.logger.say("; ".join([line, *self.notes()]))

    def log_fewshot(self) -> None:
        """Few-shot metrics; at the end, those on data that the recipe names are of the kept weights."""
        if self.run.state.step < self.run.total:
            self.logger.write(**self.evaluator.evaluate_fewshot())
        elif not self.evaluator.fewshot and (row := self.evaluator.evaluate_fewshot()):
            self.logger.write(**row)

    def notes(self) -> tuple[str, ...]:
        """The best evaluation so far, and when the run will stop early."""
        run, step = self.run, self.run.state.step
        stage = stage_at(run.stages, step)
        left = self.count - (step - stage.start) * self.count // stage.steps
        return best_notes(run.recipe, run.task.headline, run.progress, left)
