"""finetune and pretrain: a request out of options, its plan, the run, and what is printed of it."""

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
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.report.terminal import say
from vitkit.runs.folder import stopping
from vitkit.runs.kept_weights import stopping_note
from vitkit.runs.page import REPORT, run_task
from vitkit.runs.protocol import Protocol, called, check_seeds, is_rate
from vitkit.runs.run import run as run_recipe
from vitkit.training.schedule import Duration


@dataclass(frozen=True)
class Outcome:
    """What became of a request: its plan and, unless only that was asked for, the result as one object."""

    plan: Plan
    result: dict[str, Any] | None = None


def finetune(data: str, options: Training, *, protocol: bool = False, seeds: int = 3, emit: Emit) -> None:
    """The verb: choose, report the choices and how long it will take, then do it."""
    show(learn(finetuning(data, options, protocol=protocol, seeds=seeds), progress=not emit), emit)


def pretrain(data: str, options: Training, *, emit: Emit) -> None:
    """The same, from scratch by a recipe of the paper; the model is the recipe's unless one is named."""
    show(learn(pretraining(data, options), progress=not emit), emit)


def finetuning(data: str, options: Training, *, protocol: bool = False, seeds: int = 3) -> Request:
    """The request of `vitkit finetune`."""
    check_seeds(seeds)
    return request_for(
        "finetune", data, options, "scratch" if options.model else "finetune", protocol=protocol, seeds=seeds
    )


def pretraining(data: str, options: Training) -> Request:
    """The request of `vitkit pretrain`."""
    return request_for("pretrain", data, options, "pretrain")


def request_for(
    verb: str, data: str, options: Training, default: str, *, protocol: bool = False, seeds: int = 1
) -> Request:
    """A request as a value; a model or weights that do not exist are reported before anything is done."""
    recipe = make_recipe(data, options, default)
    whole = override(recipe, options.set)
    resume.check_names(whole)
    if protocol and whole.task.headline.key != "top1":
        raise Error(
            f"--protocol compares classifiers, and {whole.objective} trains none: give it when fine-tuning "
            "the result",
            code="request.conflict",
        )
    return Request(verb, data, options, recipe, protocol, seeds)


def make_recipe(data: str, options: Training, default: str) -> Recipe:
    """The named recipe with the command's options on it; each is checked by the recipe itself."""
    if options.steps is not None and options.epochs is not None:
        raise Error("give --steps or --epochs, not both", code="request.conflict")
    check_start(options)
    r = replace(named_recipe(options.recipe or default), data=data, **options.changes())
    if options.steps is not None or options.epochs is not None:
        r = replace(r, length=Duration(options.steps, options.epochs))
    if options.lr is not None:
        r = replace(r, schedule=replace(r.schedule, rate=options.lr))
    return r


def check_start(options: Training) -> None:
    """Weights bring their own model: another one, or options of one, would be ignored."""
    named = automatic.fixed_fields(options)
    for field in ("model", "model_options"):
        if "weights" in named and field in named:
            raise Error(
                f"--weights {options.weights} decides the model, and {field} is given too: give --weights to "
                "start from a trained model, or --model to train a new one from scratch, not both",
                code="request.conflict",
            )


def learn(request: Request, *, progress: bool) -> Outcome:
    """Plan a request and, unless only the plan is wanted, run it. progress: on standard error."""
    with machine_for(request.options, progress=progress) as machine:
        made = plan(request, machine, quiet=not progress)
        return Outcome(made, None if request.options.plan else run(made))


def run(plan: Plan) -> dict[str, Any]:
    """Do what was planned, once: the result as one object, as --json prints it."""
    if plan.result:
        return plan.result.to_json() | {"already_finished": True}
    if plan.model.released:
        raise Error(f"this plan of {plan.out} was run already; make another one", code="request.conflict")
    with stopping(plan.out):
        if not plan.candidates:
            done = run_recipe(
                plan.recipe, plan.out, plan.runtime, plan.options, plan.opener, plan.model.release
            )
            return done.to_json()
        protocol = Protocol(plan.out, plan.runtime, plan.options, plan.say, plan.opener)
        summary = protocol.follow(plan.candidates, seeds=plan.request.seeds)
        report.drawn(plan.out, plan.runtime, plan.say)
        plan.runtime.barrier()  # for the one that writes
        return summary


def show(outcome: Outcome, emit: Emit) -> None:
    """What the verbs print in the end, by one process."""
    made, result = outcome.plan, outcome.result
    if not made.runtime.is_main:
        return
    if emit:
        return emit(made.to_json() if result is None else result)
    if result is None:
        return print_plan(made.to_json())
    if made.result:
        say(f"{made.out}: already finished ({made.result.steps} steps); nothing was done")
    show_result(result)
    if made.result:
        say(f"  {made.request.train_on(made.out, resume.suggested(made.result), accept=False)}")


def show_result(result: dict[str, Any]) -> None:
    next_verbs = [f"predict {result['run']} IMAGE...", f"evaluate {result['run']} DATA"]
    if "seeds" in result:
        images = result["images"]
        deviation = f" +- {percent(result['std'], images)}" if result["std"] is not None else ""
        by = f"at rate {result['rate']:g}" if is_rate(result["chosen"]) else f"by {called(result['chosen'])}"
        ends = span(wilson(result["mean"], images), images)
        say(f"{percent(result['mean'], images)}{deviation} of {images} test images right, mean of "
            f"{len(result['seeds'])} seeds {by}; 95 % interval: {ends}")  # fmt: skip
    else:
        task = run_task(Path(result["run"]), result["test"])
        say(task.summary(result["test"], f"{result['test']['split']} images"))
        if not task.predicts:
            next_verbs = [f"finetune DATA --weights {result['run']}"]
    if result.get("kept"):
        say(stopping_note(result["kept"], result["steps"]))
    if before := resume.result_before(Path(result["run"])):
        path, test = before
        say(f"before ({path}): {run_task(path.parent, test).summary(test, 'test images')}")
    say(f"the model: {result['model']}")
    page = Path(result["run"]) / REPORT
    if page.exists():
        say(f"the report: {page}")
    else:  # it could not be made
        next_verbs.append(f"report {result['run']}")
    for verb in next_verbs:
        say(f"  vitkit {verb}")
    say(f"  tensorboard --logdir {result['run']}")
