"""Adam and SGD as published: which parameters decay, at which rate each learns."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.runtime.runtime import full_tensor, local_shard
from vitkit.training.schedule import check_ranges


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters are updated; the learning rate itself is the schedule's."""

    kind: str = "sgd"  # or adam, with decoupled weight decay: a key of OPTIMIZERS
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    moment: str = "fp32"  # or bf16: how Adam keeps its first moment
    weight_decay: float = 0.0  # multiplied by the rate
    decays: str = "kernels"  # or "all": biases, norms, tokens and positions too
    clip: float = 1.0  # global norm of the gradient; 0: none
    layer_decay: float = 1.0  # rate of each layer as a share of the one above it
    average: float = 0.0  # Polyak averaging: decay of the average (EMA); 0.9999 in the paper, 0: none

    def __post_init__(self):
        for field, known in (("kind", tuple(OPTIMIZERS)), ("decays", ("kernels", "all")),
                             ("moment", ("fp32", "bf16"))):  # fmt: skip
            if getattr(self, field) not in known:
                raise ValueError(f"{field} must be one of {', '.join(known)}, not {getattr(self, field)!r}")
        check_ranges(self, "optimizer.")
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas are two numbers, not {self.betas}")


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer, with every trainable parameter in exactly one group."""
    groups = group_parameters(model, config)
    members = [p for group in groups for p in group["params"]]
    fused = all(p.is_cuda and not hasattr(p, "to_local") for p in members)
    return OPTIMIZERS[config.kind](groups, config, fused)


def make_sgd(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    rates_on_device(groups, fused)
    return SGD(groups, lr=0.0, momentum=config.momentum, fused=fused or None)


def make_adam(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    shared: dict[str, Any] = {"lr": 0.0, "betas": config.betas, "eps": config.eps, "weight_decay": 0.0}
    if config.moment == "bf16":
        return HalfMomentAdam(groups, **shared)
    rates_on_device(groups, fused)
    return AdamW(groups, **shared, fused=fused or None, capturable=fused)


def rates_on_device(groups: list[dict[str, Any]], fused: bool) -> None:
    """Keep learning rates on the GPU, where they can change under a captured CUDA graph."""
    for group in groups if fused else ():
        group["lr"] = torch.zeros((), device=group["params"][0].device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    groups = optimizer.param_groups
    if isinstance(groups[0]["lr"], Tensor):  # on the GPU, all of them by two kernels
        rates = [group["lr"] for group in groups]
        torch._foreach_zero_(rates)
        torch._foreach_add_(rates, [rate * group["rate_share"] for group in groups])
        return
    for group in groups:
        group["lr"] = rate * group["rate_share"]


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its fused kernels skip a step by themselves where `found_inf` says so."""
    return bool(optimizer.defaults.get("fused"))


def step_if_finite(optimizer: Any, finite: Tensor) -> None:
    """A step of such an optimizer that changes nothing unless `finite`, a boolean on its device."""
    optimizer.found_inf = 1 - finite.float()
    optimizer.step()
    del optimizer.found_inf


def unwrapped(method: Any) -> Any:
    """A method without PyTorch's decorators."""
    return getattr(method, "__wrapped__", method)


