"""Schedules, optimizers, accumulation and averaging against their formulas; the loop learns."""

import copy
import math

import pytest
import torch
from torch import nn

from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.loop import train
from vitkit.training.optimizer import (
    OptimizerConfig,
    clip_gradients,
    group_parameters,
    make_optimizer,
    update_average,
)
from vitkit.training.schedule import Duration, Schedule
from vitkit.training.step import Diverged, TrainState, update


def test_warm_up_multiplies_the_decayed_rate_and_starts_at_zero():
    schedule = Schedule(rate=0.03, warmup=500, decay="cosine")
    assert schedule.at(0, 10_000) == 0
    assert schedule.at(250, 10_000) == pytest.approx(0.015)
    progress = (3000 - 500) / 9500
    assert schedule.at(3000, 10_000) == pytest.approx(0.03 * 0.5 * (1 + math.cos(math.pi * progress)))
    assert schedule.at(10_000, 10_000) == pytest.approx(0, abs=1e-12)


def test_linear_decay_ends_at_its_floor_and_stairs_divide_by_ten():
    linear = Schedule(rate=1e-3, warmup=100, decay="linear", floor=1e-5)
    assert linear.at(1000, 1000) == pytest.approx(1e-5)
    assert linear.at(550, 1000) == pytest.approx(1e-5 + (1e-3 - 1e-5) * 0.5)
    stairs = Schedule(rate=0.003, warmup=0, decay="stairs", stairs=(0.3, 0.6, 0.9))
    assert [stairs.at(s, 100) for s in (0, 29, 30, 60, 95)] == pytest.approx([3e-3, 3e-3, 3e-4, 3e-5, 3e-6])


def test_durations_convert_once():
    assert Duration(steps=20).in_steps(1000, 512) == 20
    assert Duration(epochs=90).in_steps(14_200_000, 4096) == 312_012
    with pytest.raises(ValueError, match="steps or epochs"):
        Duration(steps=3, epochs=1)


@pytest.mark.parametrize("bad", [{"decay": "exponential"}, {"rate": -1}, {"warmup": -1}])
def test_impossible_schedules_are_refused(bad):
    with pytest.raises(ValueError):
        Schedule(**bad)


