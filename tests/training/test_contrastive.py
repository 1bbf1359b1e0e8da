"""Contrastive learning against its definition: loss, batch norm over processes, momentum, blank rows."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from together import together
from torch import nn

from vitkit.data.augment import Distortion
from vitkit.data.order import Order
from vitkit.data.views import View
from vitkit.models.self_supervised.projection import BatchNorm, Projection
from vitkit.models.variants import build
from vitkit.recipes.recipe import Recipe
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.contrastive import (
    COLLAPSED,
    GRACE,
    Contrastive,
    check_full_batch,
    contrast,
    full_batch_loss,
    std_of_views,
)
from vitkit.tasks.task import Evaluation
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import OomBackoff, Stepper, TrainState, blank, update

T = 0.2
SMALL = Contrastive(hidden=16, key_width=8)


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def used(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def by_definition(q1, q2, k1, k2, temperature=T) -> list[float]:
    """The loss of each image, number by number, in float64."""
    q1, q2, k1, k2 = (x.double().numpy() for x in (q1, q2, k1, k2))
    result = []
    for i in range(len(q1)):
        loss = 0.0
        for q, k in ((q1, k2), (q2, k1)):
            similar = [
                np.dot(q[i], other) / np.linalg.norm(q[i]) / np.linalg.norm(other) / temperature
                for other in k
            ]
            loss += 2 * temperature * (math.log(sum(math.exp(s) for s in similar)) - similar[i])
        result.append(loss)
    return result


def test_the_loss_is_info_nce_in_both_directions_times_twice_the_temperature():
    q1, q2, k1, k2 = (rows(6, 8, seed) for seed in range(4))
    loss, _ = contrast([q1, q2], [k1, k2], used(6), 6, T)
    assert loss.tolist() == pytest.approx(by_definition(q1, q2, k1, k2), rel=1e-5)
    assert full_batch_loss(torch.cat([q1, q2, k1, k2], 1), T).tolist() == pytest.approx(
        loss.tolist(), rel=1e-5
    )
    warm, _ = contrast([q1, q2], [k1, k2], used(6), 6, 1.0)
    assert warm.tolist() == pytest.approx(by_definition(q1, q2, k1, k2, 1.0), rel=1e-5)


def test_equal_keys_give_chance_and_own_keys_that_differ_from_all_others_almost_nothing():
    same = torch.ones(32, 8)
    loss, _ = contrast([same, same], [same, same], used(32), 32, T)
    assert loss.tolist() == pytest.approx([0.4 * 2 * math.log(32)] * 32, rel=1e-5)
    apart = torch.eye(32)
    loss, correct = contrast([apart, apart], [apart, apart], used(32), 32, T)
    assert float(loss.mean()) == pytest.approx(0.8 * math.log(1 + 31 * math.exp(-1 / T)), rel=1e-4)
    assert correct.tolist() == [1.0] * 32
    _, correct = contrast([apart, apart], [apart, apart.roll(1, 0)], used(32), 32, T)
    assert correct.tolist() == [0.5] * 32  # one direction of two


def test_the_loss_of_random_wide_keys_starts_at_chance():
    wide = [rows(64, 2048, seed) for seed in range(4)]
    loss, correct = contrast(wide[:2], wide[2:], used(64), 64, T)
    assert float(loss.mean()) == pytest.approx(0.4 * 2 * math.log(64), rel=0.03)
    assert float(correct.mean()) < 0.15


def test_places_without_an_image_and_blank_rows_do_not_count():
    parts = [rows(5, 8, seed) for seed in range(4)]
    expected, _ = contrast(parts[:2], parts[2:], used(5), 5, T)
    loss, _ = contrast(parts[:2], parts[2:], used(5), 9, T)
    assert torch.allclose(loss, expected)
    more = [torch.cat([part, part[:1]]) for part in parts]
    flags = torch.tensor([True] * 5 + [False])
    loss, _ = contrast(more[:2], more[2:], flags, 6, T)
    assert torch.allclose(loss[:5], expected) and loss.isfinite().all()


# ---- batch norm ----


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_equals_pytorchs(affine):
    own, other = BatchNorm(8, affine=affine), nn.BatchNorm1d(8, affine=affine)
    for seed in range(3):
        x = (3 * rows(16, 8, seed) + 5).requires_grad_()
        y = x.detach().clone().requires_grad_()
        assert torch.allclose(own(x), other(y), atol=1e-5)
        own(x).square().sum().add(own(x)[:, 0].sin().sum()).backward()
        other(y).square().sum().add(other(y)[:, 0].sin().sum()).backward()
        assert torch.allclose(x.grad, y.grad, atol=1e-4)
    assert torch.allclose(own.running_mean, other.running_mean, atol=1e-5)
    assert torch.allclose(own.running_var, other.running_var, atol=1e-5)
    own.eval(), other.eval()
    assert torch.allclose(own(x), other(x), atol=1e-5)


def test_batch_norm_leaves_out_rows_that_are_no_images():
    norm, reference, x = BatchNorm(4), BatchNorm(4), rows(6, 4, 0)
    flags = torch.tensor([True, True, False, True, True, False])
    x[~flags] = 1e3
    assert torch.allclose(norm(x, flags)[flags], reference(x[flags]), atol=1e-6)
    before = norm.running_var.clone(), norm.running_mean.clone()
    y = norm(x.requires_grad_(), torch.zeros(6, dtype=torch.bool))
    (y.sum() * 0).backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert torch.equal(norm.running_var, before[0]) and torch.equal(norm.running_mean, before[1])


def test_the_layers_are_mocos():
    head = Projection((32, 16, 16, 8))
    names = {name: tuple(p.shape) for name, p in head.named_parameters()}
    assert names == {
        "layers.0.weight": (16, 32), "layers.1.weight": (16, 16), "layers.2.weight": (8, 16),
        "norms.0.weight": (16,), "norms.0.bias": (16,), "norms.1.weight": (16,), "norms.1.bias": (16,),
    }  # fmt: skip
    linear = [nn.Linear(n, m, bias=False) for n, m in ((32, 16), (16, 16), (16, 8))]
    for own, other in zip(head.layers, linear, strict=True):
        own.load_state_dict(other.state_dict())
    norms = [nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.BatchNorm1d(8, affine=False)]
    reference = nn.Sequential(
        linear[0], norms[0], nn.ReLU(), linear[1], norms[1], nn.ReLU(), linear[2], norms[2]
    )
    x = rows(10, 32, 0)
    assert torch.allclose(head(x), reference(x), atol=1e-5)
    again = [Projection((4, 4), torch.Generator().manual_seed(seed)).layers[0].weight for seed in (1, 1, 2)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])


SHARES = {"equal": [3, 3], "unequal": [4, 2], "nothing": [6, 0]}


def on_a_part(runtime, counts: list[int], numbers: np.ndarray) -> list[np.ndarray]:
    """One process's part of a projection and of the loss: results for its rows, and gradients of all."""
    head, x = Projection((8, 8, 4), torch.Generator().manual_seed(1)), torch.from_numpy(numbers)
    start = sum(counts[: runtime.rank])
    mine = x[start : start + counts[runtime.rank]]
    flags = used(len(mine))
    if not len(mine):
        mine, flags = torch.zeros(1, 8), torch.tensor([False])
    mine = mine.clone().requires_grad_()
    q1, q2 = head(mine, flags), head(mine.sin(), flags)
    k1, k2 = head(mine.cos(), flags).detach(), head(-mine, flags).detach()
    loss, _ = contrast([q1, q2], [k1, k2], flags, max(counts), T)
    std = std_of_views(torch.cat([q1, q2]).detach(), flags)
    (loss * flags).sum().backward()
    keep = int(flags.sum())
    found = [loss[:keep], mine.grad[:keep], std, head.norms[0].running_var, head.layers[0].weight.grad]
    return [part.detach().numpy() for part in found]


