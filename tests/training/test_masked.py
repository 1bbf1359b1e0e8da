"""Masked patch prediction: exact corruption, targets by definition, no loss elsewhere, better than chance."""

import copy
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from vitkit.data.order import Order
from vitkit.models.self_supervised.masked import MaskedViT, maskable, with_mask_token
from vitkit.models.variants import fresh
from vitkit.tasks.masked import (
    TARGETS,
    Masked,
    MaskedLoss,
    colours,
    corrupt,
    corrupt_for_evaluation,
    corruption,
    patches_of,
)
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, blank, update

FULL = bool(os.environ.get("VITKIT_FULL"))  # then with new random examples each time

PATCH, PATCHES = 8, 16  # of the small model: 32 pixels
PAPERS = Masked()


def batch_of(images: int, *, size: int = 32, patches: int = PATCHES):
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, generator=generator)
    return corrupt(PAPERS, patches, Order(100, images), 3, {"image": pixels, "place": torch.arange(images)})


def learner(small, config: Masked = PAPERS, **options) -> MaskedViT:
    """The small model with a layer of random numbers, so that it says different things of all patches."""
    model = MaskedViT(with_mask_token(small(**options)), config.predictions(PATCH), config.when)
    torch.nn.init.normal_(model.predict.weight, std=0.1)
    torch.nn.init.normal_(model.vit.mask_token)
    return model


def test_corruption_shares_no_random_numbers_with_augmentation():
    order, places = Order(100, 8), torch.arange(8)
    chosen = corrupt(PAPERS, 196, order, 3, {"image": torch.zeros(8, 3, 1, 1), "place": places})["chosen"]
    augmented = [corruption(PAPERS, 196, order.rng(3, place))[1] for place in range(-1, 8)]
    assert not any((one == row).all() for one in augmented for row in chosen.numpy())


@given(
    st.integers(2, 300), st.floats(0.01, 1.0), st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**40)
)
@settings(max_examples=200, deadline=None, derandomize=not FULL)
def test_corruption_counts_are_exact(patches, rate, masked, moved, seed):
    moved = min(moved, 10 - masked)
    shares = (masked / 10, moved / 10, (10 - masked - moved) / 10)
    config = Masked(rate=rate, shares=shares)
    take, chosen = corruption(config, patches, np.random.default_rng(seed))
    count = max(1, round(rate * patches))
    assert len(chosen) == count == len(set(chosen.tolist())) and set(chosen) <= set(range(patches))
    others = np.setdiff1d(np.arange(patches), chosen)
    assert (take[others] == others).all()  # what was not chosen is as it was
    hidden = int((take == patches).sum())
    replaced = int(((take != patches) & (take != np.arange(patches))).sum())
    assert hidden == round(shares[0] * count)
    assert hidden + replaced == round((shares[0] + shares[1]) * count)
    assert abs(replaced - shares[1] * count) <= 1 and take.max() <= patches and take.min() >= 0


def test_the_papers_counts_at_224_pixels():
    assert Masked().counts(196) == (98, 78, 10)  # and 10 are left as they are
    assert Masked(rate=0.15).counts(196) == (29, 23, 3)
    assert Masked().predictions(16) == 512 and Masked(target="colours-4x4").predictions(16) == 16 * 512
    assert Masked(target="pixels").predictions(16) == 256 * 3


def test_every_patch_is_chosen_and_moved_to_everywhere_alike():
    """Over many images: chosen half of the time, and replaced by each other patch equally often."""
    rng, config, n = np.random.default_rng(0), Masked(shares=(0.0, 1.0, 0.0)), 8
    counts = np.zeros((n, n))
    for _ in range(7000):
        take, chosen = corruption(config, n, rng)
        counts[chosen, take[chosen]] += 1
    assert (counts.diagonal() == 0).all()
    elsewhere = counts[~np.eye(n, dtype=bool)]
    assert elsewhere.mean() == 7000 * 4 / 56 and abs(elsewhere - 500).max() < 6 * math.sqrt(500)


@pytest.mark.parametrize("bad", [
    {"rate": 0.0}, {"rate": 1.1}, {"rate": float("nan")}, {"shares": (0.8, 0.1, 0.2)},
    {"shares": (1.1, -0.1, 0.0)}, {"target": "edges"}, {"bits": 0}, {"bits": 9}, {"when": "never"},
])  # fmt: skip
def test_impossible_configurations_are_refused(bad):
    with pytest.raises(ValueError):
        Masked(**bad)


def test_an_image_of_one_patch_is_refused():
    with pytest.raises(ValueError, match="smaller patch"):
        Masked().counts(1)


