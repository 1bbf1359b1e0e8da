"""Settings that are chosen for the user: rules from recipe to recipe, each with its reason."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch

from vitkit.data.decode import BadImage, decode
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.io.free_memory import free_memory
from vitkit.models.variants import Model
from vitkit.options import PATIENCE, Training
from vitkit.planning.memory import memory_of
from vitkit.recipes.finetune import hyperrule
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import field_of, own_name
from vitkit.runs.build import no_validation
from vitkit.runtime.runtime import Runtime
from vitkit.training.schedule import Duration
from vitkit.weights.load import load
from vitkit.weights.published import PUBLISHED, DownloadError, cache_path

ON_GPU, ON_CPU = "ViT-B/16.augreg-i21k", "ViT-Ti/16.augreg-i21k"
LARGE = 320  # shorter side of images from which on 384 pixels show more than 224
USABLE = 0.92  # of a device's free memory; libraries and fragmentation take the rest
CPU_IMAGES = 12_800  # for fine-tuning on a CPU: half an hour of ViT-Ti/16 on two cores


@dataclass(frozen=True)
class Choice:
    """A setting that was chosen for the user, and why."""

    what: str
    reason: str
    training: bool = False  # whether it is of no effect where a head is only fitted

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


class Choices:
    """The choices so far; each is logged if there is a log function.

    Those about training wait until it is known that the model is trained, and not only its head fitted.
    """

    def __init__(self, say: Callable[[str], None] | None):
        self.made: list[Choice] = []
        self.say = say
        self.training_decided = False

    def add(self, choice: Choice | None) -> None:
        if choice:
            self.made.append(choice)
            if self.say and (self.training_decided or not choice.training):
                self.say(str(choice))

    def decide_training(self, *, trains: bool) -> None:
        """Log the choices about training, or drop them if nothing is trained."""
        self.training_decided = True
        waiting = [choice for choice in self.made if choice.training]
        self.made = [choice for choice in self.made if trains or not choice.training]
        for choice in waiting:
            if trains and self.say:
                self.say(str(choice))


@dataclass(frozen=True)
class Circumstances:
    """The inputs of the rules: data, kind of device and the user's decisions, but no measured speed."""

    splits: Mapping[str, Source]
    fixed: frozenset[str]  # fields of the recipe that the user has set
    device: str = "cpu"
    world: int = 1
    fixed_rate: bool = False  # whether the user has set the learning rate alone, of the schedule
    parts: frozenset[str] = frozenset()  # what the user has set of a field alone, as in optimizer.average
    largest: int | None = None  # the largest micro-batch that fits into memory; None: not known yet

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def fixed_warmup(self) -> bool:
        return self.has_set("schedule.warmup")

    def has_set(self, *names: str) -> bool:
        """Whether the user has set one of these fields, or parts of fields such as schedule.rate."""
        fixed = self.fixed | self.parts
        return bool(fixed.intersection(names)) or (
            self.fixed_rate and not {"schedule", "schedule.rate"}.isdisjoint(names)
        )

    @property
    def images(self) -> int:
        return len(self.splits["train"])

    @cached_property
    def side(self) -> float:
        """The median shorter side of the training images."""
        return median(shorter_sides(self.splits["train"]))


Rule = Callable[[Recipe, Circumstances], tuple[Recipe, Choice | None]]


def circumstances(options: Training, splits: Mapping[str, Source], runtime: Runtime) -> Circumstances:
    fixed, rate = frozenset(fixed_fields(options)), options.lr is not None
    parts = frozenset(own_name(change.partition("=")[0].strip()) for change in options.set) - fixed
    return Circumstances(splits, fixed, runtime.device, runtime.world, rate, parts)


def decide(
    recipe: Recipe, rules: Sequence[Rule], known: Circumstances, note: Callable[[Choice], None]
) -> Recipe:
    """Apply the rules in order; `note` receives each choice."""
    for rule in rules:
        recipe, choice = rule(recipe, known)
        if choice:
            note(choice)
    return recipe


def fixed_fields(options: Training) -> set[str]:
    """The fields of a recipe that the user has set."""
    named = {field_of(change) for change in options.set}
    if options.steps is not None or options.epochs is not None:
        named.add("length")
    return named | set(options.changes())


