"""Fine-tuning as a verb: a recipe out of words, what it will take, the run, and what it came to."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from vitkit.data.processes import check_sockets
from vitkit.data.sources import Source
from vitkit.errors import Error
from vitkit.experiment.folder import check_recipe, stopping
from vitkit.experiment.pace import seconds_a_step, seconds_to_start
from vitkit.experiment.pages import REPORT
from vitkit.experiment.protocol import called, candidates, follow, is_rate
from vitkit.experiment.run import How, run
from vitkit.experiment.shown import run_task
from vitkit.experiment.start import Kept, Opener, start_model, warnings
from vitkit.experiment.stopping import in_words
from vitkit.experiment.supply import training_view
from vitkit.experiment.terms import Result
from vitkit.models.variants import Config, Model, skeleton
from vitkit.models.vit import ViTConfig, dropped
from vitkit.options import Training
from vitkit.proportions import percent, span, wilson
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.finetune import bit_beside
from vitkit.recipes.recipe import Recipe, override, read_recipe
from vitkit.report.terminal import duration, say, warn
from vitkit.tasks import again, automatic, report
from vitkit.tasks.again import Request
from vitkit.tasks.plan import data_opener, load_here, make_plan, print_plan, state_of, with_protocol
from vitkit.tasks.use import Emit
from vitkit.training.runtime import Runtime, choose, data_workers
from vitkit.training.schedule import Duration
from vitkit.weights.load import load

Tell = Callable[[str], None]
LONG = timedelta(days=1)  # that it may take to read all images of a data set


def finetune(data: str, options: Training, *, protocol: bool = False, seeds: int = 3, emit: Emit) -> None:
    """Choose, say what was chosen and why and how long it will take, then do it."""
    learn(
        data, options, "scratch" if options.model else "finetune", protocol=protocol, seeds=seeds, emit=emit
    )


def pretrain(data: str, options: Training, *, emit: Emit) -> None:
    """The same, from scratch by a recipe of the paper; the model is the recipe's unless one is named."""
    learn(data, options, "pretrain", protocol=False, seeds=1, emit=emit)


def learn(data: str, options: Training, default: str, *, protocol: bool, seeds: int, emit: Emit) -> None:
    request = asked_for(data, options, default, protocol)
    if data_workers(options.workers):
        check_sockets()
    spread = "ddp" if options.spread == "auto" else options.spread
    runtime = choose(
        options.device, options.precision, options.compile, options.recompute, spread, options.deterministic,
        options.record,
    )  # fmt: skip
    how = How(
        workers=options.workers, decoded=options.decoded, max_bad=options.max_bad, trackers=options.track,
        save_aside=options.save_aside, quiet=bool(emit), price_per_hour=options.price_per_hour,
        accept_changed_data=options.accept_changed_data,
    )  # fmt: skip
    with runtime.joined(), data_opener(options.plan) as opened:
        tell = voice(runtime, emit)
        out, split_of = runtime.first(lambda: again.choose_folder(request, tell))
        options = replace(options, split_of=split_of or options.split_of)
        with stopping(out):
            if nothing_to_do(request, out, runtime, opened, emit):
                return
            recipe, config, runtime, plan = settled(
                data, options, default, out, runtime, tell, opened, protocol=protocol
            )
            if protocol and recipe.task.headline.key != "top1":
                raise Error(
                    f"--protocol compares classifiers, and {recipe.objective} trains none: give it when "
                    "fine-tuning the result",
                    code="request.conflict",
                )
            tried = compared(recipe, config, options, runtime, tell, opened) if protocol else {}
            if options.plan:
                plan = with_protocol(plan, len(tried), seeds) if protocol else plan
                if runtime.main:
                    emit(plan) if emit else print_plan(plan)
                return
            if protocol:
                told = follow(tried, out, runtime, how, seeds=seeds, say=tell, opened=opened)
                report.drawn(out, runtime, tell)
            else:
                told = run(recipe, out, runtime, how, opened).to_json()
            if runtime.main:
                emit(told) if emit else tell_result(told)


