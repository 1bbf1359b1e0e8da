"""YOLOS: a ViT with detection tokens beside its patches, and nothing else (Fang et al., 2021)."""

# B batch, N patches, Q detection tokens, D width, L layers, K classes; H, W pixels; h, w grid of patches

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.dense.dense_model import DenseConfig, DenseModel
from vitkit.models.initialization import xavier
from vitkit.models.positions import Grid, resize_learned, resize_positions
from vitkit.models.vit_config import ViTConfig, grid_of
from vitkit.ops.boxes import corners
from vitkit.ops.precision import interpolates_repeatably

STD = 0.02  # of tokens and positions that start as random numbers
BOX_LAYERS = 3  # of each of the two heads


@dataclass(frozen=True, kw_only=True)
class YolosConfig(DenseConfig):
    """A ViT and its detection tokens."""

    kind: ClassVar[str] = "YOLOS"
    task: ClassVar[str] = "detect"

    detections: int = 100  # tokens, and so boxes of each image
    middle_size: tuple[int, int] = (0, 0)  # H, W of positions between the layers; (0, 0): there are none

    def __post_init__(self) -> None:
        reasons = {
            f"a head of its own (classes={self.vit.classes})": self.vit.classes,
            "axial attention": self.vit.attention == "axial",
            "relative positions": self.vit.positions == "relative",
            f"positions before every layer (injection={self.vit.injection})": self.vit.injection != "stem",
            "merged tokens": self.vit.merge_tokens,
            "a norm after pooling": self.vit.final_norm == "pooled",
        }
        for reason, applies in reasons.items():
            if applies:
                raise ConfigError(f"YOLOS does not support a ViT with {reason}")
        if self.classes < 1 or self.detections < 1:
            raise ConfigError("a detector needs at least one class and one detection token")
        if any(self.middle_size):
            grid_of(self.middle_size, self.vit.stride)
            if self.vit.prefix != 1 or self.vit.depth < 2:
                raise ConfigError(
                    "positions between the layers are for a class token alone and 2 layers or more"
                )

    @property
    def middle_grid(self) -> Grid:
        return grid_of(self.middle_size, self.vit.stride)

    def build(self) -> "Yolos":
        return Yolos(self)


class BoxHead(nn.Module):
    """Three dense layers with ReLU between them."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        sizes = [width] * BOX_LAYERS + [outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, z: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            z = layer(z).relu()
        return self.layers[-1](z)


class Yolos(DenseModel):
    """Detection tokens that read the patches in every layer of a ViT, each of which predicts one box or none.

    State-dict names: vit.*, detection_tokens, detection_positions, middle_positions, class_head.*, box_head.*
    """

    config: YolosConfig
    heads: ClassVar[Sequence[str]] = (f"class_head.layers.{BOX_LAYERS - 1}.",)

    def __init__(self, config: YolosConfig):
        super().__init__(config)
        width, count = config.vit.width, config.detections
        self.detection_tokens = nn.Parameter(torch.empty(1, count, width))
        self.detection_positions = nn.Parameter(torch.empty(1, count, width))
        self.middle_positions: nn.Parameter | None = None  # of class token, patches, detection tokens
        if any(config.middle_size):
            h, w = config.middle_grid
            self.middle_positions = nn.Parameter(torch.empty(config.vit.depth - 1, 1 + h * w + count, width))
        self.class_head = BoxHead(width, config.classes + 1)  # the last one: no object
        self.box_head = BoxHead(width, 4)

    def forward(self, images: Tensor, train: bool = False) -> Any:
        """Images (B, 3, H, W) to detections (B, Q, 6), or with `train` to what the loss needs."""
        return self.train_outputs(images) if train else self.detect(images)

    def detect(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to detections (B, Q, 6) by their score, as DenseModel defines them."""
        out = self.train_outputs(images)
        scores, labels = out["logits"].float().softmax(-1)[..., :-1].max(-1)
        boxes = corners(out["boxes"].float()).clamp(0, 1)
        rows = torch.cat([boxes, scores[..., None], labels[..., None].to(boxes.dtype)], dim=-1)
        order = scores.topk(scores.shape[1], dim=1).indices  # which every runtime has, unlike a stable sort
        return rows.gather(1, order[..., None].expand_as(rows))

    def train_outputs(self, images: Tensor) -> dict[str, Any]:
        """Class logits (B, Q, K + 1) and boxes (B, Q, 4): centre, width and height as shares of the image."""
        z = self.detected(images)
        return {"logits": self.class_head(z), "boxes": self.box_head(z).float().sigmoid()}

    def detected(self, images: Tensor) -> Tensor:
        """The detection tokens after the last layer, (B, Q, D).

        They stand before all others: attention does not depend on the order of tokens, the last layer
        computes only the first ones, and RoPE turns the last ones, which are the patches.
        """
        patches, grid = self.vit.patches(images)
        z = self.vit.embed(patches, grid)
        tokens = (self.detection_tokens + self.detection_positions).to(z.dtype).expand(len(z), -1, -1)
        middle = self.middle_at(grid)

        def inject(z: Tensor, layer: int) -> Tensor:
            return z if middle is None or layer == 0 else z + middle[layer - 1].to(z.dtype)

        z = self.vit.encoder(torch.cat([tokens, z], dim=1), grid, inject, self.config.detections)
        return z[:, : self.config.detections]

    def middle_at(self, grid: Grid) -> Tensor | None:
        """The positions between the layers for a grid, (L - 1, Q + 1 + N, D), detection tokens first."""
        table = self.middle_positions
        if table is None:
            return None
        count, known = self.config.detections, self.config.middle_grid
        others, of_tokens = table[:, :-count], table[:, -count:]
        method = self.config.vit.position_resize
        if table.requires_grad and grid != known and not interpolates_repeatably(table.device):
            resized = resize_learned(others, known, grid, method)
        else:
            resized = resize_positions(others, known, grid, method)
        return torch.cat([of_tokens, resized], dim=1)

    @torch.no_grad()
    def initialize_head(self, generator: torch.Generator | None = None) -> None:
        """Tokens and positions at 0.02; heads as dense layers usually are."""
        for tokens in (self.detection_tokens, self.detection_positions, self.middle_positions):
            if tokens is not None:
                nn.init.trunc_normal_(tokens, std=STD, generator=generator)
        for head in (self.class_head, self.box_head):
            for layer in head.layers:
                assert isinstance(layer, nn.Linear)
                xavier(layer.weight, generator)
                nn.init.zeros_(layer.bias)


def yolos_config(vit: ViTConfig, classes: int, **options: Any) -> YolosConfig:
    """The detector for a ViT."""
    return YolosConfig(vit=vit, classes=classes, **options)
