"""From a request to a plan: the data is looked at, sizes follow from it, and the budget decides the rest."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from vitkit.data.decode import BadImage, decode
from vitkit.data.sources import Source, open_data
from vitkit.data.splits import complete
from vitkit.errors import Error
from vitkit.evaluation.cost import TRAINING, forward_flops
from vitkit.models.variants import configure, with_options
from vitkit.options import parse_budget, part_of
from vitkit.recipes.recipe import Recipe
from vitkit.report.terminal import duration
from vitkit.studies.budget import Fit, Measure, Sight, fit, kind_of, longest_first
from vitkit.studies.catalogue import study as named_study
from vitkit.studies.drive import Stopwatch
from vitkit.studies.setting import LEVELS, SETS, Setting
from vitkit.studies.study import Plan, Study, Trial

SIDES = (16, 32, 64, 128)  # of images in miniature
BATCH = (32, 512)
LOOKED = 32  # images whose size is looked at


@dataclass(frozen=True, kw_only=True)
class Request:
    """What decides what a study comes to; a folder belongs to one."""

    study: str
    data: tuple[str, ...]
    downstream: str = ""
    budget: str = "20min"
    seeds: int = 3
    scale: str = "mini"
    image_size: int | None = None
    steps: int | None = None
    size: int | None = None
    set: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def __post_init__(self):
        named_study(self.study)
        parse_budget(self.budget)
        if not self.data:
            raise Error("--data is missing: give the data to train on", code="request.missing")
        if len(self.data) > 1 and self.study != "pretrain-sets":
            raise Error(
                f"{self.study} takes one data set; only pretrain-sets compares several",
                code="request.conflict",
            )
        if self.seeds < 1:
            raise Error(f"--seeds must be at least 1, not {self.seeds}")
        if self.scale not in ("mini", "paper"):
            raise Error(f"--scale must be mini or paper, not {self.scale!r}")
        if self.size is not None and not 0 <= self.size < LEVELS:
            raise Error(f"--size must be 0 to {LEVELS - 1}, not {self.size}")
        if self.rows and self.scale != "paper":
            raise Error(
                "--rows names rows of Table 3, which only --scale paper uses; give both, or neither",
                code="request.conflict",
            )
        if self.rows and (len(self.rows) != len(self.data) or set(self.rows) - set(SETS)):
            known = ", ".join(SETS)
            raise Error(f"--rows {' '.join(self.rows)}: give one of {known} for each of --data")

    def asked(self) -> dict[str, Any]:
        """As a plan keeps it."""
        given = asdict(self) | {"data": list(self.data), "set": list(self.set), "rows": list(self.rows)}
        return (
            given if self.rows else {k: v for k, v in given.items() if k != "rows"}
        )  # as older plans have it


def make_plan(
    request: Request, slots: int, measure: Measure, say: Callable[[str], None] = lambda text: None
) -> Plan:
    """Every trial, complete; what was chosen is told before anything starts."""
    study, clock = named_study(request.study), Stopwatch()
    places = dict.fromkeys((*request.data, *filter(None, [request.downstream])))
    seen = {place: survey(place) for place in places}
    setting = first_setting(request, study, seen)
    found = lengthened(request, study, setting, slots, seen, measure, clock)
    trials = study.make(found.setting)
    facts = told(request, found, trials, slots, seen)
    say(f"{study.name} ({study.shows}): {study.about}")
    say(in_words(facts))
    seen_once = found.setting.steps * found.setting.batch / max(1, found.setting.images)
    if seen_once < 1 and not found.setting.paper:
        say(f"only {seen_once:.0%} of one pass over the data: little will be seen; a larger --budget helps")
    return Plan(study=study.name, asked=request.asked(), chosen=facts, trials=tuple(trials))


def lengthened(
    request: Request,
    study: Study,
    setting: Setting,
    slots: int,
    seen: dict[str, Sight],
    measure: Measure,
    spent: Callable[[], float],
) -> Fit:
    """With sizes and steps: those that were given, the paper's own, or what the budget allows."""
    if setting.paper:
        return Fit(setting, 0.0)
    if request.steps is not None:
        return Fit(replace(setting, level=request.size or 0, steps=request.steps), 0.0)
    levels = range(LEVELS) if request.size is None else (request.size,)
    return fit(study, setting, parse_budget(request.budget), slots, seen, measure, levels, spent)


def survey(place: str) -> Sight:
    """A data set opened once: how many images, how large, how long it takes."""
    begun = time.monotonic()
    splits = complete(open_data(place), val=0.0)
    seconds = time.monotonic() - begun
    train = splits["train"]
    return Sight(len(train), len(splits["test"]), round(median(sides(train))), seconds)


