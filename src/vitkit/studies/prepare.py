"""From a request to a plan: data surveyed, steps timed, sizes and lengths that fit the budget."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from vitkit.data.decode import BadImage, decode
from vitkit.data.sources.source import Source
from vitkit.data.splits import complete
from vitkit.datasets.opening import open_data
from vitkit.errors import Error
from vitkit.metrics.cost import TRAINING, forward_flops
from vitkit.models.variants import configure, with_options
from vitkit.options import parse_budget, part_of
from vitkit.recipes.recipe import Recipe, only
from vitkit.report.terminal import duration
from vitkit.studies.scale import study as named_study
from vitkit.studies.setting import LEVELS, SETS, Setting
from vitkit.studies.study import Plan, Study, Trial
from vitkit.training.schedule import Duration, Schedule


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.begun = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.begun


@dataclass(frozen=True)
class Pace:
    """Seconds of a step and of looking at one image; and of both again, on batches that were kept."""

    step: float
    look: float
    step_again: float
    look_again: float


Paces = Mapping[Recipe, Pace]  # by kind of step
Measure = Callable[[Sequence[Recipe]], Paces]
FEWEST = 20  # steps below which a run says nothing
PASSES = (10, 60)  # over the data, as far as there is time: before models are made larger, and at most
STEPS = (200, 5000)  # between which the first of these is kept
SPARE = 0.85  # of a budget that is planned for
FIXED = 1.0  # seconds of a trial beside steps and evaluations: building, saving, few-shot solutions
SPLIT = 2e-5  # seconds for each image of a data set of which a part is held out, by content
DECIDING = (  # fields that decide what batches a trial sees
    "data", "subset", "seed", "image_size", "batch", "crop", "flip", "resize", "train_on", "val", "test"
)  # fmt: skip


@dataclass(frozen=True)
class Sight:
    """What was seen of a data set."""

    train: int
    test: int
    side: int  # the median shorter side of its images, in pixels
    seconds: float  # that it took to open


def kind_of(trial: Trial, trials: Mapping[str, Trial]) -> Recipe:
    """What decides how long a step takes, as a recipe; a trained model is as large as a fresh one."""
    first = trials[trial.needs].recipe if trial.needs else trial.recipe
    return replace(
        trial.recipe, name="pace", about="", model=first.model, model_options=first.model_options, seed=0,
        subset="", length=Duration(steps=1), schedule=Schedule(), fewshot="", patience=0, evaluations=0,
        val=0.0, rates=(), convolution_rates=(),
    )  # fmt: skip


def kinds(trials: Sequence[Trial]) -> list[Recipe]:
    named = {one.name: one for one in trials}
    return list(dict.fromkeys(kind_of(one, named) for one in trials))


def prices(trials: Sequence[Trial], paces: Paces, seen: Mapping[str, Sight]) -> dict[str, float]:
    """Seconds that each trial takes: its steps, the images that it looks at."""
    named = {one.name: one for one in trials}
    found: dict[str, float] = {}
    met: set[Recipe] = set()
    for one in trials:
        pace, batches = paces[kind_of(one, named)], batches_of(one.recipe)
        step, look = (pace.step_again, pace.look_again) if batches in met else (pace.step, pace.look)
        met.add(batches)
        r, data = one.recipe, seen[one.recipe.data]
        few = seen[r.fewshot] if r.fewshot else None
        looked = data.test + r.evaluations * r.val * data.train
        often = 1 + (r.evaluations if r.fewshot_when == "evaluations" else 0)
        looked += often * few.test if few else 0
        steps = r.length.in_steps(data.train, r.batch)
        found[one.name] = steps * step + looked * look + FIXED
    return found


def opening(trials: Sequence[Trial], seen: Mapping[str, Sight]) -> float:
    """Seconds in which a process opens all the data, once for all its trials."""
    places = {place for one in trials for place in (one.recipe.data, one.recipe.fewshot) if place}
    parted = {one.recipe.data for one in trials if one.recipe.val}
    return sum(seen[place].seconds for place in places) + sum(SPLIT * seen[place].train for place in parted)


def batches_of(recipe: Recipe) -> Recipe:
    """All that decides a recipe's batches: trials that agree in it see the same ones."""
    return only(recipe, DECIDING)


def makespan(trials: Sequence[Trial], price: Mapping[str, float], slots: int) -> float:
    """When the last trial ends if each free slot takes the next one that may begin."""
    free, ended = [0.0] * slots, dict[str, float]()
    waiting = list(trials)
    while waiting:
        slot = min(range(slots), key=lambda i: free[i])
        now = free[slot]
        ready = [one for one in waiting if not one.needs or ended.get(one.needs, now + 1) <= now]
        if not ready:  # until something that is needed ends
            free[slot] = min(t for t in ended.values() if t > now)
            continue
        free[slot] = ended[ready[0].name] = now + price[ready[0].name]
        waiting.remove(ready[0])
    return max(ended.values(), default=0.0)


def longest_first(trials: Sequence[Trial], price: Mapping[str, float]) -> list[Trial]:
    """In an order that leaves no long trial for the end; those that others need count with them."""
    after = {one.needs: 0.0 for one in trials if one.needs}
    for one in trials:
        if one.needs:
            after[one.needs] = max(after[one.needs], price[one.name])
    return sorted(trials, key=lambda one: (bool(one.needs), -(price[one.name] + after.get(one.name, 0.0))))


@dataclass(frozen=True)
class Fit:
    """What was chosen for a budget, and the time that it should take."""

    setting: Setting
    seconds: float


def fit(
    study: Study,
    setting: Setting,
    budget: float,
    slots: int,
    seen: Mapping[str, Sight],
    measure: Measure,
    levels: Sequence[int] = range(LEVELS),
    spent: Callable[[], float] = lambda: 0.0,
) -> Fit:
    """The largest models for which the budget allows some passes over the data, and as many steps as it does.

    If the smallest models do not fit, an error that says what budget would. `spent`: seconds that are gone.
    """
    per_pass = max(1.0, setting.images / setting.batch)
    enough = min(max(STEPS[0], round(PASSES[0] * per_pass)), STEPS[1])
    most = max(enough, round(PASSES[1] * per_pass))
    best: Fit | None = None
    for level in levels:
        here = replace(setting, level=level)
        paces = measure(kinds(study.make(here)))

        def seconds(steps: int, here: Setting = here, paces: Paces = paces) -> float:
            trials = study.make(replace(here, steps=steps))
            price = prices(trials, paces, seen)
            return opening(trials, seen) + makespan(longest_first(trials, price), price, slots)

        steps = most_steps(seconds, SPARE * budget - spent(), most)
        if steps < FEWEST and best is None:
            needed = (seconds(FEWEST) + spent()) / SPARE
            raise Error(
                f"{study.name} does not fit into {duration(budget)} on {slots} processes: its smallest plan, "
                f"{FEWEST} steps of the smallest models, takes {duration(needed)}; give --budget "
                f"{max(1, -(-int(needed) // 60))}min, fewer --seeds, or more --processes",
                code="study.value",
            )
        if best is None or steps >= enough:
            best = Fit(replace(here, steps=steps), seconds(steps))
        if steps < enough:
            break
    assert best is not None
    return best


def most_steps(seconds: Callable[[int], float], budget: float, most: int) -> int:
    """The largest number of steps, up to `most`, that stays within the budget; 0 if none does."""
    low, high = 0, most + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= budget else (low, middle)
    return low


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
    facts = describe_plan(request, found, trials, slots, seen)
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


def describe_plan(
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
