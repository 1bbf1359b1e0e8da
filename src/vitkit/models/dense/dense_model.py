"""DenseModel: a ViT with a head for segmentation or detection; each architecture is a file of this folder."""

# B batch; H, W pixels of an image

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitkit.models.card import Described, Origin, Preprocessing, model_repr
from vitkit.models.initialization import initialize_vit
from vitkit.models.vit import ViT, ViTConfig

KINDS = {  # the architecture, as model files name it: the file and the configuration
    "LinearSegmenter": ("linear_segmenter", "LinearSegmenterConfig"),
    "EoMT": ("eomt", "EomtConfig"),
    "FCOS": ("pyramid_detector", "FcosConfig"),
    "YOLOS": ("yolos", "YolosConfig"),
    "RF-DETR": ("rf_detr", "RfDetrConfig"),
}
PUBLISHED = {  # the start of the names of published models, and the function of the rest of a name
    "RF-DETR-": ("rf_detr", "rf_detr_config"),
}


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ABC):
    """The configuration of a ViT without a head of its own, and what stands on it."""

    kind: ClassVar[str]  # the architecture: a key of KINDS
    task: ClassVar[str]  # what a model of it is for; of EoMT its output decides

    vit: ViTConfig = field(default_factory=lambda: ViTConfig(classes=0))
    classes: int = 1

    @property
    def image_size(self) -> tuple[int, int]:
        return self.vit.image_size

    @property
    def channels(self) -> int:
        return self.vit.channels

    @property
    def stride(self) -> int:
        return self.vit.stride

    @property
    def width(self) -> int:
        return self.vit.width

    @abstractmethod
    def build(self) -> "DenseModel":
        """Return a model of this configuration."""


class DenseModel(Described, nn.Module, ABC):
    """A model that answers for parts of an image: with a class for each pixel, or with boxes.

    Its outputs are one tensor, so that engines, exports and the server need not know what they mean.
    State-dict names: vit.*, and those of the architecture, of which `heads` are the prefixes of what depends
    on the classes.
    """

    config: DenseConfig
    heads: ClassVar[Sequence[str]] = ()

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.config = config
        self.vit = ViT(config.vit)
        self.labels: tuple[str, ...] = ()
        self.preprocessing = Preprocessing()
        self.origin = Origin()

    @property
    def encoder(self) -> nn.Module:
        """The encoder, whose blocks are recomputed or sharded one by one."""
        return self.vit.encoder

    def features(self, images: Tensor) -> Tensor:
        """The features (B, D) of the whole image, as the ViT alone has them."""
        return self.vit.features(images)

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) to the outputs of prediction, with B first."""

    @abstractmethod
    def train_outputs(self, images: Tensor) -> dict[str, Any]:
        """Normalised images (B, 3, H, W) to what the loss of the task needs."""

    @abstractmethod
    def initialize_head(self, generator: torch.Generator | None = None) -> None:
        """Give everything but the ViT its first weights."""

    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Give all parameters their first weights."""
        initialize_vit(self.vit, generator)
        self.initialize_head(generator)

    def __repr__(self) -> str:
        return model_repr(self)


def published_config(name: str) -> DenseConfig | None:
    """The configuration of a published model such as RF-DETR-nano; None if it is none of these."""
    for start, (module, function) in PUBLISHED.items():
        if name.startswith(start):
            make = getattr(importlib.import_module(f"{__package__}.{module}"), function)
            config: DenseConfig = make(name.removeprefix(start))
            return config
    return None


def config_kind(kind: str) -> type[DenseConfig]:
    """The configuration class of an architecture."""
    module, name = KINDS[kind]
    config: type[DenseConfig] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return config