def choose_weights(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The default published weights for this kind of device, if the user has named nothing to start from."""
    if recipe.weights or recipe.model or "weights" not in recipe.auto:
        return recipe, None
    name = default_weights(gpu=known.gpu)
    reason = f"the default on {'a GPU' if known.gpu else 'a CPU'}"
    return replace(recipe, weights=name), Choice(f"weights {name}", reason)


def default_weights(*, gpu: bool) -> str:
    return ON_GPU if gpu else ON_CPU


def apply_hyperrule(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """BiT's HyperRule: length, image size and Mixup by the number and the size of the images."""
    if "hyperrule" not in recipe.auto:
        return recipe, None
    recipe = hyperrule(recipe, known.images, round(known.side) ** 2, known.fixed)
    return recipe, Choice(
        f"BiT's rule for {known.images} images", f"{recipe.length}, {recipe.image_size[0]} pixels"
    )


def choose_resolution(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    if not may_choose("image_size", recipe, known):
        return recipe, None
    pixels = 384 if known.gpu and known.side >= LARGE else 224
    why = "the images are small" if known.gpu else "on a CPU"
    why = "there is a GPU, and the images are large enough" if pixels == 384 else why
    choice = Choice(f"resolution {pixels}", f"{why} (median shorter side {known.side:.0f} pixels)")
    return replace(recipe, image_size=(pixels, pixels)), choice


def choose_batch(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """A power of two, at most an eighth of the images, that the processes can share."""
    if not may_choose("batch", recipe, known):
        return recipe, None
    batch = batch_for(known, steps_an_epoch=8)
    reason = "512 as in the paper" if batch == 512 else f"for {known.images} images"
    return replace(recipe, batch=batch), Choice(f"batch {batch}", reason)


def batch_for(known: Circumstances, steps_an_epoch: int) -> int:
    """A power of two of 8 or more that leaves an epoch so many steps and that the processes can share."""
    largest, whole = 512 if known.gpu else 64, max(1, known.images // steps_an_epoch)
    batch = max(8, min(largest, 2 ** (whole.bit_length() - 1)))
    return max(known.world, batch // known.world * known.world)


def choose_length(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    if not may_choose("length", recipe, known):
        return recipe, None
    steps = steps_for(known.images, recipe.batch, gpu=known.gpu)
    warmup = recipe.schedule.warmup if known.fixed_warmup else min(500, steps // 10)
    schedule = replace(recipe.schedule, warmup=warmup)
    reason = f"for {known.images} training images on a {'GPU' if known.gpu else 'CPU'}"
    return replace(recipe, length=Duration(steps=steps), schedule=schedule), Choice(f"{steps} steps", reason)


def may_choose(field: str, recipe: Recipe, known: Circumstances) -> bool:
    return field in recipe.auto and field not in known.fixed


def steps_for(images: int, batch: int, *, gpu: bool) -> int:
    """The length of a fine-tuning run, by the data and the kind of device and never by a measured speed.

    So the same command gives the same model on a busy machine and on an idle one. On a GPU these are BiT's
    lengths; on a CPU they are shortened to a reasonable time, but to at least two epochs.
    """
    if gpu:
        return 500 if images < 20_000 else 10_000 if images < 500_000 else 20_000
    return max(min(500, CPU_IMAGES // batch), -(-2 * images // batch), 20)


def choose_stopping(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """Keep the best weights and stop early, if there is validation data and the user has not decided."""
    if recipe.evaluations and "val" in known.splits:
        if "keep" in recipe.auto and "patience" not in recipe.task.unused_fields:
            keep = recipe.keep if "keep" in known.fixed else "best"
            patience = PATIENCE if keep == "best" and "patience" in recipe.auto else 0
            patience = recipe.patience if "patience" in known.fixed else patience
            asked = "keep" in known.fixed and "keep_margin" not in known.fixed
            margin = 0.0 if asked else recipe.keep_margin  # who asks for the best gets the best
            recipe = replace(recipe, keep=keep, patience=patience, keep_margin=margin)
        return recipe, None  # the plan and the result show both
    if recipe.keep == "best" or recipe.patience:
        flag = "keep=best" if recipe.keep == "best" else f"patience={recipe.patience}"
        if "val" not in known.splits:
            raise no_validation(flag, recipe.data, known.splits["train"])
        raise Error(
            f"{flag} needs evaluations on validation images, but evaluations is 0; omit one of both",
            code="request.conflict",
        )
    return recipe, None


def check_calibration(recipe: Recipe, known: Circumstances, *, protocol: bool = False) -> None:
    """Refuse calibrate=true where nothing would calibrate."""
    if recipe.calibrate and (error := calibration_error(recipe, known, protocol=protocol)):
        raise error


def calibration_error(recipe: Recipe, known: Circumstances, *, protocol: bool = False) -> Error | None:
    """Why no evaluation on validation images, or no softmax, would calibrate; None if one would."""
    if protocol or recipe.train_on == "train+val":
        setting = "the paper's protocol" if protocol else "train_on=train+val"
        return Error(
            f"calibrate=true needs validation images, but {setting} trains on them in the end; omit one of "
            "both",
            code="request.conflict",
        )
    if recipe.loss != "softmax" or known.splits["train"].multilabel:
        return Error(
            "calibrate=true needs one label per image and loss=softmax, whose probabilities have a "
            "temperature; omit it",
            code="request.conflict",
        )
    if "val" not in known.splits:
        return no_validation("calibrate=true", recipe.data, known.splits["train"])
    if not recipe.evaluations:
        return Error(
            "calibrate=true needs an evaluation on the validation images, but evaluations is 0; omit one of "
            "both",
            code="request.conflict",
        )
    return None


def fit_warmup(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """Shorten the warm-up of a run that is much shorter than its recipe."""
    steps, warmup = recipe.length.in_steps(known.images, recipe.batch), recipe.schedule.warmup
    if known.fixed_warmup and warmup > steps:
        raise Error(
            f"schedule.warmup={warmup} is longer than the run of {steps} steps; use at most {steps}, or "
            "leave it out for a tenth of the steps",
            code="request.conflict",
        )
    if known.fixed_warmup or warmup <= steps // 2:
        return recipe, None
    choice = Choice(f"{steps // 10} steps of warm-up, not the recipe's {warmup}", f"the run has {steps}")
    return replace(recipe, schedule=replace(recipe.schedule, warmup=steps // 10)), choice


def fit_memory(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """Use micro-batches that fit into memory, if the whole batch does not."""
    largest = known.largest
    if largest is None or "micro_batch" in known.fixed or largest >= recipe.batch // known.world:
        return recipe, None
    if not largest:
        raise Error(
            f"an image of {recipe.image_size[0]}x{recipe.image_size[1]} does not fit into the memory of "
            f"{known.device}; use a smaller model or --image-size. finetune and pretrain also have "
            "--recompute and, for several devices, --parallel fsdp",
            code="training.out-of-memory",
        )
    choice = Choice(
        f"micro-batches of {largest} images", f"larger ones do not fit into the memory of {known.device}"
    )
    return replace(recipe, micro_batch=largest), choice


RECIPE_RULES: tuple[Rule, ...] = (
    choose_weights, apply_hyperrule, choose_resolution, choose_batch, choose_length,
)  # fmt: skip
MODEL_RULES: tuple[Rule, ...] = (fit_memory,)  # once the model is known


def fitted(
    recipe: Recipe, model: Model, known: Circumstances, runtime: Runtime, note: Callable[[Choice], None]
) -> Recipe:
    """The recipe with micro-batches that fit into the device's memory with this model."""
    known = replace(known, largest=largest_batch(recipe, model, runtime, known.splits["train"]))
    return decide(recipe, MODEL_RULES, known, note)


def load_default(place: str) -> Model:
    """Load default weights; the error suggests alternatives without a network."""
    try:
        return load(place)
    except DownloadError as error:
        local = [weight.name for weight in PUBLISHED.values() if cache_path(weight).exists()]
        alternative = f", or use weights that are on this machine (--weights {local[0]})" if local else ""
        raise Error(
            f"the default weights are not on this machine. {error}{alternative}; or train "
            "from scratch with --model ViT-Ti/16",
            code=error.code,
        ) from None


def shorter_sides(source: Source, count: int = 32) -> list[int]:
    """The shorter sides of some images from all parts of the data."""
    sides = []
    for i in range(0, len(source), max(1, len(source) // count)):
        try:
            content = source.fetch(i)
            pixels = decode(content) if isinstance(content, bytes) else content
            sides.append(min(pixels.shape[:2]))
        except BadImage:
            continue
    return sides or [224]


def fit_devices(
    recipe: Recipe, model: Model, runtime: Runtime, source: Source
) -> tuple[Runtime, Choice | None]:
    """Shard the model with FSDP if it does not fit into the memory of one device."""
    if runtime.world == 1 or largest_batch(recipe, model, runtime, source):
        return runtime, None
    reason = f"the model, its gradients and its optimizer do not fit into the memory of {runtime.device}"
    return replace(runtime, parallel="fsdp"), Choice("fsdp", reason)


def largest_batch(recipe: Recipe, model: Model, runtime: Runtime, source: Source | None = None) -> int:
    """The largest micro-batch that fits into the device's memory, as `memory_of` estimates it."""
    memory, more = (memory_of(recipe, model, runtime, images, source) for images in (1, 2))
    free = USABLE * device_memory(runtime.device) - memory.parameters - memory.optimizer - memory.copies
    each = more.activations - memory.activations
    return max(0, int((free - memory.activations) // each) + 1) if free >= memory.gradients else 0


def device_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return free_memory()
