"""Test-time augmentation: the mean of the probabilities over several views of each image."""

# B images of a batch; h, w pixels of the model's input; H, W those of the larger images for crops

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitkit.errors import Error
from vitkit.tasks.task import task_of

Tta = Literal["none", "flip", "crops"]
MARGIN = 256 / 224  # size of the image / size of its crops
TINY, NEAR_ONE = torch.finfo(torch.float64).tiny, 1 - 2.0**-53  # so that no logit is infinite
VIEWS = {"flip": "the image and its mirror", "crops": "five crops and their mirrors"}


def check_tta(name: str) -> None:
    if name not in get_args(Tta):
        raise Error(f"tta={name!r}: expected one of {', '.join(get_args(Tta))}", code="request.value")


def size_before(size: tuple[int, int], tta: str) -> tuple[int, int]:
    """The size (H, W) to which images are resized before the views of the model's size are taken."""
    return (round(size[0] * MARGIN), round(size[1] * MARGIN)) if tta == "crops" else size


def views(images: Tensor, size: tuple[int, int], tta: str) -> Iterator[Tensor]:
    """The views (B, 3, h, w) of images (B, 3, H, W): the corners and the centre for crops, each mirrored."""
    (height, width), (h, w) = images.shape[2:], size
    top, left = height - h, width - w
    starts = ((0, 0), (0, left), (top, 0), (top, left), (top // 2, left // 2))
    for y, x in starts if tta == "crops" else ((0, 0),):
        crop = images[:, :, y : y + h, x : x + w].contiguous()
        yield crop
        yield crop.flip(3)


def augmented(compute: Callable[[Tensor], Tensor], model: Any, tta: str) -> Callable[[Tensor], Tensor]:
    """A function from images to logits with test-time augmentation: those of the mean probabilities.

    compute: uint8 images (B, 3, h, w) to logits, by any engine. The result takes images of `size_before`.
    """
    if tta == "none":
        return compute
    task, size = task_of(model), model.config.image_size
    if "probability" not in task.columns:
        raise Error(
            f"--tta {tta} needs a classifier, not a model for {model.task}; omit it", code="model.unsupported"
        )

    def run(images: Tensor) -> Tensor:
        rows = [task.activate(compute(view).double()) for view in views(images, size, tta)]
        mean = torch.stack(rows).mean(0)
        return task.invert(mean.clamp(TINY, NEAR_ONE)).float()

    return run
