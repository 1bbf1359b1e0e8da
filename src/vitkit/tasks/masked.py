"""Masked patch prediction (Sec. 4.6, App. B.1.2): how patches are corrupted, and what is learned from them.

What the paper leaves open is decided here; docs/paper.md has the list.
"""

# B batch, N patches of an image, K of them corrupted, C channels, P side of a patch, M cells of a patch

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
from vitkit.models.masked import WHEN, MaskedViT, check_maskable, maskable, with_mask_token
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT
from vitkit.options import Range
from vitkit.tasks.task import Answer, Batch, Evaluation, Headline, Prepare, Task, images_in_words, register

CELLS = {"mean-colour": 1, "colours-4x4": 4}  # target -> cells along each side of a patch, a colour for each
TARGETS = (*CELLS, "pixels")
FIXED = -1  # the step of evaluation's corruption, at which nothing is trained


@dataclass(frozen=True)
class PatchAccuracy:
    """How well corrupted patches are predicted: the mean over those of all images."""

    images: int
    patches: int  # corrupted ones, in all
    target: str
    loss: float  # cross-entropy of a colour, or the mean squared error of normalised pixels
    accuracy: float | None  # share of the colours that are right; None for pixels
    top1: None = None  # nothing is said of whole images

    def to_json(self, classes: tuple[str, ...] = ()) -> dict[str, Any]:
        return asdict(self)


@register
@dataclass(frozen=True, kw_only=True)
class Masked(Task):
    """Which share of an image's patches is corrupted, how, and what the model has to predict of them."""

    name: ClassVar[str] = "masked"
    headline: ClassVar[Headline] = Headline("loss", "loss", higher=False, percent=False)
    measured: ClassVar[tuple[str, ...]] = ("accuracy",)
    labelled: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = (
        "mixup", "label_smoothing", "patience", "optimizer.layer_decay", "optimizer.frozen",
    )  # fmt: skip
    ranges: ClassVar[Mapping[str, Range]] = {
        "rate": Range(0, 1, above=True), "shares": Range(0, 1), "bits": Range(1, 5)
    }  # fmt: skip
    about: ClassVar[str] = "by masked patch prediction, without labels,"
    batch_note: ClassVar[str] = "before patches are hidden"
    predicts: ClassVar[bool] = False

    rate: float = 0.5  # 0.15 is the paper's other choice
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)  # of those: masked, another patch, left as it is
    target: str = "mean-colour"  # or colours-4x4: of the patch in 4 x 4, or pixels: all of it
    bits: int = 3  # of each channel of a colour
    when: str = "before-positions"  # each place keeps its position; or after: the mask has none

    def __post_init__(self) -> None:
        for field, value, known in (("target", self.target, TARGETS), ("when", self.when, WHEN)):
            if value not in known:
                raise Error(
                    f"masked.{field} must be one of {', '.join(known)}, not {value!r}", code="recipe.value"
                )
        super().__post_init__()
        if len(self.shares) != 3 or abs(sum(self.shares) - 1) > 1e-6:
            given = ", ".join(f"{share:g}" for share in self.shares)
            raise Error(
                f"masked.shares are three that add up to 1 (masked, another patch, left), not {given}",
                code="recipe.value",
            )

    def counts(self, patches: int) -> tuple[int, int, int]:
        """Of so many patches: corrupted, masked, and replaced by another; the rest is left as it is.

        round(rate * N), at least one. Of K corrupted ones the first round(0.8 K) are masked and those up to
        round(0.9 K) replaced: rounded sums, so that the parts make up the whole. Halves go to the even.
        """
        if patches < 2:
            raise Error(
                "an image of one patch has no other: give a larger image or a smaller patch",
                code="model.unsupported",
            )
        corrupted = max(1, round(self.rate * patches))
        masked = round(self.shares[0] * corrupted)
        return corrupted, masked, round((self.shares[0] + self.shares[1]) * corrupted) - masked

    def predictions(self, patch: int, channels: int = 3) -> int:
        """How many numbers the model predicts of a patch of so many pixels a side."""
        if self.target == "pixels":
            return channels * patch**2
        return CELLS[self.target] ** 2 * self.colours(channels)

    def colours(self, channels: int = 3) -> int:
        """Classes of a colour: 512 for 3 bits of 3 channels."""
        return 2 ** (self.bits * channels)

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return ()  # a head would learn nothing

    def configure(self, config: Config) -> Config:
        return maskable(config)

    def start(self, model: Model) -> Model:
        return with_mask_token(model)

    def build(self, model: Model) -> MaskedViT:
        check_maskable(model.config)
        assert isinstance(model, ViT)
        return MaskedViT(model, self.predictions(model.config.stride, model.config.channels), self.when)

    def extract(self, module: nn.Module) -> Model:
        return module.vit  # type: ignore[return-value]

    def kept_config(self, config: Config) -> Config:
        """Without the mask token, so that any format holds it and every parameter learns in fine-tuning."""
        return replace(config, mask_token=False)  # type: ignore[arg-type]

    def prepare(self, model: Model, order: Order) -> Prepare:
        return partial(corrupt, self, patches_in(model), order)

    def objective(self, model: Model) -> "MaskedLoss":
        p = model.preprocessing
        stride: int = model.config.stride  # type: ignore[union-attr]
        return MaskedLoss(config=self, patch=stride, mean=p.mean, std=p.std)

    @torch.no_grad()
    def outputs(self, module: nn.Module, batch: Batch, how: Evaluation) -> Tensor:
        """Loss and, for colours, accuracy of each image; one is corrupted alike at every evaluation."""
        model = self.extract(module)
        each = self.objective(model).each(module, how.place(fixed(self, patches_in(model), batch)))
        return torch.stack([*each.values()], 1).double().cpu()  # (B, 1 or 2)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], how: Evaluation) -> PatchAccuracy:
        empty = torch.zeros(0, 1 if self.target == "pixels" else 2, dtype=torch.float64)
        rows = [self.outputs(module, batch, how) for batch in batches]
        table = how.gather(torch.cat([empty, *rows]))
        if not len(table):
            raise Error("there is no image to evaluate on", code="data.empty")
        loss, *right = table.mean(0).tolist()
        corrupted = len(table) * self.counts(patches_in(self.extract(module)))[0]
        return PatchAccuracy(len(table), corrupted, self.target, loss, right[0] if right else None)

    def line(self, test: Mapping[str, Any], images: str) -> str:
        n = test["patches"]
        right = "" if test["accuracy"] is None else f"{percent(test['accuracy'], n)} of the colours right, "
        return f"{n} corrupted patches of {test['images']} {images}: {right}loss {test['loss']:.4g}"

    def page(self, test: Mapping[str, Any]) -> tuple[str, str]:
        patches = f"{test['patches']:,} corrupted patches of {images_in_words(test)}"
        if test["accuracy"] is None:
            return f"Loss {test['loss']:.4g}", f"mean squared error of the pixels of {patches}"
        right = percent(test["accuracy"], test["patches"])
        return f"{right} of patch colours correct", f"on {patches}; loss {test['loss']:.4g}"

    def answers(self, model: Any, values: Tensor, top: int) -> list[Answer]:
        raise NotImplementedError  # `predicts` is false: the model that is kept is to be fine-tuned


