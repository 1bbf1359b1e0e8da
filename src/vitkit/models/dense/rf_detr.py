"""RF-DETR: a ViT with windows, one map of features, and a decoder whose queries start at proposed boxes."""

# B batch, G groups of queries, Q queries of a group, D width, N cells of the map, C classes, L decoder layers

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.dense.c2f import C2f
from vitkit.models.dense.deformable import (
    Decoder,
    DecoderLayer,
    DeformableAttention,
    Layers,
    initialize_deformable,
    moved,
)
from vitkit.models.dense.dense_model import DenseConfig, DenseModel
from vitkit.models.dense.windowed_encoder import check_windowed, windowed_maps
from vitkit.models.encoder import Grid
from vitkit.models.initialization import dense_zero_bias, initialize_norms, is_meta, lecun
from vitkit.models.vit import ViTConfig
from vitkit.ops.boxes import corners

SIZES = {"nano": (384, 2), "small": (512, 3), "medium": (576, 4), "large": (704, 4)}  # pixels, decoder layers
COCO_OUTPUTS = 91  # of the published models: the numbers of COCO's categories go up to 90
MOST = {"windows": 64, "queries": 10_000, "groups": 100, "layers": 100, "decoder_width": 2**14,
        "decoder_hidden": 2**16, "self_heads": 1024, "cross_heads": 1024, "points": 64, "bottlenecks": 64,
        "classes": 2**20}  # fmt: skip
PROPOSED_SIZE = 0.05  # of the box that a cell proposes, as a share of the image
MARGIN = 0.01  # cells whose centre is nearer to the edge propose nothing
PRIOR = 0.01  # the first score of every class


