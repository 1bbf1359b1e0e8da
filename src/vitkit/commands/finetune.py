"""`vitkit finetune` and `vitkit pretrain`: build the request, plan it, run it and print the result."""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.commands import report
from vitkit.commands.shared import Emit
from vitkit.errors import Error
from vitkit.metrics.intervals import percent, span, wilson
from vitkit.options import Training
from vitkit.planning import automatic, resume
from vitkit.planning.plan import Plan, machine_for, plan
from vitkit.planning.plan_text import print_plan
from vitkit.planning.resume import Request
from vitkit.recipes import RECIPES
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import Recipe, override, with_teacher
from vitkit.report.terminal import print_table, say
from vitkit.runs.cross_validation import check_folds, cross_validate, final_recipe
from vitkit.runs.folder import stopping
from vitkit.runs.kept_weights import calibration_note, stopping_note
from vitkit.runs.page import FOLDS, REPORT, read, run_task
from vitkit.runs.protocol import Protocol, Subruns, called, check_seeds, is_rate
from vitkit.runs.run import run as run_recipe
from vitkit.tasks.task import task_class
from vitkit.training.schedule import Duration

MOST_VAL = 5000  # images that `pretrain --task` holds out for validation


@dataclass(frozen=True)
class Outcome:
    """The plan of a request and, unless only the plan was requested, the result of the run."""

    plan: Plan
    result: dict[str, Any] | None = None


def finetune(
    data: str,
    options: Training,
    *,
    protocol: bool = False,
    seeds: int = 3,
    folds: int | None = None,
    emit: Emit,
) -> None:
    """Plan a fine-tuning run, report choices and expected time, and run it."""
    request = finetuning(data, options, protocol=protocol, seeds=seeds, folds=folds)
    print_outcome(execute(request, progress=not emit), emit)


def pretrain(data: str, options: Training, *, emit: Emit) -> None:
    """Plan and run pre-training from scratch; the recipe defines the model unless --model is given."""
    print_outcome(execute(pretraining(data, options), progress=not emit), emit)


def finetuning(
    data: str, options: Training, *, protocol: bool = False, seeds: int = 3, folds: int | None = None
) -> Request:
    """The request of `vitkit finetune`."""
    check_seeds(seeds)
    check_folds(folds)
    request = request_for(
        "finetune", data, options, default_recipe(options, protocol=protocol), protocol=protocol, seeds=seeds
    )
    return request if folds is None else with_folds(request, folds)


def default_recipe(options: Training, *, protocol: bool) -> str:
    """The name of the recipe of `vitkit finetune` if none is given."""
    if options.model:
        return "scratch"
    if protocol:
        return "table4"
    return "lora" if options.train == "lora" or "train=lora" in options.set else "finetune"


def with_folds(request: Request, folds: int) -> Request:
    """The request as a cross-validation; refuses what needs validation images, and a second protocol."""
    recipe = override(request.recipe, request.options.set)
    excluded = {
        "--protocol": request.protocol,
        "--more-steps": request.options.more_steps,
        "--accept-changed-data": request.options.accept_changed_data,
        "--keep best": recipe.keep == "best",
        "--patience": recipe.patience,
        "calibrate=true": recipe.calibrate,
        "report_on=val": recipe.report_on == "val",
    }
    for flag, given in excluded.items():
        if given:
            raise Error(
                f"--folds {folds} trains on all train and validation images in the end, without {flag}; omit "
                "one of them",
                code="request.conflict",
            )
    if recipe.task.headline.key != "top1":
        raise Error(
            f"--folds needs a classifier, but {recipe.objective} trains none; omit it",
            code="request.conflict",
        )
    return replace(request, recipe=final_recipe(request.recipe), folds=folds)


def pretraining(data: str, options: Training) -> Request:
    """The request of `vitkit pretrain`."""
    return request_for("pretrain", data, options, "pretrain")


