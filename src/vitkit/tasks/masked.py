"""Masked patch prediction (Sec. 4.6, App. B.1.2): how patches are corrupted and what is predicted of them.

docs/research/paper.md lists the choices that the paper leaves open.
"""

# B: batch size, N: patches of an image, K: corrupted patches, C: channels, P: patch side, M: cells of a patch

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.views import normalise
from vitkit.errors import Error
from vitkit.metrics.intervals import percent
from vitkit.models.self_supervised.masked import WHEN, MaskedViT, check_maskable, maskable, with_mask_token
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT
from vitkit.options import Range
from vitkit.tasks.task import (
    Answer,
    Batch,
    Evaluation,
    Headline,
    Prepare,
    Sizes,
    Task,
    describe_images,
    register,
)

CELLS = {"mean-colour": 1, "colours-4x4": 4}  # target -> cells along a patch side, one colour each
TARGETS = (*CELLS, "pixels")
GREY = 128  # of hidden patches in pictures
FIXED = -1  # the step that seeds evaluation's corruption; training never uses it


@dataclass(frozen=True)
class PatchAccuracy:
    """The mean loss and accuracy over the corrupted patches of all images."""

    images: int
    patches: int  # corrupted patches in total
    target: str
    loss: float  # cross-entropy of the colours, or mean squared error of normalised pixels
    accuracy: float | None  # share of correct colours; None for pixels
    top1: None = None  # images have no predicted label

    def to_json(self, classes: tuple[str, ...] = ()) -> dict[str, Any]:
        return asdict(self)


