"""How `vitkit finetune` without options trains: one rule for each choice, with the measurement behind it.

The measurements are in docs/lab/default-recipe.md: ViT-Ti/16 (AugReg, ImageNet) on one H200, by `vitkit study
run recipes` and bench/default_beside_peers.py. What no rule mentions is in `recipes.finetune.finetune`.
"""

import math
from dataclasses import replace

import numpy as np

from vitkit.data.sources.source import Source
from vitkit.models.variants import Model
from vitkit.models.vit import ViTConfig
from vitkit.planning import automatic
from vitkit.planning.automatic import Choice, Circumstances, Rule
from vitkit.recipes.finetune import table4
from vitkit.recipes.recipe import Recipe
from vitkit.runs.build import FEW_TO_CALIBRATE, images_per_class
from vitkit.runs.features import ridge_classifier
from vitkit.runtime.runtime import Runtime
from vitkit.training.schedule import Duration, Schedule
from vitkit.weights.locate import pretraining

# Batch: a power of two of at most 1/16 of the images, so that an epoch has 16 steps or more.
STEPS_AN_EPOCH = 16

# Rate: 5e-4 for 512 images, in proportion to the cube root of the batch. On CIFAR-10 and Tiny ImageNet
# (batch 256) 1e-3 gave -0.0 and -0.5 points. With 5 images per class (batch 8), 5e-4 gave 13 points less than
# 6e-5 on CIFAR-10 and 14 more on digits (in runs that differed in length too), so that a rate between the two
# is the safe one.
RATE, RATE_BATCH = 5e-4, 512

# Small images on a CPU, whose runs are short: below half of the weights' resolution (at most 224) the rate is
# four times as high, but at most 1e-3. At 64 pixels, weights of 224 pixels, 200 steps of 64 images, 2.5e-4
# gave 10.6 points less than 1e-3 on CIFAR-10 and 16.1 less on an imbalanced version of it, and was 6 to 16
# points behind `table4` on these and with 20 % wrong labels. On 20 classes of Tiny ImageNet 2e-4 gave 13.6
# points less (150 steps of 32). Not measured at other sizes, nor on a GPU, whose runs are longer.
SMALL, USUAL, SMALL_FACTOR, SMALL_RATE = 0.5, 224, 4, 1e-3

# Warm-up: a tenth of the steps. On four sets of 1,500 to 6,000 images none gave +0.05 points in the mean,
# 30 % -0.3, no weight decay 0.0, a least-squares head -0.6 (one run each; standard errors 0.3 to 1.1).
WARMUP = 10  # 1 / share of the steps

# Length: 25 epochs up to 51,200 images, which are 2,500 steps of 512; from there on with the square root of
# the number of images; at least 500 steps. Twice as long gave 2.6 points less on Tiny ImageNet. On a CPU
# 12,800 images, half an hour of ViT-Ti/16 on two cores, or two epochs.
EPOCHS, MANY_IMAGES, FEWEST_STEPS = 25, 51_200, 500
FEWEST_EPOCHS_CPU = 2

# Few images: below 10 images per class, compare with a ridge classifier on frozen features. At 5 per class
# fine-tuning won by 2 to 11 points on CIFAR-10, where that classifier is right on 48 to 82 % of the images
# (leave one out, 8 draws), and lost 0.4 to 1 point on imagenette, where it is right on 88 to 96 %; at 1 per
# class it lost 6 to 16 points.
FEW_IMAGES, TOO_FEW_TO_TRAIN, SEPARABLE = 10, 3, 0.85
LOOKED_AT = 2_000  # images at most for this comparison

# Imbalance: where a class has ten times the images of another, no Mixup, no smoothing and half the length on
# a GPU. CIFAR-10 with 1,000 to 10 images per class, balanced test set: 84.3 % with the usual settings, 84.7 %
# without Mixup and smoothing, 85.7 % in half the length, 87.8 % with both; the paper's recipe 87.0 %.
# Balanced sampling and class weights did not help (+0.0 and -0.7 points).
IMBALANCE = 10

# Averaged weights over the last fifth of the steps, at most 100 of them, and the weights of an earlier
# evaluation where they are better by half a standard error. With 20 % wrong labels the model learns these at
# the end: CIFAR-10 with 5,000 images 91.2 % with the last weights, 93.6 % with the best, 94.9 % with the best
# of the averaged ones; the paper's recipe 93.7 %. On clean labels it changes nothing (95.8 and 95.8 %).
AVERAGE, AVERAGED = 0.99, 5

# Weights that reconstruct pixels (MAE, SimMIM): no token was trained for a head, so that the head reads the
# mean of the patches through a new norm. Their papers fine-tune them with a steeper layer decay, stochastic
# depth and for longer: MAE B 0.65 and 0.1, L 0.75 and 0.2, H 0.75 and 0.3; SimMIM B 0.65 and 0.1; 100 epochs
# for B, where supervised weights take fewer. Twice vitkit's own length is an estimate that was not measured.
RECONSTRUCTION = ("mae", "simmim")
RECONSTRUCTION_DECAY = ((1280, 0.75, 0.3), (1024, 0.75, 0.2), (0, 0.65, 0.1))  # from a width on
LONGER = 2

