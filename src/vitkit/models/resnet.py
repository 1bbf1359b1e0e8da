"""ResNets with GroupNorm and weight standardisation: the stem of hybrids, BiT and AxialResNets."""

# B batch, C channels; H, W pixels; h, w feature map

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, Error
from vitkit.models.axial_resnet import RowsThenColumns
from vitkit.models.card import Described, Origin, Preprocessing, model_repr, pair, short_repr
from vitkit.models.encoder import recomputed
from vitkit.models.initialization import initialize_resnet

GROUPS = 32
ROOT_PADDINGS = ("zeros", "-inf")  # of the max pooling; they differ because no ReLU precedes it


@dataclass(frozen=True, kw_only=True)
class StemConfig:
    """The ResNet stem of a hybrid: units per stage (empty for the root alone), and its numerics."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # units per stage
    width: int = 64  # of the root
    norm_eps: float = 1e-6  # of GroupNorm
    std_eps: float = 1e-5  # epsilon of weight standardisation
    std_eps_in: str = "std"  # what this epsilon is added to: "std" or "variance"

    def __post_init__(self) -> None:
        check_resnet(self)

    @property
    def stride(self) -> int:
        return 4 * 2 ** max(0, len(self.blocks) - 1)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The configuration of a BiT ResNet or an AxialResNet (axial attention instead of 3x3 convolutions)."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # units per stage
    width: int = 64  # 64 times the width factor
    channels: int = 3  # of the input
    classes: int = 1000
    image_size: tuple[int, int] = (224, 224)
    norm_eps: float = 1e-5  # of GroupNorm
    std_eps: float = 1e-10  # epsilon of weight standardisation
    std_eps_in: str = "variance"  # what this epsilon is added to: "std" or "variance"
    root_padding: str = "zeros"  # of the max pooling: zeros (as in BiT), or "-inf" (as in big_vision)
    attention: str = "none"  # or axial, which works for one image size only (App. D.6)
    heads: int = 8  # of axial attention

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        check_resnet(self)
        check_axial(self)
        if not self.blocks or self.classes < 0 or self.channels < 1 or min(self.image_size) < 1:
            raise ConfigError(
                f"a ResNet of {len(self.blocks)} stages with {self.classes} classes and {self.channels} "
                f"channels for images of {self.image_size[0]}x{self.image_size[1]}: stages, channels, height "
                "and width must be at least 1, and classes must not be negative"
            )

    def __repr__(self) -> str:
        return short_repr(self, ResNetConfig(), ("blocks", "width", "image_size", "classes"))


def check_resnet(c: StemConfig | ResNetConfig) -> None:
    if c.width < GROUPS or c.width % GROUPS:
        raise ConfigError(f"width must be a multiple of the {GROUPS} norm groups, not {c.width}")
    if len(c.blocks) > 4 or any(units < 1 for units in c.blocks):
        raise ConfigError(f"blocks must be at most four stages of at least one unit each, not {c.blocks}")
    if isinstance(c, ResNetConfig) and c.root_padding not in ROOT_PADDINGS:
        raise ConfigError(f"root_padding must be one of {', '.join(ROOT_PADDINGS)}, not {c.root_padding!r}")
    if c.std_eps_in not in ("std", "variance"):
        raise ConfigError(f"std_eps_in must be 'std' or 'variance', not {c.std_eps_in!r}")


def check_axial(c: ResNetConfig) -> None:
    if c.attention not in ("none", "axial"):
        raise ConfigError(f"attention of a ResNet must be 'none' or 'axial', not {c.attention!r}")
    if c.attention == "axial" and (c.heads < 1 or c.width % (2 * c.heads)):
        raise ConfigError(
            f"width {c.width} does not divide into {c.heads} heads of an even width, which axial attention "
            "needs (queries and keys have half the width); use heads=8, or any power of two up to 16"
        )


def check_size(c: ResNetConfig, size: tuple[int, int]) -> None:
    """Refuse another image size for axial attention; convolutions take any size."""
    if c.attention == "axial" and size != c.image_size:
        (h, w), (height, width) = c.image_size, size
        raise Error(
            f"this AxialResNet takes images of {h}x{w} pixels only, not {height}x{width}: its relative "
            "positions cannot be resized; resize the images, or train a model with that image_size",
            code="model.input",
        )


class StdConv(nn.Conv2d):
    """A convolution with weight standardisation per output channel."""

    def __init__(self, c: StemConfig | ResNetConfig, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__(inputs, outputs, kernel, stride=stride, bias=False)
        self.eps, self.in_variance = c.std_eps, c.std_eps_in == "variance"
        self.same = isinstance(c, StemConfig)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        variance = weight.square().mean((1, 2, 3), keepdim=True)  # six times as fast as var_mean on a CPU
        weight = weight / ((variance + self.eps).sqrt() if self.in_variance else variance.sqrt() + self.eps)
        if self.same and self.stride[0] > 1:
            return F.conv2d(pad_same(x, self.kernel_size[0], self.stride[0], 0.0), weight, stride=self.stride)
        return F.conv2d(x, weight, stride=self.stride, padding=self.kernel_size[0] // 2)


def pad_same(x: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    """XLA's SAME padding: ceil(size / stride) outputs, with an odd pixel of padding at the end."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(size // -stride) - 1) * stride + kernel - size)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


