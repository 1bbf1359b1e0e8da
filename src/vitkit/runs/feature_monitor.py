"""Frozen features of a run without labels: k-NN and few-shot accuracy, and the verdict at its end."""

# M images of the labelled set that are classified

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.data.sources.source import Source
from vitkit.data.splits import subset
from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.metrics.frozen_features import L2, neighbours_correct, probe
from vitkit.metrics.intervals import SIGNIFICANT, mcnemar, paired_interval, percent
from vitkit.runs.build import Opener
from vitkit.runs.context import RunContext
from vitkit.runs.features import (
    Extractor,
    Features,
    FewShotTraining,
    accuracies,
    choose,
    labels_of,
    mean_and_interval,
    open_frozen,
)
from vitkit.runs.folder import FEATURES_OFF
from vitkit.runs.kept_weights import kept_model

REFERENCE, CLASSIFIED = 2000, 1000  # images at each evaluation
MOST = 10_000  # images of each kind before and after the run
A_CLASS = 5  # reference images of each class at least, where there are so many
NEIGHBOURS = 20
BEFORE = "initial-features.json"  # in the run folder: which images the initial features classify correctly
MEASURES = {"knn": "k-NN", "probe": "linear probe"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class LabelledSet:
    """Images whose labels are known (the reference), and those to classify by their features."""

    name: str
    reference: Source
    classified: Source
    images: str  # which ones are classified, as in "validation images"

    def capped(self, reference: int, classified: int) -> "LabelledSet":
        """At most so many images: of every class equally many, and a random part of those to classify."""
        first, second = self.reference, self.classified
        if len(first) > reference:
            each = max(A_CLASS, reference // len(np.unique(first.labels)))
            first = subset(first, per_class=each)
            first = subset(first, count=MOST) if len(first) > MOST else first
        if len(second) > classified:
            second = subset(second, count=classified)
        known = np.flatnonzero(np.isin(second.labels, first.labels))
        return replace(self, reference=first, classified=second.take(known))

    @property
    def digest(self) -> str:
        """Of the names and labels of all images."""
        total = hashlib.sha256()
        for source in (self.reference, self.classified):
            total.update("\n".join(map(str, source.keys)).encode("utf-8", "surrogateescape"))
            total.update(np.ascontiguousarray(source.labels).tobytes())
        return total.hexdigest()


def labelled_set(run: RunContext, opener: Opener, split: str) -> LabelledSet | None:
    """The data that `fewshot` names, else the run's own labels and its images of a split; None without."""
    if run.task.predicts or run.recipe.fewshot == FEATURES_OFF:
        return None
    if run.recipe.fewshot:
        return LabelledSet(run.recipe.fewshot, *open_frozen(run.recipe.fewshot, opener), "test images")
    train, others = run.splits["train"], run.splits.get(split)
    if others is None or train.multilabel or len(np.unique(train.labels)) < 2:
        return None
    images = "validation images" if split == "val" else "test images"
    own = LabelledSet(run.recipe.data, train, others, images)
    return own if len(np.intersect1d(train.labels, others.labels)) > 1 else None


@dataclass(frozen=True)
class LabelledFeatures:
    """The features of a labelled set, without unusable images."""

    data: LabelledSet
    reference: Features
    classified: Features

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features and labels as the measures take them, where the features are."""
        x, test = self.reference.x, self.classified.x
        y, truth = (
            labels_of(self.data.reference, self.reference),
            labels_of(self.data.classified, self.classified),
        )
        return x, y.to(x.device), test, truth.to(test.device)

    def neighbours(self) -> Tensor:
        return neighbours_correct(*self.values, k=min(NEIGHBOURS, len(self.reference.x)))

    def fewshot(self, shots: int, draws: int) -> dict[str, Any]:
        """Mean and standard deviation over draws; with fewer shots where a class has too few images."""
        source, there = self.data.reference, np.zeros(len(self.data.reference), dtype=bool)
        there[self.reference.index.numpy()] = True
        shots = min(shots, int(np.unique(source.labels[there], return_counts=True)[1].min()))
        learning = FewShotTraining(source, self.reference, tuple(choose(source, shots, draws, there)))
        scores = accuracies(learning, shots, self.data.classified, self.classified, (L2,))[:, 0].tolist()
        facts = mean_and_interval(scores, len(self.classified.x))
        images = len(self.classified.x)
        return {"mean": facts["mean"], "std": facts["std"], "shots": shots, "images": images}


@dataclass
class FeatureMonitor:
    """Measures the current features of a run on labelled images."""

    run: RunContext
    opener: Opener
    say: Say

    def __post_init__(self) -> None:
        recipe, during = self.run.recipe, labelled_set(self.run, self.opener, "val")
        after = during if recipe.fewshot else labelled_set(self.run, self.opener, recipe.report_on)
        self.during = during and during.capped(REFERENCE, CLASSIFIED)
        self.verdict_set = after and after.capped(MOST, MOST)
        self.reported = False  # whether unusable images were logged

    def extract(self, data: LabelledSet) -> LabelledFeatures:
        """The features of the weights that the module has now; collective."""
        run, module = self.run, self.run.state.model
        module.eval()  # all of it: the loop looks at the whole module to switch back
        sharded = run.runtime.is_sharded
        model = kept_model(run.task, module).to(run.runtime.device) if sharded else run.task.extract(module)
        extractor = Extractor(
            model=model, runtime=replace(run.runtime, parallel="ddp"), batch=run.recipe.batch,
            workers=run.workers, log=(lambda text: None) if self.reported else self.say,
        )  # fmt: skip
        self.reported = True
        parts = (extractor.features(part) for part in (data.reference, data.classified))
        device = run.runtime.device if run.runtime.device.startswith("cuda") else "cpu"
        return LabelledFeatures(data, *(Features(part.x.to(device), part.index) for part in parts))

    def measure(self, *, fewshot: bool) -> dict[str, Any]:
        """k-NN accuracy and, with `fewshot`, few-shot accuracy for the log; empty without labelled images."""
        recipe, data = self.run.recipe, self.during
        if data is None:
            return {}
        features = self.extract(data)

        def numbers() -> dict[str, Any]:
            correct = features.neighbours()
            row = {"knn": float(correct.double().mean()), "knn_images": len(correct)}
            few = features.fewshot(recipe.shots, recipe.draws) if fewshot else {}
            return row | {f"fewshot_{name}": value for name, value in few.items()}

        row = self.on_main(numbers)
        if row:
            images = row["knn_images"]
            shots = row.get("fewshot_shots")
            few = f", {percent(row['fewshot_mean'], images)} after {shots} shots" if shots else ""
            self.say(
                f"features: k-NN {percent(row['knn'], images)}{few} of {images} {data.images} of {data.name} "
                f"correct, with {len(features.reference.x)} labelled images"
            )
        return row

    def on_main(self, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The numbers of the main process in all; empty, with a message, for features without information."""
        try:
            return self.run.runtime.on_main_first(compute)
        except Error as error:
            if error.code not in ("evaluation.unsupported", "weights.values", "data.classes"):
                raise
            self.say(f"features: {error}")
            return {}

    def classified_correctly(self) -> dict[str, Any]:
        """For each measure, a digit for each image of the verdict: 1 if it is classified correctly."""
        if self.verdict_set is None:
            return {}
        features = self.extract(self.verdict_set)

        def digits() -> dict[str, Any]:
            correct = {"knn": features.neighbours(), "probe": probe(*features.values).correct}
            texts = {name: "".join(map(str, mask.int().tolist())) for name, mask in correct.items()}
            return texts | {"index": features.classified.index.tolist()}

        facts = self.on_main(digits)
        more = {"reference": len(features.reference.x), "images": self.verdict_set.digest}
        return facts | more if facts else {}

    def begin(self) -> None:
        """Before the first step: store what the initial features classify correctly."""
        run, path = self.run, self.run.out / BEFORE
        if run.state.step:
            return
        facts = self.classified_correctly()
        if facts:
            count = len(facts["index"])
            shares = (
                f"{name} {percent(facts[key].count('1') / count, count)}" for key, name in MEASURES.items()
            )
            self.say(f"features before training: {', '.join(shares)} of {count} test images correct")
        if run.runtime.is_main:
            path.unlink(missing_ok=True)  # of a run that saved nothing
            if facts:
                replace_file(path, lambda beside: beside.write_text(json.dumps(facts), encoding="utf-8"))

    def verdict(self) -> dict[str, Any] | None:
        """The final features compared with the initial ones; None where either is not known."""
        run, path = self.run, self.run.out / BEFORE
        stored = run.runtime.on_main_first(lambda: path.read_text("utf-8") if path.exists() else "")
        if not stored or self.verdict_set is None:
            return None
        before = json.loads(stored)
        if before["images"] != self.verdict_set.digest:
            self.say("features: the labelled images have changed since the run began, so there is no verdict")
            return None
        after = self.classified_correctly()
        if not after:
            return None
        start = "the weights it started from" if run.recipe.weights else "random weights"
        facts = compared(before, after, start)
        return facts | {"data": self.verdict_set.name, "split": self.verdict_set.images}


def compared(before: Mapping[str, Any], after: Mapping[str, Any], start: str) -> dict[str, Any]:
    """The verdict, from the digits of `classified_correctly`, on the images that are in both."""
    _, rows, others = np.intersect1d(before["index"], after["index"], return_indices=True)
    measures, images = {}, len(rows)
    for name in MEASURES:
        first, second = (
            np.array(list(facts[name]))[chosen] == "1" for facts, chosen in ((before, rows), (after, others))
        )
        lost, won = int((first & ~second).sum()), int((second & ~first).sum())
        p, interval = mcnemar(lost, won), paired_interval(lost, won, images)
        # two measures are tested, so that each has half of the error probability
        word = "no difference" if p >= SIGNIFICANT / len(MEASURES) else "better" if won > lost else "worse"
        measures[name] = {
            "before": float(first.mean()), "after": float(second.mean()), "verdict": word, "p": p,
            "difference": list(interval),
        }  # fmt: skip
    words = {measure["verdict"] for measure in measures.values()}
    both = {"better", "worse"} <= words
    verdict = (
        "mixed" if both else next((word for word in ("better", "worse") if word in words), "no difference")
    )
    facts = {"verdict": verdict, "start": start, "images": images, "reference": after["reference"]}
    facts |= {"measures": measures}
    return facts | {"sentence": sentence(facts)}


def sentence(facts: Mapping[str, Any]) -> str:
    """The verdict in words, with the accuracy by each measure before and after."""
    images, start = facts["images"], facts["start"]
    by: dict[str, list[str]] = {}
    for name, measure in facts["measures"].items():
        by.setdefault(measure["verdict"], []).append(MEASURES[name])
    unclear = f"that {images} test images can show"
    changed = [
        f"{word} by {' and '.join(by[word])}"
        for word in ("better", "worse") if word in by
    ]  # fmt: skip
    opening = f"the features are {', '.join(changed)} than those of {start}"
    if not changed:
        opening = f"no difference from {start} {unclear}"
    elif "no difference" in by:
        opening += f" (by {by['no difference'][0]}, no difference {unclear})"
    parts = []
    for name, measure in facts["measures"].items():
        low, high = (f"{100 * end:+.1f}" for end in measure["difference"])
        before, after = (percent(measure[when], images) for when in ("before", "after"))
        parts.append(f"{MEASURES[name]} {before} before, {after} after (difference {low} to {high} points)")
    return f"{opening}: {'; '.join(parts)}"
