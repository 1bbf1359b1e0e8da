"""SimMIM (Xie et al., CVPR 2022): a ViT sees mask tokens in place of large squares and predicts their pixels.

Read from microsoft/SimMIM, for vitkit's plain ViT. Theirs is BEiT's: relative positions shared by all layers
instead of absolute ones, LayerScale at 0.1, no bias of keys, and an output of each block that starts smaller.
So the files of the two do not fit each other, and published results may differ.
"""

# B: batch size, N: patches of an image, C: channels, P: patch side

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.views import normalise
from vitkit.errors import Error
from vitkit.metrics.cost import TRAINING, forward_flops
from vitkit.models.adapt import with_tokens
from vitkit.models.positions import Grid
from vitkit.models.self_supervised.reconstruction import PixelPredictor, check_encoder, initialize_predictor
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.options import Range
from vitkit.tasks.mae import covered, filled, targets
from vitkit.tasks.masked import FIXED
from vitkit.tasks.shared.self_supervised import SelfSupervised, captioned, headless
from vitkit.tasks.task import Batch, Prepare, register

UNITS = 7  # mask units along the shorter side: 32 of 224 pixels


@register
@dataclass(frozen=True, kw_only=True)
class SimMim(SelfSupervised):
    """Simple masked image modelling: the share of hidden mask units, and their size."""

    name: ClassVar[str] = "simmim"
    about: ClassVar[str] = "by simple masked image modelling (SimMIM), without labels,"
    batch_note: ClassVar[str] = "hidden patches in grey"
    from_recipe: ClassVar[tuple[str, ...]] = ("seed",)
    ranges: ClassVar[Mapping[str, Range]] = {
        "mask_ratio": Range(0, 1, above=True, below=True), "mask_unit": Range(0, 2**14),
    }  # fmt: skip

    mask_ratio: float = 0.6  # share of hidden mask units, rounded up
    mask_unit: int = 0  # side of a unit in pixels, in whole patches; 0: 1/7 of the image, 32 of 224 pixels
    seed: int = 0  # of the first weights of the layer that predicts

    def configure(self, config: Config) -> ViTConfig:
        vit = replace(headless(config, self.name), mask_token=True)
        check_encoder(vit, self.name)
        self.counts(vit)
        return vit

    def extend(self, model: Model) -> Model:
        model = super().extend(model)
        c: Any = model.config
        return with_tokens(model, class_position=c.class_position, mask_token=True)

    def build(self, model: Model) -> PixelPredictor:
        assert isinstance(model, ViT)
        module = PixelPredictor(model, model.config.channels * model.config.patch**2)
        initialize_predictor(module, torch.Generator().manual_seed(self.seed))
        return module

    def extract(self, module: nn.Module) -> Model:
        return module.vit  # type: ignore[return-value]

    def saved_config(self, config: Config) -> Config:
        """Drop the mask token: other formats cannot store it, and fine-tuning would not train it."""
        return replace(config, mask_token=False)  # type: ignore[arg-type]

    def counts(self, config: ViTConfig) -> tuple[int, int, int]:
        """The side of a mask unit in patches, the number of units, and how many of them are hidden.

        A unit is the largest square of whole patches that divides the grid and is not larger than asked for,
        rounded to patches, so that every image has equally many hidden patches.
        """
        h, w = config.grid
        side = self.mask_unit or min(config.image_size) / UNITS
        most = max(1, round(side / config.patch))
        unit = max(u for u in range(1, most + 1) if math.gcd(h, w) % u == 0)
        units = (h // unit) * (w // unit)
        if units < 2:
            raise Error(
                f"simmim.mask_unit={self.mask_unit}: an image of {h}x{w} patches has {units} mask unit; it "
                "needs at least two; use a smaller unit, larger images or smaller patches",
                code="model.unsupported",
            )
        return unit, units, min(units - 1, math.ceil(self.mask_ratio * units - 1e-9))

    def prepare(self, model: Model, order: Order) -> Prepare:
        return partial(self.hide, model, order)

    def hide(self, model: Model, order: Order, step: int, batch: Batch) -> Batch:
        """Add "hidden" (B, N) bool to a batch, as a pure function of (seed, step, place)."""
        config: Any = model.config
        unit, units, count = self.counts(config)
        places = [(step, -2 - place) for place in batch["place"].tolist()]
        masks = np.zeros((len(places), units), dtype=bool)
        for row, rng in zip(masks, order.rngs(places), strict=True):
            row[rng.permutation(units)[:count]] = True
        return batch | {"hidden": torch.from_numpy(in_patches(masks, config.grid, unit))}

    def hide_for_evaluation(self, model: Model, batch: Batch) -> Batch:
        """Like `hide`, but a function of the image's index alone: the same in all runs and evaluations."""
        batch = self.hide(model, Order(1, 1), FIXED, batch)
        return {name: tensor.to(batch["image"].device) for name, tensor in batch.items()}

    def visible(self, model: Model, order: Order, step: int, batch: Batch) -> Tensor:
        """Hidden patches are grey."""
        hidden = self.hide(model, order, step, batch)["hidden"]
        return covered(batch["image"], hidden, model.config.patch)  # type: ignore[union-attr]

    def objective(self, model: Model) -> "SimMimLoss":
        p = model.preprocessing
        return SimMimLoss(patch=model.config.patch, mean=p.mean, std=p.std)  # type: ignore[union-attr]

    def passes(self, model: Model) -> float:
        """The whole model and the layer that predicts, times three."""
        c: Any = model.config
        h, w = c.grid
        return TRAINING * (1 + 2 * h * w * c.width * c.channels * c.patch**2 / forward_flops(c))

    def each(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        model = self.extract(module)
        return self.objective(model).each(module, self.hide_for_evaluation(model, batch), True)

    def pictures(self, module: nn.Module, images: Tensor) -> list[tuple[str, Tensor]]:
        return captioned(self.reconstructions(module, images))

    @torch.no_grad()
    def reconstructions(self, module: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Images (B, C, H, W) uint8 as they are, as the model sees them, and with the predicted patches."""
        model, loss = self.extract(module), self.objective(self.extract(module))
        batch = self.hide_for_evaluation(model, {"image": images, "place": torch.arange(len(images))})
        prediction, _ = module(normalise(images, loss.mean, loss.std), batch["hidden"])
        drawn = filled(images, prediction.float(), batch["hidden"], loss.patch, model)
        return {
            "original": images, "visible": covered(images, batch["hidden"], loss.patch),
            "reconstruction": drawn,
        }  # fmt: skip


def in_patches(masks: np.ndarray, grid: Grid, unit: int) -> np.ndarray:
    """Masks of units (B, units) as masks of patches (B, N)."""
    h, w = grid
    square = masks.reshape(len(masks), h // unit, w // unit)
    return square.repeat(unit, 1).repeat(unit, 2).reshape(len(masks), h * w)


@dataclass(frozen=True, kw_only=True)
class SimMimLoss:
    """The mean absolute error of the normalised pixels of hidden patches, of which each image has as many."""

    patch: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.each(module, batch)[0].mean()}

    def each(self, module: nn.Module, batch: Batch, features: bool = False) -> tuple[Tensor, Tensor]:
        """The loss of each image, (B,), and if asked for its features, (B, D)."""
        images = batch["image"]
        prediction, whole = module(normalise(images, self.mean, self.std), batch["hidden"], features)
        return self.value(prediction.float(), images, batch["hidden"]), whole

    def value(self, prediction: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """Compare predictions (B, N, P P C) with the hidden patches of images (B, C, H, W): (B,)."""
        places = torch.arange(hidden.shape[1], device=hidden.device).expand_as(hidden)
        target = targets(images, places, self.patch, self)
        errors = (prediction - target).abs().mean(-1) * hidden  # (B, N)
        return errors.sum(1) / hidden.sum(1).clamp(min=1)  # a blank batch hides nothing
