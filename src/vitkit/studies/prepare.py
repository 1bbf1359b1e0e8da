"""From a request to a plan: survey the data, time the steps, and choose sizes that fit the budget."""

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
from vitkit.models.variants import Config, configure, skeleton, with_options
from vitkit.options import parse_budget, part_of
from vitkit.recipes.recipe import Recipe, only
from vitkit.report.terminal import duration
from vitkit.studies.scale import study as named_study
from vitkit.studies.setting import LEVELS, SETS, Setting
from vitkit.studies.study import Plan, Study, Trial
from vitkit.training.schedule import Duration, Schedule


class Stopwatch:
    """The seconds since its creation."""

    def __init__(self) -> None:
        self.start_time = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.start_time


@dataclass(frozen=True)
class Timing:
    """Seconds for a training step and for evaluating one image, without and with cached batches."""

    step: float
    image: float
    cached_step: float
    cached_image: float


Timings = Mapping[Recipe, Timing]  # by kind of step, see `kind_of`
Measure = Callable[[Sequence[Recipe]], Timings]
MIN_STEPS = 20  # shorter runs learn nothing
PASSES = (10, 60)  # epochs to reach before models get larger, and at most
STEPS = (200, 5000)  # limits of the steps for the first of these
BUDGET_SHARE = 0.85  # share of the budget to plan for
TRIAL_OVERHEAD = 1.0  # seconds of a trial besides steps and evaluations: building, saving, few-shot solutions
SPLIT_SECONDS = 2e-5  # per image of a data set, to hold out a validation split by content
BATCH_FIELDS = (  # recipe fields that determine the batches of a trial
    "data", "subset", "seed", "image_size", "batch", "crop", "flip", "resize", "train_on", "val", "test"
)  # fmt: skip


@dataclass(frozen=True)
class Survey:
    """The facts about a data set that a plan depends on."""

    train: int  # images
    test: int
    side: int  # median shorter side of the images in pixels
    seconds: float  # time to open it


def kind_of(trial: Trial, trials: Mapping[str, Trial]) -> Recipe:
    """The recipe reduced to what determines the time of a step; trials of one kind are timed once."""
    first = trials[trial.needs].recipe if trial.needs else trial.recipe
    return replace(
        trial.recipe, name="pace", about="", model=first.model, model_options=first.model_options, seed=0,
        subset="", length=Duration(steps=1), schedule=Schedule(), fewshot="", patience=0, evaluations=0,
        val=0.0, rates=(), convolution_rates=(),
    )  # fmt: skip


def kinds(trials: Sequence[Trial]) -> list[Recipe]:
    by_name = {trial.name: trial for trial in trials}
    return list(dict.fromkeys(kind_of(trial, by_name) for trial in trials))


def trial_seconds(
    trials: Sequence[Trial], timings: Timings, surveys: Mapping[str, Survey]
) -> dict[str, float]:
    """The expected seconds of each trial: its steps and its evaluations."""
    by_name = {trial.name: trial for trial in trials}
    seconds: dict[str, float] = {}
    cached: set[Recipe] = set()
    for trial in trials:
        timing, batches = timings[kind_of(trial, by_name)], batch_key(trial.recipe)
        step, image = timing.step, timing.image
        if batches in cached:
            step, image = timing.cached_step, timing.cached_image
        cached.add(batches)
        r, data = trial.recipe, surveys[trial.recipe.data]
        images = data.test + r.evaluations * r.val * data.train
        if r.fewshot in surveys:
            fewshot_evaluations = 1 + (r.evaluations if r.fewshot_when == "evaluations" else 0)
            images += fewshot_evaluations * surveys[r.fewshot].test
        steps = r.length.in_steps(data.train, r.batch)
        seconds[trial.name] = steps * step + images * image + TRIAL_OVERHEAD
    return seconds


def opening_seconds(trials: Sequence[Trial], surveys: Mapping[str, Survey]) -> float:
    """The seconds that a process needs to open all data, once for all its trials."""
    paths = {
        path for trial in trials for path in (trial.recipe.data, trial.recipe.fewshot) if path in surveys
    }
    split = {trial.recipe.data for trial in trials if trial.recipe.val}
    opening = sum(surveys[path].seconds for path in paths)
    return opening + sum(SPLIT_SECONDS * surveys[path].train for path in split)


def batch_key(recipe: Recipe) -> Recipe:
    """The recipe reduced to what determines its batches; trials with equal keys use the same batches."""
    return only(recipe, BATCH_FIELDS)


