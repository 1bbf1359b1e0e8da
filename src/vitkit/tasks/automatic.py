"""What a person did not say: weights, resolution, batch and length for this machine and this data."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch

from vitkit.data.decode import BadImage, decode
from vitkit.data.sources import Source
from vitkit.evaluation.memory import Memory, training_memory
from vitkit.layouts.layout import WeightsError
from vitkit.models.variants import Model, skeleton
from vitkit.options import PATIENCE, Training
from vitkit.recipes.finetune import hyperrule
from vitkit.recipes.groups import field_of
from vitkit.recipes.recipe import Recipe
from vitkit.training.runtime import Runtime
from vitkit.training.schedule import Duration
from vitkit.weights.published import PUBLISHED, fetch, kept_at

ON_GPU, ON_CPU = "ViT-B/16.augreg-i21k", "ViT-Ti/16.augreg-i21k"
LARGE = 320  # shorter side of photographs for which 384 pixels show more than 224
USABLE = 0.92  # of a device's free memory; the rest are its libraries and the allocator's gaps
CPU_IMAGES = 12_800  # that a fine-tuning on a CPU sees: half an hour of ViT-Ti/16 on two cores

Say = Callable[[str], None]


def given(options: Training) -> set[str]:
    """The fields of a recipe that a person has decided."""
    named = {field_of(change) for change in options.set}
    if options.steps is not None or options.epochs is not None:
        named.add("length")
    return named | set(options.changes())


def fill_in(recipe: Recipe, options: Training, train: Source, runtime: Runtime, say: Say) -> Recipe:
    """The recipe with everything decided, each decision told with its reason."""
    fixed, cuda = given(options), runtime.device.startswith("cuda")
    if not recipe.weights and not recipe.model and "weights" in recipe.auto:
        recipe = replace(recipe, weights=some_weights(cuda, say))
        if not options.plan:
            have(recipe.weights)
    chosen = {"image_size", "batch", "length", "hyperrule"} & set(recipe.auto) - fixed
    if not chosen:
        return recipe
    sides = shorter_sides(train)
    if "hyperrule" in chosen:
        recipe = hyperrule(recipe, len(train), round(median(sides)) ** 2, fixed)
        say(f"BiT's rule for {len(train)} images: {recipe.length}, {recipe.image_size[0]} pixels")
        return recipe
    if "image_size" in chosen:
        pixels = 384 if cuda and median(sides) >= LARGE else 224
        recipe = replace(recipe, image_size=(pixels, pixels))
        why = "a GPU, and photographs large enough" if pixels == 384 else "the weights' own"
        say(f"resolution {pixels}: {why} (median shorter side {median(sides):.0f} pixels)")
    if "batch" in chosen:
        most = 512 if cuda else 64
        batch = max(8, min(most, 2 ** (max(1, len(train) // 8).bit_length() - 1)))
        batch = max(runtime.world, batch // runtime.world * runtime.world)
        recipe = replace(recipe, batch=batch)
        say(f"batch {batch}: {'512 as in the paper' if batch == 512 else f'for {len(train)} images'}")
    if "length" in chosen:
        steps = steps_for(len(train), recipe.batch, gpu=cuda)
        warmup = min(500, steps // 10)
        recipe = replace(
            recipe, length=Duration(steps=steps), schedule=replace(recipe.schedule, warmup=warmup)
        )
        say(f"{steps} steps: for {len(train)} training images on a {'GPU' if cuda else 'CPU'}")
    return recipe


def steps_for(images: int, batch: int, *, gpu: bool) -> int:
    """The length of a fine-tuning: it follows the data and the kind of device, never a measured speed.

    So the same command gives the same model on a busy machine and on an idle one. On a GPU these are BiT's
    lengths; on a CPU they are cut to what is done in reasonable time, but to no less than two passes.
    """
    if gpu:
        return 500 if images < 20_000 else 10_000 if images < 500_000 else 20_000
    return max(min(500, CPU_IMAGES // batch), -(-2 * images // batch), 20)


def fill_stopping(recipe: Recipe, options: Training, splits: Mapping[str, Source]) -> Recipe:
    """With the best weights kept and an early stop, where there is validation and nobody said otherwise.

    A paper's recipe stays as published, unless --keep or --patience is given.
    """
    fixed = given(options)
    if recipe.evaluations and "val" in splits:
        if "keep" in recipe.auto and "patience" not in recipe.task.unused:
            keep = recipe.keep if "keep" in fixed else "best"
            patience = PATIENCE if keep == "best" else 0
            recipe = replace(recipe, keep=keep, patience=recipe.patience if "patience" in fixed else patience)
        return recipe
    if recipe.keep == "best" or recipe.patience:
        why = "evaluations is 0" if "val" in splits else "the data has no validation images"
        asked = "keep best" if recipe.keep == "best" else f"patience {recipe.patience}"
        raise ValueError(f"--{asked} goes by evaluations on validation images, and there are none: {why}")
    return recipe


def fit_warmup(recipe: Recipe, options: Training, images: int, say: Say) -> Recipe:
    """A warm-up for a run that was made shorter than its recipe is meant for."""
    steps, warmup = recipe.length.in_steps(images, recipe.batch), recipe.schedule.warmup
    if "schedule" in given(options) or warmup <= steps // 2:
        return recipe
    say(f"{steps // 10} steps of warm-up, not the recipe's {warmup}: the run has {steps}")
    return replace(recipe, schedule=replace(recipe.schedule, warmup=steps // 10))


def some_weights(cuda: bool, say: Say) -> str:
    """The published checkpoint for this kind of device."""
    name = ON_GPU if cuda else ON_CPU
    say(f"weights {name}: the best for {'a GPU' if cuda else 'a CPU'} in reasonable time")
    return name


def have(name: str) -> None:
    """Fetch published weights that were chosen; the error says what to do without a network."""
    if name not in PUBLISHED:
        return
    try:
        fetch(PUBLISHED[name])
    except WeightsError as error:
        here = [weight.name for weight in PUBLISHED.values() if kept_at(weight).exists()]
        instead = f", or one that is on this machine already (--weights {here[0]})" if here else ""
        raise ValueError(
            f"no --weights were given, and the default is not here. {error}{instead}; or train "
            "from scratch with --model ViT-Ti/16"
        ) from None


def shorter_sides(source: Source, count: int = 32) -> list[int]:
    """Of some images, spread over the data."""
    sides = []
    for i in range(0, len(source), max(1, len(source) // count)):
        try:
            content = source.fetch(i)
            pixels = decode(content) if isinstance(content, bytes) else content
            sides.append(min(pixels.shape[:2]))
        except BadImage:
            continue
    return sides or [224]


def fit_devices(recipe: Recipe, model: Model, runtime: Runtime, say: Say) -> Runtime:
    """With tensors cut over the processes, if one device holds no model as a whole."""
    if runtime.world == 1 or largest_batch(recipe, model, runtime):
        return runtime
    say(f"fsdp: {runtime.device} does not hold the model, its gradients and its optimizer as a whole")
    return replace(runtime, spread="fsdp")


def fit_memory(recipe: Recipe, options: Training, model: Model, runtime: Runtime, say: Say) -> Recipe:
    """Micro-batches that fit the device, if the whole batch does not."""
    here = recipe.batch // runtime.world
    most = largest_batch(recipe, model, runtime)
    if "micro_batch" in given(options) or most >= here:
        return recipe
    if not most:
        raise ValueError(
            f"not one image of {recipe.image_size[0]}x{recipe.image_size[1]} fits into the memory of "
            f"{runtime.device}: give a smaller model or --image-size; finetune and pretrain also have "
            "--recompute, and for more devices --spread fsdp"
        )
    say(f"in pieces of {most} images: the memory of {runtime.device} holds no more at a time")
    return replace(recipe, micro_batch=most)


def largest_batch(recipe: Recipe, model: Model, runtime: Runtime) -> int:
    """The images at a time that the device's memory holds, by the formula."""
    one = memory_of(recipe, model, runtime, 1)
    room = USABLE * device_memory(runtime.device) - one.parameters - one.optimizer - one.copies
    return int(room // one.activations) if room >= one.gradients else 0


def memory_of(recipe: Recipe, model: Model, runtime: Runtime, images: int) -> Memory:
    return training_memory(
        skeleton(model.config), images, half=runtime.precision == "bf16",
        slots=2 if recipe.optimizer.kind == "adam" else 1,
        recompute=runtime.recompute, average=bool(recipe.optimizer.average),
        cut=runtime.world if runtime.cut else 1,
    )  # fmt: skip


def device_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
