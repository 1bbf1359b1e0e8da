"""Distillation against its definition: features, hard and soft answers, the teacher and its images."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import nn

from vitkit.data.sources.source import digits
from vitkit.data.views import View, normalise
from vitkit.models.adapt import adapt
from vitkit.models.card import Preprocessing
from vitkit.models.self_supervised.student import (
    FrozenTeacher,
    digest_of,
    feature_width,
    line_resize,
    resized,
    squared_error,
    with_distillation_token,
)
from vitkit.models.variants import build, fresh
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import override
from vitkit.tasks.distill import DISTORTION, Distill
from vitkit.tasks.distill_labels import DistillLabels, same_classes
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, update
from vitkit.weights.card import imagenet_labels, imagenet_synsets
from vitkit.weights.load import load
from vitkit.weights.save import save

IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
NAMES = tuple("abcde")


@pytest.fixture
def teacher(small, tmp_path):
    """A file with a wider classifier, other patches and another normalisation than the student's."""
    model = small(width=48, hidden=64, patch=4, image_size=(24, 24))
    model.labels, model.preprocessing = NAMES, IMAGENET
    save(model, tmp_path / "teacher.safetensors")
    return str(tmp_path / "teacher.safetensors")


def images(count: int = 4, side: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def student(small, task, **options):
    model = small(**({"classes": 0} | options))
    model = fresh(task.configure(model.config), seed=3)
    model.labels = NAMES if model.config.classes else ()
    return model


# ---- the teacher ----


def test_the_teacher_sees_what_it_would_see_alone(teacher):
    """Its own normalisation; the same features as of the model that weights.load returns."""
    raw, own = images(side=24), load(teacher)
    frozen = FrozenTeacher(load(teacher), Preprocessing())
    seen = frozen.ready(normalise(raw, (0.5,) * 3, (0.5,) * 3))
    expected = normalise(raw, IMAGENET.mean, IMAGENET.std)
    assert torch.allclose(seen, expected, atol=1e-5)
    feature, patches, grid = frozen.features(normalise(raw, (0.5,) * 3, (0.5,) * 3))
    with torch.no_grad():
        assert torch.allclose(feature, own.features(expected), atol=1e-4)
        assert torch.allclose(patches, own.tokens(expected)[:, 1:], atol=1e-4) and grid == (6, 6)
        assert torch.allclose(frozen.logits(normalise(raw, (0.5,) * 3, (0.5,) * 3)), own(expected), atol=1e-4)
    assert not frozen.model.training and not any(p.requires_grad for p in frozen.model.parameters())
    same = FrozenTeacher(load(teacher), IMAGENET)
    assert same.ready(expected) is expected  # nothing to change


def test_images_of_another_size_are_resized_for_the_teacher(teacher):
    raw = normalise(images(side=32), IMAGENET.mean, IMAGENET.std)
    own = FrozenTeacher(load(teacher), IMAGENET)
    expected = F.interpolate(raw, (24, 24), mode="bilinear", antialias=True)
    assert torch.equal(own.ready(raw), expected)
    larger = FrozenTeacher(load(teacher), IMAGENET, (40, 40))
    assert larger.ready(raw).shape == (4, 3, 40, 40) and larger.features(raw)[2] == (10, 10)


def test_a_resnet_teaches_too():
    model = build("BiT-R50x1", classes=5, image_size=64, blocks=(1, 1, 1, 1), width=32)
    feature, cells, grid = FrozenTeacher(model, Preprocessing(), (64, 96)).features(torch.randn(2, 3, 32, 32))
    assert feature.shape == (2, 1024) and cells.shape == (2, 6, 1024) and grid == (2, 3)
    assert torch.allclose(cells.mean(1), feature) and feature.std() > 0


def test_a_teacher_like_dinov2_teaches_small_patches(small, tmp_path):
    """Patches of 14 pixels, registers, LayerScale, a mask token: 3 x 3 patches for the student's 4 x 4."""
    model = small(width=48, patch=14, image_size=(56, 56), classes=0, registers=4, layer_scale=True,
                  mask_token=True, position_resize="timm")  # fmt: skip
    model.preprocessing = IMAGENET
    save(model, tmp_path / "dinov2.safetensors")
    task = Distill(teacher=str(tmp_path / "dinov2.safetensors"), teacher_size=42)
    learner = student(small, task, image_size=(16, 16), patch=4)
    module = task.build(learner).train()
    feature, patches, grid = module.frozen.features(torch.randn(2, 3, 16, 16))
    assert feature.shape == (2, 48) and patches.shape == (2, 9, 48) and grid == (3, 3)
    task.objective(learner)(module, {"image": images(side=16)})["loss"].backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    seen = adapt(load(tmp_path / "dinov2.safetensors"), image_size=42).eval()
    x = torch.randn(2, 3, 42, 42)
    with torch.no_grad():
        same = FrozenTeacher(load(tmp_path / "dinov2.safetensors"), IMAGENET, (42, 42)).features(x)
        assert torch.allclose(same[0], seen.tokens(x)[:, 0], atol=1e-5)
        assert torch.allclose(same[1], seen.tokens(x)[:, 5:], atol=1e-5)


@pytest.mark.parametrize(("own", "patch", "taken"), [(32, 8, 32), (256, 64, 224), (224, 56, 224)])
def test_a_teacher_sees_images_of_its_own_size_but_at_most_224_pixels(small, tmp_path, own, patch, taken):
    path = tmp_path / "teacher.safetensors"
    save(small(width=16, depth=1, patch=patch, image_size=(own, own)), path)
    recipe = override(named_recipe("distill"), [f"distill.teacher={path}"])
    module = recipe.task.build(student(small, recipe.task, image_size=(16, 16), patch=4))
    assert module.frozen.model.config.image_size == (taken, taken)


@pytest.mark.parametrize("head", ["token", "gap", "map", "token+gap"])
def test_the_width_of_features(small, head):
    model = small(head=head, class_token=True if "token" in head else None)
    assert model.features(torch.randn(2, 3, 32, 32)).shape == (2, feature_width(model.config))
    model = small(representation=16)
    assert model.features(torch.randn(2, 3, 32, 32)).shape == (2, feature_width(model.config)) == (2, 16)
    model = small(distilled=True)
    assert model.features(torch.randn(2, 3, 32, 32)).shape == (2, feature_width(model.config)) == (2, 64)


def test_the_digest_is_that_of_the_content(small):
    model = small()
    before, others = digest_of(model), [copy.deepcopy(model) for _ in range(3)]
    assert torch.equal(before, digest_of(others[0])) and before.shape == (32,)
    with torch.no_grad():
        others[1].encoder.norm.bias[3] += 1e-6
    others[2].preprocessing = IMAGENET
    assert not any(torch.equal(before, digest_of(other)) for other in others[1:])


# ---- features ----


def test_the_error_is_against_standardised_targets():
    x, target = torch.randn(3, 5, 7), 4 * torch.randn(3, 5, 7) + 2
    t = target.double().numpy()
    t = (t - t.mean(-1, keepdims=True)) / np.sqrt(t.var(-1, keepdims=True) + 1e-5)
    expected = ((x.double().numpy() - t) ** 2).mean(-1)
    assert np.allclose(squared_error(x, target).numpy(), expected, atol=1e-5)
    assert squared_error(torch.zeros_like(x), target).mean().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("old", "new"), [((4, 4), (6, 6)), ((6, 5), (4, 7)), ((3, 3), (3, 3)), ((1, 2), (4, 4))]
)
def test_patches_are_resized_bilinearly(old, new):
    patches = torch.randn(2, old[0] * old[1], 5, requires_grad=True)
    square = patches.unflatten(1, old).permute(0, 3, 1, 2)
    expected = F.interpolate(square, new, mode="bilinear", align_corners=False).flatten(2).mT
    assert torch.allclose(resized(patches, old, new), expected, atol=1e-6)
    assert torch.allclose(line_resize(5, 9, patches.device).sum(1), torch.ones(9))
    resized(patches, old, new).square().sum().backward()
    assert patches.grad.isfinite().all() and patches.grad.any()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.5), (1.0, 0.0)])