@pytest.mark.parametrize("share", SHARES)
def test_two_processes_equal_one(share):
    """Losses, gradients of inputs and weights, and running statistics."""
    x = rows(6, 8, 3).numpy()
    whole = on_a_part(Runtime(), [6], x)
    parts = together(2, on_a_part, SHARES[share], x)
    for i in (0, 1):
        assert np.allclose(np.concatenate([part[i] for part in parts]), whole[i], atol=1e-5)
    for i in (2, 3):
        assert all(np.allclose(part[i], whole[i], atol=1e-5) for part in parts)
    assert np.allclose(parts[0][4] + parts[1][4], whole[4], atol=1e-4)


# ---- the module ----


def learner(task: Contrastive = SMALL, *, fresh: bool = True, **options) -> nn.Module:
    model = build(
        "ViT-Ti/8", seed=1, width=16, depth=1, heads=2, hidden=16, image_size=16, classes=0, **options
    )
    model.origin = replace(model.origin, source="ViT-Ti/8 from scratch" if fresh else "a file")
    return task.build(model)


def batch_of(count: int, total: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (count, 2, 3, 16, 16), dtype=torch.uint8, generator=generator)
    raw = {"image": pixels[:, 0], "second": pixels[:, 1:], "place": torch.arange(count)}
    module = learner()
    prepare = SMALL.prepare(SMALL.extract(module), Order(100, total or count))
    return prepare(0, raw)


