"""A model in bf16: a rounded copy of it where that may be, else the model itself under autocast."""

import copy

import torch
from torch import Tensor, nn

from vitkit.models.variants import Model
from vitkit.models.vit import ViT


class Half(nn.Module):
    """Normalised images to float32 logits. Autocast rounds all weights for every batch, a copy once."""

    def __init__(self, model: Model):
        super().__init__()
        # a ResNet's weights are standardised first, which wants all their digits
        self.plain = isinstance(model, ViT) and model.stem is None
        self.model: nn.Module = copy.deepcopy(model).bfloat16() if self.plain else model

    def forward(self, images: Tensor) -> Tensor:
        if self.plain:
            return self.model(images.bfloat16()).float()
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.model(images).float()
