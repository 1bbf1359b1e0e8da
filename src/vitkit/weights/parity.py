"""A file through its library and through ours: the same pixels, the largest difference."""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from vitkit.layouts import bit, timm
from vitkit.layouts.layout import Layout
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Config, Model, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.weights.peers import ANSWERS, unusable

PEERS = {  # layout -> the library that reads it
    "official": "timm",
    "official-bit": "timm",
    "big_vision-bit": "big_vision",
    "timm": "timm",
    "timm-bit": "timm",
    "hf": "transformers",
    "torchvision": "torchvision",
}


@dataclass(frozen=True)
class Parity:
    """How far a peer and vitkit are apart on the same pixels, or why that was not measured."""

    peer: str
    logits: float | None = None
    features: float | None = None
    tolerance: float = 0.0
    skipped: str = ""

    @property
    def ok(self) -> bool:
        measured = [d for d in (self.logits, self.features) if d is not None]
        return all(d <= self.tolerance for d in measured)


@torch.no_grad()
def compare(path: Path, model: Model, layout: Layout) -> Parity:
    """The file through its library's own loader and code, against vitkit with that library's numerics."""
    name = PEERS[layout.name]
    if name not in ANSWERS:
        return Parity(name, skipped="it is not among the libraries that vitkit runs")
    if reason := unusable(name):
        return Parity(name, skipped=reason)
    peer = f"{name} {version(name)}"
    config = peer_config(model.config, layout)
    if reason := unlike(config, layout):
        return Parity(peer, skipped=reason)
    ours = with_config(model, config)
    pixels = pixels_for(ours)
    logits, features = ANSWERS[name](path, config, layout.name)(pixels)
    our_features = ours.tokens(pixels) if isinstance(config, ViTConfig) else ours.features(pixels)
    our_logits = ours(pixels)
    return Parity(
        peer,
        logits=None if logits is None else float((logits - our_logits).abs().max()),
        features=float((features - our_features).abs().max()),
        tolerance=tolerance_of(config, our_logits),
    )


def peer_config(config: Config, layout: Layout) -> Config:
    """The model as the peer computes it; timm, which reads official files too, is told the GELU."""
    if PEERS[layout.name] != "timm":
        return layout.native(config)
    if isinstance(config, ResNetConfig):
        return bit.TIMM.native(config)
    native = timm.LAYOUT.native(config)
    assert isinstance(native, ViTConfig)
    return replace(native, gelu=config.gelu)


def unlike(config: Config, layout: Layout) -> str:
    """Why the peer cannot build this model at all."""
    if isinstance(config, ViTConfig) and PEERS[layout.name] == "timm" and config.positions != "1d":
        return f"timm has no {config.positions} positions"
    if isinstance(config, ViTConfig) and config.stem and config.covered != config.image_size:
        return f"{PEERS[layout.name]} pads a rest of pixels under a hybrid, and vitkit drops it"
    if isinstance(config, ViTConfig) and layout.name == "official" and not config.qkv_bias:
        return "timm reads official files with qkv biases only"
    return ""


def with_config(model: Model, config: Config) -> Model:
    """The same parameters under another configuration (of the same shapes)."""
    other = skeleton(config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def pixels_for(model: Model, seed: int = 0) -> Tensor:
    """Two images of noise in [-1, 1], the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, model.config.channels, *model.config.image_size, generator=generator) * 2 - 1


def tolerance_of(config: Config, logits: Tensor) -> float:
    """1e-5 for a ViT, 5e-5 where convolutions stand under it; in units of the largest logit above 1."""
    plain = isinstance(config, ViTConfig) and config.stem is None
    return (1e-5 if plain else 5e-5) * max(1.0, float(logits.abs().max()))
