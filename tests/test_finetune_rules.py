"""The rules of `vitkit finetune` without options: what they choose for which data, model and device."""

from dataclasses import replace

import numpy as np
import pytest

import vitkit
from vitkit.commands.finetune import finetuning
from vitkit.data.sources.source import from_arrays
from vitkit.data.splits import complete
from vitkit.options import Training
from vitkit.planning import automatic, finetune_rules
from vitkit.planning.resume import with_stored_choices
from vitkit.recipes import recipe
from vitkit.recipes.finetune import table4
from vitkit.recipes.recipe import override
from vitkit.runs.build import FEW_TO_CALIBRATE
from vitkit.runs.features import ridge_classifier
from vitkit.runs.folder import changed_flags
from vitkit.runtime.runtime import Runtime
from vitkit.training.schedule import Duration

GPU = Runtime("cuda", "bf16")


def source(per_class, rng=None, separable=True):
    """Images of 16 x 16 pixels; of separable classes each has its own colour."""
    rng = rng or np.random.default_rng(0)
    labels = np.repeat(np.arange(len(per_class)), per_class)
    images = rng.integers(0, 40, (len(labels), 16, 16, 3))
    if separable:
        images[np.arange(len(labels)), :, :, labels % 3] += 200
    return from_arrays(
        "made", images.astype(np.uint8), labels, tuple(f"class {i}" for i in range(len(per_class)))
    )


def known(train, runtime=Runtime(), **options):
    return automatic.circumstances(Training(**options), {"train": train}, runtime)


def decided(train, runtime=Runtime(), **options):
    r = replace(recipe("finetune"), weights="given")
    return automatic.decide(r, finetune_rules.RULES, known(train, runtime, **options), lambda choice: None)


