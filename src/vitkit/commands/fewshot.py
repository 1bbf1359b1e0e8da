"""`vitkit fewshot`: few-shot, nearest-neighbour and linear-probe accuracy of frozen features."""

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
    FewShotTraining,
    accuracies,
    all_features,
    few_shot_features,
    labels_of,
    mean_and_interval,
    open_frozen,
    possible_shots,
)
from vitkit.runtime.runtime import choose_runtime, data_workers

FIGURES = (".png", ".svg")
Results = dict[
    str, tuple[dict[int, np.ndarray], dict[str, Any]]
]  # data set -> accuracies by shots, other facts


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of fewshot, by the names of its flags."""

    shots: tuple[int, ...] = ()  # empty: the defaults that every class has enough images for
    seeds: int = 3
    l2: str = "1024"  # a number or "grid"
    knn: int | None = None
    probe: bool = False
    view: str = "model"
    batch: int = 64
    cache: Path | None = None
    compare: tuple[str, ...] = ()  # further models
    figure: Path | None = None  # plot of accuracy over shots, one line per model

    def __post_init__(self) -> None:
        if self.figure is not None and self.figure.suffix.lower() not in FIGURES:
            raise Error(f"--figure {self.figure}: expected a file name ending in {' or '.join(FIGURES)}")
        if self.figure is not None and not self.figure.resolve().parent.is_dir():
            raise Error(
                f"--figure {self.figure}: folder {self.figure.parent} does not exist; create it first",
                code="file.not-found",
            )
        if self.seeds < 1 or any(shots < 1 for shots in self.shots):
            raise Error(f"seeds and shots must be at least 1, not {self.seeds} and {self.shots}")
        if self.knn is not None and self.knn < 1:
            raise Error(f"--knn must be at least 1, not {self.knn}")
        assert self.grid  # raises an Error now if --l2 is invalid

    @property
    def grid(self) -> tuple[float, ...]:
        value = parse_l2(self.l2)
        return GRID if value is None else (value,)


def fewshot(
    place: str, data: Sequence[str], options: Options, workers: int | None, device: str, emit: Emit
) -> None:
    """Evaluate every model on every data set; --l2 grid chooses one penalty per model for all data sets."""
    runtime = choose_runtime(device, "fp32")
    with runtime.process_group():
        opened = {name: open_frozen(name) for name in dict.fromkeys(data)}  # errors before long work
        shots = {name: shots_of(name, train, options, runtime.is_main) for name, (train, _) in opened.items()}
        models = dict.fromkeys((place, *options.compare))
        official = options.view == "official"
        loaded = {name: load_model(name, device, "model" if official else options.view) for name in models}
        results: dict[str, Results] = {}
        for name, model in loaded.items():
            extractor = Extractor(
                model=model, runtime=runtime, view="official" if official else "model", batch=options.batch,
                workers=data_workers(workers), cache=options.cache or cache_folder() / "features",
                limit=None if options.cache else LIMIT, log=warn, quiet=bool(emit),
            )  # fmt: skip
            results[name] = evaluate_model(extractor, opened, shots, options)
    if runtime.is_main:
        if options.l2 == "grid" and len(opened) == 1:
            warn("l2 is chosen on the test images of a single data set, so the accuracy is slightly "
                 "optimistic; use several data sets")  # fmt: skip
        summary = {name: summarise(result, options) for name, result in results.items()}
        if options.figure:
            draw(summary, options.figure)
        emit(json_value(summary)) if emit else print_accuracies(summary)
        if options.figure and not emit:
            say(f"figure: {options.figure}")


def evaluate_model(
    extractor: Extractor,
    opened: dict[str, tuple[Source, Source]],
    shots: dict[str, tuple[int, ...]],
    options: Options,
) -> Results:
    """The results of one model on every data set."""
    results, runtime = {}, extractor.runtime
    for name, (train, test) in opened.items():
        extract = all_features if options.knn or options.probe else few_shot_features
        learning = extract(extractor, train, max(shots[name]), options.seeds)
        evaluation = Evaluation(learning, test, extractor.features(test), shots[name], options)
        results[name] = runtime.on_main_first(partial(evaluation.run, runtime.device), timeout=LONG)
    return results


def draw(summary: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot accuracy over shots: one panel per data set, one line per model."""
    from vitkit.report.figure_style import render  # matplotlib is slow to import
    from vitkit.report.figures import Point, draw_shots

    panels: dict[str, dict[str, list[Point]]] = {}
    models = short_names(summary)
    for model, sets in summary.items():
        names = short_names(sets)
        for name, facts in sets.items():
            points = [(float(s), row["mean"], row["std"] or 0.0) for s, row in facts["shots"].items()]
            panels.setdefault(names[name], {})[models[model]] = points
    content = render(draw_shots(panels), path.suffix.lower()[1:])
    replace_file(path, lambda partial_path: partial_path.write_bytes(content))