def small_dino() -> ViTConfig:
    """The encoder of the published models: DINOv2-S with patches of 16."""
    return ViTConfig(
        width=384, depth=12, heads=6, hidden=1536, patch=16, image_size=(384, 384), classes=0,
        layer_scale=True, gelu="erf", mask_token=True, position_resize="timm",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RfDetrConfig(DenseConfig):
    """The configuration of an RF-DETR."""

    kind: ClassVar[str] = "RF-DETR"
    task: ClassVar[str] = "detect"

    vit: ViTConfig = field(default_factory=small_dino)
    windows: int = 2  # along each side of the image
    taken: tuple[int, ...] = (3, 6, 9, 12)  # layers whose outputs are taken, and after which one sees all
    queries: int = 300  # of a group, and detections of an image
    groups: int = 13  # in training; prediction uses the first
    layers: int = 2  # of the decoder
    decoder_width: int = 256
    decoder_hidden: int = 2048
    self_heads: int = 8
    cross_heads: int = 16
    points: int = 2  # of the map that each head reads
    bottlenecks: int = 3  # of the projector
    projector_eps: float = 1e-6  # of its LayerNorm
    dropout: float = 0.0  # of the decoder

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from 1 to {most}, not {getattr(self, name)}")
        for name in ("self_heads", "cross_heads"):
            if self.decoder_width % getattr(self, name):
                raise ConfigError(
                    f"decoder_width {self.decoder_width} is not divisible by {getattr(self, name)} {name}"
                )
        if self.decoder_width % 4:
            raise ConfigError(f"decoder_width must be a multiple of 4, not {self.decoder_width}")
        if self.vit.classes:
            raise ConfigError(f"the ViT of an RF-DETR has no head of its own: classes={self.vit.classes}")
        check_windowed(self.vit, self.windows, self.taken)

    def build(self) -> "RfDetr":
        return RfDetr(self)

    @property
    def detections(self) -> int:
        return self.queries


def rf_detr_on(vit: ViTConfig, classes: int, **options: Any) -> RfDetrConfig:
    """The detector for a ViT: 2 windows along each side if they fit, and 4 maps from evenly spaced layers."""
    count = max(1, min(4, vit.depth))
    taken = tuple(vit.depth * (i + 1) // count for i in range(count))
    windows = 1 if any(side % 2 for side in vit.grid) else 2
    sizes: dict[str, Any] = {"windows": windows, "taken": taken} | options
    return RfDetrConfig(vit=vit, classes=classes, **sizes)


def rf_detr_config(size: str, classes: int = COCO_OUTPUTS) -> RfDetrConfig:
    """The configuration of a published size: nano, small, medium or large."""
    if size not in SIZES:
        raise ConfigError(f"no RF-DETR of size {size!r}; known: {', '.join(SIZES)}")
    pixels, layers = SIZES[size]
    vit = replace(small_dino(), image_size=(pixels, pixels))
    return RfDetrConfig(vit=vit, layers=layers, classes=classes)


class Proposal(nn.Module):
    """What a group makes of every cell of the map: a state, and how its box differs from the cell."""

    def __init__(self, width: int):
        super().__init__()
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.box = Layers(width, width, width, 4)

    def forward(self, memory: Tensor) -> Tensor:
        return self.norm(self.output(memory))


class RfDetr(DenseModel):
    """A detector whose outputs need no suppression of duplicates.

    Every cell of the map proposes a box; the boxes of the best are the places where the queries, which are
    learned, start. In training there are several groups of queries, each with its own proposals, that share
    the decoder and do not see each other.
    """

    config: RfDetrConfig
    heads = ("classify.", "proposal_classes.")

    def __init__(self, config: RfDetrConfig):
        super().__init__(config)
        c, width = config, config.decoder_width
        self.projector = C2f(len(c.taken) * c.vit.width, width, c.bottlenecks, eps=c.projector_eps)
        options: dict[str, Any] = {
            "heads": (c.self_heads, c.cross_heads), "points": c.points, "hidden": c.decoder_hidden,
            "dropout": c.dropout,
        }  # fmt: skip
        self.decoder = Decoder(width, [DecoderLayer(width, **options) for _ in range(c.layers)])
        self.queries = nn.Parameter(torch.empty(c.groups * c.queries, width))
        self.references = nn.Parameter(torch.empty(c.groups * c.queries, 4))  # moves of the proposed boxes
        self.proposals = nn.ModuleList(Proposal(width) for _ in range(c.groups))
        self.proposal_classes = nn.ModuleList(nn.Linear(width, c.classes) for _ in range(c.groups))
        self.classify = nn.Linear(width, c.classes)
        self.box = Layers(width, width, width, 4)
        self.initialize_head()

    def forward(self, images: Tensor, train: bool = False) -> Any:
        """Images (B, 3, H, W) to detections (B, Q, 6), or with `train` to what the loss needs."""
        return self.train_outputs(images) if train else self.detect(images)

    def detect(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> the Q best (B, Q, 6): x0, y0, x1, y1 as shares, score, class number."""
        memory, grid = self.memory(images)
        boxes, _, _ = self.start(memory, grid, groups=1)
        states = self.decode(memory, grid, boxes, groups=1)[-1]
        return detections(self.classify(states), moved(boxes, self.box(states)), self.config.queries)

    def train_outputs(self, images: Tensor) -> dict[str, Any]:
        """The outputs after every layer, and of the proposals; of the first group alone in evaluation mode.

        logits (L, B, G, Q, C) and boxes (L, B, G, Q, 4), centre and size as shares of the image;
        proposal_logits (B, G, n, C) and proposal_boxes (B, G, n, 4) of the n = min(Q, N) best proposals.
        """
        groups = self.config.groups if self.training else 1
        count = (groups, self.config.queries)
        memory, grid = self.memory(images)
        boxes, proposal_logits, proposal_boxes = self.start(memory, grid, groups=groups)
        states = torch.stack(self.decode(memory, grid, boxes, groups=groups))  # (L, B, G Q, D)
        return {
            "logits": self.classify(states).unflatten(2, count),
            "boxes": moved(boxes, self.box(states)).unflatten(2, count),
            "proposal_logits": proposal_logits,
            "proposal_boxes": proposal_boxes,
        }

    def memory(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The map of features as (B, N, D), and its grid."""
        maps = windowed_maps(self.vit, images, windows=self.config.windows, taken=self.config.taken)
        joined = self.projector(maps)
        return joined.flatten(2).mT, (joined.shape[2], joined.shape[3])

    def start(self, memory: Tensor, grid: Grid, *, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """The boxes (B, G Q, 4) at which queries start; logits and boxes (B, G, n, ...) of the proposals.

        Gradients of the decoder do not reach the proposed boxes. On maps with fewer cells than queries the
        other queries start at their learned references.
        """
        cells, inside = cell_boxes(grid, memory.device)
        if inside is not None:
            memory = memory * inside[:, None].to(memory.dtype)
        most = min(self.config.queries, memory.shape[1])
        parts = [self.propose(memory, cells, inside, group, most) for group in range(groups)]
        logits, boxes = (torch.stack(part, dim=1) for part in zip(*parts, strict=True))
        references = self.references.to(boxes.dtype).unflatten(0, (self.config.groups, -1))[:groups]
        starts = moved(boxes.detach(), references[:, :most].expand(len(boxes), -1, -1, -1))
        rest = references[:, most:].expand(len(boxes), -1, -1, -1)
        return torch.cat([starts, rest], dim=2).flatten(1, 2), logits, boxes

    def propose(
        self, memory: Tensor, cells: Tensor, inside: Tensor | None, group: int, most: int
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, n, C) and boxes (B, n, 4) of the cells with the highest logit of any class."""
        proposal, classify = self.proposals[group], self.proposal_classes[group]
        states = proposal(memory)
        logits = classify(states)
        rank = logits.detach().amax(-1)
        rank = rank if inside is None else rank.masked_fill(~inside, -math.inf)
        best = rank.topk(most, dim=1).indices[..., None]  # (B, n, 1)
        states = states.gather(1, best.expand(-1, -1, states.shape[-1]))
        places = cells.expand(len(memory), -1, -1).gather(1, best.expand(-1, -1, 4))
        logits = logits.gather(1, best.expand(-1, -1, logits.shape[-1]))
        return logits, moved(places, proposal.box(states))  # type: ignore[operator]

    def decode(self, memory: Tensor, grid: Grid, boxes: Tensor, *, groups: int) -> list[Tensor]:
        """The states (B, G Q, D) of the queries after each layer."""
        z = self.queries[: groups * self.config.queries].expand(len(memory), -1, -1)
        states: list[Tensor] = self.decoder(z, boxes, memory, grid, groups)
        return states

    def initialize_head(self, generator: torch.Generator | None = None) -> None:
        """First weights: queries start exactly at the proposals, and no class is likely anywhere."""
        if is_meta(self):
            return
        parts = (self.projector, self.decoder, self.proposals, self.proposal_classes, self.classify, self.box)
        for part in parts:
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    dense_zero_bias(module, generator)
                elif isinstance(module, nn.Conv2d):
                    lecun(module.weight, generator)
            initialize_norms(part)
        for module in self.decoder.modules():
            if isinstance(module, DeformableAttention):
                initialize_deformable(module)
        for classify in (self.classify, *self.proposal_classes):
            nn.init.normal_(classify.weight, std=0.01, generator=generator)
            nn.init.constant_(classify.bias, -math.log(1 / PRIOR - 1))
        for box in (self.box, *(proposal.box for proposal in self.proposals)):
            nn.init.zeros_(box.layers[-1].weight)  # type: ignore[union-attr, index]
        nn.init.normal_(self.queries, generator=generator)
        nn.init.zeros_(self.references)


def cell_boxes(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The box (1, N, 4) that each cell proposes, and which of them are inside (N,); None: all of them."""
    h, w = grid
    y = (torch.arange(h, dtype=torch.float32, device=device) + 0.5) / h
    x = (torch.arange(w, dtype=torch.float32, device=device) + 0.5) / w
    centre = torch.stack([x.expand(h, w), y[:, None].expand(h, w)], dim=-1).flatten(0, 1)  # (N, 2)
    cells = torch.cat([centre, torch.full_like(centre, PROPOSED_SIZE)], dim=-1)[None]
    if 0.5 / max(grid) > MARGIN:
        return cells, None
    return cells, ((centre > MARGIN) & (centre < 1 - MARGIN)).all(-1)


def detections(logits: Tensor, boxes: Tensor, most: int) -> Tensor:
    """The best pairs of query and class, (B, Q, C) and (B, Q, 4) as centre and size -> (B, most, 6)."""
    classes = logits.shape[-1]
    best, index = logits.to(boxes.dtype).flatten(1).topk(min(most, logits.shape[1] * classes), dim=1)
    query = torch.div(index, classes, rounding_mode="floor")[..., None]
    boxes = boxes.gather(1, query.expand(-1, -1, 4))
    scores, labels = best.sigmoid()[..., None], (index % classes)[..., None]
    return torch.cat([corners(boxes).clamp(0, 1), scores, labels.to(boxes.dtype)], dim=-1)
