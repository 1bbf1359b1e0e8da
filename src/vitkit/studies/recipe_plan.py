"""The plan of the study `recipes`: trials of fixed length, of which the budget limits how many are run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitkit.errors import Error, did_you_mean
from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import Opener
from vitkit.studies.prepare import Request
from vitkit.studies.recipe_changes import BASE, PIXELS, base_recipe, labels
from vitkit.studies.scale import study as named_study
from vitkit.studies.setting import Setting
from vitkit.studies.study import Plan, Trial


def plan_recipes(request: Request, slots: int, opener: Opener, log: Callable[[str], None]) -> Plan:
    """Open the data, whose size determines the lengths, and list all trials in the order of their runs."""
    study = named_study(request.study)
    setting = Setting(
        data=request.data, downstream="", weights=request.weights, seeds=request.seeds,
        pixels=request.image_size or PIXELS, steps=request.steps or 0, changes=request.set,
    )  # fmt: skip
    sizes = tuple(len(opener(recipe, None)["train"]) for recipe in opened(setting))
    setting = replace(setting, sizes=sizes, images=sizes[0])
    trials = tuple(study.make(setting))
    changes = list(dict.fromkeys(str(trial.factors["change"]) for trial in trials))
    chosen = {
        "weights": request.weights, "image_size": setting.pixels, "trials": len(trials),
        "seeds": request.seeds, "train_images": dict(zip(labels(request.data), sizes, strict=True)),
        "changes": changes, "processes": slots,
    }  # fmt: skip
    log(f"{study.name}: {study.about}")
    log(f"{len(trials)} trials: {len(changes) - 1} changes and the base recipe, data sets: "
        f"{len(sizes)}, seeds: {request.seeds}; no trial starts after {request.budget}")  # fmt: skip
    return Plan(study=study.name, asked=request.to_json(), chosen=chosen, trials=trials)


def opened(s: Setting) -> list[Recipe]:
    """A recipe for each data set, to open it."""
    return [base_recipe(s, place, images=1, seed=0) for place in s.data]


def select(trials: Sequence[Trial], only: Sequence[str]) -> list[Trial]:
    """The trials of the base recipe, and of the changes whose name contains one of the given words."""
    names = list(dict.fromkeys(str(trial.factors.get("change", "")) for trial in trials))
    if only and names == [""]:
        raise Error("--only selects changes of the study recipes; omit it", code="request.conflict")
    for word in only:
        if not any(word in name for name in names):
            raise Error(
                f"--only {word!r}: no such change;{did_you_mean(word, names)} known: {', '.join(names)}",
                code="study.value",
            )
    chosen = {name for name in names if not only or name == BASE or any(word in name for word in only)}
    return [trial for trial in trials if str(trial.factors.get("change", "")) in chosen]
