"""The splits and the initial model of a recipe."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.content import Files
from vitkit.data.doctor import usable
from vitkit.data.duplicates import against
from vitkit.data.findings import Finding
from vitkit.data.folds import duplicate_groups, fold_split, parse_fold
from vitkit.data.names import SUFFIXES
from vitkit.data.sources.remote import Cache
from vitkit.data.sources.source import Source, from_rows, walk
from vitkit.data.sources.sparse_labels import SparseLabels
from vitkit.data.splits import Placed, complete, join, subset, with_noise
from vitkit.data.targets import kind_names
from vitkit.datasets.opening import open_all, open_data
from vitkit.errors import Error, similar_path
from vitkit.io.files import replace_file
from vitkit.models.adapt import linear_heads
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.variants import Model, configure, with_options
from vitkit.models.vit import ViT, with_size_note
from vitkit.options import part_of
from vitkit.recipes.recipe import Recipe, only, read_recipe
from vitkit.runs.corrections import corrected
from vitkit.runs.provenance.changes import examples
from vitkit.runs.provenance.fingerprint import remembered_splits
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Task
from vitkit.training.step import TrainState
from vitkit.training.trainable import freeze
from vitkit.weights.hub import is_hub
from vitkit.weights.load import load
from vitkit.weights.locate import RECIPE

Opener = Callable[[Recipe, Path | None], dict[str, Source]]
DECIDING = (
    "data",
    "corrections",
    "objective",
    "train_on",
    "val",
    "val_images",
    "test",
    "split_of",
)  # that decide which images are opened
FEW_TO_CALIBRATE = 20  # validation images, below which their lowest confidence is the threshold
REMOVED = "removed.json"  # in a run folder: training images removed because other data sets have them too
EVALUATION = {
    "squash": Preprocessing(), "fit": Preprocessing(resize="fit"),
    "centre": Preprocessing(resize="crop", crop=0.875),
}  # fmt: skip


def open_splits(
    recipe: Recipe,
    out: Path | None = None,
    *,
    cache: Cache | None = None,
    findings: list[Finding] | None = None,
) -> dict[str, Source]:
    """The train, val and test splits of a recipe; without val where the recipe trains on it.

    out: the run folder. Its test images stay test images even if the data has grown; the list of images
    removed as duplicates is read from there, or written.
    cache: for downloads. findings: receives the doctor's findings about names and labels.
    """
    return split_data(recipe, open_corrected(recipe, cache), placed_images(recipe, out), out, findings)


def placed_images(recipe: Recipe, out: Path | None) -> dict[bytes | str, str]:
    """The split of each image in the run folder or, for a new run, in the run that `split_of` names."""
    placed = remembered_splits(out) if out else {}
    if not placed and recipe.split_of:
        placed = remembered_splits(Path(recipe.split_of))
        if not placed:
            raise Error(
                f"--split-of {recipe.split_of}: expected a run folder with a list of its images "
                f"(data.json.gz);{similar_path(recipe.split_of)} omit the flag to create a new split",
                code="run.not-found",
            )
        path = Path(recipe.split_of) / RECIPE
        if path.exists() and read_recipe(path).train_on == "train+val":  # its val is among its train
            placed = {image: split for image, split in placed.items() if split == "test"}
    return placed


def split_data(
    recipe: Recipe,
    opened: dict[str, Source],
    placed: Placed,
    out: Path | None = None,
    findings: list[Finding] | None = None,
) -> dict[str, Source]:
    """Split the opened data; the images in `placed` stay in their split."""
    if recipe.task.labelled:
        problems = usable(opened, recipe.data, recipe.task.targets)
        if findings is not None:
            findings.extend(problem for problem in problems if problem not in findings)
    use_val = recipe.train_on == "train+val" or bool(recipe.fold)
    splits = complete(
        opened, val=0.0 if use_val else recipe.val, val_images=recipe.val_images, test=recipe.test,
        placed=placed,
    )  # fmt: skip
    if use_val and "val" in splits:
        splits["train"] = join(splits["train"], splits.pop("val"))
    if recipe.fold:
        splits = with_fold(splits, recipe, duplicate_groups(splits["train"]))
    if recipe.against:
        splits["train"] = without_duplicates(splits["train"], recipe.against, out / REMOVED if out else None)
    return check_splits(with_subset(splits, recipe), recipe)


def with_fold(splits: dict[str, Source], recipe: Recipe, groups: np.ndarray) -> dict[str, Source]:
    """The splits with the recipe's fold of train as val; groups: see `duplicate_groups`."""
    train, val = fold_split(splits["train"], *parse_fold(recipe.fold), groups)
    return splits | {"train": train, "val": val}


