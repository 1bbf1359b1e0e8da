"""The run folder: its recipe, options and result, locked by one run at a time and resumable."""

import json
import math
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
    """The result of a run, as result.json stores it."""

    run: str
    model: str
    steps: int
    test: dict[str, Any]
    cost: dict[str, Any]
    kept: dict[str, Any] | None = None  # which weights, and whether it stopped early; None: older versions
    features: dict[str, Any] | None = None  # the verdict of a run without labels; None: there is none

    def to_json(self) -> dict[str, Any]:
        facts = dict(vars(self))  # asdict would copy the whole confusion matrix
        return facts if self.features else {k: v for k, v in facts.items() if k != "features"}


def read_result(path: Path) -> Result:
    """Read result.json."""
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise Error(
            f"{path}: not a result that vitkit wrote ({error}); delete it to test again",
            code="run.corrupt",
        ) from None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that may differ between machines without changing the result of a run."""

    workers: int | None = None
    decoded: Path | None = None  # cache folder for decoded images; the same crops, rounded differently
    max_bad: float = 0.05
    trackers: Sequence[str] = ()
    save_aside: bool = False
    quiet: bool = False
    price_per_hour: float | None = None  # of a device
    report: bool = True  # write the mistakes and report.html at the end
    stop_at: float = math.inf  # time.monotonic() at which a run saves and stops, as by SIGTERM
    accept_changed_data: bool | None = None  # resume with changed data; None: no, and without a flag for it

    def __post_init__(self) -> None:
        """Check trackers and numbers before anything takes time."""
        check_trackers(self.trackers)
        data_workers(self.workers)
        if not 0 <= self.max_bad <= 1:
            raise Error(f"max-bad must be a fraction from 0 to 1, not {self.max_bad}", code="request.value")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise Error(f"price-per-hour must be 0 or more, not {self.price_per_hour}", code="request.value")


FEATURES_OFF = "none"  # value of the field fewshot: no k-NN, few-shot accuracy or verdict
MODEL, ADAPTER, RESULT = "model.safetensors", "adapter.safetensors", "result.json"
MAY_CHANGE = {  # fields that may change when a run is resumed: none affects its result
    "about": "a description",
    "evaluations": "number of validations; fixed if the best weights are kept or the run may stop early",
    "micro_batch": "images in memory at a time; results are equal up to rounding",
    "rates": "learning rates that the protocol compares, each in its own folder",
    "convolution_rates": "the same for ResNets and hybrids",
    "fewshot": "data for few-shot accuracy during the run",
    "shots": "images per class for few-shot accuracy",
    "draws": "number of random draws of these images; the mean is reported",
    "fewshot_when": "when few-shot accuracy is measured",
}


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run; its state is saved."""

    code = "training.stopped"

    def __init__(self, number: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(number).name} at step {step}; the same command resumes there"
        )
        self.number = number