@register
@dataclass(frozen=True, kw_only=True)
class Masked(Task):
    """Masked patch prediction: the share of corrupted patches, how they are corrupted, and the target."""

    name: ClassVar[str] = "masked"
    headline: ClassVar[Headline] = Headline("loss", "loss", higher=False, percent=False)
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)
    labelled: ClassVar[bool] = False
    unused_fields: ClassVar[tuple[str, ...]] = (
        "mixup", "cutmix", "label_noise", "label_smoothing", "class_weights", "sampling", "head_init",
        "patience", "optimizer.layer_decay", "train", "patch_sizes",
    )  # fmt: skip
    ranges: ClassVar[Mapping[str, Range]] = {
        "rate": Range(0, 1, above=True), "shares": Range(0, 1), "bits": Range(1, 5)
    }  # fmt: skip
    about: ClassVar[str] = "by masked patch prediction, without labels,"
    batch_note: ClassVar[str] = "hidden patches in grey, some replaced by others"
    predicts: ClassVar[bool] = False

    rate: float = 0.5  # share of corrupted patches; 0.15 is the paper's other choice
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)  # of these: masked, replaced, unchanged
    target: str = "mean-colour"  # or colours-4x4 (mean colours of 4 x 4 cells) or pixels
    bits: int = 3  # per channel of a colour
    when: str = "before-positions"  # masks keep their position embedding; after-positions: they have none

    def __post_init__(self) -> None:
        for field, value, known in (("target", self.target, TARGETS), ("when", self.when, WHEN)):
            if value not in known:
                raise Error(
                    f"masked.{field} must be one of {', '.join(known)}, not {value!r}", code="recipe.value"
                )
        super().__post_init__()
        if len(self.shares) != 3 or abs(sum(self.shares) - 1) > 1e-6:
            shares = ", ".join(f"{share:g}" for share in self.shares)
            raise Error(
                f"masked.shares must be three numbers that add up to 1 (masked, replaced, unchanged), not "
                f"{shares}",
                code="recipe.value",
            )

    def counts(self, patches: int) -> tuple[int, int, int]:
        """The number of corrupted patches K, and how many of them are masked and replaced.

        K = round(rate * N), at least 1. The first round(0.8 K) are masked, those up to round(0.9 K) replaced,
        and the rest unchanged: rounding cumulative sums makes the parts add up to K. Halves round to even.
        """
        if patches < 2:
            raise Error(
                "masked patch prediction needs at least two patches per image; use larger images or smaller "
                "patches",
                code="model.unsupported",
            )
        corrupted = max(1, round(self.rate * patches))
        masked = round(self.shares[0] * corrupted)
        return corrupted, masked, round((self.shares[0] + self.shares[1]) * corrupted) - masked

    def predictions(self, patch: int, channels: int = 3) -> int:
        """The number of outputs per patch of `patch` pixels a side."""
        if self.target == "pixels":
            return channels * patch**2
        return CELLS[self.target] ** 2 * self.colours(channels)

    def colours(self, channels: int = 3) -> int:
        """The number of colour classes: 512 for 3 bits of 3 channels."""
        return 2 ** (self.bits * channels)

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return ()  # the model is trained without a head

    def configure(self, config: Config) -> Config:
        return maskable(config)

    def extend(self, model: Model) -> Model:
        return with_mask_token(model)

    def build(self, model: Model) -> MaskedViT:
        check_maskable(model.config)
        assert isinstance(model, ViT)
        return MaskedViT(model, self.predictions(model.config.stride, model.config.channels), self.when)

    def extract(self, module: nn.Module) -> Model:
        return module.vit  # type: ignore[return-value]

    def saved_config(self, config: Config) -> Config:
        """Drop the mask token: other formats cannot store it, and fine-tuning would not train it."""
        return replace(config, mask_token=False)  # type: ignore[arg-type]

    def prepare(self, model: Model, order: Order) -> Prepare:
        return partial(corrupt, self, patches_in(model), order)

    def visible(self, model: Model, order: Order, step: int, batch: Batch) -> Tensor:
        """Hidden patches are grey; replaced ones show the patch whose embedding they get."""
        batch = corrupt(self, patches_in(model), order, step, batch)
        images, side = batch["image"].clone(), model.config.stride  # type: ignore[union-attr]
        patches = patches_of(images, side)  # (B, N, C, P, P)
        choices = torch.cat([patches, torch.full_like(patches[:, :1], GREY)], 1)
        taken = choices[torch.arange(len(images))[:, None], batch["take"]]
        rows, columns = (length // side for length in images.shape[2:])
        grid = taken.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)  # (B, C, h, P, w, P)
        images[:, :, : rows * side, : columns * side] = grid.flatten(4, 5).flatten(2, 3)
        return images

    def objective(self, model: Model) -> "MaskedLoss":
        p = model.preprocessing
        stride: int = model.config.stride  # type: ignore[union-attr]
        return MaskedLoss(config=self, patch=stride, mean=p.mean, std=p.std)

    @torch.no_grad()
    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        """Loss and, for colours, accuracy of each image; every evaluation corrupts an image alike."""
        model = self.extract(module)
        corrupted = context.place(corrupt_for_evaluation(self, patches_in(model), batch))
        metrics = self.objective(model).each(module, corrupted)
        return torch.stack([*metrics.values()], 1).cpu().double()  # (B, 1 or 2)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> PatchAccuracy:
        empty = torch.zeros(0, 1 if self.target == "pixels" else 2, dtype=torch.float64)
        rows = [self.outputs(module, batch, context) for batch in batches]
        table = context.gather(torch.cat([empty, *rows]))
        if not len(table):
            raise Error("there are no images to evaluate", code="data.empty")
        loss, *accuracy = table.mean(0).tolist()
        corrupted = len(table) * self.counts(patches_in(self.extract(module)))[0]
        return PatchAccuracy(len(table), corrupted, self.target, loss, accuracy[0] if accuracy else None)

    def summary(self, test: Mapping[str, Any], images: str) -> str:
        n = test["patches"]
        correct = (
            "" if test["accuracy"] is None else f"{percent(test['accuracy'], n)} of the colours correct, "
        )
        return f"{n} corrupted patches of {test['images']} {images}: {correct}loss {test['loss']:.4g}"

    def report_headline(self, test: Mapping[str, Any]) -> tuple[str, str]:
        patches = f"{test['patches']:,} corrupted patches of {describe_images(test)}"
        if test["accuracy"] is None:
            return f"Loss {test['loss']:.4g}", f"mean squared error of the pixels of {patches}"
        correct = percent(test["accuracy"], test["patches"])
        return f"{correct} of patch colours correct", f"on {patches}; loss {test['loss']:.4g}"

    def answers(self, model: Any, values: Tensor, top: int, sizes: Sizes = ()) -> list[Answer]:
        raise NotImplementedError  # `predicts` is False: the saved model has to be fine-tuned first


def patches_in(model: Model) -> int:
    h, w = model.config.grid  # type: ignore[union-attr]
    return h * w


