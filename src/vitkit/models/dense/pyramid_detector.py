"""FCOS on a simple feature pyramid: a dense detector on the last map of a ViT.

Tian et al., "FCOS" (2019), and Li et al., "Exploring plain vision transformer backbones" (2022).
It learns from the weights of a classifier and a few hundred images, which set prediction does not.
"""

# B batch, N locations of all levels, K classes, C channels; H, W pixels; h, w grid of a level

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.dense.dense_model import DenseConfig, DenseModel
from vitkit.models.vit import ViTConfig
from vitkit.ops.boxes import nms

FINEST = 8  # pixels of the first level, as near as doubling the map comes
PRIOR = 0.01  # the probability of each class at each location, before training
LARGEST = 8.0  # logarithm of a distance in strides
GROUPS, LEAST = 32, 4  # of GroupNorm, and channels of each of them
SMALL = 384  # width of the encoder below which the head is half as wide


@dataclass(frozen=True, kw_only=True)
class FcosConfig(DenseConfig):
    """A ViT, a feature pyramid from its last map, and a head that is shared by the levels."""

    kind: ClassVar[str] = "FCOS"
    task: ClassVar[str] = "detect"

    head_width: int = 256  # channels of the pyramid and of the head
    head_depth: int = 4  # convolutions of each of the two branches
    doublings: int = 1  # of the map, to the finest level
    levels: int = 4  # each has half the height and width of the one before it
    candidates: int = 600  # boxes of an image that suppression sees
    detections: int = 100  # boxes of an image that are returned
    overlap: float = 0.6  # above it, the box of lower score of the same class is dropped

    def __post_init__(self) -> None:
        if self.vit.classes:
            raise ConfigError(f"the ViT of a detector has no head: classes=0, not {self.vit.classes}")
        stride = self.vit.stride
        if not (0 <= self.doublings <= 3 and 1 <= self.levels <= 6) or stride % 2**self.doublings:
            raise ConfigError(
                f"doublings={self.doublings} and levels={self.levels} with patches of {stride} pixels: "
                "expected up to 3 doublings that divide the patch, and 1 to 6 levels"
            )
        if min(self.classes, self.head_width, self.candidates, self.detections) < 1 or self.head_depth < 0:
            raise ConfigError("a detector needs at least one class, channel, candidate and detection")

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels from one location to the next, for each level."""
        return tuple(self.vit.stride * 2**level // 2**self.doublings for level in range(self.levels))

    def build(self) -> "Fcos":
        return Fcos(self)


def fcos_config(vit: ViTConfig, classes: int, **options: Any) -> FcosConfig:
    """The detector for a ViT: levels from about 8 pixels on, and a narrower head for a narrow ViT."""
    doublings = max(0, min(2, round(math.log2(vit.stride / FINEST))))
    while vit.stride % 2**doublings:
        doublings -= 1
    width = 128 if vit.width < SMALL else 256
    options = {"doublings": doublings, "head_width": width} | options
    return FcosConfig(vit=vit, classes=classes, **options)


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map (B, C, h, w)."""

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Level(nn.Module):
    """One level of the pyramid: the map doubled or halved some times, then brought to C channels."""

    def __init__(self, width: int, channels: int, doublings: int):
        super().__init__()
        self.halvings = max(0, -doublings)
        layers: list[nn.Module] = []
        for i in range(max(0, doublings)):
            half = max(1, width // 2)
            layers += [MapNorm(width), nn.GELU()] if i else []
            layers += [nn.ConvTranspose2d(width, half, 2, stride=2)]
            width = half
        self.resize = nn.Sequential(*layers)
        self.reduce = nn.Conv2d(width, channels, 1, bias=False)
        self.reduce_norm = MapNorm(channels)
        self.mix = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.mix_norm = MapNorm(channels)

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.resize(maps)
        if self.halvings:
            side = 2**self.halvings
            maps = F.max_pool2d(maps, side, side, ceil_mode=True)
        return self.mix_norm(self.mix(self.reduce_norm(self.reduce(maps))))


class Head(nn.Module):
    """Class, box and centreness at each location of each level; the levels share all but a scale."""

    def __init__(self, config: FcosConfig):
        super().__init__()
        width = config.head_width
        self.class_branch = branch(width, config.head_depth)
        self.box_branch = branch(width, config.head_depth)
        self.classify = nn.Conv2d(width, config.classes, 3, padding=1)
        self.box = nn.Conv2d(width, 4, 3, padding=1)
        self.centreness = nn.Conv2d(width, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.empty(config.levels))

    def forward(self, maps: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
        """A map (B, C, h, w) to class logits (B, h*w, K), distances (B, h*w, 4), centreness (B, h*w)."""
        of_class, of_box = self.class_branch(maps), self.box_branch(maps)
        logits, centre = rows(self.classify(of_class)), rows(self.centreness(of_box))[..., 0]
        distances = (rows(self.box(of_box)).float() * self.scales[level].float()).clamp(max=LARGEST).exp()
        return logits.float(), distances, centre.float()


def branch(width: int, depth: int) -> nn.Sequential:
    groups = math.gcd(GROUPS, max(1, width // LEAST))
    groups = groups if width % groups == 0 else 1
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False)]
        layers += [nn.GroupNorm(groups, width), nn.ReLU()]
    return nn.Sequential(*layers)


def rows(maps: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h*w, C)"""
    return maps.flatten(2).mT


class Fcos(DenseModel):
    """A detector without anchors. State-dict names: vit.*, pyramid.*, head.*"""

    config: FcosConfig
    heads: ClassVar[Sequence[str]] = ("head.classify.",)

    def __init__(self, config: FcosConfig):
        super().__init__(config)
        width, channels = config.vit.width, config.head_width
        counts = [config.doublings - level for level in range(config.levels)]
        self.pyramid = nn.ModuleList(Level(width, channels, count) for count in counts)
        self.head = Head(config)

    def forward(self, images: Tensor, train: bool = False) -> Any:
        """Images (B, 3, H, W) to detections (B, detections, 6), or with `train` to what the loss needs."""
        return self.train_outputs(images) if train else self.detect(images)

    def detect(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to detections by their score, as DenseModel defines them."""
        c, out = self.config, self.train_outputs(images)
        scores = (out["logits"].sigmoid() * out["centreness"].sigmoid()[..., None]).sqrt()  # (B, N, K)
        size = images.new_tensor([images.shape[3], images.shape[2]] * 2, dtype=torch.float32)
        boxes = (boxes_at(out["locations"], out["strides"], out["distances"]) / size).clamp(0, 1)
        flat = scores.flatten(1)
        best, places = flat.topk(min(c.candidates, flat.shape[1]), dim=1)
        classes = places % c.classes
        boxes = boxes.gather(1, (places // c.classes)[..., None].expand(-1, -1, 4))
        kept, exists = nms(boxes, best, c.overlap, c.detections, classes)
        parts = boxes.gather(1, kept[..., None].expand(-1, -1, 4)), best.gather(1, kept)[..., None]
        labels = classes.gather(1, kept)[..., None].to(boxes.dtype)
        return torch.cat([*parts, labels], dim=-1) * exists[..., None]

    def train_outputs(self, images: Tensor) -> dict[str, Any]:
        """For all locations: logits (B, N, K), distances (B, N, 4) in strides, centreness logits (B, N).

        And their places in pixels, (N, 2) as x and y, and the strides of their levels, (N,).
        """
        maps = self.map(images)
        results = [self.head(part(maps), level) for level, part in enumerate(self.pyramid)]
        logits, distances, centreness = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
        places, strides = all_locations(self.config, (images.shape[2], images.shape[3]), images.device)
        return {
            "logits": logits, "distances": distances, "centreness": centreness,
            "locations": places, "strides": strides,
        }  # fmt: skip

    def map(self, images: Tensor) -> Tensor:
        """The patches of the last layer as a map (B, D, h, w); images are padded to whole patches."""
        stride = self.config.vit.stride
        height, width = images.shape[2], images.shape[3]
        below, right = -height % stride, -width % stride
        images = F.pad(images, (0, right, 0, below)) if below or right else images
        grid = (images.shape[2] // stride, images.shape[3] // stride)
        tokens = self.vit.tokens(images)[:, self.config.vit.prefix :]
        return tokens.unflatten(1, grid).permute(0, 3, 1, 2)

    @torch.no_grad()
    def initialize_head(self, generator: torch.Generator | None = None) -> None:
        """Convolutions of the pyramid as He et al., those of the head at 0.01; classes start improbable."""
        for part in (*self.pyramid.modules(), *self.head.modules()):
            if isinstance(part, nn.LayerNorm | nn.GroupNorm):
                nn.init.ones_(part.weight)
                nn.init.zeros_(part.bias)
        for part in self.pyramid.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                fan_in = part.in_channels * (part.weight[0, 0].numel() if isinstance(part, nn.Conv2d) else 1)
                nn.init.normal_(part.weight, std=fan_in**-0.5, generator=generator)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        for part in self.head.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, std=0.01, generator=generator)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        assert self.head.classify.bias is not None
        nn.init.constant_(self.head.classify.bias, -math.log((1 - PRIOR) / PRIOR))
        nn.init.ones_(self.head.scales)


def locations(height: int, width: int, stride: int, device: torch.device) -> Tensor:
    """The centres (h*w, 2) of the cells of a level in pixels, x before y, row by row."""
    y = (torch.arange(height, device=device) + 0.5) * stride
    x = (torch.arange(width, device=device) + 0.5) * stride
    return torch.stack([x.repeat(height), y.repeat_interleave(width)], dim=-1)


def all_locations(config: FcosConfig, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The locations of all levels for images (H, W), (N, 2), and the strides of their levels, (N,)."""
    height, width = (-(-pixels // config.vit.stride) for pixels in size)
    doubled, places, strides = 2**config.doublings, [], []
    for level, stride in enumerate(config.strides):
        h, w = (-(-side * doubled // 2**level) for side in (height, width))
        places.append(locations(h, w, stride, device))
        strides.append(torch.full((h * w,), float(stride), device=device))
    return torch.cat(places), torch.cat(strides)


def boxes_at(places: Tensor, strides: Tensor, distances: Tensor) -> Tensor:
    """Boxes (B, N, 4) in pixels from distances (B, N, 4) in strides to left, top, right and bottom."""
    distances = distances * strides[:, None]
    return torch.cat([places - distances[..., :2], places + distances[..., 2:]], dim=-1)
