"""iBOT beside its definition: masks, the loss of masked patches, their centre, and what it has from DINO."""

import copy
import math

import numpy as np
import pytest
import torch
from refusals import refused
from test_dino import SIZES, batch_of, defined_loss, split, views_of

from vitkit.data.order import Order
from vitkit.models.self_supervised.masked import maskable
from vitkit.models.variants import fresh
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.build import start_training
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.dino import Dino
from vitkit.tasks.ibot import Ibot, draw_mask, draw_masks
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, blank, update

GRID = (4, 4)
ADAM = OptimizerConfig(kind="adam", clip=0.0, eps=1e-4)


def masked_batch(images: int, task: Ibot, seed: int = 5) -> dict[str, torch.Tensor]:
    return draw_masks(task, GRID, Order(100, images, seed), 3, batch_of(images, seed))


def started(small, task: Ibot) -> TrainState:
    torch.manual_seed(0)
    model = fresh(maskable(small(position_resize="dinov2").config), seed=1).train()
    state = start_training(Recipe(name="ibot", optimizer=ADAM), task, model, Runtime())
    task.begin(state.model, 10)
    with torch.no_grad():  # outputs that differ between patches, and another teacher than student
        for name, p in state.model.named_parameters():
            if not name.endswith("last.scale"):
                p.add_(0.1 * torch.randn(p.shape))
    return state


def test_the_loss_is_that_of_the_class_token_and_of_masked_patches(small):
    task = Ibot(**SIZES, mask_share=0.7, patch_weight=0.5, patch_temperature=0.07, temperature_warmup=0.0)
    state, batch = started(small, task), masked_batch(6, task)
    module = state.model
    for centre in (module.centre, module.patch_centre):
        torch.nn.init.normal_(centre, std=0.1)
    masks, views = batch["mask"], views_of(batch)
    assert 0 < masks.any(2).sum() < 12  # crops with and without a mask
    with torch.no_grad():
        teacher, student = module.teacher, module.student
        whole = [teacher.backbone.tokens(view) for view in views[:2]]
        part = [student.backbone.tokens(view, masks[:, i]) for i, view in enumerate(views[:2])]
        small_ones = [student.backbone.tokens(view) for view in views[2:]]
        answers = [student.head(z[:, 0]) for z in (*part, *small_ones)]
        of_class, _ = defined_loss([teacher.head(z[:, 0]) for z in whole], answers, module.centre, 0.04)
        rows = []
        for image in range(6):
            for crop in range(2):
                terms = []
                for patch in masks[image, crop].nonzero()[:, 0].tolist():
                    t = teacher.head(whole[crop][image, 1 + patch])
                    s = student.head(part[crop][image, 1 + patch])
                    p = ((t - module.patch_centre) / 0.07).softmax(-1)
                    terms.append(-float((p * (s / 0.1).log_softmax(-1)).sum()))
                rows.append(sum(terms) / max(1, len(terms)))
        actual = task.objective(module.teacher.backbone)(module, batch)
    assert float(actual["class_loss"]) == pytest.approx(float(of_class), rel=1e-5)
    assert float(actual["patch_loss"]) == pytest.approx(np.mean(rows), rel=1e-5)
    assert float(actual["loss"]) == pytest.approx(float(of_class) + 0.5 * np.mean(rows), rel=1e-5)


def test_both_centres_after_two_steps_in_micro_batches(small):
    """The patches' is the mean over all patches of the large crops, masked or not."""
    task = Ibot(**SIZES, patch_centre_momentum=0.8)
    state = started(small, task)
    patches, classes = torch.zeros(24), torch.zeros(24)
    for seed in range(2):
        batch = masked_batch(5, task, seed)
        with torch.no_grad():
            tokens = torch.stack([state.model.teacher.backbone.tokens(view) for view in views_of(batch)[:2]])
            logits = state.model.teacher.head(tokens)
        patches = 0.8 * patches + 0.2 * logits[:, :, 1:].mean((0, 1, 2))
        classes = 0.9 * classes + 0.1 * logits[:, :, 0].mean((0, 1))
        objective = task.objective(state.model.teacher.backbone)
        update(state, split(batch, (2, 3)), objective, 0.01, ADAM, state.model)
    assert torch.allclose(state.model.patch_centre, patches, atol=1e-5)
    assert torch.allclose(state.model.centre, classes, atol=1e-5)
    assert not torch.allclose(patches, classes, atol=1e-2)


def test_micro_batches_equal_the_whole_batch(small):
    task = Ibot(**SIZES)
    first = started(small, task)
    states = [first, started(small, task)]
    batch = masked_batch(5, task)
    for state, pieces in zip(states, ((5,), (1, 4)), strict=True):
        objective = task.objective(state.model.teacher.backbone)
        for _ in range(2):
            update(state, split(batch, pieces), objective, 0.01, ADAM, state.model)
    for (name, a), b in zip(
        states[0].model.state_dict().items(), states[1].model.state_dict().values(), strict=True
    ):
        assert torch.allclose(a, b, atol=2e-5), name


def test_the_student_does_not_see_masked_patches_and_the_teacher_does(small):
    task = Ibot(**SIZES, mask_share=1.0)
    state, batch = started(small, task), masked_batch(2, task)
    place = int(batch["mask"][0, 0].nonzero()[0])
    y, x = divmod(place, 4)
    changed = copy.deepcopy(batch)
    changed["image"][0, :, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8] ^= 255
    views = [views_of(b)[0] for b in (batch, changed)]
    with torch.no_grad():
        seen = [state.model.student.backbone.tokens(view, batch["mask"][:, 0]) for view in views]
        known = [state.model.teacher.backbone.tokens(view) for view in views]
    assert torch.equal(*seen) and not torch.equal(*known)


