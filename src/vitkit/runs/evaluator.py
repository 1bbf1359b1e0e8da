"""Evaluator: the current weights of a run on one of its splits, and their few-shot accuracy on other data."""

from typing import Any

from vitkit.data.loader import BadFiles
from vitkit.report.terminal import Live
from vitkit.runs.build import Opener
from vitkit.runs.context import RunContext
from vitkit.runs.evaluation import KeptBatches, evaluate
from vitkit.runs.feature_monitor import FeatureMonitor
from vitkit.runs.feature_pictures import FeaturePictures
from vitkit.runs.features import FewShot
from vitkit.runs.folder import FEATURES_OFF
from vitkit.tasks.task import Metrics


class Evaluator:
    """Evaluates the weights that the module of a run has at the moment."""

    def __init__(self, run: RunContext, live: Live, opener: Opener):
        self.run, self.live = run, live
        self.unusable: dict[str, dict[str, str]] = {}  # by split: unusable files and why, each reported once
        self.kept = KeptBatches()  # of val, which is evaluated several times
        recipe, self.fewshot = run.recipe, None
        if recipe.fewshot not in ("", FEATURES_OFF):
            self.fewshot = FewShot(recipe.fewshot, recipe.shots, recipe.draws, opener)
        self.monitor = FeatureMonitor(run, opener, live.say)
        self.pictures = FeaturePictures(run, live.say)

    def evaluate(self, split: str) -> Metrics:
        """The task's metrics over every usable image of a split."""
        run, bad = self.run, BadFiles(1.0, self.live.skip, self.unusable.setdefault(split, {}))
        return evaluate(
            run.task, run.state.model, run.splits[split], run.recipe.batch, run.workers, bad, run.runtime,
            calibrate=run.recipe.calibrate and split == "val", kept=self.kept if split == "val" else None,
        )  # fmt: skip

    def begin(self) -> None:
        """Before the first step: what there is to know of the initial features."""
        self.monitor.begin()
        if not self.run.state.step:
            self.pictures.keep(0)

    def evaluate_fewshot(self, *, final: bool = False) -> dict[str, Any]:
        """k-NN and few-shot metrics for the log; empty without data for them.

        final: of the kept weights, on data that the recipe names; the verdict has those on the run's own.
        """
        run, named = self.run, self.fewshot is not None
        row = {} if final and not named else self.monitor.measure(fewshot=not named)
        if not self.fewshot:
            return row
        return row | self.fewshot(
            run.task, run.state.model, run.runtime, run.recipe.batch, run.workers, self.live.say
        )
