"""Convert a weight file to another format, and check the result against the library of that format."""

import importlib.util
import json
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
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.variants import Config, Model, skeleton
from vitkit.models.vit import ViT, ViTConfig
from vitkit.options import parse_view
from vitkit.weights.formats import formats
from vitkit.weights.formats.layout import Layout
from vitkit.weights.formats.timm_config import model_args
from vitkit.weights.load import load
from vitkit.weights.save import format_of, layout_for, save


@dataclass(frozen=True)
class Parity:
    """The largest difference between a peer library and vitkit on the same pixels, or why it is unknown."""

    peer: str
    logits: float | None = None
    features: float | None = None
    tolerance: float = 0.0
    skipped: str = ""

    @property
    def ok(self) -> bool:
        measured = [d for d in (self.logits, self.features) if d is not None]
        return all(d <= self.tolerance for d in measured)


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion and of its checks."""

    source: str
    source_format: str
    out: str
    format: str
    parameters: int
    read_back: bool  # every array equal, bit for bit
    parity: Parity | None  # against the library of the format
    changed: float | None  # the largest change of the logits by that library's numerics
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
    """Load, save, read back and compare with the peer library; `out` is written only if all checks pass.

    view: how images are resized for this model from now on, as in vitkit evaluate --view.
    """
    out = Path(out)
    format = format or format_of(out)
    if out.exists() and not overwrite:
        raise WeightsError(f"{out} exists; give another name, or --overwrite", code="file.exists")
    model = load(source, text=True, **options)
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    trial = out.with_name(f".checking-{out.name}")
    remove(trial)
    try:
        result = save_and_check(model, source, out, trial, format)
        if result.ok:
            remove(out)
            os.replace(trial, out)
    finally:
        remove(trial)
    return result


def save_and_check(model: Model, source: str | Path, out: Path, trial: Path, format: str) -> Conversion:
    """Save the model at `trial`, load it again, and compare it with the model and with the peer library."""
    given, model = model, formats()[format].equivalent(model) if format in formats() else model
    layout = layout_for(model.config, format, out)
    notes = save(given, trial, format)
    heads = getattr(model.config, "heads", None)
    loaded = load(trial, image_size=model.config.image_size, heads=heads, text=True)
    equal = model.state_dict().keys() == loaded.state_dict().keys() and all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    parity, changed = None, None
    if layout.peer:
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
        read_back=equal,
        parity=parity,
        changed=changed,
        notes=(*model.origin.notes, *root_note(model), *notes),
    )


def root_note(model: Model) -> tuple[str, ...]:
    """A note on which of the two published paddings the max pooling of a ResNet's root uses."""
    if not isinstance(model.config, ResNetConfig):
        return ()
    code = {"zeros": "BiT's own code", "-inf": "big_vision's bit_paper"}[model.config.root_padding]
    return (f"the root's max pooling is padded with {model.config.root_padding}, as in {code}",)


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@torch.no_grad()
def compare(path: Path, model: Model, layout: Layout) -> Parity:
    """Compare the file in its library's own loader and model with vitkit under that library's numerics."""
    name = layout.peer
    if name not in PEERS:
        return Parity(name, skipped="vitkit does not run this library")
    if reason := unusable(name):
        return Parity(name, skipped=reason)
    peer = f"{name} {version(name)}"
    config = peer_config(model.config, layout)
    if reason := not_comparable(config, layout):
        return Parity(peer, skipped=reason)
    native_model = with_config(model, config)
    pixels = pixels_for(native_model)
    peer_logits, peer_features = PEERS[name].load(path, config, layout.name)(pixels)
    features = native_model.tokens(pixels) if isinstance(native_model, ViT) else native_model.features(pixels)
    logits = native_model(pixels)
    return Parity(
        peer,
        logits=None if peer_logits is None else float((peer_logits - logits).abs().max()),
        features=float((peer_features - features).abs().max()),
        tolerance=tolerance_of(config, logits),
    )


