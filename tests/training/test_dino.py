"""DINO beside its definition in plain PyTorch: loss, centre, teacher, decay, clipping, freezing, collapse."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import nn

from vitkit.data.views import View
from vitkit.metrics.feature_statistics import feature_std
from vitkit.models.self_supervised.dino_head import DinoHead
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, from_json, override, to_json
from vitkit.runs.build import start_training
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.dino import (
    LEAST_INFORMATION,
    LEAST_STD,
    Dino,
    DinoModule,
    clip_each,
    decay_weights,
    mark_images,
)
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, blank, update

SIZES = {"prototypes": 24, "hidden": 20, "bottleneck": 8, "local_crops": 3}
# keys' biases have no gradient but rounding errors, which Adam makes as large as any other with a smaller eps
ADAM = OptimizerConfig(kind="adam", clip=0.0, eps=1e-4)
STEPS = 10


def batch_of(images: int, seed: int = 5, local: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    batch = {"image": pixels(images, 3, 32, 32), "second": pixels(images, 1, 3, 32, 32)}
    batch |= {"local": pixels(images, local, 3, 16, 16)} if local else {}
    return mark_images(0, batch | {"place": torch.arange(images)})


def headless(small, **options):
    return small(classes=0, position_resize="dinov2", **options).train()


def started(small, task: Dino, config: OptimizerConfig = ADAM) -> TrainState:
    torch.manual_seed(0)
    state = start_training(Recipe(name="dino", optimizer=config), task, headless(small), Runtime())
    task.begin(state.model, STEPS)
    with torch.no_grad():  # outputs that differ between images
        for p in state.model.student.head.parameters():
            if p.ndim == 2 and p.shape[1] > 1:
                p.normal_(std=0.3)
        state.model.teacher.load_state_dict(state.model.student.state_dict())
        for p in state.model.teacher.parameters():  # which is another network than its student
            p.mul_(1 + 0.1 * torch.randn(p.shape))
    return state


def split(batch: dict[str, torch.Tensor], sizes: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    return [
        dict(zip(batch, parts, strict=True))
        for parts in zip(*(tensor.split(sizes) for tensor in batch.values()), strict=True)
    ]


class Network(nn.Module):
    """The definition of a network: a ViT and a head of torch's own layers."""

    def __init__(self, network):
        super().__init__()
        self.backbone = copy.deepcopy(network.backbone).requires_grad_(True)
        self.mlp = copy.deepcopy(network.head.mlp).requires_grad_(True)
        rows, width = network.head.last.weight.shape
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(width, rows, bias=False))
        parts = self.last.parametrizations.weight
        parts.original0.data.copy_(network.head.last.scale)
        parts.original0.requires_grad = False
        parts.original1.data.copy_(network.head.last.weight)

    @property
    def rows(self) -> nn.Parameter:
        return self.last.parametrizations.weight.original1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.mlp(self.backbone.tokens(images)[:, 0])
        return self.last(x / x.norm(dim=-1, keepdim=True))