@contextmanager
def stopping(out: Path) -> Iterator[None]:
    """Inside, Ctrl-C ends with a message about what was saved."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if str(stop):
            raise
        raise KeyboardInterrupt(f"stopped; {resume_hint(out)}") from None


def resume_hint(out: Path) -> str:
    """What the same command does after an interrupted run, for a message."""
    if checkpoints := complete(out / "checkpoints"):
        return f"the same command resumes at step {int(checkpoints[-1].name.removeprefix('step-'))}"
    if any(complete(part) for part in out.glob("*/checkpoints")):
        return f"the same command continues with what was saved in {out}"
    return "nothing was saved yet, so the same command starts from the beginning"


def claim(out: Path, recipe: Recipe) -> Recipe:
    """Write recipe.json; refuse another recipe once the folder holds a checkpoint. Returns the one to use."""
    path = out / "recipe.json"
    old = read_recipe(path) if path.exists() else None
    version, recipe = starting_version(out), as_starting_version(out, recipe)
    if old == recipe:
        return recipe
    if old and not has_learned(out):  # a run that saved nothing
        for name in ("doctor.json", SHOWN):
            (out / name).unlink(missing_ok=True)
    elif old:
        check_recipe(out, old, recipe)
        for start, _ in parse_stages(recipe.more_steps[len(old.more_steps) :]):
            keep_result(out, start)
    complete_recipe = replace(recipe, auto=())  # everything is decided
    replace_file(
        path, lambda beside: beside.write_text(to_json(complete_recipe, version) + "\n", encoding="utf-8")
    )
    return recipe


def starting_version(out: Path) -> int:
    """The recipe version that the run in a folder started with; the current one where nothing was saved."""
    path = out / "recipe.json"
    return read_version(path) if path.exists() and has_learned(out) else VERSION


def as_starting_version(out: Path, recipe: Recipe) -> Recipe:
    """The recipe as the version that started the run in the folder would have read it."""
    return as_meant(recipe, starting_version(out))


def has_learned(out: Path) -> bool:
    """Whether the folder holds a checkpoint or a result."""
    return bool(complete(out / "checkpoints")) or (out / RESULT).exists()


def check_recipe(out: Path, old: Recipe, new: Recipe) -> None:
    """Refuse a recipe that cannot resume the run in the folder; the error names the flags that differ."""
    if changed := changed_flags(old, new):
        raise Error(
            f"{out} contains a run with other settings: {', '.join(changed)}. Use another --out, or the "
            "settings of that run to resume it",
            code="run.changed",
        )


def changed_flags(old: Recipe, new: Recipe) -> list[str]:
    """The settings that differ, as flags with the old and the new value: '--steps 40 -> 60'."""
    allowed = {name for name in MAY_CHANGE if name != "evaluations" or not (new.patience or new.keeps_best)}
    if new.more_steps[: len(old.more_steps)] == old.more_steps:  # trained further
        allowed.add("more_steps")
    if same_place(old.data, new.data):
        allowed.add("data")
    before, after = flags(old), flags(new)
    both = [name for name in after if name in before]  # options of a task are those of one of the two alone
    changed = [name for name in both if before[name] != after[name] and name.partition(".")[0] not in allowed]
    texts = []
    for name in changed:
        (flag, value), (new_flag, new_value) = before[name], after[name]
        texts.append(f"{flag}{value} -> {'' if flag == new_flag else new_flag}{new_value}")
    return texts


def flags(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Each field of a recipe as its flag and its value on the command line."""
    table = settings(replace(recipe, length=Duration(steps=1)))
    rows = {name: (flag_of(name), value_of(value)) for name, value in table.items()}
    unit = "steps" if recipe.length.epochs is None else "epochs"
    return {"length": (f"--{unit} ", value_of(getattr(recipe.length, unit)))} | rows


def same_place(first: str, second: str) -> bool:
    """Whether two paths name the same data, for example with and without a trailing slash."""
    if first == second:
        return True
    return os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second)


def flag_of(field: str) -> str:
    """The command-line text before the value of a field."""
    if field == "data":
        return "DATA "
    names = {"name": "recipe", "schedule.rate": "lr"}
    own = (*IN_RECIPES, "image_size")
    if name := names.get(field, field if field in own else ""):
        return f"--{name.replace('_', '-')} "
    return f"--set {field}="


def value_of(value: Any) -> str:
    """The value of a field as typed on a command line."""
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
    """Copy the model and result of a finished run before it is trained further: model-40.safetensors, ..."""
    for path in (out / MODEL, out / ADAPTER, out / RESULT):
        copy = kept_as(path, step)
        if path.exists() and not copy.exists():
            replace_file(copy, lambda beside, path=path: shutil.copyfile(path, beside))  # type: ignore[misc]


def take(out: Path, recipe: Recipe, stack: ExitStack) -> Recipe:
    """Lock the folder until the stack is closed; returns the recipe to use."""
    out.mkdir(parents=True, exist_ok=True)
    stack.enter_context(locked(out, wait=False))
    return claim(out, recipe)


def resume_messages(damaged: Sequence[str], before: Any, now: dict[str, Any]) -> Iterator[str]:
    """Messages for a resumed run: damaged checkpoints, and differences between the machines."""
    for name in damaged:
        yield f"{name} is damaged and was skipped"
    for name in before:
        if name in now and name != "python" and before[name] != now[name]:
            yield f"{name}: {before[name]} until here, now {now[name]}; from here on equal up to rounding"


class signals:
    """Inside, SIGTERM, SIGINT and SIGUSR1 are only recorded in a list; a second SIGINT interrupts.

    A second SIGTERM does not: a job manager sends one to every process, and torchrun sends another.
    Only the main thread records signals, since Python allows handlers in no other.
    """

    def __enter__(self) -> list[int]:
        self.received: list[int] = []
        self.handlers: dict[int, Any] = {}
        for number in SIGNALS if current_thread() is main_thread() else ():
            self.handlers[number] = signal.signal(number, self.record)
        return self.received

    def record(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in self.received:
            raise KeyboardInterrupt
        self.received.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