def nothing_to_do(request: Request, out: Path, runtime: Runtime, opened: Opener, emit: Emit) -> bool:
    """Whether the run is finished and its data is the same: then its result is printed."""
    if request.protocol or request.options.plan:
        return False
    done = runtime.first(lambda: again.already_finished(request, out, opened), patience=LONG)
    if done and runtime.main:
        emit(done.to_json() | {"already_finished": True}) if emit else tell_finished(request, done)
    return done is not None


def asked_for(data: str, options: Training, default: str, protocol: bool = False) -> Request:
    """The command as a value; a model or weights that do not exist are reported before anything is done."""
    recipe = make_recipe(data, options, default)
    again.check_names(override(recipe, options.set))
    return Request("pretrain" if default == "pretrain" else "finetune", data, options, recipe, protocol)


def tell_finished(request: Request, done: Result) -> None:
    """The result of a run that has nothing to do, and how to train it further."""
    say(f"{done.run}: already finished ({done.steps} steps); nothing was done")
    tell_result(done.to_json())
    say(f"  {request.train_on(Path(done.run), again.suggested(done), accept=False)}")


def compared(
    recipe: Recipe,
    config: Config,
    options: Training,
    runtime: Runtime,
    tell: Tell,
    opened: Opener,
) -> dict[str, Recipe]:
    """What the protocol compares for a model: rates, 0.06 too for convolutions, BiT's rule for a ResNet."""
    if isinstance(config, ViTConfig):
        return candidates(recipe, convolutional=config.stem is not None)
    if "hyperrule" in recipe.auto:
        return candidates(recipe, convolutional=True)
    train = opened(replace(recipe, against=()), None)["train"]
    pixels = round(median(automatic.shorter_sides(train))) ** 2
    bit = bit_beside(recipe, len(train), pixels, automatic.given(options))
    at_its_size = skeleton(replace(config, image_size=bit.image_size))
    bit = automatic.fit_memory(replace(bit, micro_batch=0), options, at_its_size, runtime, tell)
    tell(f"a ResNet: BiT's HyperRule ({bit.length.steps} steps, {bit.image_size[0]} pixels) is tried too")
    return candidates(recipe, convolutional=True, bit=runtime.agreed(bit))


def voice(runtime: Runtime, emit: Emit) -> Tell:
    """How choices are told: on standard error, by one process, and not to a program."""
    return lambda text: warn(text) if runtime.main and not emit else None


def make_recipe(data: str, options: Training, default: str) -> Recipe:
    """The named recipe with the command's options on it; each is checked by the recipe itself."""
    if options.steps is not None and options.epochs is not None:
        raise ValueError("give --steps or --epochs, not both")
    check_start(options)
    r = replace(named_recipe(options.recipe or default), data=data, **options.changes())
    if options.steps is not None or options.epochs is not None:
        r = replace(r, length=Duration(options.steps, options.epochs))
    if options.lr is not None:
        r = replace(r, schedule=replace(r.schedule, rate=options.lr))
    return r


def check_start(options: Training) -> None:
    """Weights bring their own model: another one, or options of one, would be ignored."""
    named = automatic.given(options)
    for field in ("model", "model_options"):
        if "weights" in named and field in named:
            raise ValueError(
                f"--weights {options.weights} decides the model, and {field} is given too: give --weights to "
                "start from a trained model, or --model to train a new one from scratch, not both"
            )