def makespan(trials: Sequence[Trial], seconds: Mapping[str, float], slots: int) -> float:
    """When the last trial ends if each free slot takes the next trial that is ready."""
    free, ended = [0.0] * slots, dict[str, float]()
    waiting = list(trials)
    while waiting:
        slot = min(range(slots), key=lambda i: free[i])
        now = free[slot]
        ready = [trial for trial in waiting if not trial.needs or ended.get(trial.needs, now + 1) <= now]
        if not ready:  # idle until the next trial ends
            free[slot] = min(t for t in ended.values() if t > now)
            continue
        free[slot] = ended[ready[0].name] = now + seconds[ready[0].name]
        waiting.remove(ready[0])
    return max(ended.values(), default=0.0)


def longest_first(trials: Sequence[Trial], seconds: Mapping[str, float]) -> list[Trial]:
    """Order trials by decreasing time, including the longest trial that waits for each."""
    after = {trial.needs: 0.0 for trial in trials if trial.needs}
    for trial in trials:
        if trial.needs:
            after[trial.needs] = max(after[trial.needs], seconds[trial.name])

    def total(trial: Trial) -> float:
        return seconds[trial.name] + after.get(trial.name, 0.0)

    return sorted(trials, key=lambda trial: (bool(trial.needs), -total(trial)))


@dataclass(frozen=True)
class Fit:
    """The setting that fits a budget, and its expected seconds."""

    setting: Setting
    seconds: float


def fit(
    study: Study,
    setting: Setting,
    budget: float,
    slots: int,
    surveys: Mapping[str, Survey],
    measure: Measure,
    levels: Sequence[int] = range(LEVELS),
    spent: Callable[[], float] = lambda: 0.0,
) -> Fit:
    """Choose the largest models that the budget trains for enough epochs, and as many steps as fit.

    spent: the seconds used so far. Raises an error with the budget needed if the smallest models do not fit.
    """
    epoch = max(1.0, setting.images / setting.batch)
    enough = min(max(STEPS[0], round(PASSES[0] * epoch)), STEPS[1])
    most = max(enough, round(PASSES[1] * epoch))
    best: Fit | None = None
    for level in levels:
        leveled = replace(setting, level=level)
        timings = measure(kinds(study.make(leveled)))

        def seconds(steps: int, setting: Setting = leveled, timings: Timings = timings) -> float:
            trials = study.make(replace(setting, steps=steps))
            each = trial_seconds(trials, timings, surveys)
            return opening_seconds(trials, surveys) + makespan(longest_first(trials, each), each, slots)

        steps = most_steps(seconds, BUDGET_SHARE * budget - spent(), most)
        if steps < MIN_STEPS and best is None:
            needed = (seconds(MIN_STEPS) + spent()) / BUDGET_SHARE
            raise Error(
                f"{study.name} does not fit into {duration(budget)} on {slots} processes: its smallest plan, "
                f"{MIN_STEPS} steps of the smallest models, takes {duration(needed)}; use --budget "
                f"{max(1, -(-int(needed) // 60))}min, fewer --seeds, or more --processes",
                code="study.value",
            )
        if best is None or steps >= enough:
            best = Fit(replace(leveled, steps=steps), seconds(steps))
        if steps < enough:
            break
    assert best is not None
    return best


def most_steps(seconds: Callable[[int], float], budget: float, most: int) -> int:
    """The largest number of steps up to `most` that fits the budget; 0 if none does."""
    low, high = 0, most + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= budget else (low, middle)
    return low


