"""MAE (He et al., CVPR 2022): an encoder sees a quarter of the patches, a small decoder predicts the others.

Read from facebookresearch/mae. Differences: images are normalised as the model's preprocessing says (in new
models with 0.5, not ImageNet's numbers), and tokens do not decay, as nowhere in vitkit.
"""

# B: batch size, N: patches of an image, K: visible ones, C: channels, P: patch side, D: width

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.order import Order
from vitkit.data.views import normalise
from vitkit.metrics.cost import TRAINING, forward_flops
from vitkit.models.adapt import with_tokens
from vitkit.models.self_supervised.reconstruction import (
    Decoder,
    DecoderConfig,
    MaskedAutoencoder,
    check_encoder,
    decoder_config,
    initialize_as_mae,
    visible_patches,
)
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.ops.rows import rows
from vitkit.options import Range
from vitkit.tasks.masked import FIXED, GREY, patches_in, patches_of
from vitkit.tasks.shared.self_supervised import SelfSupervised, captioned, headless
from vitkit.tasks.task import Batch, Prepare, register

EPSILON = 1e-6  # added to the variance of a patch


@register
@dataclass(frozen=True, kw_only=True)
class Mae(SelfSupervised):
    """Masked autoencoding: the share of hidden patches, the target, and the size of the decoder."""

    name: ClassVar[str] = "mae"
    about: ClassVar[str] = "as a masked autoencoder (MAE), without labels,"
    batch_note: ClassVar[str] = "hidden patches in grey"
    from_recipe: ClassVar[tuple[str, ...]] = ("seed",)
    ranges: ClassVar[Mapping[str, Range]] = {
        "mask_ratio": Range(0, 1, above=True, below=True), "decoder_width": Range(0, 2**14),
        "decoder_depth": Range(0, 256), "decoder_heads": Range(0, 256),
    }  # fmt: skip

    mask_ratio: float = 0.75  # share of hidden patches, which the encoder does not see
    norm_pix: bool = True  # predict the pixels of a patch minus their mean and divided by their deviation
    decoder_width: int = 0  # 0: 512, or the encoder's own width if that is less
    decoder_depth: int = 0  # blocks; 0: 8, or 4 for an encoder narrower than 512
    decoder_heads: int = 0  # 0: one for each 32 channels
    seed: int = 0  # of the decoder's first weights

    def configure(self, config: Config) -> ViTConfig:
        vit = replace(headless(config, self.name), mask_token=False)  # the decoder has its own
        check_encoder(vit, self.name)
        self.decoder(vit)
        visible_patches(vit.grid[0] * vit.grid[1], self.mask_ratio)
        return vit

    def decoder(self, config: ViTConfig) -> DecoderConfig:
        """The decoder for an encoder."""
        return decoder_config(config, self.decoder_width, self.decoder_depth, self.decoder_heads)

    def initial(self, config: Config, seed: int) -> Model:
        model = super().initial(config, seed)
        initialize_as_mae(model, torch.Generator().manual_seed(seed))
        return model

    def extend(self, model: Model) -> Model:
        model, config = super().extend(model), model.config
        if not getattr(config, "mask_token", False):
            return model
        return with_tokens(model, class_position=config.class_position, mask_token=False)  # type: ignore[union-attr]

    def build(self, model: Model) -> MaskedAutoencoder:
        assert isinstance(model, ViT)
        c = model.config
        check_encoder(c, self.name)
        decoder = Decoder(c, self.decoder(c), c.channels * c.patch**2)
        initialize_as_mae(decoder, torch.Generator().manual_seed(self.seed))
        return MaskedAutoencoder(model, decoder, self.mask_ratio)

    def extract(self, module: nn.Module) -> Model:
        return module.vit  # type: ignore[return-value]

    def prepare(self, model: Model, order: Order) -> Prepare:
        return partial(shuffled, patches_in(model), order)

    def visible(self, model: Model, order: Order, step: int, batch: Batch) -> Tensor:
        """Hidden patches are grey."""
        batch = shuffled(patches_in(model), order, step, batch)
        hidden = self.hidden(batch["shuffle"])
        return covered(batch["image"], hidden, model.config.patch)  # type: ignore[union-attr]

    def hidden(self, shuffle: Tensor) -> Tensor:
        """Which patches are hidden, (B, N) bool."""
        return shuffle.argsort(1) >= visible_patches(shuffle.shape[1], self.mask_ratio)

    def objective(self, model: Model) -> "MaeLoss":
        p = model.preprocessing
        return MaeLoss(config=self, patch=model.config.patch, mean=p.mean, std=p.std)  # type: ignore[union-attr]

    def passes(self, model: Model) -> float:
        """Encoder, decoder and predictions, in forward passes of the encoder on whole images; times three."""
        c: Any = model.config
        n, d = patches_in(model), self.decoder(c)
        keep, lead = visible_patches(n, self.mask_ratio), int(c.class_token)
        outputs = c.channels * c.patch**2
        mlp = (3 if c.mlp == "swiglu" else 2) * c.width * c.hidden
        products = keep * outputs * c.width + c.depth * block_products(c.prefix + keep, c.width, mlp)
        products += (lead + keep) * c.width * d.width + (n - keep) * d.width * outputs
        products += (d.depth - 1) * block_products(lead + n, d.width, 8 * d.width**2)
        products += block_products(lead + n, d.width, 8 * d.width**2, n - keep)
        return TRAINING * 2 * products / forward_flops(c)

    def each(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        model = self.extract(module)
        return self.objective(model).each(module, shuffled_for_evaluation(patches_in(model), batch), True)

    def pictures(self, module: nn.Module, images: Tensor) -> list[tuple[str, Tensor]]:
        return captioned(self.reconstructions(module, images))

    @torch.no_grad()
    def reconstructions(self, module: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Images (B, C, H, W) uint8 as they are, as the encoder sees them, and with the predicted patches.

        A model of normalised patches says nothing about a patch's mean and deviation: the true ones are used.
        """
        model = self.extract(module)
        side: int = model.config.patch  # type: ignore[union-attr]
        batch = {"image": images, "place": torch.arange(len(images))}
        batch = shuffled_for_evaluation(patches_in(model), batch)
        prediction = self.objective(model).predictions(module, batch)
        shuffle = batch["shuffle"]
        hidden = self.hidden(shuffle)
        every = torch.zeros(*shuffle.shape, prediction.shape[2], device=images.device)
        every[:, -prediction.shape[1] :] = prediction
        every = rows(every, shuffle.argsort(1))
        if self.norm_pix:
            places = torch.arange(shuffle.shape[1], device=images.device).expand_as(shuffle)
            target = targets(images, places, side, model)
            variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
            every = every * (variance + EPSILON).sqrt() + mean
        return {
            "original": images, "visible": covered(images, hidden, side),
            "reconstruction": filled(images, every, hidden, side, model),
        }  # fmt: skip


def block_products(tokens: int, width: int, mlp: int, read: int = 0) -> int:
    """Multiply-adds of a block; read: how many of its tokens are computed, if not all."""
    read = read or tokens
    return read * (2 * width**2 + mlp) + 2 * tokens * (width + read) * width


def shuffled(patches: int, order: Order, step: int, batch: Batch) -> Batch:
    """Add an order of the patches of each image, a pure function of (seed, step, place).

    As in MAE's code it is the order of uniform noise. The random numbers come from places below -1.
    """
    places = [(step, -2 - place) for place in batch["place"].tolist()]
    noise = np.empty((len(places), patches))
    for row, rng in zip(noise, order.rngs(places), strict=True):
        rng.random(out=row)
    order_of_noise = noise.argsort(axis=1)  # NumPy sorts rows four times as fast as PyTorch
    return batch | {"shuffle": torch.from_numpy(order_of_noise)}


def shuffled_for_evaluation(patches: int, batch: Batch) -> Batch:
    """Like `shuffled`, but a function of the image's index alone: the same in all runs and evaluations."""
    batch = batch if "shuffle" in batch else shuffled(patches, Order(1, 1), FIXED, batch)
    return {name: tensor.to(batch["image"].device) for name, tensor in batch.items()}


@dataclass(frozen=True, kw_only=True)
class MaeLoss:
    """The mean squared error of the pixels of hidden patches.

    Every image has the same number of them, so the mean over images is MAE's mean over all hidden patches.
    """

    config: Mae
    patch: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.each(module, batch)[0].mean()}

    def each(self, module: nn.Module, batch: Batch, features: bool = False) -> tuple[Tensor, Tensor]:
        """The loss of each image, (B,), and if asked for its features, (B, D)."""
        images, shuffle = normalise(batch["image"], self.mean, self.std), batch["shuffle"]
        prediction, whole = module(images, shuffle, features)
        return self.value(prediction.float(), batch["image"], shuffle), whole

    def predictions(self, module: nn.Module, batch: Batch) -> Tensor:
        images = normalise(batch["image"], self.mean, self.std)
        prediction: Tensor = module(images, batch["shuffle"])[0]
        return prediction.float()

    def value(self, prediction: Tensor, images: Tensor, shuffle: Tensor) -> Tensor:
        """Compare predictions (B, N - K, P P C) with the last patches of `shuffle` of images (B, C, H, W)."""
        hidden = shuffle[:, -prediction.shape[1] :]
        target = targets(images, hidden, self.patch, self)
        if self.config.norm_pix:
            target = standardised(target)
        return F.mse_loss(prediction, target, reduction="none").mean((1, 2))


def standardised(pixels: Tensor) -> Tensor:
    """Each patch minus its mean, divided by its deviation; the variance is the unbiased one.

    >>> [round(value, 6) for value in standardised(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()]
    [-1.161895, -0.387298, 0.387298, 1.161895]
    """
    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return (pixels - mean) / (variance + EPSILON).sqrt()


def targets(images: Tensor, chosen: Tensor, side: int, scale: Any) -> Tensor:
    """The normalised pixels of chosen patches (B, M) of uint8 images, (B, M, P P C).

    Their order is that of MAE's code: row, column, channel. scale: has mean and std, or preprocessing.
    """
    scale = getattr(scale, "preprocessing", scale)
    patches = patches_of(images, side).permute(0, 1, 3, 4, 2)  # the channel last while they are bytes
    picked = rows(patches, chosen).flatten(0, 1)  # (B M, P, P, C)
    values = normalise(picked.permute(0, 3, 1, 2), scale.mean, scale.std)  # in the same order in memory
    return values.permute(0, 2, 3, 1).reshape(*chosen.shape, -1)


def spread_over_pixels(hidden: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """A mask of patches (B, N) as one of pixels, (B, 1, h P, w P)."""
    mask = hidden.unflatten(1, grid).repeat_interleave(side, 1).repeat_interleave(side, 2)
    return mask[:, None]


def covered(images: Tensor, hidden: Tensor, side: int) -> Tensor:
    """uint8 images (B, C, H, W) with grey in place of hidden patches (B, N)."""
    h, w = images.shape[2] // side, images.shape[3] // side
    mask = spread_over_pixels(hidden, (h, w), side)
    result = images.clone()
    result[:, :, : h * side, : w * side].masked_fill_(mask, GREY)
    return result


def filled(images: Tensor, predicted: Tensor, hidden: Tensor, side: int, model: Model) -> Tensor:
    """uint8 images (B, C, H, W) with predicted normalised pixels (B, N, P P C) in hidden patches."""
    p, (h, w) = model.preprocessing, (images.shape[2] // side, images.shape[3] // side)
    mean, std = predicted.new_tensor(p.mean), predicted.new_tensor(p.std)
    values = predicted.unflatten(-1, (side, side, -1)) * std + mean  # (B, N, P, P, C)
    pixels = (255 * values).round().clamp(0, 255).to(torch.uint8).unflatten(1, (h, w))
    drawn = pixels.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # (B, C, h P, w P)
    result = images.clone()
    part = result[:, :, : h * side, : w * side]
    part.copy_(torch.where(spread_over_pixels(hidden, (h, w), side), drawn, part))
    return result