TRAINING = (  # what a user may have decided about training
    "train", "length", "schedule", "optimizer", "head_init", "mixup", "cutmix", "label_smoothing",
)  # fmt: skip


def open_to_rules(recipe: Recipe, known: Circumstances, *fields: str) -> bool:
    """Whether the recipe is the default one, and the user has set none of these fields."""
    return "rules" in recipe.auto and not known.has_set(*fields)


def choose_batch(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """A power of two for these images that the processes can share."""
    if not open_to_rules(recipe, known, "batch"):
        return recipe, None
    batch = automatic.batch_for(known, STEPS_AN_EPOCH)
    return replace(recipe, batch=batch), Choice(f"batch {batch}", f"for {known.images} images")


def choose_length(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """The length by the data; a tenth of it, or of the user's, is warm-up."""
    if not open_to_rules(recipe, known):
        return recipe, None
    choice = None
    if "length" not in known.fixed:
        steps, choice = default_length(recipe, known)
        recipe = replace(recipe, length=Duration(steps=steps))
    if not known.fixed_warmup:
        warmup = recipe.length.in_steps(known.images, recipe.batch) // WARMUP
        recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=warmup))
    return recipe, choice


def default_length(recipe: Recipe, known: Circumstances) -> tuple[int, Choice]:
    """The steps of a run for these images and weights."""
    longer = LONGER if pretraining(recipe.weights).task in RECONSTRUCTION else 1
    steps = steps_for(known.images, recipe.batch, gpu=known.gpu, longer=longer)
    reason = f"for {known.images} training images on a {'GPU' if known.gpu else 'CPU'}"
    reason += ", longer for weights that reconstruct pixels" if longer > 1 else ""
    return steps, Choice(f"{steps} steps", reason, training=True)


def steps_for(images: int, batch: int, *, gpu: bool, longer: float = 1) -> int:
    """The length of a fine-tuning run, by the data and the kind of device and never by a measured speed.

    So the same command gives the same model on a busy machine and on an idle one. longer: a factor.
    """
    seen = longer * EPOCHS * (images if images <= MANY_IMAGES else math.sqrt(images * MANY_IMAGES))
    seen = max(seen, FEWEST_STEPS * batch)
    if not gpu:
        seen = max(min(seen, automatic.CPU_IMAGES), FEWEST_EPOCHS_CPU * images)
    return max(20, round(seen / batch))


def choose_rate(
    recipe: Recipe, known: Circumstances, trained_at: tuple[int, int] | None
) -> tuple[Recipe, Choice | None]:
    """By the batch; higher on a CPU for images much smaller than those of the weights, `trained_at`.

    SGD needs a far higher one than Adam: that of Table 4.
    """
    if not open_to_rules(recipe, known, "schedule.rate"):
        return recipe, None
    if recipe.optimizer.kind == "sgd":
        rate = table4().schedule.rate
        return replace(recipe, schedule=replace(recipe.schedule, rate=rate)), Choice(
            f"learning rate {rate:g}", "SGD as in Table 4", training=True
        )
    rate, reason = RATE * (recipe.batch / RATE_BATCH) ** (1 / 3), f"for batch {recipe.batch}"
    usual = min(math.prod(trained_at), USUAL**2) if trained_at else 0
    small = math.prod(recipe.image_size) < SMALL**2 * usual
    if small and not known.gpu and open_to_rules(recipe, known, "optimizer.kind", "train"):
        rate = min(SMALL_FACTOR * rate, SMALL_RATE)
        reason += f" and {recipe.image_size[0]} pixels, where the weights were trained at {trained_at[0]}"  # type: ignore[index]
    rate = float(f"{rate:.2g}")
    schedule = replace(recipe.schedule, rate=rate)
    return replace(recipe, schedule=schedule), Choice(f"learning rate {rate:g}", reason, training=True)


def choose_for_reconstruction(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """Layer decay, stochastic depth and pooling of the paper, for weights that reconstruct pixels."""
    task, width = pretraining(recipe.weights)
    if task not in RECONSTRUCTION or not open_to_rules(
        recipe, known, "optimizer.kind", "optimizer.layer_decay", "train"
    ):
        return recipe, None
    decay, drop = next((decay, drop) for least, decay, drop in RECONSTRUCTION_DECAY if width >= least)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, layer_decay=decay))
    if "stochastic_depth" not in known.fixed:
        recipe = replace(recipe, stochastic_depth=drop)
    if "pooling" not in known.fixed:
        recipe = replace(recipe, pooling="mean")
    what = f"layer decay {decay:g}, stochastic depth {recipe.stochastic_depth:g}, pooling {recipe.pooling}"
    return recipe, Choice(what, f"as published for weights that {task} has trained, of this size")


