"""LinearSegmenter: the class of each pixel from the last layer's patch tokens, by one linear layer.

The evaluation protocol of DINOv2 and DINOv3 with norm="batch" and upscale=0; both read the last layer alone.
Upscaling blocks, which are EoMT's, are for classes that are thinner than a patch.
"""

# B batch, D width, K classes; H, W pixels; h, w cells

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.dense.dense_model import DenseConfig, DenseModel
from vitkit.models.dense.feature_map import (
    BatchNorm,
    ChannelNorm,
    ScaleBlock,
    check_window,
    cut_padding,
    in_whole_patches,
    in_windows,
    initialize_layers,
    patch_map,
)

NORMS = {"layer": ChannelNorm, "batch": BatchNorm, "none": nn.Identity}
STD = 0.01  # of the classifier's first weights


@dataclass(frozen=True, kw_only=True)
class LinearSegmenterConfig(DenseConfig):
    """A ViT and a linear layer on its patch tokens."""

    kind: ClassVar[str] = "LinearSegmenter"
    task: ClassVar[str] = "segment"

    upscale: int = 2  # upscaling blocks: each doubles the resolution
    norm: str = "layer"  # over the channels, before the linear layer: or batch, none
    dropout: float = 0.0  # of whole channels, in training
    window: int = 0  # side of the windows in which larger images are predicted; 0: in one piece

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ConfigError(f"norm must be one of {', '.join(NORMS)}, not {self.norm!r}")
        if not 0 <= self.upscale <= 4:
            raise ConfigError(f"upscale must be 0 to 4 blocks, not {self.upscale}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be in [0, 1), not {self.dropout}")
        check_window(self.window, self.vit.stride)

    @property
    def cell(self) -> float:
        """Pixels that a row or column of the outputs covers."""
        return self.vit.stride / 2**self.upscale

    def build(self) -> "LinearSegmenter":
        return LinearSegmenter(self)


class LinearSegmenter(DenseModel):
    """Patch tokens -> dropout -> norm -> upscaling blocks -> linear layer. State-dict names: vit.*, norm.*,
    upscale.*, classifier.*"""

    config: LinearSegmenterConfig
    heads: ClassVar[tuple[str, ...]] = ("classifier.",)

    def __init__(self, config: LinearSegmenterConfig):
        super().__init__(config)
        width = config.vit.width
        self.dropout = nn.Dropout2d(config.dropout)
        self.norm = nn.Identity() if config.norm == "none" else NORMS[config.norm](width)
        self.upscale = nn.ModuleList(ScaleBlock(width) for _ in range(config.upscale))
        self.classifier = nn.Conv2d(width, config.classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) of any size -> logits (B, K, h, w).

        Row i covers the pixels from `cell` i to `cell` (i + 1). Sides that are not a multiple of the patch
        are padded with zeros; logits that cover padding alone are cut off. Images larger than the window of
        the configuration are computed in windows that overlap by a third, and the mean of logits counts.
        """
        logits = in_windows(self.logits, in_whole_patches(images, self.config.stride), self.config)
        return cut_padding(logits, (images.shape[-2], images.shape[-1]), self.config.cell)

    def logits(self, images: Tensor) -> Tensor:
        """Images in whole patches, in one piece -> logits (B, K, h, w)."""
        maps = self.norm(self.dropout(patch_map(self.vit, images)))
        for block in self.upscale:
            maps = block(maps)
        logits: Tensor = self.classifier(maps)
        return logits

    def train_outputs(self, images: Tensor) -> dict[str, Any]:
        """The same logits, by their name."""
        return {"logits": self.forward(images)}

    @torch.no_grad()
    def initialize_head(self, generator: torch.Generator | None = None) -> None:
        """As PyTorch its layers; the classifier as DINOv3, so that all classes start alike."""
        for part in (self.norm, self.upscale):
            initialize_layers(part, generator)
        nn.init.normal_(self.classifier.weight, std=STD, generator=generator)
        if self.classifier.bias is not None:
            nn.init.zeros_(self.classifier.bias)
