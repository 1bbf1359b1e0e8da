"""Optimizers: the formula of Adam with its first moment in bfloat16, resuming it, and what they import."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from vitkit.training.optimizer import (
    HalfMomentAdam,
    OptimizerConfig,
    group_parameters,
    make_optimizer,
    set_rate,
)

SGD, ADAM = OptimizerConfig(), OptimizerConfig(kind="adam", weight_decay=0.1)
HALF = OptimizerConfig(kind="adam", moment="bf16")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(count):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_follows_adam_with_a_rounded_moment():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 3))
    expected, m, v = p.detach().clone(), torch.zeros(5, 3), torch.zeros(5, 3)
    optimizer = HalfMomentAdam([{"params": [p]}], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for t in range(1, 6):
        gradient = torch.randn(5, 3)
        p.grad = gradient.clone()
        optimizer.step()
        first = 0.9 * m.bfloat16().float() + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        m = first.bfloat16().float()
        expected *= 1 - 0.01 * 0.1
        expected -= 0.01 * (first / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        assert torch.allclose(p, expected, atol=1e-6)
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


def test_it_stays_near_adam_in_full_precision_and_is_not_it():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    two = copy.deepcopy(one)
    for model, moment in ((one, "fp32"), (two, "bf16")):
        config = OptimizerConfig(kind="adam", weight_decay=0.1, moment=moment)
        steps(model, make_optimizer(model, config), 20)
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert 0 < apart < 0.02


def test_it_resumes_to_the_bit():
    torch.manual_seed(0)
    straight = nn.Linear(6, 4)
    stopped, config = copy.deepcopy(straight), OptimizerConfig(kind="adam", moment="bf16")
    first = make_optimizer(straight, config)
    steps(straight, first, 5, seed=1)
    steps(straight, first, 5, seed=2)
    before = make_optimizer(stopped, config)
    steps(stopped, before, 5, seed=1)
    after = make_optimizer(stopped, config)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    steps(stopped, after, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), stopped.parameters(), strict=True))


@pytest.mark.parametrize("config", [SGD, ADAM, HALF], ids=lambda config: f"{config.kind}-{config.moment}")
@pytest.mark.slow
def test_a_step_does_not_bring_a_compiler_along(config):
    code = f"""
import sys, torch
from vitkit.training.optimizer import OptimizerConfig, make_optimizer
model = torch.nn.Linear(3, 2)
optimizer = make_optimizer(model, {config!r})
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("config", "theirs"), [(SGD, torch.optim.SGD), (ADAM, torch.optim.AdamW)])
def test_they_move_as_pytorchs_do(config, theirs):
    torch.manual_seed(0)
    mine, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(mine.state_dict())
    groups = group_parameters(other, config)
    known = theirs(groups, lr=0.1, **({"momentum": 0.9} if config.kind == "sgd" else {}))
    ours = make_optimizer(mine, config)
    for _ in range(3):
        set_rate(ours, 0.1)
        for model, optimizer in ((mine, ours), (other, known)):
            model(torch.arange(6.0).view(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))