def test_the_loss_of_features_is_the_written_out_one(small, teacher, weights):
    task = Distill(teacher=teacher, global_weight=weights[0], dense_weight=weights[1])
    model = student(small, task)
    module = task.build(model).train()
    raw = images()
    result = task.objective(model)(module, {"image": raw})
    own, seen = load(teacher), F.interpolate(
        (raw / 255 - torch.tensor(IMAGENET.mean).view(3, 1, 1)) / torch.tensor(IMAGENET.std).view(3, 1, 1),
        (24, 24), mode="bilinear", antialias=True,
    )  # fmt: skip

    def standard(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()

    with torch.no_grad():
        z, t = model.tokens((raw.float() - 127.5) / 127.5), own.tokens(seen)
        of_feature = (module.to_feature(z[:, 0]) - standard(t[:, 0])).square().mean()
        expected = weights[0] * of_feature
        assert result["global"].item() == pytest.approx(of_feature.item(), rel=1e-4)
        if weights[1]:
            mapped = module.to_patches(z[:, 1:]).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
            mapped = F.interpolate(mapped, (6, 6), mode="bilinear").flatten(2).mT
            of_patches = (mapped - standard(t[:, 1:])).square().mean()
            expected = expected + weights[1] * of_patches
            assert result["dense"].item() == pytest.approx(of_patches.item(), rel=1e-4)
    assert result["loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    result["loss"].backward()
    assert all(p.grad is not None for p in module.parameters())  # DDP would wait for the others
    each, features = task.each(module, {"image": raw})
    assert each.mean().item() == pytest.approx(result["loss"].item(), rel=1e-5) and features.shape == (4, 32)


def test_the_teacher_is_neither_trained_nor_saved(small, teacher):
    task = Distill(teacher=teacher)
    module = task.build(student(small, task)).train()
    names = set(module.state_dict())
    assert {name.partition(".")[0] for name in names} == {"student", "to_feature", "to_patches", "teacher"}
    assert sum(p.numel() for p in module.frozen.model.parameters()) > 0
    before = digest_of(module.frozen.model)
    state = TrainState.start(module, OptimizerConfig(kind="adam"))
    losses = [
        update(state, [{"image": images(8)}], task.objective(module.student), 0.01, OptimizerConfig(), module)
        for _ in range(30)
    ]
    assert losses[-1]["loss"] < 0.75 * losses[0]["loss"]
    assert torch.equal(before, digest_of(module.frozen.model)) and not module.frozen.model.training


def test_mixed_images_are_seen_by_both(small, teacher):
    """Float images are normalised already; the teacher gets them normalised for itself."""
    task = Distill(teacher=teacher)
    model = student(small, task)
    module, raw = task.build(model).eval(), images()
    loss = task.objective(model)
    plain = loss(module, {"image": raw})["loss"]
    assert torch.allclose(plain, loss(module, {"image": (raw.float() - 127.5) / 127.5})["loss"], atol=1e-6)


def test_the_view_has_distorted_colours(teacher):
    view = View(size=(32, 32), crop="resized", area=0.14)
    assert Distill(teacher=teacher).first_view(view) == replace(view, distortion=DISTORTION)
    assert Distill(teacher=teacher, distort=False).first_view(view) == view
    assert (DISTORTION.blur, DISTORTION.grayscale, DISTORTION.jitter) == (0.0, 0.2, (0.4, 0.4, 0.2, 0.1))


# ---- labels ----


def of_labels(small, task) -> nn.Module:
    model = student(small, task, classes=5)
    with torch.no_grad():
        for head in (model.head, model.distillation_head):
            nn.init.normal_(head.weight, std=0.2)
    return task.build(model).train()


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_loss_of_labels_is_deits(small, teacher, kind, alpha):
    """Soft targets of Mixup, the teacher's best class, and KL with the mean over all numbers."""
    task = DistillLabels(teacher=teacher, kind=kind, alpha=alpha, temperature=3.0, label_smoothing=0.1)
    module = of_labels(small, task)
    model, raw = module.student, images(6)
    targets = torch.softmax(3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), 1)
    mixed = (raw.float() - 127.5) / 127.5
    result = task.objective(model)(module, {"image": mixed, "label": targets})
    with torch.no_grad():
        z = model.tokens(mixed)
        logits, distilled = model.head(z[:, 0]), model.distillation_head(z[:, 1])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET.mean, IMAGENET.std))
        seen = F.interpolate((raw / 255 - mean) / std, (24, 24), mode="bilinear", antialias=True)
        answers = load(teacher)(seen)
    p, smooth = logits.double().softmax(1).log().numpy(), (0.9 * targets + 0.1 / 5).numpy()
    base = -float(np.mean([sum(smooth[i, k] * p[i, k] for k in range(5)) for i in range(6)]))
    if kind == "hard":
        logs = distilled.double().log_softmax(1)
        other = -float(np.mean([logs[i, int(answers[i].argmax())] for i in range(6)]))
    else:
        own, other_p = (x.double().div(3.0).softmax(1).numpy() for x in (distilled, answers))
        other = 9.0 * float((other_p * (np.log(other_p) - np.log(own))).sum()) / (6 * 5)
    assert result["labels"].item() == pytest.approx(base, rel=1e-4)
    assert result["teacher"].item() == pytest.approx(other, rel=1e-3)
    assert result["loss"].item() == pytest.approx((1 - alpha) * base + alpha * other, rel=1e-3)
    best = ((logits + distilled) / 2).argmax(1)
    assert result["accuracy"].item() == pytest.approx(float((best == targets.argmax(1)).float().mean()))