def needs_split(opened: Mapping[str, Source]) -> bool:
    """Whether vitkit splits off the test images, because the data has neither test nor val of its own."""
    return not {"test", "val"} & set(opened)


def with_subset(splits: dict[str, Source], recipe: Recipe) -> dict[str, Source]:
    """The splits with the recipe's subset of train, and its label noise."""
    train, part = splits["train"], dict[str, Any](part_of(recipe.subset))
    if part and recipe.task.targets and not part.keys() & {"count", "fraction"}:
        raise Error(
            f"--subset {recipe.subset} counts the images of each class, but images with "
            f"{recipe.task.targets} show several; use a number of images, or a share such as 10%",
            code="request.conflict",
        )
    if part:
        train = subset(train, **part, seed=recipe.seed)
    if recipe.label_noise:
        train = with_noise(train, recipe.label_noise, recipe.seed)
    return splits | {"train": train}


def check_splits(splits: dict[str, Source], recipe: Recipe) -> dict[str, Source]:
    """Refuse splits that cannot be trained or tested on; an empty val is dropped."""
    train, place = splits["train"], recipe.data
    present = np.flatnonzero(images_per_class(train))
    if not len(train):
        raise Error(f"{place}: no image is left to train on", code="data.empty")
    if recipe.task.classifies and len(present) < 2 and not train.multilabel:
        listed = ", ".join(repr(train.classes[i]) for i in present)
        raise Error(
            f"{place}: all {len(train)} training images are of one class, {listed}; a classifier needs two "
            "or more, each a folder of its own (or a label of its own in a table)",
            code="data.classes",
        )
    if recipe.report_on not in splits or not len(splits[recipe.report_on]):
        raise Error(
            f"{place}: no image for {recipe.report_on}: {len(train)} training images in {len(present)} "
            "classes, and a class needs three different ones for train, val and test; add images, or a "
            f"folder {recipe.report_on}",
            code="data.empty",
        )
    if (recipe.patience or recipe.keeps_best) and not len(splits.get("val", ())):
        flag = f"patience={recipe.patience}" if recipe.patience else "keep=best"
        raise no_validation(flag, place, train)
    return {name: part for name, part in splits.items() if len(part) or name == "train"}


def no_validation(flag: str, place: str, train: Source) -> Error:
    """The error about a setting that needs validation images where there are none."""
    remedy = "or hold some training images out, e.g. a fifth of each class: --set val=0.2 val_images="
    if images_per_class(train).max(initial=0) < 2:
        remedy = "or more training images: each class has only one"
    return Error(
        f"{flag} needs validation images, but {place} has none; add a folder val, {remedy}", code="data.empty"
    )


def images_per_class(source: Source) -> np.ndarray:
    """The number of images of each class."""
    if isinstance(source.labels, SparseLabels):
        return source.labels.counts()
    return np.bincount(source.labels, minlength=len(source.classes))


def warnings(splits: dict[str, Source], recipe: Recipe, findings: Sequence[Finding] = ()) -> Iterator[str]:
    """Warnings about the data before a classifier is trained on it, one line each.

    First the doctor's findings, then classes without images in the splits.
    """
    for finding in findings:
        if finding.severity == "warning":
            yield f"warning: {finding.text} {finding.remedy}"
    if not recipe.task.classifies:
        return
    classes, per_class = splits["train"].classes, images_per_class(splits["train"])
    reported = {name for finding in findings if finding.kind == "empty-class" for name in finding.classes}
    rows = [("no training image", (per_class == 0) & [name not in reported for name in classes])]
    if recipe.subset:
        rows.append(("one or two training images", (per_class > 0) & (per_class < 3)))
    if "val" not in splits and recipe.train_on == "train":
        yield "no validation images: the only evaluation is on the test images, at the end of the run"
    if recipe.report_on in splits:
        rows.append((f"no {recipe.report_on} image", images_per_class(splits[recipe.report_on]) == 0))
    if recipe.calibrate and 0 < len(splits.get("val", ())) < FEW_TO_CALIBRATE:
        yield (
            f"warning: only {len(splits['val'])} validation images for the temperature and the threshold for "
            f"--reject, which are rough; {FEW_TO_CALIBRATE} or more are better"
        )
    for problem, mask in rows:
        names = [classes[i] for i in np.flatnonzero(mask)]
        if names:
            yield f"{len(names)} of {len(classes)} classes have {problem}: {examples(names)}"


