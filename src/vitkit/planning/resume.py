"""A repeated training command: its run folder, whether it resumes a run, and the commands to suggest."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.io.files import is_locked
from vitkit.models.variants import variant
from vitkit.options import Training
from vitkit.planning.automatic import fixed_fields
from vitkit.recipes.recipe import Recipe, override, read_recipe, with_teacher
from vitkit.runs.build import REMOVED, SplitCache, needs_split
from vitkit.runs.cross_validation import final_recipe, first_fold, folder_of, folds_in
from vitkit.runs.folder import (
    MODEL,
    RESULT,
    Result,
    as_starting_version,
    changed_flags,
    check_recipe,
    has_learned,
    kept_as,
    read_result,
    same_place,
)
from vitkit.runs.provenance.fingerprint import (
    Comparison,
    changed_since,
    compare,
    remembered_splits,
    summary,
    with_hashes,
)
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration, parse_stages
from vitkit.weights.locate import RECIPE, check_place

# options that are not part of a recipe: --more-steps takes all others from the finished run
MACHINE = (
    "device", "precision", "workers", "decoded", "max_bad", "compile", "recompute", "cuda_graph",
    "deterministic", "parallel", "save_aside", "track", "price_per_hour",
)  # fmt: skip
# fields that a resumed run keeps: chosen for the user at its start, or set later
KEPT = (
    "weights", "image_size", "batch", "micro_batch", "length", "schedule", "keep", "patience", "split_of",
    "more_steps",
)  # fmt: skip
BY_RULES = (  # fields that the default recipe and its rules set, which were others in earlier versions
    "optimizer", "crop", "crop_area", "mixup", "label_smoothing", "train", "head_init", "evaluations",
    "rates", "val", "val_images", "pooling", "stochastic_depth", "keep_margin", "calibrate",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A training command: its options, and the recipe that they make."""

    verb: str
    data: str
    options: Training
    recipe: Recipe  # before settings are chosen for the machine and the data
    protocol: bool = False
    seeds: int = 1  # of the protocol
    folds: int = 0  # of a cross-validation; 0: none

    def beside(self, run: str) -> "Request":
        """The same for a new run that keeps the splits of another run."""
        options, recipe = replace(self.options, split_of=run), replace(self.recipe, split_of=run)
        return replace(self, options=options, recipe=recipe) if run else self

    def train_on(self, out: Path, steps: int, *, accept: bool) -> str:
        """The command that trains a finished run further; the run has its own settings."""
        defaults = {field.name: field.default for field in fields(Training) if field.name not in MACHINE}
        folder = None if out == usual_folder(self.data) else out
        return self.command(**defaults | {"out": folder, "more_steps": steps, "accept_changed_data": accept})

    def in_new_folder(self, out: Path) -> str:
        """The same command with the next free folder beside `out`, where it does not resume a run."""
        return self.command(out=next(path for path in numbered(out) if not path.exists()))

    def command(self, **changes: object) -> str:
        """The same command with some options changed."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        more = ["--protocol"] if self.protocol else ["--folds", str(self.folds)] if self.folds else []
        return shlex.join(["vitkit", self.verb, self.data, *options.words(), *more])


def check_names(recipe: Recipe) -> None:
    """Refuse unknown models or weights before anything takes time."""
    if recipe.weights:
        check_place(recipe.weights)
    elif recipe.model:
        variant(recipe.model)


def choose_folder(request: Request, opener: SplitCache, say: Callable[[str], None]) -> tuple[Path, str]:
    """The run folder, and for a new run the earlier run on the same data whose splits it keeps.

    Without --out, and if runs/<data> holds another experiment, the folder is runs/<data>-2 and so on.
    """
    if request.options.out:
        check_out(request.options.out)
        check_folds(request.options.out, request.folds)
        return request.options.out, ""
    first = usual_folder(request.data)
    why = occupied(first, request)
    if why is None:
        return first, ""
    folder = next(path for path in numbered(first) if occupied(path, request) is None)
    say(f"{first} contains {why}; using {folder} for this run")
    if (folder / RECIPE).exists() or not (first / RECIPE).exists() or request.options.split_of:
        return folder, ""
    same = same_place(read_recipe(first / RECIPE).data, request.data)
    keeps_splits = same and remembered_splits(first) and needs_split(opener.place(request.recipe))
    return folder, str(first) if keeps_splits else ""


def check_out(out: Path) -> None:
    """Refuse a folder that cannot be created before anything takes time."""
    existing = next((path for path in (out, *out.parents) if path.exists()), out)
    if not existing.is_dir():
        raise Error(
            f"--out {out}: {existing} is a file, not a folder; use a folder that can be created",
            code="file.not-writable",
        )


def check_folds(out: Path, folds: int) -> None:
    """Refuse a folder with another kind of run than --folds asks for, or with another number of folds."""
    there = folds_in(out)
    if there == folds or not (there or has_learned(out)):
        return
    held = f"the runs of --folds {there}" if there else "a run without --folds"
    raise Error(
        f"{out} contains {held}; use another --out, or the same --folds to resume it", code="run.changed"
    )


def usual_folder(data: str) -> Path:
    return Path("runs") / (Path(data).stem or "run")


def numbered(first: Path) -> Iterator[Path]:
    """runs/photos, runs/photos-2, runs/photos-3, ..."""
    yield first
    for number in count(2):
        yield first.with_name(f"{first.name}-{number}")


def occupied(folder: Path, request: Request) -> str | None:
    """A description of the other run in a folder; None if the folder is free or holds this command's run."""
    folds = folds_in(folder)
    if folds and folds != request.folds:
        return f"the runs of --folds {folds}"
    protocol = not folds and ((folder / "protocol.json").exists() or any(folder.glob(f"*/{RECIPE}")))
    old = stored_recipe(folder)
    if old is None:
        return "the runs of --protocol" if protocol and not request.protocol else None
    if request.protocol:
        return None if protocol else "a run without --protocol"
    if not folds and not has_learned(folder) and not is_locked(folder):  # a run that saved nothing
        return None
    if request.folds and not folds:
        return "a run without --folds"
    if request.options.more_steps:
        changed = changed_flags(old, as_starting_version(folder, with_options(old, request)))
    else:
        changed = changed_flags(old, as_starting_version(folder, with_stored_choices(request, old)))
    return f"another run ({', '.join(changed)})" if changed else None


