"""The data types of a study: trials, claims, figures, and the plan that a study folder stores."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vitkit.recipes.recipe import Recipe, from_table, to_table
from vitkit.studies.setting import Setting

Factor = str | int | float
Factors = Mapping[str, Factor]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a study: the values of the varied factors, its recipe, and the trial it starts from."""

    name: str
    factors: dict[str, Factor]
    recipe: Recipe
    needs: str = ""  # the trial whose model it fine-tunes
    resize: str = ""  # how the position embeddings of that model are resized
    # candidate recipes, of which the protocol selects one on validation images; empty: only `recipe`
    compared: dict[str, Recipe] = field(default_factory=dict)
    keep_model: bool = True  # in its folder
    frozen: str = ""  # the data on which its model's features are scored; empty: none
    attention: str = ""  # the data on which its model's attention distance is measured; empty: none


def make_trial(
    factors: Factors,
    recipe: Recipe,
    *,
    needs: str = "",
    resize: str = "",
    compared: Mapping[str, Recipe] | None = None,
    keep_model: bool = True,
    frozen: str = "",
    attention: str = "",
) -> Trial:
    """Build a trial whose name consists of its factors and the recipe's seed."""
    parts = [f"{name}={value}" for name, value in factors.items()] + [f"seed={recipe.seed}"]
    name = ",".join(parts).replace("/", "-").replace(" ", "-").replace("%", "pc")
    return Trial(name=name, factors=dict(factors), recipe=recipe, needs=needs, resize=resize,
                 compared=dict(compared or {}), keep_model=keep_model, frozen=frozen,
                 attention=attention)  # fmt: skip


RELATIONS = ("above", "not below", "equal")
MEASURES = ("score", "compute", "crossing", "data")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper as a comparison of the mean scores of two settings.

    right     None: zero
    relation  left is "above" right, "not below" it by more than `margin`, or "equal" to it within `margin`
    baseline  the two sides in another setting; then the gains over the baseline are compared
    measure   score
              compute: log2 of the right side's compute over the left's at equal score
              crossing: over the column `along`, left is below right at first and above it at last
              data: left, at one value of `along`, is worth more than `least` times as much of it on the right
    best      a factor of which each side takes its best value, such as the learning rate
    score     the column to compare, if it is not the study's score
    printed   the paper's own value, or the ends of its range: points, or times
    source    where the paper has it
    """

    text: str
    left: dict[str, Factor]
    right: dict[str, Factor] | None
    relation: str = "above"
    margin: float = 0.01
    baseline: tuple[dict[str, Factor], dict[str, Factor]] | None = None
    measure: str = "score"
    best: str = ""
    along: str = "train_images"
    least: float = 2.0
    score: str = ""
    unit: str = "points"
    printed: tuple[float, ...] = ()
    source: str = ""

    def __post_init__(self):
        if self.relation not in RELATIONS or self.measure not in MEASURES:
            raise ValueError(f"relation is one of {RELATIONS}, and measure one of {MEASURES}: {self}")
        if self.right is None and (self.measure != "score" or self.baseline):
            raise ValueError(f"only a score is compared with zero: {self}")

    @property
    def limits(self) -> tuple[float, float]:
        """Between which the interval of the difference must lie."""
        least = 0.0 if self.relation == "above" else -self.margin
        return least, self.margin if self.relation == "equal" else math.inf


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure: a column of the table over another, with one line for each value of some factors.

    kind: lines over numbers, bars over settings, history over training steps, similarity of the position
    embeddings (Fig. 10), or differences of changes from the base of a study.
    """

    title: str
    x: str
    lines: tuple[str, ...]
    y: str = "score"
    kind: str = "lines"
    x_label: str = ""
    log_x: bool = False
    where: dict[str, Factor] = field(default_factory=dict)
    band: dict[str, Factor] = field(default_factory=dict)  # for bars: settings drawn as a shaded range


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study, usually of the paper: how to make its trials, and how to analyse their table."""

    name: str
    shows: str  # the figure or table of the paper that it reproduces
    about: str
    make: Callable[[Setting], list[Trial]]
    score: str  # the column to compare: top1 or fewshot_mean
    claims: tuple[Claim, ...]
    pictures: tuple[Picture, ...]
    fitted: tuple[str, ...] = ()  # factors; a scaling law is fitted for each of their settings
    # settings whose score is predicted from the others before their trials start
    predicted: dict[str, Factor] = field(default_factory=dict)
    convolutions: bool = False  # includes ResNets, which need larger images
    paper: tuple[Claim, ...] = ()  # claims at the paper's scale, if its settings differ
    # the setting that all others change; such a study fine-tunes given weights on each of its data sets, in
    # trials of fixed length
    base: dict[str, Factor] = field(default_factory=dict)
    teacher: bool = False  # takes --weights as the teacher of one of its arms
    notes: Callable[[Setting], list[str]] = lambda setting: []  # what it leaves out, and why
    published: tuple[str, ...] = ()  # tables of report.literature to show beside the results

    def claims_at(self, scale: str) -> tuple[Claim, ...]:
        return self.paper if scale == "paper" and self.paper else self.claims


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The content of plan.json: the request (`asked`), the sizes chosen for it, and all trials."""

    study: str
    asked: dict[str, Any]
    chosen: dict[str, Any]
    trials: tuple[Trial, ...]

    def __post_init__(self):
        names: set[str] = set()
        for trial in self.trials:
            assert not trial.needs or trial.needs in names, f"{trial.name} precedes {trial.needs}"
            names.add(trial.name)
        assert len(names) == len(self.trials), "two trials have the same name"


def to_json(plan: Plan) -> str:
    trials = [asdict(trial) | recipe_tables(trial) for trial in plan.trials]
    return json.dumps(asdict(plan) | {"trials": trials}, indent=1)


def recipe_tables(trial: Trial) -> dict[str, Any]:
    """The recipes of a trial as JSON, each with its version."""
    compared = {name: to_table(recipe) for name, recipe in trial.compared.items()}
    return {"recipe": to_table(trial.recipe), "compared": compared}


def from_json(text: str) -> Plan:
    content = json.loads(text)
    trials = tuple(map(read_trial, content.pop("trials")))
    return Plan(**content, trials=trials)


def read_trial(content: dict[str, Any]) -> Trial:
    compared = {name: from_table(table) for name, table in content.get("compared", {}).items()}
    return Trial(**(content | {"recipe": from_table(content["recipe"]), "compared": compared}))