def choose_for_imbalance(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """No Mixup, no smoothing and a shorter run, where some classes have many more images than others."""
    fields = ("sampling", "class_weights", "mixup", "cutmix", "label_smoothing", "loss")
    if not open_to_rules(recipe, known, *fields):
        return recipe, None
    counts = class_sizes(known.splits["train"])
    if not len(counts) or counts.max() < IMBALANCE * counts.min():
        return recipe, None
    recipe, shorter = replace(recipe, mixup=0.0, label_smoothing=0.0), ""
    if known.gpu and "length" not in known.fixed:
        steps = max(1, recipe.length.in_steps(known.images, recipe.batch) // 2)
        warmup = recipe.schedule.warmup if known.fixed_warmup else steps // WARMUP
        recipe = replace(
            recipe, length=Duration(steps=steps), schedule=replace(recipe.schedule, warmup=warmup)
        )
        shorter = f", half the length: {steps} steps"
    reason = f"{counts.min()} to {counts.max()} images per class"
    return recipe, Choice(f"no Mixup and no label smoothing{shorter}", reason, training=True)


def choose_average(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """Averaged weights over a share of the steps, so that also a short run forgets its first ones."""
    if not open_to_rules(recipe, known, "optimizer.kind", "optimizer.average"):
        return recipe, None
    steps = recipe.length.in_steps(known.images, recipe.batch)
    average = float(f"{max(0.0, min(AVERAGE, 1 - AVERAGED / steps)):.3g}")
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, average=average))
    if not average:
        return recipe, None
    return recipe, Choice(f"weights averaged with decay {average:g}", f"for {steps} steps", training=True)


def choose_calibration(recipe: Recipe, known: Circumstances) -> tuple[Recipe, Choice | None]:
    """Calibrate the probabilities where there are enough validation images to choose a temperature."""
    images = len(known.splits.get("val", ()))
    if images < FEW_TO_CALIBRATE or not open_to_rules(recipe, known, "calibrate"):
        return recipe, None
    if automatic.calibration_error(recipe, known):
        return recipe, None
    return replace(recipe, calibrate=True), Choice("calibrated probabilities", f"{images} validation images")


def class_sizes(source: Source) -> np.ndarray:
    """The number of images of each class that has any; empty for several labels per image."""
    counts = images_per_class(source)
    return counts[:0] if source.multilabel else counts[counts > 0]


def with_sgd(recipe: Recipe) -> Recipe:
    """The recipe with the optimizer and the augmentation of Table 4."""
    fields = ("optimizer", "crop", "crop_area", "mixup", "label_smoothing")
    schedule = replace(recipe.schedule, rate=table4().schedule.rate)
    return replace(recipe, schedule=schedule, **{name: getattr(table4(), name) for name in fields})


def with_fitted_head(recipe: Recipe) -> Recipe:
    """The recipe with a ridge classifier on frozen features and no training: its only step has rate 0.

    An evaluation on the validation images is made only for the calibration.
    """
    return replace(
        recipe, train="head", head_init="least-squares", length=Duration(steps=1), mixup=0.0,
        label_smoothing=0.0, schedule=Schedule(rate=recipe.schedule.rate, warmup=1),
        evaluations=int(recipe.calibrate), keep="last", keep_margin=0.0,
        optimizer=replace(recipe.optimizer, average=0.0),
    )  # fmt: skip


def is_fitted_head(recipe: Recipe) -> bool:
    """Whether the recipe fits a head and trains nothing, as `with_fitted_head` makes it."""
    return recipe.head_init == "least-squares" and recipe.length.steps == recipe.schedule.warmup == 1


def fit_model(
    recipe: Recipe, model: Model, known: Circumstances, runtime: Runtime, workers: int
) -> tuple[Recipe, Choice | None]:
    """The choices that need the model: SGD for a ResNet, and whether a few images suffice to train it."""
    if not isinstance(model.config, ViTConfig):
        if not open_to_rules(recipe, known, "optimizer", "schedule"):
            return recipe, None
        return with_sgd(recipe), Choice("SGD as in Table 4", "the model is a ResNet")
    counts = class_sizes(known.splits["train"])
    if not (open_to_rules(recipe, known, *TRAINING) and recipe.weights and len(counts)):
        return recipe, None
    average = counts.sum() / len(counts)
    if average >= FEW_IMAGES:
        return recipe, None
    if average < TOO_FEW_TO_TRAIN:
        reason = f"{average:.1f} images per class are too few to train the whole model"
        return with_fitted_head(recipe), Choice("a ridge classifier on frozen features", reason)
    train = known.splits["train"]
    if len(train) > LOOKED_AT:
        train = train.take(np.sort(np.random.default_rng(0).permutation(len(train))[:LOOKED_AT]))
    head = ridge_classifier(model, train, runtime, batch=64, workers=workers, seed=recipe.seed)
    right = f"it is right on {100 * head.accuracy:.0f} % of {head.images} images, leaving each one out"
    if head.accuracy < SEPARABLE:
        return recipe, Choice("training of the whole model, not a ridge classifier alone", right)
    return with_fitted_head(recipe), Choice("a ridge classifier on frozen features", right)


RULES: tuple[Rule, ...] = (
    choose_batch, choose_length, choose_for_imbalance, choose_average, choose_for_reconstruction
)  # fmt: skip
