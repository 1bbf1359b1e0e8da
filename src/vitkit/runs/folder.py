"""The run folder: its recipe, options and result, one process at a time, stopped without losing work."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from vitkit.data.loader import SIGNALS
from vitkit.errors import Error
from vitkit.io.files import locked, replace_file
from vitkit.options import IN_RECIPES
from vitkit.recipes.recipe import VERSION, Recipe, as_meant, read_recipe, read_version, settings, to_json
from vitkit.runs.page import FILE as SHOWN
from vitkit.runtime.runtime import data_workers
from vitkit.training.checkpoint import complete
from vitkit.training.logging import check_trackers
from vitkit.training.schedule import Duration, parse_stages
from vitkit.training.step import Diverged, OutOfMemory


class DivergedRun(Diverged, Error):
    """The loss of a step is not finite; the message names the images of its batch."""

    code = "training.diverged"


class OutOfMemoryRun(OutOfMemory, Error):
    """The device has too little memory, even for the smallest micro-batch."""

    code = "training.out-of-memory"


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    run: str
    model: str
    steps: int
    test: dict[str, Any]
    cost: dict[str, Any]
    kept: dict[str, Any] | None = None  # which weights, and whether the run stopped early; None: an old run

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # asdict would copy every number of a confusion matrix


def read_result(path: Path) -> Result:
    """What a finished run came to."""
    try:
        return Result(**json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise Error(
            f"{path}: not a result that vitkit wrote ({error}); delete it to test again",
            code="run.corrupt",
        ) from None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What may differ from one machine to the next without changing what a run comes to."""

    workers: int | None = None
    decoded: Path | None = None  # the folder of decoded images; other roundings of the same crops
    max_bad: float = 0.05
    trackers: Sequence[str] = ()
    save_aside: bool = False
    quiet: bool = False
    price_per_hour: float | None = None  # of a device
    report: bool = True  # the mistakes looked at and a page drawn at the end
    accept_changed_data: bool | None = None  # go on with other data than before; None: no, and no such flag

    def __post_init__(self) -> None:
        """Before anything takes time: trackers are there, and numbers can be what they are called."""
        check_trackers(self.trackers)
        data_workers(self.workers)
        if not 0 <= self.max_bad <= 1:
            raise Error(f"max-bad is a share of the images, 0 to 1, not {self.max_bad}", code="request.value")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise Error(f"price-per-hour must be 0 or more, not {self.price_per_hour}", code="request.value")


MODEL, RESULT = "model.safetensors", "result.json"
MAY_CHANGE = {  # fields with which a run may go on otherwise than it began: none decides what it comes to
    "about": "a text",
    "evaluations": "how often val is looked at; not where the best weights are kept, or patience stops by it",
    "micro_batch": "images in memory at a time: the same sums in another order, equal to rounding",
    "rates": "those that the protocol tries, each in a folder of its own",
    "convolution_rates": "the same for ResNets and hybrids",
    "fewshot": "data on which few-shot accuracy is told as the run goes",
    "shots": "images of each class for that",
    "draws": "choices of those images, of which the mean is told",
    "fewshot_when": "how often",
}


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop; its state is saved."""

    code = "training.stopped"

    def __init__(self, number: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(number).name} at step {step}; the same command goes on from there"
        )
        self.number = number


@contextmanager
def stopping(out: Path) -> Iterator[None]:
    """Inside, Ctrl-C at any moment is answered with what was kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if str(stop):
            raise
        raise KeyboardInterrupt(f"stopped; {remains(out)}") from None


def remains(out: Path) -> str:
    """What the same command would do after a run has ended early."""
    if kept := complete(out / "checkpoints"):
        return f"the same command goes on from step {int(kept[-1].name.removeprefix('step-'))}"
    if any(complete(part) for part in out.glob("*/checkpoints")):
        return f"the same command goes on with what was kept in {out}"
    return "nothing was kept yet, so the same command starts from the beginning"


def claim(out: Path, recipe: Recipe) -> Recipe:
    """The folder belongs to one recipe: once work was kept, another one is refused, with what differs.

    Returned is the recipe by which the run goes on.
    """
    path = out / "recipe.json"
    old = read_recipe(path) if path.exists() else None
    version, recipe = begun_by(out), as_begun(out, recipe)
    if old == recipe:
        return recipe
    if old and not has_learned(out):  # a start that came to nothing
        for name in ("doctor.json", SHOWN):
            (out / name).unlink(missing_ok=True)
    elif old:
        check_recipe(out, old, recipe)
        for start, _ in parse_stages(recipe.more_steps[len(old.more_steps) :]):
            keep_result(out, start)
    complete_recipe = replace(recipe, auto=())  # nothing of it is left to choose
    replace_file(path, lambda beside: beside.write_text(to_json(complete_recipe, version) + "\n"))
    return recipe