def settled(
    data: str,
    options: Training,
    default: str,
    out: Path,
    runtime: Runtime,
    tell: Tell,
    opened: Kept,
    *,
    protocol: bool = False,
) -> tuple[Recipe, Config, Runtime, dict[str, Any]]:
    """The complete recipe, its model's configuration, how it is spread, and the plan where one is wanted."""
    request = asked_for(data, options, default)
    old = runtime.agreed(again.remembered(request, out))
    recipe = old or override(request.recipe, options.set)
    splits = opened(replace(recipe, against=()), out)
    choices: list[str] = []
    note = choices.append if options.plan else tell
    if old is None:
        for text in warnings(splits, recipe, opened.findings):
            tell(text)
        recipe = automatic.fill_in(recipe, options, splits["train"], runtime, note)
        if not protocol:
            recipe = automatic.fill_stopping(recipe, options, splits)
    runtime.share(recipe.batch)  # errors before anything takes time
    training_view(recipe)
    if old is None:
        recipe = automatic.fit_warmup(recipe, options, len(splits["train"]), note)
    model = start_model(recipe, splits["train"], load_here if options.plan else load)
    if (lost := dropped(model.config, strict=options.strict_size)) and old is None and not options.plan:
        tell(lost)
    if options.spread == "auto":
        runtime = automatic.fit_devices(recipe, model, runtime, note)
    if old is None:
        recipe = automatic.fit_memory(recipe, options, model, runtime, note)
    recipe = runtime.agreed(recipe)
    if options.plan:
        plan = planned(recipe, out, splits, model, runtime, data_workers(options.workers))
        return recipe, model.config, runtime, plan | {"choices": choices}
    if old is None:
        seconds = seconds_a_step(recipe, model, splits["train"], runtime, data_workers(options.workers))
        tell(length_in_words(recipe, len(splits["train"]), seconds))
    return recipe, model.config, runtime, {}


def length_in_words(recipe: Recipe, images: int, seconds: float | None) -> str:
    """The length of a run, its time where that was measured, and how to change it."""
    steps = recipe.length.in_steps(images, recipe.batch)
    time = "" if seconds is None else f", about {duration(steps * seconds)}"
    return f"{steps} steps of {recipe.batch} images{time}; --steps or --epochs for another length"


def planned(
    recipe: Recipe, out: Path, splits: dict[str, Source], model: Model, runtime: Runtime, workers: int
) -> dict[str, Any]:
    """The plan, with the time of a step measured where there is anything left to train."""
    if (stored := out / "recipe.json").exists():
        check_recipe(out, read_recipe(stored), recipe)
    state, seconds, start = state_of(out, recipe, len(splits["train"])), None, 0.0
    if state.action != "finished":
        seconds = seconds_a_step(recipe, model, splits["train"], runtime, workers)
        start = 0.0 if seconds is None else seconds_to_start(recipe, splits["train"], workers)
    return make_plan(recipe, out, splits, model, runtime, state, seconds, start)


def tell_result(told: dict[str, Any]) -> None:
    next_verbs = [f"predict {told['run']} IMAGE...", f"evaluate {told['run']} DATA"]
    if "seeds" in told:
        images = told["images"]
        spread = f" +- {percent(told['std'], images)}" if told["std"] is not None else ""
        by = f"at rate {told['rate']:g}" if is_rate(told["chosen"]) else f"by {called(told['chosen'])}"
        ends = span(wilson(told["mean"], images), images)
        say(f"{percent(told['mean'], images)}{spread} of {images} test images right, mean of "
            f"{len(told['seeds'])} seeds {by}; 95 % interval: {ends}")  # fmt: skip
    else:
        task = run_task(Path(told["run"]), told["test"])
        say(task.line(told["test"], f"{told['test']['split']} images"))
        if not task.predicts:
            next_verbs = [f"finetune DATA --weights {told['run']}"]
    if told.get("kept"):
        say(in_words(told["kept"], told["steps"]))
    if before := again.result_before(Path(told["run"])):
        path, test = before
        say(f"before ({path}): {run_task(path.parent, test).line(test, 'test images')}")
    say(f"the model: {told['model']}")
    drawn = Path(told["run"]) / REPORT
    if drawn.exists():
        say(f"the report: {drawn}")
    else:  # it could not be made
        next_verbs.append(f"report {told['run']}")
    for verb in next_verbs:
        say(f"  vitkit {verb}")
    say(f"  tensorboard --logdir {told['run']}")
