"""A file through its own library and through vitkit: the same pixels, the largest difference."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.models.card import with_view
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Config, Model, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.options import parse_view
from vitkit.weights.formats import bit, timm
from vitkit.weights.formats.layout import Layout
from vitkit.weights.load import OWN, load
from vitkit.weights.save import format_of, layout_for, save

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


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, and how the result was checked."""

    source: str
    source_format: str
    out: str
    format: str
    parameters: int
    read_back: bool  # every array equal, bit for bit
    parity: Parity | None  # against the library whose format it is
    changed: float | None  # how far that library's numerics move the logits
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.read_back and (self.parity is None or self.parity.ok)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
    view: str = "model",
    **options: Any,
) -> Conversion:
    """Load, save, read back, compare with the peer; `out` appears only when all is equal.

    view: how images are brought to the model's size from now on, as in vitkit evaluate --view.
    """
    out = Path(out)
    format = format or format_of(out)
    if out.exists() and not overwrite:
        raise WeightsError(f"{out} exists; give another name, or --overwrite", code="file.exists")
    model = load(source, **options)
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    trial = out.with_name(f".checking-{out.name}")
    remove(trial)
    try:
        result = check(model, source, out, trial, format)
        if result.ok:
            remove(out)
            os.replace(trial, out)
    finally:
        remove(trial)
    return result


def check(model: Model, source: str | Path, out: Path, trial: Path, format: str) -> Conversion:
    layout = layout_for(model.config, format, out)
    notes = save(model, trial, format)
    again = load(trial, image_size=model.config.image_size, heads=getattr(model.config, "heads", None))
    same = model.state_dict().keys() == again.state_dict().keys() and all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    parity, changed = None, None
    if layout is not OWN:
        parity = compare(trial, model, layout)
        with torch.no_grad():
            pixels = pixels_for(model)
            native = with_config(model, layout.native(model.config))
            changed = float((model.eval()(pixels) - native(pixels)).abs().max())
    return Conversion(
        source=str(source),
        source_format=model.origin.format,
        out=str(out),
        format=layout.name,
        parameters=sum(p.numel() for p in model.parameters()),
        read_back=same,
        parity=parity,
        changed=changed,
        notes=(*model.origin.notes, *root_note(model), *notes),
    )


def root_note(model: Model) -> tuple[str, ...]:
    """By which of the two published conventions a ResNet's root is pooled."""
    if not isinstance(model.config, ResNetConfig):
        return ()
    whose = {"zeros": "BiT's own code", "-inf": "big_vision's bit_paper"}[model.config.root_padding]
    return (f"the root's max pooling is padded with {model.config.root_padding}, as in {whose}",)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