def test_a_mask_has_its_share_of_patches_in_blocks():
    task, grid, rng = Ibot(), (14, 14), np.random.default_rng(0)
    masks = [draw_mask(task, grid, rng) for _ in range(3000)]
    counts = np.array([mask.sum() for mask in masks])
    assert np.mean(counts == 0) == pytest.approx(0.5, abs=0.03)
    some = counts[counts > 0] / 196
    assert some.max() <= 0.5 and some.max() > 0.45
    assert some.mean() == pytest.approx(0.3, abs=0.03)  # a little less: blocks do not fill up all of it
    whole = [mask for mask in masks if mask.any()]
    neighbours = np.mean([(mask[:, 1:] == mask[:, :-1]).mean() for mask in whole])
    assert neighbours > 0.85  # 58 % if patches were drawn one by one
    for count in (mask.sum() for mask in (draw_mask(Ibot(mask_share=0.0), grid, rng) for _ in range(20))):
        assert count == 0


def test_blocks_are_no_smaller_than_published():
    """At least (14 // 3)^2 = 16 patches where as many are left, within rounding of the sides."""
    task, rng = Ibot(mask_share=1.0, mask_ratio=(0.1, 0.1)), np.random.default_rng(1)
    counts = np.array([draw_mask(task, (14, 14), rng).sum() for _ in range(300)])
    assert counts.max() <= 19 and np.median(counts) >= 14


def test_masks_depend_on_seed_step_and_place_alone():
    task, order = Ibot(), Order(100, 12)
    whole = batch_of(12)
    made = draw_masks(task, GRID, order, 3, whole)
    for places in (range(4), [11, 3, 7]):
        part = {name: tensor[list(places)] for name, tensor in whole.items()}
        again = draw_masks(task, GRID, order, 3, part)
        for name in ("mask", "masked", "share", "real"):
            assert torch.equal(again[name], made[name][list(places)])
    others = draw_masks(task, GRID, order, 4, whole), draw_masks(task, GRID, Order(100, 12, 1), 3, whole)
    assert not any(torch.equal(other["mask"], made["mask"]) for other in others)
    assert not torch.equal(made["mask"][:, 0], made["mask"][:, 1])  # each crop has its own


def test_the_arrays_of_a_mask_agree():
    made = masked_batch(40, Ibot())
    assert made["masked"].shape == made["share"].shape == (40, 2, 8) and made["mask"].shape == (40, 2, 16)
    for mask, masked, share in zip(
        *(made[n].flatten(0, 1) for n in ("mask", "masked", "share")), strict=True
    ):
        count = int(mask.sum())
        assert masked[:count].tolist() == mask.nonzero()[:, 0].tolist() and not masked[count:].any()
        assert torch.allclose(share[:count], torch.tensor(1 / max(1, count))) and not share[count:].any()


def test_a_black_image_of_an_empty_batch_counts_nowhere(small):
    task = Ibot(**SIZES)
    state, batch = started(small, task), masked_batch(3, task)
    objective = task.objective(state.model.teacher.backbone)
    objective(state.model, batch)
    before = state.model.patch_sums.clone(), state.model.sums.clone()
    loss = objective(state.model, blank(batch))["loss"]
    assert torch.isfinite(loss) and before[0][-1] == 3
    assert torch.equal(state.model.patch_sums, before[0]) and torch.equal(state.model.sums, before[1])


def test_every_parameter_of_the_student_learns_whatever_is_masked(small):
    for share in (0.0, 1.0):
        task = Ibot(**SIZES, mask_share=share)
        state = started(small, task)
        objective = task.objective(state.model.teacher.backbone)
        objective(state.model, masked_batch(2, task))["loss"].backward()
        names = [n for n, p in state.model.student.named_parameters() if p.requires_grad and p.grad is None]
        assert not names
        assert state.model.student.backbone.mask_token.grad.any() == bool(share)


def test_pictures_show_masked_patches_in_grey(small):
    task, batch = Ibot(mask_share=1.0), batch_of(3)
    model = fresh(maskable(small().config), seed=1)
    order = Order(100, 3)
    shown, mask = task.visible(model, order, 0, batch), task.prepare(model, order)(0, batch)["mask"][:, 0]
    for image in range(3):
        for patch in range(16):
            y, x = divmod(patch, 4)
            area = (image, slice(None), slice(8 * y, 8 * y + 8), slice(8 * x, 8 * x + 8))
            assert (
                (shown[area] == 128).all()
                if mask[image, patch]
                else torch.equal(shown[area], batch["image"][area])
            )


def test_its_recipe_and_options():
    task = recipe("ibot").task
    assert isinstance(task, Ibot) and isinstance(task, Dino) and not task.norm_last_layer
    assert (task.local_crops, task.global_scale, task.local_scale) == (10, (0.25, 1.0), (0.05, 0.25))
    assert (task.first_temperature, task.teacher_temperature) == (0.04, 0.07)
    assert (task.first_patch_temperature, task.patch_temperature) == (0.04, 0.07)
    assert (task.mask_share, task.mask_ratio, task.patch_weight) == (0.5, (0.1, 0.5), 1.0)
    assert task.prototypes_for(1_281_167) == 8192
    assert override(recipe("ibot"), ["ibot.mask_ratio=0.2,0.3"]).task.mask_ratio == (0.2, 0.3)
    for bad in ({"mask_ratio": (0.5, 0.1)}, {"mask_share": 2.0}, {"patch_temperature": math.nan}):
        with refused("recipe.value", f"ibot.{next(iter(bad))}"):
            Ibot(**bad)


def test_pooling_heads_are_refused(small):
    with refused("model.unsupported", "head=map"):
        Ibot().configure(small(head="map").config)
