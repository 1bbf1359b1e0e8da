"""Hold a file against the library whose format it is in: the same pixels through both, the largest difference.

The only place that imports a peer (timm, transformers, torchvision), and only when asked.
"""

import importlib
import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from vitkit.layouts import bit, timm
from vitkit.layouts.layout import Layout
from vitkit.models.resnet import ResNet, ResNetConfig
from vitkit.models.variants import Model, skeleton
from vitkit.models.vit import ViTConfig

CODE = {  # the module of each peer that must import
    "timm": "timm.models.vision_transformer",
    "transformers": "transformers.models.vit.modeling_vit",
    "torchvision": "torchvision.models.vision_transformer",
}
PEERS = {  # layout -> the library that reads it
    "official": "timm", "official-bit": "timm", "timm": "timm", "timm-bit": "timm",
    "hf": "transformers", "torchvision": "torchvision",
}  # fmt: skip


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


def tolerance_of(model: Model, logits: Tensor) -> float:
    """1e-5 for a ViT, 5e-5 where convolutions stand under it; in units of the largest logit above 1."""
    plain = isinstance(model.config, ViTConfig) and model.config.stem is None
    return (1e-5 if plain else 5e-5) * max(1.0, float(logits.abs().max()))


def pixels_for(model: Model, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, model.config.channels, *model.config.image_size, generator=generator) * 2 - 1


def with_config(model: Model, config: Any) -> Model:
    """The same parameters under another configuration (of the same shapes)."""
    other = skeleton(config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def as_peer(model: Model, layout: Layout) -> Model:
    """The model as the peer computes it; timm, which reads official files too, is told the GELU."""
    if PEERS[layout.name] != "timm":
        return with_config(model, layout.native(model.config))
    if isinstance(model.config, ResNetConfig):
        return with_config(model, bit.TIMM.native(model.config))
    return with_config(model, replace(timm.LAYOUT.native(model.config), gelu=model.config.gelu))


@torch.no_grad()
def compare(path: Path, model: Model, layout: Layout) -> Parity:
    """The file through its library's own loader and code, against vitkit with that library's numerics."""
    name = PEERS[layout.name]
    if reason := unusable(name):
        return Parity(name, skipped=reason)
    peer_name = f"{name} {version(name)}"
    if reason := unlike(model, layout):
        return Parity(peer_name, skipped=reason)
    ours = as_peer(model, layout)
    build = {"timm": timm_peer, "transformers": transformers_peer, "torchvision": torchvision_peer}[name]
    answer = build(path, ours, layout)
    pixels = pixels_for(ours)
    logits, features = answer(pixels)
    our_features = ours.tokens(pixels) if isinstance(model.config, ViTConfig) else ours.features(pixels)
    our_logits = ours(pixels)
    return Parity(
        peer_name,
        logits=None if logits is None else float((logits - our_logits).abs().max()),
        features=float((features - our_features).abs().max()),
        tolerance=tolerance_of(ours, our_logits),
    )


def unusable(name: str) -> str:
    """Why a peer cannot be asked: not installed, or installed and broken."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        importlib.import_module(CODE[name])
    except Exception as error:
        return f"installed, but does not import ({' '.join(str(error).split())[:100]})"
    return ""


def unlike(model: Model, layout: Layout) -> str:
    """Why the peer cannot build this model at all."""
    c = model.config
    if isinstance(c, ViTConfig) and PEERS[layout.name] == "timm" and c.positions != "1d":
        return f"timm has no {c.positions} positions"
    if isinstance(c, ViTConfig) and layout.name == "official" and not c.qkv_bias:
        return "timm reads official files with qkv biases only"
    return ""


def state_in(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=True)


def timm_peer(path: Path, model: Model, layout: Layout) -> Any:
    peer = timm_resnet(model.config) if isinstance(model.config, ResNetConfig) else timm_vit(model.config)
    if layout.name.startswith("official"):
        peer.load_pretrained(str(path))
    else:
        peer.load_state_dict(state_in(path), strict=True)
    peer.eval()
    resnet = isinstance(model, ResNet)
    whole = resnet or not model.config.representation  # timm has no tanh layer

    def answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        z = peer.forward_features(pixels)
        features = z.mean((2, 3)) if resnet else z
        return (peer.forward_head(z) if whole else None), features

    return answer


def timm_vit(c: ViTConfig) -> nn.Module:
    from timm.layers import HybridEmbed
    from timm.models.vision_transformer import VisionTransformer

    options: dict[str, Any] = {}
    if c.stem:
        from timm.models.vision_transformer_hybrid import _resnetv2

        backbone = _resnetv2(layers=c.stem.blocks, in_chans=c.channels)
        options["embed_layer"] = partial(HybridEmbed, backbone=backbone, proj=True)
    return VisionTransformer(
        img_size=c.image_size, patch_size=c.patch, in_chans=c.channels, num_classes=c.classes,
        global_pool={"token": "token", "gap": "avg", "map": "map"}[c.head], embed_dim=c.width, depth=c.depth,
        num_heads=c.heads, mlp_ratio=c.hidden / c.width, qkv_bias=c.qkv_bias, class_token=bool(c.class_token),
        init_values=1e-5 if c.layer_scale else None, fc_norm=c.final_norm == "pooled",
        act_layer="gelu_tanh" if c.gelu == "tanh" else "gelu", **options,
    )  # fmt: skip


def timm_resnet(c: ResNetConfig) -> nn.Module:
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    return ResNetV2(
        layers=c.blocks, width_factor=c.width // 64, num_classes=c.classes, in_chans=c.channels,
        stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8),
    )  # fmt: skip


def transformers_peer(path: Path, model: Model, layout: Layout) -> Any:
    from transformers import ViTForImageClassification, ViTModel

    kind = ViTForImageClassification if model.config.classes else ViTModel
    options = {} if model.config.classes else {"add_pooling_layer": bool(model.config.representation)}
    peer = kind.from_pretrained(str(path), local_files_only=True, **options).eval()

    def answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        if model.config.classes:
            out = peer(pixels, output_hidden_states=True)
            return out.logits, peer.vit.layernorm(out.hidden_states[-1])
        out = peer(pixels)
        return out.pooler_output, out.last_hidden_state

    return answer


def torchvision_peer(path: Path, model: Model, layout: Layout) -> Any:
    from torchvision.models.vision_transformer import VisionTransformer

    c = model.config
    peer = VisionTransformer(
        image_size=c.image_size[0], patch_size=c.patch, num_layers=c.depth, num_heads=c.heads, hidden_dim=c.width,
        mlp_dim=c.hidden, num_classes=max(1, c.classes), representation_size=c.representation or None,
    )  # fmt: skip
    if not c.classes:
        peer.heads = nn.Identity() if not c.representation else peer.heads[:2]
    peer.load_state_dict(state_in(path), strict=True)
    peer.eval()

    def answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        z = peer._process_input(pixels)
        z = peer.encoder(torch.cat([peer.class_token.expand(len(z), -1, -1), z], dim=1))
        return peer.heads(z[:, 0]), z

    return answer