class StemUnit(nn.Module):
    """A bottleneck unit of ResNet v1: norm after each convolution."""

    def __init__(self, c: StemConfig, inputs: int, middle: int, stride: int):
        super().__init__()
        outputs = 4 * middle
        self.conv1 = StdConv(c, inputs, middle, 1)
        self.norm1 = nn.GroupNorm(GROUPS, middle, eps=c.norm_eps)
        self.conv2 = StdConv(c, middle, middle, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, middle, eps=c.norm_eps)
        self.conv3 = StdConv(c, middle, outputs, 1)
        self.closing_norm = nn.GroupNorm(GROUPS, outputs, eps=c.norm_eps)  # starts at scale 0
        self.shortcut = self.shortcut_norm = None
        if stride > 1 or inputs != outputs:
            self.shortcut = StdConv(c, inputs, outputs, 1, stride)
            self.shortcut_norm = nn.GroupNorm(GROUPS, outputs, eps=c.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)).relu()
        y = self.closing_norm(self.conv3(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return (x + y).relu()


class Stem(nn.Module):
    """The ResNet stem of a hybrid: its patches are cells of this feature map (Sec. 3.1)."""

    recompute = False  # activation checkpointing; Runtime sets it

    def __init__(self, c: StemConfig, channels: int):
        super().__init__()
        self.root = StdConv(c, channels, c.width, 7, 2)
        self.root_norm = nn.GroupNorm(GROUPS, c.width, eps=c.norm_eps)
        self.stages = nn.ModuleList(
            nn.ModuleList(StemUnit(c, *unit) for unit in stage) for stage in units(c.blocks, c.width)
        )
        self.channels = c.width * 2 ** (len(c.blocks) + 1) if c.blocks else c.width

    def units(self) -> list[nn.Module]:
        """The modules that are checkpointed or sharded one by one."""
        return [unit for stage in self.stages for unit in stage]  # type: ignore[attr-defined]

    def forward(self, images: Tensor) -> Tensor:
        x = self.root_norm(self.root(images)).relu()
        x = F.max_pool2d(pad_same(x, 3, 2, float("-inf")), 3, 2)  # after a ReLU zeros would give the same
        for unit in self.units():
            x = recomputed(unit, x, again=self.recompute and self.training)
        return x


def units(blocks: tuple[int, ...], width: int) -> Iterator[list[tuple[int, int, int]]]:
    """The units of each stage as (inputs, middle width, stride)."""
    inputs = width
    for stage, count in enumerate(blocks):
        middle = width * 2**stage
        first = (inputs, middle, 1 if stage == 0 else 2)
        yield [first] + [(4 * middle, middle, 1)] * (count - 1)
        inputs = 4 * middle


class Unit(nn.Module):
    """A bottleneck unit of ResNet v2: norm before each convolution."""

    def __init__(self, c: ResNetConfig, inputs: int, middle: int, stride: int):
        super().__init__()
        outputs = 4 * middle
        self.norm1 = nn.GroupNorm(GROUPS, inputs, eps=c.norm_eps)
        self.conv1 = StdConv(c, inputs, middle, 1)
        self.norm2 = nn.GroupNorm(GROUPS, middle, eps=c.norm_eps)
        self.conv2 = spatial_layer(c, middle, stride)
        self.norm3 = nn.GroupNorm(GROUPS, middle, eps=c.norm_eps)
        self.conv3 = StdConv(c, middle, outputs, 1)
        projected = stride > 1 or inputs != outputs
        self.shortcut = StdConv(c, inputs, outputs, 1, stride) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x).relu()
        x = x if self.shortcut is None else self.shortcut(y)  # the projection comes after the norm
        y = self.conv1(y)
        y = self.conv2(self.norm2(y).relu())
        return x + self.conv3(self.norm3(y).relu())


def spatial_layer(c: ResNetConfig, middle: int, stride: int) -> nn.Module:
    """The layer of a unit that mixes positions: a 3x3 convolution or axial attention."""
    if c.attention == "none":
        return StdConv(c, middle, middle, 3, stride)
    input_stride = 4 * middle // c.width // stride  # pixels per cell of the unit's input
    size = -(-c.image_size[0] // input_stride), -(-c.image_size[1] // input_stride)
    return RowsThenColumns(middle, c.heads, size, stride, GROUPS, c.norm_eps)


def pool_root(x: Tensor, padding: str) -> Tensor:
    """The 3x3 max pooling of stride 2 after the root, with one of the ROOT_PADDINGS."""
    if padding == "zeros":
        return F.max_pool2d(F.pad(x, [1, 1, 1, 1]), 3, 2)
    return F.max_pool2d(x, 3, 2, padding=1)  # max_pool2d pads with minus infinity


class ResNet(Described, nn.Module):
    """A BiT ResNet, the convolutional baseline of the paper; with axial attention an AxialResNet."""

    recompute = False  # activation checkpointing; Runtime sets it

    def __init__(self, config: ResNetConfig):
        super().__init__()
        c = self.config = config
        self.labels: tuple[str, ...] = ()
        self.preprocessing = Preprocessing()
        self.origin = Origin()
        self.root = StdConv(c, c.channels, c.width, 7, 2)
        self.stages = nn.ModuleList(
            nn.ModuleList(Unit(c, *unit) for unit in stage) for stage in units(c.blocks, c.width)
        )
        outputs = c.width * 2 ** (len(c.blocks) + 1)
        self.norm = nn.GroupNorm(GROUPS, outputs, eps=c.norm_eps)
        self.head = nn.Linear(outputs, c.classes) if c.classes else None
        initialize_resnet(self)

    def __repr__(self) -> str:
        return model_repr(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> logits (B, classes)."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """The input of the head: the last feature map, averaged, (B, D)."""
        return self.tokens(images).mean(1)

    def tokens(self, images: Tensor) -> Tensor:
        """The last feature map as tokens, (B, h*w, D)."""
        if images.ndim != 4 or images.shape[1] != self.config.channels:
            raise Error(
                f"images must have shape (B, {self.config.channels}, H, W), not {tuple(images.shape)}",
                code="model.input",
            )
        check_size(self.config, (images.shape[2], images.shape[3]))
        x = pool_root(self.root(images), self.config.root_padding)
        for unit in self.units():
            x = recomputed(unit, x, again=self.recompute and self.training)
        return self.norm(x).relu().flatten(2).mT

    def units(self) -> list[nn.Module]:
        """The modules that are checkpointed or sharded one by one."""
        return [unit for stage in self.stages for unit in stage]  # type: ignore[attr-defined]

    def attention(self, images: Tensor) -> Iterator[Tensor]:
        """Raises an error: only a ViT has attention maps."""
        kind = "an AxialResNet" if self.config.attention == "axial" else "a ResNet"
        raise Error(
            f"{kind} has no attention between patches; use a ViT or a hybrid",
            code="inspection.unsupported",
        )