def batch_of(n: int, size: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    return {"image": images, "label": torch.arange(n) % 5}


def doubled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch normalised, in double precision."""
    return batch | {"image": batch["image"].double() / 127.5 - 1}


def stepped(model: nn.Module, config: OptimizerConfig, batches, rates=(0.1, 0.1, 0.05)) -> TrainState:
    state = TrainState.start(model, config)
    for rate in rates:
        update(state, batches, ClassificationLoss(classes=5), rate, config, model)
    return state


def test_sgd_and_adam_equal_their_formulas(small):
    """Momentum m <- 0.9 m + g, p <- p - lr m; Adam with decoupled decay p <- p - lr (adam + wd p)."""
    for config in (
        OptimizerConfig(clip=0.0),
        OptimizerConfig(kind="adam", weight_decay=0.1, decays="all", clip=0.0),
    ):
        model = small().double()
        twin = copy.deepcopy(model)
        stepped(model.train(), config, [doubled(batch_of(6))])
        m = {n: torch.zeros_like(p) for n, p in twin.named_parameters()}
        v = copy.deepcopy(m)
        for t, rate in enumerate((0.1, 0.1, 0.05), start=1):
            twin.zero_grad()
            ClassificationLoss(classes=5)(twin, doubled(batch_of(6)))["loss"].backward()
            with torch.no_grad():
                for n, p in twin.named_parameters():
                    if config.kind == "sgd":
                        m[n] = 0.9 * m[n] + p.grad
                        p -= rate * m[n]
                    else:
                        m[n] = 0.9 * m[n] + 0.1 * p.grad
                        v[n] = 0.999 * v[n] + 0.001 * p.grad**2
                        adam = (m[n] / (1 - 0.9**t)) / ((v[n] / (1 - 0.999**t)).sqrt() + 1e-8)
                        p -= rate * (adam + 0.1 * p)
        for (n, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6), n


@pytest.mark.parametrize("pieces", [(6,), (2, 2, 2), (5, 1)])
def test_accumulated_micro_batches_equal_the_whole_batch(small, pieces):
    whole = small().double().train()
    parts = copy.deepcopy(whole)
    batch = doubled(batch_of(6))
    cut, at = [], 0
    for size in pieces:
        cut.append({k: t[at : at + size] for k, t in batch.items()})
        at += size
    config = OptimizerConfig()
    stepped(whole, config, [batch])
    stepped(parts, config, cut)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_gradients_are_clipped_at_the_global_norm():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0])
    assert clip_gradients(parameters, 1.0) == 5
    assert torch.allclose(parameters[0].grad, torch.tensor([0.6, 0, 0]))
    assert clip_gradients(parameters, 10.0) == pytest.approx(1)
    assert torch.allclose(parameters[1].grad, torch.tensor([0, 0.8]))


def test_only_kernels_decay_unless_all_do(small):
    model = small(head="map", mask_token=True)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = group_parameters(model, OptimizerConfig(kind="adam", weight_decay=0.1))
    decayed = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
    assert "encoder.blocks.0.attention.qkv.weight" in decayed and "project.weight" in decayed
    assert not any(
        n.endswith("bias") or "norm" in n or n in ("positions.table", "pool.probe") for n in decayed
    )
    everything = group_parameters(model, OptimizerConfig(kind="adam", weight_decay=0.1, decays="all"))
    assert sum(len(g["params"]) for g in everything) == len(names) and len(everything) == 1


def test_layer_decay_and_freezing(small):
    model = small(depth=3)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = group_parameters(model, OptimizerConfig(layer_decay=0.5))
    share = {names[id(p)]: g["rate_share"] for g in groups for p in g["params"]}
    assert share["head.weight"] == 1 and share["encoder.blocks.2.norm1.weight"] == 0.5
    assert share["encoder.blocks.0.norm1.weight"] == 0.125 and share["project.weight"] == 0.0625
    model.requires_grad_(False).head.requires_grad_(True)
    frozen = group_parameters(model, OptimizerConfig())
    assert {names[id(p)] for g in frozen for p in g["params"]} == {"head.weight", "head.bias"}
    with pytest.raises(ValueError, match="no parameter is trainable"):
        group_parameters(small(classes=0).requires_grad_(False), OptimizerConfig())


def test_an_optimizer_has_the_numbers_of_its_config(small):
    adam = make_optimizer(small(), OptimizerConfig(kind="adam", betas=(0.5, 0.7), eps=1e-3)).defaults
    assert adam["betas"] == (0.5, 0.7) and adam["eps"] == 1e-3
    half = make_optimizer(small(), OptimizerConfig(kind="adam", moment="bf16", betas=(0.5, 0.7), eps=1e-3))
    assert half.defaults["betas"] == (0.5, 0.7) and half.defaults["eps"] == 1e-3
    assert make_optimizer(small(), OptimizerConfig(momentum=0.3)).defaults["momentum"] == 0.3


def test_layer_decay_of_a_resnet_goes_by_stages(small_resnet):
    model = small_resnet()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = group_parameters(model, OptimizerConfig(layer_decay=0.5))
    share = {names[id(p)].partition(".")[0]: g["rate_share"] for g in groups for p in g["params"]}
    stages = {
        names[id(p)][:9]: g["rate_share"] for g in groups for p in g["params"] if "stages." in names[id(p)]
    }
    count = len(model.config.blocks)
    assert share["head"] == 1 and share["root"] == 0.5 ** (count + 1)
    assert stages == {f"stages.{i}.": 0.5 ** (count - i) for i in range(count)}


@pytest.mark.parametrize("keep", [0.5, 0.9999])
def test_polyak_averaging_equals_its_closed_form_and_forgets_the_start(keep):
    model = torch.nn.Linear(3, 2)
    seen, average = [], {n: torch.full_like(p, 1e6) for n, p in model.named_parameters()}
    for step in range(1, 41):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        seen.append({n: p.detach().double() for n, p in model.named_parameters()})
        update_average(average, model, keep, step)
    shares = torch.tensor([keep ** (40 - i) for i in range(1, 41)], dtype=torch.float64)
    for name, mean in average.items():
        expected = sum(s * one[name] for s, one in zip(shares / shares.sum(), seen, strict=True))
        assert torch.allclose(mean.double(), expected, atol=1e-5)


def test_a_run_averages_its_steps_by_their_numbers(small):
    """After one step the average is that step's; after three, 1, 0.9 and 0.81 over their sum."""
    model = small().train()
    config, seen = OptimizerConfig(average=0.9), []
    state = TrainState.start(model, config)

    def watch(state, metrics):
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        if state.step == 1:
            assert all(torch.equal(state.average[n], p) for n, p in seen[0].items())
        return False

    batches = iter(lambda: [batch_of(4)], None)
    train(
        state,
        batches,
        ClassificationLoss(classes=5),
        until=3,
        rate=lambda step: 0.1,
        config=config,
        watch=watch,
    )
    for name, mean in state.average.items():
        expected = (0.81 * seen[0][name] + 0.9 * seen[1][name] + seen[2][name]) / 2.71
        assert torch.allclose(mean, expected, atol=1e-6)
    raw, mean = seen[2], {n: t.clone() for n, t in state.average.items()}
    with state.averaged():
        assert all(torch.equal(p, mean[n]) for n, p in model.named_parameters())
    assert all(torch.equal(p, raw[n]) and torch.equal(state.average[n], mean[n])
               for n, p in model.named_parameters())  # fmt: skip


def test_label_smoothing_and_the_sigmoid_loss_equal_their_formulas():
    logits, targets = torch.randn(4, 5), torch.eye(5)[:4]
    smooth = 0.9 * targets + 0.1 / 5
    expected = -(smooth * logits.log_softmax(1)).sum(1).mean()
    assert torch.allclose(ClassificationLoss(classes=5, label_smoothing=0.1).value(logits, targets), expected)
    for smoothing in (0.0, 0.1):
        wanted = (1 - smoothing) * targets + smoothing / 5
        each = -(wanted * logits.sigmoid().log() + (1 - wanted) * (-logits).sigmoid().log())
        sigmoid = ClassificationLoss(classes=5, loss="sigmoid", label_smoothing=smoothing).value(
            logits, targets
        )
        assert torch.allclose(sigmoid, each.sum(1).mean(), atol=1e-6)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="softmax, sigmoid, not 'hinge'"):
        ClassificationLoss(classes=5, loss="hinge")


def test_a_loss_that_is_no_number_stops_before_the_model_moves(small):
    model = small().train()
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    before = model.project.weight.clone()
    state = TrainState.start(model, OptimizerConfig())
    with pytest.raises(Diverged, match="step 0: loss nan"):
        update(state, [batch_of(4)], ClassificationLoss(classes=5), 0.1, OptimizerConfig(), model)
    assert torch.equal(model.project.weight, before)


def test_a_small_model_learns_sixteen_images_by_heart(small):
    model = small().train()
    config = OptimizerConfig(kind="adam")
    state, seen = TrainState.start(model, config), []

    def watch(state, metrics):
        seen.append(float(metrics["loss"]))
        return float(metrics["accuracy"]) == 1 and seen[-1] < 0.05

    batches = iter(lambda: [batch_of(16)], None)
    train(
        state,
        batches,
        ClassificationLoss(classes=5),
        until=300,
        rate=lambda step: 2e-3,
        config=config,
        watch=watch,
    )
    assert seen[-1] < 0.05 < seen[0] and state.step == len(seen) < 300
