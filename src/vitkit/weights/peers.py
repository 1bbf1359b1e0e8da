"""The libraries we are held against: each builds its own model of a file, with its own loader and code.

The only place that imports timm, transformers or torchvision, and only when asked.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Config
from vitkit.models.vit import ViTConfig

# pixels -> (logits, or None where the peer has no such head; tokens of a ViT, features of a ResNet)
Answer = Callable[[Tensor], tuple[Tensor | None, Tensor]]

CODE = {  # the module of each peer that must import
    "timm": "timm.models.vision_transformer",
    "transformers": "transformers.models.vit.modeling_vit",
    "torchvision": "torchvision.models.vision_transformer",
}


def unusable(name: str) -> str:
    """Why a peer cannot be asked: not installed, or installed and broken. Empty: it can."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        importlib.import_module(CODE[name])
    except Exception as error:
        return f"installed, but does not import ({' '.join(str(error).split())[:100]})"
    return ""


def state_in(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=True)


def timm_answer(path: Path, config: Config, layout: str) -> Answer:
    """timm, which reads official files too."""
    resnet = isinstance(config, ResNetConfig)
    peer = timm_resnet(config) if isinstance(config, ResNetConfig) else timm_vit(config)
    if layout.startswith("official"):
        peer.load_pretrained(str(path))
    else:
        peer.load_state_dict(state_in(path), strict=True)
    peer.eval()
    whole = isinstance(config, ResNetConfig) or not config.representation  # timm has no tanh layer

    def answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        z = peer.forward_features(pixels)
        features = z.mean((2, 3)) if resnet else z
        return (peer.forward_head(z) if whole else None), features

    return answer


def timm_vit(c: ViTConfig) -> Any:
    from timm.layers import HybridEmbed
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import _resnetv2

    options: dict[str, Any] = {}
    if c.stem:
        backbone = _resnetv2(layers=c.stem.blocks, in_chans=c.channels)
        options["embed_layer"] = partial(HybridEmbed, backbone=backbone, proj=True)
    return VisionTransformer(
        img_size=c.image_size,
        patch_size=c.patch,
        in_chans=c.channels,
        num_classes=c.classes,
        global_pool={"token": "token", "gap": "avg", "map": "map"}[c.head],
        embed_dim=c.width,
        depth=c.depth,
        num_heads=c.heads,
        mlp_ratio=c.hidden / c.width,
        qkv_bias=c.qkv_bias,
        class_token=bool(c.class_token),
        init_values=1e-5 if c.layer_scale else None,
        fc_norm=c.final_norm == "pooled",
        act_layer="gelu_tanh" if c.gelu == "tanh" else "gelu",
        **options,
    )


def timm_resnet(c: ResNetConfig) -> Any:
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    return ResNetV2(
        layers=c.blocks,
        width_factor=c.width // 64,
        num_classes=c.classes,
        in_chans=c.channels,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-8),
    )


def transformers_answer(path: Path, config: Config, layout: str) -> Answer:
    from transformers import ViTForImageClassification, ViTModel

    assert isinstance(config, ViTConfig)
    if config.classes:
        peer = ViTForImageClassification.from_pretrained(str(path), local_files_only=True).eval()

        def answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
            out = peer(pixels, output_hidden_states=True)
            return out.logits, peer.vit.layernorm(out.hidden_states[-1])

        return answer
    pooled = bool(config.representation)
    bare = ViTModel.from_pretrained(str(path), local_files_only=True, add_pooling_layer=pooled).eval()

    def bare_answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        out = bare(pixels)
        return out.pooler_output, out.last_hidden_state

    return bare_answer


def torchvision_answer(path: Path, config: Config, layout: str) -> Answer:
    from torchvision.models.vision_transformer import VisionTransformer

    assert isinstance(config, ViTConfig)
    peer = VisionTransformer(
        image_size=config.covered[0],  # torchvision refuses a rest of pixels
        patch_size=config.patch,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.hidden,
        num_classes=max(1, config.classes),
        representation_size=config.representation or None,
    )
    if not config.classes:
        peer.heads = peer.heads[:2] if config.representation else torch.nn.Identity()
    peer.load_state_dict(state_in(path), strict=True)
    peer.eval()

    def answer(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        z = peer._process_input(pixels[:, :, : config.covered[0], : config.covered[1]])
        z = peer.encoder(torch.cat([peer.class_token.expand(len(z), -1, -1), z], dim=1))
        return peer.heads(z[:, 0]), z

    return answer


ANSWERS: dict[str, Callable[[Path, Config, str], Answer]] = {
    "timm": timm_answer,
    "transformers": transformers_answer,
    "torchvision": torchvision_answer,
}