def stored_recipe(folder: Path) -> Recipe | None:
    """The recipe of the run in a folder; of a cross-validation before its final run, by its first fold."""
    if (folder / RECIPE).exists():
        return read_recipe(folder / RECIPE)
    fold = first_fold(folder)
    return final_recipe(fold) if fold and fold.fold else None


def resumed_recipe(request: Request, out: Path) -> Recipe | None:
    """The recipe with which this command resumes the run in the folder; None if there is no run."""
    if request.options.more_steps:
        return extended_recipe(request, out)
    old = stored_recipe(out)
    if old is None:
        return None
    first = out if (out / RECIPE).exists() else folder_of(out, 1)
    recipe = as_starting_version(first, with_stored_choices(request, old))
    return recipe if has_learned(first) or not changed_flags(old, recipe) else None


def with_stored_choices(request: Request, old: Recipe) -> Recipe:
    """The requested recipe with the choices of the existing run, so that the same command resumes it."""
    fixed = fixed_fields(request.options)
    same_rules = old.name == request.recipe.name
    kept = (*KEPT, *BY_RULES) if "rules" in request.recipe.auto and same_rules else KEPT
    kept = (*kept, "optimizer") if "dense" in request.recipe.auto and same_rules else kept
    kept = (*kept, "model") if "pretraining" in request.recipe.auto else kept
    fixed -= {"optimizer", "schedule"}  # of which --set changes single values, below
    stored = {field: getattr(old, field) for field in kept if field not in fixed}
    if "schedule" in stored and request.options.lr is not None:
        stored["schedule"] = replace(stored["schedule"], rate=request.options.lr)
    if same_place(old.data, request.data):
        stored["data"] = old.data
    return override(replace(request.recipe, **stored), request.options.set)


def with_options(old: Recipe, request: Request) -> Recipe:
    """The recipe of a run, changed by the options of this command."""
    options = request.options
    data = old.data if same_place(old.data, request.data) else request.data
    new = replace(old, data=data, **options.changes())
    new = with_teacher(new, options.teacher)
    if options.recipe or options.task:
        new = replace(new, name=request.recipe.name)
    if options.steps is not None or options.epochs is not None:
        new = replace(new, length=Duration(options.steps, options.epochs))
    if options.lr is not None:
        new = replace(new, schedule=replace(new.schedule, rate=options.lr))
    return override(new, options.set)