def request_for(
    verb: str, data: str, options: Training, default: str, *, protocol: bool = False, seeds: int = 1
) -> Request:
    """Build a request; unknown model or weights names are errors before any work."""
    check_out(data, options.out)
    if options.task:
        check_task(verb, data, options.task)
    recipe = make_recipe(data, options, default)
    complete = override(recipe, options.set)
    if options.task and complete.task.name != options.task:
        raise Error(
            f"--task {options.task}, but the recipe {recipe.name} with its settings trains "
            f"{complete.task.name}; omit --task, or use a recipe of that task",
            code="request.conflict",
        )
    resume.check_names(complete)
    if protocol and complete.task.headline.key != "top1":
        raise Error(
            f"--protocol needs a classifier, but {complete.objective} trains none; use it when "
            "fine-tuning the result",
            code="request.conflict",
        )
    return Request(verb, data, options, recipe, protocol, seeds)


def check_out(data: str, out: Path | None) -> None:
    """Refuse to write a run among the images that it is trained on."""
    if out and os.path.isdir(data) and out.exists() and os.path.samefile(data, out):
        raise Error(
            f"--out {out} is the folder of DATA; use another folder, such as runs/{out.resolve().name}",
            code="request.conflict",
        )


def check_task(verb: str, data: str, name: str) -> None:
    """Reject an unknown task, and one without labels where a classifier is to be trained."""
    if verb == "finetune" and not task_class(name).labelled:
        raise Error(
            f"--task {name} needs no labels and trains no classifier; first vitkit pretrain {data} --task "
            f"{name}, then vitkit finetune {data} --weights RUN",
            code="request.conflict",
        )
    task_class(name)  # raises for an unknown name


def starting_recipe(options: Training, default: str) -> Recipe:
    """The recipe of --recipe or of --task, else the default one.

    For a task without labels, the data and the device decide the model, its image size, batch and length.
    """
    recipe = named_recipe(options.recipe or default)
    if not options.task or options.recipe or recipe.task.name == options.task:
        return recipe
    if options.task not in RECIPES:
        own = [f"--recipe {name}" for name in RECIPES if named_recipe(name).task.name == options.task]
        instead = " or ".join(own) or f"--recipe {default} --set objective={options.task}"
        raise Error(
            f"--task {options.task}: there is no recipe of this name; give {instead} in its place",
            code="recipe.unknown",
        )
    recipe = named_recipe(options.task)
    if recipe.task.labelled:
        return recipe
    return replace(recipe, model="", auto=("pretraining",), val=0.1, val_images=(1, MOST_VAL), test=0.1)


def make_recipe(data: str, options: Training, default: str) -> Recipe:
    """The named recipe with the options of the command applied; the recipe validates each value."""
    if options.steps is not None and options.epochs is not None:
        raise Error("--steps and --epochs exclude each other", code="request.conflict")
    check_start(options)
    r = replace(starting_recipe(options, default), data=data, **options.changes())
    if options.steps is not None or options.epochs is not None:
        r = replace(r, length=Duration(options.steps, options.epochs))
    if options.lr is not None:
        r = replace(r, schedule=replace(r.schedule, rate=options.lr))
    return with_teacher(r, options.teacher)


def check_start(options: Training) -> None:
    """Reject --weights together with a model or model options, which would be ignored."""
    named = automatic.fixed_fields(options)
    for field in ("model", "model_options"):
        if "weights" in named and field in named:
            raise Error(
                f"--weights {options.weights} and {field} exclude each other: use --weights to start from a "
                "pretrained model, or --model to train a new one from scratch",
                code="request.conflict",
            )


def execute(request: Request, *, progress: bool) -> Outcome:
    """Plan a request and, unless only the plan is requested, run it. Progress goes to standard error."""
    with machine_for(request.options, progress=progress) as machine:
        planned = plan(request, machine, quiet=not progress)
        return Outcome(planned, None if request.options.plan else run(planned))