SIDES = (16, 32, 64, 128)  # image sizes of miniatures
BATCH = (32, 512)  # limits of the batch size
SAMPLED = 32  # images whose size is read


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that determine the results of a study; a study folder belongs to one request."""

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
    weights: str = ""

    def __post_init__(self):
        parse_budget(self.budget)
        if not self.data:
            raise Error("--data is missing; give the data to train on", code="request.missing")
        self.check_flags()
        if self.seeds < 1:
            raise Error(f"--seeds must be at least 1, not {self.seeds}")
        if self.scale not in ("mini", "paper"):
            raise Error(f"--scale must be mini or paper, not {self.scale!r}")
        if self.size is not None and not 0 <= self.size < LEVELS:
            raise Error(f"--size must be 0 to {LEVELS - 1}, not {self.size}")
        if self.rows and self.scale != "paper":
            raise Error(
                "--rows selects rows of Table 3 and needs --scale paper",
                code="request.conflict",
            )
        if self.rows and (len(self.rows) != len(self.data) or set(self.rows) - set(SETS)):
            known = ", ".join(SETS)
            raise Error(f"--rows {' '.join(self.rows)}: expected one of {known} for each --data")

    def check_flags(self) -> None:
        """Refuse flags that the study does not use."""
        if named_study(self.study).base:
            if not self.weights:
                raise Error(f"{self.study} fine-tunes weights; give --weights", code="request.missing")
            unused = {"--downstream": self.downstream, "--size": self.size is not None, "--rows": self.rows,
                      "--scale paper": self.scale == "paper"}  # fmt: skip
        else:
            several = len(self.data) > 1 and self.study != "pretrain-sets"
            without = self.weights and not named_study(self.study).teacher
            unused = {"--weights": without, "several --data; pretrain-sets and recipes do": several}
        if refused := [flag for flag, given in unused.items() if given]:
            raise Error(f"the study {self.study} does not take {refused[0]}", code="request.conflict")

    def to_json(self) -> dict[str, Any]:
        """The request as plan.json stores it; empty `rows` and `weights` are left out, as in older plans.

        The budget of trials of fixed length decides when to stop, and may change.
        """
        values = asdict(self) | {"data": list(self.data), "set": list(self.set), "rows": list(self.rows)}
        optional = {"rows": self.rows, "weights": self.weights, "budget": not named_study(self.study).base}
        return {name: value for name, value in values.items() if optional.get(name, True)}


def make_plan(
    request: Request, slots: int, measure: Measure, log: Callable[[str], None] = lambda text: None
) -> Plan:
    """Choose sizes for a request and list all trials; log the choice before anything starts."""
    study, clock = named_study(request.study), Stopwatch()
    paths = dict.fromkeys((*request.data, *filter(None, [request.downstream])))
    surveys = {path: survey(path) for path in paths}
    setting = base_setting(request, study, surveys)
    best = choose_fit(request, study, setting, slots, surveys, measure, clock)
    trials = study.make(best.setting)
    facts = describe_plan(request, best, trials, slots, surveys)
    log(f"{study.name} ({study.shows}): {study.about}")
    log(plan_line(facts))
    for note in (left_out := study.notes(best.setting)):
        log(note)
    facts |= {"notes": left_out} if left_out else {}
    epochs = best.setting.steps * best.setting.batch / max(1, best.setting.images)
    if epochs < 1 and not best.setting.paper:
        flag = "--budget" if request.steps is None else "--steps"
        log(f"training covers only {epochs:.0%} of an epoch, too little for clear results; raise {flag}")
    return Plan(study=study.name, asked=request.to_json(), chosen=facts, trials=tuple(trials))


def choose_fit(
    request: Request,
    study: Study,
    setting: Setting,
    slots: int,
    surveys: dict[str, Survey],
    measure: Measure,
    spent: Callable[[], float],
) -> Fit:
    """Set sizes and steps: as requested, as in the paper, or as the budget allows."""
    if setting.paper:
        return Fit(setting, 0.0)
    if request.steps is not None:
        return Fit(replace(setting, level=request.size or 0, steps=request.steps), 0.0)
    levels = range(LEVELS) if request.size is None else (request.size,)
    return fit(study, setting, parse_budget(request.budget), slots, surveys, measure, levels, spent)


def survey(path: str) -> Survey:
    """Open a data set once to learn the number and size of its images and the time to open it."""
    clock = Stopwatch()
    splits = complete(open_data(path), val=0.0)
    seconds = clock()
    train = splits["train"]
    return Survey(len(train), len(splits["test"]), round(median(sides(train))), seconds)


def sides(source: Source) -> list[int]:
    """The shorter sides of some images, sampled evenly."""
    lengths = []
    for i in range(0, len(source), max(1, len(source) // SAMPLED)):
        try:
            content = source.fetch(i)
            lengths.append(min((decode(content) if isinstance(content, bytes) else content).shape[:2]))
        except BadImage:
            continue
    return lengths or [SIDES[-1]]


def base_setting(request: Request, study: Study, surveys: dict[str, Survey]) -> Setting:
    """Choose image size, patch size and batch size for the data."""
    data = surveys[request.data[0]]
    pixels = request.image_size or side_for(data.side, study.convolutions)
    if pixels % 16:
        raise Error(f"--image-size {pixels}: expected a multiple of 16, such as {max(16, pixels // 16 * 16)}")
    patch = 4
    while patch < 16 and patch * 16 <= pixels:  # at least eight tokens along a side, if possible
        patch *= 2
    downstream = surveys[request.downstream or request.data[0]]
    batch = min(max(BATCH[0], 2 ** max(0, (data.train // 100).bit_length() - 1)), BATCH[1])
    return Setting(
        data=request.data, downstream=request.downstream, seeds=request.seeds, scale=request.scale,
        pixels=pixels, patch=patch, batch=batch, images=data.train,
        sizes=tuple(surveys[path].train for path in request.data), rows=request.rows,
        downstream_images=downstream.train, downstream_side=downstream.side, changes=request.set,
        weights=request.weights,
    )  # fmt: skip


def side_for(side: int, convolutions: bool) -> int:
    """The largest miniature size that the images have; at least 64 for ResNets, which downsample early."""
    pixels = max((size for size in SIDES if size <= side), default=SIDES[0])
    return max(64, pixels) if convolutions else pixels


def describe_plan(
    request: Request, best: Fit, trials: Sequence[Trial], slots: int, surveys: dict[str, Survey]
) -> dict[str, Any]:
    """The `chosen` part of plan.json: sizes, trials, compute and expected time."""
    s = best.setting
    by_name = {trial.name: trial for trial in trials}
    images = {path: facts.train for path, facts in surveys.items()}
    total = sum(trial_flops(trial, by_name, images) for trial in trials)
    mini = {} if s.paper else {"image_size": s.pixels, "patch": s.patch, "size": s.level, "steps": s.steps}
    return mini | {
        "batch": trials[0].recipe.batch, "trials": len(trials), "seeds": s.seeds,
        "train_images": images, "exaFLOPs": total / 1e18, "processes": slots, "budget": request.budget,
        "expected_seconds": best.seconds or None,
    } | ({"recipes": recipes_of(trials)} if s.paper else {})  # fmt: skip


def recipes_of(trials: Sequence[Trial]) -> list[str]:
    """At the paper's scale, the names of the recipes that are used for each data set and subset."""
    used: dict[str, dict[str, None]] = {}
    for trial in trials:
        subset = f"{trial.recipe.subset} of " if trial.recipe.subset else ""
        for recipe in trial.compared.values() or (trial.recipe,):
            used.setdefault(f"{subset}{trial.recipe.data}", {})[recipe.name] = None
    return [f"{data}: {', '.join(names)}" for data, names in used.items()]