@dataclass
class SplitCache:
    """An opener that opens each data set once for several recipes."""

    splits: dict[tuple[Recipe, int], dict[str, Source]] = field(default_factory=dict)
    cache: Cache | None = None  # for downloads
    findings: list[Finding] = field(default_factory=list)  # of the doctor, about names and labels
    sources: dict[tuple[str, ...], dict[str, Source]] = field(default_factory=dict)  # before splitting
    groups: dict[tuple[Recipe, int], np.ndarray] = field(default_factory=dict)  # of copies, for folds

    def __call__(self, recipe: Recipe, out: Path | None = None) -> dict[str, Source]:
        placed = placed_images(recipe, out)
        if recipe.against:  # each run writes its own list of removed images
            return split_data(recipe, self.place(recipe), placed, out, self.findings)
        part = only(recipe, DECIDING)
        part = replace(part, train_on="train+val") if recipe.fold else part
        key = part, hash(frozenset(placed.items()))
        if key not in self.splits:
            self.splits[key] = split_data(part, self.place(part), placed, findings=self.findings)
        splits = self.splits[key]
        if recipe.fold:
            if key not in self.groups:
                self.groups[key] = duplicate_groups(splits["train"])
            splits = with_fold(splits, recipe, self.groups[key])
        return check_splits(with_subset(splits, recipe), recipe)

    def place(self, recipe: Recipe) -> dict[str, Source]:
        """The recipe's data before splitting."""
        key = recipe.data, recipe.objective, recipe.corrections
        if key not in self.sources:
            self.sources[key] = open_corrected(recipe, self.cache)
        return self.sources[key]


def open_corrected(recipe: Recipe, cache: Cache | None = None) -> dict[str, Source]:
    """The recipe's data with its corrections, before splitting."""
    opened = open_for(recipe.task, recipe.data, cache)
    return corrected(opened, Path(recipe.corrections)) if recipe.corrections else opened


def open_for(task: Task, place: str, cache: Cache | None = None) -> dict[str, Source]:
    """Open data; a task that needs no labels also takes images in any folders, and unlabelled archives."""
    if not task.labelled and is_unlabelled(place):
        return open_unlabelled(Path(place))
    try:
        opened = open_data(place, cache=cache)
        return with_labels(place, opened) if task.classifies else opened
    except Error as error:
        if task.labelled or error.code != "data.layout":
            raise
    if Path(place).is_dir():
        return open_unlabelled(Path(place))
    return {name: of_one_class(part) for name, part in open_all(place, cache=cache).items()}


def with_labels(place: str, opened: dict[str, Source]) -> dict[str, Source]:
    """The data, if its images have labels of their own, not only masks or boxes."""
    kinds = {kind for source in opened.values() if source.targets for kind in source.targets.kinds}
    if not kinds:
        return opened
    needs = {"segment": "mask", "detect": "boxes", "instances": "instances"}
    tasks = [task for task, kind in needs.items() if kind in kinds]
    raise Error(
        f"{place} has {kind_names(kinds)}, but no label for each image, which a classifier needs; "
        f"use --task {' or --task '.join(tasks)}",
        code="data.labels",
    )


def of_one_class(source: Source) -> Source:
    """The same images as one class, as those of an unlabelled folder."""
    return replace(source, labels=np.zeros(len(source), dtype=np.int64), classes=("image",))


def is_unlabelled(place: str) -> bool:
    """Whether a folder holds images directly, and so without labels."""
    if not place or place == "digits" or not Path(place).is_dir():
        return False
    return any(p.suffix.lower() in SUFFIXES for p in Path(place).iterdir() if p.is_file())


def open_unlabelled(folder: Path) -> dict[str, Source]:
    """All images in a folder and below it, as one class."""
    names = sorted(walk(folder))
    rows = [(name, "image") for name in names if name.lower().endswith(SUFFIXES)]
    others = tuple(name for name in names if not name.lower().endswith(SUFFIXES))
    files = Files(folder)
    source = from_rows(folder.name, rows, files.read, others, digest=files.digest)
    return {"all": source}