def shots_of(name: str, train: Source, options: Options, verbose: bool) -> tuple[int, ...]:
    """The requested shots, or the defaults that every class has enough images for."""
    if options.knn and options.knn > len(train):
        raise Error(f"--knn {options.knn}: {name} has only {len(train)} training images")
    if options.shots:
        choose_shots(train.labels, max(options.shots), names=train.classes)  # an error now, before long work
        return tuple(sorted(set(options.shots)))
    possible = possible_shots(train)
    if possible != SHOTS and verbose:
        skipped = ", ".join(str(shots) for shots in SHOTS if shots not in possible)
        warn(f"{name}: skipping {skipped} shots, because some class has too few images")
    return possible


@dataclass(frozen=True)
class Evaluation:
    """A data set with its features and the options of their evaluation."""

    learning: FewShotTraining
    test: Source
    test_features: Features
    shots: tuple[int, ...]
    options: Options

    def run(self, device: str) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
        """The accuracies (seeds, penalties) by number of shots, and all other facts."""
        o, x, images = self.options, self.learning.features.x, len(self.test_features.index)
        table = {s: accuracies(self.learning, s, self.test, self.test_features, o.grid) for s in self.shots}
        facts: dict[str, Any] = {"images": images, "unusable": len(self.test) - images}
        facts |= {"knn": None, "probe": None}
        test_labels = labels_of(self.test, self.test_features)
        tensors = (x, self.learning.labels, self.test_features.x, test_labels)
        train_x, train_y, test_x, test_y = (t.to(device) if o.knn or o.probe else t for t in tensors)
        if o.knn:
            top1 = neighbours(train_x, train_y, test_x, test_y, k=o.knn)
            facts["knn"] = {"k": o.knn, "temperature": TEMPERATURE, "top1": top1,
                            "interval": list(wilson(top1, images))}  # fmt: skip
        if o.probe:
            linear = probe(train_x, train_y, test_x, test_y)
            facts["probe"] = linear.to_json() | {"interval": list(wilson(linear.top1, images))}
        return table, facts


def summarise(results: Results, options: Options) -> dict[str, dict[str, Any]]:
    """Mean and deviation over seeds, at the penalty with the best mean rank over the data sets."""
    summary: dict[str, dict[str, Any]] = {}
    for name, (table, facts) in results.items():
        summary[name] = {"shots": {}} | facts
        for shots, accuracy in table.items():
            means = [other[shots].mean(0) for other, _ in results.values() if shots in other]
            best = best_l2(np.array(means))
            row = mean_and_interval(accuracy[:, best].tolist(), facts["images"])
            summary[name]["shots"][str(shots)] = row | {"l2": options.grid[best]}
    return summary


def json_value(summary: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The results by model and data set, without the level that has only one entry."""
    if len(summary) > 1:
        return {"models": summary}
    (by_data,) = summary.values()
    return next(iter(by_data.values())) if len(by_data) == 1 else {"data": by_data}


def print_accuracies(summary: dict[str, dict[str, dict[str, Any]]]) -> None:
    several, models = len(summary) > 1, short_names(summary)
    print_table(
        ({"model": models[model]} if several else {})
        | {"data": name, "shots": shots, "accuracy": percent(row["mean"], facts["images"]),
           "95 % interval": span(row["interval"], facts["images"]),
           "std of draws": percent(row["std"], facts["images"]), "l2": f"{row['l2']:g}"}
        for model, sets in summary.items() for name, facts in sets.items()
        for shots, row in facts["shots"].items()
    )  # fmt: skip
    for model, sets in summary.items():
        for name, facts in sets.items():
            title, images = f"{models[model]}, {name}" if several else name, facts["images"]
            if knn := facts["knn"]:
                say(f"{title}: {with_interval(knn['top1'], images)} correct with "
                    f"{knn['k']} nearest neighbours")  # fmt: skip
            if linear := facts["probe"]:
                say(f"{title}: {with_interval(linear['top1'], images)} correct with a linear probe "
                    f"(learning rate {linear['rate']:g})")  # fmt: skip
    for name, facts in next(iter(summary.values())).items():
        say(f"{name}: {facts['images']} test images")