def begun_by(out: Path) -> int:
    """The version of recipe files by which the run in a folder was begun; today's where nothing was kept."""
    path = out / "recipe.json"
    return read_version(path) if path.exists() and has_learned(out) else VERSION


def as_begun(out: Path, recipe: Recipe) -> Recipe:
    """The recipe that a command made when the run in the folder was begun; it goes on with that one."""
    return as_meant(recipe, begun_by(out))


def has_learned(out: Path) -> bool:
    """Whether the run in a folder has kept any of its work."""
    return bool(complete(out / "checkpoints")) or (out / RESULT).exists()


def check_recipe(out: Path, old: Recipe, new: Recipe) -> None:
    """Refuse a recipe with which the run in the folder cannot go on, with the flags that differ."""
    if changed := changed_flags(old, new):
        raise Error(
            f"{out} holds a run with other settings: {', '.join(changed)}. Give another --out, or the "
            "settings of that run to go on with it",
            code="run.changed",
        )


def changed_flags(old: Recipe, new: Recipe) -> list[str]:
    """What would change the run, as flags with the old and the new value: '--steps 40 -> 60'."""
    may = {name for name in MAY_CHANGE if name != "evaluations" or not (new.patience or new.keeps_best)}
    if new.more_steps[: len(old.more_steps)] == old.more_steps:  # it is trained on
        may.add("more_steps")
    if same_place(old.data, new.data):
        may.add("data")
    before, after = flags(old), flags(new)
    changed = [name for name in after if before[name] != after[name] and name.partition(".")[0] not in may]
    told = []
    for name in changed:
        (flag, value), (new_flag, new_value) = before[name], after[name]
        told.append(f"{flag}{value} -> {'' if flag == new_flag else new_flag}{new_value}")
    return told


def flags(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Each field of a recipe as a command line has it: the flag and the value."""
    table = settings(replace(recipe, length=Duration(steps=1)))
    found = {name: (flag_of(name), value_of(value)) for name, value in table.items()}
    unit = "steps" if recipe.length.epochs is None else "epochs"
    return {"length": (f"--{unit} ", value_of(getattr(recipe.length, unit)))} | found


def same_place(one: str, other: str) -> bool:
    """Whether two names are of the same data: with a slash at the end, say, or in full."""
    if one == other:
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def flag_of(field: str) -> str:
    """The words before a field's value on a command line."""
    if field == "data":
        return "DATA "
    names = {"name": "recipe", "schedule.rate": "lr"}
    own = (*IN_RECIPES, "image_size")
    if name := names.get(field, field if field in own else ""):
        return f"--{name.replace('_', '-')} "
    return f"--set {field}="


def value_of(value: Any) -> str:
    """A field's value as a person would type it."""
    if value in (None, "", ()):
        return "none"
    if isinstance(value, tuple | list):
        return ("x" if all(type(part) is int for part in value) else ",").join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def kept_as(path: Path, step: int) -> Path:
    return path.with_stem(f"{path.stem}-{step}")


def keep_result(out: Path, step: int) -> None:
    """Copies of a finished run's model and result, before it is trained on: model-40.safetensors, ..."""
    for path in (out / MODEL, out / RESULT):
        copy = kept_as(path, step)
        if path.exists() and not copy.exists():
            replace_file(copy, lambda beside, path=path: shutil.copyfile(path, beside))  # type: ignore[misc]


def take(out: Path, recipe: Recipe, held: ExitStack) -> Recipe:
    """The folder for this run alone, as long as `held` is; the recipe by which it goes on."""
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(out, wait=False))
    return claim(out, recipe)


def news(damaged: Sequence[str], before: Any, now: dict[str, Any]) -> Iterator[str]:
    """What is to be said as a run goes on: which checkpoints were no good, and what is another machine's."""
    for name in damaged:
        yield f"{name} is damaged and was passed over"
    for name in before:
        if name in now and name != "python" and before[name] != now[name]:
            yield f"{name}: {before[name]} until here, now {now[name]}; from here on equal to rounding only"


class signals:
    """Inside, SIGTERM, SIGINT and SIGUSR1 are noted in a list and end nothing; a second SIGINT does.

    A second SIGTERM does not: a job manager sends one to every process, and torchrun one more to its own.
    In another thread than the main one nothing is noted: Python lets only that one handle signals.
    """

    def __enter__(self) -> list[int]:
        self.asked: list[int] = []
        self.before: dict[int, Any] = {}
        for number in SIGNALS if current_thread() is main_thread() else ():
            self.before[number] = signal.signal(number, self.note)
        return self.asked

    def note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in self.asked:
            raise KeyboardInterrupt
        self.asked.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