def plan_line(facts: dict[str, Any]) -> str:
    """A plan in one line."""
    parts = [f"{facts['trials']} trials over {facts['seeds']} seeds"]
    if "steps" in facts:
        parts.append(f"{facts['steps']} steps of {facts['batch']} images of {facts['image_size']} pixels")
        parts.append(f"models of size {facts['size']} with {facts['patch']}-pixel patches")
    parts.append(f"{facts['exaFLOPs']:.3g} exaFLOPs in total")
    parts += [f"recipes for {names}" for names in facts.get("recipes", ())]
    if facts["expected_seconds"]:
        parts.append(f"about {duration(facts['expected_seconds'])} on {facts['processes']} processes")
    return "; ".join(parts)


def run_order(plan: Plan) -> list[Trial]:
    """The trials in the order in which they start: the most compute first; of fixed length, as planned."""
    if named_study(plan.study).base:
        return list(plan.trials)
    by_name = {trial.name: trial for trial in plan.trials}
    images = plan.chosen["train_images"]
    flops = {trial.name: trial_flops(trial, by_name, images) for trial in plan.trials}
    return longest_first(plan.trials, flops)


def trial_flops(trial: Trial, trials: Mapping[str, Trial], images: Mapping[str, int]) -> float:
    """The training FLOPs of a trial by formula, including all candidates of a protocol."""
    if trial.compared:
        # the final run counts as much as the most expensive candidate
        flops = [run_flops(trial, recipe, trials, images) for recipe in trial.compared.values()]
        return sum(flops) * (len(flops) > 1) + max(flops)
    return run_flops(trial, trial.recipe, trials, images)


def run_flops(trial: Trial, recipe: Recipe, trials: Mapping[str, Trial], images: Mapping[str, int]) -> float:
    kind = kind_of(replace(trial, recipe=recipe), trials)
    config = with_options(configure(kind.model, image_size=kind.image_size), kind.model_options)
    part = part_of(recipe.subset)
    train_images = part.get("count") or part.get("fraction", 1.0) * images[recipe.data]
    steps = recipe.length.in_steps(round(train_images), recipe.batch)
    return passes_of(recipe, config) * forward_flops(config) * steps * recipe.batch


def passes_of(recipe: Recipe, config: Config) -> float:
    """What a step costs an image, in forward passes: of DINO many more than of a classifier."""
    task = recipe.task
    passes = None if task.labelled else task.passes(skeleton(task.configure(config)))
    return TRAINING if passes is None else passes