class WithoutDynamo:
    """Drops the decorators that keep torch.compile out of an optimizer: they take seconds to import."""

    add_param_group = unwrapped(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrapped(torch.optim.Optimizer.zero_grad)
    state_dict = unwrapped(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrapped(torch.optim.Optimizer.load_state_dict)


class SGD(WithoutDynamo, torch.optim.SGD):
    step = torch.no_grad()(unwrapped(torch.optim.SGD.step))


class AdamW(WithoutDynamo, torch.optim.AdamW):
    step = torch.no_grad()(unwrapped(torch.optim.AdamW.step))


class HalfMomentAdam(AdamW):
    """Adam with decoupled weight decay whose first moment is rounded to bfloat16 after each step.

    As big_vision trains: two bytes less for each parameter, and none of the arithmetic in half precision.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], **group)

    def update(
        self, parameters: list[Tensor], lr: float, betas: Any, eps: float, weight_decay: float, **_: Any
    ):
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                zero = torch.zeros_like(p, memory_format=torch.preserve_format)
                state |= {"step": torch.tensor(0.0), "exp_avg": zero.bfloat16(), "exp_avg_sq": zero}
            state["step"] += 1
        if not states:
            return
        step, gradients = float(states[0]["step"]), [p.grad for p in parameters if p.grad is not None]
        first = [state["exp_avg"].float() for state in states]
        second = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, gradients, 1 - betas[0])
        torch._foreach_mul_(second, betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - betas[1])
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, math.sqrt(1 - betas[1] ** step))
        torch._foreach_add_(denominator, eps)
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_addcdiv_(parameters, first, denominator, -lr / (1 - betas[0] ** step))
        for state, moment in zip(states, first, strict=True):
            state["exp_avg"] = moment.bfloat16()


# each takes parameter groups, the configuration, and whether fused kernels can be used
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimizerConfig, bool], torch.optim.Optimizer]] = {
    "sgd": make_sgd, "adam": make_adam,
}  # fmt: skip


def group_parameters(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters by (weight decay, share of the rate); frozen ones (without requires_grad) are left out."""
    depth = 1 + max(
        (layer_of(name) for name, _ in model.named_parameters() if layer_of(name) < TOP), default=0
    )
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if config.decays == "all" or is_kernel(name, parameter) else 0.0
            share = config.layer_decay ** (depth - min(layer_of(name), depth))
            groups.setdefault((decay, share), []).append(parameter)
    if not groups:
        raise ValueError("no parameter is trainable: all are frozen")
    return [
        {"params": members, "weight_decay": decay, "rate_share": share}
        for (decay, share), members in groups.items()
    ]


TOP = 10**6  # the layer of heads and norms above all others


def layer_of(name: str) -> int:
    """How high in the model a parameter stands: 0 embeddings, then blocks or stages, then the rest."""
    name = name.removeprefix("vit.")  # of a model with dense outputs
    if match := re.match(r"encoder\.blocks\.(\d+)\.", name):
        return int(match[1]) + 1
    if match := re.match(r"stages\.(\d+)\.", name):
        return int(match[1]) + 1
    below = ("stem.", "project.", "positions.", "class_token", "distillation_token", "registers",
             "mask_token", "input_norm.", "root.")  # fmt: skip
    return 0 if name.startswith(below) else TOP


def is_kernel(name: str, parameter: Tensor) -> bool:
    """Matrices, convolutions and LoRA's factors; not biases, norms, tokens, position tables or probes."""
    return parameter.ndim >= 2 and (name.endswith(".weight") or ".lora_" in name)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients to a global norm of at most `limit` (0: leave them); return the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    if limit:
        factor = (limit / norm.clamp(min=limit)).to(norm.dtype)
        torch._foreach_mul_([local_shard(gradient) for gradient in gradients], factor)
    return norm


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, keep: float, step: int) -> None:
    """Polyak averaging after step number `step`, from 1: the mean of all weights so far, each step before
    the last counting `keep` times less: sum_i keep^(step-i) w_i / sum_i keep^(step-i).

    The division is what corrects the start, as in Adam: the initial weights have no share. Without it they
    keep keep^step: 95 % after 500 steps at 0.9999. A ramp such as min(keep, (1 + t) / (10 + t)) would
    correct it too, but reach 0.9999 after 90,000 steps only, and be another average in all runs of the paper.
    An average of a checkpoint from before this correction goes on as it is, and its initial weights fade.
    """
    names = list(average)
    state = dict(model.named_parameters())
    share = (1 - keep) / (1 - keep**step)
    torch._foreach_lerp_(
        [local_shard(average[n]) for n in names], [local_shard(state[n]) for n in names], share
    )


@torch.no_grad()
def swap_average(average: dict[str, Tensor], model: nn.Module) -> None:
    """Exchange the model's weights with their average, in place and tensor by tensor; twice: as before."""
    state = model.state_dict()  # which shards again what an evaluation has gathered of a sharded model
    for name, mean in average.items():
        kept = local_shard(mean).clone()
        local_shard(mean).copy_(local_shard(state[name]))
        local_shard(state[name]).copy_(kept)
