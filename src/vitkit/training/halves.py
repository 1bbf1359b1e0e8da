"""Weights rounded to half precision once a step, all together, instead of one by one where they are used."""

from typing import Any

import torch
from torch import Tensor, nn

DENSE = (nn.Linear, nn.Conv2d)  # these themselves: what derives from them may want all digits


class Halved(nn.Module):
    """A model that is called with bf16 copies of its dense layers' weights.

    Autocast rounds each by itself, and its gradient back again: two small kernels for every tensor, of which
    a small model has little else. The numbers are the same.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.names = [
            f"{place}.{name}" if place else name
            for place, part in model.named_modules()
            if type(part) in DENSE
            for name, _ in part.named_parameters(recurse=False)
        ]
        own = dict(model.named_parameters())
        self.wholes: list[Tensor] = [own[name] for name in self.names]
        self.halves = nn.ParameterList(map(rounded, self.wholes))

    def forward(self, *given: Any, **named: Any) -> Any:
        return torch.func.functional_call(
            self.model, dict(zip(self.names, self.halves, strict=True)), given, named
        )

    @torch.no_grad()
    def renew(self) -> None:
        """Round the weights as they are now."""
        for half in self.halves:
            half.grad = None
        torch._foreach_copy_([*self.halves], self.wholes)

    @torch.no_grad()
    def give(self) -> None:
        """Add the gradients of the copies to those of the weights."""
        new: list[Tensor] = []
        given: list[Tensor] = []
        for half, whole in zip(self.halves, self.wholes, strict=True):
            if half.grad is not None and whole.grad is not None:
                whole.grad += half.grad
            elif half.grad is not None:
                whole.grad = torch.empty_like(whole)
                new.append(whole.grad)
                given.append(half.grad)
            half.grad = None
        if new:
            torch._foreach_copy_(new, given)


def rounded(whole: Tensor) -> nn.Parameter:
    return nn.Parameter(whole.detach().bfloat16(), requires_grad=whole.requires_grad)