def without_duplicates(train: Source, places: Sequence[str], record: Path | None) -> Source:
    """Remove images that are also in other data sets; `record` lists them, and is reused if it exists."""
    if record is None or not record.exists():
        others = [source for place in places for source in open_data(place).values()]
        kept, removed = against(train, others, workers=os.cpu_count() or 1)
        if record is not None:
            text = json.dumps([duplicate._asdict() for duplicate in removed], indent=1)
            replace_file(record, lambda beside: beside.write_text(text, encoding="utf-8"))
        return train.take(kept)
    try:
        removed_indices = {
            duplicate["number"] for duplicate in json.loads(record.read_text(encoding="utf-8"))
        }
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Error(
            f"{record}: not a list that vitkit wrote ({error}); delete it to create a new one",
            code="run.corrupt",
        ) from None
    return train.take(np.array([i for i in range(len(train)) if i not in removed_indices]))


def build_model(recipe: Recipe, train_split: Source, load: Callable[[str], Model] = load) -> Model:
    """Loaded weights with a new zero head at the recipe's image size, or a fresh model."""
    task = recipe.task.for_source(train_split)
    labels = task.labels(train_split.classes)
    if recipe.evaluation_crop not in EVALUATION:
        raise Error(
            f"evaluation_crop {recipe.evaluation_crop!r}: expected squash, fit or centre", code="recipe.value"
        )
    training: dict[str, Any] = {
        "dropout": recipe.dropout, "stochastic_depth": recipe.stochastic_depth, "merge_tokens": 0
    }  # fmt: skip
    if recipe.weights:
        model = load(recipe.weights)
        source = model.origin.source if is_hub(recipe.weights) else recipe.weights  # with the commit
        origin = Origin(format="vitkit", source=source, licence=model.origin.licence)
        task.configure(model.config)  # raises before the model is adapted
        training = training if isinstance(model, ViT | DenseModel) else {}
        model = task.extend(task.adapt(
            model, labels, recipe.image_size, recipe.seed,
            keep_representation=recipe.keep_representation and bool(labels),
            mean_pooling=recipe.pooling == "mean", **training,
        ))  # fmt: skip
    elif recipe.model:
        if recipe.pooling != "model":
            raise Error(
                f"pooling={recipe.pooling} is for pretrained weights; for a new model use --set "
                "model.head=gap model.final_norm=pooled",
                code="request.conflict",
            )
        config = configure(recipe.model, classes=len(labels), image_size=recipe.image_size)
        known = {k: v for k, v in training.items() if hasattr(config, k)}
        config = with_options(replace(config, **known), recipe.model_options)
        model = task.initial(task.configure(config), recipe.seed)
        for head in linear_heads(model) if recipe.head_bias else ():
            torch.nn.init.constant_(head.bias, recipe.head_bias)
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
    view = Preprocessing(resize=task.resize) if task.targets else EVALUATION[recipe.evaluation_crop]
    model.preprocessing = replace(view, mean=base.mean, std=base.std, interpolation=recipe.interpolation)
    model.origin = with_size_note(origin, model.config)
    return model


def start_training(recipe: Recipe, task: Task, model: Model, runtime: Runtime) -> TrainState:
    """The module to train on its device, with its optimizer; what the recipe does not train is frozen."""
    if recipe.train != "all" and not recipe.weights:
        raise Error(
            f"train={recipe.train} freezes pretrained weights, but there are none; give --weights, or leave "
            "train out to train all parameters",
            code="request.conflict",
        )
    if recipe.patch_sizes and runtime.compile:
        raise Error(
            "--compile does not support patch_sizes: each size would be compiled anew; omit --compile",
            code="request.conflict",
        )
    freeze(model, recipe.train, recipe.lora, recipe.seed)
    module = task.build(model)  # which may freeze more
    state = TrainState.start(runtime.place(module), recipe.optimizer)
    if type(task).before_update is not Task.before_update:
        state.optimizer.register_step_pre_hook(lambda *_: task.before_update(state.model, state.optimizer))
    if type(task).after_update is not Task.after_update:
        state.optimizer.register_step_post_hook(lambda *_: task.after_update(state.model))
    trained = {name for name, p in state.model.named_parameters() if p.requires_grad}
    state.average = {name: mean for name, mean in state.average.items() if name in trained}
    return state
