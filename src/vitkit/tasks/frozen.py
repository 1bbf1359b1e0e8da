"""What a model's frozen features are worth: few-shot accuracy, nearest neighbours, a linear probe."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.sources import Source
from vitkit.evaluation.fewshot import GRID, best_l2, choose_shots
from vitkit.evaluation.neighbours import TEMPERATURE, neighbours
from vitkit.evaluation.probe import probe
from vitkit.experiment.features import LIMIT, LONG, Extractor, Features
from vitkit.experiment.frozen import (
    SHOTS,
    Learning,
    accuracies,
    labels_of,
    learn_from,
    learn_from_all,
    open_frozen,
    possible_shots,
    spread,
)
from vitkit.experiment.opened import load_model
from vitkit.options import parse_l2
from vitkit.report.terminal import print_table, say, warn
from vitkit.tasks.use import Emit
from vitkit.training.runtime import choose, data_workers
from vitkit.weights.download import cache_folder


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of the features."""

    shots: tuple[int, ...] = ()  # none: the usual ones that every class has images for
    seeds: int = 3
    l2: str = "1024"  # or grid
    knn: int | None = None
    probe: bool = False
    view: str = "model"
    batch: int = 64
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1 or any(shots < 1 for shots in self.shots):
            raise ValueError(f"seeds and shots must be at least 1, not {self.seeds} and {self.shots}")
        if self.knn is not None and self.knn < 1:
            raise ValueError(f"--knn must be at least 1, not {self.knn}")
        assert self.grid  # an error now, where --l2 is none

    @property
    def grid(self) -> tuple[float, ...]:
        value = parse_l2(self.l2)
        return GRID if value is None else (value,)


def fewshot(
    place: str, data: Sequence[str], options: Options, workers: int | None, device: str, emit: Emit
) -> None:
    """Every data set in turn, the penalty chosen over all of them where a grid is asked for."""
    runtime = choose(device, "fp32")
    with runtime.joined():
        opened = {name: open_frozen(name) for name in dict.fromkeys(data)}  # mistakes before long work
        wanted = {name: shots_of(name, train, options, runtime.main) for name, (train, _) in opened.items()}
        official = options.view == "official"
        extractor = Extractor(
            model=load_model(place, device, "model" if official else options.view), runtime=runtime,
            view="official" if official else "model", batch=options.batch,
            workers=data_workers(workers), cache=options.cache or cache_folder() / "features",
            limit=None if options.cache else LIMIT, tell=warn, quiet=bool(emit),
        )  # fmt: skip
        found = {}
        for name, (train, test) in opened.items():
            need = learn_from_all if options.knn or options.probe else learn_from
            learning = need(extractor, train, max(wanted[name]), options.seeds)
            asked = Asked(learning, test, extractor.features(test), wanted[name], options)
            found[name] = runtime.first(partial(asked.answer, runtime.device), patience=LONG)
    if runtime.main:
        tell(summaries(found, options), emit)


def shots_of(name: str, train: Source, options: Options, loud: bool) -> tuple[int, ...]:
    """Those asked for; else the usual ones, without those that some class has too few images for."""
    if options.knn and options.knn > len(train):
        raise ValueError(f"{name}: --knn {options.knn} neighbours among {len(train)} training images")
    if options.shots:
        choose_shots(train.labels, max(options.shots), names=train.classes)  # an error before long work
        return tuple(sorted(set(options.shots)))
    possible = possible_shots(train)
    if possible != SHOTS and loud:
        left_out = ", ".join(str(shots) for shots in SHOTS if shots not in possible)
        warn(f"{name}: not every class has images for {left_out} shots: left out")
    return possible


@dataclass(frozen=True)
class Asked:
    """A data set with its features, and what is asked of them."""

    learning: Learning
    test: Source
    seen: Features
    shots: tuple[int, ...]
    options: Options

    def answer(self, device: str) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
        """For each number of shots the accuracies (seeds, penalties); then the rest of what is told."""
        o, x, images = self.options, self.learning.features.x, len(self.seen.index)
        table = {s: accuracies(self.learning, s, self.test, self.seen, o.grid) for s in self.shots}
        told: dict[str, Any] = {"images": images, "unusable": len(self.test) - images}
        told |= {"knn": None, "probe": None}
        four = (x, self.learning.labels, self.seen.x, labels_of(self.test, self.seen))
        a, b, c, d = (tensor.to(device) if o.knn or o.probe else tensor for tensor in four)
        if o.knn:
            right = neighbours(a, b, c, d, k=o.knn)
            told["knn"] = {"k": o.knn, "temperature": TEMPERATURE, "top1": right}
        if o.probe:
            told["probe"] = probe(a, b, c, d).to_json()
        return table, told


def summaries(
    found: dict[str, tuple[dict[int, np.ndarray], dict[str, Any]]], options: Options
) -> dict[str, dict[str, Any]]:
    """Mean and spread over seeds, with the penalty that is the best in mean rank over the data sets."""
    if options.l2 == "grid" and len(found) == 1:
        warn("l2 is chosen by the test images of the one data set: a little too good; give several data sets")
    told = {}
    for name, (table, rest) in found.items():
        told[name] = {"shots": {}} | rest
        for shots, right in table.items():
            means = [other[shots].mean(0) for other, _ in found.values() if shots in other]
            best = best_l2(np.array(means))
            told[name]["shots"][str(shots)] = spread(right[:, best].tolist()) | {"l2": options.grid[best]}
    return told


def tell(told: dict[str, dict[str, Any]], emit: Emit) -> None:
    if emit:
        return emit(next(iter(told.values())) if len(told) == 1 else {"data": told})
    print_table(
        {"data": name, "shots": shots, "right": percent(row["mean"]), "+-": percent(row["std"]),
         "l2": f"{row['l2']:g}"}
        for name, facts in told.items() for shots, row in facts["shots"].items()
    )  # fmt: skip
    for name, facts in told.items():
        if knn := facts["knn"]:
            say(f"{name}: {percent(knn['top1'])} right by {knn['k']} nearest neighbours")
        if found := facts["probe"]:
            say(f"{name}: {percent(found['top1'])} right by a linear probe at rate {found['rate']:g}")
        say(f"{name}: {facts['images']} test images")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
