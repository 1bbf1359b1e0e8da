"""bf16 copies of the weights, refreshed once a step all together instead of layer by layer under autocast."""

from typing import Any

import torch
from torch import Tensor, nn

DENSE = (nn.Linear, nn.Conv2d)  # exactly these classes: a subclass may need its weights in full precision


class LowPrecisionCopy(nn.Module):
    """A model that is called with bf16 copies of its dense layers' weights.

    Autocast casts each weight, and its gradient back, by itself: two small kernels for every tensor, which is
    most of what a small model launches. The numbers are the same.
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
        self.weights: list[Tensor] = [own[name] for name in self.names]
        self.copies = nn.ParameterList(map(bf16_copy, self.weights))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(
            self.model, dict(zip(self.names, self.copies, strict=True)), args, kwargs
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights as they are now."""
        for copy in self.copies:
            copy.grad = None
        torch._foreach_copy_([*self.copies], self.weights)

    @torch.no_grad()
    def accumulate_grads(self) -> None:
        """Add the gradients of the copies to those of the weights."""
        new: list[Tensor] = []
        sources: list[Tensor] = []
        for copy, weight in zip(self.copies, self.weights, strict=True):
            if copy.grad is not None and weight.grad is not None:
                weight.grad += copy.grad
            elif copy.grad is not None:
                weight.grad = torch.empty_like(weight)
                new.append(weight.grad)
                sources.append(copy.grad)
            copy.grad = None
        if new:
            torch._foreach_copy_(new, sources)


def bf16_copy(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().bfloat16(), requires_grad=weight.requires_grad)
