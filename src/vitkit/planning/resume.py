"""A command for data that was trained on before: which folder, whether it goes on, and what to type next."""

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
from vitkit.planning.automatic import given
from vitkit.recipes.recipe import Recipe, override, read_recipe
from vitkit.runs.build import REMOVED, SplitCache, needs_split
from vitkit.runs.folder import (
    MODEL,
    RESULT,
    Result,
    as_begun,
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
    with_marks,
)
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration, parse_stages
from vitkit.weights.locate import RECIPE, check_place

# options that are no part of a recipe: a finished run that is trained on knows all others already
MACHINE = (
    "device", "precision", "workers", "decoded", "max_bad", "compile", "recompute", "cuda_graph",
    "deterministic", "parallel", "save_aside", "track", "price_per_hour",
)  # fmt: skip
# what was chosen for the user as the run began, and what the run came by later
KEPT = (
    "weights", "image_size", "batch", "micro_batch", "length", "schedule", "keep", "patience", "split_of",
    "more_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A command that trains: its words, and the recipe that they make."""

    verb: str
    data: str
    options: Training
    recipe: Recipe  # without what is chosen for the machine and the data
    protocol: bool = False
    seeds: int = 1  # of the protocol

    def beside(self, run: str) -> "Request":
        """The same for a new run whose images stay in the splits that they have in another one."""
        options, recipe = replace(self.options, split_of=run), replace(self.recipe, split_of=run)
        return replace(self, options=options, recipe=recipe) if run else self

    def train_on(self, out: Path, steps: int, *, accept: bool) -> str:
        """The command that trains the finished run in a folder on: the run knows its own settings."""
        left = {field.name: field.default for field in fields(Training) if field.name not in MACHINE}
        where = None if out == usual_folder(self.data) else out
        return self.command(**left | {"out": where, "more_steps": steps, "accept_changed_data": accept})

    def command(self, **changes: object) -> str:
        """The same command with some options changed."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        more = ["--protocol"] if self.protocol else []
        return shlex.join(["vitkit", self.verb, self.data, *options.words(), *more])


def check_names(recipe: Recipe) -> None:
    """Refuse a model or weights that are not known before anything else is done."""
    if recipe.weights:
        check_place(recipe.weights)
    elif recipe.model:
        variant(recipe.model)


def choose_folder(request: Request, opened: SplitCache, say: Callable[[str], None]) -> tuple[Path, str]:
    """The run folder; and for a new run beside another one on the same data, that one, whose split it keeps.

    opened: gives the data, where it must be known.
    Where --out is not given and runs/<data> holds another experiment, it is runs/<data>-2 and so on.
    """
    if request.options.out:
        check_out(request.options.out)
        return request.options.out, ""
    first = usual_folder(request.data)
    why = occupied(first, request)
    if why is None:
        return first, ""
    folder = next(one for one in numbered(first) if occupied(one, request) is None)
    say(f"{first} holds {why}; this run is in {folder}")
    if (folder / RECIPE).exists() or not (first / RECIPE).exists() or request.options.split_of:
        return folder, ""
    same = same_place(read_recipe(first / RECIPE).data, request.data)
    kept = same and remembered_splits(first) and needs_split(opened.place(request.recipe))
    return folder, str(first) if kept else ""


def check_out(out: Path) -> None:
    """Refuse a folder that can never be made before anything takes time."""
    there = next((one for one in (out, *out.parents) if one.exists()), out)
    if not there.is_dir():
        raise Error(
            f"--out {out}: {there} is a file, not a folder; give a folder that can be made",
            code="file.not-writable",
        )


def usual_folder(data: str) -> Path:
    return Path("runs") / (Path(data).stem or "run")


def numbered(first: Path) -> Iterator[Path]:
    """runs/photos, runs/photos-2, runs/photos-3, ..."""
    yield first
    for number in count(2):
        yield first.with_name(f"{first.name}-{number}")


def occupied(folder: Path, request: Request) -> str | None:
    """What a folder holds that is not the run of this command; None where it is free, or holds that run."""
    protocol = (folder / "protocol.json").exists() or any(folder.glob(f"*/{RECIPE}"))
    if not (folder / RECIPE).exists():
        return "the runs of --protocol" if protocol and not request.protocol else None
    if request.protocol:
        return None if protocol else "a run without --protocol"
    if not has_learned(folder) and not is_locked(folder):  # a start that came to nothing
        return None
    old = read_recipe(folder / RECIPE)
    if request.options.more_steps:
        changed = changed_flags(old, as_begun(folder, asked(old, request)))
    else:
        changed = changed_flags(old, as_begun(folder, continued(request, old)))
    return f"another run ({', '.join(changed)})" if changed else None


def remembered(request: Request, out: Path) -> Recipe | None:
    """The recipe with which the run in the folder goes on by this command; None where there is no run."""
    if request.options.more_steps:
        return trained_on(request, out)
    if not (out / RECIPE).exists():
        return None
    old = read_recipe(out / RECIPE)
    recipe = as_begun(out, continued(request, old))
    return recipe if has_learned(out) or not changed_flags(old, recipe) else None


def continued(request: Request, old: Recipe) -> Recipe:
    """With the choices of the run that is there already, so that the same command goes on with it."""
    fixed = given(request.options)
    kept = {field: getattr(old, field) for field in KEPT if field not in fixed}
    if "schedule" in kept and request.options.lr is not None:
        kept["schedule"] = replace(kept["schedule"], rate=request.options.lr)
    if same_place(old.data, request.data):
        kept["data"] = old.data
    return override(replace(request.recipe, **kept), request.options.set)


def asked(old: Recipe, request: Request) -> Recipe:
    """The recipe of a run with the options of this command on it, and all else as it was."""
    options = request.options
    data = old.data if same_place(old.data, request.data) else request.data
    new = replace(old, data=data, **options.changes())
    if options.recipe:
        new = replace(new, name=request.recipe.name)
    if options.steps is not None or options.epochs is not None:
        new = replace(new, length=Duration(options.steps, options.epochs))
    if options.lr is not None:
        new = replace(new, schedule=replace(new.schedule, rate=options.lr))
    return override(new, options.set)


def trained_on(request: Request, out: Path) -> Recipe:
    """The recipe of a finished run with --more-steps on it, or of such a stage that was interrupted."""
    steps, first = request.options.more_steps, request.command(more_steps=None)
    if not (out / RECIPE).exists():
        raise Error(
            f"--more-steps {steps}: there is no run in {out} to train on; first: {first}",
            code="run.not-found",
        )
    old = read_recipe(out / RECIPE)
    if changed := changed_flags(old, as_begun(out, asked(old, request))):
        raise Error(
            f"--more-steps {steps} trains the run in {out} on as it is, but other settings are given: "
            f"{', '.join(changed)}. Leave them out; or start a new run from it: --weights {out}",
            code="run.changed",
        )
    kept, done = complete(out / "checkpoints"), finished(out, old)
    if not done:
        if kept and old.more_steps and parse_stages(old.more_steps)[-1][1] == steps:
            return old
        raise Error(
            f"--more-steps {steps}: the run in {out} has not finished; first go on with: {first}",
            code="run.unfinished",
        )
    if not kept:
        raise Error(
            f"--more-steps {steps}: {out / 'checkpoints'} holds no checkpoint to train on from; start a new "
            f"run from its model: --weights {out} --out ANOTHER",
            code="checkpoint.corrupt",
        )
    return replace(old, more_steps=(*old.more_steps, f"{done.steps}+{steps}"))


def finished(out: Path, recipe: Recipe) -> Result | None:
    """What the run in the folder came to; None where it has not come to the end of its last stage."""
    if not (out / RESULT).exists() or not (out / MODEL).exists():
        return None
    result, stages = read_result(out / RESULT), parse_stages(recipe.more_steps)
    return None if stages and result.steps <= stages[-1][0] else result


def already_finished(request: Request, out: Path, opened: SplitCache) -> Result | None:
    """The result of a run that is finished and has nothing to do; changed data is an error with what to type.

    Nothing is written, and no weights are loaded.
    """
    recipe = remembered(request, out)
    if recipe is None:
        return None
    old = read_recipe(out / RECIPE)
    check_recipe(out, old, recipe)
    if recipe.against and not (out / REMOVED).exists():
        return None  # what is taken out of the data is not known yet
    splits = with_marks(opened(recipe, out))
    data = compare(splits, summary(splits), out, recipe.task.labelled)
    done = finished(out, old)
    if data.changes and not (request.options.accept_changed_data and data.same_classes):
        divided = needs_split(opened.place(request.recipe))
        raise Error(remedies(request, out, done, data, divided), code="data.changed")
    return done if done and recipe == old and not data.changes and not data.older else None


def remedies(request: Request, out: Path, done: Result | None, data: Comparison, divided: bool) -> str:
    """What changed, and the commands to train on from here (with the same classes) or anew.

    divided: whether test images are split off the data here.
    """
    lines = [changed_since(out), *(f"  {change}" for change in data.changes)]
    if data.same_classes:
        steps = request.options.more_steps or (suggested(done) if done else 0)
        on = request.train_on(out, steps, accept=True) if steps else request.command(accept_changed_data=True)
        lines += ["To train on from here, with the images as they are now:", f"  {on}"]
    else:
        lines.append("The run cannot go on with other classes.")
    free = next(folder for folder in numbered(out) if not folder.exists())
    split_of = str(out) if divided and remembered_splits(out) else ""
    anew = {"out": free, "split_of": split_of, "more_steps": None, "accept_changed_data": False}
    lines += ["To train anew, in another folder:", f"  {request.command(**anew)}"]
    if split_of:
        lines.append("Either way, images that the run was tested on stay test images.")
    return "\n".join(lines)


def result_before(out: Path) -> tuple[Path, dict[str, Any]] | None:
    """The model that a run had before it was trained on last, and how well it did; None where it was not."""
    if not (out / RECIPE).exists() or not (stages := parse_stages(read_recipe(out / RECIPE).more_steps)):
        return None
    path, model = (kept_as(out / name, stages[-1][0]) for name in (RESULT, MODEL))
    test = read_result(path).test if path.exists() else {}
    return (model, test) if test else None


def suggested(done: Result) -> int:
    """Steps by which to train on: half of what was trained."""
    return max(1, done.steps // 2)