def test_a_corruption_depends_on_seed_step_and_place_alone():
    whole = batch_of(12)
    order = Order(100, 12)
    for places in (range(4), [11, 3, 7]):  # other processes, micro-batches, unusable images
        part = {"place": torch.tensor(list(places)), "image": whole["image"][list(places)]}
        made = corrupt(PAPERS, PATCHES, order, 3, part)
        for name in ("take", "chosen"):
            assert torch.equal(made[name], whole[name][list(places)])
    for other in (corrupt(PAPERS, PATCHES, order, 4, whole),
                  corrupt(PAPERS, PATCHES, Order(100, 12, seed=1), 3, whole)):  # fmt: skip
        assert not torch.equal(other["take"], whole["take"])
    assert len({tuple(row) for row in whole["chosen"].tolist()}) == 12
    seen = corruption(PAPERS, PATCHES, order.rng(3, 5))[0]  # what the views of that place are drawn from
    assert seen.tolist() != whole["take"][5].tolist()
    views = [order.rng(3, place).random() for place in range(-1, 12)]  # what the views draw is another stream
    assert not set(views) & {order.rng(3, -2 - place).random() for place in range(12)}
    again = corrupt_for_evaluation(PAPERS, PATCHES, whole)
    assert torch.equal(
        again["take"], corrupt_for_evaluation(PAPERS, PATCHES, whole | {"label": whole["place"]})["take"]
    )


def test_a_batch_without_images_has_an_empty_corruption_and_a_blank_one_a_valid_one(small):
    none = {"image": torch.zeros(0, 3, 32, 32, dtype=torch.uint8), "place": torch.zeros(0, dtype=torch.int64)}
    empty = corrupt(PAPERS, PATCHES, Order(9, 9), 0, none)
    assert empty["take"].shape == (0, 16) and empty["chosen"].shape == (0, 8)
    found = MaskedLoss(config=PAPERS, patch=PATCH)(learner(small), blank(empty))
    assert torch.isfinite(found["loss"])


def by_hand(image: np.ndarray, row: int, column: int, side: int, cells: int, bits: int) -> list[int]:
    """The colour classes of one patch, from the definition, pixel by pixel."""
    found = []
    for i in range(cells):
        for j in range(cells):
            ys = range(math.floor(i * side / cells), math.ceil((i + 1) * side / cells))
            xs = range(math.floor(j * side / cells), math.ceil((j + 1) * side / cells))
            number = 0
            for channel in range(3):
                values = [int(image[channel, row * side + y, column * side + x]) for y in ys for x in xs]
                number = number * 2**bits + sum(values) * 2**bits // (256 * len(values))
            found.append(number)
    return found


