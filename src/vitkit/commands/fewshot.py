"""What a model's frozen features are worth: few-shot accuracy, nearest neighbours, a linear probe."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.commands.shared import Emit
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.inference.predict import load_model, short_names
from vitkit.io.cache import cache_folder
from vitkit.io.files import replace_file
from vitkit.metrics.frozen_features import GRID, TEMPERATURE, best_l2, choose_shots, neighbours, probe
from vitkit.metrics.intervals import percent, span, wilson, with_interval
from vitkit.options import parse_l2
from vitkit.report.terminal import print_table, say, warn
from vitkit.runs.features import (
    LIMIT,
    LONG,
    SHOTS,
    Extractor,
    Features,
    Learning,
    accuracies,
    labels_of,
    learn_from,
    learn_from_all,
    mean_and_interval,
    open_frozen,
    possible_shots,
)
from vitkit.runtime.runtime import choose_runtime, data_workers

FIGURES = (".png", ".svg")
Measured = dict[str, tuple[dict[int, np.ndarray], dict[str, Any]]]  # by data set: accuracies, other facts


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
    compare: tuple[str, ...] = ()  # more models
    figure: Path | None = None  # accuracy over shots, a line a model

    def __post_init__(self) -> None:
        if self.figure is not None and self.figure.suffix.lower() not in FIGURES:
            raise Error(f"--figure {self.figure}: give a file that ends in {' or '.join(FIGURES)}")
        if self.figure is not None and not self.figure.resolve().parent.is_dir():
            raise Error(
                f"--figure {self.figure}: there is no folder {self.figure.parent}; make it first",
                code="file.not-found",
            )
        if self.seeds < 1 or any(shots < 1 for shots in self.shots):
            raise Error(f"seeds and shots must be at least 1, not {self.seeds} and {self.shots}")
        if self.knn is not None and self.knn < 1:
            raise Error(f"--knn must be at least 1, not {self.knn}")
        assert self.grid  # an error now, where --l2 is none

    @property
    def grid(self) -> tuple[float, ...]:
        value = parse_l2(self.l2)
        return GRID if value is None else (value,)


def fewshot(
    place: str, data: Sequence[str], options: Options, workers: int | None, device: str, emit: Emit
) -> None:
    """Every model on every data set; with a grid, a model's penalty is chosen over all data sets."""
    runtime = choose_runtime(device, "fp32")
    with runtime.process_group():
        opened = {name: open_frozen(name) for name in dict.fromkeys(data)}  # mistakes before long work
        wanted = {
            name: shots_of(name, train, options, runtime.is_main) for name, (train, _) in opened.items()
        }
        models = dict.fromkeys((place, *options.compare))
        official = options.view == "official"
        loaded = {name: load_model(name, device, "model" if official else options.view) for name in models}
        found: dict[str, Measured] = {}
        for name, model in loaded.items():
            extractor = Extractor(
                model=model, runtime=runtime, view="official" if official else "model", batch=options.batch,
                workers=data_workers(workers), cache=options.cache or cache_folder() / "features",
                limit=None if options.cache else LIMIT, log=warn, quiet=bool(emit),
            )  # fmt: skip
            found[name] = measured(extractor, opened, wanted, options)
    if runtime.is_main:
        if options.l2 == "grid" and len(opened) == 1:
            warn("l2 is chosen by the test images of the one data set: a little too good; "
                 "give several data sets")  # fmt: skip
        told = {name: summaries(one, options) for name, one in found.items()}
        if options.figure:
            draw(told, options.figure)
        tell(told, emit)
        if options.figure and not emit:
            say(f"the figure: {options.figure}")


def measured(
    extractor: Extractor,
    opened: dict[str, tuple[Source, Source]],
    wanted: dict[str, tuple[int, ...]],
    options: Options,
) -> Measured:
    """One model on every data set."""
    found, runtime = {}, extractor.runtime
    for name, (train, test) in opened.items():
        need = learn_from_all if options.knn or options.probe else learn_from
        learning = need(extractor, train, max(wanted[name]), options.seeds)
        asked = Asked(learning, test, extractor.features(test), wanted[name], options)
        found[name] = runtime.on_main_first(partial(asked.answer, runtime.device), timeout=LONG)
    return found


def draw(told: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy over shots: a panel a data set, a line a model."""
    from vitkit.report.figures import Point, draw_shots, render  # matplotlib is slow to import

    panels: dict[str, dict[str, list[Point]]] = {}
    models = short_names(told)
    for model, sets in told.items():
        names = short_names(sets)
        for name, facts in sets.items():
            points = [(float(s), row["mean"], row["std"] or 0.0) for s, row in facts["shots"].items()]
            panels.setdefault(names[name], {})[models[model]] = points
    content = render(draw_shots(panels), path.suffix.lower()[1:])
    replace_file(path, lambda beside: beside.write_bytes(content))


def shots_of(name: str, train: Source, options: Options, loud: bool) -> tuple[int, ...]:
    """Those asked for; else the usual ones, without those that some class has too few images for."""
    if options.knn and options.knn > len(train):
        raise Error(f"{name}: --knn {options.knn} neighbours among {len(train)} training images")
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
            told["knn"] = {"k": o.knn, "temperature": TEMPERATURE, "top1": right,
                           "interval": list(wilson(right, images))}  # fmt: skip
        if o.probe:
            linear = probe(a, b, c, d)
            told["probe"] = linear.to_json() | {"interval": list(wilson(linear.top1, images))}
        return table, told


def summaries(found: Measured, options: Options) -> dict[str, dict[str, Any]]:
    """Mean and spread over seeds, with the penalty that is the best in mean rank over the data sets."""
    told: dict[str, dict[str, Any]] = {}
    for name, (table, rest) in found.items():
        told[name] = {"shots": {}} | rest
        for shots, right in table.items():
            means = [other[shots].mean(0) for other, _ in found.values() if shots in other]
            best = best_l2(np.array(means))
            row = mean_and_interval(right[:, best].tolist(), rest["images"])
            told[name]["shots"][str(shots)] = row | {"l2": options.grid[best]}
    return told


def tell(told: dict[str, dict[str, dict[str, Any]]], emit: Emit) -> None:
    """One model's numbers by data set; several models' by model."""
    first, several = next(iter(told.values())), len(told) > 1
    if emit and several:
        return emit({"models": told})
    if emit:
        return emit(next(iter(first.values())) if len(first) == 1 else {"data": first})
    models = short_names(told)
    print_table(
        ({"model": models[model]} if several else {})
        | {"data": name, "shots": shots, "right": percent(row["mean"], facts["images"]),
           "95 % interval": span(row["interval"], facts["images"]),
           "+- of draws": percent(row["std"], facts["images"]), "l2": f"{row['l2']:g}"}
        for model, sets in told.items() for name, facts in sets.items()
        for shots, row in facts["shots"].items()
    )  # fmt: skip
    for model, sets in told.items():
        for name, facts in sets.items():
            of = f"{models[model]}, {name}" if several else name
            if knn := facts["knn"]:
                say(f"{of}: {with_interval(knn['top1'], facts['images'])} right by {knn['k']} nearest "
                    "neighbours")  # fmt: skip
            if found := facts["probe"]:
                say(f"{of}: {with_interval(found['top1'], facts['images'])} right by a linear probe at rate "
                    f"{found['rate']:g}")  # fmt: skip
    for name, facts in first.items():
        say(f"{name}: {facts['images']} test images")