@pytest.mark.parametrize("images, batch, steps, rate", [
    (50, 8, 500, 1.25e-4), (2_000, 64, 781, 2.5e-4), (20_000, 512, 977, 5e-4), (51_200, 512, 2500, 5e-4),
    (204_800, 512, 5000, 5e-4),
])  # fmt: skip
def test_batch_length_and_rate_on_a_gpu(images, batch, steps, rate):
    train = from_arrays("made", np.zeros((images, 1, 1, 3), np.uint8), np.arange(images) % 2, ("a", "b"))
    r = decided(train, GPU)
    assert (r.batch, r.length.steps, r.schedule.warmup) == (batch, steps, steps // 10)
    assert finetune_rules.choose_rate(r, known(train, GPU), None)[0].schedule.rate == pytest.approx(
        rate, rel=0.05
    )
    assert r.optimizer.average == pytest.approx(0.99)


def test_on_a_cpu_a_run_sees_fewer_images():
    train = from_arrays("made", np.zeros((5_000, 1, 1, 3), np.uint8), np.arange(5_000) % 2, ("a", "b"))
    r = decided(train)
    assert r.batch == 64 and r.length.steps * r.batch == automatic.CPU_IMAGES


def test_what_the_user_sets_is_not_chosen():
    train = source([20, 20])
    r = decided(train, batch=16, steps=7, lr=0.5)
    assert (r.batch, r.length, r.schedule) == (
        recipe("finetune").batch, recipe("finetune").length, recipe("finetune").schedule
    )  # fmt: skip


@pytest.mark.parametrize("pixels, trained_at, rate", [
    (64, 224, 1e-3), (96, 224, 1e-3), (112, 224, 2.5e-4), (224, 224, 2.5e-4), (64, 64, 2.5e-4),
    (224, 518, 2.5e-4),
])  # fmt: skip
def test_much_smaller_images_than_the_weights_raise_the_rate_on_a_cpu(pixels, trained_at, rate):
    train = source([20, 20])
    r = replace(recipe("finetune"), image_size=(pixels, pixels), batch=64)
    at = (trained_at, trained_at)

    def rate_of(r, known, at=at):
        return finetune_rules.choose_rate(r, known, at)[0].schedule.rate

    assert rate_of(r, known(train)) == rate
    head_only = automatic.circumstances(Training(train="head"), {"train": train}, Runtime())
    for other in (known(train, GPU), head_only):
        assert rate_of(r, other) == 2.5e-4
    assert rate_of(r, known(train), None) == 2.5e-4
    assert finetune_rules.choose_rate(r, known(train, lr=0.5), at) == (r, None)
    assert rate_of(replace(r, batch=512), known(train), (224, 224)) <= 1e-3


def test_imbalance_turns_mixing_and_smoothing_off_and_shortens_a_run_on_a_gpu():
    usual = decided(source([40, 5]), GPU)
    assert usual.mixup and usual.label_smoothing
    for runtime, share in ((GPU, 0.5), (Runtime(), 1.0)):
        even, uneven = (decided(source(counts), runtime) for counts in ([22, 22], [40, 4]))
        assert (uneven.mixup, uneven.label_smoothing) == (0.0, 0.0)
        assert uneven.length.steps == int(share * even.length.steps)
        assert uneven.schedule.warmup == uneven.length.steps // 10
    assert decided(source([40, 4]), GPU, steps=77).length == recipe("finetune").length
    set_by_user = decided(source([40, 4]), GPU, set=("mixup=0.4",))
    assert set_by_user.label_smoothing == recipe("finetune").label_smoothing
    assert finetune_rules.choose_for_imbalance(table4(), known(source([40, 4])))[1] is None


@pytest.mark.parametrize("steps, average", [(4, 0.0), (24, 0.792), (500, 0.99), (2500, 0.99)])
def test_a_short_run_averages_fewer_steps(steps, average):
    r = replace(recipe("finetune"), length=Duration(steps=steps))
    assert finetune_rules.choose_average(r, known(source([20, 20])))[0].optimizer.average == average
    fixed = known(source([20, 20]), set=("optimizer.average=0.5",))
    assert finetune_rules.choose_average(r, fixed) == (r, None)


@pytest.mark.parametrize("options, changes, val, calibrated", [
    ((), {}, 0, True), ((), {}, -1, False), ((), {}, None, False), (("calibrate=false",), {}, 0, False),
    ((), {"loss": "sigmoid"}, 0, False), ((), {"evaluations": 0}, 0, False),
    ((), {"train_on": "train+val"}, 0, False), ((), {"auto": ()}, 0, False),
])  # fmt: skip
def test_probabilities_are_calibrated_where_there_are_enough_validation_images(
    options, changes, val, calibrated
):
    r = override(replace(recipe("finetune"), **changes), options)
    splits = {"train": source([20, 20])}
    if val is not None:
        splits["val"] = source([FEW_TO_CALIBRATE + val, 0])
    known = automatic.circumstances(Training(set=options), splits, Runtime())
    chosen, choice = finetune_rules.choose_calibration(r, known)
    assert chosen == replace(r, calibrate=calibrated) and (choice is not None) == calibrated


@pytest.mark.parametrize("change, rate, average", [
    ("schedule.warmup=7", 1.3e-4, 0.99), ("schedule.decay=linear", 1.3e-4, 0.99),
    ("optimizer.weight_decay=0.1", 1.3e-4, 0.99), ("schedule.rate=0.004", 0.004, 0.99),
    ("optimizer.average=0.5", 1.3e-4, 0.5),
])  # fmt: skip
def test_one_value_of_the_optimizer_or_the_schedule_leaves_the_others_to_the_rules(change, rate, average):
    train, options = source([20, 20]), Training(set=(change,))
    asked = override(replace(recipe("finetune"), weights="given", data="photos"), options.set)
    r = automatic.decide(asked, finetune_rules.RULES, known(train, set=options.set), lambda choice: None)
    r = finetune_rules.choose_rate(r, known(train, set=options.set), None)[0]
    assert (r.schedule.rate, r.optimizer.average) == (rate, average)
    again = with_stored_choices(finetuning("photos", options), r)
    assert changed_flags(r, again) == []  # the same command resumes the run


def test_a_low_resolution_raises_the_rate_of_adam_beside_a_weight_decay_of_the_user():
    train = source([20, 20])
    small = replace(recipe("finetune"), image_size=(32, 32), batch=8, data="photos")
    for change, rate in (("optimizer.weight_decay=0.1", 5e-4), ("optimizer.kind=sgd", 0.01)):
        r = override(small, [change])
        chosen, _ = finetune_rules.choose_rate(r, known(train, set=(change,)), (224, 224))
        assert chosen.schedule.rate == rate


def fit(train, model, **options):
    r = replace(recipe("finetune"), weights="given")
    return finetune_rules.fit_model(r, model, known(train, **options), Runtime(), 0)[0]


def vit(classes):
    return vitkit.build("ViT-Ti/4", classes=classes, image_size=16, depth=1, width=32, heads=2, hidden=32)


def test_a_few_images_fit_a_head_if_that_suffices():
    easy, hard = source([5, 5, 5]), source([5, 5, 5], separable=False)
    model = vit(3)
    before = model.head.weight.clone()
    fitted = fit(easy, model)
    assert (fitted.train, fitted.head_init, fitted.length.steps) == ("head", "least-squares", 1)
    assert fitted.schedule.at(0, 1) == 0.0
    assert fit(hard, model) == replace(recipe("finetune"), weights="given")
    assert (model.head.weight == before).all()  # looking at the data does not change the model
    accuracy = ridge_classifier(model, hard, Runtime(), batch=8, workers=0, seed=0).accuracy
    assert accuracy < finetune_rules.SEPARABLE


def test_fewer_than_three_images_per_class_never_train_the_whole_model():
    assert fit(source([2, 2], separable=False), vit(2)).train == "head"
    assert fit(source([10, 10]), vit(2)).train == "all"
    assert fit(source([2, 2]), vit(2), steps=5).train == "all"  # the user has decided


def test_a_resnet_is_trained_by_sgd():
    model = vitkit.build("BiT-R50x1", classes=2, image_size=32, blocks=(1, 1, 1, 1))
    r = fit(source([40, 40]), model)
    assert r.optimizer == table4().optimizer and r.schedule.rate == table4().schedule.rate and not r.mixup


@pytest.mark.parametrize("counts, images", [
    ([100, 100], 0), ([200, 200], 20), ([5_000, 5_000], 500), ([10_000, 10_000], 500), ([15] * 30, 0),
])  # fmt: skip
def test_validation_images_are_enough_or_none(counts, images):
    labels = np.repeat(np.arange(len(counts)), counts)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 2, 2, 3), dtype=np.uint8)
    train = from_arrays("made", pixels, labels, tuple(map(str, range(len(counts)))))
    splits = complete({"train": train, "test": train}, val=0.05, val_images=(20, 500))
    assert len(splits.get("val", [])) == images


