"""The loss of a class for each pixel: cross-entropy and dice at the images' resolution, in little memory."""

# B batch, K classes; H, W pixels; h, w cells

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.models.dense.feature_map import upsample

IGNORE = 255  # of a mask: pixels without a class
LARGEST = 2**26  # logits at full resolution that are in memory at a time

Values = Callable[[Tensor, Tensor], Tensor]  # logits (b, K, h, w) and masks (b, H, W) to losses (b,)


def pixel_loss(
    logits: Tensor, mask: Tensor, cell: float, *, weights: Tensor | None = None, dice: float = 0.0
) -> Tensor:
    """The loss of each image, (B,), from logits (B, K, h, w) whose cells cover `cell` pixels.

    mask     (B, H, W) uint8: class numbers, and 255 for pixels that are ignored
    weights  (K,) of the classes; the mean is over pixels, so a weight of 2 counts a pixel twice
    dice     weight of 1 - dice, averaged over the classes in the image

    An image's cross-entropy is the mean over its labelled pixels, so images count alike however they are
    split into micro-batches; an image without any has the loss 0. Logits at full resolution exist for a few
    images at a time: their gradient is computed at once and kept at the resolution of the cells.
    """

    def values(logits: Tensor, mask: Tensor) -> Tensor:
        size = (mask.shape[-2], mask.shape[-1])
        return pixel_values(upsample(logits.float(), size, cell), mask, weights, dice)

    each = logits.shape[1] * mask.shape[-2] * mask.shape[-1]
    return ChunkedLoss.apply(logits, mask, values, max(1, LARGEST // each))


def pixel_values(logits: Tensor, mask: Tensor, weights: Tensor | None, dice: float) -> Tensor:
    """The loss of each image, (B,), from logits at the pixels, (B, K, H, W)."""
    labelled = mask != IGNORE
    losses = F.cross_entropy(logits, mask.long(), weights, ignore_index=IGNORE, reduction="none")
    value = losses.sum((1, 2)) / labelled.sum((1, 2)).clamp(min=1)
    return value + dice * dice_values(logits, mask) if dice else value


def dice_values(logits: Tensor, mask: Tensor) -> Tensor:
    """1 - dice of the probabilities of each image, (B,), averaged over the classes that it has."""
    classes = torch.arange(logits.shape[1], device=mask.device)[:, None, None]
    true = mask[:, None] == classes  # (B, K, H, W)
    share = logits.softmax(1) * (mask != IGNORE)[:, None]
    both, sizes = (share * true).sum((2, 3)), share.sum((2, 3)) + true.sum((2, 3))
    present = true.any(3).any(2)
    return ((1 - (2 * both + 1) / (sizes + 1)) * present).sum(1) / present.sum(1).clamp(min=1)


class ChunkedLoss(torch.autograd.Function):
    """The losses of images, a few at a time, with their gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor, values: Values, images: int) -> Tensor:
        learns = ctx.needs_input_grad[0]
        losses, gradients = list[Tensor](), list[Tensor]()
        for part, target in zip(logits.split(images), mask.split(images), strict=True):
            with torch.set_grad_enabled(learns):
                part = part.detach().requires_grad_(learns)
                value = values(part, target)
                gradients += torch.autograd.grad(value.sum(), part) if learns else ()
            losses.append(value.detach())
        if learns:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (own,) = ctx.saved_tensors
        return own * gradient[:, None, None, None].to(own.dtype), None, None, None