def extended_recipe(request: Request, out: Path) -> Recipe:
    """The recipe of a finished run with --more-steps, or of an interrupted run of that kind."""
    steps, first = request.options.more_steps, request.command(more_steps=None)
    if not (out / RECIPE).exists():
        raise Error(
            f"--more-steps {steps}: there is no run in {out} to continue; start it first: {first}",
            code="run.not-found",
        )
    old = read_recipe(out / RECIPE)
    if changed := changed_flags(old, as_starting_version(out, with_options(old, request))):
        raise Error(
            f"--more-steps {steps} keeps the settings of the run in {out}, but these differ: "
            f"{', '.join(changed)}. Omit them, or start a new run from the model: --weights {out}",
            code="run.changed",
        )
    checkpoints, done = complete(out / "checkpoints"), finished(out, old)
    if not done:
        if checkpoints and old.more_steps and parse_stages(old.more_steps)[-1][1] == steps:
            return old
        raise Error(
            f"--more-steps {steps}: the run in {out} has not finished; resume it first: {first}",
            code="run.unfinished",
        )
    if not checkpoints:
        raise Error(
            f"--more-steps {steps}: {out / 'checkpoints'} has no checkpoint to resume from; start a new "
            f"run from its model: --weights {out} --out ANOTHER",
            code="checkpoint.corrupt",
        )
    return replace(old, more_steps=(*old.more_steps, f"{done.steps}+{steps}"))


def finished(out: Path, recipe: Recipe) -> Result | None:
    """The result of the run in the folder; None if its last stage is not finished."""
    if not (out / RESULT).exists() or not (out / MODEL).exists():
        return None
    result, stages = read_result(out / RESULT), parse_stages(recipe.more_steps)
    return None if stages and result.steps <= stages[-1][0] else result


def already_finished(request: Request, out: Path, opener: SplitCache) -> Result | None:
    """The result of a finished run with nothing left to do; raises with suggestions if the data has changed.

    Writes nothing and loads no weights.
    """
    recipe = resumed_recipe(request, out)
    if recipe is None or not (out / RECIPE).exists():
        return None
    old = read_recipe(out / RECIPE)
    check_recipe(out, old, recipe)
    if recipe.against and not (out / REMOVED).exists():
        return None  # the duplicates to remove are not known yet
    splits = with_hashes(opener(recipe, out))
    data = compare(splits, summary(splits), out, recipe.task.labelled)
    done = finished(out, old)
    if data.changes and not (request.options.accept_changed_data and data.same_classes):
        own_split = needs_split(opener.place(request.recipe))
        raise Error(remedies(request, out, done, data, own_split), code="data.changed")
    return done if done and recipe == old and not data.changes and not data.older else None


def remedies(request: Request, out: Path, done: Result | None, data: Comparison, own_split: bool) -> str:
    """What changed, and the commands to continue (with the same classes) or to train anew.

    own_split: whether vitkit splits off the test images.
    """
    lines = [changed_since(out), *(f"  {change}" for change in data.changes)]
    if request.folds:
        lines.append("The folds of other images would be others.")
    elif data.same_classes:
        steps = request.options.more_steps or (suggested(done) if done else 0)
        command = request.command(accept_changed_data=True)
        if steps:
            command = request.train_on(out, steps, accept=True)
        lines += ["To continue the run with the images as they are now:", f"  {command}"]
    else:
        lines.append("A run cannot continue with other classes.")
    free = next(folder for folder in numbered(out) if not folder.exists())
    split_of = str(out) if own_split and remembered_splits(out) else ""
    anew = {"out": free, "split_of": split_of, "more_steps": None, "accept_changed_data": False}
    lines += ["To start over in another folder:", f"  {request.command(**anew)}"]
    if split_of:
        lines.append("Either way, the test images of the run stay test images.")
    return "\n".join(lines)


def result_before(out: Path) -> tuple[Path, dict[str, Any]] | None:
    """The model and the metrics of a run before its last --more-steps; None if there was none."""
    if not (out / RECIPE).exists() or not (stages := parse_stages(read_recipe(out / RECIPE).more_steps)):
        return None
    path, model = (kept_as(out / name, stages[-1][0]) for name in (RESULT, MODEL))
    test = read_result(path).test if path.exists() else {}
    return (model, test) if test else None


def suggested(done: Result) -> int:
    """The number of steps to suggest for --more-steps: half of what was trained."""
    return max(1, done.steps // 2)
