"""The study `recipes`: fine-tuning with one change at a time to a base recipe, on several data sets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.datasets.opening import data_and_part
from vitkit.recipes.recipe import Recipe, override
from vitkit.studies.setting import Setting
from vitkit.studies.study import Picture, Study, Trial, make_trial
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.schedule import Duration, Schedule

EPOCHS, LEAST = 15, 20_000  # the length of a run: epochs, and the images that it sees at least
BATCH = (8, 512)  # limits of the batch size; between them, a small data set has about eight batches
WARMUP = 0.1  # share of the steps
PIXELS = 224  # default image size
BASE = "base"


@dataclass(frozen=True)
class Change:
    """What a setting changes in the base recipe."""

    fields: tuple[str, ...] = ()  # FIELD=VALUE
    length: float = 1.0  # times the steps
    warmup: float = WARMUP  # share of the steps


SGD = ("optimizer.kind=sgd", "optimizer.layer_decay=1", "optimizer.weight_decay=0")
PAPER = ("crop=inception", "crop_area=0.05", "interpolation=bilinear", "mixup=0", "label_smoothing=0", *SGD)
CHANGES = {
    BASE: Change(),
    "paper": Change((*PAPER, "schedule.rate=0.01")),
    "paper, rate 0.03": Change((*PAPER, "schedule.rate=0.03")),
    "sgd": Change((*SGD, "schedule.rate=0.01")),
    "rate 2e-4": Change(("schedule.rate=2e-4",)),
    "rate 1e-3": Change(("schedule.rate=1e-3",)),
    "rate 2e-3": Change(("schedule.rate=2e-3",)),
    "layer decay 0.65": Change(("optimizer.layer_decay=0.65",)),
    "layer decay 0.85": Change(("optimizer.layer_decay=0.85",)),
    "no layer decay": Change(("optimizer.layer_decay=1",)),
    "no weight decay": Change(("optimizer.weight_decay=0",)),
    "weight decay 0.3": Change(("optimizer.weight_decay=0.3",)),
    "no warm-up": Change(warmup=0.0),
    "warm-up 30 %": Change(warmup=0.3),
    "half as long": Change(length=0.5),
    "twice as long": Change(length=2.0),
    "no mixup": Change(("mixup=0",)),
    "mixup 0.8": Change(("mixup=0.8",)),
    "cutmix 1": Change(("mixup=0", "cutmix=1")),
    "mixup 0.2 and cutmix 1": Change(("cutmix=1",)),
    "no smoothing": Change(("label_smoothing=0",)),
    "crop area 0.08": Change(("crop_area=0.08",)),
    "crop area 0.6": Change(("crop_area=0.6",)),
    "inception crop": Change(("crop=inception", "crop_area=0.05")),
    "bilinear": Change(("interpolation=bilinear",)),
    "randaugment 2,10": Change(("randaugment=2,10",)),
    "3-augment": Change(("three_augment=yes", "color_jitter=0.3")),
    "erasing 0.25": Change(("erasing=0.25",)),
    "stochastic depth 0.1": Change(("stochastic_depth=0.1",)),
    "average 0.99": Change(("optimizer.average=0.99",)),
    "average 0.999": Change(("optimizer.average=0.999",)),
    "least-squares head": Change(("head_init=least-squares",)),
    "balanced sampling": Change(("sampling=balanced",)),
    "balanced class weights": Change(("class_weights=balanced",)),
    "image size 160": Change(("image_size=160,160",)),
    "image size 224": Change(("image_size=224,224",)),
    "centre crop in evaluation": Change(("evaluation_crop=centre",)),
}


def base_recipe(s: Setting, place: str, images: int, seed: int) -> Recipe:
    """The recipe that the changes start from; `--set` applies to it, so a change takes precedence."""
    data, part = data_and_part(place)
    length = Duration(steps=s.steps) if s.steps else Duration(epochs=max(EPOCHS, LEAST / images))
    eighth = 2 ** (max(1, images // 8).bit_length() - 1)  # rounded down to a power of two
    recipe = Recipe(
        name="study", about="AdamW with layer-wise decay of the rate, RandomResizedCrop, Mixup, smoothing",
        data=data, weights=s.weights, seed=seed, image_size=(s.pixels, s.pixels), **part,
        crop="resized", crop_area=0.3, interpolation="bicubic", mixup=0.2, label_smoothing=0.1,
        batch=max(BATCH[0], min(BATCH[1], eighth)), length=length, schedule=Schedule(rate=5e-4),
        optimizer=OptimizerConfig(kind="adam", weight_decay=0.05, layer_decay=0.75, clip=1.0),
        keep="last", evaluations=0,
    )  # fmt: skip
    return override(recipe, s.changes)


def changed(base: Recipe, change: Change, images: int) -> Recipe:
    """The base recipe with a change; its length in steps, of which the warm-up is a share."""
    steps = max(1, round(change.length * base.length.in_steps(images, base.batch)))
    schedule = replace(base.schedule, warmup=round(change.warmup * steps))
    return override(replace(base, length=Duration(steps=steps), schedule=schedule), change.fields)


def recipes(s: Setting) -> list[Trial]:
    """Every change on every data set, without those that change nothing; a whole seed before the next."""
    names, trials = labels(s.data), list[Trial]()
    for seed in range(s.seeds):
        for name, change in CHANGES.items():
            for place, label, images in zip(s.data, names, s.sizes, strict=True):
                base = base_recipe(s, place, images, seed)
                recipe = changed(base, change, images)
                if name == BASE or recipe != changed(base, Change(), images):
                    factors = {"change": name, "data": label}
                    trials.append(make_trial(factors, recipe, keep_model=False))
    return trials


def labels(places: Sequence[str]) -> list[str]:
    """A short name for each data set with its part: cifar10 10000; the whole place if names are equal."""
    short = [" ".join([Path(data_and_part(place)[0]).stem, *parts(place)]) for place in places]
    long = [re.sub(r"[^\w.%=,/-]+", " ", place).strip() for place in places]
    return short if len(set(short)) == len(short) else long


def parts(place: str) -> list[str]:
    data = data_and_part(place)[0]
    return [place[len(data) + 1 :]] if data != place else []


STUDY = Study(
    name="recipes", shows="fine-tuning", make=recipes, score="top1", claims=(), base={"change": BASE},
    about="which settings of fine-tuning matter: one change at a time to a base recipe, on several data sets",
    pictures=(Picture(title="difference from the base recipe, with the deviation over seeds", x="change",
                      lines=("data",), kind="differences"),),
)  # fmt: skip