def objective(module: nn.Module):
    return SMALL.objective(SMALL.extract(module))


def test_the_step_is_the_written_out_one():
    """Features of each view through projector and predictor; keys by the teacher, in training mode."""
    module, batch = learner().train(), batch_of(6)
    result = objective(module)(module, batch)
    reference = learner().train()
    views = [batch["image"], batch["second"][:, 0]]
    views = [(view.float() - 127.5) / 127.5 for view in views]
    student, teacher = reference.student, reference.teacher
    q = [reference.predictor(student.projector(student.vit.features(view))) for view in views]
    k = [teacher.projector(teacher.vit.features(view)) for view in views]
    expected = by_definition(*(x.detach() for x in (*q, *k)))
    assert result["loss"].item() == pytest.approx(np.mean(expected), rel=1e-4)
    for one, other in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=1e-6)  # running statistics of both views
    result["loss"].backward()
    silent = {n for n, p in module.named_parameters() if p.grad is None}
    assert {n.partition(".")[0] for n in silent} == {"teacher", "student"}
    assert {n for n in silent if n.startswith("student")} == {
        "student.vit.project.weight", "student.vit.project.bias",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("frozen", "fresh", "trains"),
    [("auto", True, False), ("auto", False, True), ("yes", False, False), ("no", True, True)],
)
def test_the_patch_embedding_is_frozen_from_scratch_only(frozen, fresh, trains):
    module = learner(replace(SMALL, frozen_patches=frozen), fresh=fresh)
    assert module.student.vit.project.weight.requires_grad is trains
    assert module.student.vit.class_token.requires_grad


def test_the_average_is_what_mocos_loop_has_before_its_keys():
    """Reference: at the start of step i, teacher = m_i teacher + (1 - m_i) student, then keys, then Adam."""
    steps, module = 7, learner().train()
    SMALL.begin(module, steps)
    batch = batch_of(6)
    state = TrainState.start(module, OptimizerConfig(kind="adam"))
    state.optimizer.register_step_post_hook(lambda *_: SMALL.after_update(module))
    mine = {n: p.detach().clone() for n, p in module.student.named_parameters()}
    for step in range(steps):
        m = 1 - (1 - 0.99) * (math.cos(math.pi * step / steps) + 1) / 2
        students = {n: p.detach().clone() for n, p in module.student.named_parameters()}
        mine = {n: m * mine[n] + (1 - m) * students[n] for n in mine}
        for name, p in module.teacher.named_parameters():
            assert torch.allclose(p, mine[name], atol=1e-6), (step, name)
        update(state, [batch], objective(module), 0.01, OptimizerConfig(kind="adam"), module)
    assert int(module.step) == steps
    changed = [
        n for n, p in module.teacher.named_parameters() if not torch.allclose(p, students[n], atol=1e-4)
    ]
    assert len(changed) > 5  # the average is not the student


def test_a_blank_batch_changes_nothing_and_has_a_finite_loss():
    module, batch = learner().train(), batch_of(6)
    before = [buffer.clone() for buffer in module.buffers()]
    for one in (blank(batch), blank({name: part[:0] for name, part in batch.items()})):
        loss = objective(module)(module, one)
        (loss["loss"] * 0).backward()
        assert all(value.isfinite() for value in loss.values())
        assert all(
            p.grad.isfinite().all() and not p.grad.any() for p in module.parameters() if p.grad is not None
        )
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))


