"""What a recipe starts from: the splits of its data, and its model."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.content import file_hash
from vitkit.data.decode import read
from vitkit.data.doctor import usable
from vitkit.data.duplicates import against
from vitkit.data.findings import Finding
from vitkit.data.names import SUFFIXES
from vitkit.data.sources.remote import Cache
from vitkit.data.sources.source import Source, from_rows, walk
from vitkit.data.sources.sparse_labels import SparseLabels
from vitkit.data.splits import Placed, complete, join, subset
from vitkit.datasets.opening import open_data
from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.models.adapt import adapt
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.variants import Model, configure, fresh, with_options
from vitkit.models.vit import with_size_note
from vitkit.options import part_of
from vitkit.recipes.recipe import Recipe, only
from vitkit.runs.provenance.changes import examples
from vitkit.runs.provenance.fingerprint import remembered_splits
from vitkit.tasks.task import Task
from vitkit.weights.load import load

Opener = Callable[[Recipe, Path | None], dict[str, Source]]
DECIDING = ("data", "objective", "train_on", "val", "test", "split_of")  # that decide what is opened
REMOVED = "removed.json"  # of a run folder: what was taken out of train because it is in other sets too
EVALUATION = {"squash": Preprocessing(), "centre": Preprocessing(resize="crop", crop=0.875)}


def open_splits(
    recipe: Recipe,
    out: Path | None = None,
    *,
    cache: Cache | None = None,
    findings: list[Finding] | None = None,
) -> dict[str, Source]:
    """train, val and test as the recipe wants them; no val where it is trained on.

    out: the run folder. Images that its run was tested on stay test images, whatever was added to the data;
    and there it is written, or is already, what was taken out of train because it is in other sets too.
    cache: for what is fetched. findings: a list that gets what the doctor reports of names and labels.
    """
    return split_data(
        recipe, open_for(recipe.task, recipe.data, cache), placed_images(recipe, out), out, findings
    )


def placed_images(recipe: Recipe, out: Path | None) -> dict[bytes | str, str]:
    """The split of each image as the run has it already, or the run that the recipe names."""
    placed = remembered_splits(out) if out else {}
    if not placed and recipe.split_of:
        placed = remembered_splits(Path(recipe.split_of))
        if not placed:
            raise Error(
                f"--split-of {recipe.split_of}: expected the folder of a run that remembers its images "
                "(data.json.gz), and there is none; leave the flag out to divide the images anew",
                code="run.not-found",
            )
    return placed


def split_data(
    recipe: Recipe,
    opened: dict[str, Source],
    placed: Placed,
    out: Path | None = None,
    findings: list[Finding] | None = None,
) -> dict[str, Source]:
    """The splits of the recipe's opened data, in which these images keep their places."""
    if recipe.task.labelled:
        problems = usable(opened, recipe.data)
        if findings is not None:
            findings.extend(problem for problem in problems if problem not in findings)
    everything = recipe.train_on == "train+val"
    splits = complete(opened, val=0.0 if everything else recipe.val, test=recipe.test, placed=placed)
    if everything and "val" in splits:
        splits["train"] = join(splits["train"], splits.pop("val"))
    if recipe.against:
        splits["train"] = without_duplicates(splits["train"], recipe.against, out / REMOVED if out else None)
    return check_splits(with_subset(splits, recipe), recipe)


def needs_split(opened: Mapping[str, Source]) -> bool:
    """Whether test images are split off here, because the opened data does not bring its own."""
    return not {"test", "val"} & set(opened)


def with_subset(splits: dict[str, Source], recipe: Recipe) -> dict[str, Source]:
    """The same splits with the recipe's part of train."""
    if not recipe.subset:
        return splits
    part: dict[str, Any] = part_of(recipe.subset)
    return splits | {"train": subset(splits["train"], **part, seed=recipe.seed)}


def check_splits(splits: dict[str, Source], recipe: Recipe) -> dict[str, Source]:
    """The same splits if they can be trained and tested on; without a val that has no image."""
    train, place = splits["train"], recipe.data
    seen = np.flatnonzero(images_per_class(train))
    if not len(train):
        raise Error(f"{place}: no image is left to train on", code="data.empty")
    if recipe.task.labelled and len(seen) < 2 and not train.multilabel:
        listed = ", ".join(repr(train.classes[i]) for i in seen)
        raise Error(
            f"{place}: all {len(train)} training images are of one class, {listed}; a classifier needs two "
            "or more, each a folder of its own (or a label of its own in a table)",
            code="data.classes",
        )
    for name in (recipe.report_on, "val") if recipe.patience or recipe.keeps_best else (recipe.report_on,):
        if name not in splits or not len(splits[name]):
            raise Error(
                f"{place}: no image for {name}: {len(train)} training images in {len(seen)} classes, and a "
                f"class needs three different ones for train, val and test; add images, or a folder {name}",
                code="data.empty",
            )
    return {name: part for name, part in splits.items() if len(part) or name == "train"}


def images_per_class(source: Source) -> np.ndarray:
    """The images of each class."""
    if isinstance(source.labels, SparseLabels):
        return source.labels.counts()
    return np.bincount(source.labels, minlength=len(source.classes))


