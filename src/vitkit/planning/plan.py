"""Plan a training command: decide its settings, open its data and build its model, each once."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.content import HASH_CACHE
from vitkit.data.folds import check_classes
from vitkit.data.loader import check_sockets
from vitkit.data.sources.remote import Cache
from vitkit.data.sources.source import Source
from vitkit.metrics.cost import Memory, forward_flops, parameters, training_passes
from vitkit.models.variants import Config, Model, fresh, published_variant, skeleton, with_image_size
from vitkit.models.vit import ViTConfig, dropped
from vitkit.options import Training
from vitkit.planning import automatic, dense_rules, finetune_rules, pretraining_rules, resume, start
from vitkit.planning.augmentation_text import augmentation
from vitkit.planning.automatic import Choice, Choices, Circumstances
from vitkit.planning.compilation import choose_compilation
from vitkit.planning.memory import memory_of, trained_skeleton
from vitkit.planning.plan_text import headline, page
from vitkit.planning.resume import Request
from vitkit.recipes.finetune import bit_beside
from vitkit.recipes.recipe import Recipe, override, read_recipe, stages_of
from vitkit.report.terminal import duration, warn
from vitkit.runs.batches import training_view
from vitkit.runs.build import SplitCache, build_model, warnings
from vitkit.runs.estimates import seconds_a_step, seconds_to_start
from vitkit.runs.folder import Result, RunOptions, check_recipe, stopping
from vitkit.runs.protocol import candidates
from vitkit.runtime.runtime import Runtime, choose_runtime, data_workers
from vitkit.training.checkpoint import complete
from vitkit.training.trainable import trainable_parameters, trainable_text
from vitkit.weights.load import load
from vitkit.weights.published import PUBLISHED, cache_path

TIMED_STEPS = 2000  # of a run on a GPU, from which on it is worth seconds to time its steps beforehand
READ_TIMEOUT = timedelta(days=1)  # of the other processes, while one reads all images of a data set
Say = Callable[[str], None]


@dataclass(frozen=True)
class Machine:
    """Where a request is planned and run: the runtime, an opener for its data, and a log function."""

    runtime: Runtime
    opener: SplitCache
    say: Say


@contextmanager
def machine_for(options: Training, *, progress: bool) -> Iterator[Machine]:
    """The machine for a command, within its process group; data is opened once, for a plan in memory only.

    progress: whether the main process prints choices and warnings to standard error.
    """
    if data_workers(options.workers):
        check_sockets()
    parallel = "ddp" if options.parallel == "auto" else options.parallel
    runtime = choose_runtime(
        options.device, options.precision, options.compile == "yes", options.recompute, parallel,
        options.deterministic, options.cuda_graph,
    )  # fmt: skip
    with runtime.process_group(), data_opener(options.plan) as opener:
        yield Machine(runtime, opener, log_function(runtime, quiet=not progress))


def log_function(runtime: Runtime, *, quiet: bool) -> Say:
    """Prints to standard error, in the main process only and unless quiet."""
    return lambda text: warn(text) if runtime.is_main and not quiet else None


@contextmanager
def data_opener(plan: bool) -> Iterator[SplitCache]:
    """The opener of a training command; for a plan it leaves nothing on the disk."""
    if not plan:
        yield SplitCache()
        return
    with HASH_CACHE.in_memory(), tempfile.TemporaryDirectory() as folder:
        yield SplitCache(cache=Cache(Path(folder), 0))


def load_here(place: str) -> Model:
    """Load weights without a download: published ones that are not here give a fresh model of that shape.

    Those of the Hub are downloaded, since nothing else says what their shape is.
    """
    weight = None if Path(place).exists() else PUBLISHED.get(place)
    if weight is None or cache_path(weight).exists():
        return load(place)
    return fresh(published_variant(weight.model))


class LazyModel:
    """The model of a plan, built on first use and released to its run once."""

    def __init__(self, build: Callable[[], Model]):
        self.build, self.released = build, False
        self.model: Model | None = None

    def __call__(self) -> Model:
        if self.model is None:
            self.model = self.build()
        return self.model

    def release(self, recipe: Recipe, train: Source) -> Model:
        """Hand the model over to the run, which may have the classes in another order."""
        model, self.model, self.released = self(), None, True
        labels = recipe.task.labels(train.classes)
        if set(model.labels) == set(labels):
            model.labels = labels
        return model


@dataclass(frozen=True)
class State:
    """The state of a run folder; action: create, restart (no checkpoint yet), resume or finished."""

    action: str
    total: int  # steps of the whole run
    step: int = 0
    result: Result | None = None


def state_of(out: Path, recipe: Recipe, images: int) -> State:
    """What the command would do with the folder, for a number of training images."""
    total = stages_of(recipe, images)[-1].end
    if not (out / "recipe.json").exists():
        return State("create", total)
    checkpoints = complete(out / "checkpoints")
    step = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    if result := resume.finished(out, recipe):
        early = result.kept["stopped_early"] if result.kept else bool(recipe.patience)
        if result.steps >= total or early:
            return State("finished", total, result.steps, result)
    return State("resume" if step else "restart", total, step)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a training command will do; commands/finetune.py runs it."""

    request: Request
    out: Path  # the run folder
    recipe: Recipe  # with everything decided
    splits: Mapping[str, Source]
    model: LazyModel
    runtime: Runtime
    options: RunOptions
    opener: SplitCache
    say: Say
    state: State
    choices: tuple[Choice, ...] = ()  # settings chosen for the user, with reasons
    candidates: Mapping[str, Recipe] = field(default_factory=dict)  # of the protocol
    result: Result | None = None  # of a finished run with nothing left to do
    seconds_a_step: float | None = None  # None: not measured
    seconds_to_start: float = 0.0

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        return self.state.total

    @property
    def steps_left(self) -> int:
        return 0 if self.state.action == "finished" else self.steps - self.state.step

    @property
    def runs(self) -> int:
        """One; with --folds one more for each; for the protocol the candidates, and the seeds of the best."""
        if self.request.folds:
            return self.request.folds + 1
        compared = len(self.candidates) if len(self.candidates) > 1 else 0
        return compared + self.request.seeds if self.candidates else 1

    @property
    def seconds(self) -> float | None:
        """The expected time of all runs; None if no step was timed."""
        if not self.steps_left:
            return 0.0
        if self.seconds_a_step is None:
            return None
        return self.runs * (self.seconds_to_start + self.steps_left * self.seconds_a_step)

    @property
    def memory(self) -> Memory:
        """The expected memory of a step."""
        images = self.recipe.micro_batch or self.recipe.batch // self.runtime.world
        return memory_of(self.recipe, self.model(), self.runtime, images, self.splits["train"])

    @property
    def trains(self) -> str:
        """Which parameters are trained, in words."""
        recipe, model = self.recipe, self.model()
        trainable = trainable_parameters(trained_skeleton(recipe, model.config))
        return trainable_text(recipe.train, recipe.lora, trainable, parameters(model))

    def __repr__(self) -> str:
        return f"Plan({headline(self.to_json())!r})"

    def __str__(self) -> str:
        return "\n".join(page(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """The plan as `--plan --json` prints it."""
        recipe, model, steps, note = self.recipe, self.model(), self.steps, dropped(self.model().config)
        memory, images, result = self.memory, len(self.splits["train"]), self.state.result
        trained = trained_skeleton(recipe, model.config)
        facts = {
            "run": str(self.out), "action": self.state.action, "step": self.state.step,
            "recipe": recipe.name, "data": recipe.data,
            "corrections": recipe.corrections or None, "against": list(recipe.against),
            "download_MB": download_size(recipe.weights),
            "start": recipe.weights or f"{recipe.model} from scratch",
            **{f"{name}_images": len(part) for name, part in self.splits.items()},
            "classes": len(self.splits["train"].classes), "parameters": parameters(model),
            "trainable_parameters": trainable_parameters(trained), "train": recipe.train,
            "trains": self.trains,
            "image_size": f"{recipe.image_size[0]} x {recipe.image_size[1]}",
            **({"pixels": note} if note else {}),
            "batch": recipe.batch, "micro_batch": recipe.micro_batch or None, "optimizer": optimizer(recipe),
            "learning_rate": recipe.schedule.rate, "warmup": recipe.schedule.warmup,
            "decay": recipe.schedule.decay, "augmentation": augmentation(recipe, self.splits["train"]),
            "evaluations": recipe.evaluations if "val" in self.splits else 0,
            "keep": "best" if recipe.keeps_best else "last", "keep_margin": recipe.keep_margin,
            "patience": recipe.patience,
            "fitted_head": finetune_rules.is_fitted_head(recipe),
            "steps": steps, "steps_left": self.steps_left, "images_seen": steps * recipe.batch,
            "epochs": steps * recipe.batch / images,
            "training_FLOPs": round(
                training_passes(trained) * forward_flops(model.config) * steps * recipe.batch
            ),
            "memory_GB": memory.total / 1e9,
            "memory_free_GB": automatic.device_memory(self.runtime.device) / 1e9,
            "largest_batch_at_once": automatic.largest_batch(
                recipe, model, self.runtime, self.splits["train"]
            ),
            "seconds": self.seconds,
            "time": "not measured" if self.seconds is None else duration(self.seconds),
            "checkpoint_GB": (memory.parameters + memory.optimizer) / 1e9,
            "choices": [str(choice) for choice in self.choices],
            "result": result.test.get("top1") if result else None,
            "summary": recipe.task.summary(result.test, "test images")
            if result and recipe.task.targets else None,
        } | self.runtime.describe()  # fmt: skip
        if self.candidates:
            facts |= {"candidates": len(self.candidates), "seeds": self.request.seeds, "runs": self.runs,
                      "keep": "last", "patience": 0, "evaluations": 0}  # fmt: skip
        if self.request.folds:
            facts |= {"folds": self.request.folds, "runs": self.runs, "keep": "last", "evaluations": 0}
        return facts


def plan(request: Request, machine: Machine, *, quiet: bool = False) -> Plan:
    """Decide everything that a request leaves open, open its data and build its model, each once.

    quiet: whether the run prints nothing.
    """
    runtime, opener = machine.runtime, machine.opener
    options = run_options(request.options, quiet=quiet)
    out, other = runtime.on_main_first(lambda: resume.choose_folder(request, opener, machine.say))
    request = request.beside(other)
    with stopping(out):
        if not (request.protocol or request.options.plan):
            done = runtime.on_main_first(
                lambda: resume.already_finished(request, out, opener), timeout=READ_TIMEOUT
            )
            if done:
                return finished_plan(request, out, done, machine, options)
        old = runtime.broadcast(resume.resumed_recipe(request, out))
        return planned(request, out, old, machine, options)


def run_options(options: Training, *, quiet: bool) -> RunOptions:
    return RunOptions(
        workers=options.workers, decoded=options.decoded, max_bad=options.max_bad, trackers=options.track,
        save_aside=options.save_aside, quiet=quiet, price_per_hour=options.price_per_hour,
        accept_changed_data=options.accept_changed_data,
    )  # fmt: skip


def finished_plan(request: Request, out: Path, done: Result, machine: Machine, options: RunOptions) -> Plan:
    """The plan of a finished run, for which no weights are loaded."""
    recipe = read_recipe(out / "recipe.json")
    splits = machine.opener(recipe, out)
    return Plan(
        request, out, recipe, splits, LazyModel(partial(build_model, recipe, splits["train"])),
        machine.runtime, options, machine.opener, machine.say,
        state=state_of(out, recipe, len(splits["train"])), result=done,
    )  # fmt: skip


def planned(request: Request, out: Path, old: Recipe | None, machine: Machine, options: RunOptions) -> Plan:
    """The plan of a new run, or of a resumed one with its recipe `old`."""
    runtime, opener, only = machine.runtime, machine.opener, request.options.plan
    requested = override(request.recipe, request.options.set)
    recipe = old or requested
    splits = opener(replace(recipe, against=()), out)
    if request.folds:
        check_classes(splits["train"], request.folds)
    known = automatic.circumstances(request.options, splits, runtime)
    choices = Choices(machine.say if not only else None)
    if old is None:
        for text in warnings(dict(splits), recipe, opener.findings):
            machine.say(text)
        automatic.check_calibration(recipe, known, protocol=request.protocol)
        recipe = automatic.decide(recipe, rules(request), known, choices.add)
    runtime.local_places(recipe.batch)  # raises before anything takes time
    training_view(recipe)
    config = start.starting_config(recipe)
    if config is not None:
        start.check_size(config, recipe.weights or recipe.model)
        start.check_rgb(config, recipe.weights or recipe.model)
    if old is None:
        recipe = fitted_to_weights(recipe, config, known, choices)
    loader = load_here if only else load if requested.weights else automatic.load_default
    model = LazyModel(partial(build_model, recipe, splits["train"], loader))
    note = dropped(model().config, strict=request.options.strict_size)
    if note and old is None and not only:
        machine.say(note)
    if request.options.parallel == "auto":
        runtime, choice = automatic.fit_devices(recipe, model(), runtime, splits["train"])
        choices.add(choice)
    if old is None:
        recipe, choice = finetune_rules.fit_model(
            recipe, model(), known, runtime, data_workers(options.workers)
        )
        choices.decide_training(trains=not finetune_rules.is_fitted_head(recipe))
        choices.add(choice)
        recipe = automatic.fitted(recipe, model(), known, runtime, choices.add)
    recipe = runtime.broadcast(recipe)
    recipes = compared(recipe, model().config, known, machine, choices) if request.protocol else {}
    state = state_of(out, recipe, len(splits["train"]))
    runtime, choice = choose_compilation(request.options.compile, recipe, model(), runtime, state.total)
    choices.add(choice)
    plan = Plan(
        request, out, recipe, splits, model, runtime, options, opener, machine.say,
        state=state, choices=tuple(choices.made), candidates=recipes,
    )  # fmt: skip
    return timed(plan, new=old is None)


def fitted_to_weights(
    recipe: Recipe, config: Config | None, known: Circumstances, choices: Choices
) -> Recipe:
    """The recipe with a warm-up that fits its length, and the resolution and the rate for its weights."""
    recipe = automatic.decide(recipe, (automatic.fit_warmup,), known, choices.add)
    recipe, choice = start.fit_resolution(recipe, known, config)
    choices.add(choice)
    trained_at = config.image_size if recipe.weights and config is not None else None
    recipe, choice = finetune_rules.choose_rate(recipe, known, trained_at)
    choices.add(choice)
    return recipe


VAL_RULES: tuple[automatic.Rule, ...] = (automatic.choose_stopping, finetune_rules.choose_calibration)


def rules(request: Request) -> tuple[automatic.Rule, ...]:
    """The rules for a request; those that need val are left out where it trains on val in the end."""
    with_val = () if request.protocol or request.folds else VAL_RULES
    return (
        *automatic.RECIPE_RULES,
        *finetune_rules.RULES,
        *pretraining_rules.RULES,
        *dense_rules.RULES,
        *with_val,
    )


def compared(
    recipe: Recipe, config: Config, known: Circumstances, machine: Machine, choices: Choices
) -> dict[str, Recipe]:
    """The protocol's candidates for a model: learning rates and, for a ResNet, BiT's HyperRule."""
    if isinstance(config, ViTConfig):
        return candidates(recipe, convolutional=config.stem is not None)
    if "hyperrule" in recipe.auto:
        return candidates(recipe, convolutional=True)
    bit = bit_beside(recipe, known.images, round(known.side) ** 2, known.fixed)
    resized = skeleton(with_image_size(config, bit.image_size))
    bit = automatic.fitted(replace(bit, micro_batch=0), resized, known, machine.runtime, choices.add)
    rule = f"({bit.length.steps} steps, {bit.image_size[0]} pixels)"
    choices.add(Choice("a ResNet", f"BiT's HyperRule {rule} is tried too"))
    return candidates(recipe, convolutional=True, bit=machine.runtime.broadcast(bit))


def timed(plan: Plan, *, new: bool) -> Plan:
    """The plan with the measured time of a step: for a new run, or a --plan of an unfinished one.

    Not for a short run on a GPU, which shows its remaining time after a second, nor for a single step.
    """
    request, recipe, train = plan.request, plan.recipe, plan.splits["train"]
    only, workers = request.options.plan, data_workers(request.options.workers)
    if only and (stored := plan.out / "recipe.json").exists():
        check_recipe(plan.out, read_recipe(stored), recipe)
    if plan.state.action == "finished" or not (only or new):
        return plan
    short = plan.steps_left == 1
    short = short or (plan.runtime.device != "cpu" and plan.runs * plan.steps_left < TIMED_STEPS)
    seconds, start = None, 0.0
    if only or not short:
        seconds = seconds_a_step(recipe, plan.model(), train, plan.runtime, workers)
    if only and seconds is not None:
        start = seconds_to_start(recipe, train, workers)
    if not only and recipe.train != "all":
        plan.say(f"trains {plan.trains}")
    if not only:
        plan.say(length_text(recipe, len(train), seconds))
    return replace(plan, seconds_a_step=seconds, seconds_to_start=start)


def length_text(recipe: Recipe, images: int, seconds: float | None) -> str:
    """The length of a run, its expected time, and how to change it."""
    if finetune_rules.is_fitted_head(recipe):
        return "the head is fitted and no weights are trained; --steps or --epochs for training all of them"
    steps = recipe.length.in_steps(images, recipe.batch)
    time = "" if seconds is None else f", about {duration(steps * seconds)}"
    counted = "1 step" if steps == 1 else f"{steps} steps"
    return f"{counted} of {recipe.batch} images{time}; --steps or --epochs for another length"


def download_size(weights: str) -> float | None:
    """The megabytes to download: 0 for local weights, None if the size is unknown."""
    weight = None if Path(weights or ".").exists() else PUBLISHED.get(weights)
    return 0.0 if weight is None or cache_path(weight).exists() else weight.megabytes


def optimizer(recipe: Recipe) -> str:
    config = recipe.optimizer
    adam = "AdamW" if config.weight_decay else "Adam"  # the decay is decoupled
    name = f"SGD, momentum {config.momentum:g}" if config.kind == "sgd" else adam
    decay = f", weight decay {config.weight_decay:g}" if config.weight_decay else ""
    return f"{name}{decay}"