def run(plan: Plan) -> dict[str, Any]:
    """Run a plan once; returns the result as --json prints it."""
    if plan.result:
        model = plan.out / Path(str(plan.result.model)).name  # the folder may have been moved
        here = replace(plan.result, run=str(plan.out), model=str(model))
        return here.to_json() | stored_folds(plan) | {"already_finished": True}
    if plan.model.released:
        raise Error(
            f"the plan for {plan.out} has already been run; create a new one", code="request.conflict"
        )
    with stopping(plan.out):
        if not plan.candidates:
            options = plan.options
            if plan.request.folds:
                options = replace(options, accept_changed_data=None)  # the folds would be others
                subruns = Subruns(plan.out, plan.runtime, options, plan.say, plan.opener)
                cross_validate(subruns, plan.recipe, plan.request.folds)
            result = run_recipe(plan.recipe, plan.out, plan.runtime, options, plan.opener, plan.model.release)
            return result.to_json() | stored_folds(plan)
        protocol = Protocol(plan.out, plan.runtime, plan.options, plan.say, plan.opener)
        summary = protocol.follow(plan.candidates, seeds=plan.request.seeds)
        report.draw_if_possible(plan.out, plan.runtime, plan.say)
        plan.runtime.barrier()  # wait for the main process, which writes
        return summary


def stored_folds(plan: Plan) -> dict[str, Any]:
    """The summary of a cross-validation, for the result of its final run."""
    return {"cross_validation": read(plan.out / FOLDS)} if plan.request.folds else {}


def print_outcome(outcome: Outcome, emit: Emit) -> None:
    """Print or emit the plan or the result; only the main process prints."""
    plan, result = outcome.plan, outcome.result
    if not plan.runtime.is_main:
        return
    if emit:
        return emit(plan.to_json() if result is None else result)
    if result is None:
        return print_plan(plan.to_json())
    if plan.result:
        say(f"{plan.out}: already finished ({plan.result.steps} steps); nothing to do")
    print_result(result)
    if plan.result and not plan.request.folds:
        say(f"  {plan.request.train_on(plan.out, resume.suggested(plan.result), accept=False)}")
        if not plan.request.options.more_steps:
            say("options that are not given are those of this run; to choose them again, use a new folder:")
            say(f"  {plan.request.in_new_folder(plan.out)}")


def print_folds(summary: dict[str, Any]) -> None:
    """The accuracy of each fold, and their mean, which is expected of the final model."""
    rows, images = summary["folds"], summary["images"]
    print_table(
        {"fold": row["fold"], "images": row["images"], "accuracy": percent(row["top1"], row["images"]),
         "95 % interval": span(row["interval"], row["images"])} for row in rows
    )  # fmt: skip
    accuracy = f"{percent(summary['mean'], images)} +- {percent(summary['std'], images)}"
    interval = span(summary["interval"], images)
    say(f"mean of {len(rows)} folds: {accuracy} of the images correct; 95 % interval: {interval}")
    say("the model is trained on all of these images, so this accuracy is expected of it")


def print_result(result: dict[str, Any]) -> None:
    if result.get("cross_validation"):
        print_folds(result["cross_validation"])
    where = shlex.quote(result["run"])
    next_verbs = [f"predict {where} IMAGE...", f"evaluate {where} DATA"]
    if "seeds" in result:
        images = result["images"]
        deviation = f" +- {percent(result['std'], images)}" if result["std"] is not None else ""
        chosen = result["chosen"]
        setting = f"at learning rate {result['rate']:g}" if is_rate(chosen) else f"with {called(chosen)}"
        interval = span(wilson(result["mean"], images), images)
        say(f"{percent(result['mean'], images)}{deviation} of {images} test images correct, mean of "
            f"{len(result['seeds'])} seeds {setting}; 95 % interval: {interval}")  # fmt: skip
    else:
        task = run_task(Path(result["run"]), result["test"])
        say(task.summary(result["test"], f"{result['test']['split']} images"))
        if not task.predicts:
            next_verbs = [f"finetune DATA --weights {where}"]
    if result.get("kept"):
        say(stopping_note(result["kept"], result["steps"]))
        if calibration := result["kept"].get("calibration"):
            say(calibration_note(calibration))
    if result.get("features"):
        say(result["features"]["sentence"])
    if before := resume.result_before(Path(result["run"])):
        path, test = before
        say(f"before ({path}): {run_task(path.parent, test).summary(test, 'test images')}")
    say(f"model: {result['model']}")
    page = Path(result["run"]) / REPORT
    if page.exists():
        say(f"report: {page}")
    else:  # the report could not be written
        next_verbs.append(f"report {where}")
    for verb in next_verbs:
        say(f"  vitkit {verb}")
    say(f"  tensorboard --logdir {where}")