def unusable(name: str) -> str:
    """Why a peer library cannot be used (not installed, or broken); empty if it can."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        importlib.import_module(PEERS[name].module)
    except Exception as error:
        return f"installed, but does not import ({' '.join(str(error).split())[:100]})"
    return ""


def peer_config(config: Config, layout: Layout) -> Config:
    """The configuration as the peer computes it; timm also reads official files, with any GELU."""
    if layout.peer != "timm":
        return layout.native(config)
    native = formats()["timm"].layout_for(config).native(config)
    if isinstance(config, ViTConfig) and isinstance(native, ViTConfig):
        return replace(native, gelu=config.gelu)
    return native


def not_comparable(config: Config, layout: Layout) -> str:
    """Why the peer cannot build this model; empty if it can."""
    rope = isinstance(config, ViTConfig) and config.rope != "none"
    if isinstance(config, ViTConfig) and layout.peer == "timm" and config.positions != "1d" and not rope:
        return f"timm has no {config.positions} positions"
    if isinstance(config, ViTConfig) and config.stem and config.covered != config.image_size:
        return f"{layout.peer} pads images of a hybrid to whole patches, and vitkit crops them"
    if isinstance(config, ViTConfig) and layout.name == "official" and not config.qkv_bias:
        return "timm reads official files with qkv biases only"
    if layout.name.startswith("official") and config.channels not in (1, 3):
        return f"timm reads official files of 1 or 3 channels only, not {config.channels}"
    stem = config.stem if isinstance(config, ViTConfig) else config
    if isinstance(stem, StemConfig | ResNetConfig) and layout.peer == "timm" and unknown_width(stem):
        return f"timm has no ResNet of width {stem.width}"
    if layout.peer == "torchvision" and (
        config.channels != 3 or config.image_size[0] != config.image_size[1]
    ):
        return "torchvision takes square images of 3 channels only"
    return ""


def unknown_width(resnet: StemConfig | ResNetConfig) -> bool:
    """Whether timm builds no ResNet of this width: a hybrid has the stem of one width only."""
    return resnet.width != 64 if isinstance(resnet, StemConfig) else bool(resnet.width % 64)


def with_config(model: Model, config: Config) -> Model:
    """The same parameters under another configuration with the same shapes."""
    other = skeleton(config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def pixels_for(model: Model, seed: int = 0) -> Tensor:
    """Two images of uniform noise in [-1, 1], fixed by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, model.config.channels, *model.config.image_size, generator=generator) * 2 - 1


def tolerance_of(config: Config, logits: Tensor) -> float:
    """1e-5 for a ViT and 5e-5 for models with convolutions, relative to the largest logit if above 1."""
    no_convolutions = isinstance(config, ViTConfig) and config.stem is None
    return (1e-5 if no_convolutions else 5e-5) * max(1.0, float(logits.abs().max()))


# pixels -> (logits, or None if the peer has no such head; tokens of a ViT or features of a ResNet)
Forward = Callable[[Tensor], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True)
class Peer:
    """A library that vitkit compares with."""

    module: str  # must import for the library to be usable
    load: Callable[[Path, Config, str], Forward]  # file, configuration, layout -> its forward pass


def read_state_dict(path: Path) -> dict[str, Tensor]:
    path = path / "model.safetensors" if path.is_dir() else path
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=True)


def load_timm(path: Path, config: Config, layout: str) -> Forward:
    """A timm model; timm also reads official files."""
    resnet = isinstance(config, ResNetConfig)
    if isinstance(config, ResNetConfig):
        peer = timm_resnet(config)
    else:
        assert isinstance(config, ViTConfig)
        peer = timm_eva(config) if layout == "timm-eva" else timm_vit(config)
    if layout.startswith("official"):
        peer.load_pretrained(str(path))
    else:
        peer.load_state_dict(read_state_dict(path), strict=True)
    peer.eval()
    # timm has no tanh layer, and without classes it returns the mean of the class and distillation tokens
    has_head = (
        not isinstance(config, ViTConfig)
        or config.representation_kind == "linear"
        or not (config.representation or (config.distilled and not config.classes))
    )

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        z = peer.forward_features(pixels)
        features = z.mean((2, 3)) if resnet else z
        return (peer.forward_head(z) if has_head else None), features

    return forward


