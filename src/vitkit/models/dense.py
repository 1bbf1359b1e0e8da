"""DenseModel: a ViT with a head for segmentation or detection; each architecture is a file of this room."""

# B batch; H, W pixels of an image

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from vitkit.models.card import Described, Origin, Preprocessing, model_repr
from vitkit.models.vit import ViT, ViTConfig


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ABC):
    """The configuration of a ViT without a head of its own, and what stands on it."""

    kind: ClassVar[str]  # the architecture, as model files name it

    vit: ViTConfig  # with classes=0
    classes: int

    @property
    def image_size(self) -> tuple[int, int]:
        return self.vit.image_size

    @abstractmethod
    def build(self) -> "DenseModel":
        """Return an empty model of this configuration; its weights are not initialised."""


class DenseModel(Described, nn.Module, ABC):
    """A model that answers for parts of an image: with a class for each pixel, or with boxes.

    Its outputs are one tensor, so that engines, exports and the server need not know what they mean.
    State-dict names: vit.*, and those of the architecture.
    """

    config: DenseConfig

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.config = config
        self.vit = ViT(config.vit)
        self.labels: tuple[str, ...] = ()
        self.preprocessing = Preprocessing()
        self.origin = Origin()

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) to the outputs of prediction, with B first."""

    @abstractmethod
    def train_outputs(self, images: Tensor) -> dict[str, Any]:
        """Normalised images (B, 3, H, W) to what the loss of the task needs."""

    def __repr__(self) -> str:
        return model_repr(self)