def test_a_batch_that_the_loop_has_split_is_refused():
    batch = batch_of(6)
    check_full_batch(batch)
    for parts in (2, 3, 6):
        pieces = OomBackoff(pieces=parts).split([batch])
        for piece in pieces:
            with refused("training.out-of-memory", "6 images", "--batch"):
                check_full_batch(piece)
    check_full_batch(blank(batch))
    check_full_batch(batch_of(5, total=6))  # an unusable image


def test_running_out_of_memory_ends_the_run_with_the_remedy():
    module, batch = learner().train(), batch_of(6)
    loss, tries = objective(module), []

    def short(called, part):
        tries.append(len(part["image"]))
        if len(part["image"]) == 6:
            raise torch.OutOfMemoryError("no")
        return loss(called, part)

    config = OptimizerConfig(kind="adam")
    with refused("training.out-of-memory", "smaller --batch"):
        Stepper(TrainState.start(module, config), short, config, module)([batch], 0.1)
    assert tries == [6, 3]


def test_evaluation_does_not_depend_on_the_batch():
    module = learner().eval()
    pixels = batch_of(23)["image"]
    evaluated = []
    for size in (23, 5):
        batches = [
            {"image": part, "index": index}
            for part, index in zip(pixels.split(size), torch.arange(23).split(size), strict=True)
        ]
        evaluated.append(SMALL.evaluate(module, batches[::-1], Evaluation(forward=lambda *_: None)))
    assert evaluated[0].loss == pytest.approx(evaluated[1].loss, rel=1e-5) and evaluated[0].images == 23
    assert evaluated[0].std == pytest.approx(evaluated[1].std, rel=1e-4) and evaluated[0].rank > 1
    views = (pixels.float() - 127.5) / 127.5
    middle = F.interpolate(views[..., 2:14, 2:14], (16, 16), mode="bilinear")  # 3/4 of each side
    with torch.no_grad():
        _, *parts = module(views, middle)
    assert evaluated[0].loss == pytest.approx(np.mean(by_definition(*parts)), rel=1e-4)


def test_the_spread_is_that_of_the_features_of_both_views():
    features = rows(12, 8, 0)
    unit = F.normalize(features.double(), dim=1).numpy()
    expected = np.sqrt(((unit - unit.mean(0)) ** 2).mean(0)).mean() * math.sqrt(8)
    assert float(std_of_views(features, used(6))) == pytest.approx(expected, rel=1e-5)
    assert float(std_of_views(torch.ones(12, 384), used(6))) < COLLAPSED / 2


def test_a_collapse_stops_the_run_and_only_that():
    SMALL.check_step(GRACE + 1, {"std": 2 * COLLAPSED})
    SMALL.check_step(GRACE, {"std": 0.0})
    with refused("training.collapsed", GRACE + 1, "--lr"):
        SMALL.check_step(GRACE + 1, {"std": COLLAPSED / 2})


def test_both_views_are_mocos():
    view = View(size=(32, 32), crop="resized", area=0.08, flip=True)
    first, ((name, (second,)),) = SMALL.first_view(view), SMALL.more_views(SMALL.first_view(view))
    common = {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 0.8, "grayscale": 0.2}
    assert name == "second" and first == replace(
        view, distortion=Distortion(blur=1.0, solarize=0.0, **common)
    )
    assert second == replace(view, distortion=Distortion(blur=0.1, solarize=0.2, **common))


@pytest.mark.parametrize("bad", [
    {"temperature": 0.0}, {"momentum": 1.1}, {"hidden": 0}, {"key_width": 0}, {"projector_layers": 0},
    {"predictor_layers": 9}, {"frozen_patches": "maybe"},
])  # fmt: skip
def test_impossible_options_are_refused(bad):
    with refused("recipe.value", f"contrastive.{next(iter(bad))}"):
        Contrastive(**bad)


def test_a_recipe_with_micro_batches_or_one_image_is_refused():
    make = partial(Recipe, name="any", objective="contrastive")
    make(micro_batch=0)
    with refused("recipe.value", "micro_batch"):
        make(micro_batch=8)
    with refused("recipe.value", "--batch 2"):
        SMALL.prepare(SMALL.extract(learner()), Order(10, 1))
