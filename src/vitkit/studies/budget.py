"""A time to sizes and lengths: every kind of step is timed, then the largest plan that fits is chosen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vitkit.errors import Error
from vitkit.recipes.recipe import Recipe, only
from vitkit.report.terminal import duration
from vitkit.studies.setting import LEVELS, Setting
from vitkit.studies.study import Study, Trial
from vitkit.training.schedule import Duration, Schedule


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