def timm_vit(c: ViTConfig) -> Any:
    from timm.layers import HybridEmbed, LayerNorm, SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import _resnetv2

    options: dict[str, Any] = {}
    if c.stem:
        backbone = _resnetv2(layers=c.stem.blocks, in_chans=c.channels)
        options["embed_layer"] = partial(HybridEmbed, backbone=backbone, proj=True)
    if c.mlp == "swiglu":
        options |= {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU}
    kind: Any = VisionTransformerDistilled if c.distilled else VisionTransformer
    tanh = c.representation and c.representation_kind == "tanh"  # timm's head would be of another width
    outputs = 0 if tanh else c.classes or c.representation
    return kind(
        in_chans=c.channels,
        num_classes=outputs,
        pre_norm=c.input_norm,
        norm_layer=partial(LayerNorm, eps=c.norm_eps),
        dynamic_img_size=not c.stem and c.covered == c.image_size,  # else timm refuses the size
        **(model_args(c) | {"patch_size": c.patch} | options),
    )


def timm_eva(c: ViTConfig) -> Any:
    """timm's EVA-02 or DINOv3."""
    from timm.layers import LayerNorm
    from timm.models.eva import Eva

    return Eva(
        in_chans=c.channels,
        num_classes=c.classes,
        norm_layer=partial(LayerNorm, eps=c.norm_eps),
        dynamic_img_size=c.covered == c.image_size,
        **model_args(c),
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


TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}  # without text


def load_tower(path: Path, layout: str) -> Forward:
    """DINOv2, DINOv3, CLIP or SigLIP of transformers."""
    import transformers

    architecture = json.loads((path / "config.json").read_text("utf-8"))["architectures"][0]
    kind = getattr(transformers, TOWERS.get(architecture, architecture))
    peer = kind.from_pretrained(str(path), local_files_only=True).eval()
    resized = {"interpolate_pos_encoding": True} if layout in ("hf-clip", "hf-siglip") else {}

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        if "ForImageClassification" in architecture:
            return peer(pixels).logits, peer.base_model(pixels).last_hidden_state
        out = peer(pixels, **resized)
        if layout != "hf-clip":
            return out.pooler_output, out.last_hidden_state
        tower = getattr(peer, "vision_model", peer)
        embedded = out.pooler_output if architecture == "CLIPVisionModel" else out.image_embeds
        return embedded, tower.post_layernorm(out.last_hidden_state)

    return forward


def load_transformers(path: Path, config: Config, layout: str) -> Forward:
    from transformers import (
        DeiTForImageClassificationWithTeacher,
        DeiTModel,
        ViTForImageClassification,
        ViTModel,
    )

    assert isinstance(config, ViTConfig)
    if layout != "hf":
        return load_tower(path, layout)
    if config.distilled and config.classes:
        deit = DeiTForImageClassificationWithTeacher.from_pretrained(str(path), local_files_only=True).eval()
        return lambda pixels: (
            deit(pixels, interpolate_pos_encoding=True).logits,
            deit.deit(pixels, interpolate_pos_encoding=True).last_hidden_state,
        )
    if config.classes:
        peer = ViTForImageClassification.from_pretrained(str(path), local_files_only=True).eval()

        def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
            out = peer(pixels, output_hidden_states=True)
            return out.logits, peer.vit.layernorm(out.hidden_states[-1])

        return forward
    pooled = bool(config.representation)
    kind: Any = DeiTModel if config.distilled else ViTModel
    encoder = kind.from_pretrained(str(path), local_files_only=True, add_pooling_layer=pooled).eval()

    def encode(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        out = encoder(pixels)
        return out.pooler_output, out.last_hidden_state

    return encode


def load_torchvision(path: Path, config: Config, layout: str) -> Forward:
    from torchvision.models.vision_transformer import VisionTransformer

    assert isinstance(config, ViTConfig)
    peer = VisionTransformer(
        image_size=config.covered[0],  # torchvision accepts only whole patches
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
    peer.load_state_dict(read_state_dict(path), strict=True)
    peer.eval()

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor]:
        z = peer._process_input(pixels[:, :, : config.covered[0], : config.covered[1]])
        z = peer.encoder(torch.cat([peer.class_token.expand(len(z), -1, -1), z], dim=1))
        return peer.heads(z[:, 0]), z

    return forward


PEERS = {
    "timm": Peer("timm.models.vision_transformer", load_timm),
    "transformers": Peer("transformers.models.vit.modeling_vit", load_transformers),
    "torchvision": Peer("torchvision.models.vision_transformer", load_torchvision),
}
