"""EoMT (Kerssies et al., CVPR 2025): a plain ViT whose last blocks also read queries, for segmentation."""

# B batch, Q queries, T all tokens, D width, K classes; H, W pixels; h, w grid of patches, hm, wm of masks

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, Error
from vitkit.models.attention import Attention
from vitkit.models.dense.dense_model import DenseConfig, DenseModel
from vitkit.models.dense.feature_map import (
    ScaleBlock,
    as_map,
    check_window,
    cut_padding,
    final_norm,
    in_whole_patches,
    in_windows,
    initialize_layers,
)
from vitkit.models.dense.mask_criterion import Prediction
from vitkit.models.encoder import recomputed
from vitkit.models.positions import Grid
from vitkit.models.rope import Turn
from vitkit.models.vit import ViTConfig

OUTPUTS = ("semantic", "masks")
POWER = 0.9  # of the polynomial by which masked attention is annealed
LEAST = 1e-6  # the smallest score of a class, whose logarithm is an output
JOINT = {12: 3, 24: 4, 40: 5}  # blocks that read queries, by depth


@dataclass(frozen=True, kw_only=True)
class EomtConfig(DenseConfig):
    """A ViT, and queries that its last blocks read."""

    kind: ClassVar[str] = "EoMT"

    queries: int = 100  # 200 for instances
    joint: int = 3  # last blocks, which read the queries and the image
    upscale: int = 2  # upscaling blocks: each doubles the resolution of masks
    window: int = 0  # side of the windows in which larger images are predicted; 0: in one piece
    output: str = "semantic"  # what a prediction returns: scores of classes, or all masks for instances
    detections: int = 100  # with output=masks: at most so many objects of an image, by their scores

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ConfigError(f"output must be one of {', '.join(OUTPUTS)}, not {self.output!r}")
        if min(self.queries, self.detections) < 1 or not 0 <= self.upscale <= 4:
            raise ConfigError(
                f"{self.queries} queries, {self.detections} detections and {self.upscale} upscaling blocks: "
                "expected 1 or more of the first two, and 0 to 4 blocks"
            )
        if not 1 <= self.joint <= self.vit.depth:
            raise ConfigError(
                f"joint must be 1 to {self.vit.depth}, the blocks of the encoder, not {self.joint}"
            )
        if self.window and self.output == "masks":
            raise ConfigError("masks of objects cannot be predicted in windows; use window=0")
        check_window(self.window, self.vit.stride)
        check_joint(self.vit)

    @property
    def task(self) -> str:  # type: ignore[override]
        return "instances" if self.output == "masks" else "segment"

    @property
    def cell(self) -> float:
        """Pixels that a row or column of a mask covers."""
        return self.vit.stride / 2**self.upscale

    def build(self) -> "Eomt":
        return Eomt(self)


def check_joint(vit: ViTConfig) -> None:
    """Refuse encoders in which a query cannot be one more token."""
    for name, applies in {"axial attention": vit.attention == "axial",
                          "relative positions": vit.positions == "relative"}.items():  # fmt: skip
        if applies:
            raise Error(
                f"EoMT does not support {name}, where every token has a place in the image; use head=linear, "
                "or another model such as ViT-S/16",
                code="model.unsupported",
            )


def default_joint(depth: int) -> int:
    """The published number of joint blocks for an encoder of this depth; of others about a fifth.

    >>> default_joint(12), default_joint(24), default_joint(40), default_joint(2)
    (3, 4, 5, 1)
    """
    return JOINT.get(depth, max(1, round(depth / 5)))


def default_upscale(stride: int) -> int:
    """The published number of upscaling blocks, after which masks have a stride of about 4 pixels.

    >>> default_upscale(16), default_upscale(14), default_upscale(8), default_upscale(32)
    (2, 1, 1, 3)
    """
    return max(1, stride.bit_length() - 3)


def mask_probabilities(step: Tensor | float, steps: int, blocks: int) -> Tensor:
    """The share of queries whose attention is masked, for each joint block, (blocks,), at a step of a run.

    Each block anneals from 1 to 0 during a sixth of the run, by a polynomial of power 0.9. The first begins
    after a sixth, the last after four, and the others evenly between them; the last sixth has no masks.
    """
    step = torch.as_tensor(step)
    starts = (
        torch.linspace(1, 4, blocks, device=step.device) if blocks > 1 else torch.ones(1, device=step.device)
    )
    progress = (6 * step / max(1, steps) - starts).clamp(0, 1)
    return (1 - progress) ** POWER


