"""A ViT that predicts corrupted patches (masked patch prediction, Sec. 4.6 and App. B.1.2)."""

# B batch, N patches, K of them corrupted, D width

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import Error
from vitkit.models.variants import Model, skeleton
from vitkit.models.vit import ViT, ViTConfig
from vitkit.ops.rows import rows

WHEN = ("before-positions", "after-positions")


class MaskedViT(nn.Module):
    """A ViT with a mask token and one linear layer on its patches. State-dict names: vit.*, predict.*

    The layer starts at zero, as heads do (Sec. 3.2), so the first loss is the loss at chance.
    """

    def __init__(self, vit: ViT, outputs: int, when: str = "before-positions"):
        """`outputs`: predictions per patch; `when`: corrupt patches before or after positions are added."""
        super().__init__()
        check_maskable(vit.config)
        if vit.mask_token is None:
            raise Error(
                "masked patch prediction needs a mask token; with_mask_token adds one",
                code="model.unsupported",
            )
        if when not in WHEN:
            raise Error(f"when must be {' or '.join(WHEN)}, not {when!r}")
        self.when = when
        self.vit = vit
        self.predict = nn.Linear(vit.config.width, outputs)
        nn.init.zeros_(self.predict.weight)
        nn.init.zeros_(self.predict.bias)

    def forward(self, images: Tensor, take: Tensor, chosen: Tensor) -> Tensor:
        """Images (B, C, H, W) -> predictions for the chosen patches, (B, K, outputs).

        take    (B, N): for each patch, the index of the patch whose embedding it gets; N is the mask token
        chosen  (B, K): the indices of the patches to predict
        """
        patches, grid = self.vit.patches(images)
        lead = self.vit.config.prefix
        if self.when == "before-positions":
            z = self.vit.embed(self.corrupted(patches, take), grid)
        else:
            z = self.vit.embed(patches, grid)
            z = torch.cat([z[:, :lead], self.corrupted(z[:, lead:], take)], dim=1)
        z = self.vit.encoder(z, grid, self.vit.inject(grid))
        return self.predict(rows(z, chosen + lead))

    def corrupted(self, patches: Tensor, take: Tensor) -> Tensor:
        """The embeddings (B, N, D) in the order of `take`, and the mask token where it is N."""
        count = patches.shape[1]
        return self.vit.masked(rows(patches, take.clamp(max=count - 1)), take == count)


def check_maskable(config: Any) -> None:
    """Refuse models without patches, or with parameters that masked patch prediction does not train."""
    if not isinstance(config, ViTConfig):
        raise Error(
            "masked patch prediction needs patches: a ViT or a hybrid, not a ResNet", code="model.unsupported"
        )
    if config.head == "map" or config.final_norm == "pooled":
        raise Error(
            f"masked patch prediction does not train pooling layers (head={config.head}, "
            f"final_norm={config.final_norm}): use head=token or head=gap with final_norm=tokens; "
            "fine-tuning can add another head",
            code="model.unsupported",
        )


def maskable(config: Any) -> ViTConfig:
    """The configuration with a mask token and without a head, which would not be trained."""
    check_maskable(config)
    return replace(config, classes=0, representation=0, mask_token=True)


def with_mask_token(model: Model) -> ViT:
    """A copy without a head and with a mask token, of zeros if the model had none."""
    new = skeleton(maskable(model.config))
    assert isinstance(new, ViT)
    state = {"mask_token": torch.zeros(1, 1, new.config.width)} | model.state_dict()
    new.load_state_dict({name: state[name].detach().clone() for name in new.state_dict()}, assign=True)
    new.requires_grad_(True)
    new.preprocessing, new.origin = model.preprocessing, model.origin
    return new