def patches_in(model: Model) -> int:
    h, w = model.config.grid  # type: ignore[union-attr]
    return h * w


def corruption(config: Masked, patches: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of one image: whose embedding stands in each place, (N,), where N is the mask; and the places, (K,).

    Another patch is one of the same image, any but itself, as it was before anything was corrupted.
    """
    count, masked, moved = config.counts(patches)
    chosen = rng.permutation(patches)[:count]
    take = np.arange(patches)
    take[chosen[:masked]] = patches
    replaced = chosen[masked : masked + moved]
    take[replaced] = (replaced + rng.integers(1, patches, size=moved)) % patches
    return take, chosen


def corrupt(config: Masked, patches: int, order: Order, step: int, batch: Batch) -> Batch:
    """The batch with its images' corruptions, each a pure function of (seed, step, place).

    They are drawn from places below -1, which the order uses for nothing else.
    """
    places = batch["place"].tolist()
    found = [corruption(config, patches, order.rng(step, -2 - place)) for place in places]
    take = np.array([take for take, _ in found], dtype=np.int64).reshape(len(found), patches)
    chosen = np.array([chosen for _, chosen in found], dtype=np.int64)
    chosen = chosen.reshape(len(found), config.counts(patches)[0])
    return batch | {"take": torch.from_numpy(take), "chosen": torch.from_numpy(chosen)}


def fixed(config: Masked, patches: int, batch: Batch) -> Batch:
    """The same for evaluation: of an image's number alone, for all runs alike."""
    return corrupt(config, patches, Order(1, 1), FIXED, batch)


@dataclass(frozen=True, kw_only=True)
class MaskedLoss:
    """What was in the corrupted patches; batches are uint8 and carry `take` and `chosen`.

    Every image has equally many corrupted patches, so the mean over a batch's images is the mean over its
    patches, however the batch is cut.
    """

    config: Masked
    patch: int  # pixels along a patch, or under a cell of a hybrid's feature map
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """{"loss"} of one batch, and for colours {"accuracy"}, the share of them that is right."""
        return {name: value.mean() for name, value in self.each(model, batch).items()}

    def each(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The same of each image, (B,)."""
        images, chosen = batch["image"], batch["chosen"]
        said = model(normalise(images, self.mean, self.std), batch["take"], chosen)
        return self.value(said.float(), images, chosen)

    def value(self, said: Tensor, images: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        """Image by image: what is said, (B, K, outputs), against the chosen patches of (B, C, H, W)."""
        image = torch.arange(len(images), device=chosen.device)[:, None]
        truth = patches_of(images, self.patch)[image, chosen]  # (B, K, C, P, P)
        if self.config.target == "pixels":
            wanted = normalise(truth.flatten(0, 1), self.mean, self.std).view_as(said)
            return {"loss": (said - wanted).square().mean((1, 2))}
        wanted = colours(truth, CELLS[self.config.target], self.config.bits)  # (B, K, M)
        logits = said.unflatten(-1, (wanted.shape[-1], -1))  # (B, K, M, colours)
        loss = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(wanted)
        right = logits.argmax(-1) == wanted
        return {"loss": loss.mean((1, 2)), "accuracy": right.float().mean((1, 2))}


def patches_of(images: Tensor, side: int) -> Tensor:
    """(B, C, H, W) -> (B, N, C, P, P), row by row as the model counts them."""
    cut = images.unfold(2, side, side).unfold(3, side, side)  # (B, C, h, w, P, P)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def colours(patches: Tensor, cells: int, bits: int) -> Tensor:
    """The colour classes of cells x cells parts of uint8 patches (..., C, P, P) -> (..., cells * cells).

    A channel's bin is floor(mean * 2^bits / 256); the first channel counts most. In whole numbers, so that
    no device rounds otherwise. Part i reaches from floor(i P / cells) to ceil((i + 1) P / cells).
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
