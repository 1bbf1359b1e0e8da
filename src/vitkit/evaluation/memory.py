"""What training takes of a device's memory: weights, gradients, optimizer and activations, by a formula."""

# B images, N tokens, D width, M hidden width, K heads, L layers

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int  # of the weights: in half precision, and those of convolutions standardised
    activations: int

    @property
    def total(self) -> int:
        """At the worst moment: gradients come as activations go, so the larger of them counts."""
        return self.parameters + self.optimizer + self.copies + max(self.activations, self.gradients)


def training_memory(
    model: nn.Module,
    images: int,
    *,
    half: bool,
    slots: int,
    recompute: bool = False,
    average: bool = False,
    cut: int = 1,
) -> Memory:
    """For so many images at a time. `slots` are the optimizer's numbers for each parameter (SGD 1, Adam 2).

    `cut` processes share weights, gradients and optimizer (FSDP); of the copies each has two blocks at a
    time. Activations are never shared.
    """
    count = sum(p.numel() for p in model.parameters())
    convolution = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    copies = (2 * count if half else 0) + 4 * convolution
    stacks: list[Any] = [part for part in model.modules() if hasattr(part, "units")]
    blocks = max(1, sum(len(stack.units()) for stack in stacks))
    return Memory(
        parameters=4 * count // cut * (2 if average else 1),
        gradients=4 * count // cut,
        optimizer=4 * slots * count // cut,
        copies=copies if cut == 1 else (copies + 4 * count) * 2 // blocks,
        activations=images * activation_bytes(model, half=half, recompute=recompute),
    )


def activation_bytes(model: Any, *, half: bool, recompute: bool = False) -> int:
    """What one image leaves behind in the forward pass, until the backward pass has used it."""
    c = model.config
    small = 2 if half else 4
    ends = (4 + small) * c.channels * c.image_size[0] * c.image_size[1] + 12 * c.classes
    if not hasattr(c, "depth"):
        return ends + convolution_bytes(model, c, half, recompute)
    layer = c.tokens * (8 * c.width + 6 * small * c.width + 2 * small * c.hidden + 16 + 4 * c.heads)
    if c.dropout:
        layer += c.tokens * (2 * c.width + c.hidden)
    if recompute:
        layers = layer + 4 * c.tokens * c.width * c.depth
    else:
        layers = layer * c.depth + 2 * small * c.tokens * c.hidden  # the backward pass at work
        if c.head == "token" and c.depth:  # the last layer has one token beside its keys and values
            layers -= layer - layer // c.tokens - c.tokens * (4 * c.width + 3 * small * c.width + 8)
    if not half and not c.stem:  # images have no second copy
        ends -= small * c.channels * c.image_size[0] * c.image_size[1]
    return ends + layers + (convolution_bytes(model.stem, c, half, recompute) if c.stem else 0)


def convolution_bytes(part: Any, c: Any, half: bool, recompute: bool) -> int:
    """What autograd keeps of one image, counted on tensors without memory.

    In half precision it is a quarter more, not less: norms stay in float32 and convolutions keep a copy.
    That quarter was measured on convolutions; axial attention in their place is counted alike, unmeasured.
    """
    kept: dict[int, tuple[int, Any]] = {}
    inputs: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    def run(images: int) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            part(torch.empty(images, c.channels, *getattr(c, "covered", c.image_size), device="meta"))
        return sum(size for size, _ in kept.values())

    assert not part.recompute
    hooks = [
        unit.register_forward_pre_hook(lambda _, given: inputs.append(given[0].nbytes))
        for unit in part.units()
    ]
    one = run(1)
    for hook in hooks:
        hook.remove()
    every = (run(2) - one) * (5 if half else 4) // 4  # what does not grow with the images is no activation
    if not recompute:
        return every
    return sum(inputs) + every * max(inputs) // max(1, sum(inputs))