@pytest.mark.parametrize(("side", "cells", "bits"), [(8, 1, 3), (8, 4, 3), (14, 4, 3), (2, 4, 3), (8, 1, 1)])
def test_colour_targets_equal_a_loop(side, cells, bits):
    images = torch.randint(0, 256, (2, 3, 2 * side, 3 * side), dtype=torch.uint8)
    found = colours(patches_of(images, side), cells, bits)
    assert found.shape == (2, 6, cells**2)
    for b in range(2):
        for n in range(6):
            assert found[b, n].tolist() == by_hand(images[b].numpy(), n // 3, n % 3, side, cells, bits)


def test_colour_bins_are_even_and_reach_both_ends():
    levels = torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    bins = colours(levels, 1, 3)[:, 0]
    assert bins.tolist() == [level // 32 * (64 + 8 + 1) for level in range(256)]


def test_the_loss_equals_its_definition(small):
    for target in TARGETS:
        config = Masked(target=target)
        model, batch = learner(small, config), batch_of(3)
        messages = model(batch["image"] / 127.5 - 1, batch["take"], batch["chosen"])
        values, right = [], []
        for b in range(3):
            for k, place in enumerate(batch["chosen"][b].tolist()):
                y, x = divmod(place, 4)
                if target == "pixels":
                    patch = batch["image"][b, :, y * 8 : y * 8 + 8, x * 8 : x * 8 + 8] / 127.5 - 1
                    values.append(float((messages[b, k].detach() - patch.flatten()).square().mean()))
                    continue
                cells = 4 if target == "colours-4x4" else 1
                for m, wanted in enumerate(by_hand(batch["image"][b].numpy(), y, x, 8, cells, 3)):
                    logits = messages[b, k, 512 * m : 512 * m + 512]
                    values.append(float(-logits.detach().log_softmax(0)[wanted]))
                    right.append(int(logits.argmax()) == wanted)
        found = MaskedLoss(config=config, patch=PATCH)(model, batch)
        assert float(found["loss"].detach()) == pytest.approx(np.mean(values), rel=1e-4)
        assert ("accuracy" in found) == bool(right)
        if right:
            assert float(found["accuracy"]) == pytest.approx(np.mean(right))


@pytest.mark.parametrize("target", TARGETS)
def test_patches_that_were_not_corrupted_carry_no_loss(small, target):
    config = Masked(target=target)
    objective, batch = MaskedLoss(config=config, patch=PATCH), batch_of(2)
    messages = torch.randn(2, 8, config.predictions(PATCH))
    before = objective.value(messages, batch["image"], batch["chosen"])["loss"]
    changed = batch["image"].clone()
    for b in range(2):
        for place in set(range(PATCHES)) - set(batch["chosen"][b].tolist()):
            y, x = divmod(place, 4)
            changed[b, :, y * 8 : y * 8 + 8, x * 8 : x * 8 + 8] ^= 255
    assert torch.equal(objective.value(messages, changed, batch["chosen"])["loss"], before)
    assert not torch.equal(objective.value(messages, ~batch["image"], batch["chosen"])["loss"], before)
    # and no gradient goes through what the encoder says of them
    model, seen = learner(small, config), []

    def keep(module, given, out):
        out.retain_grad()
        seen.append(out)

    model.vit.encoder.norm.register_forward_hook(keep)
    objective(model, batch)["loss"].backward()
    moved = seen[0].grad[:, 1:].abs().sum(-1) > 0  # (B, N)
    wanted = torch.zeros(2, PATCHES, dtype=torch.bool).scatter(1, batch["chosen"], True)
    assert torch.equal(moved, wanted) and not seen[0].grad[:, 0].any()


@pytest.mark.parametrize("when", ["before-positions", "after-positions"])
def test_what_is_masked_cannot_be_seen_and_what_is_kept_can(small, when):
    model = learner(small, Masked(when=when)).eval()
    images = torch.randn(1, 3, 32, 32)
    take, chosen = torch.arange(16)[None].clone(), torch.tensor([[3, 5, 9]])
    take[0, 3], take[0, 5] = 16, 7  # masked; replaced by patch 7; 9 is left as it is
    before = model(images, take, chosen)

    def after(place: int) -> torch.Tensor:
        other = images.clone()
        y, x = divmod(place, 4)
        other[:, :, y * 8 : y * 8 + 8, x * 8 : x * 8 + 8] = 0.3
        return model(other, take, chosen)

    assert torch.equal(after(3), before) and torch.equal(after(5), before)
    for place in (7, 9, 0):
        assert not torch.allclose(after(place), before, atol=1e-4)


def test_the_mask_knows_its_place_only_before_positions(small):
    """Two masked patches are told apart by their positions, which the mask has only if it came before."""
    images, chosen = torch.randn(1, 3, 32, 32), torch.tensor([[3, 12]])
    take = torch.arange(16)[None].clone()
    take[0, [3, 12]] = 16
    for when, apart in (("before-positions", True), ("after-positions", False)):
        first, second = learner(small, Masked(when=when)).eval()(images, take, chosen)[0]
        assert torch.allclose(first, second, atol=1e-6) != apart


def test_without_corruption_the_model_is_the_plain_one(small):
    for when in ("before-positions", "after-positions"):
        model = learner(small, Masked(when=when)).eval()
        images, everything = torch.randn(2, 3, 32, 32), torch.arange(16).expand(2, -1)
        plain = model.predict(model.vit.tokens(images)[:, 1:])
        assert torch.allclose(model(images, everything, everything), plain, atol=1e-6)
        mask = torch.rand(2, 16) < 0.5
        if when == "before-positions":
            found = model(images, everything.where(~mask, 16), everything)
            assert torch.allclose(found, model.predict(model.vit.tokens(images, mask)[:, 1:]), atol=1e-6)


@pytest.mark.parametrize("pieces", [(2, 2, 2), (5, 1)])
def test_micro_batches_equal_the_whole_batch(small, pieces):
    whole = learner(small).train()
    parts, batch = copy.deepcopy(whole), batch_of(6)
    cut = [
        dict(zip(batch, split, strict=True))
        for split in zip(*(t.split(pieces) for t in batch.values()), strict=True)
    ]
    config, objective = OptimizerConfig(clip=0.0), MaskedLoss(config=PAPERS, patch=PATCH)
    found = [
        update(TrainState.start(m, config), b, objective, 0.1, config, m)
        for m, b in ((whole, [batch]), (parts, cut))
    ]
    assert float(found[0]["loss"]) == pytest.approx(float(found[1]["loss"]), abs=1e-5)
    assert float(found[0]["accuracy"]) == pytest.approx(float(found[1]["accuracy"]), abs=1e-6)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_every_parameter_learns(small, small_hybrid):
    """As several processes need it: each waits for the gradients of all."""
    hybrid = with_mask_token(small_hybrid(head="gap"))
    for model, objective, size, patches in (
        (learner(small), MaskedLoss(config=PAPERS, patch=PATCH), 32, 16),
        (learner(small, head="gap", positions="2d"), MaskedLoss(config=PAPERS, patch=PATCH), 32, 16),
        (
            MaskedViT(hybrid, 512),
            MaskedLoss(config=PAPERS, patch=hybrid.config.stride),
            64,
            math.prod(hybrid.config.grid),
        ),
    ):
        torch.nn.init.normal_(model.predict.weight)
        objective(model, batch_of(3, size=size, patches=patches))["loss"].backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_names_are_frozen(small):
    names = set(learner(small).state_dict())
    assert {"predict.weight", "predict.bias", "vit.mask_token", "vit.class_token"} <= names
    assert not [name for name in names if name.split(".")[0] not in ("vit", "predict")]
    assert not [name for name in names if "head" in name]


def test_what_has_no_patches_or_pools_them_is_refused(small, small_resnet):
    with refused("model.unsupported", "ResNet"):
        with_mask_token(small_resnet())
    for options in ({"head": "map"}, {"head": "gap", "final_norm": "pooled"}):
        with refused(
            "model.unsupported", "head=token", "head=gap", *(f"{k}={v}" for k, v in options.items())
        ):
            maskable(small(**options).config)
    with refused("model.unsupported", "with_mask_token"):
        MaskedViT(small(), 512)


def coloured(step: int, images: int = 32, size: int = 32):
    """Pictures of one colour each, bright or dark: what a patch shows follows from any other of its image."""
    rng = np.random.default_rng(step)
    colour = rng.choice([16, 112, 240], size=(images, 3, 1, 1)).astype(np.uint8)
    pixels = torch.from_numpy(np.broadcast_to(colour, (images, 3, size, size)).copy())
    return {"image": pixels, "place": torch.arange(images)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow
def test_chance_is_where_it_starts_and_is_beaten(small, target):
    """Uniform logits: log 512. The best guess without looking: log 27, or the variance of the pixels."""
    config = Masked(target=target, rate=0.5)
    vit = fresh(maskable(small(patch=16).config), seed=0)
    model = MaskedViT(vit, config.predictions(16)).train()
    objective, adam = MaskedLoss(config=config, patch=16), OptimizerConfig(kind="adam", clip=1.0)
    state, found = TrainState.start(model, adam), []
    blind = np.var([16 / 127.5 - 1, 112 / 127.5 - 1, 240 / 127.5 - 1]) if target == "pixels" else math.log(27)
    steps = 150
    for step in range(steps):
        batch = corrupt(config, 4, Order(32, 32), step, coloured(step))
        rate = 3e-3 * min(1, (steps - step) / 50)
        found.append(float(update(state, [batch], objective, rate, adam, model)["loss"]))
    if target != "pixels":
        assert found[0] == pytest.approx(math.log(512), abs=1e-4)
    assert np.mean(found[-10:]) < 0.5 * blind
    test = corrupt_for_evaluation(config, 4, coloured(10**6))
    with torch.no_grad():
        output = objective(model.eval(), test)
    assert float(output["loss"]) < 0.5 * blind and float(output.get("accuracy", torch.ones(()))) > 0.6


def test_recipes_say_what_has_no_use():
    from vitkit.recipes import recipe
    from vitkit.recipes.recipe import from_json, override, to_json

    r = override(recipe("masked"), ["masked.rate=0.15", "masked.shares=0.7,0.2,0.1", "masked.target=pixels"])
    assert r.task.rate == 0.15 and r.task.shares == (0.7, 0.2, 0.1) and from_json(to_json(r)) == r
    for change in ("mixup=0.2", "label_smoothing=0.1", "patience=3", "optimizer.layer_decay=0.7"):
        with refused("recipe.value", "objective=masked", change.partition("=")[0]):
            override(r, [change])
    with refused("recipe.value", "objective", "masked", "'contrast'"):
        replace(r, objective="contrast")


def test_the_papers_recipe():
    from vitkit.recipes import recipe

    r = recipe("masked")
    assert r.optimizer.kind == "adam" and r.schedule.rate == 2e-4 and r.schedule.warmup == 10_000
    assert r.schedule.decay == "cosine" and r.batch == 4096 and r.length.steps == 1_000_000
    assert r.image_size == (224, 224) and r.crop == "inception" and r.flip and r.model == "ViT-B/16"
    assert recipe("masked-imagenet") == replace(
        r, name="masked-imagenet", length=replace(r.length, steps=100_000)
    )