def warnings(splits: dict[str, Source], recipe: Recipe, findings: Sequence[Finding] = ()) -> Iterator[str]:
    """What a user should know of the data before a classifier is trained on it, each in a line.

    First the doctor's own findings, then what is left in the splits that were made.
    """
    if not recipe.task.labelled:
        return
    for finding in findings:
        if finding.severity == "warning":
            yield f"warning: {finding.text} {finding.remedy}"
    classes, per_class = splits["train"].classes, images_per_class(splits["train"])
    known = {name for finding in findings if finding.kind == "empty-class" for name in finding.classes}
    rows = [("no training image", (per_class == 0) & [name not in known for name in classes])]
    if recipe.subset:
        rows.append(("one or two training images", (per_class > 0) & (per_class < 3)))
    if "val" not in splits and recipe.train_on == "train":
        yield "no image is left for val: nothing is evaluated before the end of the run"
    if recipe.report_on in splits:
        rows.append((f"no {recipe.report_on} image", images_per_class(splits[recipe.report_on]) == 0))
    for what, which in rows:
        names = [classes[i] for i in np.flatnonzero(which)]
        if names:
            yield f"{len(names)} of {len(classes)} classes have {what}: {examples(names)}"


@dataclass
class SplitCache:
    """An opener that opens each data set once, for several recipes on it."""

    opened: dict[tuple[Recipe, int], dict[str, Source]] = field(default_factory=dict)
    cache: Cache | None = None  # for what is fetched
    findings: list[Finding] = field(default_factory=list)  # what the doctor reports of names and labels
    places: dict[tuple[str, str], dict[str, Source]] = field(default_factory=dict)  # before any split

    def __call__(self, recipe: Recipe, out: Path | None = None) -> dict[str, Source]:
        placed = placed_images(recipe, out)
        if recipe.against:  # what is taken out is written down with each run
            return split_data(recipe, self.place(recipe), placed, out, self.findings)
        part = only(recipe, DECIDING)
        key = part, hash(frozenset(placed.items()))
        if key not in self.opened:
            self.opened[key] = split_data(part, self.place(part), placed, findings=self.findings)
        return check_splits(with_subset(self.opened[key], recipe), recipe)

    def place(self, recipe: Recipe) -> dict[str, Source]:
        """The recipe's data as it is stored."""
        key = recipe.data, recipe.objective
        if key not in self.places:
            self.places[key] = open_for(recipe.task, recipe.data, self.cache)
        return self.places[key]


def open_for(task: Task, place: str, cache: Cache | None = None) -> dict[str, Source]:
    """The data at a place; where the task needs no labels, also a folder of images that have none."""
    if not task.labelled and is_unlabelled(place):
        return open_unlabelled(Path(place))
    return open_data(place, cache=cache)


def is_unlabelled(place: str) -> bool:
    """Whether images lie in a folder itself: they have no labels, which not every training needs."""
    if not place or place == "digits" or not Path(place).is_dir():
        return False
    return any(p.suffix.lower() in SUFFIXES for p in Path(place).iterdir() if p.is_file())


def open_unlabelled(folder: Path) -> dict[str, Source]:
    """All images in and below a folder, as if of one class."""
    names = sorted(walk(folder))
    rows = [(name, "image") for name in names if name.lower().endswith(SUFFIXES)]
    others = tuple(name for name in names if not name.lower().endswith(SUFFIXES))
    source = from_rows(
        folder.name, rows, lambda key: read(folder / key), others, digest=lambda key: file_hash(folder / key)
    )
    return {"all": source}


def without_duplicates(train: Source, places: Sequence[str], note: Path | None) -> Source:
    """The images of train that are in none of the other sets; a list of the others beside the run."""
    if note is None or not note.exists():
        others = [source for place in places for source in open_data(place).values()]
        kept, removed = against(train, others, workers=os.cpu_count() or 1)
        if note is not None:
            told = json.dumps([one._asdict() for one in removed], indent=1)
            replace_file(note, lambda beside: beside.write_text(told))
        return train.take(kept)
    try:
        gone = {one["number"] for one in json.loads(note.read_text())}
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Error(
            f"{note}: not a list that vitkit wrote ({error}); delete it to have it made",
            code="run.corrupt",
        ) from None
    return train.take(np.array([i for i in range(len(train)) if i not in gone]))


def build_model(recipe: Recipe, train_split: Source, load: Callable[[str], Model] = load) -> Model:
    """Published or own weights with a new zero head at the recipe's size, or a fresh model."""
    task = recipe.task.for_source(train_split)
    labels = task.labels(train_split.classes)
    if recipe.evaluation_crop not in EVALUATION:
        raise Error(
            f"evaluation_crop must be squash or centre, not {recipe.evaluation_crop!r}", code="recipe.value"
        )
    training: dict[str, Any] = {"dropout": recipe.dropout, "stochastic_depth": recipe.stochastic_depth}
    if recipe.weights:
        model = load(recipe.weights)
        origin = Origin(format="vitkit", source=recipe.weights, licence=model.origin.licence)
        task.configure(model.config)  # an error before it is adapted
        training = training if hasattr(model.config, "dropout") else {}
        model = task.extend(adapt(
            model, classes=len(labels), labels=labels, image_size=recipe.image_size,
            keep_representation=recipe.keep_representation and bool(labels), **training,
        ))  # fmt: skip
    elif recipe.model:
        config = configure(recipe.model, classes=len(labels), image_size=recipe.image_size)
        known = {k: v for k, v in training.items() if hasattr(config, k)}
        config = with_options(replace(config, **known), recipe.model_options)
        model = fresh(task.configure(config), seed=recipe.seed)
        if recipe.head_bias and model.head is not None:
            torch.nn.init.constant_(model.head.bias, recipe.head_bias)
        origin = Origin(format="vitkit", source=f"{recipe.model} from scratch")
    else:
        raise Error(
            "nothing to start from: give --weights FILE|NAME, or --model NAME to train from scratch, "
            "or a --recipe that names its model",
            code="request.missing",
        )
    if labels:
        model.labels, model.task = labels, task.name
    base = model.preprocessing
    model.preprocessing = replace(EVALUATION[recipe.evaluation_crop], mean=base.mean, std=base.std)
    model.origin = with_size_note(origin, model.config)
    return model