class Joint(NamedTuple):
    """What the attention of a joint block needs: rotations of the patches, and which tokens see which."""

    turn: Turn | None
    mask: Tensor | None  # (B, 1, T, T) bool, True where a query may attend; None: everywhere


class JointAttention(Attention):
    """Attention that also takes a mask. Its parameters are those of `Attention`."""

    def forward(self, z: Tensor, first: int | None = None, turn: Any = None) -> Tensor:
        if not isinstance(turn, Joint):
            return super().forward(z, first, turn)
        q, k, v = self.project(z, None, turn.turn)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=turn.mask, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Eomt(DenseModel):
    """Queries join the tokens before the last blocks. After the final norm each query gives a class and,
    by its product with the upscaled patches, a mask.

    State-dict names: vit.*, queries, upscale.*, mask_head.*, class_head.*, mask_probabilities
    """

    config: EomtConfig
    heads: ClassVar[tuple[str, ...]] = ("class_head.",)
    mask_probabilities: Tensor
    step: Tensor  # of training, which counts them by a buffer that no file has
    steps: int = 1  # of the run

    def __init__(self, config: EomtConfig):
        super().__init__(config)
        width = config.vit.width
        self.queries = nn.Parameter(torch.empty(1, config.queries, width))
        self.upscale = nn.ModuleList(ScaleBlock(width) for _ in range(config.upscale))
        self.mask_head = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.class_head = nn.Linear(width, config.classes + 1)  # the last class: no object
        # of training; a trained model has zeros, and so no masked attention
        self.register_buffer("mask_probabilities", torch.zeros(config.joint))
        self.masked = (False,) * config.joint  # blocks that mask attention in prediction
        self.register_load_state_dict_post_hook(after_loading)
        for block in self.joint_blocks():
            block.attention.__class__ = JointAttention  # the same parameters

    def joint_blocks(self) -> list[Any]:
        return list(self.vit.encoder.blocks)[-self.config.joint :]

    def read_masked(self) -> None:
        """Let predictions mask attention in the blocks where training masks that of most queries.

        Without this, a model in the middle of its training would be evaluated as it never was trained.
        """
        if not self.mask_probabilities.is_meta:
            self.masked = tuple(share >= 0.5 for share in self.mask_probabilities.tolist())

    def forward(self, images: Tensor, train: bool = False, drawn: Tensor | None = None) -> Any:
        """Images (B, 3, H, W) of any size -> the outputs of prediction, without padding.

        output="semantic": (B, K, h, w), the logarithms of the scores of the classes, each the sum over the
        queries of its probability times the mask's. So the softmax over classes gives the share of each in
        the scores, as it does for a linear head. Windows of an image are averaged as scores, not logarithms.

        output="masks": (B, Q, K + 1 + h w), logits of the classes and of the mask of each query (`unpacked`).

        train: return `train_outputs` instead, for callers that wrap the model
        """
        if train:
            return self.train_outputs(images, drawn)
        size, whole = (images.shape[-2], images.shape[-1]), in_whole_patches(images, self.config.stride)
        if self.config.output == "masks":
            *_, (masks, classes) = self.predictions(whole)
            return torch.cat([classes, cut_padding(masks, size, self.config.cell).flatten(2)], dim=-1)
        scores = cut_padding(in_windows(self.scores, whole, self.config), size, self.config.cell)
        return scores.clamp(min=LEAST).log()

    def scores(self, images: Tensor) -> Tensor:
        """Images in whole patches, in one piece -> the scores of classes, (B, K, h, w)."""
        *_, (masks, classes) = self.predictions(images)
        return semantic_scores(masks, classes)

    def train_outputs(self, images: Tensor, drawn: Tensor | None = None) -> dict[str, Any]:
        """Logits of masks (B, Q, hm, wm) and classes (B, Q, K + 1) before each joint block and at the end.

        The masks cover the images and their padding to whole patches.

        drawn: (B, joint, Q) from 0 to 1, by which queries drop their masks; None: random numbers
        """
        pairs = list(self.predictions(in_whole_patches(images, self.config.stride), drawn))
        return {"masks": [mask for mask, _ in pairs], "classes": [of_class for _, of_class in pairs]}

    def predictions(self, images: Tensor, drawn: Tensor | None = None) -> Iterator[Prediction]:
        """Images in whole patches -> predictions before each joint block that needs them, and at the end."""
        vit, encoder = self.vit, self.vit.encoder
        vit.check_unmerged()
        patches, grid = vit.patches(images)
        inject, turn = vit.inject(grid), encoder.turn(grid)
        again = encoder.recompute and self.training
        z, first, q = vit.embed(patches, grid), self.config.vit.depth - self.config.joint, self.config.queries
        for layer, block in enumerate(encoder.blocks):
            if layer == first:
                z = torch.cat([self.queries.to(z.dtype).expand(len(z), -1, -1), z], dim=1)
            if layer < first:
                z = recomputed(block, inject(z, layer), grid, None, turn, again=again)
                continue
            mask = None
            if self.training or self.masked[layer - first]:
                prediction = self.predict(z, grid)
                yield prediction
                mask = self.attention_mask(prediction[0], grid, z.shape[1], layer - first, drawn)
            if self.config.vit.injection != "stem":
                z = torch.cat([z[:, :q], inject(z[:, q:], layer)], dim=1)
            z = recomputed(block, z, grid, None, Joint(turn, mask), again=again)
        yield self.predict(z, grid)

    def predict(self, z: Tensor, grid: Grid) -> Prediction:
        """Tokens (B, T, D), queries first -> logits of masks (B, Q, hm, wm) and of classes (B, Q, K + 1)."""
        z = final_norm(self.vit)(z)
        queries, maps = z[:, : self.config.queries], as_map(z, grid)
        for block in self.upscale:
            maps = block(maps)
        rows = queries
        for number, layer in enumerate(self.mask_head):
            rows = layer(F.gelu(rows) if number else rows)
        masks = (rows @ maps.flatten(2).to(rows.dtype)).unflatten(-1, maps.shape[2:])
        return masks, self.class_head(queries)

    @torch.no_grad()
    def attention_mask(
        self, masks: Tensor, grid: Grid, tokens: int, block: int, drawn: Tensor | None = None
    ) -> Tensor:
        """What each token attends to, (B, 1, T, T): all, but of the patches a query only those of its mask.

        In training, queries drop their mask at random, in a growing share (`mask_probabilities`).
        """
        size, q = grid[0] * grid[1], self.config.queries
        seen = F.interpolate(masks.float(), size=grid, mode="bilinear").flatten(2) > 0  # (B, Q, N)
        if self.training:
            own = torch.rand(seen.shape[:2], device=seen.device) if drawn is None else drawn[:, block]
            seen = seen | (own >= self.mask_probabilities[block])[..., None]
        first = F.pad(seen, (tokens - size, 0), value=True)  # queries and other tokens are always seen
        return F.pad(first, (0, 0, 0, tokens - q), value=True)[:, None]

    @torch.no_grad()
    def initialize_head(self, generator: torch.Generator | None = None) -> None:
        """Layers as PyTorch, queries as its embeddings: normal with deviation 1."""
        for part in (self.upscale, self.mask_head, self.class_head):
            initialize_layers(part, generator)
        nn.init.normal_(self.queries, generator=generator)
        nn.init.zeros_(self.mask_probabilities)
        self.read_masked()


def after_loading(model: Any, _: Any) -> None:
    model.read_masked()


def semantic_scores(masks: Tensor, classes: Tensor) -> Tensor:
    """Logits of masks (B, Q, h, w) and classes (B, Q, K + 1) -> the scores of classes, (B, K, h, w)."""
    shares = classes.float().softmax(-1)[..., :-1]
    return (shares.mT @ masks.float().sigmoid().flatten(2)).unflatten(-1, masks.shape[2:])


def unpacked(values: Tensor, classes: int, grid: Grid) -> Prediction:
    """The outputs of a model with output="masks" as logits of masks (B, Q, h, w) and of classes."""
    of_class, masks = values.split([classes + 1, grid[0] * grid[1]], dim=-1)
    return masks.unflatten(-1, grid), of_class