def test_the_answer_is_the_mean_of_both_logits(small, teacher):
    task = DistillLabels(teacher=teacher)
    module = of_labels(small, task).eval()
    x, model = torch.randn(3, 3, 32, 32), module.student
    z = model.tokens(x)
    expected = (model.head(z[:, 0]) + model.distillation_head(z[:, 1])) / 2
    assert torch.allclose(module(x), expected, atol=1e-6) and torch.allclose(model(x), expected, atol=1e-6)
    assert model.task == "classify" and task.extract(module) is model


def test_soft_answers_of_an_equal_teacher_cost_nothing():
    task, logits = DistillLabels(teacher="any", kind="soft", temperature=2.0), torch.randn(4, 5)
    assert task.taught(logits, logits).item() == pytest.approx(0.0, abs=1e-7)
    assert task.taught(logits, logits + 3).item() == pytest.approx(0.0, abs=1e-6)
    uniform = task.taught(torch.zeros(4, 5), torch.tensor([[200.0, 0, 0, 0, 0]] * 4))
    assert uniform.item() == pytest.approx(4 * math.log(5) / 5, rel=1e-5)  # T^2 KL / K


def test_a_pretrained_model_gets_a_token_and_keeps_its_class_token_apart(small):
    for options in ({}, {"class_position": False}, {"positions": "2d"}, {"positions": "sincos2d"}):
        model = small(**options)
        new = with_distillation_token(model)
        assert new.config.distilled and new.distillation_head.weight.shape == (5, 32)
        assert not new.distillation_head.weight.any() and new.distillation_head.weight.requires_grad
        x = torch.randn(2, 3, 32, 32)
        z = new.tokens(x)
        assert torch.allclose(z[:, 0], z[:, 1], atol=1e-5)  # a copy, at the same position
        assert z.shape[1] == model.tokens(x).shape[1] + 1
        assert with_distillation_token(new) is new
    with refused("model.unsupported", "relative"):
        with_distillation_token(small(positions="relative"))