def test_a_run_of_the_earlier_default_is_resumed_as_it_was():
    request = finetuning("digits", Training())
    old = replace(table4(), name="finetune", data="digits", weights="given", batch=32)
    again = with_stored_choices(request, old)
    assert changed_flags(old, again) == [] and again.optimizer == old.optimizer
    other = with_stored_choices(finetuning("digits", Training(set=("mixup=0.5",))), old)
    assert other.mixup == 0.5 and changed_flags(old, other)


@pytest.mark.parametrize("name, decay, drop", [
    ("MAE-B/16.i1k", 0.65, 0.1), ("MAE-L/16.i1k", 0.75, 0.2), ("MAE-H/14.i1k", 0.75, 0.3),
    ("hf:facebook/vit-mae-base", 0.65, 0.1), ("hf:timm/vit_large_patch16_224.mae", 0.75, 0.2),
    ("MAE-B/16.i1k-finetuned", 0.75, 0.0), ("ViT-B/16.augreg-i21k", 0.75, 0.0), ("nothing", 0.75, 0.0),
])  # fmt: skip
def test_weights_of_mae_are_fine_tuned_as_published(name, decay, drop):
    train = source([30, 30])
    r = replace(recipe("finetune"), weights=name)
    chosen = []
    tuned = automatic.decide(r, finetune_rules.RULES, known(train, GPU), chosen.append)
    assert (tuned.optimizer.layer_decay, tuned.stochastic_depth) == (decay, drop)
    assert tuned.pooling == ("mean" if drop else "model")
    assert any("layer decay" in choice.what for choice in chosen) == bool(drop)
    fixed = known(train, GPU, set=("optimizer.layer_decay=0.9",))
    assert automatic.decide(r, finetune_rules.RULES, fixed, chosen.append).stochastic_depth == 0


def test_weights_that_reconstruct_are_fine_tuned_for_longer():
    train = from_arrays("made", np.zeros((20_000, 1, 1, 3), np.uint8), np.arange(20_000) % 2, ("a", "b"))
    steps = [
        automatic.decide(
            replace(recipe("finetune"), weights=name), finetune_rules.RULES, known(train, GPU), lambda c: None
        ).length.steps
        for name in ("ViT-B/16.augreg-i21k", "MAE-B/16.i1k")
    ]
    assert steps[1] == pytest.approx(2 * steps[0], abs=1)


@pytest.mark.parametrize("options, keep, margin", [
    ({}, "best", 0.5), ({"keep": "best"}, "best", 0.0), ({"keep": "last"}, "last", 0.0),
    ({"keep": "best", "set": ("keep_margin=2",)}, "best", 2.0), ({"set": ("keep_margin=2",)}, "best", 2.0),
])  # fmt: skip
def test_who_asks_for_the_best_weights_gets_them_without_a_margin(options, keep, margin):
    train = source([20, 20])
    circumstances = automatic.circumstances(
        Training(**options), {"train": train, "val": source([5, 5])}, Runtime()
    )
    request = finetuning("digits", Training(**options))
    requested = override(request.recipe, request.options.set)
    chosen = automatic.choose_stopping(requested, circumstances)[0]
    assert (chosen.keep, chosen.keep_margin, chosen.patience) == (keep, margin, 0)
