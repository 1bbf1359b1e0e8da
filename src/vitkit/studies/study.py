"""A study as values: its trials, what they start from, the claims that they test, how they are drawn."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vitkit.recipes.recipe import Recipe, from_table, to_table
from vitkit.studies.setting import Setting

Factor = str | int | float
Factors = Mapping[str, Factor]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a study: what is varied in it, its recipe, and the trial whose model it starts from."""

    name: str
    factors: dict[str, Factor]
    recipe: Recipe
    needs: str = ""
    resize: str = ""  # the convention by which the positions of that model are brought to another size
    # by name, what the protocol compares on held-out images before it trains the best on all; empty: `recipe`
    compared: dict[str, Recipe] = field(default_factory=dict)


def trial(
    factors: Factors,
    recipe: Recipe,
    *,
    needs: str = "",
    resize: str = "",
    compared: Mapping[str, Recipe] | None = None,
) -> Trial:
    """Named by what is varied; the seed is the recipe's."""
    words = [f"{name}={value}" for name, value in factors.items()] + [f"seed={recipe.seed}"]
    name = ",".join(words).replace("/", "-").replace(" ", "-").replace("%", "pc")
    return Trial(name=name, factors=dict(factors), recipe=recipe, needs=needs, resize=resize,
                 compared=dict(compared or {}))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper as a comparison: the mean score of `left` above that of `right`.

    says     that left is above right, "not below" it by more than `margin`, or "equal" to it but for that
    since    the same two settings elsewhere: then what is compared is the gain from there to here
    measure  score: the study's own; compute: how often the left family's compute fits into the right's at
             equal score, as a power of two
    score    the column that is compared, where it is not the study's
    """

    text: str
    left: dict[str, Factor]
    right: dict[str, Factor]
    says: str = "above"
    margin: float = 0.01
    since: tuple[dict[str, Factor], dict[str, Factor]] | None = None
    measure: str = "score"
    score: str = ""

    def __post_init__(self):
        if self.says not in ("above", "not below", "equal") or self.measure not in ("score", "compute"):
            raise ValueError(f"says is above, not below or equal, and measure score or compute: {self}")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure: the score over a column of the table, a line for each setting of some factors.

    kind: lines over numbers, bars over settings, the history of each setting over the run, or similarity:
    how alike the position embeddings of a setting are (Fig. 10).
    """

    title: str
    x: str
    lines: tuple[str, ...]
    y: str = "score"
    kind: str = "lines"
    x_label: str = ""
    log_x: bool = False
    where: dict[str, Factor] = field(default_factory=dict)
    band: dict[str, Factor] = field(default_factory=dict)  # of bars: settings shaded from lowest to highest


@dataclass(frozen=True, kw_only=True)
class Study:
    """A function from a setting to trials, and how their table is to be read."""

    name: str
    shows: str  # the figure or the table of the paper
    about: str
    make: Callable[[Setting], list[Trial]]
    score: str  # the column that is compared: top1, or fewshot_mean
    claims: tuple[Claim, ...]
    pictures: tuple[Picture, ...]
    fitted: tuple[str, ...] = ()  # factors by which scores are fitted against compute, a fit for each setting
    convolutions: bool = False  # whether ResNets take part, which need larger images
    paper: tuple[Claim, ...] = ()  # claims at the paper's scale, where other settings are tried
    published: tuple[str, ...] = ()  # tables of report.literature to be shown beside

    def claims_at(self, scale: str) -> tuple[Claim, ...]:
        return self.paper if scale == "paper" and self.paper else self.claims


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a study folder holds: what was asked for, what was chosen for it, and every trial."""

    study: str
    asked: dict[str, Any]
    chosen: dict[str, Any]
    trials: tuple[Trial, ...]

    def __post_init__(self):
        names = [one.name for one in self.trials]
        before: set[str] = set()
        for one in self.trials:
            assert not one.needs or one.needs in before, f"{one.name} needs {one.needs}, which is not before"
            before.add(one.name)
        assert len(before) == len(names), "two trials of one name"


def to_json(plan: Plan) -> str:
    trials = [asdict(one) | recipes_of(one) for one in plan.trials]
    return json.dumps(asdict(plan) | {"trials": trials}, indent=1)


def recipes_of(one: Trial) -> dict[str, Any]:
    """The recipes of a trial, each with its version."""
    compared = {name: to_table(recipe) for name, recipe in one.compared.items()}
    return {"recipe": to_table(one.recipe), "compared": compared}


def from_json(text: str) -> Plan:
    told = json.loads(text)
    trials = tuple(map(read_trial, told.pop("trials")))
    return Plan(**told, trials=trials)


def read_trial(content: dict[str, Any]) -> Trial:
    compared = {name: from_table(one) for name, one in content.get("compared", {}).items()}
    return Trial(**(content | {"recipe": from_table(content["recipe"]), "compared": compared}))