def corruption(config: Masked, patches: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt one image: (take, chosen).

    take (N,): the index of the patch whose embedding each place gets; the index N is the mask token.
    chosen (K,): the corrupted places. A replacement is the original of any other patch of the image.
    """
    count, masked, moved = config.counts(patches)
    chosen = rng.permutation(patches)[:count]
    take = np.arange(patches)
    take[chosen[:masked]] = patches
    replaced = chosen[masked : masked + moved]
    take[replaced] = (replaced + rng.integers(1, patches, size=moved)) % patches
    return take, chosen


def corrupt(config: Masked, patches: int, order: Order, step: int, batch: Batch) -> Batch:
    """Add the corruption of each image to the batch, as a pure function of (seed, step, place).

    Its random numbers come from places below -1, which the order uses for nothing else.
    """
    places = batch["place"].tolist()
    drawn = [corruption(config, patches, order.rng(step, -2 - place)) for place in places]
    take = np.array([take for take, _ in drawn], dtype=np.int64).reshape(len(drawn), patches)
    chosen = np.array([chosen for _, chosen in drawn], dtype=np.int64)
    chosen = chosen.reshape(len(drawn), config.counts(patches)[0])
    return batch | {"take": torch.from_numpy(take), "chosen": torch.from_numpy(chosen)}


def corrupt_for_evaluation(config: Masked, patches: int, batch: Batch) -> Batch:
    """Like `corrupt`, but a function of the image's index alone: the same in all runs and evaluations."""
    return corrupt(config, patches, Order(1, 1), FIXED, batch)


@dataclass(frozen=True, kw_only=True)
class MaskedLoss:
    """The loss on the original content of corrupted patches; batches are uint8 with `take` and `chosen`.

    Every image has the same number of corrupted patches, so the loss does not depend on how a batch is split
    into micro-batches or over processes.
    """

    config: Masked
    patch: int  # side in pixels of a patch, or of a cell of a hybrid's feature map
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return "loss" of one batch, and for colours "accuracy", the share of correct colours."""
        return {name: value.mean() for name, value in self.each(model, batch).items()}

    def each(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The same for each image, (B,)."""
        images, chosen = batch["image"], batch["chosen"]
        outputs = model(normalise(images, self.mean, self.std), batch["take"], chosen)
        return self.value(outputs.float(), images, chosen)

    def value(self, outputs: Tensor, images: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        """Compare outputs (B, K, outputs) with the chosen patches of images (B, C, H, W), image by image."""
        image = torch.arange(len(images), device=chosen.device)[:, None]
        patches = patches_of(images, self.patch)[image, chosen]  # (B, K, C, P, P)
        if self.config.target == "pixels":
            targets = normalise(patches.flatten(0, 1), self.mean, self.std).view_as(outputs)
            return {"loss": (outputs - targets).square().mean((1, 2))}
        targets = colours(patches, CELLS[self.config.target], self.config.bits)  # (B, K, M)
        logits = outputs.unflatten(-1, (targets.shape[-1], -1))  # (B, K, M, colours)
        loss = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
        correct = logits.argmax(-1) == targets
        return {"loss": loss.mean((1, 2)), "accuracy": correct.float().mean((1, 2))}


def patches_of(images: Tensor, side: int) -> Tensor:
    """(B, C, H, W) -> (B, N, C, P, P), row by row in the model's order."""
    cut = images.unfold(2, side, side).unfold(3, side, side)  # (B, C, h, w, P, P)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def colours(patches: Tensor, cells: int, bits: int) -> Tensor:
    """The colour classes of cells x cells cells of uint8 patches (..., C, P, P) -> (..., cells * cells).

    A channel's bin is floor(mean * 2^bits / 256); the first channel has the highest bits. Integer arithmetic
    gives the same result on every device. Cell i spans floor(i P / cells) to ceil((i + 1) P / cells).
    """
    side = patches.shape[-1]
    starts = torch.arange(cells, device=patches.device) * side // cells
    stops = -(-torch.arange(1, cells + 1, device=patches.device) * side // cells)
    sums = patches.long()
    for dim in (-1, -2):
        before = torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums.cumsum(dim)], dim)
        sums = before.index_select(dim, stops) - before.index_select(dim, starts)
    pixels = (stops - starts)[:, None] * (stops - starts)
    bins = sums * 2**bits // (256 * pixels)  # (..., C, cells, cells)
    channels = bins.shape[-3]
    weight = 2 ** (bits * torch.arange(channels - 1, -1, -1, device=bins.device))
    return (bins * weight[:, None, None]).sum(-3).flatten(-2)