def test_the_classes_of_teacher_and_student_must_agree(small):
    def of(labels, classes=5, task="classify"):
        model = small(classes=classes)
        model.labels, model.task = labels, task
        return model

    own = of(NAMES)
    assert same_classes(of(NAMES), own, "t") == () == same_classes(of(()), own, "t")
    assert same_classes(of(tuple("edcba")), own, "t") == (4, 3, 2, 1, 0)
    for labels, classes in ((tuple("abcdx"), 5), ((), 6), (tuple("abcd"), 4)):
        with refused("evaluation.classes", "t", classes):
            same_classes(of(labels, classes), own, "t")
    for wrong in (of((), 0), of(NAMES, task="multilabel")):
        with refused("model.unsupported", "objective=distill"):
            same_classes(wrong, own, "t")
    numbers = tuple(number for number, _ in imagenet_synsets())
    order = same_classes(of(imagenet_labels(), 1000), of(numbers[::-1], 1000), "t")
    assert order == tuple(range(999, -1, -1))


def test_logits_follow_the_order_of_the_students_classes(small, teacher):
    frozen, x = FrozenTeacher(load(teacher), IMAGENET), torch.randn(2, 3, 24, 24)
    expected = frozen.logits(x)
    frozen.outputs = (2, 0, 1, 4, 3)
    assert torch.equal(frozen.logits(x), expected[:, [2, 0, 1, 4, 3]])


@pytest.mark.parametrize(("make", "bad"), [
    (Distill, {"teacher_size": -1}), (Distill, {"global_weight": 0.0}), (Distill, {"dense_weight": -1.0}),
    (DistillLabels, {"kind": "features"}), (DistillLabels, {"alpha": 1.5}),
    (DistillLabels, {"temperature": 0.0}), (DistillLabels, {"teacher_size": 10**6}),
])  # fmt: skip
def test_impossible_options_are_refused(make, bad):
    with refused("recipe.value", f"{make.name}.{next(iter(bad))}"):
        make(**bad)


@pytest.mark.parametrize("make", [Distill, DistillLabels])
def test_a_teacher_is_needed(small, make):
    with refused("request.missing", make.name, "--teacher FILE"):
        make().configure(small().config)


def test_channels_and_several_labels_are_refused(small, teacher):
    with refused("model.input", "3 channels", "1"):
        Distill(teacher=teacher).build(small(channels=1, classes=0))
    task, source = DistillLabels(teacher=teacher), digits()
    assert task.for_source(source) is task
    several = SimpleNamespace(multilabel=True, name="many")
    with refused("data.labels", "many", "objective=distill"):
        task.for_source(several)


def test_a_step_costs_the_teachers_forward_pass_too(small, teacher):
    from vitkit.metrics.cost import forward_flops

    task = Distill(teacher=teacher)
    model = student(small, task)
    assert task.passes(model) is None  # before the teacher is loaded
    task.build(model)
    ratio = forward_flops(load(teacher).config) / forward_flops(model.config)
    assert task.passes(model) == pytest.approx(3 + ratio)