def views_of(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    views = [batch["image"], batch["second"][:, 0], *batch.get("local", torch.empty(1, 0)).unbind(1)]
    return [view / 127.5 - 1 for view in views]


def defined_loss(teacher, student, centre, temperature: float, student_temperature: float = 0.1):
    """Cross-entropies of teacher views 0 and 1 and all other views of the student, one by one."""
    terms = []
    for i in range(2):
        p = ((teacher[i] - centre) / temperature).softmax(-1)
        for v in range(len(student)):
            if v != i:
                terms.append(-(p * (student[v] / student_temperature).log_softmax(-1)).sum(-1).mean())
    return torch.stack(terms).mean(), len(terms)


@pytest.mark.parametrize(("local", "terms"), [(3, 8), (0, 2)])
def test_the_loss_is_the_mean_over_all_pairs_of_different_views(small, local, terms):
    task = Dino(**SIZES | {"local_crops": local}, teacher_temperature=0.07, temperature_warmup=0.0)
    state, batch = started(small, task), batch_of(4, local=local)
    torch.nn.init.normal_(state.model.centre, std=0.1)
    teacher, student = (Network(network) for network in (state.model.teacher, state.model.student))
    with torch.no_grad():
        said = [teacher(view) for view in views_of(batch)[:2]], [student(view) for view in views_of(batch)]
        expected, count = defined_loss(*said, state.model.centre, 0.07)
        actual = task.objective(state.model.teacher.backbone)(state.model, batch)
    assert count == terms and float(actual["loss"]) == pytest.approx(float(expected), rel=1e-5)
    p = torch.stack([((said[0][i] - state.model.centre) / 0.07).softmax(-1) for i in range(2)])
    entropy = float(-(p * p.log()).sum(-1).mean())
    assert float(actual["entropy"]) == pytest.approx(entropy, rel=1e-4)
    assert float(actual["divergence"]) == pytest.approx(float(expected) - entropy, rel=1e-3)
    assert float(actual["information"]) == pytest.approx(math.log(24) - entropy, rel=1e-3, abs=1e-5)


def test_published_numbers_of_pairs_and_schedules(small):
    task = Dino(first_temperature=0.04, teacher_temperature=0.07, temperature_warmup=0.3)
    assert task.local_crops == 8 and 2 * (2 + 8) - 2 == 18
    module = DinoModule(headless(small), replace(task, **SIZES))
    module.steps = 100
    values = []
    for step in (0, 15, 30, 99):
        module.step.fill_(step)
        values.append(
            [
                float(v)
                for v in (module.temperature(0.04, 0.07), module.cosine(0.996, 1.0), module.cosine(0.04, 0.4))
            ]
        )
    temperature, momentum, decay = zip(*values, strict=True)
    assert temperature == pytest.approx([0.04, 0.055, 0.07, 0.07])

    def cosine(first, last, step):
        return last + 0.5 * (first - last) * (1 + math.cos(math.pi * step / 100))

    assert momentum == pytest.approx([cosine(0.996, 1, s) for s in (0, 15, 30, 99)], abs=1e-6)
    assert decay == pytest.approx([cosine(0.04, 0.4, s) for s in (0, 15, 30, 99)], abs=1e-6)
    assert momentum[0] == pytest.approx(0.996) and momentum[-1] < 1 and decay[0] == pytest.approx(0.04)


def by_definition(state: TrainState, task: Dino, batches, rate: float):
    """The same steps with torch's own layers and AdamW: (student, teacher, centre, losses)."""
    student, teacher = Network(state.model.student), Network(state.model.teacher)
    centre, losses = torch.zeros(24), []
    kernels = [
        p for n, p in student.named_parameters() if p.ndim >= 2 and n.endswith(("weight", "original1"))
    ]
    others = [p for p in student.parameters() if p.requires_grad and not any(p is k for k in kernels)]
    groups = [{"params": kernels, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=rate, eps=1e-4)
    for step, batch in enumerate(batches):
        views = views_of(batch)
        said = [teacher(view).detach() for view in views[:2]]
        warm = min(1.0, step / (task.temperature_warmup * STEPS)) if task.temperature_warmup else 1.0
        heat = task.first_temperature + (task.teacher_temperature - task.first_temperature) * warm
        loss, _ = defined_loss(said, [student(view) for view in views], centre, heat)
        losses.append(float(loss.detach()))
        adam.zero_grad()
        loss.backward()
        for p in student.parameters():
            if p.grad is not None and task.clip and p.grad.norm() > task.clip:
                p.grad *= task.clip / (p.grad.norm() + 1e-6)
        progress = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        adam.param_groups[0]["weight_decay"] = 0.4 + (0.04 - 0.4) * progress
        before = student.rows.detach().clone()
        adam.step()
        if step < task.freeze_last * STEPS:
            student.rows.data.copy_(before)
        centre = 0.9 * centre + 0.1 * torch.stack(said).mean((0, 1))
        momentum = 1 + (task.momentum - 1) * progress
        for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data = momentum * mine.data + (1 - momentum) * its.data
    return student, teacher, centre, losses


@pytest.mark.parametrize(
    ("options", "pieces"),
    [({}, (5,)), ({"clip": 0.01, "freeze_last": 0.25}, (2, 3)), ({"clip": 0.0, "freeze_last": 0.0}, (1, 4))],
)
def test_steps_equal_the_definition_with_torchs_own_layers_and_adam(small, options, pieces):
    """Loss, centre, teacher, temperature, weight decay, frozen layer and clipping, over four steps."""
    task = Dino(
        **SIZES,
        momentum=0.8,
        teacher_temperature=0.2,
        first_temperature=0.1,
        temperature_warmup=0.3,
        **options,
    )
    state = started(small, task)
    batches = [batch_of(5, seed) for seed in range(4)]
    student, teacher, centre, losses = by_definition(state, task, batches, 0.01)
    objective, first = task.objective(state.model.teacher.backbone), copy.deepcopy(state.model.student)
    for batch, expected in zip(batches, losses, strict=True):
        actual = update(state, split(batch, pieces), objective, 0.01, ADAM, state.model)
        assert actual["loss"] == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(state.model.centre, centre, atol=1e-5) and centre.abs().max() > 0.01
    for mine, defined in ((state.model.student, student), (state.model.teacher, teacher)):
        names = dict(defined.backbone.named_parameters())
        for name, p in mine.backbone.named_parameters():
            assert torch.allclose(p, names[name], atol=2e-4), name
        assert torch.allclose(mine.head.last.weight, defined.rows, atol=2e-4)
        for a, b in zip(mine.head.mlp.parameters(), defined.mlp.parameters(), strict=True):
            assert torch.allclose(a, b, atol=2e-4)
    assert not torch.allclose(first.backbone.project.weight, student.backbone.project.weight, atol=1e-2)
    assert not torch.allclose(state.model.teacher.head.last.weight, first.head.last.weight, atol=1e-2)


@pytest.mark.parametrize("config", [ADAM, replace(ADAM, moment="bf16"), replace(ADAM, kind="sgd")])
def test_weights_decay_before_the_update_and_only_kernels(small, config):
    """With a tiny gradient an update is the decay alone."""
    task = Dino(**SIZES, weight_decay=2.0, last_weight_decay=2.0, freeze_last=0.0, clip=0.0)
    state = started(small, task, config)
    for p in state.model.student.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    before = copy.deepcopy(state.model.student.state_dict())
    for group in state.optimizer.param_groups:
        group["lr"] = 0.05
    state.optimizer.step()
    for name, p in state.model.student.named_parameters():
        kernel = name.endswith(".weight") and p.ndim >= 2
        assert torch.allclose(p, before[name] * (1 - 0.05 * 2.0 if kernel else 1)), name
    kernels = [n for n in before if n.endswith(".weight") and before[n].ndim >= 2]
    assert {"head.last.weight", "head.mlp.0.weight", "backbone.project.weight"} <= set(kernels)
    kernel, half = state.model.student.head.last.weight, state.model.student.head.last.weight.detach() * 0.5
    for group in state.optimizer.param_groups:
        group["lr"] = torch.tensor(0.05)  # as it is on a GPU
    with torch.no_grad():
        decay_weights(state.model, state.optimizer, torch.tensor(10.0))
    assert torch.allclose(kernel, half)


def test_each_gradient_is_clipped_by_its_own_norm():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
    for p, norm in zip(parameters, (0.5, 3.0, 30.0), strict=True):
        p.grad = F.normalize(torch.arange(1.0, p.numel() + 1), dim=0) * norm
    before = [p.grad.clone() for p in parameters]
    clip_each(parameters, 3.0)
    for p, original, norm in zip(parameters, before, (0.5, 3.0, 3.0), strict=True):
        assert float(p.grad.norm()) == pytest.approx(norm, rel=1e-5)
        assert F.cosine_similarity(p.grad, original, dim=0) == pytest.approx(1.0)
    assert torch.equal(parameters[0].grad, before[0])


def test_the_head_equals_torchs_weight_norm_and_starts_as_published():
    head = DinoHead(12, 50, hidden=40, bottleneck=16, trained_scale=True)
    reference = nn.utils.parametrizations.weight_norm(nn.Linear(16, 50, bias=False))
    parts = reference.parametrizations.weight
    nn.init.uniform_(head.last.scale, 0.5, 2.0)
    parts.original0.data.copy_(head.last.scale)
    parts.original1.data.copy_(head.last.weight)
    x = torch.randn(7, 12)
    expected = reference(F.normalize(head.mlp(x), dim=-1))
    assert torch.allclose(head(x), expected, atol=1e-6)
    weights = torch.randn(7, 50)
    (head(x) * weights).sum().backward()
    actual = head.last.weight.grad.clone(), head.last.scale.grad.clone(), head.mlp[0].weight.grad.clone()
    head.zero_grad()
    (reference(F.normalize(head.mlp(x), dim=-1)) * weights).sum().backward()
    wanted = parts.original1.grad, parts.original0.grad, head.mlp[0].weight.grad
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(actual, wanted, strict=True))

    published = DinoHead(64, 4096, generator=torch.Generator().manual_seed(1))
    assert [tuple(p.shape) for p in published.mlp[::2].parameters()] == [
        (2048, 64), (2048,), (2048, 2048), (2048,), (256, 2048), (256,),
    ]  # fmt: skip
    assert published.last.weight.shape == (4096, 256) and not published.last.scale.requires_grad
    assert (published.last.scale == 1).all() and not published.mlp[0].bias.any()
    assert float(published.mlp[2].weight.detach().std()) == pytest.approx(0.02, rel=0.01)
    assert float(published.last.weight.detach().abs().max()) == pytest.approx(1 / 16, rel=0.01)
    again = DinoHead(64, 4096, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again.last.weight, published.last.weight)


def test_positions_of_small_crops_are_interpolated_and_learn(small):
    task = Dino(**SIZES)
    state = started(small, task)
    module, batch = state.model, batch_of(2)
    crops = batch["local"].transpose(0, 1).flatten(0, 1) / 127.5 - 1
    module.student.backbone.features(crops).square().sum().backward()
    gradient = module.student.backbone.positions.table.grad[0, 1:]
    assert (gradient.abs().sum(1) > 0).all()  # each of the 16 positions, though the crops have 4


def test_a_black_image_of_an_empty_batch_counts_nowhere(small):
    """What a process without images computes leaves sums, and so the centre, as they are."""
    task = Dino(**SIZES)
    state, batch = started(small, task), batch_of(4)
    objective = task.objective(state.model.teacher.backbone)
    objective(state.model, batch)
    sums = state.model.sums.clone()
    objective(state.model, blank(batch))
    assert torch.equal(state.model.sums, sums) and sums.any()
    logits = state.model.teacher.head(state.model.teacher.backbone.features(torch.cat(views_of(batch)[:2])))
    assert torch.allclose(sums[:24], logits.sum(0), atol=1e-4) and sums[-2] == 4


def test_an_evaluation_changes_nothing_and_compares_an_image_with_its_mirror_image(small):
    task = Dino(**SIZES)
    state = started(small, task)
    module, images = state.model.eval(), batch_of(3)["image"]
    torch.nn.init.normal_(module.centre, std=0.1)
    before = copy.deepcopy(module.state_dict()), module.sums.clone()
    with torch.no_grad():
        loss, features = task.each(module, {"image": images})
        pictures = [images / 127.5 - 1, images.flip(-1) / 127.5 - 1]
        teacher, student = (Network(network) for network in (module.teacher, module.student))
        said = [teacher(x) for x in pictures], [student(x) for x in pictures]
        expected, _ = defined_loss(*said, module.centre, 0.04)
    assert float(loss.mean()) == pytest.approx(float(expected), rel=1e-5) and loss.shape == (3,)
    assert torch.allclose(features, module.teacher.backbone.tokens(pictures[0])[:, 0], atol=1e-6)
    assert all(torch.equal(before[0][n], t) for n, t in module.state_dict().items())
    assert torch.equal(before[1], module.sums)


def test_only_the_student_has_drop_path_and_dropout(small):
    module = DinoModule(headless(small, stochastic_depth=0.5, dropout=0.3), Dino(**SIZES)).train()
    images = torch.rand(4, 3, 32, 32)
    assert torch.equal(module.teacher.backbone.features(images), module.teacher.backbone.features(images))
    assert not torch.equal(module.student.backbone.features(images), module.student.backbone.features(images))
    assert not any(p.requires_grad for p in module.teacher.parameters())


def test_the_feature_std_is_that_of_the_batch(small):
    task = Dino(**SIZES)
    state, batch = started(small, task), batch_of(6)
    images = torch.cat(views_of(batch)[:2])
    expected = float(feature_std(state.model.teacher.backbone.features(images).detach()))
    objective = task.objective(state.model.teacher.backbone)
    update(state, split(batch, (2, 4)), objective, 0.0, ADAM, state.model)
    assert float(state.model.std) == pytest.approx(expected, rel=1e-3)
    assert update(state, [batch], objective, 0.0, ADAM, state.model)["std"] == pytest.approx(
        expected, rel=1e-3
    )


def test_collapsed_steps_are_counted_in_a_row_after_the_first_part_of_the_run(small):
    task = Dino(**SIZES, centre_momentum=1.0, collapse_steps=3)
    state = started(small, task)
    objective = task.objective(state.model.teacher.backbone)
    networks = (state.model.teacher, state.model.student)
    counts, kept = [], [copy.deepcopy(network.state_dict()) for network in networks]
    for step in range(6):
        for network, weights in zip(networks, kept, strict=True):
            network.load_state_dict(weights)
            for p in network.parameters() if step < 4 else ():  # all images have the same output
                p.data.mul_(0)
            network.head.last.weight.data += 1e-3
        update(state, [batch_of(4, step)], objective, 0.0, ADAM, state.model)
        counts.append(float(state.model.collapsed))
    assert counts == [0, 1, 2, 3, 0, 0]  # a tenth of the run is one step
    metrics = {"collapsed": 3.0, "std": 0.0, "entropy": math.log(24)}
    with refused("training.collapsed", "step 6", "3 steps", "schedule.rate", "dino.collapse_steps=0"):
        task.check_step(6, metrics)
    task.check_step(5, metrics | {"collapsed": 2.0})
    replace(task, collapse_steps=0).check_step(9, metrics)
    for changes, remedy in (({"entropy": 0.01}, "centre_momentum"), ({"entropy": 3.1}, "momentum")):
        with refused("training.collapsed", remedy):
            task.check_step(6, metrics | {"std": 0.5} | changes)


def trained(small, steps: int, rate: float, **options) -> tuple[list[dict[str, float]], Dino]:
    """The metrics of some steps on images of few kinds, up to a collapse."""
    task = Dino(**SIZES | {"local_crops": 0}, freeze_last=0.0, **options)
    state = started(small, task, replace(ADAM, eps=1e-8))
    task.begin(state.model, steps)
    objective, seen = task.objective(state.model.teacher.backbone), []
    batches = [batch_of(8, seed, local=0) for seed in range(4)]
    for step in range(steps):
        seen.append(update(state, [batches[step % 4]], objective, rate, ADAM, state.model))
        task.check_step(step + 1, seen[-1])
    return seen, task


BROKEN = {  # without a centre one output wins for all images; with high temperatures all are equally likely
    "one output": {"centre_momentum": 1.0, "teacher_temperature": 1e-3, "first_temperature": 1e-3},
    "uniform": {"teacher_temperature": 0.5, "first_temperature": 0.5},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_run_that_collapses_is_stopped(small, kind):
    with refused("training.collapsed", "10 steps in a row") as caught:
        trained(small, 400, 0.02, momentum=0.8, collapse_steps=10, **BROKEN[kind])
    assert ("centre_momentum" in str(caught.value)) == (kind == "one output")


def test_a_healthy_run_is_never_near_to_be_stopped(small):
    seen, _ = trained(small, 120, 1e-3, collapse_steps=1, momentum=0.99)
    assert len(seen) == 120 and min(row["information"] for row in seen) > 100 * LEAST_INFORMATION
    assert min(row["std"] for row in seen) > 3 * LEAST_STD and not any(row["collapsed"] for row in seen)


def test_views_are_those_of_the_published_code():
    view = View(size=(224, 224), crop="inception", flip=True, interpolation="bicubic")
    task = Dino()
    first, more = task.first_view(view), dict(task.more_views(view))
    assert (first.area, first.largest, first.crop, first.flip) == (0.4, 1.0, "resized", True)
    assert (first.distortion.blur, first.distortion.solarize) == (1.0, 0.0)
    (second,), local = more["second"], more["local"]
    assert (second.size, second.area, second.distortion.blur, second.distortion.solarize) == (
        (224, 224), 0.4, 0.1, 0.2,
    )  # fmt: skip
    assert len(local) == 8 and {crop.size for crop in local} == {(96, 96)}
    assert (local[0].area, local[0].largest, local[0].distortion.blur) == (0.05, 0.4, 0.5)
    assert {v.interpolation for v in (first, second, *local)} == {"bicubic"}
    jitter = {(v.distortion.jitter, v.distortion.jitter_probability, v.distortion.grayscale)
              for v in (first, second, *local)}  # fmt: skip
    assert jitter == {((0.4, 0.4, 0.2, 0.1), 0.8, 0.2)}
    assert "local" not in dict(Dino(local_crops=0).more_views(view))
    sides = {32: 16, 64: 32, 96: 48, 160: 64, 224: 96, 384: 160}
    assert {side: task.local_side(side) for side in sides} == sides
    assert Dino(local_size=20).local_side(224) == 20


def test_a_step_costs_as_many_passes_as_the_published_numbers_say(small):
    model = small(image_size=(224, 224), patch=16, classes=0)
    assert Dino().passes(model) / 3 == pytest.approx(4.14, abs=0.01)  # plain training steps
    assert Dino(local_crops=0).passes(model) == 8


def test_prototypes_follow_from_the_number_of_images():
    sizes = {100: 256, 9_469: 512, 50_000: 2048, 1_281_167: 65_536, 14_000_000: 65_536}
    assert {images: Dino().prototypes_for(images) for images in sizes} == sizes


@pytest.mark.parametrize("bad", [
    {"global_scale": (1.0, 0.4)}, {"local_scale": (0.1,)}, {"momentum": 1.5}, {"student_temperature": 0.0},
    {"local_crops": -1}, {"clip": float("nan")}, {"freeze_last": 2.0},
])  # fmt: skip
def test_impossible_options_are_refused(bad):
    with refused("recipe.value", f"dino.{next(iter(bad))}"):
        Dino(**bad)


def test_models_that_it_does_not_fit_are_refused(small, small_hybrid):
    with refused("model.unsupported", "dino"):
        Dino().configure(small_hybrid().config)
    with refused("model.unsupported", "distillation token"):
        Dino().configure(small(distilled=True).config)
    with refused("recipe.value", "dino.local_size", 8):
        Dino(local_size=4).configure(small().config)


def test_the_published_recipe():
    r = recipe("dino-imagenet")
    assert r.model == "ViT-S/16" and r.batch == 512 and r.length.epochs == 100 and r.image_size == (224, 224)
    assert r.schedule.rate == pytest.approx(1e-3) and r.schedule.floor == 1e-6 and r.schedule.warmup == 25_023
    assert r.optimizer.kind == "adam" and r.optimizer.clip == 0 and r.optimizer.weight_decay == 0
    assert r.stochastic_depth == 0.1 and r.model_options["stochastic_depth_rescale"]
    assert r.model_options["position_resize"] == "dinov2"
    t = r.task
    assert isinstance(t, Dino) and t.prototypes == 65_536 and t.clip == 3.0 and t.momentum == 0.996
    assert (t.weight_decay, t.last_weight_decay, t.freeze_last) == (0.04, 0.4, 1 / 100)
    assert (t.teacher_temperature, t.student_temperature, t.centre_momentum) == (0.04, 0.1, 0.9)
    changed = override(recipe("dino"), ["dino.local_crops=4", "dino.global_scale=0.3,0.9"])
    assert changed.task.local_crops == 4 and from_json(to_json(changed)) == changed
    for name in ("crop=resized", "crop_area=0.2", "optimizer.weight_decay=0.1", "mixup=0.2"):
        with refused("recipe.value", "dino", name.partition("=")[0]):
            override(recipe("dino"), [name])


def test_every_parameter_of_the_student_learns(small):
    """As several processes need it: each waits for the gradients of all."""
    for options in ({}, {"norm_last_layer": False}):
        task = Dino(**SIZES, **options)
        state = started(small, task)
        task.objective(state.model.teacher.backbone)(state.model, batch_of(2))["loss"].backward()
        missing = [n for n, p in state.model.student.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing
        assert state.model.student.head.last.scale.requires_grad == bool(options)
        assert not [n for n, p in state.model.teacher.named_parameters() if p.grad is not None]


def test_names_are_frozen(small):
    names = set(DinoModule(headless(small), Dino(**SIZES)).state_dict())
    own = {"step", "centre", "usage", "moments", "std", "collapsed"}
    networks = {name.split(".")[1] for name in names - own}
    assert own <= names and networks == {"backbone", "head"}
    head = {f"mlp.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")} | {
        "last.weight",
        "last.scale",
    }
    assert {name.removeprefix("student.head.") for name in names if name.startswith("student.head.")} == head


def test_heads_differ_between_seeds_and_not_between_processes():
    from vitkit.models.variants import build

    heads = [
        DinoModule(build("ViT-Ti/16", classes=0, depth=1, seed=seed), Dino(**SIZES)).student.head.last.weight
        for seed in (0, 0, 1)
    ]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert np.isfinite(heads[0].detach().numpy()).all()