def sides(source: Source) -> list[int]:
    """The shorter sides of some images, spread over the data."""
    found = []
    for i in range(0, len(source), max(1, len(source) // LOOKED)):
        try:
            content = source.fetch(i)
            found.append(min((decode(content) if isinstance(content, bytes) else content).shape[:2]))
        except BadImage:
            continue
    return found or [SIDES[-1]]


def first_setting(request: Request, study: Study, seen: dict[str, Sight]) -> Setting:
    """Image and patch size as the data has them, a batch for so many images."""
    data = seen[request.data[0]]
    pixels = request.image_size or side_for(data.side, study.convolutions)
    if pixels % 16:
        raise Error(f"--image-size {pixels}: give a multiple of 16, as in {max(16, pixels // 16 * 16)}")
    patch = 4
    while patch < 16 and patch * 16 <= pixels:  # eight tokens along a side, if there are pixels for them
        patch *= 2
    tuned = seen[request.downstream or request.data[0]]
    batch = min(max(BATCH[0], 2 ** max(0, (data.train // 100).bit_length() - 1)), BATCH[1])
    return Setting(
        data=request.data, downstream=request.downstream, seeds=request.seeds, scale=request.scale,
        pixels=pixels, patch=patch, batch=batch, images=data.train,
        sizes=tuple(seen[place].train for place in request.data), rows=request.rows,
        tuned_on=tuned.train, tuned_side=tuned.side, changes=request.set,
    )  # fmt: skip


def side_for(side: int, convolutions: bool) -> int:
    """The largest of some sizes that the images have; a ResNet's root takes three quarters of each side."""
    pixels = max((size for size in SIDES if size <= side), default=SIDES[0])
    return max(64, pixels) if convolutions else pixels


def told(
    request: Request, found: Fit, trials: Sequence[Trial], slots: int, seen: dict[str, Sight]
) -> dict[str, Any]:
    """What a plan comes to, for the page and for whoever asks first."""
    s = found.setting
    named = {one.name: one for one in trials}
    images = {place: sight.train for place, sight in seen.items()}
    total = sum(operations(one, named, images) for one in trials)
    mini = {} if s.paper else {"image_size": s.pixels, "patch": s.patch, "size": s.level, "steps": s.steps}
    return mini | {
        "batch": trials[0].recipe.batch, "trials": len(trials), "seeds": s.seeds,
        "train_images": images, "exaFLOPs": total / 1e18, "processes": slots, "budget": request.budget,
        "expected_seconds": found.seconds or None,
    } | ({"recipes": recipes_of(trials)} if s.paper else {})  # fmt: skip


def recipes_of(trials: Sequence[Trial]) -> list[str]:
    """At the paper's scale: for each data set, and each part of it, the rows of the tables that are used."""
    used: dict[str, dict[str, None]] = {}
    for one in trials:
        part = f"{one.recipe.subset} of " if one.recipe.subset else ""
        for recipe in one.compared.values() or (one.recipe,):
            used.setdefault(f"{part}{one.recipe.data}", {})[recipe.name] = None
    return [f"{place}: {', '.join(names)}" for place, names in used.items()]


def in_words(facts: dict[str, Any]) -> str:
    """A plan in a line."""
    words = [f"{facts['trials']} trials over {facts['seeds']} seeds"]
    if "steps" in facts:
        words.append(f"{facts['steps']} steps of {facts['batch']} images of {facts['image_size']} pixels")
        words.append(f"models of size {facts['size']}, patches of {facts['patch']}")
    words.append(f"{facts['exaFLOPs']:.3g} exaFLOPs in all")
    words += [f"recipes for {one}" for one in facts.get("recipes", ())]
    if facts["expected_seconds"]:
        words.append(f"about {duration(facts['expected_seconds'])} on {facts['processes']} processes")
    return "; ".join(words)


def ordered(plan: Plan) -> list[Trial]:
    """The order in which trials begin: the costliest first, by their operations."""
    named = {one.name: one for one in plan.trials}
    images = plan.chosen["train_images"]
    return longest_first(plan.trials, {one.name: operations(one, named, images) for one in plan.trials})


def operations(one: Trial, trials: Mapping[str, Trial], images: Mapping[str, int]) -> float:
    """Of a whole training, forward and backward, by formula; of a protocol, with all that it compares."""
    if one.compared:
        # the final run is counted as the costliest of the candidates
        each = [once(one, recipe, trials, images) for recipe in one.compared.values()]
        return sum(each) * (len(each) > 1) + max(each)
    return once(one, one.recipe, trials, images)


def once(one: Trial, recipe: Recipe, trials: Mapping[str, Trial], images: Mapping[str, int]) -> float:
    kind = kind_of(replace(one, recipe=recipe), trials)
    config = with_options(configure(kind.model, image_size=kind.image_size), kind.model_options)
    part = part_of(recipe.subset)
    seen = part.get("count") or part.get("fraction", 1.0) * images[recipe.data]
    steps = recipe.length.in_steps(round(seen), recipe.batch)
    return TRAINING * forward_flops(config) * steps * recipe.batch
